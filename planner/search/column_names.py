"""Names of the columns of a program that a person can read.

A name has letters, digits and underscores alone, because PuLP and the file formats of solvers
change all others. It is unique in its program, and shorter than the 100 characters that PuLP
writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.stage_columns.stage_column import StageColumn

MOST_CHARACTERS = 80  # with the number behind it that tells equal names apart


@dataclass
class ColumnNames:
    """Names columns by rank, blocks or layers, and how many blocks run in which way.

    `z_rank0_44blocks_zero2x15_zero3x29` is a column of rank 0 with 15 of 44 blocks at ZeRO 2.
    """

    _given: Counter[str] = field(default_factory=Counter)

    def __call__(self, rank: int, column: StageColumn) -> str:
        return self.unique("_".join((f"z_rank{rank}", *_contents(column), *_ways(column))))

    def unique(self, name: str) -> str:
        """Returns a name in legal characters that was not given yet."""
        name = re.sub("[^A-Za-z0-9_]+", "_", name)[:MOST_CHARACTERS]
        self._given[name] += 1
        number = self._given[name]
        behind = f"__{number}"
        return (
            name if number == 1 else self.unique(f"{name[: MOST_CHARACTERS - len(behind)]}{behind}")
        )


def _contents(column: StageColumn) -> Iterator[str]:
    """Yields the number of blocks, or the first range of layers of each chunk."""
    if not column.layers:
        yield f"{column.num_blocks}blocks"
    for (first, end), *_ in column.layers:
        yield f"layers{first}to{end}"


def _ways(column: StageColumn) -> Iterator[str]:
    """Yields the ways of the blocks with their numbers, and the ZeRO stage of the ends."""
    several = len({option.recompute for option, _ in column.mix}) > 1
    for option, count in column.mix:
        yield f"{_way(option, with_recompute=several or len(column.mix) == 1)}x{count}"
    stages = {option.zero for option, _ in column.mix}
    if column.zero not in stages:
        yield f"ends_zero{column.zero}"
    if column.looks_up:
        yield "table_on_host"


def _way(option: LayerOption, *, with_recompute: bool) -> str:
    words = [f"zero{option.zero}"]
    if with_recompute:
        words.append(recompute_word(option.recompute))
    if option.on_host:
        words.append("host")
    return "_".join((*words, "")) if words[1:] else words[0]


def recompute_word(recompute: RecomputedOperators) -> str:
    """Returns a word for a level of recompute, or for the number of operators that run again."""
    if isinstance(recompute, tuple):
        return f"again{len(recompute)}" if recompute else "none"
    return str(recompute)
