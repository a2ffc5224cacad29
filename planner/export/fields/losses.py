"""The parts of a plan that a configuration does not have, and the price of each.

The parts are taken over from the configuration to the plan one after the other, and each is priced
with those before it, so that the costs add up to the difference of both prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.export.fields.arguments import Facts
from parplan.planner.export.fields.configured import Priced, priced
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPart:
    """A part of a plan that is lost.

    what      the part, and what stands in its place
    step_s    seconds by which the step is longer
    peak_bytes  bytes by which the fullest device holds more
    """

    what: str
    step_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A priced strategy in parts that can be exchanged one by one."""

    layout: ParallelLayout
    lengths: tuple[int, ...]
    choices: tuple[LayerChoice, ...]
    price_cache: PriceCache

    @property
    def strategy(self) -> Strategy:
        layers = iter(self.choices)
        stages = tuple(tuple(next(layers) for _ in range(length)) for length in self.lengths)
        return Strategy(layout=self.layout, stages=stages)


def _parts_of(one: Priced) -> _Exchange:
    strategy, cache = one.strategy, one.price_cache
    choices = tuple(
        replace(choice, recompute=cache.recompute_operators(choice.kind, choice.recompute))
        for stage in strategy.stages
        for choice in stage
    )
    return _Exchange(strategy.layout, tuple(map(len, strategy.stages)), choices, cache)


_Take = Callable[[_Exchange, _Exchange], _Exchange]


def _take_layout(*names: str) -> _Take:
    """Returns the exchange of fields of the layout."""

    def take(own: _Exchange, other: _Exchange) -> _Exchange:
        changes = {name: getattr(other.layout, name) for name in names}
        return replace(own, layout=replace(own.layout, **changes))

    return take


def _take_choices(*names: str) -> _Take:
    """Returns the exchange of fields of every layer's choice."""

    def take(own: _Exchange, other: _Exchange) -> _Exchange:
        choices = tuple(
            replace(here, **{name: getattr(there, name) for name in names})
            for here, there in zip(own.choices, other.choices, strict=True)
        )
        return replace(own, choices=choices)

    return take


def _cache(own: _Exchange, **changes: Any) -> PriceCache:
    """Returns the prices of an exchange, with settings that are not in a strategy."""
    cache = own.price_cache
    kept: Facts = {
        "training": cache.training,
        "zero_ranks": cache.zero_ranks,
        "offload": cache.offload,
        "chunking": cache.chunking,
    }
    return PriceCache(cache.model, machine=cache.machine, **(kept | changes))


def _take_host(own: _Exchange, other: _Exchange) -> _Exchange:
    taken = _take_choices("home", "on_host")(own, other)
    taken = _take_layout("chunked", "access", "states_on_host")(taken, other)
    if own.layout.chunked:  # blocks in chunks are sharded as chunks
        taken = _take_choices("zero")(taken, other)
    cache = _cache(own, offload=other.price_cache.offload, chunking=other.price_cache.chunking)
    return replace(taken, price_cache=cache)


def _take_schedule(own: _Exchange, other: _Exchange) -> _Exchange:
    taken = _take_layout("schedule", "virtual_stages", "actions")(own, other)
    return replace(taken, lengths=other.lengths)


def _take_zero(own: _Exchange, other: _Exchange) -> _Exchange:
    taken = _take_choices("zero", "own_zero")(own, other)
    return replace(taken, price_cache=_cache(own, zero_ranks=other.price_cache.zero_ranks))


def _take_training(own: _Exchange, other: _Exchange) -> _Exchange:
    return replace(own, price_cache=_cache(own, training=other.price_cache.training))


