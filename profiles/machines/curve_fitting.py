"""The common parts of all fits: tables of measurements, the fit of a curve, and its score."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from parplan.profiles.machines.curves import Curve, SizeBounds
from parplan.profiles.units import US_PER_S

Row = Mapping[str, str]
Where = Mapping[str, str | tuple[str, ...]]
Array = NDArray[np.float64]
AnyCurve = TypeVar("AnyCurve", bound=Curve)
FOLDS = 5
DIGITS = 4
MAX_STEPS = 40
LEAST_RESIDUAL = 0.01  # below 1 % an error counts as its square
REFUSED_FLAGS = (
    "tiny_gradients",
    "other_run_differs",
    "gpu_assumed",
    "slow_network",
    "slow_host_path",
    "list_output",
    "single_size",
    "l2_resident",
)
REFUSED_SOURCES = ("stas00/ml-engineering",)  # CC BY-SA


@dataclass(frozen=True, slots=True)
class MeasurementTables:
    """The CSV files of some directories, without the rows that no profile may rest on.

    A directory without a table has no rows of it.
    """

    directories: tuple[Path, ...]
    _read: dict[str, list[Row]] = field(default_factory=dict)

    def rows(self, table: str, where: Where, *, allow: str = "") -> list[Row]:
        """Returns the rows whose columns have one of the values of `where`.

        A `source` matches by its beginning; `allow` admits one flag.
        """
        if table not in self._read:
            self._read[table] = [row for path in self.directories for row in _rows_of(path, table)]
        return [
            row
            for row in self._read[table]
            if _usable(row, allow) and all(_matches(row, *item) for item in where.items())
        ]


def _rows_of(directory: Path, table: str) -> list[Row]:
    path = directory / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _usable(row: Row, allow: str) -> bool:
    refused = {flag for flag in row["flag"].split() if flag in REFUSED_FLAGS and flag != allow}
    return not refused and not row["source"].startswith(REFUSED_SOURCES)


def _matches(row: Row, column: str, values: str | tuple[str, ...]) -> bool:
    values = (values,) if isinstance(values, str) else values
    return row[column].startswith(values) if column == "source" else row[column] in values


def int_columns(row: Row, *columns: str) -> tuple[int, ...]:
    """Returns columns of a row as whole numbers."""
    return tuple(int(row[column]) for column in columns)


def times_s(rows: Sequence[Row]) -> Array:
    """Returns the measured seconds of rows."""
    return np.array([float(row["time_us"]) / US_PER_S for row in rows])


def sources_of(rows: Sequence[Row]) -> str:
    """Returns the repositories that rows come from."""
    return ", ".join(sorted({row["source"].split(" ")[0] for row in rows}))


def rounded(value: float) -> float:
    """Returns a value in the digits of a profile."""
    return float(f"{value:.{DIGITS}g}")


def rounded_curve(curve: AnyCurve) -> AnyCurve:
    """Returns a curve with every constant in the digits of a profile."""
    values = {field.name: getattr(curve, field.name) for field in fields(curve)}
    floats: dict[str, Any] = {
        name: rounded(value) for name, value in values.items() if isinstance(value, float)
    }
    return replace(curve, **floats)


def fit(
    predict: Callable[[Array], Array],
    measured: Array,
    start: Sequence[float],
    weights: Array | None = None,
) -> Array:
    """Returns positive constants that minimise the weighted sum of |log(predicted / measured)|.

    Levenberg-Marquardt on the logarithms of the constants, re-weighted towards the absolute value:
    medians, not means.
    """
    base = np.ones_like(measured) if weights is None else weights
    target = np.log(measured)

    def residual(at: Array) -> Array:
        difference: Array = np.log(predict(np.exp(at))) - target
        return difference

    x = np.log(np.array(start, dtype=float))
    r = residual(x)
    damping = 1e-2
    for _ in range(MAX_STEPS):
        move = _step(residual, x, r, base, damping)
        there = residual(x + move)
        better = float(np.sum(base * np.abs(there))) < float(np.sum(base * np.abs(r)))
        damping = damping / 3 if better else damping * 4
        if better:
            x, r = x + move, there
        if damping > 1e6 or (better and float(np.max(np.abs(move))) < 1e-4):
            break
    constants: Array = np.exp(x)
    return constants


def _step(
    residual: Callable[[Array], Array], x: Array, r: Array, base: Array, damping: float
) -> Array:
    """Returns one damped step, in which no constant changes by more than a factor exp(1/2)."""
    weights = base / np.maximum(np.abs(r), LEAST_RESIDUAL)
    steps = 1e-3 * np.eye(len(x))
    jacobian = np.stack([(residual(x + step) - r) / 1e-3 for step in steps], axis=1)
    normal = jacobian.T @ (weights[:, None] * jacobian)
    move = np.linalg.solve(
        normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ (weights * r)
    )
    clipped: Array = np.clip(move, -0.5, 0.5)
    return clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One line of the report: errors of the shipped curve on some rows.

    crossed: errors of cross-validation, where the curve was fitted to the rows
    """

    device: str
    family: str
    rows: int
    median: float
    mean: float
    crossed: tuple[float, float] | None = None

    def __str__(self) -> str:
        cross = f"{self.crossed[0]:8.1%}{self.crossed[1]:8.1%}" if self.crossed else ""
        errors = f"{self.median:9.1%}{self.mean:8.1%}{cross}"
        return f"{self.device:<12}{self.family:<38}{self.rows:>6}{errors}"


