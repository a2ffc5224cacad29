"""The ranks that own the parts of a communication group of chunks.

Data-parallel ranks own equal parts of the elements that all of them have. Where experts are divided
over ranks, other ranks have the same experts, and own equal parts of a group's last elements
(docs/design/chunks.md). A rank's chunk is its part of the first, and behind it that of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parplan.costmodels.chunks.chunk_layout import ChunkLayout
from parplan.executor.tensors import GATHER, SCATTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A run of a group's elements, and the ranks of `group`, each of which owns an equal part.

    first     its first element in the group
    elements  its length there
    at        the place of this rank's part in its chunk
    group     None where this rank owns all of it
    """

    first: int
    elements: int
    at: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group is not None else 0

    @property
    def own(self) -> int:
        """The elements that each rank owns."""
        return self.elements // (self.group.size() if self.group is not None else 1)

    def whole(self, gathered: Tensor) -> Tensor:
        """Returns the run as a view of a gathered group."""
        return gathered.narrow(0, self.first, self.elements)

    def part(self, gathered: Tensor) -> Tensor:
        """Returns this rank's part as a view of a gathered group."""
        return gathered.narrow(0, self.first + self.rank * self.own, self.own)

    def mine(self, chunk: Tensor) -> Tensor:
        """Returns this rank's part as a view of its chunk."""
        return chunk.narrow(0, self.at, self.own)

    def gather(self, chunk: Tensor, gathered: Tensor, *, aside: bool) -> dist.Work | None:
        """Fills the run of a gathered group from the chunks of all owners. Collective."""
        if self.group is None:
            self.whole(gathered).copy_(self.mine(chunk))
            return None
        return GATHER(self.whole(gathered), self.mine(chunk), group=self.group, async_op=aside)

    def reduce(self, gathered: Tensor, target: Tensor, *, aside: bool) -> dist.Work | None:
        """Sums this rank's part over all owners into `target`, which may lie there. Collective."""
        if self.group is None:
            if target.data_ptr() != self.whole(gathered).data_ptr():
                target.copy_(self.whole(gathered))
            return None
        return SCATTER(target, self.whole(gathered), group=self.group, async_op=aside)


def regions_of(
    layout: ChunkLayout, group: dist.ProcessGroup | None, experts: dist.ProcessGroup | None
) -> tuple[Region, ...]:
    """Returns the regions of a group of chunks.

    group     the data-parallel ranks, None where there is one
    experts   the ranks with the same experts, None where there is one
    """
    shared = layout.shared_elements
    first = Region(first=0, elements=shared, at=0, group=group)
    if not layout.expert_elements:
        return (first,)
    of_experts = Region(first=shared, elements=layout.expert_elements, at=first.own, group=experts)
    return first, of_experts


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A run of a parameter's elements that a rank owns.

    first  its first element in the parameter
    count  its length
    at     its place in the rank's chunk
    """

    first: int
    count: int
    at: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the run as a view [count] of `flat`, a state of the rank's chunk."""
        return flat.narrow(0, self.at, self.count)


def own_part(offset: int, num_elements: int, region: Region, rank: int) -> OwnedPart:
    """Returns the part of a parameter that a rank of its region owns; its `count` may be 0.

    The parameter lies `offset` elements from the beginning of its group.
    """
    mine = region.first + rank * region.own
    begin = max(offset, mine)
    end = min(offset + num_elements, mine + region.own)
    if begin >= end:
        return OwnedPart(0, 0, 0)
    return OwnedPart(begin - offset, end - begin, region.at + begin - mine)
