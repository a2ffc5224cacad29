"""The calls of a shard that run again in the backward pass, by the plan's recompute list."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from parplan.executor.traced.program_cut import where
from parplan.planner.plan.traced_plan import ShardPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import Program


def calls_again(program: Program, shard: ShardPlan, places: Sequence[int]) -> frozenset[fx.Node]:
    """Returns the calls at `places` of a shard. Raises ConfigError for one that cannot run again.

    The output of each call is made again with all that it saves. A reshape may be a view or a copy,
    by the kernels and sizes of the run; as a view it makes nothing.
    """
    again = [program.calls[shard.first + place] for place in places]
    for node in again:
        if not program.is_repeatable(node):
            raise ConfigError(
                f"recompute_lists: {shard.name}: {where(node)} cannot run again by itself",
                hint="make the plan again: the module, or torch, has changed",
            )
    return frozenset(again)
