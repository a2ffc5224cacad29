"""Programs that a profiler is handed: some measure, others fail in every way that a process can."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import resource
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CasePass,
    Timing,
    UnsupportedCase,
)
from parplan.profiles.profiler import worker
from parplan.profiles.profiler.journal import open_journal
from parplan.profiles.profiler.measuring_session import SessionOptions, run_session

ASKED = {"device": "none", "precision": "fp32"}


def case(work: str, size: int = 1) -> Case:
    return Case(
        work=work, sizes=(("size", size),), precision="fp32", passes=(CasePass(name="time"),)
    )


def steady(case: Case, device: str) -> CaseFigures:
    """Figures that follow from the case alone, and the process that they came from."""
    size = case.size("size")
    return CaseFigures(
        times={"time": Timing(median_us=1.5 * size, spread=0.25 / size, repeats=size)},
        saved_bytes=3 * size,
    )


def logged(path: str, case: Case, device: str) -> CaseFigures:
    """`steady` after some milliseconds; says in a file first that it runs."""
    with open(path, "a") as log:
        log.write(f"{case.key} on {device}\n")
    time.sleep(random.Random(case.key).uniform(0.001, 0.02))
    return steady(case, device)


def by_work(case: Case, device: str) -> CaseFigures:
    """Returns the outcome that the case's work names: a failure, or `steady`."""
    failure = globals().get(f"_{case.work}")
    return failure(case) if failure else steady(case, device)


def _limit_memory() -> None:
    """To 64 MiB beyond what there is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), resource.RLIM_INFINITY)
    )


def _allocates(case: Case) -> None:
    _limit_memory()
    held = []
    while True:
        held.append(bytearray(1 << 20))


def _small_blocks(case: Case) -> None:
    """Not even an error's text finds room then."""
    _limit_memory()
    held = []
    while True:
        held.append([*held[-1:], *range(1000)])


def _of_torch(case: Case) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _of_the_cpu_allocator(case: Case) -> None:
    import torch

    torch.empty(1 << 50)


def _exits(case: Case) -> None:
    print("last words", file=sys.stderr)
    os._exit(7)


def _leaves(case: Case) -> None:
    sys.exit("enough")


def _segfaults(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _is_killed(case: Case) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleeps(case: Case) -> None:
    while True:
        time.sleep(1)


def _holds_the_interpreter(case: Case) -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def _stops(case: Case) -> None:
    """Not even its own clock can end it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _closes_everything(case: Case) -> None:
    os.closerange(0, 1000)
    time.sleep(1000)


def _raises(case: Case) -> None:
    raise ValueError("the shape is odd\nand more lines")


def _is_unsupported(case: Case) -> None:
    raise UnsupportedCase("no transfers on a CPU")


def _returns_nothing(case: Case) -> None:
    return None


def _measures_nonsense(case: Case) -> CaseFigures:
    return CaseFigures(figures={"copied_bytes_per_s": float("nan")})


def _babbles(case: Case) -> CaseFigures:
    for stream in (1, 2):
        os.write(stream, b"\x00\xff garbage \x1b[31m\n" * 20000)
    with contextlib.redirect_stdout(sys.stderr):
        print("more")
    return steady(case, "cpu")


def apart(folder: str, case: Case, device: str) -> CaseFigures:
    """Fails where another case runs on its device, and `launch` where any other runs."""
    kind = fcntl.LOCK_EX if case.work == "launch" else fcntl.LOCK_SH
    with open(f"{folder}/{device}", "w") as device_lock, open(f"{folder}/all", "w") as shared:
        fcntl.flock(device_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(shared, kind | fcntl.LOCK_NB)
        time.sleep(0.02)
    return steady(case, device)


def meeting(folder: str, case: Case, device: str) -> CaseFigures:
    """Waits until there are cases on as many devices as its size says."""
    Path(folder, device).touch()
    while len(list(Path(folder).iterdir())) < case.size("size"):
        time.sleep(0.005)
    return CaseFigures(saved_bytes=1)


def main(journal: str, log: str, num_cases: int) -> None:
    """A session of `logged` in a process of its own, to be killed."""
    where = open_journal(Path(journal), ASKED)
    run_session(
        [case("logged", size) for size in range(1, num_cases + 1)],
        partial(logged, log),
        ("a", "b"),
        where,
        SessionOptions(deadline_s=60.0, hang_limit_s=20.0, modules=("tests.helpers.programs",)),
    )
    where.close()
    print("done")


def measured_alone(case: Case, program: object = by_work, *, limit_s: float = 20.0):
    """The record of one case in a process of its own."""
    worker.preload(("tests.helpers.programs",))
    child = worker.start(program, case, "cpu", limit_s)
    while (record := worker.poll_child(child)) is None:
        wait(child.ready, 0.2)
    return record


def processes_left(session: int) -> list[int]:
    """Processes of a session of the system that live; waits some seconds for them to end."""
    for _ in range(200):
        actual = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdigit() and _lives_in(int(name), session)
        ]
        if not actual:
            break
        time.sleep(0.05)
    return actual


def _lives_in(pid: int, session: int) -> bool:
    try:
        state, _, _, its_session = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        )
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and int(its_session) == session


def machine(case: Case, device: str) -> CaseFigures:
    """Measures on a machine of 0.1 TFLOP/s and 20 GB/s that launches in 10 us.

    On it gelu does not fit and attention hangs.
    """
    if case.work == "gelu":
        raise MemoryError("the activation does not fit")
    if case.work == "attention":
        time.sleep(1000)
    figures = {
        "device_copy": {"copied_bytes_per_s": 20e9},
        "launch": {"host_launch_s": 1e-6},
        "allocator": {"context_bytes": 2.0**28},
    }
    times = {
        layer_pass.name: Timing(median_us=_taken_us(case, layer_pass), spread=0.01, repeats=7)
        for layer_pass in case.passes
    }
    return CaseFigures(times=times, figures=figures.get(case.work, {}))


def _taken_us(case: Case, requested: CasePass) -> float:
    if case.work in ("linear", "block"):
        sizes = dict(case.sizes)
        flops = (
            24 * sizes["batch"] * sizes["seq"] * sizes["hidden"] ** 2
            if case.work == "block"
            else math.prod(requested.sizes) * 2
        )
        return 10 + flops / 1e5
    return 10 + sum(requested.sizes) / 20e3
