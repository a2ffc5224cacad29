"""Local changes of a strategy.

Some blocks of some stages get other choices, blocks change stages, and the ends get other ZeRO
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.models.operator_graph import LayerKind

Layers = tuple[LayerChoice, ...]


def is_block(choice: LayerChoice) -> bool:
    return choice.kind is LayerKind.BLOCK


def block_counts(strategy: Strategy) -> list[int]:
    """Return the number of blocks of each stage."""
    return [sum(map(is_block, stage)) for stage in strategy.stages]


def choices_of(strategy: Strategy, stages: Collection[int]) -> tuple[LayerChoice, ...]:
    """Return the different choices of the blocks of some stages."""
    return tuple(
        dict.fromkeys(
            choice for stage in stages for choice in strategy.stages[stage] if is_block(choice)
        )
    )


def groups_of(strategy: Strategy) -> list[tuple[int, ...]]:
    """Return the groups of stages that change together: each alone, those of a rank, and all."""
    layout = strategy.layout
    alone = [(stage,) for stage in range(layout.num_virtual_stages)]
    ranks = [tuple(sorted(layout.stages_of(rank))) for rank in range(layout.mesh.pp)]
    return list(dict.fromkeys((*alone, *ranks, tuple(range(layout.num_virtual_stages)))))


def retuned(
    strategy: Strategy,
    stages: Collection[int],
    old: LayerChoice,
    new: LayerChoice,
    count: int,
    *,
    last: bool,
) -> Strategy:
    """Return the strategy with the last or first `count` blocks on `old` of each stage on `new`."""
    return replace(
        strategy,
        stages=tuple(
            _replaced(layers, old, new, count, last=last) if stage in stages else layers
            for stage, layers in enumerate(strategy.stages)
        ),
    )


def _replaced(
    layers: Layers, old: LayerChoice, new: LayerChoice, count: int, *, last: bool
) -> Layers:
    places = [place for place, choice in enumerate(layers) if choice == old]
    chosen: frozenset[int] = frozenset()
    if count:
        chosen = frozenset(places[-count:] if last else places[:count])
    return tuple(new if place in chosen else choice for place, choice in enumerate(layers))


def carried(strategy: Strategy, giver: int, taker: int) -> Strategy | None:
    """Return the strategy with one block less on stage `giver` and one more on stage `taker`.

    Stages between them shift by one block. The new block runs as the taker's block on the side of
    the giver. None if the giver has only one block.
    """
    here, there = list(strategy.stages[giver]), list(strategy.stages[taker])
    given = [place for place, choice in enumerate(here) if is_block(choice)]
    places = [place for place, choice in enumerate(there) if is_block(choice)]
    if len(given) < 2 or giver == taker:
        return None
    del here[given[-1] if giver < taker else given[0]]
    near = places[0] if giver < taker else places[-1]
    there.insert(near, there[near])
    changed = {giver: tuple(here), taker: tuple(there)}
    return replace(
        strategy,
        stages=tuple(changed.get(stage, layers) for stage, layers in enumerate(strategy.stages)),
    )


def with_ends(strategy: Strategy, embedding: int, head: int) -> Strategy:
    """Return the strategy with these ZeRO stages of embedding and head."""
    zero = {LayerKind.EMBEDDING: embedding, LayerKind.HEAD: head}
    return replace(
        strategy,
        stages=tuple(
            tuple(
                choice if is_block(choice) else replace(choice, zero=zero[choice.kind])
                for choice in stage
            )
            for stage in strategy.stages
        ),
    )


def most(fits: Callable[[int], bool], count: int) -> int:
    """Return the largest number up to `count` that fits, or 0; a larger number needs more."""
    if count == 0 or not fits(1):
        return 0
    if fits(count):
        return count
    low, high = 1, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fewest(fits: Callable[[int], bool], count: int) -> int:
    """Return the least number up to `count` that fits; a larger number needs less, `count` fits."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
