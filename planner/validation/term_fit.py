"""Fits the terms of profiles/data/terms.yaml to measured steps, in four minutes.

Every term is one number with physical bounds, of a software stack or of a network. Terms are fitted
one after another: each takes the tried value with the least mean of |log(predicted / measured)|
over the experiments that ran it. An experiment counts once, however many rows it has. The fit is
repeated without each experiment in turn, and the values without an experiment price its rows in
`plan validate`, so that no score comes from rows that its fit saw. A stack whose only experiment is
left out falls back to the median slowdown of the remaining stacks and to neutral terms. The same
table gives the same bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from parplan.planner.validation.configuration import configuration_of, experiment_of
from parplan.planner.validation.fitted_row import FittedRow, counts_the_allocator
from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.row_cells import Row
from parplan.planner.validation.row_stack import stack_name
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack, stack_names
from parplan.profiles.machines.stack_terms import (
    EVERY_STACK,
    LEAST_MARGIN,
    Residuals,
    Term,
    Terms,
)
from parplan.profiles.stack import NEUTRAL

ROWS_OF_EXPERIMENT = 24  # at most, evenly spaced over the rows of an experiment
SWEEPS = 2
REFINEMENTS = 3
TRIES = 5
DIGITS = 3
PRICE_OF_TERMS = 0.01
BAND_SHARE = 0.8  # eight rows in ten lie within a band
# share of the rows, with those out of memory, that need no more than predicted and the margin
MARGIN_SHARE = 0.99
WORST = 1.5  # largest error in log, so that rows of a broken run pull no term


@dataclass(frozen=True, slots=True)
class TermBounds:
    """Bounds of a term, its unit, and its value without a measurement."""

    low: float
    high: float
    unit: str
    neutral: float


SLOWDOWN = "kernel_slowdown"
STACK_TERMS = {
    SLOWDOWN: TermBounds(1.0, 1.6, "factor", 1.0),
    "host_operator_s": TermBounds(10e-6, 300e-6, "s", NEUTRAL.host_operator_s),
}
TERMS_OF_ONE_STACK = {  # terms that the rows of a single stack show
    "nanotron-2024": {"transfer_share": TermBounds(0.005, 1.0, "share", 1.0)},
}
# terms of stacks with rows on the memory of a whole device
MEMORY_TERMS = {"allocator_share": TermBounds(0.005, 0.25, "share", NEUTRAL.allocator_share)}
# Shares of a NIC's bandwidth. Omni-Path's neutral value is the median of three all-reduces on 4 and
# 16 nodes (bigscience-workshop/bigscience experiments/bandwidth).
LINK_TERMS = {
    "omni-path": TermBounds(0.05, 0.95, "share", 0.14),
    "roce": TermBounds(0.05, 0.95, "share", 0.9),
    "efa": TermBounds(0.05, 0.95, "share", 0.9),
}
NIC_SHARE = "nic_share"
# note of release tests whose kernels are slower on purpose, so that they say nothing about a stack
DETERMINISTIC = "deterministic kernels"

SpacedT = TypeVar("SpacedT")
Key = tuple[str, str, str]  # "stacks" or "links", name of the stack or link, term
Values = Mapping[Key, float]


def bounds_of(key: Key) -> TermBounds:
    group, name, term = key
    if group == "links":
        return LINK_TERMS[name]
    return (STACK_TERMS | MEMORY_TERMS | TERMS_OF_ONE_STACK.get(name, {}))[term]


def terms_of(values: Values) -> Terms:
    """Returns the values as terms that prices can read."""
    return _grouped({key: _term(key, value) for key, value in values.items()})


def _term(key: Key, value: float) -> Term:
    bounds = bounds_of(key)
    return Term(value=value, low=bounds.low, high=bounds.high, unit=bounds.unit, rows=0)


def _grouped(terms: Mapping[Key, Term]) -> Terms:
    groups: dict[str, dict[str, dict[str, Term]]] = {"stacks": {}, "links": {}}
    for (group, name, term_name), term in terms.items():
        groups[group].setdefault(name, {})[term_name] = term
    return Terms(stacks=groups["stacks"], links=groups["links"])


class Fit:
    """The rows that terms are fitted to, and the terms that they depend on, by experiment."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, list[FittedRow]] = {}
        self.keys: dict[str, set[Key]] = {}
        for row in rows:
            priced = price_row(row, held_out=False)
            measured = priced.error is not None or _memory_error(row, priced) is not None
            if measured and tells_the_error(row, priced):
                self.rows.setdefault(experiment_of(row), []).append(FittedRow(row, priced))
                self.keys.setdefault(experiment_of(row), set()).update(_keys(row))
        self.rows = {
            name: spaced(rows, ROWS_OF_EXPERIMENT) for name, rows in sorted(self.rows.items())
        }
        self.all_keys = sorted(set().union(*self.keys.values()))
        self._losses: dict[tuple[str, tuple[tuple[Key, float], ...]], float] = {}

    def experiments(self, key: Key, without: str | None = None) -> tuple[str, ...]:
        """Returns the experiments that a term is fitted on."""
        return tuple(name for name in self.rows if key in self.keys[name] and name != without)

    def loss(self, experiments: Iterable[str], values: Values) -> float:
        """Mean error of the experiments, and a price of terms that are not neutral.

        The error of an experiment is the mean |log(predicted / measured)| of its times plus that
        of its memories. A term a factor e away from its neutral value costs as much as 1 % of
        error, so that a term that rows do not need stays neutral.
        """
        paid = sum(abs(math.log(value / bounds_of(key).neutral)) for key, value in values.items())
        return (
            statistics.fmean(self._loss(name, values) for name in experiments)
            + PRICE_OF_TERMS * paid
        )

    def _loss(self, experiment: str, values: Values) -> float:
        used = tuple(sorted((key, values[key]) for key in self.keys[experiment]))
        if (experiment, used) not in self._losses:
            terms = terms_of(values)
            errors = [row.errors(terms) for row in self.rows[experiment]]
            times = [_log(time) for time, _ in errors if time is not None]
            memories = [_log(memory) for _, memory in errors if memory is not None]
            self._losses[experiment, used] = sum(
                statistics.fmean(logs) for logs in (times, memories) if logs
            )
        return self._losses[experiment, used]

    def fitted(
        self, start: Values, keys: Sequence[Key], without: str | None = None
    ) -> dict[Key, float]:
        """Returns the values after sweeps over `keys`, each set to the best of ever finer tries."""
        values = dict(start)
        for _ in range(SWEEPS):
            before = dict(values)
            for key in keys:
                experiments = self.experiments(key, without)
                if experiments:
                    values[key] = self._best(key, experiments, values)
            if values == before:
                break
        return values

    def _best(self, key: Key, experiments: tuple[str, ...], values: Values) -> float:
        bounds = bounds_of(key)
        best = values[key]
        low, high = bounds.low, bounds.high
        for _ in range(REFINEMENTS):
            ratio = (high / low) ** (1 / (TRIES - 1))
            tries = {_rounded(low * ratio**i) for i in range(TRIES)} | {best}
            best = min(
                sorted(tries), key=lambda value: self.loss(experiments, {**values, key: value})
            )
            low, high = max(bounds.low, best / ratio), min(bounds.high, best * ratio)
        return best


