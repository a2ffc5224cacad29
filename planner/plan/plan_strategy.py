"""The strategy that a plan file holds, and its prices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parplan.costmodels.chunks.chunk_schedule import rank_groups
from parplan.costmodels.host.host_embedding import illegal_host_embedding
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import OFFLOAD_OF, StateLocation
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.operators.plan_placements import Placements, placed_splits, placements
from parplan.costmodels.operators.sharding import Sharding, Splits
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.plan.consistency import IN_CHUNKS
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import ChunkPlan, LayerPlan, Plan, StagePlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKey, LayerKind, Operator
from parplan.profiles.stack import TowerDivision


def prices_of_plan(plan: Plan) -> PriceCache:
    """Returns the price cache of a plan.

    Raises ConfigError where its layers differ in a choice that the prices make once for all layers.
    """
    sharded = {
        layer_plan.zero_ranks for layer_plan in plan.layer_plans.values() if layer_plan.highest_zero
    }
    blocks = [
        layer_plan
        for layer_plan in plan.layer_plans.values()
        if layer_plan.layer is LayerKind.BLOCK
    ]
    ends = [
        layer_plan
        for layer_plan in plan.layer_plans.values()
        if layer_plan.layer is not LayerKind.BLOCK
    ]
    offload = {
        tuple(kept for kept in layer_plan.offload if kept not in IN_CHUNKS) for layer_plan in blocks
    }
    if len(sharded) > 1 or len(offload) > 1:
        raise ConfigError(
            f"layer_plans: zero_ranks {sorted(map(str, sharded))} and offload "
            f"{sorted(map(list, offload))} differ between layers, "
            "they can be run so but are priced alike for all",
            hint="give all layers one zero_ranks and one offload",
        )
    kept = (*next(iter(offload), ()), *(_kept_of_ends(ends) if plan.chunks else _lookup(ends)))
    reason = (
        illegal_host_embedding(plan.mesh, plan.model.hidden_size, plan.model.tied_embeddings)
        if Offload.LOOKUP in kept
        else None
    )
    if reason:
        raise ConfigError(f"layer_plans: offload has lookup: {reason}", hint="leave lookup out")
    return PriceCache(
        plan.model,
        plan.training,
        machine_for(plan.cluster),
        zero_ranks=next(iter(sharded), None),
        offload=kept,
        chunking=chunking_of(plan.chunks),
    )


def _lookup(ends: Iterable[LayerPlan]) -> tuple[Offload, ...]:
    return (
        (Offload.LOOKUP,)
        if any(Offload.LOOKUP in layer_plan.offload for layer_plan in ends)
        else ()
    )


def _kept_of_ends(ends: Iterable[LayerPlan]) -> tuple[Offload, ...]:
    """Returns the offload of embedding and head where blocks are in chunks.

    Raises ConfigError where only one of them offloads its states.
    """
    offloads_states = {
        Offload.STATES in layer_plan.offload
        for layer_plan in ends
        if Offload.LOOKUP not in layer_plan.offload
    }
    if len(offloads_states) > 1:
        raise ConfigError(
            "layer_plans: offload has states for one of embedding and head, they are priced alike",
            hint="give both the same",
        )
    return (*((Offload.STATES,) if True in offloads_states else ()), *_lookup(ends))


def chunking_of(chunks: ChunkPlan | None) -> Chunking | None:
    """Returns the settings of the chunks of a plan."""
    if chunks is None:
        return None
    return Chunking(
        eviction=chunks.eviction,
        communication=chunks.communication,
        device_bytes=tuple(rank.device_bytes for rank in chunks.ranks) or None,
    )


def _home(name: str, layer_plan: LayerPlan, plan: Plan) -> StateLocation:
    """Returns the location of the states of a layer's blocks.

    Raises ConfigError for an offload without a location, and for chunks in a plan without any.
    """
    kept = tuple(kept for kept in layer_plan.offload if kept in IN_CHUNKS)
    where = f"layer_plans.{name}: offload"
    if kept and (plan.chunks is None or layer_plan.layer is not LayerKind.BLOCK):
        raise ConfigError(
            f"{where} has {kept[0]}, which is of blocks of a plan with chunks",
            hint="use states, or make the plan again",
        )
    if (
        plan.chunks is not None
        and layer_plan.layer is LayerKind.BLOCK
        and Offload.STATES in layer_plan.offload
    ):
        raise ConfigError(
            f"{where} has states, blocks in chunks have optimizer, parameters",
            hint="make the plan again",
        )
    home = next((home for home, offload in OFFLOAD_OF.items() if set(offload) == set(kept)), None)
    if home is None:
        raise ConfigError(
            f"{where} has {kept[0]} without {IN_CHUNKS[0]}",
            hint=f"add {IN_CHUNKS[0]}, or take {kept[0]} out",
        )
    return home


def _choice(name: str, layer_plan: LayerPlan, plan: Plan, price_cache: PriceCache) -> LayerChoice:
    """Returns the choice behind a layer plan, with a sharding where it is not the layout's."""
    layout = layout_of(plan)
    batch = plan.pipeline.micro_batch_size * _axes_of(layer_plan, layout).data
    graph = price_cache.graph(batch)
    key = layer_plan.key(graph)
    over = _own_axes(layer_plan, key, layout, price_cache)
    operators = graph.layer_class(key).operators
    known = [operator.name for operator in operators]
    for field, names in (
        ("recompute", layer_plan.recompute),
        ("keep_on_host", layer_plan.keep_on_host),
        ("own_zero", tuple(layer_plan.own_zero)),
    ):
        unknown = next((each for each in names if each not in known), None)
        if unknown:
            raise ConfigError(
                f"layer_plans.{name}: {field} names {unknown}, the layer has {', '.join(known)}",
                hint="make the plan again",
            )
    divided = tuple(
        (operator.name, split)
        for operator in operators
        if (split := _splits(operator, name, layer_plan, over)) not in (None, over.splits(operator))
    )
    if divided and layout.tp_overlap:
        raise ConfigError(
            f"layer_plans.{name}: {divided[0][0]} is not divided as Megatron does, "
            "sub-pipelined tensor parallelism is priced for nothing else",
            hint="set pipeline.tp_overlap to 0",
        )
    sharding = replace(over, own=divided) if divided else None
    if layer_plan.tower is not None:
        sharding = replace(over, own=divided)
    return LayerChoice(
        key,
        tuple(layer_plan.recompute),
        layer_plan.zero,
        sharding,
        _home(name, layer_plan, plan),
        tuple(layer_plan.keep_on_host),
        tuple(layer_plan.own_zero.items()),
    )


