"""The share of a plan's seconds and bytes that the tower of its model takes."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.rank_memory import choice_states, stashes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import layers_of, prices_of_plan
from parplan.profiles.models.operator_graph import LayerKind, ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCost:
    """The cost of the tower in one step.

    ranks         pipeline ranks that have layers of it
    passes_s      seconds of its passes over the micro-batches of a pipeline, one after the other
    share         those seconds over the seconds of all layers' passes
    rank          the pipeline rank where it has most bytes
    states_bytes, saved_bytes   bytes of a device there: parameters, gradients and optimizer, and
                  activations of all micro-batches that the rank holds at once
    """

    ranks: tuple[int, ...]
    passes_s: float
    share: float
    rank: int
    states_bytes: int
    saved_bytes: int


def tower_cost(plan: Plan) -> TowerCost | None:
    """Returns the cost of the tower in a plan, None for a model without one.

    Raises ConfigError for a plan whose layers are not priced alike.
    """
    if plan.model.tower is None:
        return None
    price_cache = prices_of_plan(plan)
    strategy = layers_of(plan, price_cache)
    layout = strategy.layout
    passes = [
        [_passes_s(choice, strategy, price_cache) for choice in stage] for stage in strategy.stages
    ]
    held: dict[int, tuple[int, int]] = {}
    tower_s = 0.0
    for number, (stage, times_s) in enumerate(zip(strategy.stages, passes, strict=True)):
        rank = layout.rank_of(number)
        for choice, time_s in zip(stage, times_s, strict=True):
            if price_cache.whole_layer(choice.kind).part is ModelPart.LANGUAGE:
                continue
            tower_s += time_s
            states, saved = held.get(rank, (0, 0))
            own_states, own_saved = _held_bytes(choice, rank, strategy, price_cache)
            held[rank] = states + own_states, saved + own_saved
    fullest = max(held, key=lambda rank: sum(held[rank]))
    return TowerCost(
        ranks=tuple(sorted(held)),
        passes_s=layout.num_micro_batches * tower_s,
        share=tower_s / sum(map(sum, passes)),
        rank=fullest,
        states_bytes=held[fullest][0],
        saved_bytes=held[fullest][1],
    )


def _passes_s(choice: LayerChoice, strategy: Strategy, price_cache: PriceCache) -> float:
    """Seconds of the passes of a micro-batch in one layer."""
    layout = strategy.layout
    return price_cache.layer_time(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
    ).total_s


def _held_bytes(
    choice: LayerChoice, rank: int, strategy: Strategy, price_cache: LayerPriceCache
) -> tuple[int, int]:
    """Bytes of the states of a layer on a device, and of its activations of all micro-batches."""
    layout = strategy.layout
    saved = price_cache.activations(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
    ).saved
    states = choice_states(choice, layout, price_cache).states.total
    at_once = stashes(LayerKind.BLOCK, rank, layout) / layout.virtual_stages
    return int(states), round(saved * at_once)
