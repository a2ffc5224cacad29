"""Peak bytes of one device by class: states, saved activations, temporaries and the reserve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache, LayerStates
from parplan.costmodels.layers.layer_times import ActivationBytes
from parplan.costmodels.layers.model_states import ZERO_3_COPIES, StateBytes
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_candidates import peak_candidates
from parplan.costmodels.memory.peak_memory import Bytes, ConstantBytes, LayerBytes, peak_bytes
from parplan.costmodels.schedules.actions import ActionKind, csv_row, parse_row
from parplan.costmodels.schedules.dual_pipe import fewest_micro_batches
from parplan.costmodels.schedules.schedule import Schedule, actions, in_flight, stages_of
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKind

LayersOf = Callable[[int], tuple[int, int]]  # the layers [first, end) of a virtual stage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes per device of one pipeline rank.

    allocator_reserve    bytes that the caching allocator holds beyond the tensors at the peak
    communicators        buffers of the collective library
    context              the device context, with the code of the kernels
    apart                bytes of states, activations and temporaries that never coexist with the
                         rest at the peak
    host                 host bytes for the device, no part of the other sums
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
        """Bytes that the allocator hands out: torch.cuda.max_memory_allocated."""
        return self.states.total + self.activations + self.temporaries - self.apart

    @property
    def reserved(self) -> float:
        """Bytes that the allocator takes from the device: torch.cuda.max_memory_reserved."""
        return self.allocated + self.allocator_reserve

    @property
    def reserve(self) -> float:
        """Bytes that are no tensors."""
        return self.allocator_reserve + self.communicators + self.context

    @property
    def total(self) -> float:
        """Bytes taken from the device: the figure of nvidia-smi."""
        return self.allocated + self.reserve


def communicator_bytes(mesh: Mesh, price_cache: LayerPriceCache) -> float:
    """Bytes of the communicators of all parallel axes; zero without a device context."""
    if not price_cache.machine.cluster.device.context_bytes:
        return 0.0
    split_experts = 1 < mesh.expert_replicas < mesh.ranks_per_stage
    axes = sum(mesh.degree(axis) > 1 for axis in Axis) + (mesh.ep > 1) + split_experts
    return axes * price_cache.training.stack.nccl_bytes


def reserve_constant_bytes(mesh: Mesh, price_cache: LayerPriceCache) -> float:
    """Bytes that a device holds before the first tensor: context and communicators."""
    return price_cache.machine.cluster.device.context_bytes + communicator_bytes(mesh, price_cache)


def occupied_bytes(allocated_bytes: float, mesh: Mesh, price_cache: LayerPriceCache) -> float:
    """Bytes that a device holds when its tensors fill `allocated_bytes`."""
    held_bytes = allocated_bytes * (1 + price_cache.training.stack.allocator_share)
    return held_bytes + reserve_constant_bytes(mesh, price_cache)


def usable_bytes(limit_bytes: float, mesh: Mesh, price_cache: LayerPriceCache) -> float:
    """Bytes that tensors may fill so that they stay under `limit_bytes` with the reserve.

    On a pool of an unequal cluster they stay under the limit of its devices too.
    """
    limit_bytes = min(limit_bytes, price_cache.most_bytes)
    room_bytes = limit_bytes - reserve_constant_bytes(mesh, price_cache)
    return room_bytes / (1 + price_cache.training.stack.allocator_share)


def rank_layers(strategy: Strategy, rank: int) -> list[LayerChoice]:
    """Returns all layers of a pipeline rank, chunk by chunk."""
    return [choice for chunk in strategy.chunks(rank) for choice in chunk]


def stashes(kind: LayerKind, rank: int, layout: ParallelLayout) -> int:
    """Returns the most micro-batches that a rank holds per model chunk (EQUATIONS M4).

    They are those of one layer of `kind`. With virtual stages the count is of chunk stashes, an
    upper bound for any single chunk. The head's chunk is used up at once, except in some custom
    schedules.
    """
    if layout.schedule is Schedule.CUSTOM:
        stage = {LayerKind.EMBEDDING: 0, LayerKind.HEAD: layout.num_virtual_stages - 1}.get(kind)
        return max(held for held, _ in _held(layout.actions, rank, stage))
    if kind is LayerKind.HEAD and layout.virtual_stages > 1:
        return 1
    return in_flight(
        layout.schedule, rank, layout.mesh.pp, layout.num_micro_batches, layout.virtual_stages
    )


def peak_stash_counts(rank: int, layout: ParallelLayout) -> tuple[tuple[float, float], ...]:
    """Returns (stashes, waiting weight gradients) pairs that include the peak for all sizes.

    The pairs count any chunk of the rank. Whole backward passes: the most stashes. ZBV: stashes and
    waiting gradients together are at most one more (costmodels/schedules/zero_bubble.py). So the
    peak is at all stashes and one waiting gradient, or at half of that number of each, if a waiting
    gradient is larger than a stash. DualPipeV: as its lists have them, which more micro-batches
    only make longer. The waiting gradient of the head counts at all of these moments.
    """
    most = stashes(LayerKind.BLOCK, rank, layout)
    if not layout.splits_backward:
        return ((most, 0),)
    if layout.schedule is Schedule.CUSTOM:
        return tuple(dict.fromkeys(_held(layout.actions, rank)))
    if layout.schedule is Schedule.DUALPIPEV:
        return _dual_pipe_counts(rank, layout.mesh.pp)
    return (most, 1), ((most + 1) / 2, (most + 1) / 2)


@lru_cache(maxsize=64)
def _dual_pipe_counts(rank: int, num_ranks: int) -> tuple[tuple[float, float], ...]:
    """Returns the pairs of `peak_stash_counts` of which no other has as much of both."""
    schedule, fewest = Schedule.DUALPIPEV, fewest_micro_batches(num_ranks)
    order = actions(schedule, rank, num_ranks, fewest, 2)
    row = csv_row(order, stages_of(schedule, rank, num_ranks, 2))
    pairs = set(_held((row,), 0))
    return tuple(
        pair
        for pair in sorted(pairs)
        if not any(pair[0] <= held and pair[1] <= waits for held, waits in pairs - {pair})
    )


@lru_cache(maxsize=64)
def _held(
    rows: tuple[str, ...], rank: int, stage: int | None = None
) -> tuple[tuple[int, int], ...]:
    """Returns the stashes and the waiting weight gradients after each action of a rank.

    stage    counts one of its virtual stages alone
    """
    works = [work for of, work, _ in parse_row(rows[rank], rank) if stage in (None, of)]
    changes = {
        ActionKind.FORWARD: (1, 0),
        ActionKind.INPUT_GRADIENT: (0, 1),
        ActionKind.WEIGHT_GRADIENT: (-1, -1),
        ActionKind.BACKWARD: (-1, 0),
        ActionKind.RECOMPUTE: (0, 0),
    }
    held = accumulate(changes[work][0] for work in works)
    waiting = accumulate(changes[work][1] for work in works)
    return tuple(zip(held, waiting, strict=True))


def besides_bytes(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> list[float]:
    """Bytes of a micro-batch that each chunk of a rank saves besides its layers."""
    layout = strategy.layout
    return [
        price_cache.besides_bytes(*strategy.layers_of(stage), layout.micro_batch_size)
        for stage in layout.stages_of(rank)
    ]


def held_bytes(
    strategy: Strategy,
    rank: int,
    saved: dict[LayerChoice, float],
    besides: Sequence[float] | None = None,
) -> float:
    """Peak bytes of saved activations.

    They are the stashes times the blocks of the largest chunk with the bytes `besides` them, and
    the stashes of embedding and head.
    """
    layout = strategy.layout
    chunks = strategy.chunks(rank)
    blocks = max(
        sum(saved[c] for c in chunk if c.kind.role is LayerKind.BLOCK) + beside
        for chunk, beside in zip(chunks, besides or [0.0] * len(chunks), strict=True)
    )
    ends = sum(
        stashes(c.kind.role, rank, layout) * saved[c]
        for c in rank_layers(strategy, rank)
        if c.kind.role is not LayerKind.BLOCK
    )
    return stashes(LayerKind.BLOCK, rank, layout) * blocks + ends


def num_sent(rank: int, layout: ParallelLayout) -> int:
    """The number of messages, activations and gradients, that a rank sends in a step."""
    last = layout.num_virtual_stages - 1
    by_stage = ((stage < last) + (stage > 0) for stage in layout.stages_of(rank))
    return layout.num_micro_batches * sum(by_stage)


def sent_bytes(
    rank: int,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    layers_of: LayersOf | None = None,
) -> float:
    """Bytes of the messages that a rank has sent at the end of a step.

    They are activations and gradients, zero unless the stack keeps them until then. Without the
    layers of the virtual stages all cuts are alike.
    """
    last = layout.num_virtual_stages - 1

    def sent(cut: int) -> int:
        cut_class = price_cache.cut_class(cut)
        return price_cache.sent_bytes(cut_class, layout.micro_batch_size, layout.sharding)

    total = 0
    for stage in layout.stages_of(rank):
        first, end = layers_of(stage) if layers_of else (0, 0)
        total += (sent(end) if stage < last else 0) + (sent(first) if stage > 0 else 0)
    return float(layout.num_micro_batches * total)


def rank_memory(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> RankMemory:
    """Returns the peak bytes of one device of a pipeline rank, by class (EQUATIONS M6)."""
    layout = strategy.layout
    price_cache = prices_at(layout, rank, price_cache)
    layers = rank_layers(strategy, rank)
    sizes = rank_activations(strategy, rank, price_cache)
    table = price_cache.shared_table_bytes(layout.mesh, strategy.first_sharding)
    of_choice = {choice: choice_states(choice, layout, price_cache) for choice in sizes}
    held = [of_choice[choice] for choice in layers]
    states = sum((layer.states for layer in held), StateBytes())
    between, running = _held_and_running(strategy, rank, sizes, price_cache)
    activations = sent_bytes(rank, layout, price_cache, strategy.layers_of) + between
    temporaries = (
        table
        + running
        + _waiting_bytes(strategy, rank, sizes, price_cache)
        + max(layer.zero_buffer for layer in held)
    )
    apart = _apart_bytes(
        strategy, rank, sizes, price_cache, states.gradients + activations + temporaries
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
        + held_bytes(strategy, rank, {choice: float(size.host) for choice, size in sizes.items()}),
    )


def _held_and_running(
    strategy: Strategy,
    rank: int,
    sizes: dict[LayerChoice, ActivationBytes],
    price_cache: LayerPriceCache,
) -> tuple[float, float]:
    """Returns the peak bytes of activations between actions, and the excess of a backward pass.

    The excess is that of the fullest backward pass (costmodels/memory/peak_candidates.py).
    """
    layout = strategy.layout
    saved = {choice: float(size.saved) for choice, size in sizes.items()}
    held = held_bytes(strategy, rank, saved, besides_bytes(strategy, rank, price_cache))
    inside = _workspace_bytes(strategy, rank, sizes)
    if not layout.recomputes_ahead:
        return held, inside
    chunks = strategy.chunks(rank)
    most = stashes(LayerKind.BLOCK, rank, layout)
    stash = max(
        sum(
            sizes[c].saved
            for c in chunk
            if layout.virtual_stages == 1 or c.kind.role is LayerKind.BLOCK
        )
        + beside
        for chunk, beside in zip(chunks, besides_bytes(strategy, rank, price_cache), strict=True)
    )
    made = max(
        sum(_remade_bytes(choice, layout, price_cache) for choice in chunk) for chunk in chunks
    )
    alone = _workspace_bytes(
        strategy,
        rank,
        {choice: layer_activations(choice, layout, price_cache, ahead=True) for choice in sizes},
    )
    levels = [
        (
            held + (moment.stashes - most) * stash + moment.remade * made,
            alone if moment.alone else inside,
        )
        for moment in peak_candidates(rank, layout)
    ]
    between = max(level for level, _ in levels)
    return between, max(map(sum, levels)) - between


def rank_activations(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache
) -> dict[LayerChoice, ActivationBytes]:
    """Returns the activations of every layer of a rank.

    Copies of another layer to and from the host that may run at the same time count as temporaries.
    """
    layers = rank_layers(strategy, rank)
    sizes = {
        choice: layer_activations(choice, strategy.layout, price_cache)
        for choice in dict.fromkeys(layers)
    }
    largest = sorted(sizes[choice].host for choice in layers)[-2:]
    if not largest[-1]:
        return sizes
    return {
        choice: replace(
            size, workspace=size.workspace + largest[0 if size.host == largest[-1] else -1]
        )
        for choice, size in sizes.items()
    }


def layer_activations(
    choice: LayerChoice,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
    *,
    ahead: bool = False,
) -> ActivationBytes:
    """Returns the activations of a layer.

    The embedding's temporaries include the sum of a shared table's gradients, or before that the
    whole gradient of the table.

    ahead    after a recompute ahead of the gradient, with all tensors saved as without recompute
    """
    level, on_host = (Recompute.NONE, ()) if ahead else (choice.recompute, choice.on_host)
    size = price_cache.activations(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), level, on_host
    )
    if choice.kind.role is not LayerKind.EMBEDDING:
        return size
    table = price_cache.table_workspace_bytes(layout.mesh, layout.sharding_of(choice))
    return replace(size, workspace=size.workspace + table)


def _remade_bytes(choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache) -> int:
    return price_cache.remade_bytes(
        choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
    )


def gradients_come_and_go(layout: ParallelLayout, price_cache: LayerPriceCache) -> bool:
    """True if the gradients of a layout are freed and allocated again in a step.

    Elsewhere gradients count as always allocated.
    """
    return (
        price_cache.training.stack.frees_gradients
        and not layout.splits_backward
        and not price_cache.gradients_on_host
    )


def choice_states(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> LayerStates:
    """Returns the bytes of the states of one layer on a device."""
    return price_cache.states(
        choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero, choice.own_zero
    )


def _apart_bytes(
    strategy: Strategy,
    rank: int,
    sizes: dict[LayerChoice, ActivationBytes],
    price_cache: LayerPriceCache,
    together: float,
) -> float:
    """Bytes by which `together` exceeds the gradients, activations and temporaries of any moment.

    Zero unless gradients come and go; where the host holds activations, the gradients of updates in
    the backward pass alone, which no two layers have at once.
    """
    layout = strategy.layout
    if not gradients_come_and_go(layout, price_cache):
        return 0.0
    held = {choice: choice_states(choice, layout, price_cache) for choice in sizes}
    if any(size.host for size in sizes.values()):
        gradients = sum(held[choice].states.gradients for choice in rank_layers(strategy, rank))
        return gradients if price_cache.training.stack.updates_in_backward else 0.0
    embedding = next((choice for choice in sizes if choice.kind.role is LayerKind.EMBEDDING), None)
    reduced = max(states.reduced_after_bytes for states in held.values())
    return together - peak_bytes(
        strategy,
        rank,
        {
            choice: held_in_passes(choice, size, layout, price_cache)
            for choice, size in sizes.items()
        },
        constant_bytes(
            rank,
            layout,
            embedding,
            reduced,
            price_cache,
            strategy.layers_of,
        ),
        besides_bytes(strategy, rank, price_cache),
    )


def constant_bytes(
    rank: int,
    layout: ParallelLayout,
    embedding: LayerChoice | None,
    reduced: Bytes,
    price_cache: LayerPriceCache,
    layers_of: LayersOf | None = None,
) -> ConstantBytes:
    """Returns the bytes that no layer's pass frees on a rank whose gradients come and go.

    Messages count with their mean size. Without the layers of the virtual stages all cuts are
    alike.

    embedding    the rank's embedding, if it has it
    reduced      the largest buffer of its ZeRO-1 layers
    """
    table = gathered = 0.0
    if embedding is not None:
        sharding = layout.sharding_of(embedding)
        table = price_cache.shared_table_bytes(layout.mesh, sharding)
        if table and embedding.zero == 3:
            states = price_cache.states(LayerKind.EMBEDDING, layout.mesh, sharding, 3)
            gathered = states.zero_buffer / ZERO_3_COPIES
    return ConstantBytes(
        sent=sent_bytes(rank, layout, price_cache, layers_of) / max(1, num_sent(rank, layout)),
        shared_table=table,
        gathered=gathered,
        reduced=reduced,
    )


def held_in_passes(
    choice: LayerChoice, size: ActivationBytes, layout: ParallelLayout, price_cache: LayerPriceCache
) -> LayerBytes:
    """Returns a layer's bytes in its backward pass if gradients come and go.

    ZeRO 1 reduces after that pass. Embedding and head with one table are gathered and reduced
    together, as one layer that begins and ends the passes.
    """
    states = choice_states(choice, layout, price_cache)
    joined = price_cache.shared_table_bytes(layout.mesh, layout.sharding) > 0
    remade = alone = 0.0
    if layout.recomputes_ahead:
        remade = _remade_bytes(choice, layout, price_cache)
        alone = layer_activations(choice, layout, price_cache, ahead=True).workspace
    stay = not price_cache.training.stack.updates_in_backward
    held = LayerBytes(
        saved=size.saved,
        workspace=size.workspace,
        gradients=states.states.gradients if stay else 0,
        remade=remade,
        alone=alone,
    )
    if joined and choice.kind.role is LayerKind.HEAD:
        return held
    embeds = joined and choice.kind.role is LayerKind.EMBEDDING
    return replace(
        held,
        gathered=0.0 if embeds else states.gathered_bytes,
        reduced=states.reduced_bytes,
    )


def _workspace_bytes(
    strategy: Strategy, rank: int, sizes: dict[LayerChoice, ActivationBytes]
) -> float:
    """Peak temporaries of a layer, less the saved tensors of later layers, which are free by then.

    In a split backward pass they are free after the second part only.
    """
    if strategy.layout.splits_backward:
        return max(size.workspace for size in sizes.values())
    head = max(
        (size.saved for choice, size in sizes.items() if choice.kind.role is LayerKind.HEAD),
        default=0,
    )
    blocks = max(
        sum(sizes[c].saved for c in chunk if c.kind.role is LayerKind.BLOCK)
        for chunk in strategy.chunks(rank)
    )
    freed = {LayerKind.HEAD: 0, LayerKind.BLOCK: head, LayerKind.EMBEDDING: head + blocks}
    return max(size.workspace - freed[choice.kind.role] for choice, size in sizes.items())


def _waiting_bytes(
    strategy: Strategy,
    rank: int,
    sizes: dict[LayerChoice, ActivationBytes],
    price_cache: LayerPriceCache,
) -> float:
    """Bytes of waiting weight gradients at the peak, beyond the most stashes of the largest chunk.

    The head's count once.
    """
    layout = strategy.layout
    if not layout.splits_backward:
        return 0.0
    most = stashes(LayerKind.BLOCK, rank, layout)
    waiting = {
        choice: price_cache.waiting_bytes(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice)
        )
        for choice in sizes
    }
    chunks = [
        [choice for choice in chunk if choice.kind.role is LayerKind.BLOCK]
        for chunk in strategy.chunks(rank)
    ]
    stash = max(sum(sizes[choice].saved for choice in chunk) for chunk in chunks)
    apart = max(sum(waiting[choice] for choice in chunk) for chunk in chunks)
    head = sum(size for choice, size in waiting.items() if choice.kind.role is LayerKind.HEAD)
    fullest = max(held * stash + waits * apart for held, waits in peak_stash_counts(rank, layout))
    return fullest - most * stash + head
