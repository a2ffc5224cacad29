"""The forms of context parallelism that are worth a search.

Layouts that differ in the form alone have the same kernels and hold the same bytes, so one whose
attention waits no longer than another's, forward and backward, is never worse. How long it waits
does not depend on the ranks of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from parplan.costmodels.operators.sharding import Sharding, without_experts
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import CandidateSpace, layout_text
from parplan.planner.candidates.meshes import PrunedFamilies
from parplan.planner.deadline import Deadline
from parplan.profiles.models.operator_graph import LayerKey
from parplan.profiles.stack import ContextForm


def without_beaten_forms(
    space: CandidateSpace, price_cache: PriceCache, deadline: Deadline
) -> CandidateSpace:
    """Returns the space without the layouts whose form another beats, each with the reason.

    Raises OutOfTimeError at the end of the deadline.
    """
    blocks = tuple(
        dict.fromkeys(price_cache.key(layer, 1) for layer in range(1, price_cache.num_layers - 1))
    )
    ways = dict.fromkeys(_way(layout) for layout in space.layouts if layout.mesh.cp > 1)
    attention = {(size, sharding): (size, without_experts(sharding)) for size, sharding in ways}
    forms: dict[tuple[int, Sharding], dict[Sharding, None]] = {}
    for micro_batch_size, sharding in attention.values():
        forms.setdefault((micro_batch_size, _ring(sharding)), {})[sharding] = None
    beaten: dict[tuple[int, Sharding], ContextForm | None] = {}
    for (micro_batch_size, _), shardings in forms.items():
        deadline.check()
        waits_s = {
            each: tuple(_passes_s(blocks, micro_batch_size, each, price_cache))
            for each in shardings
        }
        for sharding, form in _beaten(waits_s):
            beaten[micro_batch_size, sharding] = form
    kept: list[ParallelLayout] = []
    lost = PrunedFamilies()
    for layout in space.layouts:
        way = attention.get(_way(layout))
        if way is not None and way in beaten:
            reason = f"attention waits less in the form {beaten[way]}"
            lost.add(reason, partial(layout_text, layout))
        else:
            kept.append(layout)
    return CandidateSpace(tuple(kept), (*space.pruned, *lost))


def _way(layout: ParallelLayout) -> tuple[int, Sharding]:
    """Returns what the time of attention depends on, and the ranks of experts."""
    return layout.micro_batch_size, layout.sharding


@lru_cache(maxsize=1024)
def _ring(sharding: Sharding) -> Sharding:
    return replace(sharding, context_form=ContextForm.RING)


def _beaten(
    waits_s: Mapping[Sharding, tuple[float, ...]],
) -> Iterator[tuple[Sharding, ContextForm | None]]:
    """Yields the shardings that another is no slower than in any pass, with that one's form."""
    fastest: list[Sharding] = []
    for sharding in sorted(waits_s, key=waits_s.__getitem__):
        faster = (other for other in fastest if _no_slower(waits_s[other], waits_s[sharding]))
        other = next(faster, None)
        if other is None:
            fastest.append(sharding)
        else:
            yield sharding, other.context_form


def _no_slower(first_s: Sequence[float], second_s: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(first_s, second_s, strict=True))


def _passes_s(
    blocks: Sequence[LayerKey], micro_batch_size: int, sharding: Sharding, price_cache: PriceCache
) -> Iterator[float]:
    """Yields the seconds of both passes of each class of blocks."""
    for kind in blocks:
        time = price_cache.layer_time(kind, micro_batch_size, sharding)
        yield time.forward_s
        yield time.backward_s
