"""Levels of sub-pipelined tensor parallelism: legality, and which levels are worth a search.

Let e be the extra time of two halves over a whole. A level pays where (1 + e) x + exposed < x + 2 c
(EQUATIONS P8). The times of a block decide it for any number of blocks, together with the temporary
bytes, of which halves need less. A candidate at two levels is not searched at the level that is
worse in both. Level 3 takes no longer than level 2, because it waits for less, and holds the same
bytes. Level 0 always stays: it alone allows shardings other than Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isclose

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.layers.run_in_halves import whole_in_halves
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.deadline import NEVER, Deadline
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import has_unlike_blocks

ROUNDING = 1e-9  # relative: the same sum in another order


def illegal_overlap(layout: ParallelLayout, model: ModelSpec, training: TrainingSpec) -> str | None:
    """Returns why a layout cannot run at its level, or None."""
    if not layout.tp_overlap:
        return None
    what = "sub-pipelined tensor parallelism"
    if layout.mesh.tp == 1:
        return f"{what} hides all-reduces over tp, tp is 1"
    if layout.mesh.cp > 1:
        return f"{what} is not priced with context parallelism"
    if model.num_experts:
        return (
            f"{what} is of blocks that end in all-reduces, "
            f"those of {model.name} exchange tokens of experts too"
        )
    if training.fine_tuning is not None:
        return f"{what} is of models whose parameters are all trained"
    if has_unlike_blocks(model, training):
        return f"{what} is of blocks that are alike, those of {model.name} are of several classes"
    if whole := whole_in_halves(model, training):
        return f"{what} does not run {whole}"
    if layout.sequence_parallel:
        return (
            f"{what} hides an all-reduce under a half; sequence parallelism sends twice "
            "between halves, with a norm in between"
        )
    if layout.splits_backward:
        return f"{what} runs whole backward passes, {layout.schedule} splits them"
    if layout.micro_batch_size % 2:
        return f"{what} runs a micro-batch as two halves, its size is {layout.micro_batch_size}"
    fewest = 2 * layout.num_virtual_stages if layout.equal_ranks else layout.num_virtual_stages + 1
    if layout.tp_overlap == 3 and model.num_layers < fewest:
        return (
            f"level 3 of {what} goes from block to block, {layout.num_virtual_stages} stages of "
            f"{model.num_layers} blocks hold one"
        )
    return None


def illegal_zero(layout: ParallelLayout, zero: int) -> str | None:
    """Returns why the schedule of a layout cannot run at a ZeRO stage, or None.

    Stage 3 frees parameters that a split backward pass still needs. Before a recompute ahead of the
    gradient it would gather them one more time than is priced.
    """
    if (
        zero < 3
        or layout.mesh.replicas == 1
        or not (layout.splits_backward or layout.recomputes_ahead)
    ):
        return None
    problem = "does not run" if layout.splits_backward else "has no price"
    return f"{layout.schedule} {problem} with ZeRO 3"


def illegal_full_recompute(level: int, model: ModelSpec, *, on_host: bool = False) -> str | None:
    """Returns why blocks at an overlap level cannot be recomputed in full, or None.

    At level 3 half of the input of a block arrives while the block runs.
    """
    if level < 3 or not (model.dropout or on_host):
        return None
    what = "dropout draws other masks" if model.dropout else "the host keeps activations"
    return (
        "level 3 of sub-pipelined tensor parallelism does not recompute blocks in full where "
        f"{what}"
    )


def paying_layouts(
    layouts: Sequence[ParallelLayout], price_cache: PriceCache, deadline: Deadline = NEVER
) -> tuple[tuple[ParallelLayout, ...], tuple[tuple[ParallelLayout, str], ...]]:
    """Returns the layouts that are worth a search, and the dropped ones with their reason."""
    levels: dict[ParallelLayout, list[ParallelLayout]] = {}
    for layout in layouts:
        levels.setdefault(replace(layout, tp_overlap=0), []).append(layout)
    kept: list[ParallelLayout] = []
    dropped: list[tuple[ParallelLayout, str]] = []
    known: dict[tuple[int, Sharding, Sharding], bool] = {}

    def beats(first: ParallelLayout, second: ParallelLayout) -> bool:
        key = first.micro_batch_size, first.sharding, second.sharding
        if key not in known:
            known[key] = first != second and _beats(first, second, price_cache)
        return known[key]

    for layout in layouts:
        deadline.check()
        rivals = levels[replace(layout, tp_overlap=0)] if layout.tp_overlap else ()
        better = next((rival for rival in rivals if beats(rival, layout)), None)
        if better is None:
            kept.append(layout)
            continue
        reason = (
            f"level {layout.tp_overlap} of sub-pipelined tensor parallelism is no faster and "
            f"no leaner than level {better.tp_overlap}"
        )
        dropped.append((layout, reason))
    return tuple(kept), tuple(dropped)


def _beats(layout: ParallelLayout, rival: ParallelLayout, price_cache: PriceCache) -> bool:
    """Returns whether blocks take and hold no more at the level of `layout` than of `rival`.

    It holds for every level of recompute and any number of blocks of a stage. The lower level beats
    an equal one.
    """
    alone_s = sum(
        edge.value_s for edge in price_cache.row_edges(layout.micro_batch_size, layout.sharding)
    )
    pairs = list(zip(_values(layout, price_cache), _values(rival, price_cache), strict=True))
    if all(isclose(a, b, rel_tol=ROUNDING) for pair in pairs for a, b in zip(*pair, strict=True)):
        return layout.tp_overlap < rival.tp_overlap
    return all(a_s + alone_s <= b_s * (1 + ROUNDING) and a <= b for (a_s, a), (b_s, b) in pairs)


def _values(layout: ParallelLayout, price_cache: PriceCache) -> Iterator[tuple[float, int]]:
    """Yields seconds and temporary bytes of a block by recompute level, inf where it cannot run."""
    b, sharding = layout.micro_batch_size, layout.sharding
    for level in Recompute:
        runs = level is not Recompute.FULL or not illegal_full_recompute(
            layout.tp_overlap, price_cache.model
        )
        time_s = (
            price_cache.layer_time(LayerKind.BLOCK, b, sharding, level).total_s if runs else inf
        )
        yield time_s, price_cache.activations(LayerKind.BLOCK, b, sharding, level).workspace
