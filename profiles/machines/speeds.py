"""What is known of the speed of one device and of its node: fitted curves, and how much of a link
collectives reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.profiles.machines.curves import CollectiveCurve, FlashCurve, MatmulCurve, MemoryCurve
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
    """Speed of a fused attention kernel relative to the one that the device's flash curves are
    of.
    """

    __pydantic_config__ = _FORBID

    forward: float
    backward: float
    source: str


SAME_SPEED = FlashSpeed(forward=1.0, backward=1.0, source="the kernel of the curve")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compute:
    """Every curve of one device. `batched` are the products of un-fused attention.

    flash_kernels: relative speeds of fused attention kernels other than the one of the flash curves

    Of a machine's own profile:
    named           curves of single operations bound by memory (gelu, rms_norm, ...), instead of
                    their class's (elementwise, norm)
    dropped_flash   fused attention with dropout, which some devices run with another kernel:
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
    flash_kernels: Mapping[FlashKernel, FlashSpeed] = field(default_factory=dict)
    named: Mapping[str, PassCurves] = field(default_factory=dict)
    dropped_flash: tuple[FlashCurve, FlashCurve] | None = None

    def flash_speed(self, kernel: FlashKernel) -> FlashSpeed:
        """How fast `kernel` is beside the kernel of the flash curves."""
        return self.flash_kernels.get(kernel, SAME_SPEED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intra:
    """Between the GPUs of a node. The curves hold where the link runs at `link_bytes_per_s`; no
    other node uses them.

    kind: MEASURED where the curves' knots were measured on the machine itself
    link_share: share of the link's bandwidth that a ring reaches where no curve holds
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
    """Between nodes: the shares of the NICs' bandwidth that collectives and single messages reach.

    Of a machine's own profile:
    crossing          curves of groups across nodes, with knots that were measured
    node_bytes_per_s  of all NICs of a node together, where these curves hold
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
    """Seconds of the host for one layer: `layer_s`, and `byte_s` for every byte of its parameters
    on the rank.
    """

    __pydantic_config__ = _FORBID

    layer_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, n_bytes: float) -> float:
        return self.layer_s + self.byte_s * n_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InStep:
    """What a step adds to its operators' own times, measured on whole layers as `stack` runs them,
    for which alone it holds.

    kernel_slowdown     by what factor kernels take longer in a layer than alone
    forward_s           seconds of the host for one operator of the graph in the forward pass;
                        backward_s in the backward pass
    host_adds           whether these add to the operator's time (the host is the device), or bound
                        it (the host launches ahead)

    What layouts add, where the host's seconds do, beside what they send:
    divided_forward_s   for one operator that tensor parallelism divides; divided_backward_s in the
                        backward pass
    split_s             for one launch of a backward pass, where it is in two parts
    action_s            for one action of a pipeline's schedule: a forward or a backward pass of a
                        stage
    gather, reduce      of a layer that ZeRO shards: hooks, and copies into and out of buffers
    update              of a layer whose parameters are DTensors, by ZeRO or by tensor parallelism
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
    """What was measured between one device and its host: copies from and to pinned memory, and Adam
    in one process on the host, in the bytes that its price counts (costmodels/host/offload.py).
    None where nothing measured it.
    """

    __pydantic_config__ = _FORBID

    to_device_bytes_per_s: float | None = None
    from_device_bytes_per_s: float | None = None
    adam_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """The fitted constants of one device and its node. `name` is that of the device.

    Of a machine's own profile: `in_step`, `host`, and `contention`, what a second of communication
    costs the compute that it runs under.
    """

    __pydantic_config__ = _FORBID

    name: str
    compute: Compute
    intra: Intra
    inter: Inter
    in_step: InStep | None = None
    contention: float | None = None
    host: HostSpeed | None = None
