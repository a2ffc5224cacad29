"""Options that commands share, by section of the help, and the records that pack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parplan.commands.style import LONGEST_S, List, Number, Share, Whole, option, packs, together

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
PRECISIONS = ("bf16", "fp16", "fp32")
NARROW = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
STATE_PRECISIONS = ("fp32", "bf16-moments", "fp8-moments", "bf16")
OPTIMIZERS = ("adam", "adam-8bit", "muon", "adafactor", "sgd", "sgd-momentum")
ATTENTION = ("flash", "unfused")
BASE_WEIGHTS = ("bf16", "int8")
BASELINES = "Baselines"
LAYOUT = "Layout"
WHAT = "What to train"
WHERE = "On what"
AIM = "Objective"
PINS = "Pins"
SEARCH = "Search"
OUTPUT = "Output"
STAGE_RECOMPUTE = (
    "Recompute by pipeline stage: the share of the first stage's layers that run again, from which "
    "the others follow by Merak's rule; shares by stage such as 0.5,0.25,0, the last one repeats; "
    "or memory, the fewest with which each stage fits."
)
STDOUT = Path("-")  # the value of --output that writes to stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options for the model, the training and the machine; None where the user left one open."""

    model: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    cluster: str | None = None
    gpus_per_node: int | None = None
    host_memory: str | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    state_precision: str | None = None
    optimizer: str | None = None
    fp8: bool = False
    narrow_weights: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    base_weights: str | None = None
    images_per_sequence: int | None = None
    image_tokens: int | None = None
    expert_imbalance: float = 1.0
    expert_capacity: float = 0.0
    document_lengths: str | None = None
    stack: str | None = None
    attention: str | None = None
    profile: str | None = None
    force_profile: bool = False
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of traced modules."""

    trace: bool = False
    shards: str | None = None
    stages: str | None = None
    cross_skips: bool = False
    tp_rules: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOptions:
    """Pinned and forbidden choices as the user gave them."""

    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    context_form: tuple[str, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None
    mesh_order: tuple[str, ...] | None = None
    zero: tuple[int, ...] | None = None
    zero_ranks: int | None = None
    zero_by_operator: bool = False
    recompute: tuple[str, ...] | None = None
    recompute_first_stage: str | None = None
    sequence_parallel: bool | None = None
    tp_overlap: tuple[int, ...] | None = None
    tp_across_nodes: bool = False
    megatron_sharding: bool = False
    weights_over_data: bool | None = None
    offload: tuple[str, ...] | None = None
    chunk_communication: str | None = None
    chunk_access: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The objective and the limits of a search."""

    objective: str = "throughput"
    prefer: str | None = None
    points: int | None = None
    max_slowdown: float | None = None
    memory_slack: float | None = None
    memory_margin: float | None = None
    oom_risk: float | None = None
    memory_limit: str | None = None
    time_limit: float | None = None
    solver: str = "cbc"
    explain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """A layout by hand, the input of `plan estimate`."""

    pp: int = 1
    dp: int | None = None
    tp: int = 1
    cp: int = 1
    context_form: str | None = None
    ep: int = 1
    etp: int = 1
    mesh_order: str | None = None
    micro_batch_size: int = 1
    schedule: str | None = None
    schedule_file: Path | None = None
    virtual_stages: int = 1
    zero: int = 0
    own_zero: tuple[str, ...] = ()
    zero_ranks: int | None = None
    offload: tuple[str, ...] | None = None
    host_blocks: int | None = None
    host_optimizer: int | None = None
    eviction: str | None = None
    chunk_communication: str | None = None
    chunk_access: str | None = None
    memory_limit: str | None = None
    keep_on_host: tuple[str, ...] | None = None
    recompute: str = "none"
    recompute_first_stage: str | None = None
    sequence_parallel: bool = False
    tp_overlap: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Destinations of the results."""

    output: Path | None = None
    plot: Path | None = None
    as_json: bool = False

    @property
    def plan_file(self) -> str:
        """The name of the plan file, empty where the plan goes to stdout or nowhere."""
        return "" if self.output in (None, STDOUT) else str(self.output)


def pin(name: str, item: click.ParamType[Any], metavar: str, text: str) -> Callable[[Any], Any]:
    """Returns an option for the allowed values of a choice, separated by commas."""
    return option(PINS, name, type=List(item), metavar=metavar, help=text)


training_options = together(
    option(
        WHAT,
        "--global-batch-size",
        type=Whole("global_batch_size"),
        metavar="N",
        help="Sequences in a step. [default: the model's, fewer of longer sequences]",
    ),
    option(
        WHAT,
        "--seq-length",
        type=Whole("seq_length"),
        metavar="N",
        help="Tokens in a sequence. [default: the model's]",
    ),
    option(
        WHAT,
        "--precision",
        type=click.Choice((*PRECISIONS, *NARROW)),
        help="Precision of weights and activations, or a format of the blocks' products beside "
        "bf16. [default: bf16, fp16 where the GPU has no bf16, or the profile's]",
    ),
    option(
        WHAT,
        "--gradient-precision",
        type=click.Choice(PRECISIONS),
        help="Precision in which gradients accumulate and are reduced. [default: fp32]",
    ),
    option(
        WHAT,
        "--state-precision",
        type=click.Choice(STATE_PRECISIONS),
        help="Precision of the optimizer's states of bf16 parameters: a copy and moments in fp32, "
        "moments in bf16 or fp8 beside the copy, or all in bf16 without a copy. [default: the "
        "stack's]",
    ),
    option(
        WHAT,
        "--optimizer",
        type=click.Choice(OPTIMIZERS),
        help="Optimizer: its states and its update are priced and run. [default: adam]",
    ),
    option(
        WHAT,
        "--fp8",
        is_flag=True,
        help="Run the products of the blocks in fp8, in the first format that the stack has.",
    ),
    option(
        WHAT,
        "--narrow-weights",
        is_flag=True,
        help="Gather the weights of such products in their format, and keep no copy in 16 bits "
        "where the stack needs none.",
    ),
    option(
        WHAT,
        "--images-per-sequence",
        type=Whole("images_per_sequence"),
        metavar="N",
        help="Images of a sequence that pass the tower of the model; 0: text alone, without the "
        "tower. [default: 1]",
    ),
    option(
        WHAT,
        "--image-tokens",
        type=Whole("image_tokens"),
        metavar="N",
        help="Tokens of the language model that an image becomes, for a tower that takes images "
        "of any size. [default: the model's]",
    ),
    option(
        WHAT,
        "--expert-imbalance",
        type=Number(),
        default=1.0,
        metavar="FACTOR",
        help="Copies of tokens on the rank with the fullest experts, over the mean. [default: 1, "
        "balanced]",
    ),
    option(
        WHAT,
        "--expert-capacity",
        type=Number(),
        default=0.0,
        metavar="FACTOR",
        help="Copies of tokens that each expert takes, over the mean; the rest is dropped. "
        "[default: all]",
    ),
    option(
        WHAT,
        "--document-lengths",
        metavar="FILE|MEAN",
        help="Documents that sequences are packed from, between which attention reads nothing: a "
        "file with a length on each line, or a length and a count; or the mean of exponential "
        "lengths. [default: sequences are read whole]",
    ),
    option(
        WHAT,
        "--stack",
        metavar="NAME|FILE",
        help="Software stack that trains: a name of `plan stacks`, or a YAML. [default: "
        "megatron-core, or the profile's]",
    ),
    option(
        WHAT,
        "--attention",
        type=click.Choice(ATTENTION),
        help="Attention kernel. [default: the stack's]",
    ),
)
fine_tuning_options = together(
    option(
        WHAT,
        "--lora-rank",
        type=Whole("lora_rank"),
        metavar="N",
        help="Rank of the adapters of --lora-targets. All other parameters are then frozen.",
    ),
    option(
        WHAT,
        "--lora-targets",
        type=List(click.STRING),
        default=(),
        metavar="NAME,..",
        help="Products of the blocks that get an adapter: qkv, proj, fc1, fc2, names of Hugging "
        "Face modules such as q_proj, or all-linear.",
    ),
    option(
        WHAT,
        "--freeze",
        type=List(click.STRING),
        default=(),
        metavar="PART,..",
        help="Parts that are not trained: embedding, head, norms, tower, projector, blocks:0-15, "
        "all.",
    ),
    option(
        WHAT,
        "--base-weights",
        type=click.Choice(BASE_WEIGHTS),
        help="Frozen weights of the blocks: in the precision of training, or in 8 bits with "
        "scales. [default: bf16]",
    ),
)
machine_options = together(
    option(WHERE, "--gpus", type=Whole("gpus"), metavar="N", help="Number of GPUs."),
    option(
        WHERE,
        "--gpu",
        metavar="NAME",
        help="GPU, a name of `plan clusters`. [default: a100-80gb, or the profile's]",
    ),
    option(
        WHERE,
        "--gpus-per-node",
        type=Whole("gpus_per_node"),
        metavar="N",
        help="GPUs in a node. [default: the cluster's]",
    ),
    option(
        WHERE,
        "--cluster",
        metavar="FILE",
        help="Cluster YAML instead of --gpu; it may give the number of GPUs.",
    ),
    option(
        WHERE,
        "--host-memory",
        metavar="SIZE",
        help="Host memory of a node, such as 240GiB. [default: the cluster's]",
    ),
    option(
        WHERE,
        "--profile",
        metavar="FILE",
        help="Hardware profile of `plan profile` or `plan calibrate`.",
    ),
    option(
        WHERE,
        "--force-profile",
        is_flag=True,
        help="Use the profile even for another device, stack or precision, or beside other prices.",
    ),
)
target_options = together(
    option(
        WHAT,
        "--model",
        metavar="NAME|PATH|PKG.MOD:FUNC",
        help="Model: a name of `plan models`, a YAML of that form, a Hugging Face config.json, or "
        "a function that makes a module.",
    ),
    training_options,
    fine_tuning_options,
    option(
        WHAT,
        "--module",
        metavar="huggingface|PKG.MOD:FUNC",
        help="Module that runs: transformers' module for the config.json, or the result of your "
        "function. [default: parplan's]",
    ),
    machine_options,
    packs("target", TargetOptions),
)
micro_batch_option = option(
    LAYOUT,
    "--micro-batch-size",
    type=Whole("micro_batch_size"),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences in a micro-batch.",
)
trace_options = together(
    option(
        WHAT,
        "--trace",
        is_flag=True,
        help="Trace the model of a config.json even if its family is described.",
    ),
    option(
        PINS,
        "--shards",
        type=click.Choice(SHARDS),
        help="Cut of a traced module into the shards that stages consist of: quota, equal "
        "parameters; or merge, the narrowest cuts. [default: quota]",
    ),
    option(
        PINS,
        "--stages",
        metavar="RULE|N,..|NAME,..",
        help="Stages of a traced module: uniform, parameters, ilp, shards by stage, or the "
        "submodules at which all but the first stage begin. [default: ilp]",
    ),
    option(
        PINS,
        "--cross-skips",
        is_flag=True,
        help="Let skip connections of a traced module cross stages.",
    ),
    option(
        PINS,
        "--tp-rules",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="YAML with names of submodules under column, row, vocabulary and replicated, which "
        "override the tensor parallelism that a trace derives.",
    ),
    packs("tracing", TraceOptions),
)
search_options = together(
    option(
        AIM,
        "--max-slowdown",
        type=Number(),
        metavar="SHARE",
        help="Largest slowdown against the fastest plan, for the objectives memory and peak. The "
        "fastest plan uses no host memory if one fits without. [default: 0.1]",
    ),
    option(
        AIM,
        "--memory-slack",
        type=Number(),
        metavar="SHARE",
        help="For the objective memory, memory first: the fastest plan that has at most this share "
        "more redundant memory than the leanest plan of all, which may take any time.",
    ),
    option(
        AIM,
        "--memory-margin",
        type=Number(),
        metavar="SHARE",
        help="Share of each device that stays free. [default: from measured runs]",
    ),
    option(
        AIM,
        "--oom-risk",
        type=Share(),
        metavar="SHARE",
        help="Probability that the plan runs out of memory, such as 1%; measured runs give the "
        "margin.",
    ),
    option(
        AIM,
        "--memory-limit",
        metavar="SIZE",
        help="Memory that a plan may fill on a device, such as 72GiB; replaces the margin.",
    ),
    pin("--pp", Whole("pp"), "N,..", "Pipeline stages allowed."),
    pin("--dp", Whole("dp"), "N,..", "Data parallel degrees allowed."),
    pin("--tp", Whole("tp"), "N,..", "Tensor parallel degrees allowed."),
    pin(
        "--cp",
        Whole("cp"),
        "N,..",
        "Context parallel degrees allowed: ranks that divide every sequence. [default: 1; others "
        "from 16,384 tokens on, or with fewer sequences than GPUs]",
    ),
    pin(
        "--context-form",
        click.Choice(CONTEXT_FORMS),
        "NAME,..",
        f"Forms of context parallelism allowed: {', '.join(CONTEXT_FORMS)}. [default: those that "
        "the stack runs]",
    ),
    pin(
        "--ep",
        Whole("ep"),
        "N,..",
        "Expert parallel degrees allowed: ranks over which whole experts are divided.",
    ),
    pin(
        "--etp",
        Whole("etp"),
        "N,..",
        "Tensor parallel degrees of every expert allowed: 1 or tp.",
    ),
    pin(
        "--micro-batch-size",
        Whole("micro_batch_size"),
        "N,..",
        "Sequences in a micro-batch allowed.",
    ),
    pin(
        "--virtual-stages",
        Whole("virtual_stages"),
        "N,..",
        "Model chunks per pipeline rank allowed.",
    ),
    pin(
        "--schedule",
        click.Choice(SCHEDULES),
        "NAME,..",
        f"Pipeline schedules allowed: {', '.join(SCHEDULES)}.",
    ),
    pin(
        "--mesh-order",
        click.Choice(MESH_ORDERS),
        "NAME,..",
        "Orders of the axes over the ranks allowed, outermost first: "
        f"{', '.join(MESH_ORDERS)}. [default: those that the stack can start in]",
    ),
    pin("--zero", click.IntRange(0, 3), "0..3,..", "ZeRO stages allowed."),
    option(
        PINS,
        "--zero-ranks",
        type=Whole("neighbours"),
        metavar="N",
        help="Neighbouring ranks that hold one copy of sharded states, where N divides dp. "
        "[default: all]",
    ),
    pin(
        "--recompute",
        click.Choice(RECOMPUTE),
        "NAME,..",
        f"Recompute levels allowed: {', '.join(RECOMPUTE)}.",
    ),
    option(
        PINS,
        "--recompute-first-stage",
        metavar="SHARE,..|memory",
        help=STAGE_RECOMPUTE,
    ),
    option(
        PINS,
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Require or forbid sequence parallelism where tp > 1.",
    ),
    pin(
        "--tp-overlap",
        click.IntRange(0, 3),
        "0..3,..",
        "Levels of sub-pipelined tensor parallelism allowed where tp > 1. [default: the levels "
        "that the stack runs]",
    ),
    option(PINS, "--tp-across-nodes", is_flag=True, help="Let tensor parallelism leave the node."),
    option(
        PINS,
        "--zero-by-operator",
        is_flag=True,
        help="Also try two ZeRO stages for the operators of a block, which takes longer.",
    ),
    option(
        PINS,
        "--megatron-sharding",
        is_flag=True,
        help="Divide every operator over tp as Megatron does.",
    ),
    option(
        PINS,
        "--weights-over-data/--no-weights-over-data",
        default=None,
        help="Require or forbid that operators of a block are divided over dp as well as tp: by "
        "batch or by weight, each by its own. [default: tried where the stack runs it]",
    ),
    pin(
        "--offload",
        click.Choice(SEARCHED_OFFLOAD),
        "WHAT,..",
        "Host contents: of the blocks optimizer (states), parameters (with the optimizer's), "
        "activations; lookup, the token table; of a traced module states; or none. [default, for "
        "every objective: all with --host-memory, else only if nothing fits without]",
    ),
    pin(
        "--chunk-access",
        click.Choice(ACCESS),
        "WHAT,..",
        "Unit of a block in chunks that has to be on the device together: block, operator. "
        "[default: block, and operator if nothing fits by blocks]",
    ),
    option(
        PINS,
        "--chunk-communication",
        type=click.Choice(CHUNK_COMMUNICATION),
        help="Gather and reduce all chunks of a group at once, or a single one after the other. "
        "[default: group]",
    ),
    option(
        PINS,
        "--forbid",
        multiple=True,
        metavar="NAME=VALUE",
        help="Choice that no plan may use, such as tp=8 or recompute=full; may be repeated.",
    ),
    option(
        SEARCH,
        "--time-limit",
        type=Number(max=LONGEST_S),
        metavar="SECONDS",
        help="Time after which everything stops, with the best plan so far and its gap.",
    ),
    option(
        SEARCH,
        "--solver",
        type=click.Choice(("cbc", "highs")),
        default="cbc",
        show_default=True,
        help="MILP solver.",
    ),
    packs("pins", PinOptions),
    packs("flags", SearchFlags),
)
objective_options = together(
    option(
        AIM,
        "--objective",
        type=click.Choice(("throughput", "memory", "peak", "pareto")),
        default="throughput",
        show_default=True,
        help="Quantity to minimise: the step time; within --max-slowdown of the fastest step, the "
        "redundant memory or the peak of the fullest GPU; or the front of time and memory. Only "
        "GPU memory counts. Host offload, as far as --offload allows it, never increases it.",
    ),
    option(
        AIM,
        "--prefer",
        type=click.Choice(PREFERENCES),
        help="Plan to take among those inside the error band of the fastest: the fastest, the one "
        "with the least memory on its fullest GPU, or the one that loses least when compute or a "
        "bandwidth is 20 % off. [default: fastest]",
    ),
    option(
        AIM,
        "--points",
        type=Whole("num_points"),
        metavar="N",
        help="Approximate number of plans of the pareto objective. [default: 16]",
    ),
)
explain_option = option(
    SEARCH, "--explain", is_flag=True, help="List the candidates that were not searched, and why."
)
as_json = option(OUTPUT, "--json", "as_json", is_flag=True, help="Print only JSON on stdout.")
packed_result = packs("result", ResultOptions)

trust_module_option = option(
    OUTPUT,
    "--trust-module",
    is_flag=True,
    help="Run the code of the plan's module even if it lies outside the current folder and the "
    "installed packages.",
)
