"""Launch cost of operators: the slowdown of kernels within a step, and the host's seconds.

The figures come from the machine's own profile where it was measured with this software stack,
otherwise from the stack.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.elementwise import Number
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.speeds import InStep
from parplan.profiles.models.operator_graph import EXPERT_WIDTH, Operator, OperatorKind
from parplan.profiles.provenance import ZERO, Kind, Seconds
from parplan.profiles.stack import Stack


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """The kernel slowdown, and the host's seconds for one operator forward and backward.

    adds    the host's seconds are part of every operator, because the host is the device or waits
            for it; otherwise the host launches ahead and its seconds bound the layer from below
    """

    kernel_slowdown: float
    forward_s: float
    backward_s: float
    adds: bool = False


def launch_cost_of(machine: Machine, stack: Stack) -> LaunchCost:
    """Returns the launch cost of operators in a step of `stack` on `machine`."""
    measured = machine.profile.in_step
    if measured is None or measured.stack != stack.name:
        host_s = stack.host_operator_s * machine.cluster.device.host_slowdown
        return LaunchCost(stack.kernel_slowdown, host_s, host_s)
    return LaunchCost(
        measured.kernel_slowdown, measured.forward_s, measured.backward_s, measured.host_adds
    )


def launch_s(machine: Machine, stack: Stack) -> tuple[float, float]:
    """Calibrated seconds to launch one operator, forward and backward.

    They are 0 where the host's seconds are part of every operator.
    """
    pace = launch_cost_of(machine, stack)
    if pace.adds:
        return 0.0, 0.0
    forward_s = pace.forward_s * machine.launch_factor("forward")
    return forward_s, pace.backward_s * machine.launch_factor("backward")


def more_launches(operator: Operator, ep: Number, stack: Stack) -> Number:
    """Launches of an operator of a mixture beside its own, in the forward pass (EQUATIONS K9)."""
    if operator.exchanged is not None:
        return stack.dispatch_launches
    if operator.kind is OperatorKind.EXPERTS:
        of_each = len(operator.parameters) if stack.widens_expert_biases else 1
        return stack.expert_launches * of_each * operator.parameters[0].dims[0].size / ep
    return 0.0


def waits_for_counts(operator: Operator) -> bool:
    """Returns whether the host launches an operator once it knows how many tokens each expert gets.

    They are a dispatch and the product that reads what arrived: the device has nothing to run
    before it (EQUATIONS K9).
    """
    first = operator.kind is OperatorKind.EXPERTS and operator.contracted != EXPERT_WIDTH
    return first or operator.kind is OperatorKind.DISPATCH


def measured_layout_costs(machine: Machine, stack: Stack) -> InStep | None:
    """Returns the measured extra costs of parallel layouts on `machine`.

    None where nobody measured them with `stack`, or where the host launches ahead and hides them.
    """
    measured = machine.profile.in_step
    if measured is None or measured.stack != stack.name or not measured.host_adds:
        return None
    return measured


def host(seconds: float) -> Seconds:
    """Seconds of the host, interpolated between measured ones."""
    return Seconds(seconds, Kind.INTERPOLATED) if seconds else ZERO
