"""The layers of each rank: the plan's stages spelled out, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.instructions import Instruction, instruction_lists
from parplan.costmodels.schedules.schedule import Schedule, csv_rows
from parplan.planner.plan.plan import LayerPlan, LayerRun, Plan
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    ModelGraph,
    ModelPart,
    layer_kind,
)
from parplan.profiles.models.transformer import build_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """One layer of the model with its layer plan.

    `index` is 0 for the embedding, 1 to L for blocks and L + 1 for the head.
    """

    kind: LayerKind
    index: int
    plan: LayerPlan

    @property
    def block(self) -> int:
        """The number of a block in the model, from 0."""
        return self.index - 1

    @property
    def name(self) -> str:
        return f"block{self.block}" if self.kind is LayerKind.BLOCK else self.kind.value


def stage_layers(plan: Plan) -> tuple[tuple[PlacedLayer, ...], ...]:
    """Return the layers of every (virtual) stage in the order of the forward pass."""
    graph = build_graph(plan.model, plan.training, 1)
    return tuple(
        tuple(layer for run in stage.layers for layer in _run_layers(plan, run, graph))
        for stage in plan.stages
    )


def _run_layers(plan: Plan, run: LayerRun, graph: ModelGraph) -> Iterator[PlacedLayer]:
    if run.plan not in plan.layer_plans:
        raise ConfigError(
            f"stages: layer plan {run.plan!r} is not among layer_plans", hint="make the plan again"
        )
    layer_plan = plan.layer_plans[run.plan]
    for index in run.indices:
        kind = layer_kind(index, plan.model.num_blocks)
        if layer_plan.layer is not kind:
            raise ConfigError(
                f"stages: layer {index} is of kind {kind}, "
                f"its plan {run.plan} is of kind {layer_plan.layer}",
                hint="make the plan again",
            )
        if layer_plan.block and layer_plan.key(graph) != graph.key(index):
            raise ConfigError(
                f"stages: layer {index} is of class {graph.key(index)}, "
                f"its plan {run.plan} is of class {layer_plan.block}",
                hint="make the plan again",
            )
        yield PlacedLayer(kind=kind, index=index, plan=layer_plan)


def local_stages(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """Return the indices of the stages that a pipeline rank runs."""
    return tuple(k for k, stage in enumerate(plan.stages) if stage.rank == pipeline_rank)


def reads_batches(plan: Plan, pipeline_rank: int) -> bool:
    """Return True if a pipeline rank reads the batches of its data-parallel rank.

    The first stage reads ids and the last one targets. Each stage of an external module runs the
    module's own forward pass, which reads the ids.
    """
    ends = {plan.stages[0].rank, plan.stages[-1].rank}
    return plan.module is not None or pipeline_rank in ends


def reads_images(plan: Plan, pipeline_rank: int) -> bool:
    """Return True if a layer of a pipeline rank reads images, or their places."""
    if plan.model.tower is None:
        return False
    graph, stages = build_graph(plan.model, plan.training, 1), stage_layers(plan)
    return any(
        graph.layer_class(graph.key(layer.index)).part in (ModelPart.PATCHES, ModelPart.PROJECTOR)
        for k in local_stages(plan, pipeline_rank)
        for layer in stages[k]
    )


def rank_tokens(plan: Plan) -> int:
    """Return the tokens of each sequence that a rank has."""
    return plan.training.seq_length // plan.mesh.cp


def action_rows(plan: AnyPlan, num_micro_batches: int | None = None) -> tuple[str, ...]:
    """Return the actions of every pipeline rank, one CSV line each. Raises ConfigError.

    costmodels/schedules/actions.py defines the format. The lists are of the data-parallel ranks
    with the most micro-batches, or with a given number.
    """
    pipeline = plan.pipeline
    count = num_micro_batches or pipeline.num_micro_batches
    return pipeline.actions or csv_rows(
        pipeline.schedule, plan.mesh.pp, count, pipeline.virtual_stages
    )


def plan_instructions(plan: AnyPlan) -> tuple[tuple[Instruction, ...], ...]:
    """Return what every pipeline rank does in a step. Raises ConfigError.

    A plan without a pipeline runs one micro-batch after the other, whatever its schedule.
    """
    if plan.mesh.pp == 1:
        alone = csv_rows(Schedule.ONE_F_ONE_B, 1, plan.pipeline.num_micro_batches)
        return instruction_lists(alone)
    return instruction_lists(action_rows(plan))


def recomputes_ahead(plan: Plan) -> bool:
    """Return True if an action list has a recompute ahead of its gradient."""
    return plan.mesh.pp > 1 and any(
        ActionKind.RECOMPUTE.value in text for text in action_rows(plan)
    )


def zero_ranks(layer: PlacedLayer, mesh: Mesh) -> int:
    """Return how many neighbouring replicas hold one copy of the layer's states together."""
    if layer.plan.highest_zero and layer.plan.zero_ranks:
        return layer.plan.zero_ranks
    return mesh.replicas


def expert_shards(replicas: int, mesh: Mesh) -> int:
    """Return how many ranks hold one copy of the experts' states, among neighbouring replicas."""
    return max(1, replicas * mesh.tp // (mesh.ep * mesh.etp))


def effective_zero(layer: PlacedLayer, mesh: Mesh, operator: str = "") -> int:
    """Return the ZeRO stage that runs, that of the layer or of one of its operators.

    A copy on one rank has nothing to shard, but states on the host can be gathered.
    """
    gathers = zero_ranks(layer, mesh) > 1 or Offload.STATES in layer.plan.offload
    return layer.plan.own_zero.get(operator, layer.plan.zero) if gathers else 0


def torchrun_line(plan: AnyPlan, path: str = "plan.yaml", others: Sequence[AnyPlan] = ()) -> str:
    """Return the command that starts as many ranks as the plan's mesh has.

    Pools have nodes of their own; a comment names those whose nodes run another number of ranks.

    others   plans of further pools of the job, whose files `path` names too
    """
    nodes = [_nodes_of(each) for each in (plan, *others)]
    count, (_, first) = sum(number for number, _ in nodes), nodes[0]
    several = f"--nnodes {count} " if count > 1 else ""
    unlike = ", ".join(
        f"--nproc-per-node {ranks} on the nodes of pool {pool}"
        for pool, (_, ranks) in enumerate(nodes)
        if ranks != first
    )
    line = f"torchrun {several}--nproc-per-node {first} -m parplan.executor {path}"
    return f"{line}  # {unlike}" if unlike else line


def _nodes_of(plan: AnyPlan) -> tuple[int, int]:
    """Return the nodes that a plan runs on, and the ranks on each."""
    ranks, per_node = plan.mesh.num_ranks, plan.cluster.gpus_per_node // plan.cluster.hosts_per_node
    return (1, ranks) if ranks <= per_node or ranks % per_node else (ranks // per_node, per_node)


def layer_operators(plan: Plan, layer_plan: LayerPlan) -> tuple[str, ...]:
    """Return the names of the operators of layers that run on `layer_plan`."""
    return tuple(operator.name for operator in layer_class_of(plan, layer_plan).operators)


def layer_class_of(plan: Plan, layer_plan: LayerPlan) -> LayerClass:
    """Return the operators of layers that run on `layer_plan`, for micro-batches of the plan."""
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    return graph.layer_class(layer_plan.key(graph))
