"""Megatron-LM's arguments of a run: the table of pretrain_gpt.py.

Names, defaults and conditions were read in NVIDIA/Megatron-LM at d98e8a64dd, in
megatron/training/arguments.py unless a row says otherwise. `validate_args` there derives dp from
the number of processes. `--use-distributed-optimizer` is ZeRO 1; `--use-megatron-fsdp` is by
default ZeRO 3, and `--data-parallel-sharding-strategy` chooses. `--recompute-granularity selective`
recomputes `--recompute-modules` of every block, by default the attention core alone.
"""

from __future__ import annotations

from collections.abc import Callable

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Words,
    choice,
    constant,
    free,
    number,
    read_number,
    read_whole,
    reading,
    switch,
)
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.megatron.megatron_layouts import layout_blocks, layout_word
from parplan.planner.validation.block_modules import OFFLOADED, RECOMPUTED
from parplan.profiles.documents.ranges import COUNT, DEVICES
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision

CP_COMM_TYPES = {
    ContextForm.RING: "p2p",
    ContextForm.ALL_GATHER: "all_gather",
    ContextForm.ALL_TO_ALL: "a2a",
    ContextForm.TWO_LEVEL: "a2a+p2p",
}
SHARDED = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
FP8_RECIPES = {
    ProductFormat.FP8_DELAYED: "delayed",
    ProductFormat.FP8_CURRENT: "tensorwise",
    ProductFormat.FP8_BLOCK: "blockwise",
    ProductFormat.MXFP8: "mxfp8",
}
DEFAULT_MODULES = ("core_attn",)
DEFAULTS = Settings(etp=0, recompute_modules=DEFAULT_MODULES)  # etp 0: that of tp


# Arguments that change time or memory and have no price here: a file that has one is refused.
REFUSED = (
    "--optimizer-cpu-offload",
    "--cpu-offloading-num-layers",
    "--use-torch-fsdp2",
    "--deepspeed",
    "--deepspeed_config",
    "--hybrid-context-parallel",
    "--hybrid-layer-pattern",
    "--rampup-batch-size",
    "--encoder-num-layers",
    "--tensor-parallel-num-weight-shards",
    "--expert-tensor-parallel-num-weight-shards",
    "--outer-dp-sharding-strategy",
    "--moe-paged-stash",
    "--moe-latent-size",
    "--experimental-attention-variant",
    "--perform-rl-step",
    "--sft",
    "--spec",
    "--yaml-cfg",
    "--linear-attention-freq",
    "--moe-use-upcycling",
    "--kitchen-config-file",
    "--te-precision-config-file",
)


def uses_fsdp(settings: Settings) -> bool:
    """Tells that a run needs Megatron-FSDP, for gradients or parameters in parts."""
    return settings.zero >= 2


def _unequal(settings: Settings) -> bool:
    """Tells that the stages need a layout."""
    return settings.pp > 1 and settings.shorter_ends is None


def _layout(settings: Settings) -> Words | None:
    return (layout_word(settings.blocks, settings.mtp_layers),) if _unequal(settings) else None


def _virtual(settings: Settings) -> Words | None:
    equal = settings.virtual_stages > 1 and not _unequal(settings)
    return (f"{settings.virtual_stages}",) if equal else None


def _end(which: int) -> Callable[[Settings], Words | None]:
    def write(settings: Settings) -> Words | None:
        ends = settings.shorter_ends
        return () if settings.pp > 1 and ends is not None and ends[which] else None

    return write


def _near(settings: Settings) -> Words | None:
    if settings.near is None:
        return None
    return (f"{settings.near}", f"{settings.cp // settings.near}")


def _etp(settings: Settings) -> Words | None:
    return (f"{settings.etp}",) if settings.has_experts and settings.tp > 1 else None


def _instances(settings: Settings) -> Words | None:
    ranks = settings.zero_ranks
    return None if ranks is None else (f"{settings.replicas // ranks}",)


def _sharding(settings: Settings) -> Words | None:
    return (SHARDED[settings.zero],) if uses_fsdp(settings) else None


def _read_sharding(words: Words, facts: Facts) -> Facts:
    (word,) = words
    stages = {name: stage for stage, name in SHARDED.items()}
    if word not in stages:
        raise ValueError(f"{word} is none of {', '.join(stages)}")
    return {"zero": stages[word]} if facts.get("zero") == 3 else {}


def _modules(settings: Settings) -> Words | None:
    chosen = settings.recompute_modules
    selective = settings.recompute is Recompute.SELECTIVE
    return chosen if selective and chosen not in (None, DEFAULT_MODULES) else None


