"""The kernels that one operator runs on one rank, forward and backward: shapes and bytes, no
machine (EQUATIONS K1, K2, K3, K5).

Prices (costmodels/operators/compute.py) and the cases that a profiler measures
(planner/calibration/profile_cases.py) both read them, so each kernel says which curve it is a point
of (`curve`) and at which sizes (`sizes`, in the curve's own order). FLOPs are those that run: a
causal fused kernel does half of the model FLOPs that `Operator.flops_*` state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import ALIGNED_BYTES, FLASH_BACKWARD_FLOPS, Product
from parplan.profiles.machines.hardware import Device
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import FlashKernel, Stack

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
