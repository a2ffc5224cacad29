"""Fitted terms of stacks and networks, with bounds, sources, and values fitted without each source.

`profiles/data/terms.yaml` is written by `python -m parplan.planner.validation.term_fit` from a
table of measured steps. A stack's file in `configs/stacks` has the facts that can be read in its
code, this file the terms that cannot.
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
    """One fitted constant: `value` within `low` and `high`, fitted to `rows` rows of `fitted_on`.

    without: source -> the value of a fit that did not see it, for predictions of that source's rows
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
        """Returns the value, or that of the fit without `source`."""
        return self.value if source is None else self.without.get(source, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Deviations of measurements from predictions whose fit had not seen them.

    A deviation is measured / predicted - 1, a fraction.

    time_band, memory_band  eight in ten of the rows were within +- this of their prediction
    memory_margin           share of a device that, added to the prediction, covers 99 in 100 rows,
                            including rows that ran out of memory; at least LEAST_MARGIN
    """

    __pydantic_config__ = _FORBID

    time_rows: int
    time_band: float
    memory_rows: int
    memory_band: float
    memory_margin: float


EVERY_STACK = "all"  # the key of the residuals of all rows, used for a stack with too few rows
FEWEST_ROWS = 10
# share of a device; assumed, since most rows tell allocated bytes and nothing of fragmentation
LEAST_MARGIN = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms by stack and by the name of a cluster's NIC, then by name; residuals by stack."""

    __pydantic_config__ = _FORBID

    stacks: Mapping[str, Mapping[str, Term]] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, Term]] = field(default_factory=dict)
    residuals: Mapping[str, Residuals] = field(default_factory=dict)

    def residuals_of(self, stack_name: str) -> Residuals:
        """Returns the residuals of predictions for a stack.

        Each part that rests on fewer than 10 rows is that of all stacks.
        """
        time = self.residuals[self.time_stack(stack_name)]
        memory = self.residuals[self.memory_stack(stack_name)]
        return replace(memory, time_rows=time.time_rows, time_band=time.time_band)

    def time_stack(self, stack_name: str) -> str:
        """Returns the stack whose measured step times a stack's residuals rest on.

        It is EVERY_STACK for a stack with fewer than 10.
        """
        residuals = self.residuals.get(stack_name)
        enough = residuals and residuals.time_rows >= FEWEST_ROWS
        return stack_name if enough else EVERY_STACK

    def memory_stack(self, stack_name: str) -> str:
        """Returns the stack whose measured memories a stack's residuals rest on.

        It is EVERY_STACK for a stack with fewer than 10.
        """
        residuals = self.residuals.get(stack_name)
        enough = residuals and residuals.memory_rows >= FEWEST_ROWS
        return stack_name if enough else EVERY_STACK

    def of_stack(self, stack: Stack, without: str | None = None) -> Stack:
        """Returns the stack with its fitted terms, or those fitted without the source `without`."""
        terms = self.stacks.get(stack.terms_of or stack.name, {})
        values: dict[str, Any] = {name: term.seen_without(without) for name, term in terms.items()}
        return replace(stack, **values)

    def nic_share(self, nic_name: str, without: str | None = None) -> float | None:
        """Returns the share of a NIC's bandwidth that NCCL reaches on that network.

        It is None for a network without a fit.
        """
        term = self.links.get(nic_name, {}).get("nic_share")
        return None if term is None else term.seen_without(without)


@functools.cache
def shipped_terms() -> Terms:
    """Returns the terms in profiles/data/terms.yaml. Raises ConfigError for a malformed file."""
    path = resources.files("parplan.profiles") / "data" / "terms.yaml"
    return parse(Terms, read_yaml(path, path.name), path.name)
