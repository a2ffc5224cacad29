"""The micro-batches of one data-parallel rank in a step, where ranks have unequal shares too.

Layers of ZeRO 2 and 3, divided experts and a token table on the hosts meet those of other
data-parallel ranks in every micro-batch. A rank with
fewer micro-batches then goes through the action lists of the rank with the most, and its last
micro-batches are empty: tensors of no sequence, on which every layer gathers, computes nothing and
reduces zeros. No stage sends them to another. Below ZeRO 2 a rank has the lists of its own number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parplan.costmodels.host.offload import Offload
from parplan.planner.plan.plan import Plan

MEETING = 2  # the least ZeRO stage that reduces or gathers in every micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The micro-batches of a data-parallel rank.

    own      the number of those with sequences
    listed   the number in its action lists; those behind its own are empty
    size     sequences of one that is not empty
    """

    own: int
    listed: int
    size: int

    def split(self, batch: Tensor) -> Sequence[Tensor]:
        """Returns the rows of each listed micro-batch in those of the rank's batch."""
        return batch.split([self.size] * self.own + [0] * (self.listed - self.own))


def rank_share(plan: Plan, dp_rank: int) -> RankShare:
    """Returns the share of a data-parallel rank (EQUATIONS P9)."""
    pipeline = plan.pipeline
    own = pipeline.micro_batches(plan.mesh.dp)[dp_rank]
    meets = plan.mesh.ep > 1 or any(
        each.highest_zero >= MEETING or Offload.LOOKUP in each.offload
        for each in plan.layer_plans.values()
    )
    return RankShare(
        own=own,
        listed=pipeline.num_micro_batches if meets else own,
        size=pipeline.micro_batch_size,
    )
