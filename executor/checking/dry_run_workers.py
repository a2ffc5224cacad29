"""Dry runs of several pipeline ranks in child processes, as many at once as there are cores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from parplan.executor.checking.dry_run import DryRun, counted_micro_batches, dry_run
from parplan.executor.tensors import begin_fork
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import PlannerError, RunError
from parplan.profiles.interrupts import leave_signals_to_parent


def num_actions(plan: Plan, pipeline_ranks: Sequence[int]) -> int:
    """Return the number of backward passes of all ranks, by which progress is counted."""
    return plan.pipeline.virtual_stages * sum(
        sum(counted_micro_batches(plan, rank)) for rank in pipeline_ranks
    )


def dry_runs(
    plan: Plan, pipeline_ranks: Sequence[int], on_done: Callable[[int], None] | None = None
) -> list[DryRun]:
    """Return one dry run for each pipeline rank.

    on_done  called with the number of actions done, of `num_actions`

    Raises the ConfigError of a child, and RunError for a child that was killed. No child is left in
    any case.
    """
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    count = min(len(pipeline_ranks), os.cpu_count() or 1)
    context = multiprocessing.get_context("fork")
    children, ends = [], []
    try:
        for index in range(count):
            end, child_end = context.Pipe(duplex=False)
            ranks = tuple(pipeline_ranks[index::count])
            child = context.Process(target=_child, args=(child_end, plan, ranks), daemon=True)
            child.start()
            child_end.close()
            children.append(child)
            ends.append(end)
        runs = _results(_messages(ends), on_done)
        for child in children:
            child.join()
    finally:
        for child in children:
            child.terminate()
            child.join()
    missing = set(pipeline_ranks) - {run.pipeline_rank for run in runs}
    if missing:
        code = children[pipeline_ranks.index(min(missing)) % count].exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise RunError(
            f"the dry run of pipeline rank {min(missing)} {how}, without a result",
            hint="run it alone: --rank, with more memory free",
        )
    return sorted(runs, key=lambda run: run.pipeline_rank)


def _results(messages: Iterator[Any], on_done: Callable[[int], None] | None) -> list[DryRun]:
    runs = []
    done = 0
    for message in messages:
        if isinstance(message, PlannerError):
            raise message
        if message is not None:
            runs.append(message)
            continue
        done += 1
        if on_done is not None:
            on_done(done)
    return runs


def _messages(ends: Sequence[Connection]) -> Iterator[Any]:
    """Yield messages of the children until the last has closed its end."""
    left = list(ends)
    while left:
        for end in wait(left):
            try:
                yield end.recv()  # type: ignore[union-attr]
            except EOFError:
                left.remove(end)  # type: ignore[arg-type]


def _child(end: Connection, plan: Plan, pipeline_ranks: tuple[int, ...]) -> None:
    begin_fork()
    leave_signals_to_parent()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    try:
        for rank in pipeline_ranks:
            end.send(dry_run(plan, rank, lambda: end.send(None)))
    except PlannerError as error:
        end.send(error)
    end.close()
