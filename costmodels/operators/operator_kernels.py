"""The kernels that one operator runs on one rank, forward and backward (EQUATIONS K1, K2, K3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.operators.kernels import (
    BACKWARD,
    BATCHED,
    FORWARD,
    FP32_BYTES,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    FusedKernel,
    Kernel,
    ProductKernel,
    StreamKernel,
    fused_kernel,
    product_kernel,
    ranks_met,
)
from parplan.costmodels.operators.sharding import LocalSizes
from parplan.profiles.elementwise import Number, anywhere, chosen
from parplan.profiles.machines.curves import Product
from parplan.profiles.models.operator_graph import (
    BYTE_PARTS,
    EXPERT_WIDTH,
    PRODUCTS,
    ROUTES,
    Attention,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.product_formats import FORMATS, OperandFormat
from parplan.profiles.stack import AttentionKernel

SCALED_ELEMENTS = 64  # 8-bit elements that share an fp32 scale, as in QLoRA, arXiv 2305.14314
QUANTISED_BYTES = 1 + FP32_BYTES / SCALED_ELEMENTS  # of an element with its part of the scale
# Bytes that the kernels of Megatron-Core's TEGroupedMLP move for an element, forward and backward.
# Biases by weight: a product in fp32 (4 bytes), its sum with the output (10), the experts joined
# (8) and cast (6); backward a cast (6), one back for the output (6), the experts joined (4), and
# the gradients of the biases and of the weights, each a product and a sum (12 each).
WIDE_BIAS_BYTES = (28, 40)
CLAMP_BYTES = (8, 12)  # both halves clamped (4) and joined (4); backward 6, 4 and the bias (2)
# Bytes that PyTorch's operations move for an element of the result, a kernel each, forward and
# backward, with e bytes of an element and fp32 inside (EQUATIONS K3): a + b e as (a, b).
# pytorch/torchtitan f6a9daa13 torchtitan/models/norms.py (RMSNorm: float, pow, mean, mul, type_as,
# mul) and models/llama/model.py (apply_rotary_emb: float, mul, type_as; silu and mul). The tensor
# of positions has the values too, which stand for the copies of keys and values (repeat_kv).
PLAIN_BYTES = {
    "rms_norm": ((28, 4), (76, 8)),
    "rotary": ((16, 2), (16, 2)),
    "swiglu": ((0, 5), (0, 9)),
}
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written


@dataclass(frozen=True, slots=True)
class OperatorKernels:
    """The kernels of an operator for one micro-batch on one rank, each pass in its order.

    The backward pass is without recompute.

    inputs    kernels of the backward pass for the gradients of inputs and of norm parameters
    weights   kernels of the backward pass for the gradients of matrices and their biases, which a
              zero-bubble schedule runs later
    """

    forward: tuple[Kernel, ...]
    inputs: tuple[Kernel, ...]
    weights: tuple[Kernel, ...] = ()

    @property
    def backward(self) -> tuple[Kernel, ...]:
        return self.inputs + self.weights


def operator_kernels(
    operator: Operator, sizes: LocalSizes, training: TrainingSpec
) -> OperatorKernels:
    """The kernels of one rank's share of `operator`, without communication and recompute.

    sizes    a sharding, or several, whose kernels have arrays of sizes
    """
    kernels = _KERNELS[operator.kind](operator, sizes, training)
    unpacked = _dequantised(operator, sizes, training)
    forward = (*unpacked, *kernels.forward)
    if not operator.gradient:
        return OperatorKernels(forward, ())
    weights = kernels.weights if operator.weight_gradient else ()
    return OperatorKernels(forward, (*unpacked, *kernels.inputs), weights)


def _dequantised(
    operator: Operator, sizes: LocalSizes, training: TrainingSpec
) -> tuple[Kernel, ...]:
    """The kernel that writes a frozen 8-bit weight in 16 bits before each product (EQUATIONS F2).

    It reads the weight with its scales and writes a temporary copy, forward and backward.
    """
    if not any(parameter.quantised for parameter in operator.parameters):
        return ()
    element_bytes = QUANTISED_BYTES + training.precision.num_bytes
    n_bytes = element_bytes * sizes.parameter_elements(operator)
    return (StreamKernel("dequantisation", "elementwise", FORWARD, n_bytes),)


def _accumulated_bytes(training: TrainingSpec) -> int:
    """Bytes that a product moves for one element of a weight gradient.

    A product that adds to an fp32 gradient reads and writes it.
    """
    fused = (
        training.stack.fused_accumulation and training.gradient_precision.num_bytes == FP32_BYTES
    )
    return 2 * FP32_BYTES if fused else training.precision.num_bytes


def _added(elements: Number, training: TrainingSpec) -> tuple[Kernel, ...]:
    """The kernel that accumulates a weight gradient where its product does not."""
    if training.stack.fused_accumulation:
        return ()
    n_bytes = (training.precision.num_bytes + 2 * training.gradient_precision.num_bytes) * elements
    return (StreamKernel("accumulation", "elementwise", BACKWARD, n_bytes),)


def _matmul(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Forward y = x w; backward dx = dy w^T and dw = x^T dy, and the bias gradient (EQUATIONS K1).

    In a narrow format (EQUATIONS K8) each operand is cast before its product: the input
    forward, the output's gradient backward, and the weight forward where the stack does not hold
    its cast for the whole step. That one cast a step is left out. A stack may cast a rank's tokens
    before they are gathered. The head stays in `precision`.
    """
    if not operator.parameters:
        return _activations_product(operator, sizes, training)
    *token_dims, features, contracted = operator.dims
    m = math.prod(sizes.dim_size(operator, dim.name) for dim in token_dims)
    n, k = sizes.dim_size(operator, features.name), sizes.dim_size(operator, contracted.name)
    element = training.precision.num_bytes
    narrow = narrow_format(operator, training)
    operand, peak = (narrow.element_bytes, narrow.peak) if narrow else (element, "")
    cast_weight = 0 if training.stack.holds_cast_weights else n * k
    before, behind = (1, 1)
    if narrow is not None and training.stack.gathers_casts:
        before, behind = sizes.scattered_parts(operator)

    def product(
        curve: str, m: Number, n: Number, k: Number, result_bytes: int = element
    ) -> ProductKernel:
        kernel = product_kernel(curve, (m, n, k), operand, result_bytes, peak=peak)
        return replace(kernel, slower=kernel.slower * narrow.product_slower) if narrow else kernel

    def cast(way: str, elements: Number) -> tuple[Kernel, ...]:
        if narrow is None:
            return ()
        return (StreamKernel("cast", "elementwise", way, narrow.cast_bytes(element) * elements),)

    bias: tuple[Kernel, ...] = ()
    if len(operator.parameters) > 1:
        bias = (StreamKernel("bias_gradient", "elementwise", BACKWARD, element * m * n),)
    return OperatorKernels(
        (product(FORWARD, m, n, k), *cast(FORWARD, m * k / before + cast_weight)),
        (product(INPUT_GRADIENT, m, k, n), *cast(BACKWARD, m * n / behind)),
        (
            product(WEIGHT_GRADIENT, k, n, m, _accumulated_bytes(training)),
            *_added(n * k, training),
            *bias,
        ),
    )


