"""Which layers run on which rank: the plan's stages spelled out, layer by layer, and what the executor requires of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodels.mesh import Mesh
from costmodels.schedules import Schedule
from executor.divisions import validate_divisions
from executor.foreign.rules import validate_foreign
from planner.plan import LayerPlan, LayerRun, Plan
from profiles.errors import ConfigError
from profiles.model import LayerKind
from profiles.spec import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """One layer of the model with the plan it runs on. `index` counts embedding 0, blocks 1 to L, head L + 1."""

    kind: LayerKind
    index: int
    plan: LayerPlan

    @property
    def name(self) -> str:
        return f"block{self.index - 1}" if self.kind is LayerKind.BLOCK else self.kind.value


def stage_layers(plan: Plan) -> tuple[tuple[PlacedLayer, ...], ...]:
    """The layers of every (virtual) stage in the order of the forward pass."""
    return tuple(tuple(layer for run in stage.layers for layer in _run_layers(plan, run)) for stage in plan.stages)


def _run_layers(plan: Plan, run: LayerRun) -> Iterator[PlacedLayer]:
    if run.plan not in plan.layer_plans:
        raise ConfigError(f"stages: layer plan {run.plan!r} is not among layer_plans", hint="make the plan again")
    layer_plan = plan.layer_plans[run.plan]
    if (run.blocks is None) == (layer_plan.layer is LayerKind.BLOCK):
        raise ConfigError(f"stages: layer plan {run.plan!r} is for {layer_plan.layer}, it is used with blocks {run.blocks}")
    if run.blocks is not None:
        for block in range(run.blocks[0], run.blocks[1] + 1):
            yield PlacedLayer(kind=LayerKind.BLOCK, index=block + 1, plan=layer_plan)
    else:
        index = 0 if layer_plan.layer is LayerKind.EMBEDDING else plan.model.num_layers + 1
        yield PlacedLayer(kind=layer_plan.layer, index=index, plan=layer_plan)


def local_stages(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """The indices of the stages that a pipeline rank runs."""
    return tuple(k for k, stage in enumerate(plan.stages) if stage.rank == pipeline_rank)


def effective_zero(layer: PlacedLayer, mesh: Mesh) -> int:
    """The ZeRO stage that runs: with one data-parallel rank there is nothing to shard over."""
    return layer.plan.zero if mesh.dp > 1 else 0


def torchrun_line(plan: Plan, path: str = "plan.yaml") -> str:
    """The command that starts as many ranks as the plan's mesh has."""
    ranks, per_node = plan.mesh.num_ranks, plan.cluster.gpus_per_node
    if ranks <= per_node or ranks % per_node:
        return f"torchrun --nproc-per-node {ranks} -m executor {path}"
    return f"torchrun --nnodes {ranks // per_node} --nproc-per-node {per_node} -m executor {path}"


def validate(plan: Plan) -> None:
    """Raises ConfigError for a plan that is well-formed but that torch's parts cannot run as it stands."""
    _validate_stages(plan)
    _validate_batch(plan)
    _validate_precision(plan)
    validate_divisions(plan)
    _validate_tied(plan)
    validate_foreign(plan)


def _validate_stages(plan: Plan) -> None:
    layers = [layer.index for stage in stage_layers(plan) for layer in stage]
    if layers != list(range(plan.model.num_layers + 2)):
        raise ConfigError(f"stages: they hold {len(layers)} layers, not each of the model's {plan.model.num_layers + 2} once and in order")
    if not all(stage.layers for stage in plan.stages):
        raise ConfigError("stages: a stage holds no layer")
    expected = [k % plan.mesh.pp for k in range(plan.mesh.pp * plan.pipeline.virtual_stages)]
    if [stage.rank for stage in plan.stages] != expected:
        raise ConfigError(f"stages: virtual stage k runs on rank k % pp, so the ranks must be {expected}")


def _validate_batch(plan: Plan) -> None:
    pipeline, mesh = plan.pipeline, plan.mesh
    sequences = pipeline.micro_batch_size * pipeline.num_micro_batches * mesh.dp
    if sequences != plan.training.global_batch_size:
        raise ConfigError(
            f"pipeline: {pipeline.num_micro_batches} micro-batches of {pipeline.micro_batch_size} on {mesh.dp} data-parallel ranks are "
            f"{sequences} sequences, global_batch_size is {plan.training.global_batch_size}")
    rounds = max(1, pipeline.num_micro_batches // mesh.pp)
    if pipeline.schedule is Schedule.INTERLEAVED and pipeline.num_micro_batches % rounds:
        raise ConfigError(f"pipeline: interleaved needs num_micro_batches {pipeline.num_micro_batches} to be a multiple of {rounds}")
    if pipeline.schedule is not Schedule.INTERLEAVED and pipeline.virtual_stages > 1:
        raise ConfigError(f"pipeline: {pipeline.schedule} has one stage per rank, virtual_stages is {pipeline.virtual_stages}")
    if pipeline.schedule is Schedule.ONE_F_ONE_B and pipeline.num_micro_batches < mesh.pp:
        raise ConfigError(f"pipeline: 1f1b needs at least {mesh.pp} micro-batches, found {pipeline.num_micro_batches}")


def _validate_precision(plan: Plan) -> None:
    training = plan.training
    if training.precision is Precision.FP16:
        raise ConfigError("training: the executor has no loss scaling, so it does not run fp16", hint="use bf16 or fp32")
    if plan.training.fp8_matmuls:
        raise ConfigError("training: the executor does not run fp8_matmuls", hint="make a plan without --fp8")
    if training.gradient_precision is not Precision.FP32:
        raise ConfigError(f"training: gradients accumulate in fp32, gradient_precision is {training.gradient_precision}")


def _validate_tied(plan: Plan) -> None:
    """A tied weight's two gradients are added as they are held after the reduction over dp: both whole or both sharded."""
    if not plan.model.tied_embeddings or plan.mesh.dp == 1:
        return
    stages = stage_layers(plan)
    embedding, head = stages[0][0].plan.zero, stages[-1][-1].plan.zero
    same_rank = plan.mesh.pp == 1
    if (same_rank and embedding != head) or (embedding == 0) != (head == 0):
        wanted = "the same zero" if same_rank else "zero 0 both or neither"
        raise ConfigError(
            f"layer_plans: the tied embedding has zero {embedding} and the head zero {head}, they need {wanted}",
            hint="give embedding and head one zero stage")
