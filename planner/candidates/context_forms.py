"""The forms of context parallelism that are worth a search.

Layouts that differ in the form alone have the same kernels and hold the same bytes, so one whose
attention waits no longer than another's, forward and backward, is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import CandidateSpace, layout_text
from parplan.planner.candidates.meshes import Pruned
from parplan.planner.deadline import Deadline
from parplan.profiles.models.operator_graph import LayerKey
from parplan.profiles.stack import ContextForm


def without_beaten_forms(
    space: CandidateSpace, price_cache: PriceCache, deadline: Deadline
) -> CandidateSpace:
    """Returns the space without the layouts whose form another beats, each with the reason.

    Raises OutOfTimeError at the end of the deadline.
    """
    by_rest: dict[ParallelLayout, list[ParallelLayout]] = {}
    for layout in space.layouts:
        if layout.mesh.cp > 1:
            ring = replace(layout, mesh=replace(layout.mesh, context_form=ContextForm.RING))
            by_rest.setdefault(ring, []).append(layout)
    if not by_rest:
        return space
    beaten: dict[ParallelLayout, ContextForm | None] = {}
    for alike in by_rest.values():
        deadline.check()
        beaten.update(_beaten(alike, price_cache))
    pruned = (
        Pruned(layout_text(layout), f"attention waits less in the form {form}")
        for layout, form in beaten.items()
    )
    kept = tuple(layout for layout in space.layouts if layout not in beaten)
    return CandidateSpace(kept, (*space.pruned, *pruned))


def _beaten(
    alike: Sequence[ParallelLayout], price_cache: PriceCache
) -> Iterator[tuple[ParallelLayout, ContextForm | None]]:
    """Yields the layouts that another is no slower than in any pass, with the form of that one."""
    waits_s = {each: tuple(_passes_s(each, price_cache)) for each in alike}
    fastest: list[ParallelLayout] = []
    for layout in sorted(alike, key=waits_s.__getitem__):
        faster = (other for other in fastest if _no_slower(waits_s[other], waits_s[layout]))
        other = next(faster, None)
        if other is None:
            fastest.append(layout)
        else:
            yield layout, other.mesh.context_form


def _no_slower(first_s: Sequence[float], second_s: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(first_s, second_s, strict=True))


def _passes_s(layout: ParallelLayout, price_cache: PriceCache) -> Iterator[float]:
    """Yields the seconds of both passes of each class of blocks."""
    for kind in _block_classes(price_cache):
        time = price_cache.layer_time(kind, layout.micro_batch_size, layout.sharding)
        yield time.forward_s
        yield time.backward_s


def _block_classes(price_cache: PriceCache) -> tuple[LayerKey, ...]:
    return tuple(
        dict.fromkeys(price_cache.key(layer, 1) for layer in range(1, price_cache.num_layers - 1))
    )
