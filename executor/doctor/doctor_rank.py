"""One rank of `plan doctor`: it joins the others and runs paths one after the other.

It writes a line to its journal when a path begins and when it ends, so that the parent knows which
path a world died in.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parplan.executor.doctor.path import Checked, GpuPath, Place, RefusedError, WrongError
from parplan.executor.doctor.stand_in import KIND, register, stand_in
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.doctor_report import Outcome
from parplan.profiles.errors import PlannerError
from parplan.profiles.interrupts import leave_signals_to_parent
from parplan.profiles.profiler.gpus import backend_of, gpu, is_gpu, own_gpu

# what torch, CUDA and NCCL raise where something is wrong, but for a lack of a kernel
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
LIMIT = timedelta(
    seconds=180
)  # ranks of a busy machine start far apart; the parent's limit is less


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorWorld:
    """A world of ranks that run paths.

    kind     cuda, cpu or the stand-in
    number   of the world: worlds after a failure begin anew
    traces   True if each rank also writes the places that it ran
    """

    kind: str
    ranks: int
    number: int
    folder: Path
    plans: Mapping[str, Plan]
    traces: bool = False


def run_rank(rank: int, world: DoctorWorld, paths: Sequence[GpuPath]) -> None:
    """Runs paths as one rank of a world."""
    leave_signals_to_parent()
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if world.kind == KIND:
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # not bound
        register()
    device = torch.device("cpu")
    if world.kind != "cpu":
        device = torch.device(world.kind, 0 if world.kind == KIND else rank)
    with stand_in() if world.kind == KIND else nullcontext():
        if is_gpu(device):
            gpu(device).set_device(device)
        dist.init_process_group(
            backend_of(device),
            store=dist.FileStore(str(world.folder / f"store{world.number}"), world.ranks),
            rank=rank,
            world_size=world.ranks,
            timeout=LIMIT,
            # meshes of a bound group split it, and torch splits none whose backend is gloo's
            device_id=None if world.kind == KIND else own_gpu(device),
        )
        place = Place(
            device=device,
            rank=rank,
            world=world.ranks,
            folder=world.folder,
            plans=world.plans,
            real=world.kind != KIND,
        )
        with (world.folder / f"world{world.number}-rank{rank}.jsonl").open("w") as journal:
            for path in paths:
                if not _run(path, place, journal, traces=world.traces):
                    break
        dist.destroy_process_group()


def _run(path: GpuPath, place: Place, journal: object, *, traces: bool) -> bool:
    """Runs a path; returns False if its world may be left in the middle of an exchange."""

    def write(**line: object) -> None:
        print(json.dumps({"path": path.name, **line}), file=journal, flush=True)  # type: ignore[arg-type]

    write()
    started_s = time.perf_counter()
    with traced() if traces else nullcontext([]) as ran:
        outcome, says = _outcome(path, place)
    write(outcome=outcome, says=says, seconds=time.perf_counter() - started_s, ran=sorted(ran))
    return outcome is not Outcome.WRONG or place.world == 1


def _outcome(path: GpuPath, place: Place) -> tuple[Outcome, str]:
    try:
        checked: Checked = path.run(place)
        place.synchronize()
    except (RefusedError, PlannerError, NotImplementedError) as refusal:
        return Outcome.REFUSED, _line(refusal)
    except WrongError as error:
        return Outcome.WRONG, str(error)
    except FAULTS as fault:
        return Outcome.WRONG, f"{type(fault).__name__}: {_line(fault)}"
    return (Outcome.SLOW, checked.slow) if checked.slow else (Outcome.PASSED, checked.says)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def traced() -> Iterator[set[str]]:
    """Yields the functions of the product that this thread calls meanwhile, as file:name."""
    ran: set[str] = set()
    root = str(Path(__file__).resolve().parents[2]) + "/"

    def see(frame: object, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code  # type: ignore[attr-defined]
            if code.co_filename.startswith(root) or "/parplan/" in code.co_filename:
                inside = code.co_filename.removeprefix(root).removeprefix("parplan/")
                file = inside.rpartition("/parplan/")[2]
                ran.add(f"{file}:{code.co_qualname.replace('.<locals>', '')}")

    sys.setprofile(see)
    try:
        yield ran
    finally:
        sys.setprofile(None)
