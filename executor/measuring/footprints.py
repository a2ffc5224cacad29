"""Bytes that an operator keeps between its passes, and the most that a pass holds beyond its inputs
and results.

On a GPU the caching allocator says so. On a CPU torch's profiler records every allocation through
torch's allocator, also those that a kernel makes inside (a TorchDispatchMode would see the tensors
of operators alone); what libraries of kernels take themselves, as MKL does to pack its operands,
neither shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parplan.executor.measuring.trials import Trial

_MARK = "step of a trial: "


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes beyond what was held when a step began: the most there were, and how many more there
    are after it.
    """

    most: int
    after: int


def footprint(
    trial: Trial, steps: Sequence[str], device: torch.device, parameters: Sequence[Tensor] = ()
) -> tuple[int, int]:
    """Bytes saved by the forward pass, and the largest workspace of the steps. Runs each once.

    saved: each storage once, without `parameters` and without that of the output, which whoever
    reads it keeps
    workspace: not what a step leaves: outputs and what is saved, or the gradients of a backward
    pass (which frees what was saved)
    """
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    made: dict[str, int] = {}

    def run(step: str) -> None:
        trial.run(step)
        made[step] = sum(result.untyped_storage().nbytes() for result in trial.results)
        if step == "forward":
            for out in (*trial.results, *parameters):
                held.pop(out.untyped_storage().data_ptr(), None)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        spans = (_on_gpu if device.type == "cuda" else _on_host)(trial, steps, run)
    workspaces = (
        span.most - (made[step] if step == "backward" else span.after)
        for step, span in spans.items()
    )
    return sum(held.values()), max(0, *workspaces)


def _on_gpu(trial: Trial, steps: Sequence[str], run: Callable[[str], None]) -> dict[str, Footprint]:
    spans = {}
    for step in steps:
        trial.before(step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(step)
        torch.cuda.synchronize()
        spans[step] = Footprint(
            torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        )
    return spans


def _on_host(
    trial: Trial, steps: Sequence[str], run: Callable[[str], None]
) -> dict[str, Footprint]:
    """All steps under one profiler, which does not see that what was made before it is freed."""
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # it would tell stderr whenever it starts and stops
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
    """Of the changes (when, bytes) from `begin` to `end`."""
    now = most = 0
    for when, change in changes:
        if begin <= when <= end:
            now += change
            most = max(most, now)
    return Footprint(most, now)
