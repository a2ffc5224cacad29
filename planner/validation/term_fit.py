"""Measured steps -> profiles/data/terms.yaml: `python -m parplan.planner.validation.term_fit
[--steps FILE]`, a few minutes.

Every term is one number with physical bounds, of a software stack or of a network. Each is fitted
by trying values, one term after another, so that the mean of |log(predicted / measured)| over the
experiments that ran it is least; an experiment counts once, however many rows it has. Then the same
is done without each experiment in turn: those values price its own rows in `plan validate`, so that
no figure is of rows that its fit saw. A stack whose only experiment is left out falls back to the
median slowdown of the other stacks and to neutral terms. Same table, same bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parplan.planner.validation.configuration import (
    Row,
    configuration_of,
    experiment_of,
    stack_name,
)
from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.reported_memory import Figure, figure_of
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.catalog import load_stack, stack_names
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.stack_terms import (
    EVERY_STACK,
    LEAST_MARGIN,
    Residuals,
    Term,
    Terms,
)
from parplan.profiles.stack import NEUTRAL

ROWS_OF_EXPERIMENT = 24  # evenly spaced over the rows of an experiment
SWEEPS = 2
REFINEMENTS = 3
TRIES = 5
DIGITS = 3
PRICE_OF_TERMS = 0.01
BAND_SHARE = 0.8  # eight rows in ten lie within a band
# of the rows, those that ran out of memory too, needed no more than predicted and the margin
MARGIN_SHARE = 0.99
TOY_SHARE = 0.1  # of a device: runs that hold less say little of one that fills it
WORST = 1.5  # an error counts as at most this, in log: rows of a broken run pull no term


@dataclass(frozen=True, slots=True)
class TermBounds:
    """Where a term is looked for, its unit, and what it is when nobody measured it."""

    low: float
    high: float
    unit: str
    neutral: float


SLOWDOWN = "kernel_slowdown"
STACK_TERMS = {
    SLOWDOWN: TermBounds(1.0, 1.6, "factor", 1.0),
    "host_operator_s": TermBounds(10e-6, 300e-6, "s", NEUTRAL.host_operator_s),
}
OWN_TERMS = {  # of the one stack whose rows show them
    "nanotron-2024": {"transfer_share": TermBounds(0.005, 1.0, "share", 1.0)},
}
MEMORY_TERMS = {
    "allocator_share": TermBounds(0.005, 0.25, "share", NEUTRAL.allocator_share)
}  # of stacks with rows of a whole device
# a share of a NIC's bandwidth; Omni-Path's before any step: the median of three all-reduces on 4
# and 16 nodes
LINK_TERMS = {
    "omni-path": TermBounds(
        0.05, 0.95, "share", 0.14
    ),  # (bigscience-workshop/bigscience experiments/bandwidth)
    "roce": TermBounds(0.05, 0.95, "share", 0.9),
    "efa": TermBounds(0.05, 0.95, "share", 0.9),
}
NIC_SHARE = "nic_share"
# noted of release tests: slower kernels on purpose, which say nothing of a stack
DETERMINISTIC = "deterministic kernels"

Key = tuple[str, str, str]  # "stacks" or "links", the name of one, the term
Values = Mapping[Key, float]


def bounds_of(key: Key) -> TermBounds:
    """The bounds of a term."""
    return (
        LINK_TERMS[key[1]]
        if key[0] == "links"
        else (STACK_TERMS | MEMORY_TERMS | OWN_TERMS.get(key[1], {}))[key[2]]
    )


def terms_of(values: Values) -> Terms:
    """Values as terms that prices can read."""
    return _grouped({key: _term(key, value) for key, value in values.items()})


def _term(key: Key, value: float) -> Term:
    bounds = bounds_of(key)
    return Term(value=value, low=bounds.low, high=bounds.high, unit=bounds.unit, rows=0)


def _grouped(terms: Mapping[Key, Term]) -> Terms:
    groups: dict[str, dict[str, dict[str, Term]]] = {"stacks": {}, "links": {}}
    for (group, name, term), found in terms.items():
        groups[group].setdefault(name, {})[term] = found
    return Terms(stacks=groups["stacks"], links=groups["links"])


class Fit:
    """The rows that terms are fitted to, by experiment, and which terms each row depends on."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.keys: dict[str, set[Key]] = {}  # of an experiment
        for row in rows:
            priced = price_row(row, held_out=False)
            measured = priced.error is not None or _memory_error(row, priced) is not None
            if measured and not priced.assumed and DETERMINISTIC not in row["notes"]:
                self.rows.setdefault(experiment_of(row), []).append(row)
                self.keys.setdefault(experiment_of(row), set()).update(_keys(row))
        self.rows = {
            name: _spaced(found, ROWS_OF_EXPERIMENT) for name, found in sorted(self.rows.items())
        }
        self.all_keys = sorted(set().union(*self.keys.values()))
        self._losses: dict[tuple[str, tuple[tuple[Key, float], ...]], float] = {}

    def experiments(self, key: Key, without: str | None = None) -> tuple[str, ...]:
        """The experiments that a term is fitted on."""
        return tuple(name for name in self.rows if key in self.keys[name] and name != without)

    def loss(self, experiments: Iterable[str], values: Values) -> float:
        """The mean over experiments of the mean |log(predicted / measured)| of their times and
        memories, and what terms cost.

        A factor e away from its neutral value costs as much as 1 % of error: a term that rows do
        not need stays neutral.
        """
        paid = sum(abs(math.log(value / bounds_of(key).neutral)) for key, value in values.items())
        return (
            statistics.fmean(self._loss(name, values) for name in experiments)
            + PRICE_OF_TERMS * paid
        )

    def _loss(self, experiment: str, values: Values) -> float:
        own = tuple(sorted((key, values[key]) for key in self.keys[experiment]))
        if (experiment, own) not in self._losses:
            terms = terms_of(values)
            priced = [(row, price_row(row, terms, held_out=False)) for row in self.rows[experiment]]
            times = [_log(one.error) for _, one in priced if one.error is not None]
            memories = [
                _log(error) for row, one in priced if (error := _memory_error(row, one)) is not None
            ]
            self._losses[experiment, own] = sum(
                statistics.fmean(errors) for errors in (times, memories) if errors
            )
        return self._losses[experiment, own]

    def fitted(
        self, start: Values, keys: Sequence[Key], without: str | None = None
    ) -> dict[Key, float]:
        """The values after a few sweeps over `keys`, each set to the best of ever finer tries."""
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
        bounds, best = bounds_of(key), values[key]
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
    nic, stack = configuration.cluster.nic.name, configuration.training.stack
    name = stack.terms_of or stack.name
    found: set[Key] = {("stacks", name, term) for term in STACK_TERMS | OWN_TERMS.get(name, {})}
    if _counts_the_allocator(row):
        found |= {("stacks", name, term) for term in MEMORY_TERMS}
    return found | ({("links", nic, NIC_SHARE)} if nic in LINK_TERMS else set())


