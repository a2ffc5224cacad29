"""Figures of the machine: memory, the link to its host, the host's pace, and the allocator."""

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
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import US_PER_S

TRANSFER_REPEATS = 10
LAUNCHES = 100  # operators launched at once, so that a GPU's queue is never full
LAUNCH_ROUNDS = 30
SMALL = 64  # elements of an operator whose time is its launch
STEP_BLOCK = {  # a block of GPT-2's size, whose step fills the allocator's pools
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
    """Return the pass of a copy within the device's memory."""

    def trial(maker: Maker) -> Trial:
        elements = -(-sizes["bytes"] // maker.dtype.itemsize)
        source, target = maker.normal(elements), maker.normal(elements)
        return TrialStep(lambda: target.copy_(source))

    return once(trial)


def copied(sizes: Sizes, times: dict[str, Timing]) -> dict[str, float]:
    return {"copied_bytes_per_s": 2 * sizes["bytes"] / times["time"].median_us * US_PER_S}


def adam_rates(sizes: Sizes, times: dict[str, Timing]) -> dict[str, float]:
    """Return bytes per second of Adam on the host, in bytes as its price counts them."""
    return {"bytes_per_s": ADAM_BYTES * sizes["parameters"] / times["time"].median_us * US_PER_S}


def transfer(sizes: Sizes, device: torch.device) -> CaseFigures:
    """Measure transfers between pinned host memory and the device.

    Each direction is measured alone, then both at once, each on its own stream. Raises
    UnsupportedCase on a CPU.
    """
    if not is_gpu(device):
        raise UnsupportedCase("a transfer needs a device with memory of its own, a CPU has none")
    n_bytes = sizes["bytes"]
    hosts = [torch.empty(n_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    to_device, from_device = (devices[0], hosts[0]), (hosts[1], devices[1])
    directions = {
        "to_device": (to_device,),
        "from_device": (from_device,),
        "both": (to_device, from_device),
    }
    figures = {}
    for name, pairs in directions.items():
        seconds = [_moved_s(pairs, device) for _ in range(TRANSFER_REPEATS)][1:]
        figures[f"{name}_bytes_per_s"] = n_bytes / statistics.median(seconds)
    return CaseFigures(figures=figures)


def _moved_s(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> float:
    """Seconds until the last of the copies (target, source) ends, when all begin at once."""
    streams = [gpu(device).Stream(device) for _ in pairs]
    begin = gpu(device).Event(enable_timing=True)
    ends = [gpu(device).Event(enable_timing=True) for _ in pairs]
    gpu(device).synchronize(device)
    begin.record()
    for stream, end, (target, source) in zip(streams, ends, pairs, strict=True):
        with gpu(device).stream(stream):
            stream.wait_event(begin)
            target.copy_(source, non_blocking=True)
            end.record()
    gpu(device).synchronize(device)
    return max(begin.elapsed_time(end) for end in ends) / 1000


def launch(_: Sizes, device: torch.device) -> CaseFigures:
    """Measure host seconds of one small operator whose graph is recorded."""
    x = torch.ones(SMALL, device=device, requires_grad=True)
    y = torch.ones(SMALL, device=device)
    laps = []
    for _round in range(LAUNCH_ROUNDS):
        if is_gpu(device):
            gpu(device).synchronize(device)
        started = time.perf_counter()
        for _launch in range(LAUNCHES):
            x + y
        laps.append((time.perf_counter() - started) / LAUNCHES)
    launch_time = timing(laps[1:])
    return CaseFigures(figures={"host_launch_s": launch_time.median_us / US_PER_S})


def allocator(_: Sizes, device: torch.device, step_block: Sizes = STEP_BLOCK) -> CaseFigures:
    """Measure the caching allocator in a step of a block.

    granularity_bytes  bytes that it gives a tensor of one byte
    reserved_share     reserved bytes over allocated ones, minus 1, at their peaks in a block's step
    context_bytes      bytes on the device outside the allocator

    A CPU has no such allocator: `context_bytes` are the bytes of the process before its first
    tensor.
    """
    if not is_gpu(device):
        held = resident_bytes()
        if held is None:
            raise UnsupportedCase("this system does not say how much memory a process holds")
        return CaseFigures(figures={"context_bytes": float(held)})
    before = gpu(device).memory_allocated(device)
    small = torch.empty(1, dtype=torch.uint8, device=device)
    granularity = gpu(device).memory_allocated(device) - before
    del small
    _step(device, step_block)
    share = gpu(device).max_memory_reserved(device) / gpu(device).max_memory_allocated(device) - 1
    # The free bytes count all processes: no other may use the device.
    free, total = gpu(device).mem_get_info(device)
    context = total - free - gpu(device).memory_reserved(device)
    return CaseFigures(
        figures={
            "granularity_bytes": float(granularity),
            "reserved_share": share,
            "context_bytes": float(context),
        }
    )


def _step(device: torch.device, step_block: Sizes) -> None:
    maker = Maker(device, torch.bfloat16)
    (part,) = block(step_block)
    trial = part.make(maker)
    for _ in range(2):
        for step in trial.steps:
            trial.before(step)
            trial.run(step)
    gpu(device).synchronize(device)


def clock_mhz(device: torch.device) -> float | None:
    """Return the device's clock in MHz now, or None if it is unknown."""
    if is_gpu(device):
        try:
            return float(gpu(device).clock_rate(device))
        except (ModuleNotFoundError, RuntimeError):  # needs NVML's package, which torch lacks
            return None
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return max(clocks, default=None)
