"""The progress of a search, as a bar on a terminal and as nothing anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from planner.plan import Objective
from planner.request import OnProgress, Progress
from profiles.units import format_bytes, format_seconds


class _Search:
    """One bar for a search of one or two passes: the memory objective looks for the fastest plan first."""

    def __init__(self, bar: Bar, objective: Objective) -> None:
        self._bar, self._objective = bar, objective
        self._done = 0
        self._pass = 0
        self._task = self._start()

    def _start(self) -> TaskID:
        self._pass += 1
        name = "leanest" if self._in_bytes else "fastest"
        return self._bar.add_task(name, total=None, found="bounding the candidates")

    @property
    def _in_bytes(self) -> bool:
        return self._objective is Objective.MEMORY and self._pass > 1

    def update(self, progress: Progress) -> None:
        """Take the news of the search; a count that falls back is the next pass."""
        if progress.done <= self._done:
            self._task = self._start()
        self._done = progress.done
        self._bar.update(self._task, completed=progress.done, total=progress.total, found=self._found(progress))

    def _found(self, progress: Progress) -> str:
        text = format_bytes if self._in_bytes else format_seconds
        best = "no plan yet" if progress.incumbent is None else f"best {text(progress.incumbent)}"
        return best if progress.bound is None else f"{best}, at least {text(progress.bound)}"


@contextmanager
def progress_bar(out: Console, objective: Objective) -> Iterator[OnProgress | None]:
    """What to give to `find_plan` as `on_progress`; None where nobody watches. The bar is gone when the search ends."""
    if not out.file.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[found]}"), TimeElapsedColumn())
    with Bar(*columns, console=out, transient=True) as bar:
        yield _Search(bar, objective).update
