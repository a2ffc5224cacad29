"""Rules that assign shards to virtual stages in place of the search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import numpy as np

from parplan.planner.candidates.range_tables import even_path, sum_of
from parplan.planner.traced.shards import Sharded
from parplan.profiles.errors import ConfigError


class StageRuleKind(StrEnum):
    """Rules of --stages.

    uniform     equal numbers of shards, one more in the first stages
    parameters  the least parameters in the largest stage
    ilp         the fastest plan
    custom      given counts
    names       stages begin at given submodules
    """

    UNIFORM = "uniform"
    PARAMETERS = "parameters"
    ILP = "ilp"
    CUSTOM = "custom"
    NAMES = "names"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRule:
    """A rule that assigns shards to stages.

    counts   the shards of each stage, for a custom rule
    names    submodules at whose first operator a stage begins, besides the first stage
    """

    rule: StageRuleKind = StageRuleKind.ILP
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def of(self, sharded: Sharded) -> StageRule:
        """Returns the rule with counts in place of names, which are cuts of `sharded`."""
        if self.rule is not StageRuleKind.NAMES:
            return self
        firsts = [shard.first for shard in sharded.shards]
        cuts = [0, *(firsts.index(place) for place in sharded.splits), len(firsts)]
        counts = tuple(end - first for first, end in pairwise(cuts))
        return StageRule(rule=StageRuleKind.CUSTOM, counts=counts)


def parse_stages(text: str) -> StageRule:
    """Parses --stages: uniform, parameters, ilp, counts like 5,6,6,5, or names of submodules.

    Raises ConfigError.
    """
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
        counts = tuple(map(int, text.split(",")))
        if min(counts) < 1:
            raise ConfigError(f"--stages is {text}, every stage needs at least one shard")
        return StageRule(rule=StageRuleKind.CUSTOM, counts=counts)
    if text in (StageRuleKind.UNIFORM, StageRuleKind.PARAMETERS, StageRuleKind.ILP):
        return StageRule(rule=StageRuleKind(text))
    if not re.fullmatch(r"[A-Za-z_][\w.]*(,[A-Za-z_][\w.]*)*", text):
        raise ConfigError(
            f"--stages is {text!r}, it must be uniform, parameters, ilp, counts, or submodules",
            hint="for example --stages 5,6,6,5 or --stages transformer.h.12,transformer.h.24",
        )
    return StageRule(rule=StageRuleKind.NAMES, names=tuple(text.split(",")))


def ranges(how: StageRule, sharded: Sharded, num_stages: int) -> tuple[tuple[int, int], ...] | None:
    """Returns the shards [first, end) of each of `num_stages` stages, None if the search decides.

    Raises ConfigError for wrong counts.
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
        counts = [each + 1] * over + [each] * (num_stages - over)
        return tuple(pairwise(accumulate(counts, initial=0)))
    return _by_parameters(sharded, num_stages)


def _by_parameters(sharded: Sharded, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Returns contiguous ranges of shards with the least parameters in the largest."""
    size = len(sharded.shards)
    held = sum_of(np.array([float(shard.parameters) for shard in sharded.shards]))
    held[np.arange(size)[:, None] >= np.arange(size + 1)[None, :]] = np.inf
    cuts = even_path([held] * num_stages)
    assert cuts is not None, "there are no more stages than shards"
    return cuts