def _axes_of(layer_plan: LayerPlan, layout: ParallelLayout) -> Sharding:
    """Returns Megatron's sharding over the axes of a layer's operators.

    They are the tensor-parallel axis, and the data-parallel one where some weight is divided so.
    """
    return layout.over_data if layer_plan.divides_over_data else layout.sharding


def _own_axes(
    layer_plan: LayerPlan, key: LayerKey, layout: ParallelLayout, price_cache: PriceCache
) -> Sharding:
    """Returns the sharding over the axes of a layer's operators, that of a tower where it is one.

    Raises ConfigError where the layer is divided as no layer of the plan's tower is.
    """
    over = _axes_of(layer_plan, layout)
    own = price_cache.with_tower(layout.tower).own_sharding(key, over)
    if own.runs_tower is not layer_plan.tower:
        raise ConfigError(
            f"layer_plans: {key} has tower {layer_plan.tower or TowerDivision.TENSOR}, other "
            f"layers have {layout.tower}",
            hint="give the layers of the tower the same, and others none",
        )
    return own


def _splits(operator: Operator, name: str, layer_plan: LayerPlan, over: Sharding) -> Splits | None:
    """Returns the splits of one operator of a layer plan, None where no axis divides it."""
    if over.ranks == 1:
        return None
    placed = layer_plan.operators.get(operator.name)
    splits = None
    if (
        over.tower is not TowerDivision.TENSOR
    ):  # else the layer behind a tower, divided as any block
        return _one_way(operator, name, layer_plan, over, f"tower {layer_plan.tower}")
    if over.rows > 1:
        return _one_way(operator, name, layer_plan, over, f"tp_rows {over.rows}")
    if placed is not None:
        placements = Placements(
            parameters=dict(placed.parameters), input=placed.input, output=placed.output
        )
        splits = placed_splits(operator, over, placements)
    if splits is None:
        raise ConfigError(
            f"layer_plans.{name}.operators.{operator.name}: its placements are none that "
            f"{_axes_text(over)} can give it",
            hint="make the plan again, or see plan explain",
        )
    return splits


