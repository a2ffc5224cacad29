"""Traces a module's source into a TracedModel, by two recordings."""

from __future__ import annotations

from collections.abc import Callable

from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.tracing.counted_calls import CountedCalls
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
    rules: TpRules | None = None,
    check: Callable[[], None] = lambda: None,
) -> TracedModel:
    """Returns the operators of `source`, on sequences of `seq_length` tokens if it reads tokens.

    With `on_cpu` operators save the tensors of CPU kernels, else those of GPU kernels. `check` is
    called at every call of torch and may raise. `rules` override the tensor parallelism that is
    derived. Raises ConfigError, also for a number of Python that every forward pass changes and
    the module computes with.
    """
    workload = open_workload(source, seq_length=seq_length, attention=attention)
    counted = CountedCalls(workload)
    first = record(workload, 2, precision, on_cpu=on_cpu, check=check)
    counted.check(first, lambda: record(workload, 2, precision, on_cpu=on_cpu, check=check))
    second = record(workload, 3, precision, on_cpu=on_cpu, check=check)
    return describe(first, second, on_cpu=on_cpu, rules=rules)
