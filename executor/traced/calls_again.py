"""The calls of a shard that run again in the backward pass, by the plan's recompute list."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from parplan.executor.traced.program_cut import is_view, where
from parplan.planner.plan.traced_plan import ShardPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import ATTENTION, Program


def calls_again(
    program: Program, shard: ShardPlan, places: Sequence[int], calls: Sequence[fx.Node]
) -> Mapping[fx.Node, bool]:
    """Returns the calls at `places` of a shard, and whether the output of each is made again too.

    Otherwise the output stays saved, as that of attention does for a reader that does not run
    again. `calls` are those of the shard. Raises ConfigError for a call that cannot run again.
    """
    again = dict.fromkeys(program.calls[shard.first + place] for place in places)
    for node in again:
        if not program.is_repeatable(node):
            raise ConfigError(
                f"recompute_lists: {shard.name}: {where(node)} cannot run again by itself",
                hint="make the plan again: the module, or torch, has changed",
            )
    return {
        node: node.meta["function"] != ATTENTION or _readers(node, calls) <= again.keys()
        for node in again
    }


def _readers(node: fx.Node, calls: Collection[fx.Node]) -> set[fx.Node]:
    """The calls among `calls` that read a value, also through views of it."""
    readers = set[fx.Node]()
    for each in node.users:
        if each in calls:
            readers |= _readers(each, calls) if is_view(each) else {each}
    return readers
