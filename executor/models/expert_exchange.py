"""The ranks that divide the experts of a block, and the way of tokens to them and back.

A rank sends each copy of a token by an all-to-all over the `ep` ranks that hold whole experts.
Where `etp` ranks divide the width of each expert, they then gather the copies that arrived at any
of them. On the way back the sums of the parts are reduce-scattered, and the all-to-all runs in
reverse. Gathered parts have the length of the longest: shorter ones end in rows that are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import product as product_of

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from parplan.executor.tensors import GATHER

# torch 2.13 deprecates the longer names, earlier ones lack the shorter
_GATHER = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)
_SCATTER = (
    getattr(collectives, "reduce_scatter_single_autograd", None)
    or collectives.reduce_scatter_tensor_autograd
)
# the axes of a stage's ranks for its experts
COPIES = "copies"
EP = "ep"
ETP = "etp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """This rank among those of its stage that divide experts.

    mesh  all ranks as (pp, copies, ep, etp)
    """

    mesh: DeviceMesh

    def degree(self, axis: str) -> int:
        names = self.mesh.mesh_dim_names or ()
        return int(self.mesh.size(names.index(axis)))  # a mesh of the axis takes a millisecond

    def rank(self, axis: str) -> int:
        return int(self.mesh.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    @property
    def divides(self) -> bool:
        """A rank holds less than all experts of a block whole."""
        return self.degree(EP) * self.degree(ETP) > 1

    @property
    def parts(self) -> DeviceMesh:
        """The ranks that hold all experts of a block together."""
        return self.mesh[EP, ETP] if self.degree(ETP) > 1 else self.mesh[EP]

    def held(self, num_experts: int) -> range:
        """Returns the experts on this rank."""
        return held_experts(num_experts, self.degree(EP), self.rank(EP))


def held_experts(num_experts: int, ep: int, ep_rank: int) -> range:
    """Returns the experts on one of `ep` ranks: equal numbers, in rank order."""
    share = num_experts // ep
    return range(share * ep_rank, share * (ep_rank + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The numbers of rows that a routing sends.

    sent       rows of this rank for each expert of the block
    arriving   rows that the ranks of an expert get: [etp rank][ep rank of origin][expert there]
    """

    sent: list[int]
    arriving: list[list[list[int]]]

    @property
    def counts(self) -> list[int]:
        """Rows of each expert on this rank."""
        by_rank = chain.from_iterable(self.arriving)
        return [sum(of_expert) for of_expert in zip(*by_rank, strict=True)]

    @property
    def received(self) -> list[int]:
        """Rows that each etp rank gets from the ranks of its all-to-all."""
        return [sum(map(sum, by_rank)) for by_rank in self.arriving]


def count_rows(chosen: Tensor, num_experts: int, ranks: ExpertRanks | None) -> Routes:
    """Returns the numbers of rows under the routing `chosen`. Collective over `ranks`."""
    flat = chosen.flatten()
    # bincount would ask a GPU for the least and the largest number
    sizes = arriving = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    if ranks is None:
        sent = sizes.tolist()
        return Routes(sent=sent, arriving=[[sent]])
    ep, etp = ranks.degree(EP), ranks.degree(ETP)
    if ep > 1:
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=ranks.group(EP))
    if etp > 1:
        own, arriving = arriving, arriving.new_empty(etp * arriving.numel())
        GATHER(arriving, own, group=ranks.group(ETP))
    # one copy, since the host waits for it
    numbers = torch.cat((sizes, arriving)).tolist()
    sent, rest = numbers[:num_experts], numbers[num_experts:]
    held = num_experts // ep
    rows = [rest[first : first + held] for first in range(0, len(rest), held)]
    return Routes(
        sent=sent, arriving=[rows[first : first + ep] for first in range(0, len(rows), ep)]
    )


def exchanged(rows: Tensor, routes: Routes, ranks: ExpertRanks) -> Tensor:
    """Returns the rows that arrive at this rank, by rank of origin and expert.

    rows  this rank's, by expert
    """
    ep = ranks.degree(EP)
    if ep == 1:
        return rows
    return collectives.all_to_all_single_autograd(rows, *_splits(routes, ranks), ranks.group(EP))


def returned(rows: Tensor, routes: Routes, ranks: ExpertRanks) -> Tensor:
    """Returns this rank's rows after their experts, the reverse of `exchanged`."""
    if ranks.degree(EP) == 1:
        return rows
    received, sent = _splits(routes, ranks)
    return collectives.all_to_all_single_autograd(rows, sent, received, ranks.group(EP))


