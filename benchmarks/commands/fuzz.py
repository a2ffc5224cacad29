"""15,000 hostile inputs to every command.

    # about an hour on two cores
    python -m benchmarks.commands.fuzz
    # a minute
    python -m benchmarks.commands.fuzz --inputs 300
    # one kind alone, as many inputs as in the whole
    python -m benchmarks.commands.fuzz --kind plan-fields
    # one input: its files, its command and its output
    python -m benchmarks.commands.fuzz --replay plan-fields:17

Every command must end in time with an exit code and one error, and run no plan whose parts do not
fit together. Inputs are mutations of every file that a command reads, of command lines, of the
surroundings of a process, and of plans that parse and do not fit together. The same seed gives the
same inputs. An input writes in its own folder alone and reaches no network
(benchmarks/commands/fuzzing/contained.py).

Each input runs in a fork, with 6 GiB of address space, 20 CPU-s and a minute. A failure is a
traceback, a hang, more than 20 CPU-s or 2 GiB, a death by a signal, another exit code, a warning of
Python, an error that is not one line, exit code 0 of a plan that
benchmarks/commands/fuzzing/consistent.py rejects, or a line of an exported file that a hostile name
of its plan wrote. The exit code is 1 if there is one; the smallest input of each cause is saved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.commands.fuzzing.campaign import (
    WHOLE,
    Group,
    Result,
    command,
    grouped,
    make_seeds,
    numbers,
    run,
    save,
    write_result,
)
from benchmarks.commands.fuzzing.kinds import KINDS, Kind, build
from benchmarks.commands.fuzzing.seeds import Seeds
from benchmarks.commands.fuzzing.server import Server
from benchmarks.commands.fuzzing.verdicts import judge
from parplan.report.text import console, print_table, say

CODES = (0, 2, 3, 4, 130)
OWN_COLUMN = ("traceback", "hang", "signal", "inconsistent")
HEADER = (
    "kind",
    "inputs",
    *map(str, CODES),
    "other",
    "traceback",
    "hang",
    "signal",
    "misfit",
    "others",
    "most s",
    "most MiB",
)


@dataclass(kw_only=True)
class Tally:
    """The counts of the inputs of one kind."""

    inputs: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    inconsistent: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    largest_bytes: int = 0

    def add(self, result: Result) -> None:
        self.inputs += 1
        self.codes[result.ended.code] += 1
        self.slowest_s = max(self.slowest_s, result.ended.cpu_s)
        self.largest_bytes = max(self.largest_bytes, result.ended.peak_bytes)
        self.inconsistent += bool(result.given.inconsistent)
        self.refused += bool(result.given.inconsistent) and result.ended.code != 0
        if result.verdict.failure:
            self.failures[result.verdict.failure] += 1

    def row(self, name: str) -> list[str]:
        codes = [self.codes[code] for code in CODES]
        by_column = [self.failures[failure] for failure in OWN_COLUMN]
        remaining = sum(self.failures.values()) - sum(by_column)
        return [
            name,
            *map(str, (self.inputs, *codes, self.inputs - sum(codes), *by_column, remaining)),
            f"{self.slowest_s:.1f}",
            f"{self.largest_bytes / 2**20:.0f}",
        ]


@dataclass(kw_only=True)
class Report:
    """The results so far, with each failure and the progress on standard error."""

    total: int
    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: list[Result] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    def add(self, result: Result) -> None:
        self.tallies.setdefault(result.given.kind, Tally()).add(result)
        for note in result.verdict.notes:
            self.notes.setdefault(note, []).append(result.given.name)
        if result.verdict.failure:
            self.failures.append(result)
            verdict = f"{result.verdict.failure}: {result.verdict.cause}"
            print(f"{result.given.name} {verdict}", file=sys.stderr, flush=True)
        done = sum(tally.inputs for tally in self.tallies.values())
        if done % 100 == 0:
            print(
                f"{done} of {self.total}, {len(self.failures)} failures, "
                f"{time.monotonic() - self.started_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def print(self, groups: list[Group]) -> None:
        out = console(sys.stdout)
        names = [kind.name for kind in KINDS if kind.name in self.tallies]
        rows = [self.tallies[name].row(name) for name in names]
        whole = Tally(
            inputs=sum(tally.inputs for tally in self.tallies.values()),
            codes=sum((t.codes for t in self.tallies.values()), Counter()),
            failures=sum((t.failures for t in self.tallies.values()), Counter()),
            slowest_s=max((tally.slowest_s for tally in self.tallies.values()), default=0.0),
            largest_bytes=max((each.largest_bytes for each in self.tallies.values()), default=0),
        )
        print_table(out, HEADER, [*rows, whole.row("all")], left=HEADER[:1])
        refused = sum(tally.refused for tally in self.tallies.values())
        inconsistent = sum(tally.inconsistent for tally in self.tallies.values())
        say(
            out,
            f"{inconsistent} plans did not fit together, {refused} of them were "
            f"refused; {time.monotonic() - self.started_s:.0f} s",
        )
        for note, names in sorted(self.notes.items()):
            say(out, f"note: {note}: {len(names)}, such as {', '.join(names[:3])}")
        for place, group in enumerate(groups):
            first = group.results[0]
            print(f"{place:03} {len(group.results):5} x {group.failure}: {group.cause}")
            print(f"            {first.given.name} {command(first.given)[:160]!r}")


def replay(name: str, seed: int, seeds: Seeds, folder: Path) -> int:
    """Run one input again and print its end."""
    kind_name, _, number = name.partition(":")
    kind = next(kind for kind in KINDS if kind.name == kind_name)
    make_seeds([kind], seeds)
    given = build(kind, int(number), seed, seeds)
    with Server(torch=kind.torch) as server:
        ended = server.run(given)
    result = Result(given=given, ended=ended, verdict=judge(given, ended))
    write_result(result, folder / name.replace(":", "-"))
    print(
        f"{command(given)!r}\nexit code {ended.code}, {ended.seconds:.2f} "
        f"s\n{ended.stdout}\n{ended.stderr}\n{ended.stack}"
    )
    print(
        f"{result.verdict.failure or 'handled'} {result.verdict.cause}; inconsistent: "
        f"{given.inconsistent or 'no'}; in {folder}"
    )
    return 1 if result.verdict.failure else 0


def chosen_kinds(names: list[str]) -> list[Kind]:
    """Return the kinds of these names, or all without names."""
    unknown = [name for name in names if name not in {kind.name for kind in KINDS}]
    if unknown:
        sys.exit(f"no kind {unknown[0]}, there are {', '.join(kind.name for kind in KINDS)}")
    return [kind for kind in KINDS if not names or kind.name in names]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--inputs",
        type=int,
        help=f"of all kinds together, default {WHOLE}; with --kind its share of them",
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--seeds", type=Path, help="folder that keeps the valid files for later runs"
    )
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--replay", metavar="KIND:NUMBER")
    parser.add_argument("--save", type=Path, default=Path(tempfile.gettempdir()) / "fuzz-failures")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fuzz-seeds-") as folder:
        seeds = Seeds(given.seeds or Path(folder))
        seeds.folder.mkdir(parents=True, exist_ok=True)
        if given.replay:
            return replay(given.replay, given.seed, seeds, given.save)
        kinds = chosen_kinds(given.kind)
        inputs = given.inputs or round(
            WHOLE * sum(kind.weight for kind in kinds) / sum(kind.weight for kind in KINDS)
        )
        make_seeds(kinds, seeds)
        chosen = numbers(inputs, kinds)
        report = Report(total=len(chosen))
        run(chosen, given.seed, seeds, given.jobs, report.add)
    groups = grouped(report.failures)
    report.print(groups)
    save(groups, given.save)
    print(f"the smallest input of each is in {given.save}" if groups else "no failure")
    return 1 if groups else 0


if __name__ == "__main__":
    sys.exit(main())
