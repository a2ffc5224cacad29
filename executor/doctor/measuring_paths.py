"""The profiler's timers and counts on a GPU, beside the host's clock."""

from __future__ import annotations

import time

import torch

from parplan.executor.doctor.path import Checked, GpuPath, Place, WrongError
from parplan.executor.measuring.layout_costs import _now_s
from parplan.executor.measuring.machine_figures import STEP_BLOCK, allocator
from parplan.executor.measuring.measure import measure
from parplan.executor.measuring.operands import Maker
from parplan.executor.measuring.products import linear
from parplan.executor.measuring.step_timing import Rounds
from parplan.executor.measuring.update_operations import world_of_one
from parplan.executor.watch.run_recorder import RunRecorder
from parplan.profiles.machines.measurements import Case, CaseFigures, CasePass, UnsupportedCase
from parplan.profiles.units import MIB

TIMED = 2048  # rows and columns of a product that takes long beside its launch
TIMED_ON_HOST = 128
LAPS = 10
CLOSE = 0.15  # relative difference of events and the host's clock
CASES = {  # sizes of small cases of every kind of timer and count
    "linear": {"m": 256, "n": 256, "k": 256, "bias": 1},
    "adamw": {"parameters": 1 << 16},
    "device_copy": {"bytes": 4 * MIB},
    "transfer": {"bytes": 4 * MIB},
    "launch": {},
    "allocator": {},
}
# its operators cost as much as 20 of the CPU's
ON_STAND_IN = ("linear", "transfer", "launch", "allocator")
BLOCK_ON_STAND_IN = STEP_BLOCK | {
    **{"hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 256},
    **{"batch": 1, "seq": 32},
}
PASSES = {"linear": ("forward", "input_gradient", "weight_gradient")}


def timers(place: Place) -> Checked:
    """Compares the events around products with the host's clock over all of them."""
    size = TIMED if place.on_gpu and place.real else TIMED_ON_HOST
    parts = linear({"m": size, "n": size, "k": size, "bias": 0})
    trials = [parts[0].make(Maker(place.device, torch.float32)) for _ in range(LAPS)]
    rounds = Rounds(trials, ("forward",), place.device)
    rounds.run()
    place.synchronize()
    started_s = _now_s(place.device)
    for trial in trials:
        trial.run("forward")
    wall_s = _now_s(place.device) - started_s
    events_s = sum(rounds.run()["forward"])
    says = f"{LAPS} products: events {events_s * 1e3:.2f} ms, clock {wall_s * 1e3:.2f} ms"
    if place.on_gpu and place.real and abs(events_s / wall_s - 1) > CLOSE:
        raise WrongError(says)
    return Checked(says=says)


def spans(place: Place) -> Checked:
    """Compares the recorded spans of a step with the host's clock."""
    recorder, x = RunRecorder(place.device, 1), torch.zeros(256, 256, device=place.device)
    recorder.start()
    started_s = time.perf_counter()
    for micro_batch in range(LAPS):
        with recorder.span("F", 0, micro_batch):
            x = x @ x
    place.synchronize()
    wall_s = time.perf_counter() - started_s
    recorder.finish(wall_s, 0.0)
    (step,) = recorder.steps
    spanned_s = sum(span.end_s - span.start_s for span in step.spans)
    says = f"{len(step.spans)} spans of {spanned_s * 1e3:.2f} ms in {wall_s * 1e3:.2f} ms"
    if len(step.spans) != LAPS or (place.real and spanned_s > wall_s * (1 + CLOSE)):
        raise WrongError(says)
    return Checked(says=says)


def profiled_cases(place: Place) -> Checked:
    """Measures one small case of every kind, as `plan profile` does."""
    measured, refused = [], []
    threads = torch.get_num_threads()
    works = CASES if place.real else ON_STAND_IN
    for work, sizes in ((work, CASES[work]) for work in works):
        passes = () if work in ("transfer", "launch", "allocator") else PASSES.get(work, ("time",))
        case = Case(
            work=work,
            sizes=tuple(sizes.items()),
            precision="fp32",
            passes=tuple(CasePass(name=name) for name in passes),
        )
        try:
            with world_of_one(place.device):
                figures = _measured(case, place)
        except UnsupportedCase:
            refused.append(work)
            continue
        if not (figures.times or figures.figures):
            raise WrongError(f"{work} was measured without a number")
        measured.append(work)
    torch.set_num_threads(threads)
    texts = (f"measured: {', '.join(measured)}", f"not here: {', '.join(refused)}")
    return Checked(says="; ".join(texts[: 1 + bool(refused)]))


def _measured(case: Case, place: Place) -> CaseFigures:
    """Returns the figures of a case; the stand-in's block is small. Raises UnsupportedCase."""
    if case.work == "allocator" and place.on_gpu and not place.real:
        return allocator({}, place.device, BLOCK_ON_STAND_IN)
    return measure(case, str(place.device))


_FIGURES = "executor/measuring/machine_figures.py"
_RECORDER = "executor/watch/run_recorder.py"

PATHS = (
    GpuPath(
        name="profiler's timers",
        checks="events around products beside the host's clock",
        run=timers,
        covers=(
            "executor/measuring/layout_costs.py:_now_s",
            "executor/measuring/step_timing.py:Rounds.run",
            "executor/measuring/step_timing.py:Rounds._launched",
        ),
    ),
    GpuPath(
        name="recorded spans",
        checks="spans of a step's work beside the host's clock",
        run=spans,
        covers=(f"{_RECORDER}:RunRecorder._mark",),
    ),
    GpuPath(
        name="profiled cases",
        checks="a product, an update, copies, a launch and the allocator, by plan profile",
        run=profiled_cases,
        covers=(
            "executor/measuring/footprints.py:footprint",
            "executor/measuring/footprints.py:_on_gpu",
            f"{_FIGURES}:transfer",
            f"{_FIGURES}:_moved_s",
            f"{_FIGURES}:launch",
            f"{_FIGURES}:allocator",
            f"{_FIGURES}:_step",
            f"{_FIGURES}:clock_mhz",
            "executor/measuring/measure.py:measure",
            "executor/measuring/measure.py:_num_copies",
            "executor/measuring/operands.py:cache_bytes",
            "executor/measuring/update_operations.py:world_of_one",
        ),
    ),
)