def narrow_format(operator: Operator, training: TrainingSpec) -> OperandFormat | None:
    """Returns the narrow format in which a product of a weight runs, None for other operators."""
    if training.products is None or not may_be_narrow(operator):
        return None
    if operator.kind is OperatorKind.EXPERTS and not training.stack.narrow_experts:
        return None
    return FORMATS[training.products]


def may_be_narrow(operator: Operator) -> bool:
    """Returns true for the products that stacks run in a narrow format: of a block's weights.

    The head and the routers of experts stay in the precision of training.
    """
    if operator.kind not in PRODUCTS or not operator.parameters:
        return False
    return operator.dims[-2].name not in ("vocab", ROUTES)


def gathered_bytes(tensor: Tensor, reader: Operator, training: TrainingSpec) -> Number:
    """Bytes of a tensor that is gathered for a reader: of its cast, where the stack casts first."""
    narrow = narrow_format(reader, training) if training.stack.gathers_casts else None
    if narrow is None:
        return tensor.num_bytes
    return -(
        -tensor.num_bytes * narrow.element_parts // (BYTE_PARTS * training.precision.num_bytes)
    )


def _activations_product(
    operator: Operator, sizes: LocalSizes, training: TrainingSpec
) -> OperatorKernels:
    """A product of two activations for every index of the outer dims (EQUATIONS K2).

    It takes the curves of un-fused attention's products.
    """
    *outer, m, n, k = [sizes.dim_size(operator, dim.name) for dim in operator.dims]
    batch, element = math.prod(outer), training.precision.num_bytes

    def product(curve: str, m: Number, n: Number, k: Number) -> ProductKernel:
        return product_kernel(curve, (batch, m, n, k), element, element)

    forward_curve, backward_curve = BATCHED
    return OperatorKernels(
        (product(forward_curve, m, n, k),),
        (product(backward_curve, m, k, n), product(backward_curve, k, n, m)),
    )


