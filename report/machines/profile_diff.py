"""`plan profile --diff a.yaml b.yaml`: in what two machines differ, and how much slower the second
is where both were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.machines.user_profile import UserProfile
from parplan.profiles.units import format_number
from parplan.report.text import joined, print_table, say

WORST = 5  # cases of a curve that are named
FAR = 0.05  # share from 1 from which on the text names them
_TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveDifference:
    """A curve (or the passes of a work that are no curve's): ratios of b over a by case, the
    slowest first; what only one has.
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
        """The cases farthest from 1, either way."""
        return tuple(sorted(self.ratios, key=lambda item: -max(item[1], 1 / item[1]))[:WORST])


def compared(a: UserProfile, b: UserProfile) -> tuple[CurveDifference, ...]:
    """Every curve that either has, in the order of the first file; times by case and pass."""
    there, here = _times(a), _times(b)
    found = []
    for name in dict.fromkeys((*there, *here)):
        one, other = there.get(name, {}), here.get(name, {})
        ratios = sorted(
            ((case, other[case] / one[case]) for case in one if case in other),
            key=lambda item: -item[1],
        )
        found.append(
            CurveDifference(
                name=name,
                ratios=tuple(ratios),
                only_a=len(one.keys() - other),
                only_b=len(other.keys() - one),
            )
        )
    return tuple(found)


def _times(profile: UserProfile) -> dict[str, dict[str, float]]:
    """Microseconds by curve and case; passes that are no curve's go by their work."""
    found: dict[str, dict[str, float]] = {}
    for record in profile.records:
        if record.outcome is CaseOutcome.MEASURED and record.measured is not None:
            curves = {one.name: one.curve for one in record.case.passes}
            for name, timing in record.measured.times.items():
                curve = curves.get(name) or (
                    record.case.work if name == _TIME else f"{record.case.work}.{name}"
                )
                found.setdefault(curve, {})[record.case.key] = timing.median_us
    return found


def changed_environment(a: UserProfile, b: UserProfile) -> dict[str, tuple[Any, Any]]:
    """The fields in which the two machines, or what ran on them, differ."""
    there, here = _fields(a), _fields(b)
    both = {name: (there.get(name), here.get(name)) for name in dict.fromkeys((*there, *here))}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _fields(profile: UserProfile) -> dict[str, Any]:
    here = asdict(profile.environment) if profile.environment else {}
    return {"profile of": profile.device, "precision": profile.precision, **here}


def changed_figures(a: UserProfile, b: UserProfile) -> dict[str, tuple[float, float]]:
    """Figures of cases that both have, by case and name: the value in each."""
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
    """Print the comparison for a person; `names` of the files. A ratio over 1: b takes longer."""
    say(out, f"{names[1]} over {names[0]}: over 1 it takes longer", "bold")
    changed = changed_environment(a, b)
    rows = [(name, _text(there), _text(here)) for name, (there, here) in changed.items()]
    if rows:
        print_table(out, ("differs in", *names), rows, left=("differs in", *names))
    say(out)
    found = compared(a, b)
    _print_ratios(found, names, out)
    _print_figures(changed_figures(a, b), names, out)


def _print_ratios(found: Iterable[CurveDifference], names: tuple[str, str], out: Console) -> None:
    both = [one for one in found if one.ratios]
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
        print_table(
            out,
            heading,
            [
                (
                    one.name,
                    str(len(one.ratios)),
                    str(one.only_a),
                    str(one.only_b),
                    *(
                        f"{ratio:.3f}"
                        for ratio in (one.median or 0.0, one.ratios[-1][1], one.ratios[0][1])
                    ),
                )
                for one in both
            ],
            left=("curve",),
            indent=0,
        )
    for name, count in ((names[0], "only_a"), (names[1], "only_b")):
        alone = [
            f"{one.name} ({getattr(one, count)})"
            for one in found
            if not one.ratios and getattr(one, count)
        ]
        if alone:
            say(out, joined(alone, ", ", out.width, start=f"only in {name}: ", indent=2))
    far = [
        (one.name, f"{ratio:.3f}", case)
        for one in both
        for case, ratio in one.worst
        if max(ratio, 1 / ratio) > 1 + FAR
    ]
    if far:
        say(out)
        cases = f"farthest cases, off by more than {100 * FAR:.0f} %"
        print_table(out, ("curve", "ratio", cases), far, left=("curve", cases), indent=0)


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
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def diff_document(a: UserProfile, b: UserProfile) -> dict[str, Any]:
    """The same for programs."""
    return {
        "environment": {
            name: {"a": there, "b": here}
            for name, (there, here) in changed_environment(a, b).items()
        },
        "curves": [
            {
                "name": one.name,
                "both": len(one.ratios),
                "only_a": one.only_a,
                "only_b": one.only_b,
                "median_ratio": one.median,
                "farthest": [{"case": case, "ratio": ratio} for case, ratio in one.worst],
            }
            for one in compared(a, b)
        ],
        "figures": {
            name: {"a": there, "b": here} for name, (there, here) in changed_figures(a, b).items()
        },
    }