def fit_score(
    device: str, family: str, predicted: Array, measured: Array, held_out: Array | None = None
) -> Score:
    """Returns the absolute percentage errors of predictions.

    held_out: predictions by fits that have not seen the row
    """
    errors = np.abs(predicted / measured - 1)
    crossed = None
    if held_out is not None:
        outside = np.abs(held_out / measured - 1)
        crossed = (float(np.median(outside)), float(np.mean(outside)))
    return Score(
        device=device,
        family=family,
        rows=len(measured),
        median=float(np.median(errors)),
        mean=float(np.mean(errors)),
        crossed=crossed,
    )


def crossed(rows: Sequence[Row], predict: Callable[[Sequence[Row], Sequence[Row]], Array]) -> Array:
    """Returns predictions of every row by a fit to the rows of the other folds.

    predict: called with the rows to fit to and the rows to predict
    """
    held_out = np.empty(len(rows))
    for fold in range(FOLDS):
        kept = [row for i, row in enumerate(rows) if i % FOLDS != fold]
        held_out[fold::FOLDS] = predict(kept, rows[fold::FOLDS])
    return held_out


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFamily(Generic[AnyCurve]):
    """Rows of one operation, and the form of their curve.

    curve: makes a curve of constants
    price: prices a row by a curve
    sizes: the sizes of a row, which bound the curve
    """

    device: str
    name: str
    rows: Sequence[Row]
    curve: Callable[[Array], AnyCurve]
    price: Callable[[Row, AnyCurve], float]
    sizes: Callable[[Row], tuple[float, ...]]
    start: tuple[float, ...]
    weight: Callable[[Row], float] = lambda row: 1.0

    def priced(self, rows: Sequence[Row], curve: AnyCurve) -> Array:
        return np.array([self.price(row, curve) for row in rows])

    def fit(self, rows: Sequence[Row]) -> AnyCurve:
        """Returns the curve fitted to some of the rows, its constants rounded."""
        weights = np.array([self.weight(row) for row in rows])
        constants = fit(
            lambda x: self.priced(rows, self.curve(x)), times_s(rows), self.start, weights
        )
        return rounded_curve(self.curve(constants))

    def fitted(self, scores: list[Score]) -> AnyCurve:
        """Returns the curve fitted to all rows, with its bounds and error.

        It appends the curve's score to `scores`.
        """
        curve = self.fit(self.rows)
        held_out = crossed(self.rows, lambda kept, left: self.priced(left, self.fit(kept)))
        line = fit_score(
            self.device, self.name, self.priced(self.rows, curve), times_s(self.rows), held_out
        )
        scores.append(line)
        extent = np.array([self.sizes(row) for row in self.rows])
        bounds = SizeBounds(
            low=tuple(extent.min(axis=0).tolist()), high=tuple(extent.max(axis=0).tolist())
        )
        return replace(curve, bounds=bounds, rows=len(self.rows), median_error=rounded(line.median))

    def check(self, name: str, rows: Sequence[Row], curve: AnyCurve, scores: list[Score]) -> None:
        """Scores a curve on other rows, or on some of the rows it was fitted to."""
        scores.append(fit_score(self.device, name, self.priced(rows, curve), times_s(rows)))