def _experts(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """One grouped product for all experts of a rank, forward and for both gradients (EQUATIONS K1).

    Routing is balanced: each expert has an equal part of as many token copies as the rank sent.
    They take the curve of grouped products, which is relative to that of single ones with the tiles
    of all experts in the same waves. Where a stack runs them in the format of other products,
    tokens and gradients are cast as for these, and each weight once a step, which is left out.
    """
    *token_dims, features, contracted = operator.dims
    experts = operator.parameters[0].dims[0].size // sizes.ep
    element = training.precision.num_bytes
    m = -(-math.prod(sizes.dim_size(operator, dim.name) for dim in token_dims) // experts)
    n, k = sizes.dim_size(operator, features.name), sizes.dim_size(operator, contracted.name)
    stack = training.stack
    narrow = narrow_format(operator, training)
    operand, peak = (narrow.element_bytes, narrow.peak) if narrow else (element, "")

    def product(
        curve: str, m: Number, n: Number, k: Number, result_bytes: int = element
    ) -> ProductKernel:
        shape = Product(
            m=m, n=n, k=k, batch=experts, operand_bytes=operand, result_bytes=result_bytes
        )
        return ProductKernel(curve, shape, peak=peak, grouped=True)

    def cast(way: str, features: Number) -> tuple[Kernel, ...]:
        if narrow is None or stack.fused_experts:
            return ()
        n_bytes = narrow.cast_bytes(element) * experts * m * features
        return (StreamKernel("cast", "elementwise", way, n_bytes),)

    weights: tuple[Kernel, ...] = ()
    if operator.weight_gradient:
        gradient = product(WEIGHT_GRADIENT, k, n, m, _accumulated_bytes(training))
        weights = (gradient, *_added(experts * n * k, training))
    added, returned = _expert_biases(operator, experts * m * n, training)
    first = operator.contracted != EXPERT_WIDTH
    saved = operand * k + (element * n if first else 0)
    stashed, fetched = _stash(saved * experts * m, training)
    return OperatorKernels(
        (product(FORWARD, m, n, k), *cast(FORWARD, k), *added, *stashed),
        (*fetched, product(INPUT_GRADIENT, m, k, n), *weights, *cast(BACKWARD, n), *returned),
    )


def _stash(num_bytes: Number, training: TrainingSpec) -> tuple[tuple[Kernel, ...], ...]:
    """The copies of what the products of experts save, to pages and back from them.

    They are the input of each product, and the output of the first for the activation.
    """
    if not training.stack.stashes_experts:
        return (), ()
    return tuple(
        (StreamKernel("stash", "elementwise", way, 2 * num_bytes),) for way in (FORWARD, BACKWARD)
    )


def _expert_biases(
    operator: Operator, elements: Number, training: TrainingSpec
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels of biases that experts add outside of their products, forward and backward.

    `elements` are those of the product. Megatron-Core multiplies the second bias by the fp32
    weights of the tokens and adds it expert by expert (`WIDE_BIAS_BYTES`); the first is added in
    the product, and the halves of what it gives are clamped and joined (`CLAMP_BYTES`), as gpt-oss
    alone does, the one family whose experts have biases.
    """
    stack = training.stack
    if len(operator.parameters) == 1 or stack.fused_experts or not stack.widens_expert_biases:
        return (), ()
    second = operator.contracted == EXPERT_WIDTH
    forward, backward = WIDE_BIAS_BYTES if second else CLAMP_BYTES
    return (
        (StreamKernel("expert_bias", "elementwise", FORWARD, forward * elements),),
        (StreamKernel("expert_bias", "elementwise", BACKWARD, backward * elements),),
    )


def _attention(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    kernels = _flash if training.attention is AttentionKernel.FLASH else _unfused
    return kernels(operator, sizes, training)


def _flash(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Fused attention: the scores that its mask leaves, 2.5 times as many FLOPs backward (K2)."""
    batch, heads, seq, keys, head_dim = _attention_sizes(operator, sizes)
    attention = attention_of(operator)

    def kernel(way: str) -> FusedKernel:
        return fused_kernel(way, batch * heads, seq, keys, head_dim, attention)

    return OperatorKernels((kernel(FORWARD),), (kernel(BACKWARD),))


def attention_of(operator: Operator) -> Attention:
    """Returns the work of an attention operator."""
    assert operator.attention is not None, f"{operator.name} is attention"
    return operator.attention


def _attention_sizes(operator: Operator, sizes: LocalSizes) -> list[Number]:
    """Batch, heads, queries, keys and head_dim on one rank."""
    return [sizes.dim_size(operator, dim.name) for dim in operator.dims]


def _unfused(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Two products over S x S scores, a masked softmax and a dropout (EQUATIONS K2).

    The products are q k^T and probabilities times v. Dropout runs where its mask is saved.
    Backward: dP = dO v^T has the shape of q k^T; dV, dQ and dK that of p v. Causal attention
    shortens only the softmax's reads.
    """
    batch, heads, seq, keys, head_dim = _attention_sizes(operator, sizes)
    batch *= heads
    value_dim = attention_of(operator).value_dim or head_dim
    element = training.precision.num_bytes
    elements = batch * seq * keys
    dropped = any(tensor.element_bytes == 1 for tensor in operator.saved)

    def kernels(way: str, curve: str, half_passes: int, pv_products: int) -> tuple[Kernel, ...]:
        qk = product_kernel(curve, (batch, seq, keys, head_dim), element, element)
        pv = product_kernel(curve, (batch, seq, value_dim, keys), element, element)
        softmax = StreamKernel("softmax", "softmax", way, half_passes * elements * element // 2)
        run: tuple[Kernel, ...] = (qk, *(pv,) * pv_products, softmax)
        if not dropped:
            return run
        return (*run, StreamKernel("dropout", "dropout", way, (2 * element + 1) * elements))

    # half passes of the softmax over the scores; a causal one skips half of each read
    forward_passes, backward_passes = (3, 4) if attention_of(operator).causal else (4, 6)
    return OperatorKernels(
        kernels(FORWARD, BATCHED[0], forward_passes, 1),
        kernels(BACKWARD, BATCHED[1], backward_passes, 3),
    )


def _streaming(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Norms, activations, rotary: the bytes of the tensors (EQUATIONS K3).

    Forward: inputs read, outputs and the dropout mask written. Backward: output gradient and saved
    tensors read, input gradients written. A stack without fused kernels runs the operations of
    `PLAIN_BYTES` one by one.
    """
    if training.stack.fused_experts and operator.parallel_dim == EXPERT_WIDTH:
        return OperatorKernels((), ())  # its products have it
    read = _bytes_of(operator.inputs, operator, sizes)
    written = _bytes_of(operator.outputs, operator, sizes)
    dropped = [tensor for tensor in operator.saved if tensor.element_bytes == 1]
    masks = _bytes_of(dropped, operator, sizes)
    # other operators with several inputs save them, or put them side by side
    joins = len(operator.inputs) > 1 and operator.function not in ("rotary", "joined")
    if joins and len(dropped) == len(operator.saved):
        branches = len(operator.inputs) - 1
        return _residual(read, written, masks, branches, dropped=bool(dropped))
    name, like = _named(operator, dropped=bool(dropped))
    if name in training.stack.plain_kernels:
        return _plain(name, written / training.precision.num_bytes, training)
    saved = _bytes_of(operator.saved, operator, sizes)
    return OperatorKernels(
        (StreamKernel(name, like, FORWARD, read + written + masks),),
        (StreamKernel(name, like, BACKWARD, written + saved + read),),
    )


def _plain(name: str, elements: Number, training: TrainingSpec) -> OperatorKernels:
    """The operations of PyTorch in place of one fused kernel, which write `elements` at the end."""
    forward, backward = (
        (fixed + by_element * training.precision.num_bytes) * elements
        for fixed, by_element in PLAIN_BYTES[name]
    )
    return OperatorKernels(
        (StreamKernel(f"plain_{name}", "elementwise", FORWARD, forward),),
        (StreamKernel(f"plain_{name}", "elementwise", BACKWARD, backward),),
    )


def _named(operator: Operator, *, dropped: bool) -> tuple[str, str]:
    """The name of a streaming operation, and its class; `dropped` says if it saves a mask."""
    if operator.kind is OperatorKind.NORM:
        biased = len(operator.parameters) > 1 and operator.function != "qk_norm"
        return "layer_norm" if biased else "rms_norm", "norm"
    name = operator.function.lower()
    if name.endswith("activation"):
        gated = anywhere(operator.inputs[0].num_elements > operator.outputs[0].num_elements)
        name = "swiglu" if gated else "gelu"
    elif dropped:
        name = f"dropped_{name}"
    return name, "elementwise"


def _bytes_of(tensors: Sequence[Tensor], operator: Operator, sizes: LocalSizes) -> Number:
    """Bytes on one rank of tensors of an operator."""
    return sum(sizes.tensor_bytes(operator, tensor) for tensor in tensors)


def _residual(
    read: Number, written: Number, masks: Number, branches: int, *, dropped: bool
) -> OperatorKernels:
    """Dropout of the branches, added to the residual stream.

    Gradients of the branches pass unchanged or through the mask. The gradient that comes back from
    the norm before each branch is added to the stream's gradient (two reads, one write).
    """
    joined = StreamKernel("residual", "residual", BACKWARD, 3 * written, times=branches)
    if not dropped:
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


def _embedding(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Look-up: the bytes of the output in both passes, and the gradient of the table.

    The fitted share of the bandwidth covers masking and the scattered addition. The backward pass
    also zeroes, reads and writes the gradient of this rank's part of the table.
    """
    n_bytes = sum(sizes.made_bytes(operator, tensor) for tensor in operator.outputs)
    table_bytes = TABLE_PASSES * training.precision.num_bytes * sizes.used_elements(operator)
    parts = (
        StreamKernel("embedding", "embedding", BACKWARD, n_bytes),
        StreamKernel("table", "elementwise", BACKWARD, table_bytes),
    )
    return OperatorKernels(
        (StreamKernel("embedding", "embedding", FORWARD, n_bytes),),
        (StreamKernel("embedding", "embedding", BACKWARD, n_bytes + table_bytes, parts=parts),),
    )


def _cross_entropy(
    operator: Operator, sizes: LocalSizes, training: TrainingSpec
) -> OperatorKernels:
    """Vocabulary-parallel cross entropy: the bytes of this rank's logits.

    The fitted share of the bandwidth covers its un-fused fp32 passes.
    """
    n_bytes = _bytes_of(operator.inputs, operator, sizes)
    return _both("cross_entropy", "cross_entropy", n_bytes)


def _permuting(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    """Token copies are written in the order of their experts, or read in it and summed by weight.

    Both passes move each side once. After an exchange a rank with several experts orders what
    arrived, or before one what it returns: the copies are read and written once more. Where a stack
    sends a token once to a rank, its exchange reads and writes the tokens, and what arrived is read
    as it came and written as copies.
    """
    copies = operator.exchanged
    assert copies is not None, f"{operator.name} exchanges copies"
    tokens = operator.inputs[0] if operator.outputs[0] is copies else operator.outputs[0]
    n_bytes = sizes.tensor_bytes(operator, copies)
    whole = sizes.tensor_bytes(operator, tokens) + chosen(sizes.ep > 1, 3, 1) * n_bytes
    if training.stack.sends_tokens_once:
        arrived = ranks_met(sizes.ep, copies.size("chosen")) / copies.size("chosen")
        whole = chosen(sizes.ep > 1, (1 + arrived) * n_bytes, whole)
    return _both(operator.kind.value, "elementwise", whole)


def _both(name: str, like: str, n_bytes: Number) -> OperatorKernels:
    """One kernel of `n_bytes` in each pass."""
    return OperatorKernels(
        (StreamKernel(name, like, FORWARD, n_bytes),),
        (StreamKernel(name, like, BACKWARD, n_bytes),),
    )


def _view(operator: Operator, sizes: LocalSizes, training: TrainingSpec) -> OperatorKernels:
    return OperatorKernels((), ())


_KERNELS: dict[OperatorKind, Callable[[Operator, LocalSizes, TrainingSpec], OperatorKernels]] = {
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
