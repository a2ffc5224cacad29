"""Batches of a traced module, drawn by sample, so that every layout trains on the same data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parplan.executor.run_options import derived_seed
from parplan.executor.sharding.zero_units import compute_dtype
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.profiler.gpus import host_random
from parplan.profiles.tracing.traced_source import TracedWorkload

Batches = Callable[[int], dict[str, Tensor]]


def module_batches(plan: TracedPlan, workload: TracedWorkload, dp_rank: int, seed: int) -> Batches:
    """Returns a function from the step to this rank's samples, floats in the plan's precision.

    Sample i of step s is seeded with (seed, s B + i), where B is the global batch size;
    data-parallel rank r gets samples [r n, (r + 1) n). Raises ConfigError for samples of different
    shapes.
    """
    rows = plan.training.global_batch_size // plan.mesh.dp
    dtype = compute_dtype(plan.training.precision)

    def batch(step: int) -> dict[str, Tensor]:
        first = step * plan.training.global_batch_size + dp_rank * rows
        samples = [_sample(workload, seed, first + row) for row in range(rows)]
        return {
            key: _cast(_joined(key, [sample[key] for sample in samples]), dtype)
            for key in samples[0]
        }

    return batch


def _sample(workload: TracedWorkload, seed: int, index: int) -> dict[str, Tensor]:
    with host_random(derived_seed(seed, index)):
        return workload.batch(1)


def _joined(key: str, parts: list[Tensor]) -> Tensor:
    shapes = sorted({tuple(part.shape) for part in parts})
    if len(shapes) > 1:
        raise ConfigError(
            f"module: {key} of batch(1) is of shape {list(shapes[0])} once and {list(shapes[1])} "
            "another time",
            hint="let the function pad to one shape",
        )
    return torch.cat(parts)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
