"""The kernels that one operator runs on one rank, forward and backward (EQUATIONS K1, K2, K3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from parplan.costmodels.operators.kernels import (
    BACKWARD,
    BATCHED,
    FORWARD,
    FP32_BYTES,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kernel,
    ProductKernel,
    StreamKernel,
    fused_kernel,
    product_kernel,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.curves import Product
from parplan.profiles.models.operator_graph import Operator, OperatorKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import AttentionKernel

TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written


@dataclass(frozen=True, slots=True)
class OperatorKernels:
    """What an operator runs for one micro-batch on one rank, each pass in its order. The backward
    pass is without recompute.

    inputs    of the backward pass, what computes the gradients of inputs, and those of norms'
              parameters
    weights   and of matrices and their biases: what a zero-bubble schedule runs later
    """

    forward: tuple[Kernel, ...]
    inputs: tuple[Kernel, ...]
    weights: tuple[Kernel, ...] = ()

    @property
    def backward(self) -> tuple[Kernel, ...]:
        return self.inputs + self.weights


def operator_kernels(
    operator: Operator, sharding: Sharding, training: TrainingSpec
) -> OperatorKernels:
    """The kernels of one rank's share of `operator`, without communication and without
    recompute.
    """
    kernels = _KERNELS[operator.kind](operator, sharding, training)
    return kernels if operator.gradient else OperatorKernels(kernels.forward, ())


def _accumulated_bytes(training: TrainingSpec) -> int:
    """Bytes moved for one element of a weight gradient by its product: read and written where the
    product adds to an fp32 one.
    """
    fused = (
        training.stack.fused_accumulation and training.gradient_precision.num_bytes == FP32_BYTES
    )
    return 2 * FP32_BYTES if fused else training.precision.num_bytes


def _added(elements: int, training: TrainingSpec) -> tuple[Kernel, ...]:
    """What adds a weight gradient to those of earlier micro-batches where its product does not."""
    if training.stack.fused_accumulation:
        return ()
    n_bytes = (training.precision.num_bytes + 2 * training.gradient_precision.num_bytes) * elements
    return (StreamKernel("accumulation", "elementwise", BACKWARD, n_bytes),)


def _matmul(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """Forward y = x w; backward dx = dy w^T and dw = x^T dy, each with its own shape, and the bias
    gradient (EQUATIONS K1).

    In fp8 the operands have one byte, and each is cast before its product (read for its largest
    value, read again and written): input and weight forward, the output's gradient backward. The
    head stays in 16 bits.
    """
    if not operator.parameters:
        return _activations_product(operator, sharding, training)
    *token_dims, features, contracted = operator.dims
    m = math.prod(sharding.dim_size(operator, dim.name) for dim in token_dims)
    n, k = sharding.dim_size(operator, features.name), sharding.dim_size(operator, contracted.name)
    fp8, element = training.fp8_matmuls and features.name != "vocab", training.precision.num_bytes
    operand = 1 if fp8 else element

    def product(curve: str, m: int, n: int, k: int, result_bytes: int = element) -> ProductKernel:
        return product_kernel(curve, (m, n, k), operand, result_bytes, fp8=fp8)

    def cast(way: str, elements: int) -> tuple[Kernel, ...]:
        return (
            (StreamKernel("cast", "elementwise", way, (2 * element + operand) * elements),)
            if fp8
            else ()
        )

    bias = (
        (StreamKernel("bias_gradient", "elementwise", BACKWARD, element * m * n),)
        if len(operator.parameters) > 1
        else ()
    )
    return OperatorKernels(
        (product(FORWARD, m, n, k), *cast(FORWARD, m * k + n * k)),
        (product(INPUT_GRADIENT, m, k, n), *cast(BACKWARD, m * n)),
        (
            product(WEIGHT_GRADIENT, k, n, m, _accumulated_bytes(training)),
            *_added(n * k, training),
            *bias,
        ),
    )


def _activations_product(
    operator: Operator, sharding: Sharding, training: TrainingSpec
) -> OperatorKernels:
    """A product of two activations, one for every index of the outer dims: as those of un-fused
    attention (EQUATIONS K2).
    """
    *outer, m, n, k = (sharding.dim_size(operator, dim.name) for dim in operator.dims)
    batch, element = math.prod(outer), training.precision.num_bytes
    forward, inputs, others = (
        ProductKernel(
            curve,
            Product(
                m=sizes[0],
                n=sizes[1],
                k=sizes[2],
                batch=batch,
                operand_bytes=element,
                result_bytes=element,
            ),
        )
        for curve, sizes in (
            ("batched_forward", (m, n, k)),
            ("batched_backward", (m, k, n)),
            ("batched_backward", (k, n, m)),
        )
    )
    return OperatorKernels((forward,), (inputs, others))


def _experts(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """One grouped product for all experts of a rank, forward and for both gradients (EQUATIONS K1).

    Balanced: each of them has an equal part of as many copies of tokens as the rank sent. Grouped
    products were not measured: the curve is that of single ones with the tiles of all experts in
    the same waves. In 16 bits also under fp8.
    """
    *token_dims, features, contracted = operator.dims
    experts, element = (
        operator.parameters[0].dims[0].size // sharding.ep,
        training.precision.num_bytes,
    )
    m = -(-math.prod(sharding.dim_size(operator, dim.name) for dim in token_dims) // experts)
    n, k = features.size, contracted.size

    def product(curve: str, m: int, n: int, k: int, result_bytes: int = element) -> ProductKernel:
        of = Product(m=m, n=n, k=k, batch=experts, operand_bytes=element, result_bytes=result_bytes)
        return ProductKernel(curve, of, grouped=True)

    weights = product(WEIGHT_GRADIENT, k, n, m, _accumulated_bytes(training))
    return OperatorKernels(
        (product(FORWARD, m, n, k),),
        (product(INPUT_GRADIENT, m, k, n), weights, *_added(experts * n * k, training)),
    )


def _attention(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    kernels = _flash if training.attention is AttentionKernel.FLASH else _unfused
    return kernels(operator, sharding, training)


def _flash(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """Fused attention: half of the FLOPs when causal; the backward does 2.5 times the forward's
    (EQUATIONS K2).
    """
    batch, heads, seq, keys, head_dim = (
        sharding.dim_size(operator, dim.name) for dim in operator.dims
    )
    kernels = (
        fused_kernel(
            way,
            batch * heads,
            seq,
            keys,
            head_dim,
            causal=operator.causal,
            dropped=operator.dropped,
        )
        for way in (FORWARD, BACKWARD)
    )
    return OperatorKernels(*((kernel,) for kernel in kernels))


def _unfused(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """q k^T, masked softmax, dropout where its mask is saved, and probabilities times v, each over
    S x S scores (EQUATIONS K2).

    Backward: dP = dO v^T has the shape of q k^T; dV, dQ and dK that of p v. Causal shortens the
    softmax's reads only.
    """
    batch, heads, seq, keys, head_dim = (
        sharding.dim_size(operator, dim.name) for dim in operator.dims
    )
    element, batch = training.precision.num_bytes, batch * heads
    qk = Product(
        m=seq, n=keys, k=head_dim, batch=batch, operand_bytes=element, result_bytes=element
    )
    pv = Product(
        m=seq, n=head_dim, k=keys, batch=batch, operand_bytes=element, result_bytes=element
    )
    elements = batch * seq * keys
    halves = (
        (3, 4) if operator.causal else (4, 6)
    )  # passes over the scores, of which causal skips half of each read
    softmax = (
        StreamKernel("softmax", "softmax", way, n * elements * element // 2)
        for way, n in zip(_WAYS, halves, strict=True)
    )
    dropped = any(tensor.element_bytes == 1 for tensor in operator.saved)
    dropout = (
        (StreamKernel("dropout", "dropout", way, (2 * element + 1) * elements),) if dropped else ()
        for way in _WAYS
    )
    products = (
        tuple(ProductKernel(curve, product) for product in run)
        for curve, run in zip(BATCHED, ((qk, pv), (qk, pv, pv, pv)), strict=True)
    )
    return OperatorKernels(
        *((*a, b, *c) for a, b, c in zip(products, softmax, dropout, strict=True))
    )


def _streaming(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """Norms, activations, rotary: the bytes of the tensors (EQUATIONS K3).

    Forward: inputs read, outputs and the dropout mask written. Backward: output gradient and saved
    tensors read, input gradients written. Rotary is priced as a fused kernel; PyTorch's un-fused
    one takes 2 (forward) to 5 times as long.
    """
    read, written, kept, masks = _stream_bytes(operator, sharding)
    if len(operator.inputs) > 1 and kept == masks:  # what else has several inputs keeps them
        return _residual(read, written, masks, len(operator.inputs) - 1)
    name, like = _named(operator, masks)
    return OperatorKernels(
        (StreamKernel(name, like, FORWARD, read + written + masks),),
        (StreamKernel(name, like, BACKWARD, written + kept + read),),
    )


def _named(operator: Operator, masks: int) -> tuple[str, str]:
    """The name of a streaming operation, and its class."""
    if operator.kind is OperatorKind.NORM:
        return "layer_norm" if len(operator.parameters) > 1 else "rms_norm", "norm"
    name = operator.function.lower()
    if name == "activation":
        name = (
            "swiglu"
            if operator.inputs[0].num_elements > operator.outputs[0].num_elements
            else "gelu"
        )
    elif masks:
        name = f"dropped_{name}"
    return name, "elementwise"


def _stream_bytes(operator: Operator, sharding: Sharding) -> tuple[int, int, int, int]:
    """Bytes on one rank of the inputs, the outputs, the saved tensors, and the masks among
    those.
    """
    kept = tuple(
        (tensor.element_bytes, sharding.tensor_bytes(operator, tensor)) for tensor in operator.saved
    )
    return (
        sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs),
        sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.outputs),
        sum(n_bytes for _, n_bytes in kept),
        sum(n_bytes for element_bytes, n_bytes in kept if element_bytes == 1),
    )


def _residual(read: int, written: int, masks: int, branches: int) -> OperatorKernels:
    """Dropout of the branches, added to the residual stream. Their gradients pass as they are, or
    through the mask; the gradient that comes back from the norm before each branch is added to the
    stream's (two reads, one write).
    """
    joined = StreamKernel("residual", "residual", BACKWARD, 3 * written, times=branches)
    if not masks:
        return OperatorKernels(
            (StreamKernel("residual", "residual", FORWARD, read + written),), (joined,)
        )
    name = "dropped_residual"
    parts = (joined, StreamKernel(name, "residual", BACKWARD, 2 * written + masks))
    return OperatorKernels(
        (StreamKernel(name, "residual", FORWARD, read + written + masks),),
        (
            StreamKernel(
                name, "residual", BACKWARD, (3 * branches + 2) * written + masks, parts=parts
            ),
        ),
    )


def _embedding(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """Look-up: the bytes of the output both ways, of which the share covers masking and the
    scattered addition.

    The backward also zeroes, reads and writes the gradient of this rank's part of the table.
    """
    n_bytes = sum(
        sharding.local_bytes(tensor, sharding.place_inside(operator, tensor))
        for tensor in operator.outputs
    )
    table_bytes = (
        TABLE_PASSES * training.precision.num_bytes * sharding.parameter_elements(operator)
    )
    parts = (
        StreamKernel("embedding", "embedding", BACKWARD, n_bytes),
        StreamKernel("table", "elementwise", BACKWARD, table_bytes),
    )
    return OperatorKernels(
        (StreamKernel("embedding", "embedding", FORWARD, n_bytes),),
        (StreamKernel("embedding", "embedding", BACKWARD, n_bytes + table_bytes, parts=parts),),
    )


def _cross_entropy(
    operator: Operator, sharding: Sharding, training: TrainingSpec
) -> OperatorKernels:
    """Vocabulary-parallel cross entropy of this rank's logits: their bytes, the share covers its
    fp32 passes (un-fused).
    """
    n_bytes = sum(sharding.tensor_bytes(operator, tensor) for tensor in operator.inputs)
    return _both("cross_entropy", "cross_entropy", n_bytes)


def _permuting(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    """Copies of the tokens written in the order of their experts, or read in it and added up by
    weight.

    The larger side is read and written once, and once more behind an exchange to order what
    arrived; so in both passes.
    """
    larger_bytes = max(
        sharding.tensor_bytes(operator, tensor) for tensor in (*operator.inputs, *operator.outputs)
    )
    return _both(operator.kind.value, "elementwise", (4 if sharding.ep > 1 else 2) * larger_bytes)


def _both(name: str, like: str, n_bytes: int) -> OperatorKernels:
    """As many bytes in either pass."""
    return OperatorKernels(*((StreamKernel(name, like, way, n_bytes),) for way in _WAYS))


def _view(operator: Operator, sharding: Sharding, training: TrainingSpec) -> OperatorKernels:
    return OperatorKernels((), ())


_WAYS = (FORWARD, BACKWARD)


_KERNELS: dict[OperatorKind, Callable[[Operator, Sharding, TrainingSpec], OperatorKernels]] = {
    OperatorKind.MATMUL: _matmul,
    OperatorKind.ATTENTION: _attention,
    OperatorKind.NORM: _streaming,
    OperatorKind.ELEMENTWISE: _streaming,
    OperatorKind.EMBEDDING: _embedding,
    OperatorKind.CROSS_ENTROPY: _cross_entropy,
    OperatorKind.EXPERTS: _experts,
    OperatorKind.DISPATCH: _permuting,
    OperatorKind.COMBINE: _permuting,
    OperatorKind.VIEW: _view,
}
