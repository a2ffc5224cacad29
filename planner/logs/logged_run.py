"""The steps of a log: one launcher's lines, divided at restarts, without the first of each part."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, median_high, quantiles

from parplan.planner.logs.last_layout import LastLayout, last_layout
from parplan.planner.logs.log_formats import FORMATS, LogFormat
from parplan.planner.logs.log_lines import read_lines
from parplan.planner.logs.logged_step import LoggedStep, is_step, memory_of, step_of
from parplan.profiles.errors import ConfigError

WARM_UP = 5  # iterations after a start that are left out: compilation, caches, first batches
_FEW = 2  # values that have percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The measured steps of a log.

    quantity         the unit of `values`, a group of its format
    values           the median over ranks of every step that counts
    batch            sequences of these steps, None where the log does not say them
    parts            starts of the run
    other_layouts    starts before them with another configuration, which do not count
    left_out         steps of warm-up and of other batches
    allocated_bytes  most tensors, and `reserved_bytes` most memory of the allocator, on any rank
                     that printed it; None where none did
    """

    path: Path
    format: LogFormat
    quantity: str
    values: tuple[float, ...]
    batch: int | None
    parts: int
    other_layouts: int
    left_out: int
    allocated_bytes: float | None
    reserved_bytes: float | None

    @property
    def middle(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The values that a tenth of the steps is below and above."""
        if len(self.values) < _FEW:
            return self.values[0], self.values[0]
        tenths = quantiles(self.values, n=10, method="inclusive")
        return tenths[0], tenths[-1]


def is_log(path: Path) -> bool:
    """Returns whether a file has a line of a step. Raises ConfigError."""
    return any(is_step(line.text) for line in read_lines(path))


def read_log(path: Path, warm_up: int = WARM_UP) -> LoggedRun:
    """Returns the steps of a log.

    warm_up   iterations after each start that are left out
    Raises ConfigError for a file without steps, or with too few.
    """
    layout = last_layout(path)
    form, starts, steps, memory = _read(path, layout)
    parts = tuple(_parts(steps, starts))
    counted = [one for part in parts for one in _steady(part, warm_up)]
    usual = Counter(batch for _, batch in counted).most_common(1)
    batch = usual[0][0] if usual else None
    values = tuple(value for value, size in counted if size == batch)
    if not values:
        raise ConfigError(
            f"{path}: all of its {len(steps)} lines of {form.name} steps are within the first "
            f"{warm_up} iterations of a start",
            hint="give a longer log, or --warm-up 0",
        )
    return LoggedRun(
        path=path,
        format=form,
        quantity=steps[0].quantity,
        values=values,
        batch=batch,
        parts=len(parts),
        other_layouts=layout.others,
        left_out=sum(len(_by_iteration(part)) for part in parts) - len(values),
        allocated_bytes=memory.get("allocated"),
        reserved_bytes=memory.get("reserved"),
    )


def _read(
    path: Path, layout: LastLayout
) -> tuple[LogFormat, list[int], list[LoggedStep], dict[str, float]]:
    """Returns the format of most steps, the lines of its starts, its steps and its most memory.

    Raises ConfigError.
    """
    starts: dict[str, list[int]] = defaultdict(list)
    steps: dict[str, list[LoggedStep]] = defaultdict(list)
    memory: dict[str, dict[str, float]] = defaultdict(dict)
    for line in layout.lines(path):
        for form in FORMATS:
            if any(words in line.text for words in form.starts):
                starts[form.name].append(line.number)
            step = step_of(line, form)
            if step is not None:
                steps[form.name].append(step)
            for kind, size in memory_of(line, form):
                memory[form.name][kind] = max(size, memory[form.name].get(kind, 0.0))
    if not steps:
        names = ", ".join(form.name for form in FORMATS)
        raise ConfigError(
            f"{path}: no line of a step of {names}",
            hint="give the standard output of the rank that prints the steps",
        )
    # Lightning and DeepSpeed run under the Trainer and draw its bar: exact times go before
    form = next(form for form in FORMATS if form.name in steps)
    first = steps[form.name][0].quantity
    totals = Counter(step.total for step in steps[form.name])
    total = totals.most_common(1)[0][0]
    chosen = [each for each in steps[form.name] if (each.quantity, each.total) == (first, total)]
    return form, starts[form.name], chosen, memory[form.name]


def _parts(steps: list[LoggedStep], starts: list[int]) -> Iterator[list[LoggedStep]]:
    """Yields the steps between starts: a line that says so, or an earlier iteration.

    Ranks that print through one another are at most one line of a step apart: a step before the
    last but one iteration that the part has begins the next part.
    """
    part: list[LoggedStep] = []
    last, last_but_one = 0, 0
    for step in steps:
        if part and (_started(part[-1], step, starts) or step.iteration < last_but_one):
            yield part
            part = []
            last, last_but_one = 0, 0
        if step.iteration > last:
            last, last_but_one = step.iteration, last
        part.append(step)
    if part:
        yield part


def _started(before: LoggedStep, step: LoggedStep, starts: list[int]) -> bool:
    """True if a line between two steps says that a run starts."""
    return bisect(starts, before.line.number) < bisect(starts, step.line.number)


def _by_iteration(part: Iterable[LoggedStep]) -> dict[int, list[LoggedStep]]:
    found: dict[int, list[LoggedStep]] = defaultdict(list)
    for step in part:
        found[step.iteration].append(step)
    return dict(sorted(found.items()))


def _steady(part: list[LoggedStep], warm_up: int) -> Iterator[tuple[float, int | None]]:
    """Yields the median over ranks and the batch of the steps after the warm-up.

    A line may be the mean of the iterations since the line before it, which all must be past.
    """
    steps = _by_iteration(part)
    iterations = list(steps)
    gaps = [later - each for each, later in pairwise(iterations)]
    first = max(0, iterations[0] - (median_high(gaps) if gaps else 1))
    for before, iteration in pairwise([first, *iterations]):
        if before >= first + warm_up:
            of_ranks = steps[iteration]
            yield median(each.value for each in of_ranks), of_ranks[0].batch