def _of_blocks(parts: _Exchange, text: Callable[[LayerChoice], str]) -> str:
    """Returns what the blocks have, each with its number of blocks where they differ."""
    counts: dict[str, int] = {}
    for choice in parts.choices:
        if choice.kind.role is LayerKind.BLOCK:
            counts[text(choice)] = counts.get(text(choice), 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return " and ".join(f"{name} on {count}" for name, count in counts.items())


def _zero_text(parts: _Exchange) -> str:
    def text(choice: LayerChoice) -> str:
        own = ", ".join(f"{name} {zero}" for name, zero in choice.own_zero)
        return f"{choice.zero} ({own})" if own else f"{choice.zero}"

    ranks = parts.price_cache.zero_ranks
    found = defaultdict[bool, set[int]](set)
    for choice in parts.choices:
        found[choice.kind.role is LayerKind.BLOCK].add(choice.zero)
    ends = ", ".join(map(str, sorted(found[False] - found[True])))
    named = _of_blocks(parts, text) + (f", ends {ends}" if ends else "")
    return named + (f" over {ranks} ranks" if ranks else "")


def _recompute_text(parts: _Exchange) -> str:
    def text(choice: LayerChoice) -> str:
        layer = parts.price_cache.whole_layer(choice.kind)
        names = parts.price_cache.recompute_operators(choice.kind, choice.recompute)
        whole = len(names) == len(layer.operators)
        return "full" if whole else ", ".join(names) or "none"

    return _of_blocks(parts, text)


def _schedule_text(parts: _Exchange) -> str:
    layout = parts.layout
    virtual = f", {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
    runs = ((count, len(tuple(group))) for count, group in groupby(parts.lengths))
    layers = ", ".join(f"{times} x {count}" if times > 1 else f"{count}" for count, times in runs)
    return f"{layout.schedule}{virtual}, layers {layers}"


def _host_text(parts: _Exchange) -> str:
    cache, held = parts.price_cache, set[str]()
    held.update(map(str, cache.offload))
    held.update(f"states at home {c.home}" for c in parts.choices if parts.layout.chunked)
    held.update("activations" for choice in parts.choices if choice.on_host)
    return ", ".join(sorted(held)) or "nothing"


def _placement_text(parts: _Exchange) -> str:
    own = sum(choice.sharding is not None for choice in parts.choices)
    over = " over data-parallel ranks too" if parts.layout.weights_over_data else ""
    return f"own placements of {own} layers{over}" if own or over else "Megatron's of every layer"


def _mesh_text(parts: _Exchange) -> str:
    layout = parts.layout
    divided = " with sequence parallelism" if layout.sequence_parallel else ""
    batch = f"micro-batch {layout.micro_batch_size} x {layout.num_micro_batches}"
    return f"{layout.mesh}{divided}, {batch}"


def _training_text(training: TrainingSpec) -> str:
    narrow = f" with {training.products} products" if training.products else ""
    states = training.stack.states or "other"
    hidden = "hidden" if training.overlap_grad_reduce else "not hidden"
    return (
        f"{training.precision}{narrow}, gradients {training.gradient_precision} and their "
        f"reduction {hidden}, {states} states, {training.optimizer}, {training.attention} "
        f"attention, as {training.stack.name} runs it"
    )


@dataclass(frozen=True, slots=True)
class _ExchangedPart:
    name: str
    take: _Take
    text: Callable[[_Exchange], str]


_ORDER = (
    _ExchangedPart("host memory", _take_host, _host_text),
    _ExchangedPart("schedule", _take_schedule, _schedule_text),
    _ExchangedPart(
        "sub-pipelined tensor parallelism",
        _take_layout("tp_overlap"),
        lambda parts: f"level {parts.layout.tp_overlap}",
    ),
    _ExchangedPart(
        "placements",
        lambda own, other: _take_choices("sharding")(
            _take_layout("weights_over_data", "tower")(own, other), other
        ),
        _placement_text,
    ),
    _ExchangedPart(
        "mesh and micro-batches",
        _take_layout("mesh", "sequence_parallel", "micro_batch_size", "num_micro_batches"),
        _mesh_text,
    ),
    _ExchangedPart("ZeRO", _take_zero, _zero_text),
    _ExchangedPart("recompute", _take_choices("recompute"), _recompute_text),
    _ExchangedPart(
        "training", _take_training, lambda parts: _training_text(parts.price_cache.training)
    ),
)


def losses(plan: Priced, configured: Priced) -> tuple[LostPart, ...]:
    """Returns the parts of a plan that a configuration lacks, in a fixed order."""
    return tuple(_losses(plan, configured))


def _losses(plan: Priced, configured: Priced) -> Iterator[LostPart]:
    own, other = _parts_of(plan), _parts_of(configured)
    before = priced(own.strategy, own.price_cache)
    for part in _ORDER:
        taken = part.take(own, other)
        if taken.strategy == own.strategy and _same_prices(taken, own):
            continue
        after = priced(taken.strategy, taken.price_cache)
        loss = LostPart(
            what=f"{part.name}: {part.text(own)} -> {part.text(taken)}",
            step_s=after.price.step_s - before.price.step_s,
            peak_bytes=after.peak_bytes - before.peak_bytes,
        )
        if loss.step_s or loss.peak_bytes:
            yield loss
        own, before = taken, after


def _same_prices(one: _Exchange, other: _Exchange) -> bool:
    a, b = one.price_cache, other.price_cache
    return (a.zero_ranks, a.offload, a.chunking, a.training) == (
        b.zero_ranks,
        b.offload,
        b.chunking,
        b.training,
    )
