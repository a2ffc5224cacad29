"""Cost of one block whose states are held in chunks (EQUATIONS O2, O4, O5, O6).

Bytes per parameter by location, p of a parameter (2 in 16 bits), g of a gradient (2 or 4), of which
a rank owns one of D parts:

                    DEVICE              OPTIMIZER                     HOST
    16 bits         device p + g + 12   device p + g   host g + 12    device 0   host p + g + 12
    in parameters   device 2 + 12       device 2       host 2 + 12    device 0   host 2 + 12
    fp32            device 4 + 4 + 8    device 4 + 4   host 4 + 12    device 0   host 4 + 4 + 8

in parameters: the gradient lies where its parameter was, valid with 16-bit gradients and one
micro-batch a step. The host stores the gradients of OPTIMIZER blocks and writes the returned
parameters over them. A HOST block takes device memory only while it is there: its own chunks, or
the gathered groups, and the gradients of one backward pass.

Copies use the device's copy engines, no multiprocessors, and less than a tenth of its memory
bandwidth: they slow nothing down. To the device and from it are two streams (PCIe is full duplex).
Work of the host is not hidden: the host is the process that launches kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.hiding import under
from parplan.costmodels.communication.mesh import Axis, Mesh, place, place_copies
from parplan.costmodels.host.offload import copy_time, host_adam_time, host_time
from parplan.costmodels.host.state_location import ChunkCommunication, Eviction, StateLocation
from parplan.costmodels.layers.chunk_owners import expert_owners, own_elements
from parplan.costmodels.layers.layer_price import LayerTime
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.operators.compute import OperatorTime, kernel_time, optimizer_time
from parplan.costmodels.operators.kernels import FORWARD, StreamKernel
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds

# A broadcast scatters the chunk and gathers it again: twice the bytes of a gather (EQUATIONS O5).
BROADCAST_GATHERS = 2
STAGED_CHUNKS = 2  # gradient chunks of HOST blocks on their way to be added up
ADDED_WIDTHS = 3  # accesses per gradient that the host adds: two are read and one written


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Settings of a device that holds chunks: the eviction rule, and the bytes of chunk tensors.

    device_bytes  stated, by pipeline rank where there are several; None for the bytes that the
                  memory limit leaves of each mesh's devices (costmodels/memory/rank_memory.py,
                  `usable_bytes`)
    limit_bytes   the memory limit of a device, None for all of its memory
    communication   how data-parallel ranks gather and reduce the chunks of a group
    """

    eviction: Eviction = Eviction.OPT
    communication: ChunkCommunication = ChunkCommunication.GROUP
    device_bytes: int | tuple[int, ...] | None = None
    limit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block of one device at one location, its padding included, in a step of M micro-batches.

    device, host      states that are always there, by class
    used_bytes        of parameters, beyond `device`, while the block runs: gathered groups, or
                      fetched chunks
    fetched_bytes     to the device in a pass, of 2 M, that finds none of the block's chunks there
                      (HOST)
    sent_bytes        from the device in each of M backward passes (HOST)
    returned_bytes, left_bytes      to the device and from it once a step (OPTIMIZER)
    gathered_bytes, reduced_bytes   of the collectives of a pass: in each of 2 M passes, and in each
                                    of M backward passes
    forward_s, backward_s           exposed seconds of the collectives in a micro-batch
    fetch_s, send_s, return_s, leave_s      of one such copy alone on its stream
    added_s           the host adds the gradients of a micro-batch to the earlier ones: M - 1 times
                      a step
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

    def waiting(self, wait: OperatorTime) -> BlockCost:
        """Returns the cost with a wait in every micro-batch, beside its collectives."""
        return replace(
            self,
            forward_s=self.forward_s + wait.forward.value_s,
            backward_s=self.backward_s + wait.backward.value_s,
        )


