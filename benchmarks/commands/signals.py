"""Ctrl-C and SIGTERM at random moments of 18 commands.

    # half an hour on two cores
    python -m benchmarks.commands.signals
    # ten minutes
    python -m benchmarks.commands.signals --moments 2
    python -m benchmarks.commands.signals --only report-front --moments 20 --seed 1

Each command runs undisturbed first. It then runs again and again, and gets one signal at a random
moment: from a tenth of a second after the first statement of its process, when it handles signals,
to a little after its usual end. An earlier signal ends Python before a line of parplan has run
(docs/reference/exit-codes.md). SIGINT comes as a terminal sends it, to the whole group, SIGTERM as
`kill` does, to the process alone. The command must end within a minute with its own exit code or
130, without a traceback or a warning of Python, leave no process and no temporary file, and have
written all files of a result or none, with the sentence on stderr that says which. The exit code is
1 if one of them does not.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.commands.interrupted import survivors
from parplan.report.text import console, print_table, say

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130
LONGEST_S = 60.0  # from the signal to the end
LEAST_S = 0.1  # Python itself and the first modules of the command start, and a signal ends them
LOST_S = 5.0  # that a command works on after a signal without a word
ALIVE_S = 10.0  # until the last process of a command has gone
BEYOND = 1.05  # moments reach this share of the usual time of a command
_NOISE = re.compile(r"Traceback \(most recent call last\)|Exception ignored|\w+Warning:")
_NOTHING = "nothing was written"
_START = (
    "import os, sys; os.write({fd}, b'.'); os.close({fd}); sys.argv[0] = 'plan'; "
    "from parplan.cli import main; sys.exit(main())"
)
_MODEL = ("--model", "gpt-2.5b", "--global-batch-size", "16", "--offload", "none")
_SEARCH = (*_MODEL, "--gpus", "4")
_LIMIT = ("--time-limit", "4")
_LOG = """\
 [2026-01-01 00:00:{second:02}] iteration {step:8}/     100 | consumed samples: {samples:12} | \
elapsed time per iteration (ms): 1200.0 | learning rate: 1.0E-04 | global batch size:    16 | \
lm loss: 8.0E+00 | loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, whose files are all written or none.

    files    patterns of its files
    varies   an interrupted search, or one with a time limit, has another number of them
    """

    arguments: tuple[str, ...]
    files: tuple[str, ...] = ()
    varies: bool = False


CASES: Mapping[str, Case] = {
    "plan": Case(arguments=(*_SEARCH, "-o", "out.yaml"), files=("out.yaml",)),
    "plan-memory": Case(
        arguments=(*_SEARCH, "--objective", "memory", *_LIMIT, "-o", "out.yaml"),
        files=("out.yaml",),
    ),
    "plan-front": Case(
        arguments=(*_SEARCH, "--objective", "pareto", "--points", "5", *_LIMIT, "-o", "out.yaml"),
        files=("out-*.yaml",),
        varies=True,
    ),
    "plan-launchers": Case(
        arguments=(*_SEARCH, "--for", "megatron,fsdp2", "-o", "out.yaml"), files=("out.yaml",)
    ),
    "estimate": Case(
        arguments=(
            "estimate",
            *_SEARCH[:4],
            "--gpus",
            "4",
            "--pp",
            "2",
            "--tp",
            "2",
            "-o",
            "out.yaml",
        ),
        files=("out.yaml",),
    ),
    "explain": Case(arguments=("explain", "plan.yaml", *_LIMIT)),
    "compare": Case(arguments=("compare", *_SEARCH)),
    "sweep": Case(
        arguments=("sweep", *_MODEL, "--gpus", "4,8", "-o", "out.yaml"),
        files=("out-*.yaml",),
        varies=True,
    ),
    "max-model": Case(
        arguments=("max-model", "--gpus", "1", *_LIMIT, "-o", "out.yaml"), files=("out.yaml",)
    ),
    "size": Case(
        arguments=(
            *("size", "--model", "gpt-2.5b", "--gpu", "h100-80gb,a100-80gb"),
            *("--tokens", "1B", "--days", "2", "-o", "out.yaml"),
        ),
        files=("out.yaml",),
    ),
    "report": Case(arguments=("report", "plan.yaml", "-o", "out.html"), files=("out.html",)),
    "report-front": Case(
        arguments=(
            "report",
            "plan.yaml",
            "--front",
            "--baseline",
            "none",
            *_LIMIT,
            "-o",
            "out.html",
        ),
        files=("out.html",),
    ),
    "export": Case(
        arguments=("export", "plan.yaml", "--to", "fsdp2", "--launch", "slurm", "-o", "run"),
        files=("run/*",),
    ),
    "import": Case(
        arguments=("import", "train.log", "--config", "plan.yaml", "-o", "out.csv"),
        files=("out.csv",),
    ),
    "validate": Case(arguments=("validate",)),
    "show": Case(arguments=("show", "plan.yaml")),
    "check": Case(arguments=("check", "plan.yaml")),
    "trace": Case(arguments=("trace", "plan.yaml", "-o", "out.json"), files=("out.json",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a command; `signalled` says that it was running when its signal came."""

    signalled: bool
    code: int
    output: str
    seconds: float
    left: tuple[str, ...]
    processes: int


