"""Deviations of measured runs from predictions whose fit had not seen them.

`profiles/data/deviations.csv` is written by `python -m parplan.planner.validation.deviation_table`
from tables of measured steps. It has the runs of the shipped table and of further published ones.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources

FILE = "deviations.csv"
_SEPARATOR = "; "


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A measured run: its traits, and measured / predicted - 1.

    citation       where it is published; empty for a run of the shipped table, which says it
    experiment     the fold that cross-validation leaves out with it
    time, memory   of the step and of the fullest device; None where it is not measured
    excess         memory that it needed beyond its prediction over the prediction, 0 where it
                   needed less; at least what was left free where it ran out of memory
    grid           the runs of one source, model, machine and number of tokens of a step
    shape          its degrees, as planner/plan/ratio_band.py names them
    predicted_s    predicted seconds of its step
    """

    id: str
    experiment: str
    citation: str
    traits: tuple[str, ...]
    time: float | None
    memory: float | None
    excess: float | None
    grid: str = ""
    shape: tuple[str, ...] = ()
    predicted_s: float | None = None


@functools.cache
def shipped_deviations() -> tuple[Deviation, ...]:
    """Returns the runs of profiles/data/deviations.csv."""
    path = resources.files("parplan.profiles") / "data" / FILE
    with path.open(encoding="ascii") as file:
        return tuple(
            Deviation(
                id=row["id"],
                experiment=row["experiment"],
                citation=row["citation"],
                traits=tuple(row["traits"].split(_SEPARATOR)),
                time=_number(row["time"]),
                memory=_number(row["memory"]),
                excess=_number(row["excess"]),
                grid=row["grid"],
                shape=tuple(row["shape"].split(_SEPARATOR)),
                predicted_s=_number(row["predicted_s"]),
            )
            for row in csv.DictReader(file)
        )


def cells(deviation: Deviation) -> tuple[str, ...]:
    """Returns the line of a run in the file, in the order of its fields."""
    numbers = (deviation.time, deviation.memory, deviation.excess)
    return (
        deviation.id,
        deviation.experiment,
        deviation.citation,
        _SEPARATOR.join(deviation.traits),
        *("" if number is None else f"{number:.4f}" for number in numbers),
        deviation.grid,
        _SEPARATOR.join(deviation.shape),
        "" if deviation.predicted_s is None else f"{deviation.predicted_s:.5g}",
    )


def _number(text: str) -> float | None:
    return float(text) if text else None
