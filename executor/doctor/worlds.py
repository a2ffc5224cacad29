"""Runs the paths of `plan doctor` in worlds of processes, and begins a new one after a failure.

A path that fails on one rank leaves the others in the middle of an exchange, and one that hangs
never ends. Its world is then ended, and the paths that are left run in another.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from parplan.executor.doctor.doctor_rank import DoctorWorld, run_rank
from parplan.executor.doctor.path import GpuPath
from parplan.executor.doctor.paths import PATHS
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.doctor_report import Outcome, PathFinding, joined_finding
from parplan.profiles.errors import ConfigError

MOST_RANKS = 8
RANKS_ON_CPUS = 2
START_S = 180.0  # until a world has joined and begun its first path
PATH_S = 60.0  # a path that takes longer hangs
POLL_S = 0.05
GRACE_S = 5.0  # for the other ranks, after one has ended a path

OnFinding = Callable[[PathFinding], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The findings of all paths, and the places that ran, where the world was traced."""

    findings: tuple[PathFinding, ...]
    ran: Mapping[str, frozenset[str]]


def chosen_devices(asked: str, ranks: int | None) -> tuple[str, int]:
    """Returns the kind of device and the number of ranks, a power of two. Raises ConfigError.

    asked   auto, or a kind
    ranks   None for as many as there are GPUs, up to 8, and two on CPUs
    """
    num_gpus = torch.cuda.device_count()
    kind = asked
    if asked == "auto":
        kind = "cuda" if num_gpus else "cpu"
    if kind == "cuda" and not num_gpus:
        raise ConfigError("--device cuda: torch sees no GPU", hint="use --device cpu")
    if kind == "cuda" and (ranks or 0) > num_gpus:
        raise ConfigError(
            f"--ranks {ranks}: torch sees {num_gpus} GPUs", hint=f"use --ranks {num_gpus}"
        )
    ranks = ranks or (min(num_gpus, MOST_RANKS) if kind == "cuda" else RANKS_ON_CPUS)
    return kind, 1 << (ranks.bit_length() - 1)


def examine(
    kind: str,
    ranks: int,
    plans: Mapping[str, Plan],
    *,
    paths: Sequence[GpuPath] = PATHS,
    budget_s: float = 300.0,
    traces: bool = False,
    on_finding: OnFinding = lambda _: None,
) -> Examined:
    """Runs the paths on `ranks` devices of a kind and returns a finding for each.

    budget_s   paths that have not begun after so long are not run
    """
    deadline_s = time.monotonic() + budget_s
    findings: dict[str, PathFinding] = {}
    ran: dict[str, frozenset[str]] = {}

    def note(finding: PathFinding) -> None:
        findings[finding.path] = finding
        on_finding(finding)

    for path in paths:
        if path.ranks > ranks:
            text = f"needs {path.ranks} devices, there {'is 1' if ranks == 1 else f'are {ranks}'}"
            note(PathFinding(path=path.name, outcome=Outcome.NOT_RUN, says=text))
    number = 0
    while left := [path for path in paths if path.name not in findings]:
        if time.monotonic() > deadline_s:
            for path in left:
                note(
                    PathFinding(
                        path=path.name, outcome=Outcome.NOT_RUN, says=f"{budget_s:.0f} s were over"
                    )
                )
            break
        with tempfile.TemporaryDirectory(prefix="plan-doctor-") as folder:
            world = DoctorWorld(
                kind=kind,
                ranks=ranks,
                number=number,
                folder=Path(folder),
                plans=plans,
                traces=traces,
            )
            for finding, places in _found(world, left, deadline_s):
                note(finding)
                ran[finding.path] = places
        number += 1
    order = {path.name: place for place, path in enumerate(paths)}
    return Examined(
        findings=tuple(sorted(findings.values(), key=lambda each: order[each.path])), ran=ran
    )


