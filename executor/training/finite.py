"""A loss or gradient that is not finite ends a run on every rank and names the ranks it came from.

Loss and gradient norm are sums over all ranks. Every rank has them, and they are not finite as soon
as one rank's part is not. Checking them costs nothing, and all ranks end together. Only then do the
ranks exchange whose part it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.executor.pools.joined_ranks import JoinedRanks
from parplan.profiles.errors import RunError


@dataclass(slots=True)
class RankLosses:
    """This rank's parts of a step's loss and squared gradient norm, before the sums over ranks.

    joined   the ranks of all pools, where pools divide the batch; None where there is one
    """

    loss: Tensor | None = None
    squared_norm: Tensor | None = None
    joined: JoinedRanks | None = None

    def sum_loss(self, share: Tensor) -> Tensor:
        """Return the loss of the whole batch. Collective."""
        self.loss = share.clone()
        self._add(share)
        return share

    def sum_norm(self, share: Tensor) -> Tensor:
        """Return the gradient norm of the whole model. Collective.

        share  the squared gradient norm of this rank; each pool has that of the whole model
        """
        self.squared_norm = share.clone()
        self._add(share)
        return (share / self._pools).sqrt().float()

    @property
    def _pools(self) -> int:
        return 1 if self.joined is None else len(self.joined.place.sizes)

    def _add(self, share: Tensor) -> None:
        if self.joined is None:
            dist.all_reduce(share)
        else:
            self.joined.all_reduce(share)

    def _everyone(self, flags: Tensor) -> list[Tensor]:
        """Return the flags of every rank."""
        if self.joined is not None:
            return self.joined.all_gather(flags)
        everyone = [torch.empty_like(flags) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, flags)
        return everyone

    def require_finite(self, step: int, loss: float, norm: float | None) -> None:
        """Raise RunError on every rank if loss or norm of step 0, 1, ... is not finite.

        A norm of None is not checked. Collective if it raises.
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
        not_finite = torch.stack(parts).isfinite().logical_not().int()
        everyone = self._everyone(not_finite)
        ranks = dict(
            zip(sums, zip(*(flags.tolist() for flags in everyone), strict=True), strict=True)
        )
        texts = "; ".join(
            f"{what} is {value}, from {_ranks(ranks[what])}" for what, value in wrong.items()
        )
        raise RunError(
            f"step {step + 1}: {texts}; it must be finite",
            hint=(
                "start again with a smaller --learning-rate, or go on regardless with "
                "--allow-non-finite"
            ),
        )

    def forget(self) -> None:
        """Drop the tensors after a step: the next step would seem to free their memory."""
        self.loss = self.squared_norm = None


def _ranks(flags: Iterable[int]) -> str:
    """Return the ranks that have a flag as text: `rank 3`, or `ranks 0-3, 6`.

    Without a flag, returns the sum: a sum of finite parts can be infinite too.
    """
    ranks = [rank for rank, flag in enumerate(flags) if flag]
    if not ranks:
        return "the sum over all ranks"
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