def writes_over_parameters(training: TrainingSpec, num_micro_batches: int) -> bool:
    """Returns true when gradients may lie where their parameters are (EQUATIONS O2).

    It needs 16 bits and one micro-batch, so that no other micro-batch reads the parameters.
    """
    return (
        training.precision is not Precision.FP32
        and training.gradient_precision is not Precision.FP32
        and num_micro_batches == 1
    )


def sent_precision(training: TrainingSpec, in_parameters: bool) -> Precision:
    """The precision of reduced and sent gradients.

    It is their own, or that of the parameters whose place they take.
    """
    return training.precision if in_parameters else training.gradient_precision


def state_widths(
    location: StateLocation, training: TrainingSpec, in_parameters: bool
) -> tuple[StateBytes, StateBytes]:
    """Bytes per parameter that are always on the device, and on the host: the module's table."""
    width = training.precision.num_bytes
    gradient = 0 if in_parameters else training.gradient_precision.num_bytes
    stack = training.stack
    optimizer = 2 * stack.moment_bytes
    if training.precision is not Precision.FP32:
        optimizer += stack.master_bytes
    whole = StateBytes(width, gradient, optimizer)
    if location is StateLocation.DEVICE:
        return whole, StateBytes()
    if location is StateLocation.HOST:
        return StateBytes(), whole
    host_gradient = training.gradient_precision.num_bytes
    host = StateBytes(0, host_gradient, stack.master_bytes + 2 * stack.moment_bytes)
    return StateBytes(width, gradient, 0), host


def states_of_elements(widths: StateBytes, elements: int) -> StateBytes:
    """Bytes of `elements` parameters."""
    return StateBytes(
        widths.parameters * elements, widths.gradients * elements, widths.optimizer * elements
    )


def block_cost(
    location: StateLocation,
    elements: int,
    time: LayerTime,
    *,
    mesh: Mesh,
    in_parameters: bool,
    machine: Machine,
    training: TrainingSpec,
    experts: int = 0,
) -> BlockCost:
    """Prices a block that takes `time` in a micro-batch.

    elements    elements of its chunks on all their owners together, padding included
    experts     elements among them that have owners of their own (`expert_owners`)
    """
    owned = own_elements(elements, experts, mesh)
    gathered = elements if mesh.dp > 1 else 0
    fetched = owned if location is StateLocation.HOST else 0
    returned = owned if location is StateLocation.OPTIMIZER else 0
    width = training.precision.num_bytes
    gradient = sent_precision(training, in_parameters).num_bytes
    device_widths, host_widths = state_widths(location, training, in_parameters)
    forward, reduce = group_collectives(
        elements, mesh, machine, training, in_parameters=in_parameters, experts=experts
    )
    backward = forward + reduce
    if training.overlap_grad_reduce:
        forward = under(forward, time.forward_s, machine)
        backward = under(backward, time.backward_s, machine)
    on_device, cluster = location is StateLocation.DEVICE, machine.cluster
    update = optimizer_time if on_device else host_update_time
    adam_s = update(owned, machine, training).value_s
    return BlockCost(
        device=states_of_elements(device_widths, owned),
        host=states_of_elements(host_widths, owned),
        used_bytes=width * (gathered or fetched),
        fetched_bytes=width * fetched,
        sent_bytes=gradient * fetched,
        returned_bytes=width * returned,
        left_bytes=gradient * returned,
        gathered_bytes=width * gathered,
        reduced_bytes=gradient * gathered,
        forward_s=forward.value_s,
        backward_s=backward.value_s,
        fetch_s=copy_time(width * fetched, cluster).value_s,
        send_s=copy_time(gradient * fetched, cluster, to_host=True).value_s,
        return_s=copy_time(width * returned, cluster).value_s,
        leave_s=copy_time(gradient * returned, cluster, to_host=True).value_s,
        added_s=added_time(fetched, machine, training).value_s,
        host_adam_s=0.0 if on_device else adam_s,
        device_adam_s=adam_s if on_device else 0.0,
    )


