"""Launchers' own names of parplan's options, from the tables of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from parplan.planner.export.fields.arguments import Argument
from parplan.planner.export.targets import TARGETS

_ANY = 7  # a number that no argument has by default
# keys of files that programs also take as arguments, such as `--per_device_train_batch_size`
_KEYS = ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "train_batch_size")


@cache
def aliases() -> Mapping[str, str]:
    """Returns the option of each argument that says one number as the option does."""
    rows = (row for target in TARGETS.values() for row in target.table if _is_number(row))
    named = ((f"--{row.name}" if row.name in _KEYS else row.name, row.facts[0]) for row in rows)
    return {name: f"--{fact.replace('_', '-')}" for name, fact in named if name.startswith("--")}


def _is_number(row: Argument) -> bool:
    """True if an argument says the number of its one fact, and nothing else."""
    if len(row.facts) != 1:
        return False
    try:
        return row.read((f"{_ANY}",), {}) == {row.facts[0]: _ANY}
    except ValueError:  # a word of another kind
        return False