def _splits(routes: Routes, ranks: ExpertRanks) -> tuple[list[int], list[int]]:
    """Returns the rows from and for every rank of the all-to-all."""
    ep = ranks.degree(EP)
    held = len(routes.sent) // ep
    sent = [sum(routes.sent[first : first + held]) for first in range(0, len(routes.sent), held)]
    return [sum(row) for row in routes.arriving[ranks.rank(ETP)]], sent


def by_expert(rows: Tensor, routes: Routes, ranks: ExpertRanks) -> Tensor:
    """Returns the rows of the experts on this rank by expert, then by rank of origin.

    Ranks that divide an expert gather the rows of each other first.
    """
    lengths = _lengths(routes)
    if ranks.degree(ETP) > 1:
        whole = max(routes.received)
        padded = functional.pad(rows, (0, 0, 0, whole - len(rows)))
        rows = _GATHER(padded, 0, ranks.group(ETP))
    parts = rows.split(lengths)
    return torch.cat([parts[index] for index in _order(routes)])


def by_origin(rows: Tensor, routes: Routes, ranks: ExpertRanks) -> Tensor:
    """Returns rows in the order in which they arrived at this rank, the reverse of `by_expert`.

    Ranks that divide an expert end its partial sums, each for the rows that it received.
    """
    lengths, order = _lengths(routes), list(_order(routes))
    ordered = dict(zip(order, rows.split([lengths[index] for index in order]), strict=True))
    parts = [
        ordered[index] if index in ordered else rows.new_zeros(length, rows.shape[1])
        for index, length in enumerate(lengths)
    ]
    whole = torch.cat(parts)
    if ranks.degree(ETP) == 1:
        return whole
    ended = _SCATTER(whole, "sum", 0, ranks.group(ETP))
    return ended[: routes.received[ranks.rank(ETP)]]


def on_own_rows(
    product: Callable[[Tensor, Sequence[int]], Tensor],
    rows: Tensor,
    routes: Routes,
    ranks: ExpertRanks,
) -> Tensor:
    """Returns a product of the rows that arrived at this rank alone, in the order of arrival.

    product   of rows by expert, with the numbers of rows of each expert
    """
    arrived = routes.arriving[ranks.rank(ETP)]
    held = len(arrived[0])
    lengths = list(chain.from_iterable(arrived))
    order = [
        origin * held + expert for expert, origin in product_of(range(held), range(len(arrived)))
    ]
    parts = rows.split(lengths)
    counts = [sum(of_expert) for of_expert in zip(*arrived, strict=True)]
    out = product(torch.cat([parts[index] for index in order]), counts)
    made = dict(zip(order, out.split([lengths[index] for index in order]), strict=True))
    return torch.cat([made[index] for index in range(len(lengths))])


def _lengths(routes: Routes) -> list[int]:
    """Returns the lengths of all pieces of gathered rows: those of each etp rank, and its padding.

    A piece has the rows of one rank of origin for one expert.
    """
    most = max(routes.received)
    return [
        length
        for by_rank, received in zip(routes.arriving, routes.received, strict=True)
        for length in (*chain.from_iterable(by_rank), most - received)
    ]


def _order(routes: Routes) -> Iterator[int]:
    """Yields the numbers of the pieces by expert, then by rank of origin, without paddings."""
    num_ranks, held = len(routes.arriving[0]), len(routes.arriving[0][0])
    pieces = num_ranks * held + 1
    for expert, rank, etp in product_of(range(held), range(num_ranks), range(len(routes.arriving))):
        yield etp * pieces + rank * held + expert


def balanced_rows(chosen: Tensor, num_experts: int, ranks: ExpertRanks | None) -> Routes:
    """Returns the numbers of rows where every rank sends as many to each expert.

    Prices suppose it, and so does a dry run, which has no data to choose experts by.
    """
    ends = [chosen.numel() * (expert + 1) // num_experts for expert in range(num_experts)]
    sent = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if ranks is None:
        return Routes(sent=sent, arriving=[[sent]])
    held = ranks.held(num_experts)
    from_rank = sent[held.start : held.stop]
    return Routes(sent=sent, arriving=[[from_rank] * ranks.degree(EP)] * ranks.degree(ETP))
