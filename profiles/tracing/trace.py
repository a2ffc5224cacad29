"""A module's source -> TracedModel, by two recordings."""

from __future__ import annotations

from collections.abc import Callable

from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.tracing.describe import describe
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import open_workload


def trace(
    source: ModuleSource,
    *,
    seq_length: int,
    precision: Precision = Precision.BF16,
    attention: AttentionKernel = AttentionKernel.FLASH,
    on_cpu: bool = False,
    check: Callable[[], None] = lambda: None,
) -> TracedModel:
    """The operators of `source`, for sequences of `seq_length` tokens where it reads tokens;
    `on_cpu`: they keep what kernels of a CPU keep, else those of a GPU; `check` is called at every
    call of torch, and may raise. Raises ConfigError.
    """
    workload = open_workload(source, seq_length=seq_length, attention=attention)
    first, second = (
        record(workload, size, precision, on_cpu=on_cpu, check=check) for size in (2, 3)
    )
    return describe(first, second, on_cpu=on_cpu)
