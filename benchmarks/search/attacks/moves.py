"""Local changes of a strategy: other choices for some blocks of some stages, blocks that change
stages, and the ends' ZeRO stages.
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
    """How many blocks each stage has."""
    return [sum(map(is_block, stage)) for stage in strategy.stages]


def choices_of(strategy: Strategy, stages: Collection[int]) -> tuple[LayerChoice, ...]:
    """The different choices of the blocks of some stages."""
    return tuple(
        dict.fromkeys(
            choice for stage in stages for choice in strategy.stages[stage] if is_block(choice)
        )
    )


def groups_of(strategy: Strategy) -> list[tuple[int, ...]]:
    """The stages that change together: one alone, those of a rank, and all."""
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
    """The last or the first `count` blocks of each of `stages` that run as `old` run as `new`."""
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
    chosen = frozenset((places[-count:] if last else places[:count]) if count else ())
    return tuple(new if place in chosen else choice for place, choice in enumerate(layers))


def carried(strategy: Strategy, giver: int, taker: int) -> Strategy | None:
    """One block less on stage `giver` and one more on stage `taker`, those between them shifted;
    None where the giver has only one.

    The new block runs as the taker's block on the side of the giver does.
    """
    here, there = list(strategy.stages[giver]), list(strategy.stages[taker])
    given, places = (
        [place for place, choice in enumerate(layers) if is_block(choice)]
        for layers in (here, there)
    )
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
    """The same with these ZeRO stages of embedding and head."""
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
    """The largest number up to `count` that fits, where more needs more; 0 where none does."""
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
    """The least number up to `count` that fits, where more needs less and `count` fits."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
