"""Seconds of one operator on one rank, forward and backward, without communication.

They are the sum of its kernels (costmodels/operators/operator_kernels.py, EQUATIONS K1, K2, K3,
K5), each priced by its curve in the device's profile. Every function here is pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from parplan.costmodels.operators.host_launch import (
    launch_cost_of,
    launch_s,
    measured_layout_costs,
    more_launches,
    waits_for_counts,
)
from parplan.costmodels.operators.kernels import (
    BACKWARD,
    BATCHED,
    BATCHED_SIZES,
    FORWARD,
    FUSED_SIZES,
    INPUT_GRADIENT,
    PRODUCT_SIZES,
    STREAM_SIZES,
    WEIGHT_GRADIENT,
    FusedKernel,
    Kernel,
    ProductKernel,
    StreamKernel,
    fused_kernel,
    fused_kernel_of,
    product_kernel,
    update_kernels,
)
from parplan.costmodels.operators.operator_kernels import operator_kernels
from parplan.costmodels.operators.sharding import LocalSizes
from parplan.profiles.elementwise import Number, anywhere, chosen, smaller_of
from parplan.profiles.machines.corrections import Corrections, corrections_of
from parplan.profiles.machines.curves import (
    Chip,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    deterministic_share,
    flash_attention_s,
    grouped_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.speeds import ASSUMED_GROUPED, Compute, PassCurves
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.product_formats import gradient_slowdown, narrow_efficiency, narrow_power
from parplan.profiles.provenance import ZERO, Kind, Seconds
from parplan.profiles.stack import FlashKernel


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one micro-batch on one rank; the backward pass is without recompute.

    weight      part of `backward` for the gradients of matrices and their biases; gradients of
                norms are computed together with the input gradient
    """

    forward: Seconds
    backward: Seconds
    weight: Seconds = ZERO

    def of_sharding(self, number: int) -> OperatorTime:
        """Returns the seconds of one of several shardings, by micro-batch size where these vary."""
        if self is FREE:
            return self
        one = (..., slice(number, number + 1))
        return OperatorTime(self.forward.at(one), self.backward.at(one), self.weight.at(one))

    def plus(self, added: OperatorTime) -> OperatorTime:
        if added is FREE:
            return self
        return OperatorTime(self.forward + added.forward, self.backward + added.backward)


FREE = OperatorTime(ZERO, ZERO)


@functools.lru_cache(maxsize=64)
def chip_of(machine: Machine, precision: Precision) -> Chip:
    """Returns the datasheet figures at `precision`.

    Raises ConfigError when the device has no such arithmetic.
    """
    device = machine.cluster.device
    return Chip(
        peak_flops_per_s=device.peak(precision),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=max(1, device.num_sms),
    )


def operator_time(
    operator: Operator, sizes: LocalSizes, machine: Machine, training: TrainingSpec
) -> OperatorTime:
    """Seconds of one rank's share of an operator, without communication and recompute.

    With several shardings, or several micro-batch sizes in the operator, the seconds are arrays.

    The sum is the kernels' own time times the factor by which kernels are slower in a step than
    alone, plus the host's seconds where they add to it (costmodels/operators/host_launch.py), times
    the factors of a calibration. Where the host launches ahead, its seconds bound the layer instead
    (costmodels/layers/layer_price.py), but for what it cannot launch ahead: the device waits for
    it. Raises ConfigError when the device lacks the precision.
    """
    chip_of(machine, training.precision)
    runs = operator_kernels(operator, sizes, training)
    if not runs.forward:
        return FREE
    forward = _kernel_times(runs.forward, machine, training)
    inputs = _kernel_times(runs.inputs, machine, training)
    weights = _kernel_times(runs.weights, machine, training)
    pace = launch_cost_of(machine, training.stack)

    def in_step(cause: str, parts: tuple[Seconds, ...], host_s: Number) -> Seconds:
        time = _sum(parts)
        if pace.kernel_slowdown != 1.0:
            time = time.scaled(pace.kernel_slowdown)
        if pace.adds:
            time = time + Seconds(host_s, Kind.INTERPOLATED)
        return machine.corrected(cause, time)

    gradients = int(operator.gradient) + int(operator.gradient and operator.weight_gradient)
    divided_forward_s = divided_backward_s = 0.0
    layout_cost = measured_layout_costs(machine, training.stack)
    if layout_cost is not None:
        divided_forward_s = chosen(sizes.ranks > 1, layout_cost.divided_forward_s, 0.0)
        divided_backward_s = chosen(sizes.ranks > 1, layout_cost.divided_backward_s, 0.0)
    ahead = in_step("forward", forward, pace.forward_s + divided_forward_s)
    if waits_for_counts(operator):
        waits_s = launch_s(machine, training.stack)[0]
        waits_s = waits_s * more_launches(operator, sizes.ep, training.stack)
        ahead = ahead + Seconds(waits_s, Kind.ANALYTIC) if anywhere(waits_s) else ahead
    return OperatorTime(
        ahead,
        in_step("backward", inputs + weights, gradients * (pace.backward_s + divided_backward_s)),
        in_step("backward", weights, pace.backward_s) if weights else ZERO,
    )