@dataclass(kw_only=True)
class Tally:
    """The ends of one command."""

    usual_s: float
    too_late: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def start(case: Case, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a command in a session of its own, and returns at its first statement.

    The second of the pair is a descriptor of its output.
    """
    begun, beginning = os.pipe()
    output = os.open(folder / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    process = subprocess.Popen(
        [sys.executable, "-c", _START.format(fd=beginning), *case.arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[beginning],
        start_new_session=True,
    )
    os.close(beginning)
    os.read(begun, 1)
    os.close(begun)
    return process, output


def run(case: Case, folder: Path, number: int = 0, after_s: float = 0.0) -> End:
    """Runs a command, and sends it a signal after some seconds where `number` is not 0."""
    before = {path.name for path in folder.iterdir()}
    process, output = start(case, folder)
    started_s = time.monotonic()
    signalled = False
    if number:
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            signalled = True
            started_s = time.monotonic()
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    try:
        process.wait(LONGEST_S if number else None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - started_s
    until_s = time.monotonic() + ALIVE_S
    while survivors(process.pid) and time.monotonic() < until_s:
        time.sleep(0.1)
    text = os.pread(output, 1 << 20, 0).decode(errors="replace")
    os.close(output)
    return End(
        signalled=signalled,
        code=process.returncode,
        output=text,
        seconds=seconds,
        left=tuple(sorted({path.name for path in folder.rglob(".*")} - before)),
        processes=len(survivors(process.pid)),
    )


def files_of(case: Case, folder: Path) -> list[Path]:
    return sorted(path for pattern in case.files for path in folder.glob(pattern))


def faults(case: Case, end: End, usual_code: int, written: int, whole: int) -> list[str]:
    """Returns what is wrong with the end of a command that got a signal.

    written, whole    its files, and those of the undisturbed command
    """
    found = []
    if end.code not in (usual_code, INTERRUPTED):
        found.append(f"exit code {end.code}")
    if _NOISE.search(end.output):
        found.append(f"noise: {end.output.strip().splitlines()[-1][:90]}")
    if end.seconds >= LONGEST_S:
        found.append("it did not end")
    if end.signalled and end.code == usual_code and end.seconds > LOST_S:
        found.append("the signal had no effect")
    if end.processes:
        found.append(f"{end.processes} processes are left")
    if end.left:
        found.append(f"left: {', '.join(end.left)}")
    none = end.code == INTERRUPTED and not written
    if written != whole and not none and not (case.varies and written):
        found.append(f"{written} of {whole} files at exit code {end.code}")
    if written and _NOTHING in end.output:
        found.append(f"{written} files, and it says that {_NOTHING}")
    return found


def attack(name: str, case: Case, made: Path, moments: int, draw: random.Random) -> Tally:
    """Runs a command undisturbed and then with signals at random moments, in copies of a folder."""

    def fresh() -> Path:
        folder = Path(tempfile.mkdtemp(prefix="signals-"))
        shutil.copytree(made, folder, dirs_exist_ok=True)
        return folder

    folder = fresh()
    run(case, folder)  # with cold caches
    usual = run(case, folder)
    whole = len(files_of(case, folder))
    shutil.rmtree(folder)
    if _NOISE.search(usual.output) or (case.files and not whole):
        sys.exit(f"{name} fails undisturbed:\n{usual.output}")
    tally = Tally(usual_s=usual.seconds)
    for number in (signal.SIGINT, signal.SIGTERM):
        for _ in range(moments):
            after_s = draw.uniform(LEAST_S, BEYOND * usual.seconds)
            folder = fresh()
            end = run(case, folder, number, after_s)
            tally.too_late += not end.signalled
            tally.codes[end.code] += end.signalled
            tally.slowest_s = max(tally.slowest_s, end.seconds)
            written = len(files_of(case, folder))
            for fault in faults(case, end, usual.code, written, whole):
                tally.faults.append(f"{name}, {number.name} after {after_s:.2f} s: {fault}")
                print(tally.faults[-1], file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    return tally


def make(folder: Path) -> None:
    """Makes the files that the commands read."""
    subprocess.run(
        [sys.executable, "-m", "parplan.cli", *_SEARCH, "--for", "fsdp2", "-o", "plan.yaml"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    lines = (_LOG.format(second=step, step=step, samples=16 * step) for step in range(1, 30))
    (folder / "train.log").write_text("".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=6, help="of each signal, for each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=tuple(CASES))
    given = parser.parse_args(arguments)
    # the commands get signals that a job in the background of a shell ignores
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows, all_faults = [], []
    with tempfile.TemporaryDirectory(prefix="signals-made-") as made:
        make(Path(made))
        for name, case in CASES.items():
            if given.only and name not in given.only:
                continue
            draw = random.Random(f"{given.seed} {name}")
            tally = attack(name, case, Path(made), given.moments, draw)
            others = sum(n for code, n in tally.codes.items() if code not in (0, INTERRUPTED))
            codes = tally.codes[0], tally.codes[INTERRUPTED], others
            counts = (*codes, tally.too_late, len(tally.faults))
            seconds = (f"{tally.usual_s:.1f}", f"{tally.slowest_s:.1f}")
            rows.append((name, *map(str, counts), *seconds))
            all_faults += tally.faults
            print(*rows[-1], file=sys.stderr, flush=True)
    out = console(sys.stdout)
    heading = ("command", "0", "130", "other", "too late", "faults", "usual s", "end s")
    print_table(out, heading, rows, left=heading[:1])
    for fault in all_faults:
        say(out, fault)
    return 1 if all_faults else 0


if __name__ == "__main__":
    sys.exit(main())
