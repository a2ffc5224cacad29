"""Locations of the states of layers in chunks, and candidates with chunks (EQUATIONS O3).

The locations of a rank are two counts: all states of its last `host` blocks lie on the host, and
the master weights and moments of the `optimizer` blocks before them; the rest lies on the device.
Blocks of one location are adjacent, so that a chunk has one location. The blocks of a traced module
are its shards with parameters that no other shard holds, without embedding and head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, ChunkCommunication, StateLocation
from parplan.costmodels.layers.chunk_owners import expert_owners
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.dominance import Ints

_NEEDS = {StateLocation.OPTIMIZER: Offload.OPTIMIZER, StateLocation.HOST: Offload.PARAMETERS}


@dataclass(frozen=True, slots=True)
class BlockLocations:
    """The number of HOST blocks of a rank, and of OPTIMIZER blocks."""

    host: int = 0
    optimizer: int = 0

    def of(self, num_blocks: int) -> tuple[StateLocation, ...]:
        """Returns the location of each of the rank's blocks, in the order of the model."""
        device = num_blocks - self.host - self.optimizer
        return (
            (StateLocation.DEVICE,) * device
            + (StateLocation.OPTIMIZER,) * self.optimizer
            + (StateLocation.HOST,) * self.host
        )


NOTHING = BlockLocations()


def has_chunks(offload: Collection[Offload] | None) -> bool:
    """True if states that `offload` allows on the host lie in chunks."""
    return not {Offload.OPTIMIZER, Offload.PARAMETERS}.isdisjoint(offload or ())


def locations_allowed(offload: Collection[Offload]) -> tuple[StateLocation, ...]:
    """Returns the locations of one block that `offload` allows."""
    return tuple(
        location
        for location in StateLocation
        if location not in _NEEDS or _NEEDS[location] in offload
    )


@lru_cache(maxsize=256)
def _counts(num_blocks: int, allowed: tuple[StateLocation, ...]) -> tuple[Ints, Ints]:
    most_host = num_blocks if StateLocation.HOST in allowed else 0
    most_optimizer = num_blocks if StateLocation.OPTIMIZER in allowed else 0
    host, optimizer = np.indices((most_host + 1, most_optimizer + 1)).reshape(2, -1)
    within = host + optimizer <= num_blocks
    return host[within], optimizer[within]


def counts_of_locations(num_blocks: int, allowed: Collection[StateLocation]) -> tuple[Ints, Ints]:
    """Returns the counts of HOST and of OPTIMIZER blocks for every way to place a rank's blocks.

    allowed    the locations that a block may have
    """
    return _counts(num_blocks, tuple(location for location in StateLocation if location in allowed))


def illegal_chunks(
    layout: ParallelLayout,
    zero: Collection[int] | None = None,
    zero_ranks: int | None = None,
    communication: ChunkCommunication = ChunkCommunication.GROUP,
) -> str | None:
    """Returns the reason why the blocks of a layout cannot lie in chunks, or None.

    zero             the ZeRO stages allowed, None for all
    communication    how ranks gather the chunks of a group
    """
    if layout.splits_backward:
        return f"chunks follow whole backward passes, {layout.schedule} splits them"
    if layout.recomputes_ahead:
        return (
            "chunks are there during a block's own passes, "
            f"{layout.schedule} recomputes ahead of them"
        )
    if layout.tp_overlap:
        return (
            "chunks are of blocks that run one after the other, "
            "sub-pipelined tensor parallelism runs two halves"
        )
    if layout.mesh.dp == 1 and layout.mesh.ep * layout.mesh.etp not in (1, layout.mesh.tp):
        return (
            f"chunks of dp 1 are not gathered, {layout.mesh.expert_replicas} tensor-parallel ranks "
            f"have copies of each of ep {layout.mesh.ep} parts of the experts"
        )
    if expert_owners(layout.mesh):
        apart = f"other ranks own the experts of ep {layout.mesh.ep} than the rest of a block"
        if layout.access is Access.OPERATOR:
            return f"{apart}, which an access by operators does not know"
        if communication is ChunkCommunication.SINGLE:
            return f"{apart}, which single chunks do not know"
    if layout.mesh.cp > 1:
        return f"chunks lie over all of dp, not over cp {layout.mesh.cp}"
    if layout.mesh.dp > 1 and zero is not None and 3 not in zero:
        return "chunks are sharded as with ZeRO 3, --zero or --forbid excludes that"
    if layout.mesh.dp > 1 and zero_ranks:
        return f"chunks lie over all of dp, --zero-ranks asks for {zero_ranks} neighbours"
    return None


def with_locations(
    stages: Sequence[tuple[LayerChoice, ...]],
    layout: ParallelLayout,
    locations: Sequence[BlockLocations],
) -> tuple[tuple[LayerChoice, ...], ...]:
    """Returns `stages` with the blocks of every pipeline rank at `locations[rank]`.

    They follow the order of the model over all virtual stages of the rank.
    """
    left = {
        rank: iter(
            locations[rank].of(
                sum(
                    choice.kind.in_chunks
                    for stage in layout.stages_of(rank)
                    for choice in stages[stage]
                )
            )
        )
        for rank in range(layout.mesh.pp)
    }
    return tuple(
        tuple(
            replace(choice, home=next(left[layout.rank_of(number)]))
            if choice.kind.in_chunks
            else choice
            for choice in stage
        )
        for number, stage in enumerate(stages)
    )
