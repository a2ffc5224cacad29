"""Seconds and bytes of one block of each class at a recompute, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.export.fields.settings import Settings
from parplan.planner.validation.block_modules import RECOMPUTED, module_operators
from parplan.profiles.models.operator_graph import LayerKey


class RankRoom(NamedTuple):
    """The rank of a layout whose memory bounds that of all settings.

    blocks        at least so many lie on it
    held          micro-batches of one of its chunks that it holds at least
    usable_bytes  bytes that its tensors may fill
    in_turn       gradients come and go, and are not there beside all that is held
    freed         gradients come and go, and so do temporaries
    """

    blocks: int
    held: int
    usable_bytes: float
    in_turn: bool
    freed: bool


class BlockFigures(NamedTuple):
    """A block of one class at a recompute: seconds of its passes, saved and temporary bytes."""

    passes_s: float
    saved_bytes: float
    workspace_bytes: float


Classes = Mapping[LayerKey, BlockFigures]


def held_bytes_of(
    virtual_stages: int, rank: RankRoom, plain: Classes, again: Classes, count: int | None
) -> float:
    """Least bytes that the blocks of a rank save, with the temporaries of one of them."""
    saved = rank.blocks * min(each.saved_bytes for each in again.values())
    workspace = min(each.workspace_bytes for each in again.values())
    if count is not None:
        rest = max(0, rank.blocks - virtual_stages * count)
        saved += rest * min(plain[kind].saved_bytes - again[kind].saved_bytes for kind in again)
        workspace = min(workspace, *(each.workspace_bytes for each in plain.values()))
    return rank.held / virtual_stages * saved + (0.0 if rank.freed else workspace)


def blocks_at(
    classes: Iterable[LayerKey],
    size: int,
    sharding: Sharding,
    settings: Settings,
    prices: PriceCache,
) -> Classes:
    """Returns a block of each class at the recompute of settings, the least figures of any."""

    def at(kind: LayerKey, operators: RecomputedOperators) -> BlockFigures:
        held = prices.activations(kind, size, sharding, operators)
        passes_s = prices.layer_time(kind, size, sharding, operators).total_s
        return BlockFigures(passes_s, held.saved, held.workspace)

    return {
        kind: _least([at(kind, each) for each in _in_turn(kind, settings, prices)])
        for kind in classes
    }


def _in_turn(
    kind: LayerKey, settings: Settings, prices: PriceCache
) -> tuple[RecomputedOperators, ...]:
    """Returns the recomputes that blocks of settings have, in turn."""
    level, modules = settings.recompute, settings.recompute_modules
    if level is not Recompute.SELECTIVE:
        return (level,)
    if modules is not None:
        return (module_operators(prices.whole_layer(kind), modules, RECOMPUTED),)
    return (level, Recompute.FULL) if settings.full_in_turn else (level,)


def _least(blocks: list[BlockFigures]) -> BlockFigures:
    """Returns the least of each figure."""
    return BlockFigures(*(min(figures) for figures in zip(*blocks, strict=True)))
