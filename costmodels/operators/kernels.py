"""The kernels that one operator runs on one rank, forward and backward: shapes and bytes, no
machine (EQUATIONS K1, K2, K3, K5).

Prices (costmodels/operators/compute.py) and the cases that a profiler measures
(planner/calibration/profile_cases.py) both read them, so each kernel says which curve it is a point
of (`curve`) and at which sizes (`sizes`, in the curve's own order). FLOPs are those that run: a
causal fused kernel does half of the model FLOPs that `Operator.flops_*` state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import ALIGNED_BYTES, FLASH_BACKWARD_FLOPS, Product
from parplan.profiles.machines.hardware import Device
from parplan.profiles.models.operator_graph import Operator, OperatorKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import AttentionKernel, FlashKernel, Stack

FORWARD, BACKWARD = "forward", "backward"
PRODUCT_SIZES, BATCHED_SIZES, FUSED_SIZES, STREAM_SIZES = (
    3,
    4,
    3,
    1,
)  # how many sizes a point of such a kernel has
INPUT_GRADIENT, WEIGHT_GRADIENT = "input_gradient", "weight_gradient"
BATCHED = ("batched_forward", "batched_backward")
FP32_BYTES = 4
TABLE_PASSES = 3  # over the gradient of an embedding table: zeroed, read and written
# How many times as long a product takes whose rows are a multiple of fewer bytes. 2: what vTrain's
# single-node A100 rows say of a head of 50,257 (odd) against one of 25,128; 4 and 8 are assumed
# between.
MISALIGNED = {16: 1.0, 8: 1.15, 4: 1.4, 2: 2.3}
ADAM_STATE_BYTES = 24  # fp32 master copy and two moments, each read and written


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A matrix product, `curve` a field of `Compute`: forward, input_gradient, weight_gradient,
    batched_forward or batched_backward.

    slower    how many times as long it takes for rows that are not aligned
    fp8       whether its operands are
    grouped   whether it is one product for all experts of a rank, which no curve is of
    """

    curve: str
    product: Product
    slower: float = 1.0
    fp8: bool = False
    grouped: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """(m, n, k); of un-fused attention's (batch, m, n, k), without which its time says nothing
        of its speed.
        """
        of = self.product
        return (of.batch, of.m, of.n, of.k) if self.curve in BATCHED else (of.m, of.n, of.k)


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Fused attention of `heads` heads (batch included) of `seq` queries, each of which meets
    `keys` keys in the mean.
    """

    way: str
    heads: int
    seq: int
    keys: float
    head_dim: int
    flops: float
    dropped: bool = False

    @property
    def curve(self) -> str:
        return f"dropped_flash.{self.way}" if self.dropped else f"flash_{self.way}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(heads with batch, sequence, head_dim)."""
        return self.heads, self.seq, self.head_dim


@dataclass(frozen=True, slots=True)
class StreamKernel:
    """An operation bound by memory that moves `n_bytes`.

    name     of the operation, and of a machine's own curve of it
    like     the class of operations (a field of `Compute`) whose curve it has on a machine without
             its own
    way      forward or backward; empty where the class has one curve only
    times    how often it runs
    parts    what is priced instead where the machine has no own curve of that name; None: itself
    """

    name: str
    like: str
    way: str
    n_bytes: float
    times: int = 1
    parts: tuple[StreamKernel, ...] | None = None

    @property
    def curve(self) -> str:
        return f"{self.name}.{self.way}" if self.way else self.name

    @property
    def sizes(self) -> tuple[float]:
        return (self.n_bytes,)


Kernel = ProductKernel | FusedKernel | StreamKernel


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


def update_kernels(num_parameters: float, training: TrainingSpec) -> tuple[StreamKernel, ...]:
    """One Adam step over `num_parameters` of a rank (EQUATIONS K5), after the norm of their
    gradients and the clipping by it, which cost something only on a machine that measured them.
    """
    return (
        StreamKernel(
            "optimizer", "optimizer", "", adam_bytes_per_parameter(training) * num_parameters
        ),
        StreamKernel(
            "gradient_norm",
            "",
            FORWARD,
            training.gradient_precision.num_bytes * num_parameters,
            parts=(),
        ),
    )


def adam_bytes_per_parameter(training: TrainingSpec) -> int:
    """Bytes that one Adam step touches per parameter (EQUATIONS K5): 28, or 30 with fp32 gradients
    beside 16-bit weights.

    fp32 master and moments read and written, the gradient read, the 16-bit parameter written (fp32:
    it is the master).
    """
    parameter = 0 if training.precision is Precision.FP32 else training.precision.num_bytes
    return ADAM_STATE_BYTES + training.gradient_precision.num_bytes + parameter


def misaligned(row_bytes: int) -> float:
    """How many times as long a product takes whose matrices have rows of `row_bytes`."""
    return MISALIGNED[max(2, math.gcd(row_bytes, ALIGNED_BYTES))]


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


def product_kernel(
    curve: str,
    sizes: tuple[int, ...],
    operand_bytes: int,
    result_bytes: int,
    *,
    fp8: bool = False,
) -> ProductKernel:
    """The product of `curve` whose `sizes` are those; slower where rows of its weight are not
    aligned.
    """
    if len(sizes) == BATCHED_SIZES:
        batch, m, n, k = sizes
        return ProductKernel(
            curve,
            Product(
                m=m, n=n, k=k, batch=batch, operand_bytes=operand_bytes, result_bytes=result_bytes
            ),
        )
    m, n, k = sizes
    weight = (m, n) if curve == WEIGHT_GRADIENT else (n, k)
    of = Product(m=m, n=n, k=k, operand_bytes=operand_bytes, result_bytes=result_bytes)
    return ProductKernel(curve, of, slower=misaligned(math.gcd(*weight) * operand_bytes), fp8=fp8)


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


def fused_kernel_of(stack: Stack, device: Device) -> FlashKernel:
    """The fused attention kernel that a stack runs on a device. Raises ConfigError where it has
    none for it.
    """
    kernel = stack.flash_kernel_on(device.compute_capability)
    if kernel is None:
        known = (
            ", ".join(
                f"{each.kernel} from {each.from_capability:g} on" for each in stack.flash_kernels
            )
            or "none"
        )
        raise ConfigError(
            f"{stack.name} has no fused attention for {device.name} of compute capability {device.compute_capability} (it has {known})",
            hint="use --attention unfused",
        )
    return kernel


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


def fused_kernel(
    way: str,
    heads: int,
    seq: int,
    keys: int,
    head_dim: int,
    *,
    causal: bool = True,
    dropped: bool = False,
) -> FusedKernel:
    """Fused attention of `heads` heads, batch included, of `seq` queries over `keys` keys."""
    met = keys / 2 if causal else float(keys)
    flops = 4.0 * heads * seq * met * head_dim * (FLASH_BACKWARD_FLOPS if way == BACKWARD else 1.0)
    return FusedKernel(way, heads, seq, met, head_dim, flops, dropped)


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
