"""The layout, the host memory and the blocks of a plan, derived from its fields."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.plan import LayerRun, Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.stack import TowerDivision


def tokens_per_s(plan: AnyPlan) -> float:
    """Tokens/s on all devices."""
    return plan.training.tokens_per_step / plan.predicted.step_time_s.value


def host_gib(plan: AnyPlan) -> float:
    """Host GiB that the fullest node holds."""
    return fullest_node(plan, [memory.host for memory in plan.predicted.memory_gib])


def fullest_node(plan: AnyPlan, by_stage: Sequence[float]) -> float:
    """The sum of the fullest node, from what one device of each pipeline rank has on its host."""
    mesh, gpus_per_node = plan.mesh, plan.cluster.gpus_per_node
    by_rank = [by_stage[mesh.coordinates(rank)[0]] for rank in range(mesh.num_ranks)]
    return max(
        sum(by_rank[first : first + gpus_per_node])
        for first in range(0, len(by_rank), gpus_per_node)
    )


def layout_of(plan: AnyPlan) -> ParallelLayout:
    """Returns the mesh, schedule and micro-batch of a plan as a layout."""
    pipeline = plan.pipeline
    layer_plans = () if isinstance(plan, TracedPlan) else plan.layer_plans.values()
    return ParallelLayout(
        mesh=plan.mesh,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        micro_batch_size=pipeline.micro_batch_size,
        num_micro_batches=pipeline.num_micro_batches,
        micro_batches_of_replicas=pipeline.micro_batches_of_replicas,
        sequence_parallel=any(each.sequence_parallel for each in layer_plans),
        actions=pipeline.actions,
        tp_overlap=pipeline.tp_overlap,
        chunked=plan.chunks is not None,
        access=Access.BLOCK if plan.chunks is None else plan.chunks.access,
        states_on_host=_states_on_host(plan),
        weights_over_data=any(each.divides_over_data for each in layer_plans),
        tower=next((each.tower for each in layer_plans if each.tower), TowerDivision.TENSOR),
        pools=plan.pools,
    )


def _states_on_host(plan: AnyPlan) -> bool:
    """True if the states of all layers are on the hosts by a choice of the layout."""
    if isinstance(plan, TracedPlan):
        return plan.states_on_host
    blocks = [each for each in plan.layer_plans.values() if each.block]
    return bool(blocks) and all(Offload.STATES in each.offload for each in blocks)


def blocks_of(plan: Plan, run: LayerRun) -> range:
    """Returns the numbers of the blocks in a run of layers, from 0; embedding and head are none."""
    if plan.layer_plans[run.plan].layer is not LayerKind.BLOCK:
        return range(0)
    return range(run.first - 1, run.last)
