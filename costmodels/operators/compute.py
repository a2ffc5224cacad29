"""Seconds of one operator on one rank, forward and backward, without communication (EQUATIONS K1,
K2, K3, K5).

The sum of its kernels (costmodels/operators/kernels.py), each by the curve of the device's profile
that it is a point of. Every function here is pure.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.operators.host_launch import launch_cost_of, layouts_of
from parplan.costmodels.operators.kernels import (
    BACKWARD,
    BATCHED,
    BATCHED_SIZES,
    FORWARD,
    FUSED_SIZES,
    PRODUCT_SIZES,
    STREAM_SIZES,
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
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.corrections import Corrections, corrections_of
from parplan.profiles.machines.curves import (
    Chip,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.speeds import Compute, PassCurves
from parplan.profiles.models.operator_graph import PRODUCTS, Operator
from parplan.profiles.models.spec import FP8, Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Kind, Seconds


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one micro-batch on one rank. The backward pass is without recompute.

    weight      of the backward, what computes the gradients of matrices and their biases (those of
                norms come with the input's)
    """

    forward: Seconds
    backward: Seconds
    weight: Seconds = ZERO

    def plus(self, other: OperatorTime) -> OperatorTime:
        return (
            self
            if other is FREE
            else OperatorTime(self.forward + other.forward, self.backward + other.backward)
        )


FREE = OperatorTime(ZERO, ZERO)


@functools.lru_cache(maxsize=64)
def chip_of(machine: Machine, precision: Precision) -> Chip:
    """The datasheet figures at `precision`. Raises ConfigError when the device has no such
    arithmetic.
    """
    device = machine.cluster.device
    return Chip(
        peak_flops_per_s=device.peak(precision),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=max(1, device.num_sms),
    )


def operator_time(
    of: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec
) -> OperatorTime:
    """Seconds of one rank's share of an operator, forward and backward, without communication and
    without recompute.

    The kernels' own time, times the factor by which they take longer in a step than alone, the
    host's where it adds to them (costmodels/operators/host_launch.py), and the factors of a
    calibration. Where the host launches ahead it is a bound of the layer
    (costmodels/layers/layer_price.py). Raises ConfigError when the device lacks the precision.
    """
    chip_of(machine, training.precision)
    runs = operator_kernels(of, sharding, training)
    if not runs.forward:
        return FREE
    forward, inputs, weights = (
        tuple(kernel_time(kernel, machine, training) for kernel in kernels)
        for kernels in (runs.forward, runs.inputs, runs.weights)
    )
    pace = launch_cost_of(machine, training.stack)

    def in_step(cause: str, parts: tuple[Seconds, ...], host_s: float) -> Seconds:
        alone = _sum(parts)
        slower = alone.scaled(pace.kernel_slowdown) if pace.kernel_slowdown != 1.0 else alone
        return machine.corrected(
            cause, slower + Seconds(host_s, Kind.INTERPOLATED) if pace.adds else slower
        )

    gradients, added = 2 if of.kind in PRODUCTS else 1, layouts_of(machine, training.stack)
    more_s = (
        (added.divided_forward_s, added.divided_backward_s)
        if added and sharding.tp > 1
        else (0.0, 0.0)
    )
    return OperatorTime(
        in_step("forward", forward, pace.forward_s + more_s[0]),
        in_step("backward", inputs + weights, gradients * (pace.backward_s + more_s[1])),
        in_step("backward", weights, pace.backward_s) if weights else ZERO,
    )


def _sum(parts: Sequence[Seconds]) -> Seconds:
    return functools.reduce(operator.add, parts) if parts else ZERO


