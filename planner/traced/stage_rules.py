"""Shards to virtual stages by a rule, instead of by the search: uniform, by parameters, or as many
as the user says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import numpy as np

from parplan.planner.traced.range_tables import sum_of
from parplan.planner.traced.shard_master import path
from parplan.planner.traced.shards import Sharded
from parplan.profiles.errors import ConfigError


class StageRuleKind(StrEnum):
    """`uniform`: as many shards in every stage, the first have one more; `parameters`: the largest
    stage as small as can be; `ilp`: the fastest plan; `custom`: counts.
    """

    UNIFORM = "uniform"
    PARAMETERS = "parameters"
    ILP = "ilp"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRule:
    """How shards are given to stages; `counts` of each virtual stage where the rule is custom."""

    rule: StageRuleKind = StageRuleKind.ILP
    counts: tuple[int, ...] = ()


def parse_stages(text: str) -> StageRule:
    """What --stages says: uniform, parameters, ilp, or counts like 5,6,6,5. Raises ConfigError."""
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        counts = tuple(map(int, text.split(",")))
        if min(counts) < 1:
            raise ConfigError(f"--stages is {text}, every stage needs at least one shard")
        return StageRule(rule=StageRuleKind.CUSTOM, counts=counts)
    if text not in (StageRuleKind.UNIFORM, StageRuleKind.PARAMETERS, StageRuleKind.ILP):
        raise ConfigError(
            f"--stages is {text!r}, it must be uniform, parameters, ilp, or counts",
            hint="for example --stages 5,6,6,5",
        )
    return StageRule(rule=StageRuleKind(text))


def ranges(how: StageRule, sharded: Sharded, num_stages: int) -> tuple[tuple[int, int], ...] | None:
    """The shards [first, end) of each of `num_stages` stages, None where the search decides. Raises
    ConfigError for wrong counts.
    """
    size = len(sharded.shards)
    if how.rule is StageRuleKind.ILP:
        return None
    if how.rule is StageRuleKind.CUSTOM:
        if sum(how.counts) != size:
            raise ConfigError(
                f"--stages has {sum(how.counts)} shards, {sharded.model.name} has {size}",
                hint=f"give counts that add up to {size}; plan show lists the shards of a plan",
            )
        return tuple(pairwise(accumulate(how.counts, initial=0)))
    if how.rule is StageRuleKind.UNIFORM:
        each, over = divmod(size, num_stages)
        return tuple(
            pairwise(accumulate((each + (stage < over) for stage in range(num_stages)), initial=0))
        )
    return _by_parameters(sharded, num_stages)


def _by_parameters(sharded: Sharded, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Contiguous ranges whose largest has as few parameters as can be; each stage has at least one
    shard.
    """
    size = len(sharded.shards)
    held = sum_of(np.array([float(shard.parameters) for shard in sharded.shards]))
    held[np.arange(size)[:, None] >= np.arange(size + 1)[None, :]] = np.inf
    return tuple(path([held] * num_stages))
