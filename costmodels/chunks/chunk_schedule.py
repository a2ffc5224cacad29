"""The chunk schedule of one device, computed before the step (EQUATIONS O4, O5, O7).

Bytes that do not depend on evictions are added up by slot first (costmodels/chunks/slots.py): bytes
outside chunks, chunks that stay, gathered groups while passes need them, gradients in transit. The
rest of the device is room for parameter chunks of HOST blocks, which the policy evicts. The host
has the same parameters, so that an eviction copies nothing.

    D = 1    a block uses its chunks in place
    D > 1    a block uses groups of D chunks, gathered as one run beside the own chunk, which is
             needed for the gather alone

A group stays gathered if the next moment uses it too. Gradients of a group exist from the first
block of a stage's backward pass that makes some to the last. After that they are reduced (D > 1),
and those of HOST blocks are sent. If gradients overwrite parameters, the group stays from the first
gradient to the last and is void afterwards.

No parameter of HOST blocks on the device stays valid past the end of a step: the host updates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from parplan.costmodels.chunks.accesses import (
    LayerPass,
    PartsOf,
    group_uses,
    layer_passes,
    numbered_layers,
)
from parplan.costmodels.chunks.chunk_budget import NonChunkBytes, non_chunk_bytes
from parplan.costmodels.chunks.chunk_layout import (
    ChunkLayout,
    ExpertGroup,
    SizedTensor,
    block_tensors,
    pack,
    pack_with_experts,
)
from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkedBlocks, RankChunks
from parplan.costmodels.chunks.chunk_states import check_states
from parplan.costmodels.chunks.eviction import Residency, residencies
from parplan.costmodels.chunks.group_size import (
    common_group_size,
    expert_group_size,
    summed_by_part,
    widest_group,
)
from parplan.costmodels.chunks.prefetch import issue_moments
from parplan.costmodels.chunks.slots import (
    ChunkBytes,
    OpKey,
    Slots,
    in_order,
    moment_slot,
    summed_by_slot,
)
from parplan.costmodels.host.state_location import Access, Eviction, StateLocation
from parplan.costmodels.layers.chunk_owners import expert_owners
from parplan.costmodels.layers.chunked_layer import (
    sent_precision,
    state_widths,
    writes_over_parameters,
)
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.units import format_bytes

# per parameter of the chunk that the device updates: its fp32 gradient and one more term of Adam
UPDATE_BYTES = 8


def rank_groups(
    strategy: Strategy, rank: int, price_cache: LayerPriceCache
) -> tuple[ChunkedBlocks, ...]:
    """Returns the blocks of a pipeline rank by location, in communication groups of one size.

    Raises ConfigError, also where a rank has no layer that chunks can hold.
    """
    layout = strategy.layout
    layers = numbered_layers(strategy)
    blocks = [
        (block, choice)
        for stage in sorted(layout.stages_of(rank))
        for choice, block in layers[stage]
        if block is not None
    ]
    if not blocks:
        raise ConfigError(
            f"pipeline rank {rank} has no layer that chunks can hold",
            hint="use fewer stages, or give the rank a layer with parameters of its own",
        )
    tensors = {
        choice: block_tensors(price_cache.layer(choice.kind, 1), layout.sharding_of(choice))
        for _, choice in blocks
    }
    owners = expert_owners(layout.mesh)
    if owners:
        return _groups_with_experts(blocks, tensors, layout.mesh.dp, owners)
    sizes = {
        choice.kind: widest_group(
            tuple(tensor.elements for tensor in sized)
            for other, sized in tensors.items()
            if other.kind == choice.kind
        )
        for choice in tensors
    }
    parts = {kind: price_cache.tensors_by_part(kind, layout.access) for kind in sizes}
    by_part = layout.access is Access.OPERATOR
    if by_part:
        sizes = {kind: summed_by_part(sizes[kind], parts[kind]) for kind in sizes}
    elements = common_group_size(
        [sizes[choice.kind] for _, choice in blocks],
        layout.mesh.dp,
        price_cache.machine.cluster,
        price_cache.training.precision.num_bytes,
        by_part=by_part,
    )
    apart = by_part or len(set(sizes.values())) > 1
    groups = []
    for location in StateLocation:
        here = [(block, choice) for block, choice in blocks if choice.home is location]
        if here:
            named = [tensor for block, choice in here for tensor in _named(block, tensors[choice])]
            groups.append(
                ChunkedBlocks(
                    home=location,
                    blocks=tuple(block for block, _ in here),
                    chunk_layout=pack(
                        named,
                        elements,
                        layout.mesh.dp,
                        [len(tensors[choice]) for _, choice in here],
                        apart=apart,
                        units=tuple(chain.from_iterable(parts[choice.kind] for _, choice in here))
                        if by_part
                        else (),
                    ),
                    parts=tuple(parts[choice.kind] for _, choice in here),
                )
            )
    return tuple(groups)


def _groups_with_experts(
    blocks: Sequence[tuple[int, LayerChoice]],
    tensors: Mapping[LayerChoice, Sequence[SizedTensor]],
    ranks: int,
    expert_ranks: int,
) -> tuple[ChunkedBlocks, ...]:
    """Returns the blocks by location where experts have owners of their own."""
    sizes = [ExpertGroup.of(block) for block in tensors.values()]
    size = expert_group_size(sizes, ranks, expert_ranks)

    def packed(here: Sequence[tuple[int, LayerChoice]]) -> ChunkLayout:
        named = [_named(block, tensors[choice]) for block, choice in here]
        return pack_with_experts(named, size, ranks, expert_ranks)

    return tuple(
        ChunkedBlocks(
            home=location,
            blocks=tuple(block for block, _ in here),
            chunk_layout=packed(here),
            parts=tuple((len(tensors[choice]),) for _, choice in here),
        )
        for location in StateLocation
        if (here := [(block, choice) for block, choice in blocks if choice.home is location])
    )


def _named(block: int, tensors: Sequence[SizedTensor]) -> list[SizedTensor]:
    return [replace(each, name=f"block{block}.{each.name}") for each in tensors]


def rank_chunks(
    strategy: Strategy,
    rank: int,
    price_cache: LayerPriceCache,
    *,
    eviction: Eviction,
    device_bytes: int,
    clean_copies: bool = True,
    outside: NonChunkBytes | None = None,
) -> RankChunks:
    """Returns the chunks of one device of pipeline rank `rank` and their operations in a step.

    device_bytes    bytes that the device's tensors may fill
    clean_copies    the host keeps a copy of the parameters that it sends. False prices
                    PatrickStar's scheme, which the executor never runs: an evicted chunk is copied
                    to the host, and updated parameters return in fp32
    outside         bytes on the device outside of chunks; by default the predicted ones

    Raises InfeasibleError with the smallest budget if the budget is too small, ConfigError for
    schedules that chunks do not support.
    """
    groups = rank_groups(strategy, rank, price_cache)
    passes = tuple(layer_passes(strategy, rank, parts_in(strategy, price_cache)))
    moments = tuple(layer_pass for layer_pass in passes if layer_pass.block is not None)
    step = _slots(groups, moments, strategy, price_cache, clean_copies)
    chunk_bytes = step.chunk_bytes(
        always_bytes(groups, price_cache, in_parameters=step.in_parameters)
    )
    if outside is None:
        outside = non_chunk_bytes(strategy, rank, passes, price_cache)
    fixed = _fixed_bytes(chunk_bytes, step, outside)
    needs = step.needs()
    chunk = step.sizes.parameters
    least = [there + len(needed) * chunk for there, needed in zip(fixed, needs, strict=True)]
    if max(least) > device_bytes:
        raise _too_small(rank, least, device_bytes, moments)
    held = residencies(
        needs,
        [(device_bytes - there) // chunk for there in fixed],
        eviction,
        forgets=step.in_parameters and not step.gathers,
    )
    evictable = summed_by_slot(step.count, ((stay.first, stay.last, chunk) for stay in held))
    free = [device_bytes - there - more for there, more in zip(fixed, evictable, strict=True)]
    issued = issue_moments(step, held, free)
    whole = [device_bytes - left for left in free]
    reduced = step.reduced_bytes()
    of_chunks = [
        chunk_bytes[slot] + whole[slot] - fixed[slot] + reduced.get(slot, 0)
        for slot in range(step.count)
    ]
    chunks = RankChunks(
        groups=groups,
        moments=_moments(moments, step, held, issued, whole, of_chunks),
        closing=step.returns(),
        in_parameters=step.in_parameters,
        device_bytes=device_bytes,
        smallest_bytes=max(least),
        most_bytes=max(whole),
        communication=price_cache.chunking.communication,
    )
    check_states(chunks)
    return chunks


def parts_in(strategy: Strategy, price_cache: LayerPriceCache) -> PartsOf | None:
    """Returns the accesses of a block's pass in a strategy, None where a pass is one."""
    access = strategy.layout.access
    if access is Access.BLOCK:
        return None
    return lambda choice, work: price_cache.part_passes(
        choice.kind, access, choice.recompute, backward=work is ActionKind.BACKWARD
    )


