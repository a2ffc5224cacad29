"""Saved bytes of an operator, and the peak bytes of a pass beyond its inputs and results.

On a GPU the caching allocator reports them. On a CPU torch's profiler records every allocation
through torch's allocator, also those inside kernels (a TorchDispatchMode would see only the tensors
of operators). Neither shows memory that kernel libraries allocate themselves, as MKL does to pack
its operands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parplan.executor.measuring.trials import Trial
from parplan.profiles.profiler.gpus import gpu, is_gpu

_MARK = "step of a trial: "


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes beyond those held when a step began.

    most   the peak during the step
    after  the bytes when the step ended
    """

    most: int
    after: int


def footprint(
    trial: Trial, steps: Sequence[str], device: torch.device, parameters: Sequence[Tensor] = ()
) -> tuple[int, int]:
    """Return bytes saved by the forward pass, and the largest workspace of the steps.

    Each step runs once, on a GPU once more before that: the first product of a thread takes a
    workspace of cuBLAS from the allocator for good, and autograd has threads of its own. Saved
    bytes count each storage once, without `parameters` and without the output, which its reader
    holds. The workspace leaves out the bytes that a step leaves: outputs and saved tensors, or the
    gradients of a backward pass (which frees the saved tensors).
    """
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    made: dict[str, int] = {}

    def run(step: str) -> None:
        trial.run(step)
        made[step] = sum(result.untyped_storage().nbytes() for result in trial.results)
        if step == "forward":
            for out in (*trial.results, *parameters):
                saved.pop(out.untyped_storage().data_ptr(), None)

    if is_gpu(device):
        for step in steps:
            trial.before(step)
            trial.run(step)
            trial.release(step)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        observe = partial(_on_gpu, device) if is_gpu(device) else _on_host
        spans = observe(trial, steps, run)
    workspaces = (
        span.most - (made[step] if step == "backward" else span.after)
        for step, span in spans.items()
    )
    return sum(saved.values()), max(0, *workspaces)


def _on_gpu(
    device: torch.device, trial: Trial, steps: Sequence[str], run: Callable[[str], None]
) -> dict[str, Footprint]:
    runtime, spans = gpu(device), {}
    for step in steps:
        trial.before(step)
        runtime.synchronize(device)
        runtime.reset_peak_memory_stats(device)
        before = runtime.memory_allocated(device)
        run(step)
        runtime.synchronize(device)
        spans[step] = Footprint(
            runtime.max_memory_allocated(device) - before, runtime.memory_allocated(device) - before
        )
    return spans


def _on_host(
    trial: Trial, steps: Sequence[str], run: Callable[[str], None]
) -> dict[str, Footprint]:
    """Run all steps under one profiler.

    The profiler does not see frees of memory that was allocated before it started.
    """
    # Without this the profiler logs on stderr whenever it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        for step in steps:
            trial.before(step)
            with torch.profiler.record_function(_MARK + step):
                run(step)
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    marks = {
        event.name(): (event.start_ns(), event.end_ns())
        for event in events
        if event.name().startswith(_MARK)
    }
    return {step: _span(changes, *marks[_MARK + step]) for step in steps}


def _span(changes: Sequence[tuple[int, int]], begin: int, end: int) -> Footprint:
    """Return the footprint of the changes (time, bytes) from `begin` to `end`."""
    now = most = 0
    for when, change in changes:
        if begin <= when <= end:
            now += change
            most = max(most, now)
    return Footprint(most, now)