def _counts_the_allocator(row: Row) -> bool:
    return bool(row["peak_memory_gib"]) and figure_of(row["memory_kind"]) is not Figure.ALLOCATED


def _memory_error(row: Row, priced: PricedRow) -> float | None:
    """The error of a memory figure that a term of memory has a part in."""
    return priced.memory_error if _counts_the_allocator(row) else None


def _spaced(rows: Sequence[Row], count: int) -> list[Row]:
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def _log(error: float) -> float:
    """|log(predicted / measured)| of a relative error, at most `WORST`."""
    return min(abs(math.log1p(error)), WORST)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _fallback(key: Key, values: Values, fit: Fit, without: str) -> float:
    """What a term is when its only experiment is left out: how slow kernels are on the other
    stacks, or neutral.
    """
    others = [
        value
        for other, value in values.items()
        if other[2] == key[2] == SLOWDOWN and fit.experiments(other, without)
    ]
    return _rounded(statistics.median(others)) if others else bounds_of(key).neutral


def fit_terms(rows: Sequence[Row]) -> Terms:
    """Every term, and its values without each experiment; no residuals, which are of predictions
    made with these.
    """
    fit = Fit(rows)
    start = {key: bounds_of(key).neutral for key in fit.all_keys}
    values = fit.fitted(start, fit.all_keys)
    without: dict[Key, dict[str, float]] = {key: {} for key in fit.all_keys}
    for experiment in fit.rows:
        keys = sorted(fit.keys[experiment])
        left = {
            **values,
            **{
                key: _fallback(key, values, fit, experiment)
                for key in keys
                if not fit.experiments(key, experiment)
            },
        }
        for key, value in fit.fitted(left, keys, experiment).items():
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


