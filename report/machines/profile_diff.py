"""The tables of `plan profile --diff a.yaml b.yaml`: differences and ratios of two profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.machines.user_profile import UserProfile
from parplan.profiles.units import format_number
from parplan.report.json_result import JsonResult
from parplan.report.text import joined, print_table, say

WORST = 5  # printed cases of a curve
FAR = 0.05  # a case is printed when its ratio is farther than this from 1
_TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveDifference:
    """Ratios of b over a by case, the slowest first, of a curve or of passes without a curve.

    only_a  number of cases that only a has
    only_b  number of cases that only b has
    """

    name: str
    ratios: tuple[tuple[str, float], ...]
    only_a: int
    only_b: int

    @property
    def median(self) -> float | None:
        return median(ratio for _, ratio in self.ratios) if self.ratios else None

    @property
    def worst(self) -> tuple[tuple[str, float], ...]:
        """Returns the cases whose ratios are farthest from 1, either way."""
        return tuple(sorted(self.ratios, key=lambda item: -max(item[1], 1 / item[1]))[:WORST])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFact:
    """A fact of the machine or its software in which two profiles differ."""

    a: str | int | float | Mapping[str, int] | None
    b: str | int | float | Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFigure:
    """A figure that both profiles have; the end of its name is its unit."""

    a: float
    b: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRatio:
    """A case and its seconds of the second profile over those of the first."""

    case: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRatios:
    """The ratios of a curve over the cases that both profiles have.

    both            number of these cases
    only_a, only_b  number of cases that only one of them has
    farthest        the cases whose ratios are farthest from 1
    """

    name: str
    both: int
    only_a: int
    only_b: int
    median_ratio: float | None
    farthest: tuple[CaseRatio, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDiffDocument(JsonResult):
    """The differences of two profiles: a, the first file, and b, the second."""

    environment: Mapping[str, ChangedFact]
    curves: tuple[CurveRatios, ...]
    figures: Mapping[str, ChangedFigure]


def compared(a: UserProfile, b: UserProfile) -> tuple[CurveDifference, ...]:
    """Returns the differences of every curve of either profile, in the order of the first."""
    all_a, all_b = _times(a), _times(b)
    differences = []
    for name in dict.fromkeys((*all_a, *all_b)):
        times_a, times_b = all_a.get(name, {}), all_b.get(name, {})
        ratios = [(case, times_b[case] / times_a[case]) for case in times_a if case in times_b]
        differences.append(
            CurveDifference(
                name=name,
                ratios=tuple(sorted(ratios, key=lambda item: -item[1])),
                only_a=len(times_a.keys() - times_b),
                only_b=len(times_b.keys() - times_a),
            )
        )
    return tuple(differences)


def _times(profile: UserProfile) -> dict[str, dict[str, float]]:
    """Microseconds by curve and case; passes without a curve go by their work."""
    times: dict[str, dict[str, float]] = {}
    for record in profile.records:
        if record.outcome is CaseOutcome.MEASURED and record.measured is not None:
            curves = {each.name: each.curve for each in record.case.passes}
            for name, timing in record.measured.times.items():
                curve = curves.get(name) or (
                    record.case.work if name == _TIME else f"{record.case.work}.{name}"
                )
                times.setdefault(curve, {})[record.case.key] = timing.median_us
    return times


def changed_environment(a: UserProfile, b: UserProfile) -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which the two machines or their software differ."""
    there, here = _fields(a), _fields(b)
    both = {name: (there.get(name), here.get(name)) for name in dict.fromkeys((*there, *here))}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _fields(profile: UserProfile) -> dict[str, Any]:
    here = asdict(profile.environment) if profile.environment else {}
    return {"profile of": profile.device, "precision": profile.precision, **here}


def changed_figures(a: UserProfile, b: UserProfile) -> dict[str, tuple[float, float]]:
    """Returns both values of each figure that both profiles have, by case and name."""
    there, here = _figures(a), _figures(b)
    return {name: (value, here[name]) for name, value in there.items() if name in here}


def _figures(profile: UserProfile) -> dict[str, float]:
    return {
        f"{record.case.key}: {name}": value
        for record in profile.records
        if record.measured
        for name, value in record.measured.figures.items()
    }


def print_diff(a: UserProfile, b: UserProfile, names: tuple[str, str], out: Console) -> None:
    """Print the comparison of two files `names` for a person; above a ratio of 1, b is slower."""
    say(out, f"{names[1]} over {names[0]}: over 1 it takes longer", "bold")
    changed = changed_environment(a, b)
    rows = [(name, _text(there), _text(here)) for name, (there, here) in changed.items()]
    if rows:
        print_table(out, ("differs in", *names), rows, left=("differs in", *names))
    say(out)
    _print_ratios(compared(a, b), names, out)
    _print_figures(changed_figures(a, b), names, out)


def _print_ratios(
    differences: Sequence[CurveDifference], names: tuple[str, str], out: Console
) -> None:
    both = [each for each in differences if each.ratios]
    if not both:
        say(out, "no case was measured in both")
    else:
        heading = (
            "curve",
            "both",
            f"only {names[0]}",
            f"only {names[1]}",
            "median",
            "least",
            "most",
        )
        print_table(out, heading, map(_ratio_cells, both), left=("curve",), indent=0)
    for name, count in ((names[0], "only_a"), (names[1], "only_b")):
        alone = [
            f"{each.name} ({getattr(each, count)})"
            for each in differences
            if not each.ratios and getattr(each, count)
        ]
        if alone:
            say(out, joined(alone, ", ", out.width, start=f"only in {name}: ", indent=2))
    far = [
        (each.name, f"{ratio:.3f}", case)
        for each in both
        for case, ratio in each.worst
        if max(ratio, 1 / ratio) > 1 + FAR
    ]
    if far:
        say(out)
        cases = f"farthest cases, off by more than {100 * FAR:.0f} %"
        print_table(out, ("curve", "ratio", cases), far, left=("curve", cases), indent=0)


def _ratio_cells(difference: CurveDifference) -> tuple[str, ...]:
    ratios = difference.ratios
    return (
        difference.name,
        str(len(ratios)),
        str(difference.only_a),
        str(difference.only_b),
        *(f"{ratio:.3f}" for ratio in (difference.median or 0.0, ratios[-1][1], ratios[0][1])),
    )


def _print_figures(
    figures: Mapping[str, tuple[float, float]], names: tuple[str, str], out: Console
) -> None:
    rows = [
        (
            name,
            format_number(there, 4),
            format_number(here, 4),
            f"{here / there:.3f}" if there else "-",
        )
        for name, (there, here) in figures.items()
    ]
    if rows:
        say(out)
        print_table(out, ("figure", *names, "ratio"), rows, left=("figure",), indent=0)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} x {kind}" for kind, count in value.items()) or "-"
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def diff_document(a: UserProfile, b: UserProfile) -> ProfileDiffDocument:
    """Returns the comparison for `--json`."""
    return ProfileDiffDocument(
        environment={
            name: ChangedFact(a=there, b=here)
            for name, (there, here) in changed_environment(a, b).items()
        },
        curves=tuple(map(_curve_ratios, compared(a, b))),
        figures={
            name: ChangedFigure(a=there, b=here)
            for name, (there, here) in changed_figures(a, b).items()
        },
    )


def _curve_ratios(each: CurveDifference) -> CurveRatios:
    return CurveRatios(
        name=each.name,
        both=len(each.ratios),
        only_a=each.only_a,
        only_b=each.only_b,
        median_ratio=each.median,
        farthest=tuple(CaseRatio(case=case, ratio=ratio) for case, ratio in each.worst),
    )
