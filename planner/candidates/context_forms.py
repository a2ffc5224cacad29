"""The forms of context parallelism that are worth a search.

Layouts that differ in the form alone have the same kernels and hold the same bytes, so one whose
attention waits no longer than another's, forward and backward, is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.deadline import Deadline
from parplan.profiles.models.operator_graph import LayerKey
from parplan.profiles.stack import ContextForm


def unbeaten_forms(
    layouts: Sequence[ParallelLayout], price_cache: PriceCache, deadline: Deadline
) -> tuple[list[ParallelLayout], list[tuple[ParallelLayout, str]]]:
    """Returns the layouts whose form no other beats, and the others, each with the reason.

    Raises OutOfTimeError at the end of the deadline.
    """
    by_rest: dict[ParallelLayout, list[ParallelLayout]] = {}
    for layout in layouts:
        plain = layout
        if layout.mesh.cp > 1:
            plain = replace(layout, mesh=replace(layout.mesh, context_form=ContextForm.RING))
        by_rest.setdefault(plain, []).append(layout)
    kept = set[ParallelLayout]()
    beaten: list[tuple[ParallelLayout, str]] = []
    for alike in by_rest.values():
        deadline.check()
        waits_s = {each: tuple(_passes_s(each, price_cache)) for each in alike}
        fastest: list[ParallelLayout] = []
        for layout in sorted(alike, key=waits_s.__getitem__):
            faster = next(
                (
                    other
                    for other in fastest
                    if all(a <= b for a, b in zip(waits_s[other], waits_s[layout], strict=True))
                ),
                None,
            )
            if faster is None:
                fastest.append(layout)
            else:
                reason = f"attention waits less in the form {faster.mesh.context_form}"
                beaten.append((layout, reason))
        kept.update(fastest)
    return [layout for layout in layouts if layout in kept], beaten


def _passes_s(layout: ParallelLayout, price_cache: PriceCache) -> Iterator[float]:
    """Yields the seconds of both passes of each class of blocks, none without the axis."""
    if layout.mesh.cp == 1:
        return
    for kind in _block_classes(price_cache):
        time = price_cache.layer_time(kind, layout.micro_batch_size, layout.sharding)
        yield time.forward_s
        yield time.backward_s


def _block_classes(price_cache: PriceCache) -> tuple[LayerKey, ...]:
    return tuple(
        dict.fromkeys(price_cache.key(layer, 1) for layer in range(1, price_cache.num_layers - 1))
    )
