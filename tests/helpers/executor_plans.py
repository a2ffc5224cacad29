"""Tiny models and hand-made plans for the tests of the executor."""

from __future__ import annotations

from dataclasses import asdict, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding, of_tower
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import (
    PLAN_VERSION,
    LayerPlan,
    LayerRun,
    OperatorPlacement,
    Plan,
    StagePlan,
)
from parplan.planner.plan.prediction import (
    Breakdown,
    Prediction,
    Quantity,
    Redundancy,
    SearchRecord,
    StageMemory,
)
from parplan.profiles.machines.hardware import Cluster, Device, Link
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.operator_graph import (
    BlockClass,
    LayerKey,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorKind,
)
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL, AttentionKernel, ContextForm, TowerDivision

SEQ_LENGTH = 16

GPT = ModelSpec(
    name="tiny-gpt",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=100,
    max_seq_length=SEQ_LENGTH,
)
LLAMA = ModelSpec(
    name="tiny-llama",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    vocab_size=100,
    max_seq_length=SEQ_LENGTH,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
)
MIXTRAL = replace(
    LLAMA,
    name="tiny-mixtral",
    num_layers=2,
    ffn_hidden_size=0,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=24,
)

_LINK = Link(name="link", bytes_per_s=1e9, latency_s=1e-6, source="made up")
CLUSTER = Cluster(
    name="test",
    nodes=1,
    gpus_per_node=8,
    intra_node=_LINK,
    nics_per_node=1,
    nic=_LINK,
    host_memory_bytes=2**34,
    pcie_bytes_per_s=1e9,
    device=Device(
        name="test",
        memory_bytes=2**34,
        memory_bytes_per_s=1e11,
        peak_flops_per_s={"bf16": 1e12, "fp32": 1e12},
        num_sms=1,
        context_bytes=0,
        source="made up",
    ),
)


