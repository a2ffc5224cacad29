"""Tiny models and hand-made plans for the tests of the executor."""

from __future__ import annotations

from dataclasses import asdict

from costmodels.mesh import Mesh
from costmodels.schedules import Schedule
from costmodels.sharding import Sharding, placements
from planner.plan import (
    PLAN_VERSION,
    Breakdown,
    Candidates,
    LayerPlan,
    LayerRun,
    Objective,
    OperatorPlacement,
    Pipeline,
    Plan,
    Prediction,
    Quantity,
    Redundancy,
    SearchRecord,
    StageMemory,
    StagePlan,
    Status,
)
from profiles.hardware import Cluster, Device, Link
from profiles.model import LayerKind
from profiles.provenance import Kind
from profiles.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from profiles.stack import AttentionKernel
from profiles.transformer import build_graph

SEQ_LENGTH = 16

GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8, ffn_hidden_size=64, vocab_size=100,
    max_seq_length=SEQ_LENGTH)
LLAMA = ModelSpec(
    name="tiny-llama", num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_hidden_size=48, vocab_size=100,
    max_seq_length=SEQ_LENGTH, norm=Norm.RMS_NORM, positions=Positions.ROTARY, gated_ffn=True, linear_bias=False, qkv_bias=False,
    tied_embeddings=False)

_LINK = Link(name="link", bytes_per_s=1e9, latency_s=1e-6, source="made up")
CLUSTER = Cluster(
    name="test", nodes=1, gpus_per_node=8, intra_node=_LINK, nics_per_node=1, nic=_LINK, host_memory_bytes=2**34, pcie_bytes_per_s=1e9,
    device=Device(
        name="test", memory_bytes=2**34, memory_bytes_per_s=1e11, peak_flops_per_s={"bf16": 1e12, "fp32": 1e12}, num_sms=1,
        context_bytes=0, source="made up"))


def even_blocks(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, the remainder on the first stages."""
    return tuple(num_layers // num_stages + (k < num_layers % num_stages) for k in range(num_stages))


def make_plan(
    model: ModelSpec = GPT, *, pp: int = 1, dp: int = 1, tp: int = 1, sp: bool = False, zero: tuple[int, ...] = (0,),
    recompute: tuple[str, ...] | str = (), recompute_ends: bool = False, schedule: Schedule = Schedule.ONE_F_ONE_B, virtual_stages: int = 1,
    blocks: tuple[int, ...] | None = None, num_micro_batches: int = 2, global_batch_size: int = 8,
    attention: AttentionKernel = AttentionKernel.FLASH, precision: Precision = Precision.FP32,
) -> Plan:
    """A plan with `zero` of the blocks cycling through the given stages; embedding and head have the first.

    `blocks` is the number of blocks of each (virtual) stage; `recompute` "full" is every operator of a block,
    and of embedding and head too with `recompute_ends`.
    """
    training = TrainingSpec(
        global_batch_size=global_batch_size, seq_length=SEQ_LENGTH, precision=precision, attention=attention)
    pipeline = Pipeline(
        schedule=schedule, virtual_stages=virtual_stages, micro_batch_size=global_batch_size // dp // num_micro_batches,
        num_micro_batches=num_micro_batches)
    layer_plans = {}
    for kind in LayerKind:
        for stage in sorted(set(zero)):
            names = recompute if kind is LayerKind.BLOCK or recompute_ends else ()
            layer_plans[f"{kind}-{stage}"] = _layer_plan(model, training, kind, stage, Sharding(tp=tp, sequence_parallel=sp), names)
    return Plan(
        plan_version=PLAN_VERSION, model=model, cluster=CLUSTER, training=training, mesh=Mesh(pp=pp, dp=dp, tp=tp), pipeline=pipeline,
        layer_plans=layer_plans, stages=_stages(pp, zero, blocks or even_blocks(model.num_layers, pp * virtual_stages)),
        predicted=_prediction(pp), search=_search())


def _layer_plan(
    model: ModelSpec, training: TrainingSpec, kind: LayerKind, zero: int, sharding: Sharding, recompute: tuple[str, ...] | str,
) -> LayerPlan:
    layer = build_graph(model, training, 1).layer_class(kind)
    names = tuple(operator.name for operator in layer.operators)
    operators = {operator.name: OperatorPlacement(**asdict(placements(operator, sharding))) for operator in layer.operators}
    return LayerPlan(
        layer=kind, sequence_parallel=sharding.sequence_parallel, zero=zero, recompute=names if recompute == "full" else tuple(recompute),
        operators=operators)


def _stages(pp: int, zero: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[StagePlan, ...]:
    stages = []
    first = 0
    for k, count in enumerate(blocks):
        runs = [LayerRun(plan=f"block-{zero[b % len(zero)]}", blocks=(b, b)) for b in range(first, first + count)]
        if k == 0:
            runs.insert(0, LayerRun(plan=f"embedding-{zero[0]}"))
        if k == len(blocks) - 1:
            runs.append(LayerRun(plan=f"head-{zero[0]}"))
        stages.append(StagePlan(rank=k % pp, layers=tuple(runs)))
        first += count
    return tuple(stages)


def _prediction(pp: int) -> Prediction:
    one = Quantity(value=1.0, kind=Kind.ANALYTIC)
    zero = Quantity(value=0.0, kind=Kind.ANALYTIC)
    return Prediction(
        step_time_s=one, tokens_per_s_per_gpu=one, mfu=one, memory_gib=tuple(_memory(stage) for stage in range(pp)),
        breakdown=Breakdown(
            compute_s=one, recompute_s=zero, tp_comm_s=zero, dp_comm_s=zero, pp_comm_s=zero, pp_bubble_s=zero, optimizer_s=zero),
        redundancy_gib=Redundancy(
            parameters=0.0, gradients=0.0, optimizer=0.0, activations=0.0, temporaries=0.0, total=0.0, kind=Kind.ANALYTIC))


def _memory(stage: int) -> StageMemory:
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve", "total"), 0.0)
    return StageMemory(stage=stage, capacity=1.0, kind=Kind.ANALYTIC, **sizes)


def _search() -> SearchRecord:
    return SearchRecord(
        objective=Objective.THROUGHPUT, status=Status.ESTIMATE, value=1.0, bound=0.0, gap=1.0, fastest_step_time_s=1.0,
        candidates=Candidates(considered=1, pruned=0, solved=1, left=0))
