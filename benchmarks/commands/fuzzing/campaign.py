"""A campaign: inputs of each kind, run by several servers and judged.

Failures are grouped by cause, with the smallest input of each.
"""

from __future__ import annotations

import queue
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.commands.fuzzing.inputs import Ended, Input
from benchmarks.commands.fuzzing.kinds import KINDS, Kind, build
from benchmarks.commands.fuzzing.seeds import RECIPES, Seeds
from benchmarks.commands.fuzzing.server import Server
from benchmarks.commands.fuzzing.verdicts import Verdict, judge

WHOLE = 15_000  # about the sum of the kinds' weights
OnDone = Callable[["Result"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An input with its end and its verdict."""

    given: Input
    ended: Ended
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Failures of one cause, the smallest input first."""

    failure: str
    cause: str
    results: tuple[Result, ...]


def numbers(inputs: int, kinds: Sequence[Kind] = KINDS) -> list[tuple[Kind, int]]:
    """Return the kind and number of each of `inputs` inputs.

    Kinds are in proportion to their weights and well mixed.
    """
    whole = sum(kind.weight for kind in kinds)
    shares = {kind.name: max(1, round(inputs * kind.weight / whole)) for kind in kinds}
    mixed = sorted(
        ((number + 0.5) / shares[kind.name], place, number)
        for place, kind in enumerate(kinds)
        for number in range(shares[kind.name])
    )
    return [(kinds[place], number) for _, place, number in mixed]


def run(
    chosen: Sequence[tuple[Kind, int]], seed: int, seeds: Seeds, jobs: int, on_done: OnDone
) -> None:
    """Run the inputs, those that need torch last.

    A hang is tried a second time, alone.
    """
    for torch in (False, True):
        part = [(kind, number) for kind, number in chosen if kind.torch is torch]
        if part:
            hung = _run_part(part, seed, seeds, jobs, on_done, torch=torch)
            _again(hung, on_done, torch=torch)


def make_seeds(kinds: Iterable[Kind], seeds: Seeds) -> None:
    """Make the missing seeds of the kinds."""
    missing = seeds.missing(name for kind in kinds for name in kind.needs)
    if missing:
        with Server(torch=any(RECIPES[name].torch for name in missing)) as server:
            for name in sorted(missing):
                seeds.make(name, server)


def _run_part(
    part: Sequence[tuple[Kind, int]],
    seed: int,
    seeds: Seeds,
    jobs: int,
    on_done: OnDone,
    *,
    torch: bool,
) -> list[Input]:
    """Run inputs on `jobs` servers; return those that hung, without reporting them yet."""
    left: queue.SimpleQueue[tuple[Kind, int]] = queue.SimpleQueue()
    for each in part:
        left.put(each)
    hung: list[Input] = []
    lock = threading.Lock()

    def work() -> None:
        with Server(torch=torch) as server, suppress(queue.Empty):
            while True:
                given = build(*left.get_nowait(), seed, seeds)
                ended = server.run(given)
                with lock:
                    if ended.hung:
                        hung.append(given)
                    else:
                        on_done(Result(given=given, ended=ended, verdict=judge(given, ended)))

    with ThreadPoolExecutor(min(jobs, len(part))) as pool:
        for worker in [pool.submit(work) for _ in range(min(jobs, len(part)))]:
            worker.result()
    return hung


def _again(hung: Sequence[Input], on_done: OnDone, *, torch: bool) -> None:
    if hung:
        with Server(torch=torch) as server:
            for given in hung:
                ended = server.run(given)
                on_done(Result(given=given, ended=ended, verdict=judge(given, ended)))


def grouped(failures: Iterable[Result]) -> list[Group]:
    """Return failures by cause, the largest group first."""
    by_cause: dict[tuple[str, str], list[Result]] = {}
    for result in failures:
        by_cause.setdefault((result.verdict.failure, result.verdict.cause), []).append(result)
    groups = [
        Group(
            failure=failure,
            cause=cause,
            results=tuple(sorted(results, key=lambda each: (each.given.size, each.given.name))),
        )
        for (failure, cause), results in by_cause.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.results), group.failure, group.cause))


def save(groups: Sequence[Group], folder: Path) -> None:
    """Write the smallest input of each group into a folder, with its command and its output."""
    for place, group in enumerate(groups):
        name = re.sub(r"\W+", "-", f"{place:03} {group.failure} {group.cause}")[:80].strip("-")
        write_result(group.results[0], folder / name)


def write_result(result: Result, folder: Path) -> None:
    """Write the files, command and output of one input."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in result.given.files.items():
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    described = replace(result.given, files=dict.fromkeys(result.given.files, b""))
    (folder / "input.txt").write_text(
        f"{described}\n{command(result.given)}\n", encoding="utf-8", errors="backslashreplace"
    )
    for name in ("stdout", "stderr", "stack"):
        (folder / name).write_text(
            getattr(result.ended, name), encoding="utf-8", errors="backslashreplace"
        )


def command(given: Input) -> str:
    """Return the command line in a form for a shell."""
    return shlex.join((given.program.value, *given.arguments))