def _keys(row: Row) -> set[Key]:
    configuration = configuration_of(row)
    nic = configuration.cluster.nic.name
    stack = configuration.training.stack
    name = stack.terms_of or stack.name
    terms = list(STACK_TERMS | TERMS_OF_ONE_STACK.get(name, {}))
    if counts_the_allocator(row):
        terms += MEMORY_TERMS
    keys: set[Key] = {("stacks", name, term) for term in terms}
    if nic in LINK_TERMS:
        keys.add(("links", nic, NIC_SHARE))
    return keys


def _memory_error(row: Row, priced: PricedRow) -> float | None:
    """Returns the memory error of a row whose figure depends on a memory term, else None."""
    return priced.memory_error if counts_the_allocator(row) else None


def spaced(rows: Sequence[SpacedT], count: int) -> list[SpacedT]:
    """Returns at most `count` of the rows, evenly spaced."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def _log(error: float) -> float:
    """|log(predicted / measured)| of a relative error, at most `WORST`."""
    return min(abs(math.log1p(error)), WORST)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _fallback(key: Key, values: Values, fit: Fit, without: str) -> float:
    """Returns a term's value without its only experiment: median slowdown of stacks, or neutral."""
    if key[2] != SLOWDOWN:
        return bounds_of(key).neutral
    slowdowns = [
        value
        for candidate, value in values.items()
        if candidate[2] == SLOWDOWN and fit.experiments(candidate, without)
    ]
    return _rounded(statistics.median(slowdowns)) if slowdowns else bounds_of(key).neutral


