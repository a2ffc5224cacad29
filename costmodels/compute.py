"""Seconds of one operator on one rank, forward and backward, without communication (EQUATIONS K1, K2, K3, K5).

The constants are those of the device's profile; every function here is pure. FLOPs counted are those that run: a causal
fused kernel does half of the model FLOPs that `Operator.flops_*` state.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from costmodels.sharding import Sharding
from profiles.curves import Chip, FlashCurve, MatmulCurve, MemoryCurve, Product, flash_attention_s, matmul_s, memory_bound_s
from profiles.measured import Machine
from profiles.model import Operator, OperatorKind
from profiles.provenance import ZERO, Kind, Seconds, weakest
from profiles.spec import FP8, Precision, TrainingSpec
from profiles.stack import AttentionKernel

FLASH_BACKWARD_FLOPS = 2.5  # of the forward's: two products more, and one recomputed
FP32_BYTES = 4
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written
ALIGNED_BYTES = 16  # what a tensor core loads at once
# How many times as long a product takes whose rows are a multiple of fewer bytes. 2: what vTrain's single-node A100 rows say of
# a head of 50,257 (odd) against one of 25,128; 4 and 8 are assumed between.
MISALIGNED = {16: 1.0, 8: 1.15, 4: 1.4, 2: 2.3}
ADAM_STATE_BYTES = 24  # fp32 master copy and two moments, each read and written


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Seconds of one micro-batch on one rank. The backward pass is without recompute.

    weight      of the backward, what computes the gradients of matrices and their biases (those of norms come with the input's)
    """

    forward: Seconds
    backward: Seconds
    weight: Seconds = ZERO

    def plus(self, other: OperatorTime) -> OperatorTime:
        return self if other is FREE else OperatorTime(self.forward + other.forward, self.backward + other.backward)


FREE = OperatorTime(ZERO, ZERO)


@functools.lru_cache(maxsize=64)
def chip_of(machine: Machine, precision: Precision) -> Chip:
    """The datasheet figures at `precision`. Raises ConfigError when the device has no such arithmetic."""
    device = machine.cluster.device
    return Chip(peak_flops_per_s=device.peak(precision), bytes_per_s=device.memory_bytes_per_s, num_sms=max(1, device.num_sms))


def operator_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Seconds of one rank's share of `operator`, forward and backward, without communication and without recompute.

    The kernels' own time, times the factor by which they take longer in a step than alone (`Stack.kernel_slowdown`), and those
    of a calibration. What the host needs to launch them is a bound of the layer (costmodels/layer.py). Raises ConfigError
    when the device lacks the precision.
    """
    alone = _PRICES[operator.kind](operator, sharding, machine, training)
    slowdown = training.stack.kernel_slowdown
    in_step = alone
    if slowdown != 1.0:
        in_step = OperatorTime(alone.forward.scaled(slowdown), alone.backward.scaled(slowdown), alone.weight.scaled(slowdown))
    return OperatorTime(
        machine.corrected("forward", in_step.forward), machine.corrected("backward", in_step.backward),
        machine.corrected("backward", in_step.weight))


def _matmul_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Forward y = x w; backward dx = dy w^T and dw = x^T dy, each with its own shape, and the bias gradient (K1).

    In fp8 the operands have one byte, the peak is that of fp8 at the efficiency fitted in 16 bits, and each operand is cast
    before its product: input and weight forward, the output's gradient backward. The head stays in 16 bits.
    """
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    element = operand = training.precision.num_bytes
    *token_dims, features, contracted = operator.dims
    m = math.prod(sharding.dim_size(operator, dim.name) for dim in token_dims)
    n, k = sharding.dim_size(operator, features.name), sharding.dim_size(operator, contracted.name)
    gradient_bytes = training.gradient_precision.num_bytes
    fused = training.stack.fused_accumulation
    moved = 2 * FP32_BYTES if fused and gradient_bytes == FP32_BYTES else element
    fp8 = training.fp8_matmuls and features.name != "vocab"
    if fp8:
        chip, operand = replace(chip, peak_flops_per_s=machine.cluster.device.peak(FP8)), 1
    products = (
        (Product(m=m, n=n, k=k, operand_bytes=operand, result_bytes=element), compute.forward),
        (Product(m=m, n=k, k=n, operand_bytes=operand, result_bytes=element), compute.input_gradient),
        (Product(m=k, n=n, k=m, operand_bytes=operand, result_bytes=moved), compute.weight_gradient),
    )
    slower = misaligned(math.gcd(n, k) * operand)
    forward, dx, dw = (
        Seconds(slower * matmul_s(p, curve, chip), Kind.ANALYTIC if fp8 else curve.kind_at((p.m, p.n, p.k))) for p, curve in products)
    if not fused:
        dw += _memory((element + 2 * gradient_bytes) * n * k, compute.elementwise.backward, machine)
    if fp8:
        cast_bytes = 2 * element + operand  # read for its largest value, read again and written
        forward += _memory(cast_bytes * (m * k + n * k), compute.elementwise.forward, machine)
        dx += _memory(cast_bytes * m * n, compute.elementwise.backward, machine)
    if len(operator.parameters) < 2:
        return OperatorTime(forward, dx + dw, dw)
    reduced = compute.elementwise.backward
    bias = Seconds(memory_bound_s(element * m * n, reduced, chip.bytes_per_s), reduced.kind_at((element * m * n,)))
    return OperatorTime(forward, dx + dw + bias, dw + bias)


