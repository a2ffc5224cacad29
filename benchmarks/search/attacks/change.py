"""The difference between two strategies in words: the change that the attack made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from benchmarks.search.attacks.moves import block_counts, is_block
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.enumeration import layout_text


def kinds(plan: Strategy, attack: Strategy) -> tuple[str, ...]:
    """Return the kinds of difference.

    They are the layout's choices or, with equal layouts, blocks by stage, ZeRO stages, recompute,
    and the ends.
    """
    if plan.layout != attack.layout:
        return tuple(_frame_kinds(plan.layout, attack.layout))
    different = ["blocks moved"] if block_counts(plan) != block_counts(attack) else []
    for name, part in (
        ("zero", lambda c: c.zero),
        ("recompute", lambda c: c.recompute),
        ("division", lambda c: c.sharding),
    ):
        if Counter(map(part, _blocks(plan))) != Counter(map(part, _blocks(attack))):
            different.append(name)
    if _ends(plan) != _ends(attack):
        different.append("ends")
    return tuple(different) or ("order",)


def _frame_kinds(before: ParallelLayout, after: ParallelLayout) -> Iterator[str]:
    names = {
        "mesh": "mesh",
        "schedule": "schedule",
        "virtual_stages": "virtual stages",
        "micro_batch_size": "micro-batch",
        "sequence_parallel": "sequence parallel",
        "tp_overlap": "tp overlap",
    }
    yield from (
        text for name, text in names.items() if getattr(before, name) != getattr(after, name)
    )


def _blocks(strategy: Strategy) -> Iterator[LayerChoice]:
    return (choice for stage in strategy.stages for choice in stage if is_block(choice))


def _ends(strategy: Strategy) -> tuple[int, ...]:
    return tuple(
        choice.zero for stage in strategy.stages for choice in stage if not is_block(choice)
    )


def text(strategy: Strategy) -> str:
    """Return the layout and, by pipeline rank, the runs of equal blocks as text."""
    layout = strategy.layout
    stages = [f"{stage}: {_stage_text(layers)}" for stage, layers in enumerate(strategy.stages)]
    embedding, head = _ends(strategy)
    return f"{layout_text(layout)}; ends ZeRO {embedding}, {head}; " + " | ".join(stages)


def _stage_text(layers: tuple[LayerChoice, ...]) -> str:
    blocks = filter(is_block, layers)
    return ", ".join(f"{count} x ZeRO {c.zero} {way_text(c)}" for c, count in runs(blocks))


def runs(layers: Iterable[LayerChoice]) -> Iterator[tuple[LayerChoice, int]]:
    """Yield each run of equal layers: its choice and its length."""
    return ((choice, len(list(same))) for choice, same in groupby(layers))


def way_text(choice: LayerChoice) -> str:
    """Return the recompute of a layer, and whether it is divided otherwise than its layout."""
    names = (
        choice.recompute.value
        if isinstance(choice.recompute, Recompute)
        else "+".join(choice.recompute) or "none"
    )
    return names + ("" if choice.sharding is None else " divided otherwise")
