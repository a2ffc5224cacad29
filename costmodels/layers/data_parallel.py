"""Data parallelism and ZeRO add reductions, gathers and the optimizer step to one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import (
    Axis,
    Mesh,
    place,
    place_axis,
    place_expert_copies,
)
from parplan.costmodels.communication.redistribution import redistribute
from parplan.costmodels.host.offload import (
    ADDED_BYTES,
    COPIED_BYTES,
    copy_time,
    host_adam_time,
    host_time,
)
from parplan.costmodels.layers.layer_price import LayerTime, under
from parplan.costmodels.layers.model_states import holders, owned_parameters
from parplan.costmodels.operators.compute import optimizer_time
from parplan.costmodels.operators.host_launch import host, layouts_of
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.sharding import PARTIAL, Sharding
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    PRODUCTS,
    LayerClass,
    LayerKind,
    OperatorKind,
)
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Kind, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelTime:
    """What data parallelism and ZeRO add to one layer, as far as compute does not hide it.

    forward, backward: in every micro-batch (gathers and reductions of ZeRO 2 and 3); step: once a
    step (reduction of the gradients, gathering of the updated parameters); optimizer: the update of
    the parameters this rank owns. host, host_step: of forward and backward, and of step, what
    copies between device and host and the host's sums add.
    """

    forward: Seconds
    backward: Seconds
    step: Seconds
    optimizer: Seconds
    host: Seconds = ZERO
    host_step: Seconds = ZERO

    @property
    def per_micro_batch_s(self) -> float:
        return self.forward.value_s + self.backward.value_s

    @property
    def per_step_s(self) -> float:
        return self.step.value_s + self.optimizer.value_s


def data_parallel_time(
    layer: LayerClass,
    time: LayerTime,
    *,
    mesh: Mesh,
    sharding: Sharding,
    zero: int,
    machine: Machine,
    training: TrainingSpec,
    with_tied: bool = True,
    shards: int | None = None,
    offloaded: bool = False,
) -> DataParallelTime:
    """Reductions, gathers and the optimizer step of one layer at ZeRO stage `zero` (EQUATIONS M2,
    T1).

    ZeRO 0 reduces gradients once a step by all-reduce, ZeRO 1 by reduce-scatter and gathers the
    updated parameters; ZeRO 2 reduce-scatters after every micro-batch; ZeRO 3 also gathers in every
    forward and every backward pass. A reduction hides under the backward pass of its own layer, a
    gather under the forward pass (one-layer prefetch). Where `shards` ranks, fewer than dp, hold
    one copy together, the copies' shards are all-reduced once a step, at its end.
    offloaded: the host keeps the states (EQUATIONS O9); a gather then starts with a copy to the
    device, a reduction ends with one back.
    """
    parameters = owned_parameters(layer, sharding, with_tied=with_tied)
    shards = (shards or mesh.dp) if zero else 1
    owned = owned_parameters(layer, sharding, shards, with_tied=with_tied) if zero else parameters
    optimizer = (
        host_adam_time(owned, machine.cluster)
        if offloaded
        else optimizer_time(owned, machine, training)
    )
    inside = summed_inside(layer, sharding, shards, machine, training)
    if parameters and (sharding.tp > 1 or (zero and mesh.dp > 1)):
        optimizer += _layout_cost("update", owned, machine, training)
    if not parameters or (mesh.dp == 1 and not offloaded):
        return DataParallelTime(forward=ZERO, backward=ZERO, step=inside, optimizer=optimizer)
    gather, reduce, over_copies = _over_data(
        layer, sharding, mesh, shards, machine, training, with_tied
    )
    if (
        zero or training.precision is not Precision.FP32
    ):  # without ZeRO in fp32 the gradients are reduced as they are
        gather, reduce = (
            sent + _layout_cost(name, parameters, machine, training)
            for name, sent in (("gather", gather), ("reduce", reduce))
        )
    alone = _phases(
        _DataParallelMoves(gather, reduce, over_copies, inside),
        zero,
        time,
        optimizer,
        machine,
        training,
    )
    if not offloaded:
        return alone
    cluster = machine.cluster
    moved = _DataParallelMoves(
        gather,
        reduce,
        over_copies,
        inside,
        brought=copy_time(COPIED_BYTES * owned, cluster),
        taken=copy_time(COPIED_BYTES * owned, cluster, to_host=True),
        added=host_time(ADDED_BYTES * owned, cluster),
    )
    whole = _phases(moved, zero, time, optimizer, machine, training)
    return replace(
        whole,
        host=_beyond(whole.forward + whole.backward, alone.forward + alone.backward),
        host_step=_beyond(whole.step, alone.step),
    )


def _beyond(whole: Seconds, part: Seconds) -> Seconds:
    return Seconds(max(0.0, whole.value_s - part.value_s), Kind.ANALYTIC)


@dataclass(frozen=True, slots=True)
class _DataParallelMoves:
    """What data parallelism does for one layer: its collectives, the sums inside a stage, and where
    the host keeps the states copies to the device (`brought`) and from it, and what the host adds
    up.
    """

    gather: Seconds
    reduce: Seconds
    over_copies: Seconds
    inside: Seconds
    brought: Seconds = ZERO
    taken: Seconds = ZERO
    added: Seconds = ZERO


def _phases(
    moved: _DataParallelMoves,
    zero: int,
    time: LayerTime,
    optimizer: Seconds,
    machine: Machine,
    training: TrainingSpec,
) -> DataParallelTime:
    """When it is done, and what of it compute does not hide."""

    def exposed(communication: Seconds, window_s: float) -> Seconds:
        return (
            under(communication, window_s, machine)
            if training.overlap_grad_reduce
            else communication
        )

    gathered, reduced = (
        exposed(moved.gather + moved.brought, time.forward_s),
        exposed(moved.reduce + moved.taken, time.backward_s),
    )
    if zero < 2:
        step = (
            gathered
            + exposed(moved.reduce + moved.over_copies + moved.taken, time.backward_s)
            + moved.inside
        )
        return DataParallelTime(forward=ZERO, backward=ZERO, step=step, optimizer=optimizer)
    if zero == 2:
        step = gathered + moved.over_copies + moved.inside
        return DataParallelTime(
            forward=ZERO, backward=reduced + moved.added, step=step, optimizer=optimizer
        )
    backward = (
        exposed(moved.gather + moved.reduce + moved.brought + moved.taken, time.backward_s)
        + moved.added
    )
    return DataParallelTime(
        forward=gathered,
        backward=backward,
        step=moved.over_copies + moved.inside,
        optimizer=optimizer,
    )


def _layout_cost(name: str, parameters: int, machine: Machine, training: TrainingSpec) -> Seconds:
    """What a layout adds to one layer of so many parameters on a rank, beside what it sends
    (parplan.profiles.machines.speeds.InStep).
    """
    added = layouts_of(machine, training.stack)
    return (
        ZERO
        if added is None
        else host(getattr(added, name).seconds(training.precision.num_bytes * parameters))
    )


def _over_data(
    layer: LayerClass,
    sharding: Sharding,
    mesh: Mesh,
    shards: int,
    machine: Machine,
    training: TrainingSpec,
    with_tied: bool,
) -> tuple[Seconds, Seconds, Seconds]:
    """Of one layer: the gather of its parameters and the reduce-scatter of its gradients over the
    `shards` neighbours that hold one copy, and the all-reduce of the shard over the copies. Of an
    expert, one rank in ep holds a copy.
    """
    gpus_per_node, stride = machine.cluster.gpus_per_node, mesh.stride(Axis.DP)
    groups = [
        (
            False,
            place_axis(shards, stride, mesh.num_ranks, gpus_per_node),
            place_axis(mesh.dp // shards, stride * shards, mesh.num_ranks, gpus_per_node),
        )
    ]
    if owned_parameters(layer, sharding, of_experts=True):
        alone, copies = (
            place_axis(1, 1, mesh.num_ranks, gpus_per_node),
            place_expert_copies(mesh, gpus_per_node),
        )
        groups.append((True, copies, alone) if shards > 1 else (True, alone, copies))
    gather = reduce = over_copies = ZERO
    for of_experts, neighbours, copies in groups:
        whole, owned = (
            owned_parameters(layer, sharding, n, with_tied=with_tied, of_experts=of_experts)
            for n in (1, shards)
        )
        width = training.gradient_precision.num_bytes
        gather += collective_time(
            Collective.ALL_GATHER, training.precision.num_bytes * whole, neighbours, machine
        )
        reduce += collective_time(Collective.REDUCE_SCATTER, width * whole, neighbours, machine)
        over_copies += collective_time(Collective.ALL_REDUCE, width * owned, copies, machine)
    return (
        machine.corrected("data", gather),
        machine.corrected("data", reduce),
        machine.corrected("data", over_copies),
    )


def summed_inside(
    layer: LayerClass, sharding: Sharding, shards: int, machine: Machine, training: TrainingSpec
) -> Seconds:
    """All-reduces of weight gradients over the axes inside a stage that divide a product's tokens
    but not its weight.

    Once a step, after the reduction over data parallelism, of what one of `shards` ZeRO shards
    holds, in fp32, as the executor runs them. Left out: the vectors of norms and biases, a few
    kilobytes.
    """
    total, degrees = ZERO, sharding.degrees
    divided = sharding.own or any(
        operator.kind is OperatorKind.EXPERTS for operator in layer.operators
    )
    for operator in layer.operators if divided else ():
        for parameter in operator.parameters if operator.kind in PRODUCTS else ():
            axes = sharding.summed_axes(operator, parameter) if len(parameter.dims) > 1 else ()
            if axes:
                held = (
                    -(
                        -math.prod(sharding.parameter_shape(operator, parameter))
                        // holders(parameter, sharding, shards)
                    )
                    * FP32_BYTES
                )
                partial = tuple(PARTIAL if axis in axes else None for axis in range(len(degrees)))
                total += machine.corrected(
                    "tensor",
                    redistribute(held, partial, (None,) * len(degrees), degrees, machine).time,
                )
    return total


def tied_reduction(
    embedding: LayerClass,
    *,
    mesh: Mesh,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
) -> Seconds:
    """The all-reduce between the first and the last pipeline stage that sums the two gradients of a
    tied embedding.
    """
    stride = mesh.stride(Axis.PP) * (mesh.pp - 1)
    gpus_per_node = machine.cluster.gpus_per_node
    crosses = stride >= gpus_per_node or mesh.num_ranks > gpus_per_node
    ends = Mesh(pp=2, dp=gpus_per_node if crosses else 1, tp=1)
    elements = (
        sum(
            p.num_elements
            for op in embedding.operators
            for p in op.parameters
            if op.parallel_dim == "vocab"
        )
        // sharding.tp
    )
    return machine.corrected(
        "data",
        collective_time(
            Collective.ALL_REDUCE,
            training.gradient_precision.num_bytes * elements,
            place(ends, Axis.PP, gpus_per_node),
            machine,
        ),
    )


def has_tied_head(head: LayerClass) -> bool:
    """Whether the head's matrix shares its values with the token embedding."""
    return head.kind is LayerKind.HEAD and any(
        p.tied for op in head.operators for p in op.parameters
    )
