"""The progress of a search, or of any count of things, as a bar on a terminal and as nothing
anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column

from parplan.planner.plan.prediction import Objective
from parplan.planner.request import OnProgress, Progress
from parplan.planner.search.pareto import OnSearch
from parplan.profiles.profiler import session_progress as profiling
from parplan.profiles.units import format_bytes, format_seconds

_PASSES = {
    Objective.THROUGHPUT: "fastest",
    Objective.MEMORY: "leanest",
    Objective.PEAK: "least peak",
}


class _Search:
    """One bar for each pass of a search: every objective looks for the fastest plan first."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._tasks = {Objective.THROUGHPUT: self._start(_PASSES[Objective.THROUGHPUT])}

    def _start(self, name: str) -> TaskID:
        return self._bar.add_task(name, total=None, found="bounding the candidates")

    def update(self, progress: Progress) -> None:
        """Take the news of the search."""
        if progress.objective not in self._tasks:
            self._tasks[progress.objective] = self._start(_PASSES[progress.objective])
        self._bar.update(
            self._tasks[progress.objective],
            completed=progress.done,
            total=progress.total,
            found=_found(progress),
        )


class _Front:
    """A bar for the searches of `what`, and below it one for the search that is under way."""

    def __init__(self, bar: Bar, what: str) -> None:
        self._bar = bar
        self._searches = bar.add_task(what, total=None, found="")
        self._now = bar.add_task("fastest", total=None, found="")

    def begin(self, what: str, done: int, planned: int) -> None:
        """The next search starts."""
        self._bar.update(self._searches, completed=done, total=planned)
        self._bar.reset(self._now, description=what, total=None, found="bounding the candidates")

    def update(self, progress: Progress) -> None:
        """Take the news of the search that is under way."""
        self._bar.update(
            self._now, completed=progress.done, total=progress.total, found=_found(progress)
        )


def _found(progress: Progress) -> str:
    text = format_seconds if progress.objective is Objective.THROUGHPUT else format_bytes
    best = "no plan yet" if progress.incumbent is None else f"best {text(progress.incumbent)}"
    return best if progress.bound is None else f"{best}, at least {text(progress.bound)}"


@contextmanager
def progress_bar(out: Console) -> Iterator[OnProgress | None]:
    """What to give to `find_plan` as `on_progress`; None where nobody watches. The bar is gone when
    the search ends.
    """
    if not out.file.isatty():
        yield None
        return
    with Bar(*_search_columns(), console=out, transient=True) as bar:
        yield _Search(bar).update


@contextmanager
def front_bar(
    out: Console, what: str = "front"
) -> Iterator[tuple[OnProgress | None, OnSearch | None]]:
    """What to give to `find_front`, or another that searches often, as `on_progress` and
    `on_search`; None where nobody watches.
    """
    if not out.file.isatty():
        yield None, None
        return
    with Bar(*_search_columns(), console=out, transient=True) as bar:
        front = _Front(bar, what)
        yield front.update, front.begin


def _search_columns() -> tuple[ProgressColumn, ...]:
    found = TextColumn("{task.fields[found]}")
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        found,
        TimeElapsedColumn(),
    )


@contextmanager
def count_bar(out: Console, what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """What to tell how many of `total` are done; None where nobody watches. The bar is gone at the
    end.
    """
    if not out.file.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=out, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def profile_bar(out: Console) -> Iterator[profiling.OnProgress | None]:
    """What to give to `run_session` as `on_progress`; None where nobody watches. The bar is gone
    when the session ends.
    """
    if not out.file.isatty():
        yield None
        return
    case = TextColumn("{task.fields[case]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        case,
    )
    with Bar(
        *columns, console=out, transient=True, refresh_per_second=2
    ) as bar:  # a CPU that is measured has other things to do
        task = bar.add_task("measuring", total=None, left="", case="")
        yield lambda progress: bar.update(
            task,
            completed=progress.done,
            total=progress.total,
            left=_left(progress),
            case=", ".join(progress.running),
        )


def _left(progress: profiling.SessionProgress) -> str:
    """How long it takes still, by its cases so far and by its budget, and what failed."""
    expected_s, budget_s = progress.expected_s, progress.budget_s
    phrases = [f"{progress.failed} failed"] if progress.failed else []
    if expected_s is not None and expected_s <= budget_s:
        phrases.append(f"{_minutes(expected_s)} left")
    elif math.isfinite(budget_s):
        phrases.append(
            f"{_minutes(budget_s)} left"
            + (f" of {_minutes(expected_s)} needed" if expected_s is not None else "")
        )
    return ", ".join(phrases)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


@contextmanager
def line_bar(out: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A line that moves on with what another program says; nothing where nobody watches."""
    if not out.file.isatty():
        yield lambda line: None
        return
    with out.status(what) as status:
        yield lambda line: status.update(f"{what}  {line}")