def even_blocks(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, the remainder on the first stages."""
    return tuple(
        num_layers // num_stages + (k < num_layers % num_stages) for k in range(num_stages)
    )


def make_plan(
    model: ModelSpec = GPT,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    ep: int = 1,
    cp: int = 1,
    form: ContextForm | None = None,
    etp: int = 1,
    sp: bool = False,
    zero: tuple[int, ...] = (0,),
    recompute: tuple[str, ...] | str = (),
    recompute_ends: bool = False,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    virtual_stages: int = 1,
    blocks: tuple[int, ...] | None = None,
    num_micro_batches: int = 2,
    shares: tuple[int, ...] = (),
    global_batch_size: int = 8,
    attention: AttentionKernel = AttentionKernel.FLASH,
    precision: Precision = Precision.FP32,
    actions: tuple[str, ...] = (),
    fine_tuning: FineTuning | None = None,
    tower: TowerDivision = TowerDivision.TENSOR,
    tp_rows: int = 1,
) -> Plan:
    """Returns a plan whose blocks cycle through the stages in `zero`.

    Embedding and head have the first ZeRO stage. `blocks` is the number of blocks of each (virtual)
    stage; `recompute` "full" is every operator of a block, and of embedding and head too with
    `recompute_ends`. `shares` are the micro-batches of each replica, if they differ.
    """
    num_micro_batches = max(shares, default=num_micro_batches)
    training = TrainingSpec(
        global_batch_size=global_batch_size,
        seq_length=SEQ_LENGTH,
        precision=precision,
        attention=attention,
        fine_tuning=fine_tuning,
        stack=NEUTRAL,
    )
    pipeline = PipelinePlan(
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=global_batch_size // (sum(shares) or dp * num_micro_batches),
        num_micro_batches=num_micro_batches,
        micro_batches_of_replicas=shares,
        actions=actions,
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, cp=cp, context_form=form, tp_rows=tp_rows),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=pipeline.micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=sp,
        actions=actions,
    )
    ranks = [layout.rank_of(stage) for stage in range(pp * virtual_stages)]
    layer_plans = {}
    graph = build_graph(model, training, 1)
    divided = replace(layout.sharding, cp=1, context_form=None, etp=etp)
    for key in graph.keys:
        own = divided
        if tower is not TowerDivision.TENSOR:
            own = of_tower(divided, graph.layer_class(key).part, tower)
        for stage in sorted(set(zero)):
            names = recompute if key.role is LayerKind.BLOCK or recompute_ends else ()
            layer_plans[f"{key}-{stage}"] = _layer_plan(graph, key, stage, own, names)
    return Plan(
        plan_version=PLAN_VERSION,
        model=model,
        cluster=replace(CLUSTER, gpus_per_node=pp * dp * cp * tp),
        training=training,
        pipeline=pipeline,
        mesh=Mesh(pp=pp, dp=dp, tp=tp, ep=ep, etp=etp, cp=cp, context_form=form, tp_rows=tp_rows),
        layer_plans=layer_plans,
        stages=_stages(
            graph, ranks, zero, blocks or even_blocks(model.num_blocks, pp * virtual_stages)
        ),
        predicted=_prediction(pp),
        search=_search(),
    )


def _layer_plan(
    graph: ModelGraph,
    key: LayerKey,
    zero: int,
    sharding: Sharding,
    recompute: tuple[str, ...] | str,
) -> LayerPlan:
    layer = graph.layer_class(key)
    names = tuple(operator.name for operator in layer.operators)
    operators = {
        operator.name: OperatorPlacement(**asdict(placements(operator, sharding)))
        for operator in layer.operators
    }
    return LayerPlan(
        layer=key.role,
        block=key.name if isinstance(key, BlockClass) else "",
        sequence_parallel=sharding.sequence_parallel,
        zero=zero,
        recompute=names if recompute == "full" else _of_layer(graph, names, recompute),
        operators=operators,
        tower=sharding.runs_tower,
    )


def _of_layer(
    graph: ModelGraph, names: tuple[str, ...], recompute: tuple[str, ...] | str
) -> tuple[str, ...]:
    """The operators of `recompute` without those that other layers alone have."""
    others = {each.name for layer in graph for each in layer.operators} - set(names)
    return tuple(name for name in recompute if name not in others)


def _stages(
    graph: ModelGraph, ranks: list[int], zero: tuple[int, ...], blocks: tuple[int, ...]
) -> tuple[StagePlan, ...]:
    stages = []
    first = 0
    for k, count in enumerate(blocks):
        runs = [
            LayerRun(plan=f"{graph.key(b + 1)}-{zero[b % len(zero)]}", first=b + 1, last=b + 1)
            for b in range(first, first + count)
        ]
        if k == 0:
            runs.insert(0, LayerRun(plan=f"embedding-{zero[0]}", first=0, last=0))
        if k == len(blocks) - 1:
            head = sum(blocks) + 1
            runs.append(LayerRun(plan=f"head-{zero[0]}", first=head, last=head))
        stages.append(StagePlan(rank=ranks[k], layers=tuple(runs)))
        first += count
    return tuple(stages)


def _prediction(pp: int) -> Prediction:
    quantity = Quantity(value=1.0, kind=Kind.ANALYTIC)
    zero = Quantity(value=0.0, kind=Kind.ANALYTIC)
    return Prediction(
        step_time_s=quantity,
        tokens_per_s_per_gpu=quantity,
        mfu=quantity,
        memory_gib=tuple(_memory(stage) for stage in range(pp)),
        breakdown=Breakdown(
            compute_s=quantity,
            recompute_s=zero,
            tp_comm_s=zero,
            dp_comm_s=zero,
            pp_comm_s=zero,
            pp_bubble_s=zero,
            optimizer_s=zero,
        ),
        redundancy_gib=Redundancy(
            parameters=0.0,
            gradients=0.0,
            optimizer=0.0,
            activations=0.0,
            temporaries=0.0,
            total=0.0,
            kind=Kind.ANALYTIC,
        ),
    )


def _memory(stage: int) -> StageMemory:
    sizes = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve", "total"),
        0.0,
    )
    return StageMemory(stage=stage, capacity=1.0, kind=Kind.ANALYTIC, **sizes)


def _search() -> SearchRecord:
    return SearchRecord.of_estimate(1.0, 1.0)


# How one operator is divided over the tensor-parallel axis: "features" are its outputs', "sums" the
# dim it sums over, whose partial sums are all-reduced, or reduce-scattered over sequence or batch.
_ACTIVATIONS = {
    "whole": (),
    "batch": ("Shard(0)@tp",),
    "sequence": ("Shard(1)@tp",),
    "features": ("Shard(2)@tp",),
}
_SUMS = {"sums": "whole", "sums-sequence": "sequence", "sums-batch": "batch"}


def division(operator: Operator, choice: str) -> OperatorPlacement:
    """The placements of one operator that is divided so."""
    names = [parameter.name for parameter in operator.parameters]
    if choice in _SUMS:
        return OperatorPlacement(
            parameters={name: ("Shard(1)@tp",) if name == "weight" else () for name in names},
            input=("Shard(2)@tp",),
            output=_ACTIVATIONS[_SUMS[choice]],
        )
    if operator.kind is OperatorKind.MATMUL and choice == "features":
        return OperatorPlacement(
            parameters=dict.fromkeys(names, ("Shard(0)@tp",)), input=(), output=("Shard(2)@tp",)
        )
    return OperatorPlacement(
        parameters=dict.fromkeys(names, ()), input=_ACTIVATIONS[choice], output=_ACTIVATIONS[choice]
    )


Division = dict[str, str]

OPERATORS = (
    "norm1",
    "qkv",
    "rotary",
    "attention",
    "attention_out",
    "residual1",
    "norm2",
    "fc1",
    "activation",
    "fc2",
    "residual2",
)
WHOLE: Division = dict.fromkeys(OPERATORS, "whole")
BATCH: Division = dict.fromkeys(OPERATORS, "batch")
SEQUENCE: Division = dict.fromkeys(OPERATORS, "sequence") | {
    "rotary": "features",
    "attention": "features",
}  # as Ulysses
MEGATRON: Division = WHOLE | {
    "qkv": "features",
    "rotary": "features",
    "attention": "features",
    "attention_out": "sums",
    "fc1": "features",
    "activation": "features",
    "fc2": "sums",
}
_NORMS = ("norm1", "residual1", "norm2", "residual2")
MEGATRON_SEQUENCE: Division = (
    MEGATRON
    | dict.fromkeys(_NORMS, "sequence")
    | {"attention_out": "sums-sequence", "fc2": "sums-sequence"}
)
_FEED_FORWARD = ("norm2", "fc1", "activation", "fc2")
TOKEN_FEED_FORWARD: Division = MEGATRON_SEQUENCE | dict.fromkeys(_FEED_FORWARD, "sequence")
BATCH_FEED_FORWARD: Division = MEGATRON | dict.fromkeys(_FEED_FORWARD, "batch")
BATCH_ATTENTION: Division = (
    MEGATRON | dict.fromkeys(OPERATORS[:7], "batch") | {"fc2": "sums-batch", "residual2": "batch"}
)
HIDDEN_STREAM: Division = MEGATRON | {"residual1": "features", "residual2": "features"}
# no two neighbours alike
PATCHWORK: Division = {
    "norm1": "sequence",
    "qkv": "batch",
    "rotary": "features",
    "attention": "batch",
    "attention_out": "sequence",
    "residual1": "features",
    "norm2": "batch",
    "fc1": "features",
    "activation": "sequence",
    "fc2": "sums-sequence",
    "residual2": "whole",
}


def with_divisions(plan: Plan, *divisions: Division) -> Plan:
    """Returns `plan` with its blocks divided by `divisions` in turn.

    Their other choices, and embedding and head, stay.
    """
    graph = build_graph(plan.model, plan.training, 1).block
    plans = dict(plan.layer_plans)

    def divided(run: LayerRun) -> LayerRun:
        if not blocks_of(plan, run):
            return run
        turn = blocks_of(plan, run)[0] % len(divisions)
        name = f"{run.plan}-{turn}"
        operators = {
            operator.name: division(operator, divisions[turn][operator.name])
            for operator in graph.operators
        }
        plans[name] = replace(plan.layer_plans[run.plan], operators=operators)
        return replace(run, plan=name)

    stages = tuple(
        replace(stage, layers=tuple(divided(run) for run in stage.layers)) for stage in plan.stages
    )
    used = {run.plan for stage in stages for run in stage.layers}
    return replace(
        plan,
        stages=stages,
        layer_plans={name: plan for name, plan in plans.items() if name in used},
    )


def recomputing(plan: Plan, operators: set[str]) -> Plan:
    """Returns the plan with recompute of those of the operators that a block has."""
    layer_plans = {
        name: replace(each, recompute=tuple(op for op in each.operators if op in operators))
        for name, each in plan.layer_plans.items()
        if each.layer is LayerKind.BLOCK
    }
    return replace(plan, layer_plans={**plan.layer_plans, **layer_plans})
