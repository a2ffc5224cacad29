"""Where a step goes, as the mean over all GPUs: parts that add up to the step and can be subtracted
between two plans.

The breakdown in a plan file is of the slowest pipeline rank. There, uneven stages show as more
compute; in the mean over the ranks compute is what the model costs, whoever does it, and unevenness
is waiting. That waiting has two parts:

    bubble      (P - 1) a t          what equal stages of the same mean wait (EQUATIONS P1), t their
                micro-batch's seconds
    imbalance   the rest             for slower stages, for unequal tails; it can be slightly
                negative, where the first or the last stage has less to transfer than t says

P pipeline ranks, a = 1/v for v virtual stages (costmodels/step.py, `bubble_share`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout

NAMES = (
    "compute",
    "recompute",
    "bubble",
    "imbalance",
    "data",
    "tensor",
    "p2p",
    "optimizer",
)  # of the fields, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds of one step of the mean GPU, by cause. Communication is what is exposed of it, by
    axis: dp, with copies between device and host, tp, pp.
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
        """Their sum."""
        return sum(self.values)

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `NAMES`."""
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
    """The parts of a priced step; without a pipeline nothing waits."""
    ranks = price.ranks
    waiting_s = price.step_s - fmean(rank.total.value_s for rank in ranks)
    timelines = price.simulated.ranks
    micro_batch_s = (
        fmean(line.busy_s + line.transfer_s for line in timelines) / layout.num_micro_batches
    )
    if layout.recomputes_ahead:  # in the ramps, while a rank waits
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