def _fixed_bytes(chunk_bytes: Sequence[int], step: Slots, room: NonChunkBytes) -> list[int]:
    """Bytes on the device by slot, without parameters of HOST blocks.

    chunk_bytes    the part of them that chunks take

    A moment counts at the maximum of three times: its pass, the time when chunks take the gradients
    that autograd made, and the reduction.
    """
    besides = [0] * step.count
    reduced = step.reduced_bytes()
    begun = step.begun_bytes()
    besides[::2] = room.gaps
    for moment, (inside, rest, made) in enumerate(
        zip(room.moments, room.rests, room.made, strict=True)
    ):
        slot = moment_slot(moment)
        apart = reduced.get(slot, 0)
        # one chunk after the other, autograd's gradients stay until the last is reduced
        waiting = (rest + made + apart,) if step.single else (rest + made, rest + apart)
        besides[slot] = max(inside - begun[slot], *waiting)
    updates = any(group.home is StateLocation.DEVICE for group in step.groups)
    elements = step.groups[0].chunk_layout.chunk_elements if updates else 0
    besides[-1] = max(besides[-1], room.end + UPDATE_BYTES * elements)
    return [there + more for there, more in zip(chunk_bytes, besides, strict=True)]


def _slots(
    groups: tuple[ChunkedBlocks, ...],
    moments: Sequence[LayerPass],
    strategy: Strategy,
    price_cache: LayerPriceCache,
    clean_copies: bool,
) -> Slots:
    training, chunk_layout = price_cache.training, groups[0].chunk_layout
    elements, gathered = chunk_layout.chunk_elements, chunk_layout.group_elements
    in_parameters = writes_over_parameters(training, strategy.layout.num_micro_batches)
    gradient = sent_precision(training, in_parameters)
    return Slots(
        groups=groups,
        uses=group_uses(groups, moments, in_parameters=in_parameters),
        num_moments=len(moments),
        in_parameters=in_parameters,
        sizes=ChunkBytes(
            parameters=training.precision.num_bytes * elements,
            gradients=gradient.num_bytes * elements,
            ranks=strategy.layout.mesh.dp,
            gathered_parameters=training.precision.num_bytes * gathered,
            gathered_gradients=gradient.num_bytes * gathered,
        ),
        adds_up=strategy.layout.num_micro_batches > 1,
        clean_copies=clean_copies,
        communication=price_cache.chunking.communication,
    )


def always_bytes(
    groups: Sequence[ChunkedBlocks], price_cache: LayerPriceCache, *, in_parameters: bool
) -> int:
    """Bytes of the own chunks that stay on the device all step."""
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
    if moment == len(moments):
        where = "in the update"
    else:
        where = f"{'in' if inside else 'before'} the {moments[moment]}"
    budget = "the limit leaves nothing for tensors beside the reserve"
    if device_bytes > 0:
        budget = f"the device budget is {device_bytes:,} ({format_bytes(device_bytes)})"
    return InfeasibleError(
        f"chunks of pipeline rank {rank} need at least {needed:,} bytes "
        f"of the device ({format_bytes(needed)}) {where}, {budget}",
        hint="give more of the device, keep more blocks on the host, recompute more, "
        "or use smaller micro-batches",
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
            work=layer_pass.work,
            stage=layer_pass.stage,
            micro_batch=layer_pass.micro_batch,
            block=-1 if layer_pass.block is None else layer_pass.block,
            before=before[index],
            after=after[index],
            device_bytes=whole[moment_slot(index)],
            chunk_bytes=of_chunks[moment_slot(index)],
            access=layer_pass.access,
        )
        for index, layer_pass in enumerate(moments)
    )
