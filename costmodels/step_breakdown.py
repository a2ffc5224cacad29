"""Breakdown of a step by cause, as the mean over all GPUs; two plans' parts can be subtracted.

The breakdown in a plan file is that of the slowest pipeline rank, where uneven stages show as more
compute. In the mean over the ranks, compute is the cost of the model for any division, and
unevenness is waiting, in two parts:

    bubble      (P - 1) a t          wait of equal stages of the same mean (EQUATIONS P1), t their
                micro-batch's seconds
    imbalance   the rest             wait for slower stages and unequal tails; slightly negative if
                the first or the last stage has less to transfer than t says

P pipeline ranks, a = 1/v for v virtual stages (costmodels/step.py, `bubble_share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout

# names of the fields in reports
NAMES = (
    "compute",
    "recompute",
    "bubble",
    "imbalance",
    "data",
    "tensor",
    "p2p",
    "optimizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of one step of the mean GPU, by cause.

    Communication is its exposed part, by axis: dp with copies between device and host, tp, pp.
    """

    compute_s: float
    recompute_s: float
    bubble_s: float
    imbalance_s: float
    dp_comm_s: float
    tp_comm_s: float
    pp_comm_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The sum of all parts."""
        return sum(self.values)

    @property
    def values(self) -> tuple[float, ...]:
        """The parts in the order of `NAMES`."""
        return (
            self.compute_s,
            self.recompute_s,
            self.bubble_s,
            self.imbalance_s,
            self.dp_comm_s,
            self.tp_comm_s,
            self.pp_comm_s,
            self.optimizer_s,
        )


def parts_of(layout: ParallelLayout, price: StepPrice) -> StepParts:
    """Returns the parts of a priced step; without a pipeline no rank waits."""
    ranks = price.ranks
    waiting_s = price.step_s - fmean(rank.total.value_s for rank in ranks)
    timelines = price.simulated.ranks
    micro_batch_s = (
        fmean(line.busy_s + line.transfer_s for line in timelines) / layout.num_micro_batches
    )
    if layout.recomputes_ahead:  # recompute runs in the ramps, while a rank waits
        micro_batch_s -= fmean(rank.recompute.value_s for rank in ranks) / layout.num_micro_batches
    bubble_s = (layout.mesh.pp - 1) * price.bubble_share * micro_batch_s
    return StepParts(
        compute_s=fmean(rank.compute.value_s for rank in ranks),
        recompute_s=fmean(rank.recompute.value_s for rank in ranks),
        bubble_s=bubble_s,
        imbalance_s=waiting_s - bubble_s if layout.mesh.pp > 1 else 0.0,
        dp_comm_s=fmean((rank.dp_comm + rank.host_comm).value_s for rank in ranks),
        tp_comm_s=fmean(rank.tp_comm.value_s for rank in ranks),
        pp_comm_s=fmean(rank.pp_comm.value_s for rank in ranks),
        optimizer_s=fmean(rank.optimizer.value_s for rank in ranks),
    )
