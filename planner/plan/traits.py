"""The traits of a run by which prices are known to be more or less exact.

An error band is as wide as the measured runs with the same traits ask for (conformal.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parplan.costmodels.communication.mesh import Mesh
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.product_formats import is_before_blackwell
from parplan.profiles.stack import Stack

MANY_GPUS = 256
STACK = "stack "  # begins the trait of a stack
_UNKNOWN_CHIP = "another chip"
# compute capability below which a chip is of the generation, in order
_GENERATIONS = ((8.0, "before Ampere"), (8.9, "Ampere"), (10.0, "Hopper or Ada"))
_LATEST = "Blackwell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its traits see it.

    zero   the highest ZeRO stage of its layers
    """

    model: ModelSpec
    training: TrainingSpec
    machine: Machine
    mesh: Mesh
    zero: int

    @property
    def cluster(self) -> Cluster:
        return self.machine.cluster


def _narrow_on_blackwell(run: Run) -> bool:
    capability = run.cluster.device.compute_capability
    return run.training.products is not None and not is_before_blackwell(capability)


_TRAITS: Mapping[str, Callable[[Run], bool]] = MappingProxyType(
    {
        "computed kernels": lambda run: not run.machine.profile.compute.forward.rows,
        "experts": lambda run: run.model.num_experts > 0,
        "narrow products": lambda run: run.training.products is not None,
        "narrow products on Blackwell": _narrow_on_blackwell,
        "tensor parallel": lambda run: run.mesh.tp > 1,
        "tensor parallel across nodes": lambda run: run.mesh.tp > run.cluster.gpus_per_node,
        "context parallel": lambda run: run.mesh.cp > 1,
        "pipeline": lambda run: run.mesh.pp > 1,
        "ZeRO 3": lambda run: run.zero == 3,
        "ZeRO 3 across nodes": lambda run: (
            run.zero == 3 and run.mesh.dp * run.mesh.tp > run.cluster.gpus_per_node
        ),
        "ZeRO 3 beside tensor parallelism": lambda run: run.zero == 3 and run.mesh.tp > 1,
        "several nodes": lambda run: run.cluster.num_gpus > run.cluster.gpus_per_node,
        f"over {MANY_GPUS} GPUs": lambda run: run.cluster.num_gpus > MANY_GPUS,
    }
)


def traits_of(run: Run) -> tuple[str, ...]:
    """Returns the traits of a run: its stack, the generation of its chip, and those it has."""
    return (
        f"{STACK}{family_of(run.training.stack)}",
        f"chip {generation(run.cluster.device.compute_capability)}",
        *(name for name, has in _TRAITS.items() if has(run)),
    )


def family_of(stack: Stack) -> str:
    """Returns the stack whose terms a stack has."""
    return stack.terms_of or stack.name


def generation(capability: float | None) -> str:
    """Returns the generation of a chip with a compute capability of CUDA, None for another's."""
    if capability is None:
        return _UNKNOWN_CHIP
    return next((name for below, name in _GENERATIONS if capability < below), _LATEST)