def _kernel_times(
    kernels: Sequence[Kernel], machine: Machine, training: TrainingSpec
) -> tuple[Seconds, ...]:
    return tuple(kernel_time(kernel, machine, training) for kernel in kernels)


def _sum(parts: Sequence[Seconds]) -> Seconds:
    return functools.reduce(add, parts) if parts else ZERO


def kernel_time(kernel: Kernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of one kernel alone on a machine."""
    if isinstance(kernel, ProductKernel):
        return _product_time(kernel, machine, training)
    if isinstance(kernel, FusedKernel):
        return _fused_time(kernel, machine, training)
    return _stream_time(kernel, machine)


def _product_time(kernel: ProductKernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of one matrix product (EQUATIONS K8).

    A narrow format has its own peak, a share of the efficiency fitted in 16 bits, and tiles whose
    start and end take as long as in 16 bits.
    """
    chip = chip_of(machine, training.precision)
    product = kernel.product
    curve: MatmulCurve = getattr(machine.profile.compute, kernel.curve)
    slower, device = kernel.slower, machine.cluster.device
    if kernel.peak:
        narrow = replace(chip, peak_flops_per_s=device.peak(kernel.peak))
        faster = narrow.peak_flops_per_s / chip.peak_flops_per_s
        curve = narrow_curve(curve, faster, kernel.peak, device.compute_capability)
        chip = narrow
        if kernel.curve in (INPUT_GRADIENT, WEIGHT_GRADIENT):
            slower = slower * gradient_slowdown(kernel.peak, device.compute_capability)
    form_s = slower * matmul_s(product, curve, chip)
    if kernel.grouped:
        return _grouped_time(kernel, form_s, machine.profile.compute)
    if kernel.peak:
        return Seconds(form_s, Kind.ANALYTIC)
    if curve.points:
        return _corrected(
            form_s,
            _product_corrections(
                curve, kernel.curve, chip, product.operand_bytes, product.result_bytes
            ),
            kernel.sizes,
        )
    if kernel.curve in BATCHED:  # these curves are bounded by sequence and head_dim
        return Seconds(form_s, curve.kind_at((product.m, smaller_of(product.n, product.k))))
    return Seconds(form_s, curve.kind_at(kernel.sizes))


@functools.lru_cache(maxsize=256)
def narrow_curve(
    curve: MatmulCurve, faster: float, peak: str, capability: float | None
) -> MatmulCurve:
    """Returns the curve of products at `peak`, which is `faster` times that of 16-bit ones."""
    efficiency = narrow_efficiency(peak, capability)
    return replace(
        curve,
        efficiency=curve.efficiency * efficiency,
        k_half=curve.k_half * faster * efficiency,
        throttle=max(0.0, (1 + curve.throttle) * narrow_power(capability) - 1),
    )


def _grouped_time(kernel: ProductKernel, single_s: Number, compute: Compute) -> Seconds:
    """Seconds of one product for each expert, of which a single product would take `single_s`.

    Weight gradients add no time per group: their rows show none.
    """
    curve, product = compute.grouped or ASSUMED_GROUPED, kernel.product
    groups = 0 if kernel.curve == WEIGHT_GRADIENT else product.batch
    kind = Kind.ANALYTIC if kernel.peak else curve.kind_at((product.m, product.n, product.k))
    return Seconds(grouped_s(single_s, groups, curve), kind)


def _corrected(form_s: Number, corrections: Corrections, sizes: tuple[Number, ...]) -> Seconds:
    """The seconds of a fitted form, corrected by the measured points of its curve."""
    factor, kind = corrections.factor(sizes)
    return Seconds(form_s * factor, kind)


@functools.lru_cache(maxsize=64)
def _product_corrections(
    curve: MatmulCurve, name: str, chip: Chip, operand_bytes: int, result_bytes: int
) -> Corrections:
    def form_s(sizes: tuple[float, ...]) -> Number:
        kernel = product_kernel(name, tuple(map(int, sizes)), operand_bytes, result_bytes)
        return kernel.slower * matmul_s(kernel.product, curve, chip)

    return corrections_of(curve, BATCHED_SIZES if name in BATCHED else PRODUCT_SIZES, form_s)


def _fused_time(kernel: FusedKernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of fused attention.

    Dropout has its own curve where the profile has one; otherwise it is priced like attention
    without dropout, and that price is analytic.
    """
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    flash = fused_kernel_of(training.stack, machine.cluster.device)
    speed = getattr(compute.flash_speed(flash), kernel.way)
    is_shared = training.stack.deterministic and (flash, kernel.way) == (
        FlashKernel.FLASH2,
        BACKWARD,
    )
    share = deterministic_share(kernel.heads, chip) if is_shared else 1.0
    is_curve = speed == 1.0 and not is_shared
    curves = (compute.flash_forward, compute.flash_backward)
    measured = not kernel.dropped
    if kernel.dropped and compute.dropped_flash is not None:
        curves = compute.dropped_flash
        measured = True
    curve = curves[1] if kernel.way == BACKWARD else curves[0]
    form_s = _fused_s(kernel, curve, chip) / (speed * share)
    if not curve.points:
        kind = curve.kind_at((kernel.seq, kernel.head_dim)) if is_curve else Kind.ANALYTIC
        return Seconds(form_s, kind)
    price = (
        _corrected(form_s, _fused_corrections(curve, kernel.way, chip), kernel.sizes)
        if measured
        else Seconds(form_s, Kind.ANALYTIC)
    )
    return price if is_curve else Seconds(price.value_s, Kind.ANALYTIC)


def _fused_s(kernel: FusedKernel, curve: FlashCurve, chip: Chip) -> Number:
    return flash_attention_s(
        kernel.flops,
        heads=kernel.heads,
        seq=kernel.seq,
        keys=kernel.keys,
        head_dim=kernel.head_dim,
        curve=curve,
        chip=chip,
    )


@functools.lru_cache(maxsize=64)
def _fused_corrections(curve: FlashCurve, way: str, chip: Chip) -> Corrections:
    """Corrections from causal attention, the only kind that the models here run."""

    def form_s(sizes: tuple[float, ...]) -> Number:
        heads, seq, head_dim = map(int, sizes)
        return _fused_s(fused_kernel(way, heads, seq, seq, head_dim), curve, chip)

    return corrections_of(curve, FUSED_SIZES, form_s)


def _stream_time(kernel: StreamKernel, machine: Machine) -> Seconds:
    """Seconds of a memory-bound operation by its own measured curve, else by that of its class.

    An operation with `parts` and without its own curve is the sum of its parts. A machine that
    measured single operations gives an analytic price for any other operation, because the points
    of the class belong to different operations.
    """
    compute, bytes_per_s = machine.profile.compute, machine.cluster.device.memory_bytes_per_s
    own_curve = _own_curve(kernel, compute)
    if own_curve is None and kernel.parts is not None:
        return _sum([_stream_time(part, machine) for part in kernel.parts])
    curve = own_curve or _curve_of(getattr(compute, kernel.like), kernel.way)
    form_s = memory_bound_s(kernel.n_bytes, curve, bytes_per_s)
    if own_curve is not None and own_curve.points:
        once = _corrected(form_s, _stream_corrections(own_curve, bytes_per_s), kernel.sizes)
    else:
        unmeasured = own_curve is None and (
            curve.points or (compute.named and kernel.name != kernel.like)
        )
        once = Seconds(form_s, Kind.ANALYTIC if unmeasured else curve.kind_at(kernel.sizes))
    return once if kernel.times == 1 else once.scaled(kernel.times)


@functools.lru_cache(maxsize=256)
def _stream_corrections(curve: MemoryCurve, bytes_per_s: float) -> Corrections:
    return corrections_of(
        curve, STREAM_SIZES, lambda sizes: memory_bound_s(sizes[0], curve, bytes_per_s)
    )


def _own_curve(kernel: StreamKernel, compute: Compute) -> MemoryCurve | None:
    """Returns the machine's curve of exactly this operation, or None.

    It is a named curve, or the curve of a class of one operation that has points.
    """
    if kernel.name in compute.named:
        return _curve_of(compute.named[kernel.name], kernel.way)
    if kernel.name != kernel.like:
        return None
    curve = _curve_of(getattr(compute, kernel.name), kernel.way)
    return curve if curve.points else None


def _curve_of(passes: PassCurves | MemoryCurve, way: str) -> MemoryCurve:
    if isinstance(passes, MemoryCurve):
        return passes
    return passes.forward if way == FORWARD else passes.backward


def optimizer_time(
    num_parameters: float,
    machine: Machine,
    training: TrainingSpec,
    moved_bytes: float | None = None,
) -> Seconds:
    """Seconds of one update of `num_parameters` of this rank (EQUATIONS K5).

    moved_bytes: bytes that the update reads and writes; None for those of Adam

    Leaves out the norm of the gradients and their clipping where the machine's profile has no curve
    of them.
    """
    if num_parameters <= 0:
        return ZERO
    kernels = update_kernels(num_parameters, training, moved_bytes)
    return machine.corrected(
        "optimizer", _sum([_stream_time(kernel, machine) for kernel in kernels])
    )