def _read_modules(words: Words, _: Facts) -> Facts:
    unknown = next((word for word in words if word not in RECOMPUTED), None)
    if unknown:
        raise ValueError(f"{unknown} is not priced, {', '.join(RECOMPUTED)} are")
    return {"recompute_modules": words}


def _read_offloaded(words: Words, facts: Facts) -> Facts:
    unknown = next((word for word in words if word not in OFFLOADED), None)
    if unknown:
        raise ValueError(f"{unknown} is not priced, {', '.join(OFFLOADED)} are")
    return {"offload_modules": words} if facts.get("offloads") else {}


def _method(settings: Settings) -> Words | None:
    if settings.recompute is not Recompute.FULL:
        return None
    return ("uniform",) if settings.recompute_blocks is None else ("block",)


def _num_layers(settings: Settings) -> Words | None:
    if settings.recompute is not Recompute.FULL:
        return None
    return (f"{settings.recompute_blocks or 1}",)


def _read_num_layers(words: Words, facts: Facts) -> Facts:
    """Units of several layers are priced as those of one (megatron_remarks.py)."""
    return {"recompute_blocks": read_number(words)} if facts.get("method") == "block" else {}


def _first_batch(words: Words, facts: Facts) -> Facts:
    """Reads the batch that a schedule such as `0:384 200B:768` begins with.

    A global batch size that is said too is the one that the schedule ends with, and counts.
    """
    if "global_batch_size" in facts:
        return {}
    first = " ".join(words).split()[:1]
    return {"global_batch_size": read_whole(tuple(word.partition(":")[2] for word in first), COUNT)}


def _dispatcher(settings: Settings) -> Words | None:
    if not settings.has_experts:
        return None
    return ("flex",) if settings.tokens_once else ("alltoall",)


def _read_dispatcher(words: Words, facts: Facts) -> Facts:
    """Reads how tokens reach their experts: `flex`, DeepEP or HybridEP, sends them once to a node.

    `allgather` brings every token to every rank, which is the same on a rank that has all experts.
    """
    alone = facts.get("ep", 1) * (facts.get("etp") or facts.get("tp", 1)) == 1
    if words[0] not in ("alltoall", "flex", *(["allgather"] if alone else [])):
        raise ValueError("alltoall and flex are priced, and allgather without expert parallelism")
    return {"tokens_once": words == ("flex",)}


def _read_distributed(_: Words, facts: Facts) -> Facts:
    """Divided inputs of blocks are priced as whole ones (megatron_remarks.py)."""
    if facts.get("recompute") is not Recompute.FULL or facts.get("sequence_parallel"):
        raise ValueError("it needs --recompute-granularity full without --sequence-parallel")
    return {}


def _type(words: Words) -> str:
    """Returns `fp32` or `bf16` of the names that arguments and configurations have for them."""
    return words[0].removeprefix("torch.").replace("float32", "fp32").replace("bfloat16", "bf16")


def read_second_moment(words: Words, facts: Facts) -> Facts:
    """Reads the type of the second moment, which is priced where it is that of the first."""
    both = facts.get("state_precision") is StatePrecision.BF16_MOMENTS
    if _type(words) != ("bf16" if both else "fp32"):
        raise ValueError("it is priced in the type of --exp-avg-dtype alone, bf16 or fp32")
    return {}


def read_main_gradients(words: Words, _: Facts) -> Facts:
    """Reads the type in which the optimizer takes the gradients of its shard: no price has it."""
    if _type(words) not in ("fp32", "bf16"):
        raise ValueError("fp32 and bf16 are priced")
    return {}


def read_wide(words: Words, _: Facts) -> Facts:
    """Reads a type that is priced in fp32 alone."""
    if _type(words) != "fp32":
        raise ValueError("fp32 alone is priced")
    return {}


def _read_reduced(words: Words, _: Facts) -> Facts:
    """Reads the type of gradients under Megatron-FSDP."""
    types = {"fp32": Precision.FP32, "bf16": Precision.BF16, "auto": Precision.BF16}
    if _type(words) not in types:
        raise ValueError("fp32 and bf16 are priced")
    return {"gradient_precision": types[_type(words)]}


def _read_program(words: Words, _: Facts) -> Facts:
    """Reads the kernels of blocks; Megatron-Core's own attention is not fused."""
    if words not in (("transformer_engine",), ("local",)):
        raise ValueError("transformer_engine and local are priced")
    return {"attention": AttentionKernel.UNFUSED} if words == ("local",) else {}


def _moments(settings: Settings) -> bool:
    return settings.state_precision is StatePrecision.BF16_MOMENTS