def _experts_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """One grouped product for all experts of a rank, forward and for both gradients (K1).

    Balanced: each of them has an equal part of as many copies of tokens as the rank sent. Grouped products were not measured: the
    curve is that of single ones with the tiles of all experts in the same waves. In 16 bits also under fp8.
    """
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    element = training.precision.num_bytes
    *token_dims, features, contracted = operator.dims
    experts = operator.parameters[0].dims[0].size // sharding.ep
    m = -(-math.prod(sharding.dim_size(operator, dim.name) for dim in token_dims) // experts)
    n, k = features.size, contracted.size
    gradient_bytes, fused = training.gradient_precision.num_bytes, training.stack.fused_accumulation
    moved = 2 * FP32_BYTES if fused and gradient_bytes == FP32_BYTES else element
    products = (
        (Product(m=m, n=n, k=k, batch=experts, operand_bytes=element, result_bytes=element), compute.forward),
        (Product(m=m, n=k, k=n, batch=experts, operand_bytes=element, result_bytes=element), compute.input_gradient),
        (Product(m=k, n=n, k=m, batch=experts, operand_bytes=element, result_bytes=moved), compute.weight_gradient),
    )
    forward, dx, dw = (Seconds(matmul_s(product, curve, chip), Kind.ANALYTIC) for product, curve in products)
    if not fused:
        dw += _memory((element + 2 * gradient_bytes) * experts * n * k, compute.elementwise.backward, machine)
    return OperatorTime(forward, dx + dw)


def misaligned(row_bytes: int) -> float:
    """How many times as long a product takes whose matrices have rows of `row_bytes`."""
    return MISALIGNED[max(2, math.gcd(row_bytes, ALIGNED_BYTES))]


def _attention_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    price = _flash_time if training.attention is AttentionKernel.FLASH else _unfused_time
    return price(operator, sharding, machine, training)


def _flash_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Fused attention: half of the FLOPs when causal; the backward does 2.5 times the forward's (K2)."""
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    batch, heads, seq, keys, head_dim = (sharding.dim_size(operator, dim.name) for dim in operator.dims)
    met = keys / 2 if operator.causal else float(keys)
    flops = 4.0 * batch * heads * seq * met * head_dim

    speed = compute.flash_speed(training.stack.flash_kernel)

    def price(flops: float, curve: FlashCurve, speed: float) -> Seconds:
        value_s = flash_attention_s(flops, heads=batch * heads, seq=seq, keys=met, head_dim=head_dim, curve=curve, chip=chip)
        return Seconds(value_s / speed, curve.kind_at((seq, head_dim)) if speed == 1.0 else Kind.ANALYTIC)

    return OperatorTime(
        price(flops, compute.flash_forward, speed.forward), price(FLASH_BACKWARD_FLOPS * flops, compute.flash_backward, speed.backward))


def _unfused_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """q k^T, masked softmax, dropout where its mask is saved, and probabilities times v, each over S x S scores (K2).

    Backward: dP = dO v^T has the shape of q k^T; dV, dQ and dK that of p v. Causal shortens the softmax's reads only.
    """
    chip, compute = chip_of(machine, training.precision), machine.profile.compute
    batch, heads, seq, keys, head_dim = (sharding.dim_size(operator, dim.name) for dim in operator.dims)
    element = training.precision.num_bytes
    qk = Product(m=seq, n=keys, k=head_dim, batch=batch * heads, operand_bytes=element, result_bytes=element)
    pv = Product(m=seq, n=head_dim, k=keys, batch=batch * heads, operand_bytes=element, result_bytes=element)
    scores_bytes = element * batch * heads * seq * keys
    softmax_bytes = (1.5 * scores_bytes, 2.0 * scores_bytes) if operator.causal else (2.0 * scores_bytes, 3.0 * scores_bytes)
    forward = _products((qk, pv), compute.batched_forward, chip)
    forward += _memory(softmax_bytes[0], compute.softmax.forward, machine)
    backward = _products((qk, pv, pv, pv), compute.batched_backward, chip)
    backward += _memory(softmax_bytes[1], compute.softmax.backward, machine)
    if any(tensor.element_bytes == 1 for tensor in operator.saved):
        dropout_bytes = scores_bytes * (2 + 1 / element)
        forward += _memory(dropout_bytes, compute.dropout.forward, machine)
        backward += _memory(dropout_bytes, compute.dropout.backward, machine)
    return OperatorTime(forward, backward)


def _products(products: tuple[Product, ...], curve: MatmulCurve, chip: Chip) -> Seconds:
    """Seconds of batched products of un-fused attention; the curve's bounds are of sequence and head_dim."""
    kind = weakest(curve.kind_at((p.m, min(p.n, p.k))) for p in products)
    return Seconds(sum(matmul_s(p, curve, chip) for p in products), kind)


def _memory(n_bytes: float, curve: MemoryCurve, machine: Machine) -> Seconds:
    value_s = memory_bound_s(n_bytes, curve, machine.cluster.device.memory_bytes_per_s)
    return Seconds(value_s, curve.kind_at((n_bytes,)))


def _streaming_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Norms, activations, rotary: the bytes of the tensors over the effective bandwidth (K3).

    Forward: inputs read, outputs and the dropout mask written. Backward: output gradient and saved tensors read, input
    gradients written. Rotary is priced as a fused kernel; PyTorch's un-fused one takes 2 (forward) to 5 times as long.
    """
    chip_of(machine, training.precision)
    compute = machine.profile.compute
    read, written, kept, masks = _stream_bytes(operator, sharding)
    if len(operator.inputs) > 1:
        return _residual_time(read, written, masks, len(operator.inputs) - 1, machine)
    passes = compute.norm if operator.kind is OperatorKind.NORM else compute.elementwise
    forward = _memory(read + written + masks, passes.forward, machine)
    return OperatorTime(forward, _memory(written + kept + read, passes.backward, machine))


def _permuting_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Copies of the tokens written in the order of their experts, or read in it and added up by weight.

    The larger side is read and written once, and once more behind an exchange to order what arrived; so in both passes.
    """
    chip_of(machine, training.precision)
    passes = machine.profile.compute.elementwise
    larger_bytes = max(sharding.tensor_bytes(operator, tensor) for tensor in (*operator.inputs, *operator.outputs))
    n_bytes = (4 if sharding.ep > 1 else 2) * larger_bytes
    return OperatorTime(_memory(n_bytes, passes.forward, machine), _memory(n_bytes, passes.backward, machine))


def _stream_bytes(operator: Operator, sharding: Sharding) -> tuple[int, int, int, int]:
    """Bytes on one rank of the inputs, the outputs, the saved tensors, and the masks among those."""
    kept = tuple((tensor.element_bytes, sharding.tensor_bytes(operator, tensor)) for tensor in operator.saved)
    return (
        sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs),
        sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.outputs),
        sum(n_bytes for _, n_bytes in kept),
        sum(n_bytes for element_bytes, n_bytes in kept if element_bytes == 1),
    )


