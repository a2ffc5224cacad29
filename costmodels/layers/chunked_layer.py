"""What one block whose states are held in chunks costs a device, by home (EQUATIONS O2, O4, O5,
O6): plain numbers that add up.

Bytes per parameter, p of a parameter (2 in 16 bits), g of a gradient (2 or 4), of which a rank owns
one of D parts:

                    DEVICE                  OPTIMIZER                        HOST
    16 bits         device p + g + 12       device p + g     host g + 12     device 0     host p + g
                    + 12
    in parameters   device 2 + 12           device 2         host 2 + 12     device 0     host 2 +
                    12
    fp32            device 4 + 4 + 8        device 4 + 4     host 4 + 12     device 0     host 4 + 4
                    + 8

in parameters: the gradient lies where its parameter was, valid with 16-bit gradients and one
micro-batch a step. The host keeps of OPTIMIZER blocks the gradients that came, and writes what it
returns over them. A HOST block takes device memory only while it is
there: its own chunks, or the gathered groups, and the gradients of one backward pass.

Copies use the device's copy engines, no multiprocessors, and of its memory less than a tenth of the
bandwidth: they slow nothing down. To the device and from it are two streams (PCIe is full duplex).
What the host does is not hidden: it is the process that launches kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.host.offload import copy_time, host_adam_time, host_time
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.layer_price import LayerTime, under
from parplan.costmodels.layers.model_states import MASTER_BYTES, MOMENTS_BYTES, StateBytes
from parplan.costmodels.operators.compute import optimizer_time
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds

STAGED_CHUNKS = 2  # of gradients of HOST blocks that are on their way to be added up
ADDED_WIDTHS = 3  # of a gradient that the host adds to what it has: both are read and one written


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How a device holds chunks: what a full one evicts, and how much its tensors may fill.

    device_bytes: stated, by pipeline rank where there are several; None for what the memory limit
    leaves of each mesh's devices
        (costmodels/memory/rank_memory.py, `usable_bytes`)
    limit_bytes: the memory limit of a device, None for all of its memory
    """

    eviction: Eviction = Eviction.OPT
    device_bytes: int | tuple[int, ...] | None = None
    limit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block of one device at one home, its padding included. Of a step with M micro-batches:

    device, host      states that are always there, by class
    used_bytes        of parameters, beyond `device`, while the block runs: gathered groups, or
                      fetched chunks
    fetched_bytes     to the device in a pass, of 2 M, that finds none of the block's chunks there
                      (HOST)
    sent_bytes        from the device in each of M backward passes (HOST)
    returned_bytes, left_bytes      to the device and from it once a step (OPTIMIZER)
    gathered_bytes, reduced_bytes   of the collectives of a pass: in each of 2 M passes, and in each
                                    of M backward passes
    forward_s, backward_s           of the collectives, in a micro-batch, what compute does not hide
    fetch_s, send_s, return_s, leave_s      of one such copy alone on its stream
    added_s           the host adds the gradients of a micro-batch to those before it: M - 1 times a
                      step
    host_adam_s, device_adam_s      once a step
    """

    device: StateBytes
    host: StateBytes
    used_bytes: int
    fetched_bytes: int
    sent_bytes: int
    returned_bytes: int
    left_bytes: int
    gathered_bytes: int
    reduced_bytes: int
    forward_s: float
    backward_s: float
    fetch_s: float
    send_s: float
    return_s: float
    leave_s: float
    added_s: float
    host_adam_s: float
    device_adam_s: float


def writes_over_parameters(training: TrainingSpec, num_micro_batches: int) -> bool:
    """Whether gradients may lie where their parameters are (EQUATIONS O2): in 16 bits, and no other
    micro-batch needs them.
    """
    return (
        training.precision is not Precision.FP32
        and training.gradient_precision is not Precision.FP32
        and num_micro_batches == 1
    )


def sent_precision(training: TrainingSpec, in_parameters: bool) -> Precision:
    """What gradients are reduced and sent in: that of the parameters whose place they take, or
    their own.
    """
    return training.precision if in_parameters else training.gradient_precision


def state_widths(
    home: StateLocation, training: TrainingSpec, in_parameters: bool
) -> tuple[StateBytes, StateBytes]:
    """Bytes per parameter that are always on the device, and on the host: the table above."""
    width, gradient = (
        training.precision.num_bytes,
        0 if in_parameters else training.gradient_precision.num_bytes,
    )
    sixteen = training.precision is not Precision.FP32
    optimizer = MOMENTS_BYTES + MASTER_BYTES * sixteen
    whole = StateBytes(width, gradient, optimizer)
    if home is StateLocation.DEVICE:
        return whole, StateBytes()
    if home is StateLocation.HOST:
        return StateBytes(), whole
    return StateBytes(width, gradient, 0), StateBytes(
        0, training.gradient_precision.num_bytes, MASTER_BYTES + MOMENTS_BYTES
    )


def times(widths: StateBytes, elements: int) -> StateBytes:
    """Bytes of so many parameters."""
    return StateBytes(
        widths.parameters * elements, widths.gradients * elements, widths.optimizer * elements
    )


def block_cost(
    home: StateLocation,
    elements: int,
    time: LayerTime,
    *,
    mesh: Mesh,
    in_parameters: bool,
    machine: Machine,
    training: TrainingSpec,
) -> BlockCost:
    """A block whose chunks have `elements` on all ranks together, padding included, and that takes
    `time` in a micro-batch.
    """
    own = -(-elements // mesh.dp)
    width, gradient = (
        training.precision.num_bytes,
        sent_precision(training, in_parameters).num_bytes,
    )
    device, host = (times(widths, own) for widths in state_widths(home, training, in_parameters))
    gather, reduce = group_collectives(
        elements, mesh, machine, training, in_parameters=in_parameters
    )
    window, cluster = training.overlap_grad_reduce, machine.cluster
    on_host, apart = home is StateLocation.HOST, home is StateLocation.OPTIMIZER
    return BlockCost(
        device=device,
        host=host,
        used_bytes=width * (elements if mesh.dp > 1 else own * on_host),
        fetched_bytes=width * own * on_host,
        sent_bytes=gradient * own * on_host,
        returned_bytes=width * own * apart,
        left_bytes=gradient * own * apart,
        gathered_bytes=width * elements * (mesh.dp > 1),
        reduced_bytes=gradient * elements * (mesh.dp > 1),
        forward_s=(under(gather, time.forward_s, machine) if window else gather).value_s,
        backward_s=(
            under(gather + reduce, time.backward_s, machine) if window else gather + reduce
        ).value_s,
        fetch_s=copy_time(width * own * on_host, cluster).value_s,
        send_s=copy_time(gradient * own * on_host, cluster, to_host=True).value_s,
        return_s=copy_time(width * own * apart, cluster).value_s,
        leave_s=copy_time(gradient * own * apart, cluster, to_host=True).value_s,
        added_s=added_time(own * on_host, machine, training).value_s,
        host_adam_s=0.0
        if home is StateLocation.DEVICE
        else host_update_time(own, machine, training).value_s,
        device_adam_s=optimizer_time(own, machine, training).value_s
        if home is StateLocation.DEVICE
        else 0.0,
    )


def group_collectives(
    elements: int,
    mesh: Mesh,
    machine: Machine,
    training: TrainingSpec,
    *,
    in_parameters: bool,
) -> tuple[Seconds, Seconds]:
    """One gather of `elements` parameters of all data-parallel ranks together, and one
    reduce-scatter of their gradients.
    """
    if mesh.dp == 1:
        return ZERO, ZERO
    width, where = training.precision.num_bytes, place(mesh, Axis.DP, machine.cluster.gpus_per_node)
    gradient = sent_precision(training, in_parameters).num_bytes
    gather = collective_time(Collective.ALL_GATHER, width * elements, where, machine)
    reduce = collective_time(Collective.REDUCE_SCATTER, gradient * elements, where, machine)
    return machine.corrected("data", gather), machine.corrected("data", reduce)


def host_update_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of Adam on the host over `num_parameters` of each rank; where the device is the host,
    as it updates its own.
    """
    if machine.cluster.device.is_host:
        return optimizer_time(num_parameters, machine, training)
    return host_adam_time(num_parameters, machine.cluster)


def added_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds in which the host adds gradients of so many parameters to others: two are read and
    one written.
    """
    return host_time(
        ADDED_WIDTHS * training.gradient_precision.num_bytes * num_parameters, machine.cluster
    )
