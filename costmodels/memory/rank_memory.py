"""What one device holds at its fullest moment: states, stashed activations, temporaries and the
reserve on top of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.layers.layer_price_cache import ActivationBytes, LayerPriceCache
from parplan.costmodels.layers.model_states import ZERO_2_COPIES, ZERO_3_COPIES, StateBytes
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_candidates import moments
from parplan.costmodels.memory.peak_memory import Bytes, ConstantBytes, LayerBytes, peak_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.costmodels.schedules.schedule import Schedule, in_flight
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes per device of one pipeline rank.

    allocator_reserve   what the caching allocator holds beyond the tensors of the fullest moment
    communicators       buffers of the collective library
    context             the device context, with the code of the kernels
    apart               of states, activations and temporaries what is not there with the others at
                        the fullest moment
    host                what the host holds for the device, no part of the other sums
    """

    states: StateBytes
    activations: float
    temporaries: float
    allocator_reserve: float
    communicators: float
    context: float
    apart: float = 0.0
    host: float = 0.0

    @property
    def allocated(self) -> float:
        """What the allocator hands out: torch.cuda.max_memory_allocated."""
        return self.states.total + self.activations + self.temporaries - self.apart

    @property
    def reserved(self) -> float:
        """What the allocator takes from the device: torch.cuda.max_memory_reserved."""
        return self.allocated + self.allocator_reserve

    @property
    def reserve(self) -> float:
        """All that is no tensor."""
        return self.allocator_reserve + self.communicators + self.context

    @property
    def total(self) -> float:
        """What the device has lost: the figure of nvidia-smi."""
        return self.allocated + self.reserve


def communicator_bytes(mesh: Mesh, price_cache: LayerPriceCache[Any]) -> float:
    """Bytes of the communicators of all parallel axes; none where there is no device context."""
    axes = (
        sum(mesh.degree(axis) > 1 for axis in Axis) + (mesh.ep > 1) + (1 < mesh.expert_dp < mesh.dp)
    )
    return (
        axes * price_cache.training.stack.nccl_bytes
        if price_cache.machine.cluster.device.context_bytes
        else 0.0
    )


def reserve_constant_bytes(mesh: Mesh, price_cache: LayerPriceCache[Any]) -> float:
    """Bytes a device holds before the first tensor: context and communicators."""
    return price_cache.machine.cluster.device.context_bytes + communicator_bytes(mesh, price_cache)


def occupied_bytes(allocated_bytes: float, mesh: Mesh, price_cache: LayerPriceCache[Any]) -> float:
    """What a device holds when tensors fill `allocated_bytes` of it."""
    return allocated_bytes * (
        1 + price_cache.training.stack.allocator_share
    ) + reserve_constant_bytes(mesh, price_cache)


def usable_bytes(limit_bytes: float, mesh: Mesh, price_cache: LayerPriceCache[Any]) -> float:
    """How much of `limit_bytes` tensors may fill, so that with the reserve they stay under the
    limit.
    """
    return (limit_bytes - reserve_constant_bytes(mesh, price_cache)) / (
        1 + price_cache.training.stack.allocator_share
    )


def rank_layers(strategy: Strategy, rank: int) -> list[LayerChoice]:
    """All layers of a pipeline rank, chunk by chunk."""
    return [choice for chunk in strategy.chunks(rank) for choice in chunk]


def stashes(kind: LayerKind, rank: int, layout: ParallelLayout) -> int:
    """How many micro-batches of one layer of `kind` a rank holds at its peak, per model chunk of
    the rank (EQUATIONS M4).

    With virtual stages the count is of chunk stashes, for any one chunk an upper bound; the head's
    chunk is used up at once, but perhaps not in a custom schedule.
    """
    if layout.schedule is Schedule.CUSTOM:
        own = {LayerKind.EMBEDDING: 0, LayerKind.HEAD: layout.num_virtual_stages - 1}.get(kind)
        return max(held for held, _ in _held(layout.actions, rank, own))
    if kind is LayerKind.HEAD and layout.virtual_stages > 1:
        return 1
    return in_flight(
        layout.schedule, rank, layout.mesh.pp, layout.num_micro_batches, layout.virtual_stages
    )


