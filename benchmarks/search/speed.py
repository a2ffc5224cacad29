"""CPU-seconds of whole commands, now and at an earlier commit.

    python -m benchmarks.search.speed                          # nineteen requests, over an hour
    python -m benchmarks.search.speed --only help --only compare --repeat 3
    python -m benchmarks.search.speed --only report --only explain --only size --baseline HEAD~5
    python -m benchmarks.search.speed --baseline none --json

A figure is the user and system time of a fresh process and of the processes that it starts: the
median of the runs. Wall seconds are the least of the runs, because other work on the machine only
lengthens them. The earlier commit is checked out in a temporary worktree and runs in turn with this
tree, so that a busy machine slows both. Python may keep the bytecode of both, as an installation
does; the first run of each request fills that cache and is not counted.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.search.traced_search import NEOX_20B
from parplan.profiles.units import KIB, MIB
from parplan.report.text import console, print_table, say

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "42634fa"  # the last commit before one engine planned described and traced models
START = "import sys; sys.argv[0] = 'plan'; from parplan.cli import main; main()"
CONFIG = "CONFIG"  # in a command: the config.json of the Hugging Face model
PLAN = "PLAN"  # in a command: the plan of gpt-20b on 64 GPUs
SIX_KINDS = "a100-80gb,h100-80gb,h200-141gb,b200-180gb,gb200-186gb,mi300x-192gb"
HEADING = ("request", "before s", "now s", "ratio", "to reach s", "wall s", "peak MiB")


@dataclass(frozen=True, slots=True)
class Timed:
    """A request to time, with the CPU-seconds that it is to reach.

    earlier     whether the usual earlier commit has it too
    """

    name: str
    command: str
    reach_s: float
    earlier: bool = True


REQUESTS = (
    Timed("gpt-20b", "--model gpt-20b --gpus 64 --gpu a100-80gb", 1.0),
    Timed("llama3-70b", "--model llama3-70b --gpus 512 --gpu h100-80gb", 1.5),
    Timed("llama3-405b", "--model llama3-405b --gpus 16384 --gpu h100-80gb", 1.5),
    Timed("gpt-1t", "--model gpt-1t --gpus 3072 --gpu a100-80gb", 4.0),
    Timed("deepseek-v3", "--model deepseek-v3 --gpus 2048 --gpu h800-80gb", 3.0, False),
    Timed("qwen3-235b", "--model qwen3-235b-a22b --gpus 256 --gpu h100-80gb", 3.0, False),
    Timed("gpt-oss-120b", "--model gpt-oss-120b --gpus 64 --gpu h100-80gb", 3.0, False),
    Timed("mixtral-8x22b", "--model mixtral-8x22b --gpus 128 --gpu h100-80gb", 3.0, False),
    Timed(
        "131,072 tokens",
        "--model llama3-405b --gpus 16384 --gpu h100-80gb --seq-length 131072",
        3.0,
        False,
    ),
    Timed("llama3-70b on 128", "--model llama3-70b --gpus 128 --gpu h100-80gb", 3.0),
    Timed("memory", "--model gpt-20b --gpus 64 --objective memory", 2.0),
    Timed("pareto", "--model gpt-20b --gpus 64 --objective pareto", 10.0),
    Timed("compare", "compare --model gpt-20b --gpus 64 --baseline all", 3.0),
    Timed("host", "--model gpt-18b --gpus 8 --gpu v100-32gb --host-memory 240GiB", 5.0),
    Timed("traced", f"--model {CONFIG} --trace --gpus 64 --global-batch-size 1024", 4.0),
    Timed("report", f"report {PLAN} -o report.html", 4.0, False),
    Timed("explain", f"explain {PLAN}", 20.0, False),
    Timed("size", f"size --model llama3-70b --tokens 1T --days 30 --gpu {SIX_KINDS}", 30.0, False),
    Timed("help", "--help", 0.13),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One process and the processes that it started."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The CPU-seconds and the wall seconds of one request.

    before_s is None without an earlier commit.
    """

    request: str
    before_s: float | None
    now_s: float
    reach_s: float
    wall_s: float
    peak_bytes: int

    @property
    def ratio(self) -> float | None:
        return None if self.before_s is None else self.before_s / self.now_s


