"""Work in processes of its own, as many at a time as there are cores, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import TypeVar

from parplan.commands.style import noticing_ctrl_c

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def in_processes(
    work: Callable[[ItemT], ResultT], items: Sequence[ItemT], what: str
) -> tuple[list[tuple[ItemT, ResultT]], bool]:
    """Returns the items that were worked on with their results, and True where Ctrl-C came.

    work    a function of a module, with results that can be pickled
    what    the name of the items, for the progress bar
    Raises the error of an item whose work raises one.
    """
    from parplan.report.progress_bars import front_bar
    from parplan.report.text import console

    pool = ProcessPoolExecutor(
        max_workers=min(len(items), os.cpu_count() or 1),
        mp_context=get_context("spawn"),
        initializer=_leave_ctrl_c_to_parent,
    )
    started = [(item, pool.submit(work, item)) for item in items]
    with noticing_ctrl_c() as interrupts, front_bar(console(sys.stderr), what) as (_, begin):
        try:
            for done, future in enumerate(as_completed(each for _, each in started), 1):
                future.result()
                if begin:
                    begin("fastest", done, len(items))
        except KeyboardInterrupt:
            for process in active_children():
                process.terminate()
        finally:
            pool.shutdown(cancel_futures=True)
    finished = [(item, each) for item, each in started if each.done() and not each.cancelled()]
    if interrupts:  # a signal may have ended the processes, too
        finished = [(item, each) for item, each in finished if each.exception() is None]
    return [(item, each.result()) for item, each in finished], bool(interrupts)


def _leave_ctrl_c_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
