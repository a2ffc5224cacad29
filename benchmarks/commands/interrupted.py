"""`plan profile` killed with SIGKILL at random moments and started again.

    # gpt-tiny on a CPU, five kills, about three minutes
    python benchmarks/commands/interrupted.py
    python benchmarks/commands/interrupted.py --kills 20 --seed 1

It is compared with an undisturbed profile. Both must end with the same shapes, every record whole
and there once, no journal and no process left. Times are not compared.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.profiles.machines.user_profile import UserProfile, read_profile
from parplan.profiles.profiler.journal import journal_path

ROOT = Path(__file__).resolve().parents[2]

LEAST_S = 4.0  # until the first measurement: the process imports torch
# Until the last process notices that its parent is gone, which it does not while it imports torch.
MOST_S = 30.0


def start(output: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "import sys, cli; sys.exit(cli.main())",
        "profile",
        "--device",
        "cpu",
        "--model",
        "gpt-tiny",
        "--no-comm",
        "-o",
        str(output),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=output.parent,
            start_new_session=True,
        )


def finish(output: Path) -> float:
    """Run to the end; return its seconds."""
    started = time.monotonic()
    if start(output).wait():
        sys.exit(output.with_suffix(".log").read_text()[-3000:])
    return time.monotonic() - started


def survivors(session: int) -> list[int]:
    """Return processes of the session that a killed profiler leaves."""
    pids = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(") ")[2].split()
            except OSError:  # the process has ended
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                pids.append(int(path.name))
    return pids


def kill_at(output: Path, after_s: float) -> tuple[int, float]:
    """Start, and kill after a while.

    Returns the number of records on disk, and the seconds until no process is left.
    """
    process = start(output)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_s = time.monotonic()
    while survivors(process.pid) and time.monotonic() - killed_s < MOST_S:
        time.sleep(0.1)
    journal = journal_path(output)
    return max(
        0, len(journal.read_bytes().splitlines()) - 1
    ) if journal.exists() else 0, time.monotonic() - killed_s


def differences(first: UserProfile, second: UserProfile) -> list[str]:
    """Return the differences of the second profile from the first as lines."""
    keys = [record.case.key for record in first.records]
    keys_again = [record.case.key for record in second.records]
    lines = [f"missing: {key}" for key in keys if key not in keys_again] + [
        f"beyond: {key}" for key in keys_again if key not in keys
    ]
    lines += [f"twice: {key}" for key in set(keys_again) if keys_again.count(key) > 1]
    outcomes = {record.case.key: record.outcome for record in first.records}
    lines += [
        f"{r.case.key}: {r.outcome}"
        for r in second.records
        if outcomes.get(r.case.key) != r.outcome
    ]
    passes = {record.case.key: record.case.passes for record in first.records}
    return lines + [
        f"passes of {r.case.key}"
        for r in second.records
        if r.measured and {p.name for p in passes.get(r.case.key, ())} - set(r.measured.times)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole.yaml", Path(folder) / "killed.yaml"
        whole_s = finish(whole)
        print(
            f"undisturbed: {len(read_profile(whole).records)} records in {whole_s:.0f} s",
            flush=True,
        )
        share_s = max(LEAST_S, whole_s / (options.kills + 1))
        for number in range(options.kills):
            after_s = draw.uniform(LEAST_S / 2, LEAST_S + share_s)
            kept, gone_s = kill_at(killed, after_s)
            print(
                f"kill {number + 1} after {after_s:4.1f} s: {kept} records on disk, "
                f"its processes gone in {gone_s:.1f} s",
                flush=True,
            )
            if gone_s >= MOST_S:
                return 1
        print(f"finished in {finish(killed):.0f} s")
        lines = differences(read_profile(whole), read_profile(killed))
        print("\n".join(lines) or "the same shapes, each once and whole")
        print(f"journal left: {journal_path(killed).exists()}")
        return 1 if lines or journal_path(killed).exists() else 0


if __name__ == "__main__":
    sys.exit(main())