def timed_run(tree: Path, command: Sequence[str], folder: Path, cache: Path) -> Run:
    """Runs `plan` with the code of `tree`. Raises RuntimeError with its errors when it fails."""
    environment: Mapping[str, str] = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(cache),
    }
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"plan {shlex.join(command)} in {tree}:\n{errors.read().decode()}")
    return Run(
        cpu_s=usage.ru_utime + usage.ru_stime,
        wall_s=time.monotonic() - started_s,
        peak_bytes=usage.ru_maxrss * KIB,
    )


@contextmanager
def worktree(revision: str) -> Iterator[Path | None]:
    """Yields a temporary checkout of a commit, None for `none`."""
    if revision == "none":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="parplan-speed-") as folder:
        tree = Path(folder, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measured(request: Timed, trees: Sequence[Path], folder: Path, repeat: int) -> Figures:
    """Returns the medians of a request; the trees are this one and perhaps an earlier one."""
    command = [
        {CONFIG: str(folder / "config.json"), PLAN: str(folder / "plan.yaml")}.get(word, word)
        for word in shlex.split(request.command)
    ]
    runs: dict[Path, list[Run]] = {tree: [] for tree in trees}
    for _ in range(1 + repeat):
        for tree in trees:
            runs[tree].append(timed_run(tree, command, folder, folder / "cache"))
    now, *before = ([run.cpu_s for run in runs[tree][1:]] for tree in trees)
    return Figures(
        request=request.name,
        before_s=statistics.median(before[0]) if before else None,
        now_s=statistics.median(now),
        reach_s=request.reach_s,
        wall_s=min(run.wall_s for run in runs[trees[0]][1:]),
        peak_bytes=max(run.peak_bytes for run in runs[trees[0]]),
    )


def row(figures: Figures) -> tuple[str, ...]:
    """Returns the line of the table of one request."""
    before, ratio = figures.before_s, figures.ratio
    return (
        figures.request,
        "" if before is None else f"{before:.2f}",
        f"{figures.now_s:.2f}",
        "" if ratio is None else f"{ratio:.1f} x",
        f"{figures.reach_s:g}",
        f"{figures.wall_s:.2f}",
        f"{figures.peak_bytes / MIB:.0f}",
    )


@click.command()
@click.option(
    "--repeat", type=click.IntRange(1), default=5, show_default=True, help="Runs counted."
)
@click.option("--baseline", default=BEFORE, show_default=True, help="Commit before, or none.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([request.name for request in REQUESTS]),
    help="Time this request; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on stdout.")
def main(repeat: int, baseline: str, only: Sequence[str], as_json: bool) -> None:
    """Time whole commands as processes, beside an earlier commit."""
    errors = console(sys.stderr)
    table: list[Figures] = []
    with tempfile.TemporaryDirectory() as text, worktree(baseline) as before:
        folder = Path(text)
        (folder / "config.json").write_text(json.dumps(NEOX_20B), encoding="utf-8")
        trees = [ROOT] if before is None else [ROOT, before]
        if any(PLAN in request.command for request in REQUESTS if request.name in only or not only):
            first = ["--model", "gpt-20b", "--gpus", "64", "-o", "plan.yaml"]
            timed_run(trees[-1], first, folder, folder / "cache")
        for request in REQUESTS:
            if not only or request.name in only:
                each = trees if request.earlier or baseline != BEFORE else trees[:1]
                table.append(measured(request, each, folder, repeat))
                say(errors, "  ".join(row(table[-1])))
    if as_json:
        click.echo(json.dumps([asdict(figures) for figures in table], indent=2))
    else:
        print_table(console(sys.stdout), HEADING, map(row, table), left=("request",))


if __name__ == "__main__":
    main()