def fit_terms(rows: Sequence[Row]) -> Terms:
    """Fits every term, with all experiments and without each; the terms have no residuals yet."""
    fit = Fit(rows)
    start = {key: bounds_of(key).neutral for key in fit.all_keys}
    values = fit.fitted(start, fit.all_keys)
    without: dict[Key, dict[str, float]] = {key: {} for key in fit.all_keys}
    for experiment in fit.rows:
        keys = sorted(fit.keys[experiment])
        fallbacks = {
            key: _fallback(key, values, fit, experiment)
            for key in keys
            if not fit.experiments(key, experiment)
        }
        for key, value in fit.fitted({**values, **fallbacks}, keys, experiment).items():
            if key in fit.keys[experiment]:
                without[key][experiment] = value
    terms = {}
    for key in fit.all_keys:
        experiments = fit.experiments(key)
        rows_of_term = sum(len(fit.rows[name]) for name in experiments)
        terms[key] = replace(
            _term(key, values[key]), rows=rows_of_term, fitted_on=experiments, without=without[key]
        )
    return _grouped(terms)


def tells_the_error(row: Row, priced: PricedRow) -> bool:
    """Returns whether a priced row says something about the error of a plan.

    A row that leaves a setting open, or ran slower kernels on purpose, says nothing.
    """
    return priced.reason is None and not priced.assumed and DETERMINISTIC not in row["notes"]


def residuals_of(rows: Sequence[Row], priced: Sequence[PricedRow]) -> dict[str, Residuals]:
    """Returns the residuals of held-out predictions, by stack and over all rows.

    Stacks that share terms share residuals.
    """
    family_of = {name: load_stack(name).terms_of or name for name in stack_names()}
    by_family: dict[str, list[PricedRow]] = {}
    for row, priced_row in zip(rows, priced, strict=True):
        if tells_the_error(row, priced_row):
            by_family.setdefault(family_of[stack_name(row)], []).append(priced_row)
    every = [priced_row for family_rows in by_family.values() for priced_row in family_rows]
    by_stack = {
        name: _residuals(by_family[family])
        for name, family in family_of.items()
        if family in by_family
    }
    return {EVERY_STACK: _residuals(every), **by_stack}


def _residuals(priced: Sequence[PricedRow]) -> Residuals:
    times = [row.time_deviation for row in priced if row.time_deviation is not None]
    memories = [row.memory_deviation for row in priced if row.memory_deviation is not None]
    missed = [share for share in map(_missed_share, priced) if share is not None]
    return Residuals(
        time_rows=len(times),
        time_band=_quantile(map(abs, times), BAND_SHARE),
        memory_rows=len(memories),
        memory_band=_quantile(map(abs, memories), BAND_SHARE),
        memory_margin=max(LEAST_MARGIN, _quantile(missed, MARGIN_SHARE)),
    )


def _missed_share(row: PricedRow) -> float | None:
    """Share of the device by which a row needed more than predicted.

    A run out of memory counts as having needed the whole device.
    """
    if not row.capacity_gib:
        return None
    if row.out_of_memory and row.predicted_total_gib:
        return max(0.0, 1 - row.predicted_total_gib / row.capacity_gib)
    if row.measured_gib and row.predicted_gib:
        return max(0.0, row.measured_gib - row.predicted_gib) / row.capacity_gib
    return None


def _quantile(values: Iterable[float], share: float) -> float:
    """Returns the smallest value that `share` of the values do not exceed, 0 without values."""
    ordered = sorted(values)
    return _rounded(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if ordered else 0.0


def terms_to_yaml(terms: Terms) -> str:
    """Returns the text of profiles/data/terms.yaml."""
    import yaml

    body: Any = document(terms)
    text = yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=140)
    return (
        f"# Written by `python -m parplan.planner.validation.term_fit` from measured training "
        f"steps; do not edit.\n{text}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the terms to a table of measured steps, and write them with their residuals."""
    parser = argparse.ArgumentParser(
        prog="python -m parplan.planner.validation.term_fit",
        description="Measured steps -> profiles/data/terms.yaml: "
        "`python -m parplan.planner.validation.term_fit [--steps FILE]`, a few minutes.",
    )
    parser.add_argument(
        "--steps", type=Path, default=None, help="CSV table of measured steps (the shipped one)"
    )
    parser.add_argument("--out", type=Path, default=Path("profiles/data/terms.yaml"))
    options = parser.parse_args(arguments)
    try:
        rows = read_table(options.steps)
    except ConfigError as error:
        parser.error(error.message)
    terms = fit_terms(rows)
    held_out = [price_row(row, terms, held_out=True) for row in rows]
    terms = replace(terms, residuals=residuals_of(rows, held_out))
    options.out.write_text(terms_to_yaml(terms), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
