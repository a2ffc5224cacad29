"""Figures of the machine itself: its memory, the link to its host, the host's own pace, and what
its allocator holds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from parplan.costmodels.host.offload import ADAM_BYTES
from parplan.executor.measuring.block_operations import block
from parplan.executor.measuring.operands import Maker, resident_bytes
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.step_timing import timing
from parplan.executor.measuring.trials import TimedPasses, Trial, TrialStep, once
from parplan.profiles.machines.measurements import CaseFigures, Timing, UnsupportedCase
from parplan.profiles.units import US_PER_S

TRANSFER_REPEATS = 10
LAUNCHES = 100  # operators launched in one go, so that a GPU's queue is never full
LAUNCH_ROUNDS = 30
SMALL = 64  # elements of an operator that is nothing but its launch
STEP_BLOCK = {  # of GPT-2's size: its step is to fill the allocator's pools
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 64,
    "ffn": 4096,
    "gated": 0,
    "rms": 0,
    "rotary": 0,
    "dropout": 0,
    "batch": 4,
    "seq": 1024,
}


def device_copy(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """From one place of the device's memory to another."""

    def trial(maker: Maker) -> Trial:
        source, target = (
            maker.normal(-(-sizes["bytes"] // maker.dtype.itemsize)) for _ in range(2)
        )
        return TrialStep(lambda: target.copy_(source))

    return once(trial)


def copied(sizes: Sizes, times: dict[str, Timing]) -> dict[str, float]:
    return {"copied_bytes_per_s": 2 * sizes["bytes"] / times["time"].median_us * US_PER_S}


def adam_rates(sizes: Sizes, times: dict[str, Timing]) -> dict[str, float]:
    """Of the bytes that a price of Adam on the host counts."""
    return {"bytes_per_s": ADAM_BYTES * sizes["parameters"] / times["time"].median_us * US_PER_S}


def transfer(sizes: Sizes, device: torch.device) -> CaseFigures:
    """Between pinned memory of the host and the device: each way alone, and both at once, each on a
    stream of its own.
    """
    if device.type != "cuda":
        raise UnsupportedCase("a transfer needs a device with memory of its own, a CPU has none")
    n_bytes = sizes["bytes"]
    hosts = [torch.empty(n_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there, back = (devices[0], hosts[0]), (hosts[1], devices[1])
    figures = {}
    for name, pairs in (("to_device", (there,)), ("from_device", (back,)), ("both", (there, back))):
        seconds = [_moved_s(pairs, device) for _ in range(TRANSFER_REPEATS)][1:]
        figures[f"{name}_bytes_per_s"] = n_bytes / statistics.median(seconds)
    return CaseFigures(figures=figures)


def _moved_s(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Seconds until the last of the copies (target, source) is done, all begun at once."""
    streams = [torch.cuda.Stream(device) for _ in pairs]
    begin, ends = (
        torch.cuda.Event(enable_timing=True),
        [torch.cuda.Event(enable_timing=True) for _ in pairs],
    )
    torch.cuda.synchronize(device)
    begin.record()
    for stream, end, (target, source) in zip(streams, ends, pairs, strict=True):
        with torch.cuda.stream(stream):
            stream.wait_event(begin)
            target.copy_(source, non_blocking=True)
            end.record()
    torch.cuda.synchronize(device)
    return max(begin.elapsed_time(end) for end in ends) / 1000


def launch(_: Sizes, device: torch.device) -> CaseFigures:
    """Seconds of the host for one small operator whose graph is recorded."""
    x = torch.ones(SMALL, device=device, requires_grad=True)
    y = torch.ones(SMALL, device=device)
    laps = []
    for _round in range(LAUNCH_ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _launch in range(LAUNCHES):
            x + y
        laps.append((time.perf_counter() - started) / LAUNCHES)
    found = timing(laps[1:])
    return CaseFigures(figures={"host_launch_s": found.median_us / US_PER_S})


def allocator(_: Sizes, device: torch.device) -> CaseFigures:
    """What the caching allocator rounds a small tensor up to, what it holds beyond what was
    allocated after a block's step, over that, and what lies on the device besides, tensors left
    out. On a CPU there is no such allocator: what the process holds before its first tensor
    alone.
    """
    if device.type != "cuda":
        held = resident_bytes()
        if held is None:
            raise UnsupportedCase("this system does not say how much memory a process holds")
        return CaseFigures(figures={"context_bytes": float(held)})
    before = torch.cuda.memory_allocated(device)
    small = torch.empty(1, dtype=torch.uint8, device=device)
    granularity = torch.cuda.memory_allocated(device) - before
    del small
    _step(device)
    share = torch.cuda.max_memory_reserved(device) / torch.cuda.max_memory_allocated(device) - 1
    free, total = torch.cuda.mem_get_info(
        device
    )  # of all processes: nobody else is to be on the device
    context = total - free - torch.cuda.memory_reserved(device)
    return CaseFigures(
        figures={
            "granularity_bytes": float(granularity),
            "reserved_share": share,
            "context_bytes": float(context),
        }
    )


def _step(device: torch.device) -> None:
    maker = Maker(device, torch.bfloat16)
    (part,) = block(STEP_BLOCK)
    trial = part.make(maker)
    for _ in range(2):
        for step in trial.steps:
            trial.before(step)
            trial.run(step)
    torch.cuda.synchronize(device)


def clock_mhz(device: torch.device) -> float | None:
    """Of the device now; None where it does not say."""
    if device.type == "cuda":
        try:
            return float(torch.cuda.clock_rate(device))
        except (
            ModuleNotFoundError,
            RuntimeError,
        ):  # it asks NVML, by a package that torch does not bring
            return None
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return max(
        (float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")), default=None
    )