def _residual_time(read: int, written: int, masks: int, branches: int, machine: Machine) -> OperatorTime:
    """Dropout of the branches, added to the residual stream. Their gradients pass as they are, or through the mask; the
    gradient that comes back from the norm before each branch is added to the stream's (two reads, one write)."""
    passes = machine.profile.compute.residual
    forward = _memory(read + written + masks, passes.forward, machine)
    backward = _memory(3 * written, passes.backward, machine).scaled(branches)
    if masks:
        backward += _memory(2 * written + masks, passes.backward, machine)
    return OperatorTime(forward, backward)


def _embedding_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Look-up: the bytes of the output both ways, of which the share covers masking and the scattered addition.

    The backward also zeroes, reads and writes the gradient of this rank's part of the table.
    """
    chip_of(machine, training.precision)
    compute = machine.profile.compute
    n_bytes = sum(sharding.local_bytes(tensor, sharding.place_inside(operator, tensor)) for tensor in operator.outputs)
    table_bytes = TABLE_PASSES * training.precision.num_bytes * sharding.parameter_elements(operator)
    backward = _memory(n_bytes, compute.embedding.backward, machine) + _memory(table_bytes, compute.elementwise.backward, machine)
    return OperatorTime(_memory(n_bytes, compute.embedding.forward, machine), backward)


def _cross_entropy_time(operator: Operator, sharding: Sharding, machine: Machine, training: TrainingSpec) -> OperatorTime:
    """Vocabulary-parallel cross entropy of this rank's logits: their bytes, the share covers its fp32 passes (un-fused)."""
    chip_of(machine, training.precision)
    n_bytes = sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs)
    passes = machine.profile.compute.cross_entropy
    return OperatorTime(_memory(n_bytes, passes.forward, machine), _memory(n_bytes, passes.backward, machine))