PARALLEL = (
    number("--tensor-model-parallel-size", "tp", 1),
    number("--pipeline-model-parallel-size", "pp", 1),
    Argument(
        name="--pipeline-model-parallel-layout",
        facts=("blocks", "virtual_stages"),
        write=_layout,
        read=lambda words, _: {"blocks": layout_blocks("".join(words))},
        source="megatron/core/transformer/pipeline_parallel_layer_layout.py",
    ),
    Argument(
        name="--num-virtual-stages-per-pipeline-rank",
        facts=("virtual_stages",),
        write=_virtual,
        read=lambda words, _: {"virtual_stages": read_number(words)},
    ),
    reading(
        "--virtual-pipeline-model-parallel-size",
        lambda words, _: {"virtual_stages": read_number(words)},
    ),
    reading(
        "--num-layers-per-virtual-pipeline-stage",
        lambda words, _: {"layers_per_virtual_stage": read_number(words)},
    ),
    Argument(
        name="--account-for-embedding-in-pipeline-split",
        facts=("blocks",),
        write=_end(0),
        read=lambda _, __: {"first_less": 1},
        source="megatron/core/transformer/transformer_config.py",
    ),
    Argument(
        name="--account-for-loss-in-pipeline-split",
        facts=("blocks",),
        write=_end(1),
        read=lambda _, __: {"last_less": 1},
        source="megatron/core/transformer/transformer_config.py",
    ),
    reading("--decoder-first-pipeline-num-layers", lambda words, _: {"first": read_number(words)}),
    reading("--decoder-last-pipeline-num-layers", lambda words, _: {"last": read_number(words)}),
    number("--context-parallel-size", "cp", 1),
    choice("--cp-comm-type", "context_form", CP_COMM_TYPES),
    Argument(
        name="--hierarchical-context-parallel-sizes",
        facts=("near",),
        write=_near,
        read=lambda words, _: {"near": read_whole(words, DEVICES)},
        source="megatron/core/model_parallel_config.py",
    ),
    number("--expert-model-parallel-size", "ep", 1),
    Argument(  # by default that of the other operators
        name="--expert-tensor-parallel-size",
        facts=("etp",),
        write=_etp,
        read=lambda words, _: {"etp": read_number(words)},
        source="megatron/core/model_parallel_config.py",
    ),
    switch("--sequence-parallel", "sequence_parallel"),
    switch("--use-tp-pp-dp-mapping", "order", MeshOrder.DP_PP_TP),
    switch("--tp-comm-overlap", "tp_overlap", when=lambda run: run.sequence_parallel),
)
SHARDING = (
    Argument(
        name="--use-distributed-optimizer",
        facts=("zero",),
        write=lambda settings: () if settings.zero else None,
        read=lambda _, __: {"zero": 1},
    ),
    Argument(
        name="--use-megatron-fsdp",
        facts=("zero",),
        write=lambda settings: () if uses_fsdp(settings) else None,
        read=lambda _, __: {"zero": 3},
        source="megatron/training/config/common_config.py",
    ),
    reading("--use-custom-fsdp", lambda _, __: {"zero": 3}),  # its name until 2025
    Argument(
        name="--data-parallel-sharding-strategy",
        facts=("zero",),
        write=_sharding,
        read=_read_sharding,
    ),
    Argument(
        name="--num-distributed-optimizer-instances",
        facts=("zero_ranks",),
        write=_instances,
        read=lambda words, _: {"instances": read_number(words)},
    ),
    switch("--overlap-grad-reduce", "overlap"),
    constant("--overlap-param-gather", when=lambda run: run.overlap and run.zero > 0),
)
OFFLOAD = (
    Argument(
        name="--fine-grained-activation-offloading",
        facts=("offload_modules",),
        write=lambda run: () if run.offload_modules else None,
        read=lambda _, __: {"offloads": True},
        source="megatron/core/transformer/transformer_config.py",
    ),
    Argument(
        name="--offload-modules",
        facts=("offload_modules",),
        write=lambda run: run.offload_modules or None,
        read=_read_offloaded,
        source="megatron/core/transformer/transformer_config.py",
    ),
)
RECOMPUTE = (
    choice(
        "--recompute-granularity",
        "recompute",
        {Recompute.SELECTIVE: "selective", Recompute.FULL: "full"},
    ),
    # releases of 2020 and 2021
    reading("--checkpoint-activations", lambda _, __: {"recompute": Recompute.FULL}),
    reading("--checkpoint-num-layers", lambda _, __: {}),
    reading(
        "--activations-checkpoint-method",
        lambda words, _: {"recompute": Recompute.FULL, "method": words[0]},
    ),
    reading("--activations-checkpoint-num-layers", _read_num_layers),
    reading("--recompute-activations", lambda _, __: {"recompute": Recompute.SELECTIVE}),
    Argument(
        name="--recompute-modules",
        facts=("recompute_modules",),
        write=_modules,
        read=_read_modules,
        source="megatron/core/transformer/transformer_config.py",
    ),
    Argument(
        name="--recompute-method",
        facts=("recompute_blocks",),
        write=_method,
        read=lambda words, _: {"method": words[0]},
    ),
    Argument(
        name="--recompute-num-layers",
        facts=("recompute_blocks",),
        write=_num_layers,
        read=_read_num_layers,
    ),
    reading("--distribute-saved-activations", _read_distributed),
)
BATCH = (
    number("--micro-batch-size", "micro_batch_size"),
    number("--global-batch-size", "global_batch_size"),
    reading("--step-batch-size-schedule", _first_batch),
)
TRAINING = (
    reading("--encoder-seq-length", lambda words, _: {"seq_length": read_number(words)}),
    number("--seq-length", "seq_length"),
    switch("--bf16", "precision", Precision.BF16),
    switch("--fp16", "precision", Precision.FP16),
    Argument(
        name="--grad-reduce-in-bf16",
        facts=("gradient_precision",),
        write=lambda run: () if run.gradient_precision is Precision.BF16 else None,
        read=lambda _, __: {"gradient_precision": Precision.BF16},
    ),
    reading("--megatron-fsdp-grad-comm-dtype", _read_reduced),
    reading("--megatron-fsdp-main-grads-dtype", _read_reduced),
    Argument(
        name="--fp8-format",
        facts=("products",),
        write=lambda run: ("hybrid",) if run.products in FP8_RECIPES else None,
        read=lambda _, __: {"products": ProductFormat.FP8_DELAYED},
    ),
    choice("--fp8-recipe", "products", FP8_RECIPES, ProductFormat.FP8_DELAYED),
    Argument(
        name="--fp4-format",
        facts=("products",),
        write=lambda run: ("e2m1",) if run.products is ProductFormat.NVFP4 else None,
        read=lambda _, __: {"products": ProductFormat.NVFP4},
    ),
    switch("--fp8-param-gather", "narrow_weights"),
    switch("--cross-entropy-loss-fusion", "fused_loss"),
    choice(
        "--optimizer",
        "optimizer",
        {Optimizer.ADAM: "adam", Optimizer.SGD_MOMENTUM: "sgd", Optimizer.MUON: "muon"},
        Optimizer.ADAM,
    ),
    constant("--use-precision-aware-optimizer", when=_moments),
    Argument(
        name="--exp-avg-dtype",
        facts=("state_precision",),
        write=lambda run: ("bf16",) if _moments(run) else None,
        read=lambda words, _: (
            {"state_precision": StatePrecision.BF16_MOMENTS} if words == ("bf16",) else {}
        ),
    ),
    Argument(
        name="--exp-avg-sq-dtype",
        facts=(),
        write=lambda run: ("bf16",) if _moments(run) else None,
        read=read_second_moment,
    ),
    reading("--main-grads-dtype", read_main_gradients),
    reading("--main-params-dtype", read_wide),
    reading("--transformer-impl", _read_program),
    Argument(
        name="--attention-backend",
        facts=("attention",),
        write=lambda run: ("unfused",) if run.attention is AttentionKernel.UNFUSED else None,
        read=lambda words, _: {
            "attention": AttentionKernel.UNFUSED if words == ("unfused",) else AttentionKernel.FLASH
        },
        source="megatron/core/transformer/transformer_config.py",
    ),
    number("--moe-expert-capacity-factor", "expert_capacity", 0.0),
    reading("--ddp-bucket-size", lambda words, _: {"bucket_elements": read_number(words)}),
)
# what Megatron-LM's own plans of experts and Megatron-FSDP need, whatever the plan says
NEEDED = (
    Argument(
        name="--moe-token-dispatcher-type",
        facts=("tokens_once",),
        write=_dispatcher,
        read=_read_dispatcher,
        source="megatron/core/transformer/moe/token_dispatcher.py",
    ),
    switch(
        "--overlap-moe-expert-parallel-comm", "overlap_exchanges", when=lambda run: run.has_experts
    ),
    constant("--moe-grouped-gemm", when=lambda run: run.has_experts),
    free("--ckpt-format", "fsdp_dtensor", when=uses_fsdp),
)
TABLE: tuple[Argument, ...] = (
    *PARALLEL,
    *SHARDING,
    *RECOMPUTE,
    *OFFLOAD,
    *BATCH,
    *TRAINING,
    *NEEDED,
)
