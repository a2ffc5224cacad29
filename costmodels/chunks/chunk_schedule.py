"""The chunk schedule of one device, computed before the step: what is moved, gathered and reduced
around every pass (EQUATIONS O4, O5, O7).

Whatever does not depend on what is evicted is added up by slot first (costmodels/chunks/slots.py):
what is on the device besides chunks, chunks that are always there, gathered groups while passes
need them, gradients on their way. The rest of the device is room for parameter chunks of HOST
blocks, which are evicted by policy: the host has the same, so that this moves nothing.

    D = 1    a block uses its chunks in place
    D > 1    a block uses groups of D chunks, gathered as one run beside the own chunk, which is
             only needed for that

A group that the next moment uses too stays gathered. Gradients of a group are there from behind the
first block of a stage's backward pass that makes some to the last; behind it they are reduced (D >
1), and those of HOST blocks sent. Where gradients are written over parameters, the group stays from
the first to the last of them, and is void then.

Across the end of a step nothing of HOST blocks is valid on the device: the host updates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parplan.costmodels.chunks.accesses import LayerPass, layer_passes, numbered_layers, uses
from parplan.costmodels.chunks.chunk_budget import NonChunkBytes, besides_chunks
from parplan.costmodels.chunks.chunk_layout import SizedTensor, block_tensors, pack
from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkedBlocks, RankChunks
from parplan.costmodels.chunks.chunk_states import check_states
from parplan.costmodels.chunks.eviction import Residency, stays
from parplan.costmodels.chunks.group_size import group_size_of, widest_group
from parplan.costmodels.chunks.prefetch import moved_apart
from parplan.costmodels.chunks.slots import (
    ChunkBytes,
    OpKey,
    Slots,
    in_order,
    moment_slot,
    summed,
)
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.chunked_layer import (
    sent_precision,
    state_widths,
    writes_over_parameters,
)
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import format_bytes

# of a parameter of one chunk while the device updates it: its gradient in fp32, and one more term
# of Adam
UPDATE_BYTES = 8


def rank_groups(
    strategy: Strategy, rank: int, price_cache: PriceCache
) -> tuple[ChunkedBlocks, ...]:
    """The blocks of a pipeline rank by home, in communication groups of one size. Raises
    ConfigError.
    """
    layout, layers = strategy.layout, numbered_layers(strategy)
    blocks = [
        (block, choice)
        for stage in sorted(layout.stages_of(rank))
        for choice, block in layers[stage]
        if block is not None
    ]
    tensors = {
        choice: block_tensors(price_cache.layer(LayerKind.BLOCK, 1), layout.sharding_of(choice))
        for _, choice in blocks
    }
    sizes = widest_group(tuple(tensor.elements for tensor in own) for own in tensors.values())
    elements = group_size_of(
        sizes,
        len(blocks),
        layout.mesh.dp,
        price_cache.machine.cluster,
        price_cache.training.precision.num_bytes,
    )
    groups = []
    for home in StateLocation:
        own = [(block, choice) for block, choice in blocks if choice.home is home]
        if own:
            named = [
                SizedTensor(f"block{block}.{tensor.name}", tensor.elements)
                for block, choice in own
                for tensor in tensors[choice]
            ]
            groups.append(
                ChunkedBlocks(
                    home=home,
                    blocks=tuple(block for block, _ in own),
                    chunk_layout=pack(named, elements, layout.mesh.dp, len(own)),
                )
            )
    return tuple(groups)


def rank_chunks(
    strategy: Strategy,
    rank: int,
    price_cache: PriceCache,
    *,
    eviction: Eviction,
    device_bytes: int,
    clean_copies: bool = True,
) -> RankChunks:
    """What happens to the chunks of one device of pipeline rank `rank` in a step, where its tensors
    may fill `device_bytes`.

    clean_copies: the host keeps a copy of what it sends; False prices PatrickStar's way, which
    nothing here runs: a chunk that is given
        up is moved, and updated parameters return in fp32

    Raises InfeasibleError, with the smallest budget, where they do not suffice; ConfigError for
    schedules that chunks do not go with.
    """
    groups, passes = rank_groups(strategy, rank, price_cache), tuple(layer_passes(strategy, rank))
    moments = tuple(one for one in passes if one.block is not None)
    step = _slots(groups, moments, strategy, price_cache, clean_copies)
    own = step.chunk_bytes(always_bytes(groups, price_cache, in_parameters=step.in_parameters))
    fixed = _fixed_bytes(own, step, besides_chunks(strategy, rank, passes, price_cache))
    needs, chunk = step.needs(), step.sizes.parameters
    least = [there + len(needed) * chunk for there, needed in zip(fixed, needs, strict=True)]
    if max(least) > device_bytes:
        raise _too_small(rank, least, device_bytes, moments)
    held = stays(
        needs,
        [(device_bytes - there) // chunk for there in fixed],
        eviction,
        forgets=step.in_parameters and not step.gathers,
    )
    evictable = summed(step.count, ((stay.first, stay.last, chunk) for stay in held))
    free = [device_bytes - there - more for there, more in zip(fixed, evictable, strict=True)]
    issued = moved_apart(step, held, free)
    whole = [device_bytes - left for left in free]
    reduced = step.reduced_bytes()
    of_chunks = [
        own[slot] + whole[slot] - fixed[slot] + reduced.get(slot, 0) for slot in range(step.count)
    ]
    found = RankChunks(
        groups=groups,
        moments=_moments(moments, step, held, issued, whole, of_chunks),
        closing=step.returns(),
        in_parameters=step.in_parameters,
        device_bytes=device_bytes,
        smallest_bytes=max(least),
        most_bytes=max(whole),
    )
    check_states(found)
    return found


def _fixed_bytes(own: Sequence[int], step: Slots, room: NonChunkBytes) -> list[int]:
    """By slot all that is on the device but parameters of HOST blocks; `own`: of it what chunks
    take.

    The most of a moment's pass, of the time behind it when chunks take the gradients that autograd
    made, and when they are reduced.
    """
    besides, reduced, begun = [0] * step.count, step.reduced_bytes(), step.begun_bytes()
    besides[::2] = room.gaps
    for moment, (inside, rest, made) in enumerate(
        zip(room.moments, room.rests, room.made, strict=True)
    ):
        slot = moment_slot(moment)
        besides[slot] = max(inside - begun[slot], rest + made, rest + reduced.get(slot, 0))
    elements = step.groups[0].chunk_layout.chunk_elements * any(
        group.home is StateLocation.DEVICE for group in step.groups
    )
    besides[-1] = max(besides[-1], room.end + UPDATE_BYTES * elements)
    return [there + more for there, more in zip(own, besides, strict=True)]


def _slots(
    groups: tuple[ChunkedBlocks, ...],
    moments: Sequence[LayerPass],
    strategy: Strategy,
    price_cache: PriceCache,
    clean_copies: bool,
) -> Slots:
    training, elements = price_cache.training, groups[0].chunk_layout.chunk_elements
    in_parameters = writes_over_parameters(training, strategy.layout.num_micro_batches)
    gradient = sent_precision(training, in_parameters)
    return Slots(
        groups=groups,
        uses=uses(groups, moments, in_parameters=in_parameters),
        num_moments=len(moments),
        in_parameters=in_parameters,
        sizes=ChunkBytes(
            parameters=training.precision.num_bytes * elements,
            gradients=gradient.num_bytes * elements,
            ranks=strategy.layout.mesh.dp,
        ),
        adds_up=strategy.layout.num_micro_batches > 1,
        clean_copies=clean_copies,
    )


def always_bytes(
    groups: Sequence[ChunkedBlocks], price_cache: PriceCache, *, in_parameters: bool
) -> int:
    """Of the own chunks what is on the device throughout the step."""
    return sum(
        group.chunk_layout.num_groups
        * group.chunk_layout.chunk_elements
        * state_widths(group.home, price_cache.training, in_parameters)[0].total
        for group in groups
    )


def _too_small(
    rank: int, least: Sequence[int], device_bytes: int, moments: Sequence[LayerPass]
) -> InfeasibleError:
    """Names the first of the fullest slots."""
    needed = max(least)
    moment, inside = divmod(least.index(needed), 2)
    where = (
        f"in the {moments[moment]}"
        if inside
        else f"before the {moments[moment]}"
        if moment < len(moments)
        else "in the update"
    )
    budget = f"the device budget is {device_bytes:,} ({format_bytes(device_bytes)})"
    return InfeasibleError(
        f"chunks of pipeline rank {rank} need at least {needed:,} bytes of the device ({format_bytes(needed)}) {where}, "
        f"{budget if device_bytes > 0 else 'the limit leaves nothing for tensors beside the reserve'}",
        hint="give more of the device, keep more blocks on the host, recompute more, or use smaller micro-batches",
    )


def _moments(
    moments: Sequence[LayerPass],
    step: Slots,
    held: Sequence[Residency],
    issued: Mapping[OpKey, int],
    whole: Sequence[int],
    of_chunks: Sequence[int],
) -> tuple[BlockPass, ...]:
    before = in_order(len(moments), (*step.fetches(held), *step.gathers_before()), issued)
    after = in_order(len(moments), (*step.ops_behind(), *step.drops(held)), issued)
    return tuple(
        BlockPass(
            work=one.work,
            stage=one.stage,
            micro_batch=one.micro_batch,
            block=-1 if one.block is None else one.block,
            before=before[index],
            after=after[index],
            device_bytes=whole[moment_slot(index)],
            chunk_bytes=of_chunks[moment_slot(index)],
        )
        for index, one in enumerate(moments)
    )