_PRICES = {
    OperatorKind.MATMUL: _matmul_time,
    OperatorKind.ATTENTION: _attention_time,
    OperatorKind.NORM: _streaming_time,
    OperatorKind.ELEMENTWISE: _streaming_time,
    OperatorKind.EMBEDDING: _embedding_time,
    OperatorKind.CROSS_ENTROPY: _cross_entropy_time,
    OperatorKind.EXPERTS: _experts_time,
    OperatorKind.DISPATCH: _permuting_time,
    OperatorKind.COMBINE: _permuting_time,
}


def adam_bytes_per_parameter(training: TrainingSpec) -> int:
    """Bytes that one Adam step touches per parameter (EQUATIONS K5): 28, or 30 with fp32 gradients beside 16-bit weights.

    fp32 master and moments read and written, the gradient read, the 16-bit parameter written (fp32: it is the master).
    """
    parameter = 0 if training.precision is Precision.FP32 else training.precision.num_bytes
    return ADAM_STATE_BYTES + training.gradient_precision.num_bytes + parameter


def optimizer_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of one Adam step over `num_parameters` of this rank (EQUATIONS K5). Leaves out: gradient norm and clipping."""
    if num_parameters <= 0:
        return ZERO
    alone = _memory(adam_bytes_per_parameter(training) * num_parameters, machine.profile.compute.optimizer, machine)
    return machine.corrected("optimizer", alone)