def residuals_of(rows: Sequence[Row], priced: Sequence[PricedRow]) -> dict[str, Residuals]:
    """The residuals by stack and over all rows, of predictions whose fit had not seen them; stacks
    that share terms share them.

    Rows that leave a setting open, or ran slower kernels on purpose, say nothing of a plan's error.
    """
    family = {name: load_stack(name).terms_of or name for name in stack_names()}
    by_family: dict[str, list[PricedRow]] = {}
    for row, one in zip(rows, priced, strict=True):
        if one.reason is None and not one.assumed and DETERMINISTIC not in row["notes"]:
            by_family.setdefault(family[stack_name(row)], []).append(one)
    every = [one for found in by_family.values() for one in found]
    own = {
        name: _residuals(by_family[found]) for name, found in family.items() if found in by_family
    }
    return {EVERY_STACK: _residuals(every), **own}


def _residuals(priced: Sequence[PricedRow]) -> Residuals:
    times = [
        one.measured_s / one.predicted_s - 1 for one in priced if one.measured_s and one.predicted_s
    ]
    memories = [
        one.measured_gib / one.predicted_gib - 1
        for one in priced
        if one.measured_gib
        and one.predicted_gib
        and one.measured_gib >= TOY_SHARE * (one.capacity_gib or 0)
    ]
    missed = [found for one in priced if (found := _missed_share(one)) is not None]
    return Residuals(
        time_rows=len(times),
        time_band=_quantile(map(abs, times), BAND_SHARE),
        memory_rows=len(memories),
        memory_band=_quantile(map(abs, memories), BAND_SHARE),
        memory_margin=max(LEAST_MARGIN, _quantile(missed, MARGIN_SHARE)),
    )


def _missed_share(one: PricedRow) -> float | None:
    """The share of the device by which a row needed more than predicted; one that ran out needed at
    least all of it.
    """
    if not one.capacity_gib:
        return None
    if one.out_of_memory and one.predicted_total_gib:
        return max(0.0, 1 - one.predicted_total_gib / one.capacity_gib)
    if one.measured_gib and one.predicted_gib:
        return max(0.0, one.measured_gib - one.predicted_gib) / one.capacity_gib
    return None


def _quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return _rounded(ordered[max(0, math.ceil(share * len(ordered)) - 1)]) if ordered else 0.0


def terms_to_yaml(terms: Terms) -> str:
    """The text of profiles/data/terms.yaml."""
    import yaml

    body: Any = document(terms)
    text = yaml.safe_dump(body, sort_keys=False, default_flow_style=None, width=140)
    return (
        f"# Written by `python -m parplan.planner.validation.term_fit` from measured training "
        f"steps; do not edit.\n{text}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits the terms to a table of measured steps and writes them, with the residuals of what they
    predict.
    """
    parser = argparse.ArgumentParser(
        prog="python -m parplan.planner.validation.term_fit",
        description=(__doc__ or "").splitlines()[0],
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
    terms = replace(
        terms, residuals=residuals_of(rows, [price_row(row, terms, held_out=True) for row in rows])
    )
    options.out.write_text(terms_to_yaml(terms), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
