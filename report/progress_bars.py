"""Progress bars on a terminal; off a terminal nothing is printed, and no bar is imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parplan.planner.objective import Objective
from parplan.planner.request import OnProgress, Progress
from parplan.profiles.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn, TaskID

    from parplan.planner.search.pareto import OnSearch
    from parplan.profiles.profiler import session_progress as profiling

_PASSES = {
    Objective.THROUGHPUT: "fastest",
    Objective.MEMORY: "leanest",
    Objective.PEAK: "least peak",
}


class _Search:
    """One bar for each pass of a search; every objective first searches the fastest plan."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._tasks = {Objective.THROUGHPUT: self._start(_PASSES[Objective.THROUGHPUT])}

    def _start(self, name: str) -> TaskID:
        return self._bar.add_task(name, total=None, best="bounding the candidates")

    def update(self, progress: Progress) -> None:
        """Show the progress of a pass of the search."""
        if progress.objective not in self._tasks:
            self._tasks[progress.objective] = self._start(_PASSES[progress.objective])
        self._bar.update(
            self._tasks[progress.objective],
            completed=progress.done,
            total=progress.total,
            best=_best_text(progress),
        )


class _Front:
    """A bar for the searches of `what`, and below it a bar for the current search."""

    def __init__(self, bar: Bar, what: str) -> None:
        self._bar = bar
        self._searches = bar.add_task(what, total=None, best="")
        self._now = bar.add_task("fastest", total=None, best="")

    def begin(self, what: str, done: int, planned: int) -> None:
        """Start the bar of the next search."""
        self._bar.update(self._searches, completed=done, total=planned)
        self._bar.reset(self._now, description=what, total=None, best="bounding the candidates")

    def update(self, progress: Progress) -> None:
        """Show the progress of the current search."""
        self._bar.update(
            self._now, completed=progress.done, total=progress.total, best=_best_text(progress)
        )


def _best_text(progress: Progress) -> str:
    text = format_seconds if progress.objective is Objective.THROUGHPUT else format_bytes
    best = "no plan yet" if progress.incumbent is None else f"best {text(progress.incumbent)}"
    return best if progress.bound is None else f"{best}, at least {text(progress.bound)}"


@contextmanager
def progress_bar(out: Console) -> Iterator[OnProgress | None]:
    """Yields the `on_progress` of `find_plan`, None off a terminal."""
    if not out.file.isatty():
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(*_search_columns(), console=out, transient=True) as bar:
        yield _Search(bar).update


@contextmanager
def front_bar(
    out: Console, what: str = "front"
) -> Iterator[tuple[OnProgress | None, OnSearch | None]]:
    """Yields `on_progress` and `on_search` of a run of many searches, None off a terminal."""
    if not out.file.isatty():
        yield None, None
        return
    from rich.progress import Progress as Bar

    with Bar(*_search_columns(), console=out, transient=True) as bar:
        front = _Front(bar, what)
        yield front.update, front.begin


def _search_columns() -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    return (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
    )


@contextmanager
def count_bar(out: Console, what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yields a function that takes the number done of `total`, None off a terminal."""
    if not out.file.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

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
    """Yields the `on_progress` of `run_session`, None off a terminal."""
    if not out.file.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    case = TextColumn("{task.fields[case]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        case,
    )
    # two refreshes a second: a CPU that is being measured has little time to spare
    with Bar(*columns, console=out, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("measuring", total=None, left="", case="")
        yield lambda progress: bar.update(
            task,
            completed=progress.done,
            total=progress.total,
            left=_left(progress),
            case=", ".join(progress.running),
        )


def _left(progress: profiling.SessionProgress) -> str:
    """Returns the failed cases, and the time left by the cases so far and by the budget."""
    expected_s = progress.expected_s
    budget_s = progress.budget_s
    phrases = [f"{progress.failed} failed"] if progress.failed else []
    if expected_s is not None and expected_s <= budget_s:
        phrases.append(f"{_minutes(expected_s)} left")
    elif math.isfinite(budget_s):
        needed = f" of {_minutes(expected_s)} needed" if expected_s is not None else ""
        phrases.append(f"{_minutes(budget_s)} left{needed}")
    return ", ".join(phrases)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


@contextmanager
def line_bar(out: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the last line of another program; off a terminal it does not."""
    if not out.file.isatty():
        yield lambda line: None
        return
    with out.status(what) as status:
        yield lambda line: status.update(f"{what}  {line}")
