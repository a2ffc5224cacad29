"""Predicted and measured step time and memory of plans on this machine's own profile.

    # gpt-tiny and gpt-100m on 1 and 2 CPU processes, under 10 minutes
    python benchmarks/prices/profiled.py
    python benchmarks/prices/profiled.py --minutes 2 --repeats 1
    # leaves profile, plans and run.json files in the folder
    python benchmarks/prices/profiled.py --keep runs/

The machine is profiled, and plans are made with the profile and run. Every plan runs several times,
in turns, so that a slow minute of the machine affects all of them; the figures are medians of the
runs' own medians, with the least and the most. Predictions are the plan's, made before the first
run, without calibration.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.profiles.units import format_bytes
from parplan.report.text import console, print_table, seconds_text

ROOT = Path(__file__).resolve().parents[2]
PLAN = (sys.executable, "-c", "import cli; cli.main()")
MODELS = ("gpt-tiny", str(ROOT / "benchmarks/gpt-100m.yaml"))
STEPS = {"gpt-tiny": 40, "gpt-100m": 6}


@dataclass(frozen=True, slots=True)
class Job:
    """One plan and the paths of its runs."""

    model: str
    world: int
    folder: Path

    @property
    def name(self) -> str:
        return Path(self.model).stem

    @property
    def plan(self) -> Path:
        return self.folder / f"{self.name}-{self.world}.yaml"

    def run_json(self, repeat: int) -> Path:
        return self.folder / f"{self.name}-{self.world}-run{repeat}.json"


def call(command: Sequence[str], log: Path) -> None:
    """Run a command of the project with one thread a process; on failure print its log and end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        process = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            check=False,
        )
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()[-3000:]}")


def profile(folder: Path, minutes: float) -> Path:
    """Profile this machine for both models and return the file."""
    output = folder / "cpu.yaml"
    models = [argument for model in MODELS for argument in ("--model", model)]
    call(
        [
            *PLAN,
            "profile",
            "--device",
            "cpu",
            *models,
            "--minutes",
            str(minutes),
            "-o",
            str(output),
        ],
        folder / "profile.log",
    )
    return output


def make_plan(job: Job, profile_path: Path) -> None:
    call(
        [
            *PLAN,
            "--model",
            job.model,
            "--gpus",
            str(job.world),
            "--profile",
            str(profile_path),
            "-o",
            str(job.plan),
        ],
        job.folder / "plan.log",
    )


def run(job: Job, repeat: int) -> None:
    call(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(job.world),
            "-m",
            "parplan.executor",
            str(job.plan),
            "--steps",
            str(STEPS[job.name]),
            "--run-json",
            str(job.run_json(repeat)),
        ],
        job.folder / "run.log",
    )


def figures(job: Job, repeats: int) -> dict[str, Any]:
    """Return predicted and measured step time, and peak of the fullest rank.

    Ratios are predicted over measured.
    """
    runs = [json.loads(job.run_json(repeat).read_text()) for repeat in range(repeats)]
    steps = [run["figures"]["step_time_s"] for run in runs]
    peaks = [
        max(
            (rank["peak_allocated_bytes"] for rank in run["ranks"]),
            key=lambda peak: peak["measured"],
        )
        for run in runs
    ]
    ratios = sorted(step["predicted"] / step["measured"] for step in steps)
    return {
        "model": job.name,
        "world": job.world,
        "mesh": runs[0]["plan"]["mesh"],
        "predicted_s": steps[0]["predicted"],
        "measured_s": median(step["measured"] for step in steps),
        "ratio": median(ratios),
        "least_ratio": ratios[0],
        "most_ratio": ratios[-1],
        "predicted_bytes": peaks[0]["predicted"],
        "measured_bytes": median(peak["measured"] for peak in peaks),
        "memory_ratio": median(peak["predicted"] / peak["measured"] for peak in peaks),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        console(sys.stdout),
        (
            "model",
            "ranks",
            "mesh",
            "step predicted",
            "measured",
            "ratio",
            "of runs",
            "peak predicted",
            "measured",
            "ratio",
        ),
        [
            (
                row["model"],
                str(row["world"]),
                " ".join(f"{axis}{n}" for axis, n in row["mesh"].items() if n > 1) or "-",
                seconds_text(row["predicted_s"]),
                seconds_text(row["measured_s"]),
                f"{row['ratio']:.3f}",
                f"{row['least_ratio']:.3f}-{row['most_ratio']:.3f}",
                format_bytes(row["predicted_bytes"]),
                format_bytes(row["measured_bytes"]),
                f"{row['memory_ratio']:.3f}",
            )
            for row in rows
        ],
        left=("model", "mesh"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of profiling")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every plan")
    parser.add_argument("--keep", type=Path, help="a folder for what is made, which stays")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        profile_path = profile(folder, options.minutes)
        profiled_s = time.monotonic() - started
        jobs = [Job(model, world, folder) for model in MODELS for world in (1, 2)]
        for job in jobs:
            make_plan(job, profile_path)
        for repeat in range(options.repeats):
            for job in jobs:
                run(job, repeat)
        rows = [figures(job, options.repeats) for job in jobs]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    show(rows)
    print(f"\nprofiled for {profiled_s:.0f} s, {time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
