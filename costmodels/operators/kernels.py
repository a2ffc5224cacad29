"""Kernels: their shapes and bytes, without a machine (EQUATIONS K1, K2, K3, K5).

Prices (costmodels/operators/compute.py) and the profiler's cases
(planner/calibration/profile_cases.py) both read them, so each kernel names its curve (`curve`) and
its sizes in the order of that curve (`sizes`). FLOPs are those that run: a causal fused kernel does
half of the model FLOPs that `Operator.flops_*` state.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.elementwise import Number, chosen, gcd
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import ALIGNED_BYTES, FLASH_BACKWARD_FLOPS, Product
from parplan.profiles.machines.hardware import Device
from parplan.profiles.models.operator_graph import Attention
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import FlashKernel, Stack

FORWARD, BACKWARD = "forward", "backward"
# number of sizes of a point on the curve of such a kernel
PRODUCT_SIZES = 3
BATCHED_SIZES = 4
FUSED_SIZES = 3
STREAM_SIZES = 1
INPUT_GRADIENT, WEIGHT_GRADIENT = "input_gradient", "weight_gradient"
BATCHED = ("batched_forward", "batched_backward")
FP32_BYTES = 4
# Slowdown of a product whose rows are a multiple of only so many bytes. 2: from vTrain's
# single-node A100 rows, a head of 50,257 (odd) against one of 25,128; 4 and 8 are assumed between.
MISALIGNED = {16: 1.0, 8: 1.15, 4: 1.4, 2: 2.3}
# Slowdown of the batched products of un-fused attention where the features of a head are no
# multiple of 16 bytes, so that no tensor cores run them. From three of BLOOM's tuning runs on A100
# (h 13,824, tp 4, micro-batch 2): heads of 216, 144 and 108 features took 103.5, 107.1 and 147.4 s.
MISALIGNED_BATCHED = 12.0
CAUSAL = Attention(causal=True)


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A matrix product.

    The sizes of any kernel may be arrays, for many kernels at once.

    curve     a field of `Compute`: forward, input_gradient, weight_gradient, batched_forward or
              batched_backward
    slower    factor on its time for rows that are not aligned
    peak      key of the device's peak, of operands in another format than the training's precision
    grouped   true for one product over all experts of a rank, which has a curve of its own
    """

    curve: str
    product: Product
    slower: Number = 1.0
    peak: str = ""
    grouped: bool = False

    @property
    def sizes(self) -> tuple[Number, ...]:
        """(m, n, k), or (batch, m, n, k) for the batched products of un-fused attention."""
        product = self.product
        sizes = (product.m, product.n, product.k)
        return (product.batch, *sizes) if self.curve in BATCHED else sizes


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Fused attention of `heads` heads (batch included) of `seq` queries.

    keys      mean number of keys that a query meets
    """

    way: str
    heads: Number
    seq: Number
    keys: Number
    head_dim: Number
    flops: Number
    dropped: bool = False

    @property
    def curve(self) -> str:
        return f"dropped_flash.{self.way}" if self.dropped else f"flash_{self.way}"

    @property
    def sizes(self) -> tuple[Number, Number, Number]:
        """(heads with batch, sequence, head_dim)."""
        return self.heads, self.seq, self.head_dim


@dataclass(frozen=True, slots=True)
class StreamKernel:
    """A memory-bound operation that moves `n_bytes`.

    name     name of the operation, and of the machine's own curve of it
    like     class of operations (a field of `Compute`), whose curve is the fallback
    way      forward or backward; empty where the class has only one curve
    times    number of times it runs
    parts    kernels priced instead where the machine has no own curve of that name; None: itself
    """

    name: str
    like: str
    way: str
    n_bytes: Number
    times: int = 1
    parts: tuple[StreamKernel, ...] | None = None

    @property
    def curve(self) -> str:
        return f"{self.name}.{self.way}" if self.way else self.name

    @property
    def sizes(self) -> tuple[Number]:
        return (self.n_bytes,)


Kernel = ProductKernel | FusedKernel | StreamKernel


def ranks_met(parts: Number, copies: int) -> Number:
    """The mean number of `parts` that hold some of the `copies` experts of a token (EQUATIONS T3).

    p (1 - (1 - 1 / p)^k), where each of k experts lies on any of p parts, equally often.
    """
    return parts * (1 - (1 - 1 / parts) ** copies)


def update_kernels(
    num_parameters: float, training: TrainingSpec, moved_bytes: float | None = None
) -> tuple[StreamKernel, ...]:
    """The kernels of one update of `num_parameters` of a rank (EQUATIONS K5).

    moved_bytes: bytes that the update reads and writes; None for those of Adam

    The gradient norm and clipping come with it; they cost something only on a machine that measured
    them.
    """
    if moved_bytes is None:
        moved_bytes = adam_bytes_per_parameter(training) * num_parameters
    return (
        StreamKernel("optimizer", "optimizer", "", moved_bytes),
        StreamKernel(
            "gradient_norm",
            "",
            FORWARD,
            training.gradient_precision.num_bytes * num_parameters,
            parts=(),
        ),
    )


def adam_bytes_per_parameter(training: TrainingSpec) -> int:
    """Bytes that one Adam step touches per parameter (EQUATIONS K5), 28 in most cases.

    It reads and writes the fp32 master copy and the moments, reads the gradient and writes the
    16-bit parameter (in fp32 the parameter is the master). With fp32 gradients beside 16-bit
    weights they are 30.
    """
    return 4 * training.stack.moment_bytes + update_bytes_per_parameter(training)


def update_bytes_per_parameter(training: TrainingSpec) -> int:
    """Bytes that any update touches per parameter beside the moments (EQUATIONS K5).

    Without an fp32 master copy it reads and writes the parameter.
    """
    width, master = training.precision.num_bytes, training.stack.master_bytes
    values = 2 * FP32_BYTES
    if training.precision is not Precision.FP32:
        values = 2 * master + width if master else 2 * width
    return values + training.gradient_precision.num_bytes


def misaligned(row_bytes: Number) -> Number:
    """The slowdown of a product whose matrices have rows of `row_bytes`."""
    slower: Number = MISALIGNED[ALIGNED_BYTES]
    for aligned_bytes in (8, 4, 2):  # rows of odd length count as those of 2 bytes
        slower = chosen(row_bytes % (2 * aligned_bytes) != 0, MISALIGNED[aligned_bytes], slower)
    return slower


def product_kernel(
    curve: str,
    sizes: tuple[Number, ...],
    operand_bytes: float,
    result_bytes: int,
    *,
    peak: str = "",
) -> ProductKernel:
    """The product of `curve` with `sizes`, slower where rows of its weight are not aligned."""
    if len(sizes) == BATCHED_SIZES:
        batch, m, n, k = sizes
        product = Product(
            m=m, n=n, k=k, batch=batch, operand_bytes=operand_bytes, result_bytes=result_bytes
        )
        aligned = (gcd(n, k) * operand_bytes) % ALIGNED_BYTES == 0
        return ProductKernel(curve, product, slower=chosen(aligned, 1.0, MISALIGNED_BATCHED))
    m, n, k = sizes
    weight = (m, n) if curve == WEIGHT_GRADIENT else (n, k)
    product = Product(m=m, n=n, k=k, operand_bytes=operand_bytes, result_bytes=result_bytes)
    slower = misaligned(gcd(*weight) * operand_bytes)
    return ProductKernel(curve, product, slower=slower, peak=peak)


def fused_kernel_of(stack: Stack, device: Device) -> FlashKernel:
    """Returns the fused attention kernel that a stack runs on a device.

    Raises ConfigError where the stack has none for it.
    """
    if device.flash_kernel is not None:
        return device.flash_kernel
    kernel = stack.flash_kernel_on(device.compute_capability)
    if kernel is None:
        known = ", ".join(
            f"{each.kernel} from {each.from_capability:g} on" for each in stack.flash_kernels
        )
        raise ConfigError(
            f"{stack.name} has no fused attention for {device.name} of compute capability "
            f"{device.compute_capability} (it has {known or 'none'})",
            hint="use --attention unfused",
        )
    return kernel


def fused_kernel(
    way: str,
    heads: Number,
    seq: Number,
    keys: Number,
    head_dim: Number,
    attention: Attention = CAUSAL,
) -> FusedKernel:
    """Fused attention of `heads` heads, batch included, of `seq` queries over `keys` keys.

    Its speed is that of heads with the mean of the features of a key and of a value.
    """
    met = attention.keys_met(keys)
    head_dim = (head_dim + (attention.value_dim or head_dim)) // 2
    flops = 4.0 * heads * seq * met * head_dim * (FLASH_BACKWARD_FLOPS if way == BACKWARD else 1.0)
    return FusedKernel(way, heads, seq, met, head_dim, flops, attention.dropped)
