"""Recovery from kill -9 of random ranks at random moments.

    # 20 kills over three meshes, some minutes
    python benchmarks/executor/recovery.py
    python benchmarks/executor/recovery.py --kills 3 --seed 7

gpt-tiny (dropout 0.1, so the generators count) runs under torchrun --max-restarts with a checkpoint
every 3 steps. Every third kill waits for a save in progress. Every printed loss, repeated steps
included, must equal the undisturbed run's in all digits; the exit code is 1 if one differs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import write_plan
from parplan.profiles.models.model_catalog import load_model
from parplan.report.text import console, print_table, say
from tests.helpers.executor_plans import make_plan

ROOT = Path(__file__).resolve().parents[2]
EVERY = 3
SAVE_WAIT_S = 5.0
POLL_S = 0.002


@dataclass(kw_only=True)
class Kill:
    """One kill: its planned rank, step and moment, then its outcome.

    first  index of the first loss printed after its recovery
    """

    mesh: str
    rank: int
    step: int
    delay_s: float
    in_save: bool
    at: str = "not reached"
    killed_s: float = 0.0
    resumed: int = 0
    first: int | None = None
    back_s: float = 0.0


@dataclass(kw_only=True)
class Curve:
    """The losses of a run as printed, by step, in the order of printing."""

    losses: list[tuple[int, str]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    exit_code: int = 0


def plans() -> dict[str, tuple[Plan, float]]:
    """Return the meshes with their shares of the kills."""
    model = load_model("gpt-tiny").spec
    return {
        "dp 2, ZeRO 3": (make_plan(model, dp=2, zero=(3,)), 0.4),
        "pp 2": (make_plan(model, pp=2), 0.4),
        "dp 2 x tp 2, ZeRO 1": (make_plan(model, dp=2, tp=2, sp=True, zero=(1,)), 0.2),
    }


def planned(mesh: str, world: int, count: int, chance: random.Random) -> list[Kill]:
    """Return kills at increasing steps, so that each step is met once."""
    kills, step = [], 0
    for number in range(count):
        in_save = number % 3 == 2
        step += chance.randint(1, 2 * EVERY)
        step = -(-step // EVERY) * EVERY if in_save else step
        kills.append(
            Kill(
                mesh=mesh,
                rank=chance.randrange(world),
                step=step,
                delay_s=chance.uniform(0.0, 0.3),
                in_save=in_save,
            )
        )
    return kills


def run(plan: Path, world: int, steps: int, kills: list[Kill], folder: Path | None) -> Curve:
    """Train under torchrun, and kill as planned."""
    arguments = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--max-restarts",
        str(len(kills)),
        "-m",
        "parplan.executor",
        str(plan),
        "--steps",
        str(steps),
        "--timeout",
        "60",
    ]
    if folder is not None:
        arguments += ["--checkpoint-dir", str(folder), "--checkpoint-every", str(EVERY)]
    curve = Curve()
    todo = list(kills)
    last = None
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            note(line, curve, last)
            if (
                todo
                and curve.losses
                and line.startswith("step")
                and curve.losses[-1][0] >= todo[0].step
            ):
                last = todo.pop(0)
                strike(last, process.pid, folder)
    curve.exit_code = process.returncode
    return curve


def note(line: str, curve: Curve, last: Kill | None) -> None:
    """Note the losses of a line, or the beginning of a recovery."""
    curve.log.append(line)
    if last and (match := re.match(r"note: goes on from .* after step (\d+)", line)):
        last.resumed, last.first = int(match[1]), len(curve.losses)
    if match := re.match(r"step +(\d+)  loss ([\d.]+)", line):
        if last and last.first is None and match[1] == "1":
            last.first = len(curve.losses)  # killed before the first checkpoint
        if last and last.first is not None and not last.back_s:
            last.back_s = time.perf_counter() - last.killed_s
        curve.losses.append((int(match[1]), match[2]))


def strike(kill: Kill, agent: int, folder: Path | None) -> None:
    """Kill the rank, in the middle of a save or after a moment."""
    if folder is None:
        return
    if not (kill.in_save and _save_begins(folder)):
        time.sleep(kill.delay_s)
    kill.at = "during a save" if any(folder.glob("*.tmp-new")) else "between saves"
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={kill.rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            os.kill(int(child), signal.SIGKILL)
            kill.killed_s = time.perf_counter()


def _save_begins(folder: Path) -> bool:
    end = time.perf_counter() + SAVE_WAIT_S
    while time.perf_counter() < end:
        if any(folder.glob("*.tmp-new")):
            return True
        time.sleep(POLL_S)
    return False


def equal(kills: list[Kill], curve: Curve, whole: Curve) -> list[bool]:
    """Return for every kill whether its losses are those of the undisturbed run.

    They are the losses from its recovery to the next one's.
    """
    expected = dict(whole.losses)
    ends = [kill.first for kill in kills[1:]] + [None]
    parts = [
        curve.losses[kill.first : end] if kill.first is not None else []
        for kill, end in zip(kills, ends, strict=True)
    ]
    return [bool(part) and all(expected.get(step) == loss for step, loss in part) for part in parts]


def measure(mesh: str, plan: Plan, kills: list[Kill], folder: Path) -> tuple[list[bool], bool]:
    """Run a mesh twice; return which recoveries are equal, and whether the whole curve is."""
    steps, world = kills[-1].step + 2 * EVERY, plan.mesh.num_ranks
    path = folder / f"{world}-{plan.mesh.pp}.yaml"
    write_plan(plan, path)
    whole = run(path, world, steps, [], None)
    curve = run(path, world, steps, kills, folder / f"{path.stem}-checkpoints")
    for run_name, curve_of_run in (("undisturbed", whole), ("killed", curve)):
        if curve_of_run.exit_code:
            print(
                f"{mesh}: the {run_name} run ended with {curve_of_run.exit_code}:",
                *curve_of_run.log[-40:],
                file=sys.stderr,
            )
    expected = dict(whole.losses)
    same = whole.exit_code == curve.exit_code == 0 and all(
        expected.get(step) == loss for step, loss in curve.losses
    )
    return equal(kills, curve, whole), same and {step for step, _ in curve.losses} == set(expected)


def rows(kills: list[Kill], right: list[bool]) -> Iterator[tuple[str, ...]]:
    for kill, is_equal in zip(kills, right, strict=True):
        yield (
            kill.mesh,
            str(kill.rank),
            str(kill.step),
            kill.at,
            str(kill.resumed),
            f"{kill.back_s:.1f}",
            "equal" if is_equal else "DIFFERS",
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, out = random.Random(arguments.seed), console(sys.stdout)
    table, whole_curves = [], []
    left = arguments.kills
    with tempfile.TemporaryDirectory() as folder:
        for mesh, (plan, share) in plans().items():
            kills = planned(
                mesh, plan.mesh.num_ranks, min(left, math.ceil(share * arguments.kills)), chance
            )
            left -= len(kills)
            if kills:
                right, same = measure(mesh, plan, kills, Path(folder))
                table += rows(kills, right)
                whole_curves.append(same)
    heading = (
        "mesh",
        "rank",
        "killed after step",
        "moment",
        "resumed after",
        "back in s",
        "losses",
    )
    print_table(out, heading, table, left={"mesh", "moment", "losses"})
    good = sum(row[-1] == "equal" for row in table)
    say(
        out,
        f"{good} of {len(table)} recoveries print the losses of the undisturbed run in all digits",
    )
    return 0 if good == len(table) and all(whole_curves) else 1


if __name__ == "__main__":
    sys.exit(main())
