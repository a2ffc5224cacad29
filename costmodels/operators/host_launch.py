"""What a step adds to the times of its operators alone: by what factor kernels take longer in it,
and what the host needs.

One place decides whose figures these are: those that the machine's own profile has of this software
stack, else the stack's.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.speeds import InStep
from parplan.profiles.provenance import ZERO, Kind, Seconds
from parplan.profiles.stack import Stack


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """The factor of kernels, and seconds of the host for one operator in the forward and in the
    backward pass.

    adds    the host's seconds are part of every operator (there is no other device, or it waits);
            otherwise the host launches ahead, and they bound the layer from below
    """

    kernel_slowdown: float
    forward_s: float
    backward_s: float
    adds: bool = False


def launch_cost_of(machine: Machine, stack: Stack) -> LaunchCost:
    """How operators run in a step of `stack` on `machine`."""
    own = machine.profile.in_step
    if own is None or own.stack != stack.name:
        return LaunchCost(stack.kernel_slowdown, stack.host_operator_s, stack.host_operator_s)
    return LaunchCost(own.kernel_slowdown, own.forward_s, own.backward_s, own.host_adds)


def launch_s(machine: Machine, stack: Stack) -> tuple[float, float]:
    """Seconds in which the host launches one operator forward and backward, as far as these bound a
    layer, after calibration.
    """
    pace = launch_cost_of(machine, stack)
    if pace.adds:
        return 0.0, 0.0
    return pace.forward_s * machine.launch_factor(
        "forward"
    ), pace.backward_s * machine.launch_factor("backward")


def layouts_of(machine: Machine, stack: Stack) -> InStep | None:
    """What layouts add to a step of `stack` on `machine`; None where nobody measured it, or the
    host launches ahead and hides it.
    """
    own = machine.profile.in_step
    return own if own is not None and own.stack == stack.name and own.host_adds else None


def host(seconds: float) -> Seconds:
    """Seconds of the host, between measured ones."""
    return Seconds(seconds, Kind.INTERPOLATED) if seconds else ZERO
