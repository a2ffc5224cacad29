"""A user's dictionary of tensor parallelism for a traced module: roles of its matrices and tables.

    column      the outputs of a matrix are divided over the ranks
    row         the inputs of a matrix, over which it sums, are divided
    vocabulary  the rows of a table, or the outputs of the matrix of the logits, are divided
    replicated  every rank computes all of it
    pointwise   calls that the tracer has no rule for, such as a torch.autograd.Function, compute
                every element by itself, and may be divided as their inputs are

Each role has patterns of names: of the submodule that makes a call, or of a parameter that the call
reads. `*` stands for any letters, dots included. What no pattern names keeps the division that the
tracer derives (profiles/tracing/divisible.py). Attributes such as a number of heads need no entry:
the sizes of views are divided as their tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError

POINTWISE = "pointwise"
_FORBID = {"extra": "forbid"}
OPTION = "--tp-rules"


class TpRole(StrEnum):
    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpRules:
    """Patterns of names by role. Raises ConfigError where there is none."""

    __pydantic_config__ = _FORBID

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    pointwise: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.all_patterns()) and not self.pointwise:
            roles = ", ".join((*TpRole, POINTWISE))
            raise ConfigError(f"{OPTION} has no pattern", hint=f"name submodules under {roles}")

    def all_patterns(self) -> Iterator[tuple[TpRole, str]]:
        """Yields every pattern with its role."""
        for role in TpRole:
            for pattern in getattr(self, role.value):
                yield role, pattern

    def role(self, path: str, parameters: Iterable[str]) -> tuple[TpRole, str] | None:
        """Returns the first role of a call, with the pattern that gives it, or None.

        path         the submodule that makes the call
        parameters   names of the parameters that it reads
        """
        names = (path, *parameters)
        for role, pattern in self.all_patterns():
            inside = role is TpRole.REPLICATED and fnmatchcase(path, f"{pattern}.*")
            if inside or any(fnmatchcase(name, pattern) for name in names):
                return role, pattern
        return None

    def pointwise_pattern(self, path: str) -> str | None:
        """Returns the pattern that calls the work of a submodule pointwise, or None."""
        return next((each for each in self.pointwise if fnmatchcase(path, each)), None)


def read_tp_rules(path: Path) -> TpRules:
    """Reads a YAML of lists of patterns by role. Raises ConfigError."""
    hints = Hints(f"choose another {OPTION}", "correct that line")
    return parse(TpRules, read_yaml(path, hints=hints), str(path))