def _one_way(
    operator: Operator, name: str, layer_plan: LayerPlan, over: Sharding, of: str
) -> Splits:
    """Returns the splits of an operator that has one way. Raises ConfigError for others.

    of    the choice that leaves one way, in words
    """
    needed, placed = placements(operator, over), layer_plan.operators.get(operator.name)
    stated = None
    if placed is not None:
        stated = Placements(
            parameters=dict(placed.parameters), input=placed.input, output=placed.output
        )
    if stated != needed:
        raise ConfigError(
            f"layer_plans.{name}.operators.{operator.name}: its placements are not those of {of}",
            hint="make the plan again",
        )
    return over.splits(operator)


def _axes_text(over: Sharding) -> str:
    return f"dp {over.data} x tp {over.tp}" if over.data > 1 else f"tp {over.tp}"


def _layers(stage: StagePlan, choices: dict[str, LayerChoice]) -> tuple[LayerChoice, ...]:
    return tuple(choices[run.plan] for run in stage.layers for _ in run.indices)


def strategy_of(plan: Plan, price_cache: PriceCache) -> Strategy:
    """Returns the strategy from which `planner/plan/assemble.py` made a plan.

    Raises ConfigError where layers are missing, placements are not legal, or the chunks are not
    those that the layers fill.
    """
    strategy = layers_of(plan, price_cache)
    _require_groups(plan, strategy, price_cache)
    return strategy


def layers_of(plan: Plan, price_cache: PriceCache) -> Strategy:
    """Returns the strategy of the layers of a plan, with any chunks. Raises ConfigError."""
    choices = {name: _choice(name, p, plan, price_cache) for name, p in plan.layer_plans.items()}
    strategy = Strategy(
        layout=layout_of(plan), stages=tuple(_layers(stage, choices) for stage in plan.stages)
    )
    num_blocks = sum(
        choice.kind.role is LayerKind.BLOCK for stage in strategy.stages for choice in stage
    )
    if (
        num_blocks != plan.model.num_blocks
        or len(strategy.stages) != strategy.layout.num_virtual_stages
    ):
        raise ConfigError(
            f"the plan has {num_blocks} blocks on {len(strategy.stages)} stages, "
            f"not {plan.model.num_blocks} on {strategy.layout.num_virtual_stages}",
            hint="make the plan again",
        )
    return strategy


def _require_groups(plan: Plan, strategy: Strategy, price_cache: PriceCache) -> None:
    """Raises ConfigError unless chunked blocks are sharded and fill the groups of the plan."""
    if plan.chunks is None:
        return
    zero = 3 if plan.mesh.dp > 1 else 0
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.layer is LayerKind.BLOCK and layer_plan.zero != zero:
            raise ConfigError(
                f"layer_plans.{name}: a block in chunks has zero {layer_plan.zero}, not {zero}",
                hint="make the plan again",
            )
    require_groups(plan.chunks, strategy, price_cache)


def require_groups(chunks: ChunkPlan, strategy: Strategy, price_cache: LayerPriceCache) -> None:
    """Raises ConfigError unless the layers of a strategy fill the groups of chunks."""
    stated = {
        (group.stage, group.home): (group.num_chunks, group.chunk_elements)
        for group in chunks.groups
    }
    filled = {
        (stage, group.home): (group.chunk_layout.num_chunks, group.chunk_layout.chunk_elements)
        for stage in range(strategy.layout.mesh.pp)
        for group in rank_groups(strategy, stage, price_cache)
    }
    for stage, home in sorted(stated.keys() | filled.keys()):
        if stated.get((stage, home)) != filled.get((stage, home)):
            stated_text = _chunks_text(stated.get((stage, home)))
            filled_text = _chunks_text(filled.get((stage, home)))
            raise ConfigError(
                f"chunks.groups: stage {stage}, home {home} has {stated_text}, "
                f"its blocks fill {filled_text}",
                hint="make the plan again",
            )


def _chunks_text(group: tuple[int, int] | None) -> str:
    return "none" if group is None else f"{group[0]} chunks of {group[1]} elements"
