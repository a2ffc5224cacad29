"""Speeds of one device and its node: fitted curves, and shares of links that collectives reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.profiles.machines.curves import (
    CollectiveCurve,
    FlashCurve,
    GroupedCurve,
    MatmulCurve,
    MemoryCurve,
)
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import FlashKernel

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassCurves:
    """The forward and the backward curve of an operation bound by memory."""

    __pydantic_config__ = _FORBID

    forward: MemoryCurve
    backward: MemoryCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashSpeed:
    """Speed of a fused attention kernel relative to the kernel of the device's flash curves."""

    __pydantic_config__ = _FORBID

    forward: float
    backward: float
    source: str


# The median of the fitted curves, of A100-PCIe and of B200. Megatron's expert layers on H100 take
# 0.94 to 1.2 of this price (benchmarks/prices/grouped_products.py).
ASSUMED_GROUPED = GroupedCurve(
    launch_s=4.1e-6,
    kind=Kind.ANALYTIC,
    source="median of the devices with grouped products",
    slowdown=1.0,
)
SAME_SPEED = FlashSpeed(forward=1.0, backward=1.0, source="the kernel of the curve")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compute:
    """Every curve of one device.

    The curves `batched_*` are those of the products of un-fused attention.

    grouped: the products of experts, None where nobody measured them (`ASSUMED_GROUPED`)
    flash_kernels: relative speeds of fused attention kernels other than that of the flash curves

    Only in a user's own profile:
    named          curves of single operations bound by memory (gelu, rms_norm, ...), used instead
                   of the curve of their class (elementwise, norm)
    dropped_flash  fused attention with dropout, which some devices run with another kernel:
                   forward, backward
    """

    __pydantic_config__ = _FORBID

    forward: MatmulCurve
    input_gradient: MatmulCurve
    weight_gradient: MatmulCurve
    batched_forward: MatmulCurve
    batched_backward: MatmulCurve
    flash_forward: FlashCurve
    flash_backward: FlashCurve
    norm: PassCurves
    elementwise: PassCurves
    residual: PassCurves
    softmax: PassCurves
    dropout: PassCurves
    embedding: PassCurves
    cross_entropy: PassCurves
    optimizer: MemoryCurve
    grouped: GroupedCurve | None = None
    flash_kernels: Mapping[FlashKernel, FlashSpeed] = field(default_factory=dict)
    named: Mapping[str, PassCurves] = field(default_factory=dict)
    dropped_flash: tuple[FlashCurve, FlashCurve] | None = None

    def flash_speed(self, kernel: FlashKernel) -> FlashSpeed:
        """Returns the speed of `kernel` relative to the kernel of the flash curves."""
        return self.flash_kernels.get(kernel, SAME_SPEED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intra:
    """Speeds between the GPUs of a node.

    The curves hold where the link runs at `link_bytes_per_s`; other nodes do not use them.

    kind        MEASURED where the curves' knots were measured on the machine itself
    link_share  share of the link's bandwidth that a ring reaches where no curve holds
    """

    __pydantic_config__ = _FORBID

    link_bytes_per_s: float
    link_share: float
    point_to_point_share: float
    kind: Kind
    source: str
    curves: tuple[CollectiveCurve, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inter:
    """Speeds between nodes: shares of the NICs' bandwidth that collectives and messages reach.

    Only in a user's own profile:
    crossing          curves of groups across nodes, with measured knots
    node_bytes_per_s  bandwidth of all NICs of a node together, at which these curves hold
    """

    __pydantic_config__ = _FORBID

    nic_share: float
    point_to_point_share: float
    kind: Kind
    source: str
    crossing: tuple[CollectiveCurve, ...] = ()
    node_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds of the host for one layer.

    layer_s: seconds for each layer
    byte_s: seconds for each byte of the layer's parameters on the rank
    """

    __pydantic_config__ = _FORBID

    layer_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, n_bytes: float) -> float:
        return self.layer_s + self.byte_s * n_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InStep:
    """Costs of a step beyond its operators' own times, measured on whole layers.

    They hold for `stack` alone, the software that ran the layers.

    kernel_slowdown  factor by which kernels take longer in a layer than alone
    forward_s        seconds of the host for one operator of the graph in the forward pass
    backward_s       the same in the backward pass
    host_adds        True if these add to the operator's time (the host is the device), else
                     they bound it (the host launches ahead)

    Costs of layouts beside their messages, where the host's seconds add to an operator's time:
    divided_forward_s   for one operator that tensor parallelism divides, in the forward pass
    divided_backward_s  the same in the backward pass
    split_s             for one launch of a backward pass that is split into two parts
    action_s            for one action of a pipeline's schedule: a forward or a backward pass of a
                        stage
    gather, reduce      for a layer that ZeRO shards: hooks, and copies into and out of buffers
    update              for a layer whose parameters are DTensors, by ZeRO or by tensor parallelism
    """

    __pydantic_config__ = _FORBID

    stack: str
    kernel_slowdown: float
    forward_s: float
    backward_s: float
    host_adds: bool
    source: str
    divided_forward_s: float = 0.0
    divided_backward_s: float = 0.0
    split_s: float = 0.0
    action_s: float = 0.0
    gather: LayerCost = LayerCost()
    reduce: LayerCost = LayerCost()
    update: LayerCost = LayerCost()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """Speeds measured between one device and its host, None where not measured.

    The copies are from and to pinned memory; Adam runs in one process on the host, in the bytes
    that its price counts (costmodels/host/offload.py).
    """

    __pydantic_config__ = _FORBID

    to_device_bytes_per_s: float | None = None
    from_device_bytes_per_s: float | None = None
    adam_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """The fitted constants of one device and its node. `name` is that of the device.

    Only in a user's own profile: `in_step`, `host`, and `contention`, the seconds that a second of
    communication costs the compute that it runs under.
    """

    __pydantic_config__ = _FORBID

    name: str
    compute: Compute
    intra: Intra
    inter: Inter
    in_step: InStep | None = None
    contention: float | None = None
    host: HostSpeed | None = None
