"""Where the states of a rank's blocks may lie, and which candidates may hold them in chunks
(EQUATIONS O3).

The homes of a rank are two counts: its last `host` blocks have all at the host, the `optimizer`
blocks before them their master weights and moments, the rest nothing. Blocks of one home are next
to each other, so that a chunk holds one home.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.dominance import Ints
from parplan.profiles.models.operator_graph import LayerKind

_NEEDS = {StateLocation.OPTIMIZER: Offload.OPTIMIZER, StateLocation.HOST: Offload.PARAMETERS}


@dataclass(frozen=True, slots=True)
class BlockLocations:
    """How many of a rank's blocks the host keeps whole, and of how many others the optimizer's
    states.
    """

    host: int = 0
    optimizer: int = 0

    def of(self, num_blocks: int) -> tuple[StateLocation, ...]:
        """The home of each of the rank's blocks, in the order of the model."""
        device = num_blocks - self.host - self.optimizer
        return (
            (StateLocation.DEVICE,) * device
            + (StateLocation.OPTIMIZER,) * self.optimizer
            + (StateLocation.HOST,) * self.host
        )


NOTHING = BlockLocations()


def has_chunks(offload: Collection[Offload] | None) -> bool:
    """Whether any of what the host may keep is held in chunks."""
    return not {Offload.OPTIMIZER, Offload.PARAMETERS}.isdisjoint(offload or ())


def locations_allowed(offload: Collection[Offload]) -> tuple[StateLocation, ...]:
    """The homes of one block that `offload` allows."""
    return tuple(home for home in StateLocation if home not in _NEEDS or _NEEDS[home] in offload)


@lru_cache(maxsize=256)
def _counts(num_blocks: int, allowed: tuple[StateLocation, ...]) -> tuple[Ints, Ints]:
    host, optimizer = np.indices(
        [
            num_blocks * (home in allowed) + 1
            for home in (StateLocation.HOST, StateLocation.OPTIMIZER)
        ]
    ).reshape(2, -1)
    within = host + optimizer <= num_blocks
    return host[within], optimizer[within]


def counts_of_locations(num_blocks: int, allowed: Collection[StateLocation]) -> tuple[Ints, Ints]:
    """Every way to give the blocks of a rank homes that are `allowed`: the counts of HOST and of
    OPTIMIZER blocks.
    """
    return _counts(num_blocks, tuple(home for home in StateLocation if home in allowed))


def illegal_chunks(
    layout: ParallelLayout, zero: Collection[int] | None = None, zero_ranks: int | None = None
) -> str | None:
    """Why the blocks of a layout cannot be held in chunks, or None; `zero`: the ZeRO stages
    allowed, None for all.
    """
    what = "chunks"
    if layout.splits_backward:
        return f"{what} follow whole backward passes, {layout.schedule} splits them"
    if layout.recomputes_ahead:
        return f"{what} are there during a block's own passes, {layout.schedule} recomputes ahead of them"
    if layout.tp_overlap:
        return f"{what} are of blocks that run one after the other, sub-pipelined tensor parallelism runs two halves"
    if layout.mesh.ep > 1:
        return f"{what} lie over all of dp, experts are divided over ep {layout.mesh.ep}"
    if layout.mesh.dp > 1 and zero is not None and 3 not in zero:
        return f"{what} are sharded as with ZeRO 3, --zero or --forbid excludes that"
    if layout.mesh.dp > 1 and zero_ranks:
        return f"{what} lie over all of dp, --zero-ranks asks for {zero_ranks} neighbours"
    return None


def at_locations(
    stages: Sequence[tuple[LayerChoice, ...]],
    layout: ParallelLayout,
    homes: Sequence[BlockLocations],
) -> tuple[tuple[LayerChoice, ...], ...]:
    """`stages` with the blocks of every pipeline rank at `homes[rank]`, over all its virtual stages
    in the order of the model.
    """
    left = {
        rank: iter(
            homes[rank].of(
                sum(
                    choice.kind is LayerKind.BLOCK
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
            if choice.kind is LayerKind.BLOCK
            else choice
            for choice in stage
        )
        for number, stage in enumerate(stages)
    )
