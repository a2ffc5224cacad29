"""The fitted terms of stacks and networks, with their bounds, what they were fitted on, and their
values without each source.

`profiles/data/terms.yaml` is written by `python -m parplan.planner.validation.term_fit` from a
table of measured steps. A stack's file in `configs/stacks` holds what can be read in its code; this
one what cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.documents.schema import parse
from parplan.profiles.stack import Stack

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One fitted constant: `value` within `low` and `high`, fitted to `rows` rows of the sources
    `fitted_on`.

    without: source -> the value of a fit that did not see it, for predictions of that source's own
    rows
    """

    __pydantic_config__ = _FORBID

    value: float
    low: float
    high: float
    unit: str
    rows: int
    fitted_on: tuple[str, ...] = ()
    without: Mapping[str, float] = field(default_factory=dict)

    def seen_without(self, source: str | None) -> float:
        """The value, or that of the fit without `source`."""
        return self.value if source is None else self.without.get(source, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """How far measurements were from predictions whose fit had not seen them (measured / predicted
    - 1, a fraction).

    time_band, memory_band   eight in ten of the rows were within +- this of their prediction
    memory_margin            share of a device that, added to the prediction, covers 99 in 100 rows,
                             those that ran out of memory too; at least LEAST_MARGIN
    """

    __pydantic_config__ = _FORBID

    time_rows: int
    time_band: float
    memory_rows: int
    memory_band: float
    memory_margin: float


EVERY_STACK = "all"  # the residuals of all rows: what holds for a stack with too few of its own
FEWEST_ROWS = 10
LEAST_MARGIN = (
    0.04  # of a device: most rows tell what is allocated, and nothing of fragmentation; assumed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms by stack and by the name of a cluster's NIC, then by name; residuals by stack."""

    __pydantic_config__ = _FORBID

    stacks: Mapping[str, Mapping[str, Term]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, Term]] = field(default_factory=dict)
    residuals: Mapping[str, Residuals] = field(default_factory=dict)

    def residuals_of(self, stack_name: str) -> Residuals:
        """The residuals of predictions for a stack; each part that rests on fewer than 10 rows is
        that of all stacks.
        """
        time, memory = (
            self.residuals[self.time_stack(stack_name)],
            self.residuals[self.memory_stack(stack_name)],
        )
        return replace(memory, time_rows=time.time_rows, time_band=time.time_band)

    def time_stack(self, stack_name: str) -> str:
        """Whose measured step times a stack's residuals rest on: its own, or EVERY_STACK where it
        has fewer than 10.
        """
        own = self.residuals.get(stack_name)
        return stack_name if own and own.time_rows >= FEWEST_ROWS else EVERY_STACK

    def memory_stack(self, stack_name: str) -> str:
        """Whose measured memories a stack's residuals rest on: its own, or EVERY_STACK where it has
        fewer than 10.
        """
        own = self.residuals.get(stack_name)
        return stack_name if own and own.memory_rows >= FEWEST_ROWS else EVERY_STACK

    def of_stack(self, stack: Stack, without: str | None = None) -> Stack:
        """The stack with its fitted terms, or with those of a fit that did not see the source
        `without`.
        """
        found = self.stacks.get(stack.terms_of or stack.name, {})
        values: dict[str, Any] = {name: term.seen_without(without) for name, term in found.items()}
        return replace(stack, **values)

    def nic_share(self, nic_name: str, without: str | None = None) -> float | None:
        """What share of a NIC's bandwidth NCCL reaches on that network; None where nothing was
        fitted.
        """
        term = self.links.get(nic_name, {}).get("nic_share")
        return None if term is None else term.seen_without(without)


@functools.cache
def shipped_terms() -> Terms:
    """The terms in profiles/data/terms.yaml. Raises ConfigError when the file is malformed."""
    path = resources.files("parplan.profiles") / "data" / "terms.yaml"
    return parse(Terms, read_yaml(path, path.name), path.name)
