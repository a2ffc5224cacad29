"""Recompute of the first blocks of every stage: --recompute-method block of Megatron-LM.

`--recompute-num-layers` says how many blocks of a stage recompute (megatron/training/arguments.py
of NVIDIA/Megatron-LM at 000c4ac24f61). More of them take longer and hold less, so that the fewest
that fit are the fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.planner.baselines.optimum import busiest_s, fits
from parplan.profiles.models.operator_graph import LayerKind

Stage = tuple[LayerChoice, ...]


def with_first_blocks(strategy: Strategy, number: int) -> Strategy:
    """Returns a strategy without recompute in which the first blocks of each stage recompute."""
    stages: dict[Stage, Stage] = {}
    for stage in strategy.stages:
        if stage not in stages:
            stages[stage] = _recomputed(stage, number)
    return replace(strategy, stages=tuple(stages[stage] for stage in strategy.stages))


def _recomputed(stage: Stage, number: int) -> Stage:
    first = next(
        (index for index, choice in enumerate(stage) if choice.kind.role is LayerKind.BLOCK), 0
    )
    recomputed: dict[LayerChoice, LayerChoice] = {}  # layers alike share one record
    for choice in stage:
        recomputed.setdefault(choice, replace(choice, recompute=Recompute.FULL))
    return tuple(
        recomputed[choice]
        if first <= index < first + number and choice.kind.role is LayerKind.BLOCK
        else choice
        for index, choice in enumerate(stage)
    )


def least_blocks(
    strategies: Iterable[Strategy], price_cache: PriceCache, limit_bytes: float, below_s: float
) -> Iterator[Strategy]:
    """Yields each strategy without recompute with the fewest recomputed blocks that fit.

    Strategies that fit as they are, or whose slowest rank alone takes `below_s`, are left out.
    """
    for strategy in strategies:
        found = _least(strategy, price_cache, limit_bytes, below_s)
        if found is not None:
            yield found


def _least(
    strategy: Strategy, price_cache: PriceCache, limit_bytes: float, below_s: float
) -> Strategy | None:
    blocks = [
        [choice for choice in stage if choice.kind.role is LayerKind.BLOCK]
        for stage in strategy.stages
    ]
    plain = all(choice.recompute is Recompute.NONE for stage in blocks for choice in stage)
    if not plain or busiest_s(strategy, price_cache) >= below_s:
        return None
    low, high = 0, max(map(len, blocks))  # some number above low fits, if any does
    while high - low > 1:  # the most that are fast enough
        middle = (low + high) // 2
        if busiest_s(with_first_blocks(strategy, middle), price_cache) < below_s:
            low = middle
        else:
            high = middle
    if not low or not fits(with_first_blocks(strategy, low), price_cache, limit_bytes):
        return None
    if fits(strategy, price_cache, limit_bytes):
        return None
    low, high = 0, low
    while high - low > 1:
        middle = (low + high) // 2
        if fits(with_first_blocks(strategy, middle), price_cache, limit_bytes):
            high = middle
        else:
            low = middle
    return with_first_blocks(strategy, high)