def chunk_by_chunk(
    cost: BlockCost,
    collectives: tuple[Seconds, Seconds],
    time: LayerTime,
    machine: Machine,
    training: TrainingSpec,
) -> BlockCost:
    """Returns the cost of a block whose chunks are gathered and reduced one after the other.

    Nothing hides the reduction: autograd's gradients wait for it.

    collectives    of `group_collectives`
    """
    gather, reduce = collectives
    forward, backward = gather, gather
    if training.overlap_grad_reduce:
        forward = under(gather, time.forward_s, machine)
        backward = under(gather, time.backward_s, machine)
    return replace(cost, forward_s=forward.value_s, backward_s=(backward + reduce).value_s)


def gradient_chunks(ranks: int, communication: ChunkCommunication) -> int:
    """Returns the chunks of gradients that a rank holds at once of a group that is reduced."""
    return 1 if communication is ChunkCommunication.SINGLE else ranks


def group_collectives(
    elements: int,
    mesh: Mesh,
    machine: Machine,
    training: TrainingSpec,
    *,
    in_parameters: bool,
    communication: ChunkCommunication = ChunkCommunication.GROUP,
    experts: int = 0,
) -> tuple[Seconds, Seconds]:
    """Seconds of one gather of `elements` parameters and one reduce-scatter of their gradients.

    They are the parameters of all data-parallel ranks together. One chunk after the other, each of
    dp chunks is broadcast and reduced in messages that are as much smaller (EQUATIONS O5). The
    `experts` among them have owners of their own, whose collectives follow the others.
    """
    if mesh.dp == 1:
        return ZERO, ZERO
    if experts:
        shared = group_collectives(
            elements - experts, mesh, machine, training, in_parameters=in_parameters
        )
        own = _expert_collectives(experts, mesh, machine, training, in_parameters=in_parameters)
        return shared[0] + own[0], shared[1] + own[1]
    width = training.precision.num_bytes
    where = place(mesh, Axis.DP, machine.cluster.gpus_per_node)
    gradient = sent_precision(training, in_parameters).num_bytes
    single = communication is ChunkCommunication.SINGLE
    messages = mesh.dp if single else 1
    part = elements / messages
    gather = collective_time(Collective.ALL_GATHER, width * part, where, machine)
    reduce = collective_time(Collective.REDUCE_SCATTER, gradient * part, where, machine)
    gather, reduce = gather.scaled(messages), reduce.scaled(messages)
    if single:
        gather = gather.scaled(BROADCAST_GATHERS)
    return machine.corrected("data", gather), machine.corrected("data", reduce)


def _expert_collectives(
    experts: int, mesh: Mesh, machine: Machine, training: TrainingSpec, *, in_parameters: bool
) -> tuple[Seconds, Seconds]:
    """Seconds of a gather and a reduce-scatter of `experts` elements over the owners of experts.

    A single owner copies its chunk to the gathered group, and the gradients back.
    """
    widths = training.precision.num_bytes, sent_precision(training, in_parameters).num_bytes
    owners = expert_owners(mesh)
    if owners == 1:
        copies = (StreamKernel("copy", "elementwise", FORWARD, 2 * w * experts) for w in widths)
        gather, reduce = (kernel_time(copy, machine, training) for copy in copies)
        return gather, reduce
    where = place_copies(mesh, owners, machine.cluster.gpus_per_node, of_experts=True)
    kinds = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    gather, reduce = (
        machine.corrected("data", collective_time(kind, width * experts, where, machine))
        for kind, width in zip(kinds, widths, strict=True)
    )
    return gather, reduce


def host_update_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of Adam on the host over `num_parameters` of each rank.

    Where the device is the host, it updates as a device does.
    """
    if machine.cluster.device.is_host:
        return optimizer_time(num_parameters, machine, training)
    return host_adam_time(num_parameters, machine.cluster)


def added_time(num_parameters: float, machine: Machine, training: TrainingSpec) -> Seconds:
    """Seconds of the host to add gradients of `num_parameters`: two are read and one written."""
    return host_time(
        ADDED_WIDTHS * training.gradient_precision.num_bytes * num_parameters, machine.cluster
    )
