"""The values of parameters and buffers on this process, which holds only those of its stages.

The module is made without memory (profiles/tracing/deferred.py). The value of a parameter depends
only on the seed and on the calls by which the module's code initializes it, so that every layout,
and one process with the whole module, starts from the same values. Values that the code reads from
files or takes from outside are on every process until it has picked the parameters of its stages;
`kept_bytes` gives their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.profiler.gpus import host_random
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.tracing.deferred import AT_LEAST_BYTES, Deferred
from parplan.profiles.tracing.traced_source import TracedWorkload, open_workload
from parplan.profiles.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class OpenedModule:
    """A workload whose buffers have values and whose parameters can be materialized one by one."""

    workload: TracedWorkload
    deferred: Deferred
    seed: int

    def value(self, name: str) -> nn.Parameter:
        """Returns the parameter `name`, on the CPU, in separate memory. Raises ConfigError."""
        parameter = self.workload.module.get_parameter(name)
        return nn.Parameter(self._value(name, parameter), parameter.requires_grad)

    @property
    def kept_bytes(self) -> int:
        """Bytes of parameters that torch calls in the module's code did not make.

        Every process holds all of them while it starts.
        """
        return sum(
            p.nbytes
            for p in self.workload.module.parameters()
            if not p.is_meta and p.nbytes >= self.deferred.at_least_bytes
        )

    @property
    def note(self) -> str | None:
        """A note if every process holds more than the parameters of its stages, else None."""
        kept = self.kept_bytes
        held = f"{format_bytes(kept)} of parameters come from outside of the module's code"
        return f"{held}: every process holds them while it starts" if kept else None

    def _value(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach().clone()
        if not self.deferred.knows(tensor):
            raise ConfigError(
                f"module: {name} is on the meta device and nothing gives it values",
                hint="make it on the CPU in the factory",
            )
        return self.deferred.value(tensor, self.seed)


def open_module(
    source: ModuleSource,
    *,
    seq_length: int,
    seed: int,
    attention: AttentionKernel = AttentionKernel.FLASH,
    at_least_bytes: int = AT_LEAST_BYTES,
) -> OpenedModule:
    """Opens the module of `source` without the memory of its parameters. Raises ConfigError."""
    deferred = Deferred(at_least_bytes, seed)
    with host_random(seed):  # for tensors so small that they are made at once
        workload = open_workload(
            source, seq_length=seq_length, attention=attention, deferred=deferred
        )
    return OpenedModule(workload=workload, deferred=deferred, seed=seed)
