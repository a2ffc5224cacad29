"""Rules on plans whose blocks are held in chunks (executor/chunks)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import OFFLOAD_OF, StateLocation
from parplan.executor.placed_layers import recomputes_ahead
from parplan.executor.rules.rule import Refusal, rule, with_layer_plan
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.profiles.models.operator_graph import LayerKind

_IN_CHUNKS = OFFLOAD_OF[StateLocation.HOST]


@rule(
    why="chunks come and go around whole passes of the executor's own blocks, one after the "
    "other, over all of dp",
    action="hold the blocks in no chunks, or set what it says",
)
def chunks(plan: Plan) -> Iterator[Refusal]:
    if plan.chunks is None:
        return
    obstacle = _unchunkable(plan)
    if obstacle:
        yield Refusal(
            problem=obstacle,
            action="set chunks to null, and take optimizer and parameters out of offload",
            nearest=no_chunks(plan),
        )
        return
    if plan.pipeline.tp_overlap:
        yield Refusal(
            problem=f"pipeline: tp_overlap {plan.pipeline.tp_overlap} with chunks, whose blocks "
            "run whole",
            action="set tp_overlap to 0",
            nearest=replace(plan, pipeline=replace(plan.pipeline, tp_overlap=0)),
        )
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.layer is LayerKind.BLOCK:
            yield from _block_refusals(plan, name, layer_plan)
    for rank in plan.chunks.ranks:
        if rank.device_bytes < rank.smallest_bytes:
            ranks = tuple(
                replace(each, device_bytes=max(each.device_bytes, each.smallest_bytes))
                for each in plan.chunks.ranks
            )
            yield Refusal(
                problem=f"chunks.ranks: stage {rank.stage} has device_bytes {rank.device_bytes}, "
                f"it needs {rank.smallest_bytes}",
                action=f"set device_bytes to {rank.smallest_bytes}",
                nearest=replace(plan, chunks=replace(plan.chunks, ranks=ranks)),
            )


def _unchunkable(plan: Plan) -> str | None:
    """Return the reason why the plan cannot have chunks at all, or None."""
    if layout_of(plan).splits_backward:
        return (
            f"pipeline: schedule {plan.pipeline.schedule} splits the backward passes of blocks in "
            "chunks"
        )
    if recomputes_ahead(plan):
        return (
            f"pipeline: schedule {plan.pipeline.schedule} recomputes blocks in chunks ahead of "
            "their backward passes"
        )
    if plan.module is not None:
        return f"module: {plan.module.text} has its own blocks, with chunks"
    return None


def no_chunks(plan: Plan) -> Plan:
    """Return the plan with its blocks in no chunks."""
    layer_plans = {
        name: replace(layer_plan, offload=_outside_chunks(layer_plan))
        for name, layer_plan in plan.layer_plans.items()
    }
    return replace(plan, chunks=None, layer_plans=layer_plans)


def _outside_chunks(layer_plan: LayerPlan) -> tuple[Offload, ...]:
    return tuple(each for each in layer_plan.offload if each not in _IN_CHUNKS)


def _block_refusals(plan: Plan, name: str, layer_plan: LayerPlan) -> Iterator[Refusal]:
    where = f"layer_plans.{name}"
    zero = 3 if plan.mesh.dp > 1 else 0
    if layer_plan.zero != zero:
        yield Refusal(
            problem=f"{where}: zero {layer_plan.zero} of a block in chunks",
            action=f"set zero to {zero} on layer plan {name}",
            nearest=with_layer_plan(plan, name, zero=zero),
        )
    if layer_plan.zero_ranks not in (None, plan.mesh.dp):
        yield Refusal(
            problem=f"{where}: zero_ranks {layer_plan.zero_ranks} of a block in chunks",
            action=f"leave zero_ranks out of layer plan {name}",
            nearest=with_layer_plan(plan, name, zero_ranks=None),
        )
    if Offload.STATES in layer_plan.offload:
        offload = tuple(each for each in layer_plan.offload if each is not Offload.STATES)
        yield Refusal(
            problem=f"{where}: offload has states, of a block in chunks",
            action=f"set offload to {list(map(str, offload))} on {name}",
            nearest=with_layer_plan(plan, name, offload=offload),
        )


@rule(
    why="without chunks the host keeps all states of a layer, or none",
    action="use states, or make a plan with chunks",
)
def homes(plan: Plan) -> Iterator[Refusal]:
    for name, layer_plan in plan.layer_plans.items():
        in_chunks = [each for each in layer_plan.offload if each in _IN_CHUNKS]
        if in_chunks and (plan.chunks is None or layer_plan.layer is not LayerKind.BLOCK):
            offload = _outside_chunks(layer_plan)
            yield Refusal(
                problem=f"layer_plans.{name}: offload has {in_chunks[0]}, of no block in chunks",
                action=f"set offload to {list(map(str, offload))} on layer plan {name}",
                nearest=with_layer_plan(plan, name, offload=offload),
            )


CHUNKS = (chunks, homes)
