"""A loss or gradient that is not finite ends a run on every rank, with the ranks where it came up.

Loss and gradient norm are sums over all ranks, which every rank has and which are not finite as
soon as one rank's part is not: looking at them costs nothing, and all ranks end together. Only then
they tell each other whose part it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.profiles.errors import RunError


@dataclass(slots=True)
class RankLosses:
    """The parts of this rank in the loss and in the squared gradient norm of a step, before they
    are summed over ranks.
    """

    loss: Tensor | None = None
    squared_norm: Tensor | None = None

    def sum_loss(self, share: Tensor) -> Tensor:
        """The loss of the whole batch. Collective."""
        self.loss = share.clone()
        dist.all_reduce(share)
        return share

    def sum_norm(self, share: Tensor) -> Tensor:
        """The norm of the whole model's gradients, from the squared one of this rank's.
        Collective.
        """
        self.squared_norm = share.clone()
        dist.all_reduce(share)
        return share.sqrt().float()

    def require_finite(self, step: int, loss: float, norm: float | None) -> None:
        """Raises RunError on every rank where loss or norm of step 0, 1, ... are not finite; a norm
        of None may be anything.

        Collective where it raises.
        """
        sums = {"the loss": loss, "the gradient norm": norm}
        wrong = {
            what: value
            for what, value in sums.items()
            if value is not None and not math.isfinite(value)
        }
        if not wrong:
            return
        parts = [part.double() for part in (self.loss, self.squared_norm) if part is not None]
        found = torch.stack(parts).isfinite().logical_not().int()
        everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        ranks = dict(
            zip(sums, zip(*(flags.tolist() for flags in everyone), strict=True), strict=True)
        )
        said = "; ".join(
            f"{what} is {value}, from {_ranks(ranks[what])}" for what, value in wrong.items()
        )
        raise RunError(
            f"step {step + 1}: {said}; it must be finite",
            hint="start again with a smaller --learning-rate, or go on regardless with --allow-non-finite",
        )

    def forget(self) -> None:
        """Hold nothing after a step: its memory would count as what the next step freed."""
        self.loss = self.squared_norm = None


def _ranks(flags: Iterable[int]) -> str:
    """The ranks that have a flag: `rank 3`, or `ranks 0-3, 6`; a sum of finite parts can be
    infinite too.
    """
    found = [rank for rank, flag in enumerate(flags) if flag]
    if not found:
        return "the sum over all ranks"
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {text}" if len(found) == 1 else f"ranks {text}"