def _found(
    world: DoctorWorld, paths: Sequence[GpuPath], deadline_s: float
) -> Iterator[tuple[PathFinding, frozenset[str]]]:
    """Yields the findings of one world, up to its end."""
    with _started(world, paths) as processes:
        limit_s = START_S
        for name in (path.name for path in paths):
            lines = _awaited(world, name, processes, limit_s)
            limit_s = PATH_S
            ended = [line for line in lines if line is not None and "outcome" in line]
            if len(ended) < world.ranks:
                yield _broken(name, lines, ended, processes, limit_s), frozenset()
                return
            of_ranks = [
                PathFinding(
                    path=name,
                    outcome=Outcome(line["outcome"]),
                    says=line["says"],
                    seconds=line["seconds"],
                )
                for line in ended
            ]
            finding = joined_finding(name, of_ranks)
            yield finding, frozenset(place for line in ended for place in line["ran"])
            if finding.outcome is Outcome.WRONG and world.ranks > 1:
                return
            if time.monotonic() > deadline_s:
                return


def _broken(
    name: str,
    lines: Sequence[dict[str, Any] | None],
    ended: Sequence[dict[str, Any]],
    processes: Any,
    limit_s: float,
) -> PathFinding:
    """Returns the finding of a path that not every rank has ended."""
    faults = [line for line in ended if line["outcome"] == Outcome.WRONG]
    if faults:
        return PathFinding(
            path=name, outcome=Outcome.WRONG, says=faults[0]["says"], seconds=faults[0]["seconds"]
        )
    silent = [rank for rank, line in enumerate(lines) if line is None or "outcome" not in line]
    codes = {rank: processes[rank].exitcode for rank in silent}
    dead = [rank for rank, code in codes.items() if code is not None]
    began = any(line is not None for line in lines)
    if not began:
        says = f"its world of {len(lines)} ranks did not start"
    elif dead:
        says = f"rank {dead[0]} died with exit code {codes[dead[0]]}"
    else:
        says = f"rank {', '.join(map(str, silent))} did not end within {limit_s:.0f} s"
    return PathFinding(path=name, outcome=Outcome.WRONG, says=says, seconds=limit_s)


def _awaited(
    world: DoctorWorld, name: str, processes: Any, limit_s: float
) -> list[dict[str, Any] | None]:
    """Waits until every rank has ended a path, one has failed or died, or the time is over."""
    until_s = time.monotonic() + limit_s
    while True:
        lines = [_last_line(world, rank, name) for rank in range(world.ranks)]
        ended = [line for line in lines if line is not None and "outcome" in line]
        if len(ended) == world.ranks:
            return lines
        failed = any(line["outcome"] == Outcome.WRONG for line in ended)
        died = any(process.exitcode is not None for process in processes)
        if failed or died:
            until_s = min(until_s, time.monotonic() + GRACE_S)
        if time.monotonic() > until_s:
            return lines
        time.sleep(POLL_S)


def _last_line(world: DoctorWorld, rank: int, name: str) -> dict[str, Any] | None:
    """Returns the last whole line of a rank's journal on a path."""
    file = world.folder / f"world{world.number}-rank{rank}.jsonl"
    if not file.exists():
        return None
    whole = file.read_text().split("\n")[:-1]
    lines = [json.loads(line) for line in whole]
    of_path: list[dict[str, Any]] = [line for line in lines if line["path"] == name]
    return of_path[-1] if of_path else None


@contextmanager
def _started(world: DoctorWorld, paths: Sequence[GpuPath]) -> Iterator[Any]:
    """Starts the ranks of a world, and ends those that are left."""
    context = mp.start_processes(
        run_rank,
        args=(world, list(paths)),
        nprocs=world.ranks,
        start_method="spawn",
        join=False,
        daemon=True,
    )
    try:
        yield context.processes
    finally:
        for process in context.processes:
            process.terminate()
            process.join(GRACE_S)
            if process.exitcode is None:
                process.kill()
                process.join()
