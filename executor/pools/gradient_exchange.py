"""Adds the gradients of this rank over pools that divide the batch (EQUATIONS P10).

Every round of `parplan.executor.pools.gradient_rounds` is one all-to-all of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.executor.pools.gradient_rounds import Piece, Round, elements_of, rounds_of
from parplan.executor.pools.joined_ranks import JoinedRanks
from parplan.executor.sharding.tensor_boxes import Box
from parplan.executor.tensors import part


class GradientExchange:
    """Adds the gradients of this rank's parameters over pools. Collective.

    Parameters must be as they are between steps. One that another rank of the pool holds too is
    given by both.
    """

    def __init__(self, joined: JoinedRanks, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, each) for name, each in parameters if each.requires_grad]
        self._joined = joined
        self._parameters = [parameter for _, parameter in trained]
        self._layout = [
            (name, box) for name, parameter in trained for box, _ in parts_of(parameter.detach())
        ]
        own = [[name, box.offset, box.shape] for name, box in self._layout]
        layouts = [
            [(name, Box(tuple(offset), tuple(shape))) for name, offset, shape in each]
            for each in joined.everyone(own)
        ]
        self._rounds = list(rounds_of(layouts, joined.place))

    def add(self) -> None:
        """Adds the gradients of a step, in place. A parameter without one has a gradient of 0."""
        views = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            views += [view for _, view in parts_of(parameter.grad)]
        for to_sum, back, to_copies in self._rounds:
            self._run(to_sum, views, adds=True)
            self._run(back, views)
            self._run(to_copies, views)

    def sent_elements(self) -> tuple[int, int]:
        """Returns the gradients that this rank sends in a step: to other pools, and inside its own.

        Pieces that stay on the rank do not count.
        """
        place = self._joined.place
        outside, inside = 0, 0
        for rank, pieces in (pair for each in self._each_round() for pair in enumerate(each.sent)):
            if place.pool_of(rank) != place.pool:
                outside += elements_of(pieces)
            elif rank != place.rank:
                inside += elements_of(pieces)
        return outside, inside

    def _each_round(self) -> Iterator[Round]:
        return itertools.chain.from_iterable(self._rounds)

    @torch.no_grad()
    def _run(self, each: Round, views: Sequence[Tensor], *, adds: bool = False) -> None:
        """Sends the pieces of a round, and adds those that arrive or takes them instead."""
        dtype, device = views[0].dtype if views else torch.float32, self._joined.device
        flat = [
            self._view(piece, views).reshape(-1).to(device)
            for pieces in each.sent
            for piece in pieces
        ]
        received = self._joined.all_to_all(
            torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device),
            [elements_of(pieces) for pieces in each.sent],
            [elements_of(pieces) for pieces in each.arriving],
        )
        at = 0
        for piece in itertools.chain.from_iterable(each.arriving):
            target = self._view(piece, views)
            values = received[at : at + target.numel()].view(target.shape).to(target.device)
            at += target.numel()
            if adds:
                target.add_(values)
            else:
                target.copy_(values)

    def _view(self, piece: Piece, views: Sequence[Tensor]) -> Tensor:
        """Returns the part of this rank's gradient that a piece is."""
        offset = self._layout[piece.of][1].offset
        ranges = zip(piece.where, offset, strict=True)
        return views[piece.of][tuple(slice(a - by, b - by) for (a, b), by in ranges)]


def parts_of(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yields the boxes of a tensor that this rank holds, with views of them; a number is [1]."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape) or (1,)
        yield Box((0,) * len(shape), shape), tensor.view(shape)
        return
    for chunk in tensor.__create_chunk_list__():  # type: ignore[attr-defined]
        yield Box(tuple(chunk.offsets), tuple(chunk.sizes)), part(tensor)
