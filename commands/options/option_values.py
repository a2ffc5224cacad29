"""Values that options take."""

from __future__ import annotations

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "early-recompute",
    "last-no-recompute",
    "scp",
    "zbv",
    "dualpipev",
)
MESH_ORDERS = ("pp-dp-tp", "dp-pp-tp")
CONTEXT_FORMS = ("ring", "all-gather", "all-to-all", "two-level")
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("states", "activations", "optimizer", "parameters", "lookup")
SEARCHED_OFFLOAD = ("optimizer", "parameters", "activations", "lookup", "states", "none")
EVICTION = ("opt", "lru", "fifo")
CHUNK_COMMUNICATION = ("group", "single")
ACCESS = ("block", "operator")
PREFERENCES = ("fastest", "leanest", "robust")
SHARDS = ("quota", "merge")
SEARCH_METHODS = (
    "ours",
    "flat-program",
    "dynamic-program",
    "recursive-halving",
    "depth-first",
    "alleviation",
    "mcmc",
    "tree-search",
    "genetic",
    "policy-gradient",
    "random",
    "greedy",
    "exhaustive",
)
PRECISIONS = ("bf16", "fp16", "fp32")
NARROW = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
STATE_PRECISIONS = ("fp32", "bf16-moments", "fp8-moments", "bf16")
OPTIMIZERS = ("adam", "adam-8bit", "muon", "adafactor", "sgd", "sgd-momentum")
ATTENTION = ("flash", "unfused")
BASE_WEIGHTS = ("bf16", "int8")
LAUNCHERS = (
    "megatron",
    "megatron-bridge",
    "torchtitan",
    "deepspeed",
    "fsdp2",
    "huggingface",
    "galvatron",
    "accelerate",
)
OWN_SPACES = ("parplan", "none")  # of --for: every plan of a stack, with and without a program
SEARCHED_FOR = (*LAUNCHERS, *OWN_SPACES)
STAGE_RECOMPUTE = (
    "Recompute by pipeline stage: the share of the first stage's layers that run again, from which "
    "the others follow by Merak's rule; shares by stage such as 0.5,0.25,0, the last one repeats; "
    "or memory, the fewest with which each stage fits."
)