def kernel_time(kernel: Kernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of one kernel alone on a machine."""
    if isinstance(kernel, ProductKernel):
        return _product_time(kernel, machine, training)
    return (
        _fused_time(kernel, machine, training)
        if isinstance(kernel, FusedKernel)
        else _stream_time(kernel, machine)
    )


def _product_time(kernel: ProductKernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """In fp8 the peak is that of fp8 at the efficiency fitted in 16 bits. Of fp8 and of grouped
    products no point was measured.
    """
    chip, of = chip_of(machine, training.precision), kernel.product
    curve: MatmulCurve = getattr(machine.profile.compute, kernel.curve)
    if kernel.fp8:
        chip = replace(chip, peak_flops_per_s=machine.cluster.device.peak(FP8))
    form_s = kernel.slower * matmul_s(of, curve, chip)
    if kernel.fp8 or kernel.grouped:
        return Seconds(form_s, Kind.ANALYTIC)
    if curve.points:
        return _corrected(
            form_s,
            _product_corrections(curve, kernel.curve, chip, of.operand_bytes, of.result_bytes),
            kernel.sizes,
        )
    # the bounds of un-fused attention's curves are of sequence and head_dim
    return Seconds(
        form_s, curve.kind_at((of.m, min(of.n, of.k)) if kernel.curve in BATCHED else kernel.sizes)
    )


def _corrected(form_s: float, corrections: Corrections, sizes: tuple[float, ...]) -> Seconds:
    """What a form says, as the points of its curve correct it."""
    factor, kind = corrections.factor(sizes)
    return Seconds(form_s * factor, kind)


@functools.lru_cache(maxsize=64)
def _product_corrections(
    curve: MatmulCurve, name: str, chip: Chip, operand_bytes: int, result_bytes: int
) -> Corrections:
    def form_s(sizes: tuple[float, ...]) -> float:
        kernel = product_kernel(name, tuple(map(int, sizes)), operand_bytes, result_bytes)
        return kernel.slower * matmul_s(kernel.product, curve, chip)

    return corrections_of(curve, BATCHED_SIZES if name in BATCHED else PRODUCT_SIZES, form_s)


def _fused_time(kernel: FusedKernel, machine: Machine, training: TrainingSpec) -> Seconds:
    """With dropout by the curve of that where there is one; else as without it, of which no point
    is.
    """
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    speed = getattr(
        compute.flash_speed(fused_kernel_of(training.stack, machine.cluster.device)), kernel.way
    )
    both, own = (compute.flash_forward, compute.flash_backward), not kernel.dropped
    if kernel.dropped and compute.dropped_flash is not None:
        both, own = compute.dropped_flash, True
    curve = both[kernel.way == BACKWARD]
    form_s = _fused_s(kernel, curve, chip) / speed
    if not curve.points:
        return Seconds(
            form_s, curve.kind_at((kernel.seq, kernel.head_dim)) if speed == 1.0 else Kind.ANALYTIC
        )
    price = (
        _corrected(form_s, _fused_corrections(curve, kernel.way, chip), kernel.sizes)
        if own
        else Seconds(form_s, Kind.ANALYTIC)
    )
    return price if speed == 1.0 else Seconds(price.value_s, Kind.ANALYTIC)


def _fused_s(kernel: FusedKernel, curve: FlashCurve, chip: Chip) -> float:
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
    """They are of causal attention, as every model here has it."""

    def form_s(sizes: tuple[float, ...]) -> float:
        heads, seq, head_dim = map(int, sizes)
        return _fused_s(fused_kernel(way, heads, seq, seq, head_dim), curve, chip)

    return corrections_of(curve, FUSED_SIZES, form_s)


def _stream_time(kernel: StreamKernel, machine: Machine) -> Seconds:
    """By the machine's own curve of that operation, else what it is made of by the curves of their
    classes.

    On a machine that measured single operations, one that it did not is analytic: points of its
    class are of others.
    """
    compute, bytes_per_s = machine.profile.compute, machine.cluster.device.memory_bytes_per_s
    own = _own_curve(kernel, compute)
    if own is None and kernel.parts is not None:
        return _sum([_stream_time(part, machine) for part in kernel.parts])
    curve = own or _curve_of(getattr(compute, kernel.like), kernel.way)
    form_s = memory_bound_s(kernel.n_bytes, curve, bytes_per_s)
    if own is not None and own.points:
        once = _corrected(form_s, _stream_corrections(own, bytes_per_s), kernel.sizes)
    else:
        of_another = own is None and (
            curve.points or (compute.named and kernel.name != kernel.like)
        )
        once = Seconds(form_s, Kind.ANALYTIC if of_another else curve.kind_at(kernel.sizes))
    return once if kernel.times == 1 else once.scaled(kernel.times)


@functools.lru_cache(maxsize=256)
def _stream_corrections(curve: MemoryCurve, bytes_per_s: float) -> Corrections:
    return corrections_of(
        curve, STREAM_SIZES, lambda sizes: memory_bound_s(sizes[0], curve, bytes_per_s)
    )


def _own_curve(kernel: StreamKernel, compute: Compute) -> MemoryCurve | None:
    """The machine's own curve of exactly this operation: a named one, or that of a class of one
    operation, with its points.
    """
    if kernel.name in compute.named:
        return _curve_of(compute.named[kernel.name], kernel.way)
    curve = (
        _curve_of(getattr(compute, kernel.name), kernel.way) if kernel.name == kernel.like else None
    )
    return curve if curve is not None and curve.points else None


def _curve_of(passes: PassCurves | MemoryCurve, way: str) -> MemoryCurve:
    if isinstance(passes, MemoryCurve):
        return passes
    return passes.forward if way == FORWARD else passes.backward


def optimizer_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of one Adam step over `num_parameters` of this rank (EQUATIONS K5).

    Leaves out the norm of the gradients and their clipping, where the machine's own profile has no
    curve of it.
    """
    if num_parameters <= 0:
        return ZERO
    kernels = update_kernels(num_parameters, training)
    return machine.corrected(
        "optimizer", _sum([_stream_time(kernel, machine) for kernel in kernels])
    )