def peaks(rank: int, layout: ParallelLayout) -> tuple[tuple[float, float], ...]:
    """(stashes, waiting weight gradients) of any chunk at moments one of which is the fullest,
    whatever the bytes of each.

    Whole backwards: the most stashes. ZBV: stashes and waiting together are at most one more
    (costmodels/schedules/zero_bubble.py), so all stashes and one waiting, or half of that, all
    waiting, where what waits is larger than a stash.
    """
    most = stashes(LayerKind.BLOCK, rank, layout)
    if not layout.splits_backward:
        return ((most, 0),)
    if layout.schedule is Schedule.CUSTOM:
        return tuple(dict.fromkeys(_held(layout.actions, rank)))
    return (most, 1), ((most + 1) / 2, (most + 1) / 2)


@lru_cache(maxsize=64)
def _held(
    rows: tuple[str, ...], rank: int, stage: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Stashes, and weight gradients that wait, after each action of a rank; of one of its virtual
    stages, or of all.
    """
    works = [work for own, work, _ in parse_row(rows[rank], rank) if stage in (None, own)]
    changes = {
        ActionKind.FORWARD: (1, 0),
        ActionKind.INPUT_GRADIENT: (0, 1),
        ActionKind.WEIGHT_GRADIENT: (-1, -1),
        ActionKind.BACKWARD: (-1, 0),
        ActionKind.RECOMPUTE: (0, 0),
    }
    held, waiting = ([changes[work][index] for work in works] for index in (0, 1))
    return tuple(zip(accumulate(held), accumulate(waiting), strict=True))


def held_bytes(strategy: Strategy, rank: int, saved: dict[LayerChoice, float]) -> float:
    """Bytes of activations at the peak: stashes times the largest chunk's blocks, and the
    embedding's and head's own.
    """
    layout = strategy.layout
    blocks = max(
        sum(saved[c] for c in chunk if c.kind is LayerKind.BLOCK) for chunk in strategy.chunks(rank)
    )
    ends = sum(
        stashes(c.kind, rank, layout) * saved[c]
        for c in rank_layers(strategy, rank)
        if c.kind is not LayerKind.BLOCK
    )
    return stashes(LayerKind.BLOCK, rank, layout) * blocks + ends


def sent_bytes(rank: int, layout: ParallelLayout, price_cache: PriceCache) -> float:
    """What a rank has sent at the end of a step, where the stack keeps it until then: activations
    on, gradients back.
    """
    last = layout.num_virtual_stages - 1
    messages = (
        sum((stage < last) + (stage > 0) for stage in layout.stages_of(rank))
        * layout.num_micro_batches
    )
    return float(messages * price_cache.sent_bytes(layout.micro_batch_size, layout.sharding))


def rank_memory(strategy: Strategy, rank: int, price_cache: PriceCache) -> RankMemory:
    """Peak bytes of one device of a pipeline rank, by class (EQUATIONS M6)."""
    layout, layers = strategy.layout, rank_layers(strategy, rank)
    kept = rank_activations(strategy, rank, price_cache)
    table = price_cache.shared_table_bytes(layout.mesh, layout.sharding)
    held = [
        price_cache.states(choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero)
        for choice in layers
    ]
    states = sum((layer.states for layer in held), StateBytes())
    between, running = _held_and_running(strategy, rank, kept, price_cache)
    activations = sent_bytes(rank, layout, price_cache) + between
    temporaries = (
        table
        + running
        + _waiting_bytes(strategy, rank, kept, price_cache)
        + max(layer.zero_buffer for layer in held)
    )
    apart = _apart_bytes(
        strategy, rank, kept, price_cache, states.gradients + activations + temporaries
    )
    spare = price_cache.training.stack.allocator_share * (
        states.total + activations + temporaries - apart
    )
    return RankMemory(
        states=states,
        activations=activations,
        temporaries=temporaries,
        allocator_reserve=spare + sum(layer.step_copies for layer in held),
        communicators=communicator_bytes(layout.mesh, price_cache),
        context=price_cache.machine.cluster.device.context_bytes,
        apart=apart,
        host=sum(layer.host for layer in held)
        + held_bytes(strategy, rank, {choice: float(size.host) for choice, size in kept.items()}),
    )


def _held_and_running(
    strategy: Strategy,
    rank: int,
    kept: dict[LayerChoice, ActivationBytes],
    price_cache: PriceCache,
) -> tuple[float, float]:
    """The most bytes of activations between two actions, and what the fullest backward pass holds
    beyond them (costmodels/memory/peak_candidates.py).
    """
    layout = strategy.layout
    held = held_bytes(strategy, rank, {choice: float(size.saved) for choice, size in kept.items()})
    inside = _workspace_bytes(strategy, rank, kept)
    if not layout.recomputes_ahead:
        return held, inside
    chunks, most = strategy.chunks(rank), stashes(LayerKind.BLOCK, rank, layout)
    stash = max(
        sum(kept[c].saved for c in chunk if layout.virtual_stages == 1 or c.kind is LayerKind.BLOCK)
        for chunk in chunks
    )
    made = max(
        sum(_remade_bytes(choice, layout, price_cache) for choice in chunk) for chunk in chunks
    )
    alone = _workspace_bytes(
        strategy,
        rank,
        {choice: layer_activations(choice, layout, price_cache, ahead=True) for choice in kept},
    )
    levels = [
        (
            held + (moment.stashes - most) * stash + moment.remade * made,
            alone if moment.alone else inside,
        )
        for moment in moments(rank, layout)
    ]
    between = max(level for level, _ in levels)
    return between, max(map(sum, levels)) - between


def rank_activations(
    strategy: Strategy, rank: int, price_cache: PriceCache
) -> dict[LayerChoice, ActivationBytes]:
    """Those of every layer of a rank, with what another layer's copies to and from the host may
    hold while it runs as temporary.
    """
    layers = rank_layers(strategy, rank)
    kept = {choice: layer_activations(choice, strategy.layout, price_cache) for choice in layers}
    largest = sorted(kept[choice].host for choice in layers)[-2:]
    if not largest[-1]:
        return kept
    return {
        choice: replace(
            size, workspace=size.workspace + largest[0 if size.host == largest[-1] else -1]
        )
        for choice, size in kept.items()
    }


def layer_activations(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache, *, ahead: bool = False
) -> ActivationBytes:
    """A layer's, with the sum of a shared table's gradients among the temporaries of the embedding,
    or its whole one before that.

    ahead: after a recompute ahead of the gradient, when it holds all that it would keep without
    recompute
    """
    again, on_host = (Recompute.NONE, ()) if ahead else (choice.recompute, choice.on_host)
    size = price_cache.activations(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), again, on_host
    )
    if choice.kind is not LayerKind.EMBEDDING:
        return size
    return replace(
        size,
        workspace=size.workspace + price_cache.table_workspace_bytes(layout.mesh, layout.sharding),
    )


def _remade_bytes(choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache) -> int:
    return price_cache.remade_bytes(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
    )


def gradients_come_and_go(layout: ParallelLayout, price_cache: PriceCache) -> bool:
    """Whether the gradients of a layout are freed and made again in a step; elsewhere they are
    taken as always there.
    """
    return (
        price_cache.training.stack.frees_gradients
        and not layout.splits_backward
        and not price_cache.offload
    )


def _apart_bytes(
    strategy: Strategy,
    rank: int,
    kept: dict[LayerChoice, ActivationBytes],
    price_cache: PriceCache,
    together: float,
) -> float:
    """By how much `together`, of gradients, activations and temporaries, is more than there is at
    any moment.

    Counted where gradients come and go and the host keeps nothing.
    """
    layout = strategy.layout
    if not gradients_come_and_go(layout, price_cache) or any(size.host for size in kept.values()):
        return 0.0
    held = {
        choice: price_cache.states(
            choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero
        )
        for choice in kept
    }
    embedding = next((choice for choice in kept if choice.kind is LayerKind.EMBEDDING), None)
    reduced = max(held[choice].zero_buffer if choice.zero == 1 else 0 for choice in kept)
    return together - peak_bytes(
        strategy,
        rank,
        {
            choice: held_in_passes(choice, size, layout, price_cache)
            for choice, size in kept.items()
        },
        throughout(layout, None if embedding is None else embedding.zero, reduced, price_cache),
    )


def throughout(
    layout: ParallelLayout, embedding_zero: int | None, reduced: Bytes, price_cache: PriceCache
) -> ConstantBytes:
    """What no layer's pass frees on a rank, where gradients come and go.

    embedding_zero: the ZeRO stage of the embedding where the rank has it; reduced: the largest
    buffer of its layers of ZeRO 1
    """
    table, gathered = price_cache.shared_table_bytes(layout.mesh, layout.sharding), 0.0
    if table and embedding_zero == 3:
        gathered = (
            price_cache.states(LayerKind.EMBEDDING, layout.mesh, layout.sharding, 3).zero_buffer
            / ZERO_3_COPIES
        )
    return ConstantBytes(
        sent=price_cache.sent_bytes(layout.micro_batch_size, layout.sharding),
        shared_table=table,
        gathered=gathered,
        reduced=reduced,
    )


def held_in_passes(
    choice: LayerChoice, size: ActivationBytes, layout: ParallelLayout, price_cache: PriceCache
) -> LayerBytes:
    """What a layer holds as it runs backward, where gradients come and go; ZeRO 1 reduces after
    that.

    Embedding and head with one table are gathered and reduced together, as one layer that begins
    the passes and ends them.
    """
    states = price_cache.states(choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero)
    joined = price_cache.shared_table_bytes(layout.mesh, layout.sharding) > 0
    remade = alone = 0.0
    if layout.recomputes_ahead:
        remade, alone = (
            _remade_bytes(choice, layout, price_cache),
            layer_activations(choice, layout, price_cache, ahead=True).workspace,
        )
    held = LayerBytes(
        saved=size.saved,
        workspace=size.workspace,
        gradients=states.states.gradients,
        remade=remade,
        alone=alone,
    )
    if joined and choice.kind is LayerKind.HEAD:
        return held
    gathered, reduced = zero_passes_bytes(states.zero_buffer, choice.zero)
    return replace(
        held,
        gathered=0.0 if joined and choice.kind is LayerKind.EMBEDDING else gathered,
        reduced=reduced,
    )


def zero_passes_bytes(zero_buffer: float, zero: int) -> tuple[float, float]:
    """Of a layer's ZeRO buffer what is gathered, and what is reduced, in its backward pass."""
    whole = zero_buffer / {2: ZERO_2_COPIES, 3: ZERO_3_COPIES}.get(zero, 1)
    return (2 * whole if zero == 3 else 0.0), (whole if zero >= 2 else 0.0)


def _workspace_bytes(
    strategy: Strategy, rank: int, kept: dict[LayerChoice, ActivationBytes]
) -> float:
    """The largest temporaries of a layer, less what the layers after it kept of the micro-batch,
    which is free by then.

    Of a backward in two parts it is free only after the second.
    """
    if strategy.layout.splits_backward:
        return max(size.workspace for size in kept.values())
    head = max(
        (size.saved for choice, size in kept.items() if choice.kind is LayerKind.HEAD), default=0
    )
    blocks = max(
        sum(kept[c].saved for c in chunk if c.kind is LayerKind.BLOCK)
        for chunk in strategy.chunks(rank)
    )
    freed = {LayerKind.HEAD: 0, LayerKind.BLOCK: head, LayerKind.EMBEDDING: head + blocks}
    return max(size.workspace - freed[choice.kind] for choice, size in kept.items())


def _waiting_bytes(
    strategy: Strategy, rank: int, kept: dict[LayerChoice, ActivationBytes], price_cache: PriceCache
) -> float:
    """What weight gradients that wait hold at the fullest moment, beyond the most stashes of the
    largest chunk; the head's once.
    """
    layout = strategy.layout
    if not layout.splits_backward:
        return 0.0
    most, waiting = (
        stashes(LayerKind.BLOCK, rank, layout),
        {
            choice: price_cache.waiting_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
            )
            for choice in kept
        },
    )
    chunks = [
        [choice for choice in chunk if choice.kind is LayerKind.BLOCK]
        for chunk in strategy.chunks(rank)
    ]
    stash = max(sum(kept[choice].saved for choice in chunk) for chunk in chunks)
    apart = max(sum(waiting[choice] for choice in chunk) for chunk in chunks)
    head = sum(size for choice, size in waiting.items() if choice.kind is LayerKind.HEAD)
    return max(h * stash + w * apart for h, w in peaks(rank, layout)) - most * stash + head
