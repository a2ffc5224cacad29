"""Data parallelism and ZeRO of one layer: reductions, gathers and the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.hiding import under
from parplan.costmodels.communication.mesh import (
    Axis,
    Mesh,
    place,
    place_copies,
)
from parplan.costmodels.communication.redistribution import redistribute
from parplan.costmodels.host.offload import (
    ADDED_BYTES,
    COPIED_BYTES,
    copy_time,
    host_adam_time,
    host_time,
)
from parplan.costmodels.layers.layer_price import LayerTime
from parplan.costmodels.layers.model_states import (
    LocalParameters,
    StateSharding,
    local_parameters,
)
from parplan.costmodels.layers.narrow_products import narrow_weights
from parplan.costmodels.layers.parameter_update import update_time
from parplan.costmodels.operators.compute import OperatorTime
from parplan.costmodels.operators.host_launch import host, measured_layout_costs
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.sharding import PARTIAL, Sharding
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.provenance import ZERO, Kind, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelTime:
    """Seconds that data parallelism and ZeRO add to one layer and compute does not hide.

    forward, backward   in every micro-batch (gathers and reductions of ZeRO 2 and 3)
    step                once a step (reduction of the gradients, gathering of the updated
                        parameters)
    optimizer           update of the parameters that this rank owns
    host, host_step     part of forward and backward, and of step, for copies between device and
                        host and the host's sums
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

    def waiting(self, wait: OperatorTime) -> DataParallelTime:
        """Returns the seconds with a wait in every micro-batch."""
        return replace(
            self, forward=self.forward + wait.forward, backward=self.backward + wait.backward
        )

    def waiting_once(self, wait: OperatorTime, repeats: int) -> DataParallelTime:
        """Returns the seconds with the waits of as many micro-batches at the end of the step."""
        return replace(self, step=self.step + (wait.forward + wait.backward).scaled(repeats))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelMoves:
    """Data parallelism of one layer before its compute hides any of it.

    gather, reduce          of parameters and gradients between the ranks that hold one copy
    over_copies             all-reduce of the shard's gradients over the copies
    inside                  sums of weight gradients inside a stage
    optimizer               update of the parameters that this rank owns
    brought, taken, added   with states on the host: copies to the device and from it, and the
                            host's sums of gradients
    """

    inside: Seconds
    optimizer: Seconds
    gather: Seconds = ZERO
    reduce: Seconds = ZERO
    over_copies: Seconds = ZERO
    brought: Seconds = ZERO
    taken: Seconds = ZERO
    added: Seconds = ZERO


def data_parallel_moves(
    parameters: LocalParameters,
    mesh: Mesh,
    states: StateSharding,
    machine: Machine,
    training: TrainingSpec,
) -> DataParallelMoves:
    """Collectives, copies and update of one layer (EQUATIONS M2, T1).

    ZeRO 0 reduces gradients once a step by all-reduce, ZeRO 1 by reduce-scatter and gathers the
    updated parameters; ZeRO 2 reduce-scatters after every micro-batch; ZeRO 3 also gathers in every
    forward and every backward pass. ZeRO 1, 2 and 3 have the same moves, at other times
    (`exposed_moves`). Where fewer than dp ranks hold one copy together, the shards of the copies
    are all-reduced once a step, at its end. With offloaded states (EQUATIONS O9) a gather starts
    with a copy to the device, and a reduction ends with a copy back. Frozen parameters are neither
    reduced nor updated; ZeRO 3 gathers them with the trained ones (EQUATIONS F3).
    """
    with_tied = states.with_tied
    frozen = parameters.frozen if states.zero == 3 and parameters.frozen.each else None
    parameters = parameters.trained
    local = parameters.owned(with_tied=with_tied)
    shards = states.shards if states.zero else 1
    owned = parameters.owned(shards, with_tied=with_tied)
    if states.offloaded:
        optimizer = host_adam_time(owned, machine.cluster)
    else:
        optimizer = update_time(parameters, mesh, states, machine, training)
    inside = _summed_inside(parameters, shards, machine, training)
    divided = math.prod(parameters.degrees) > 1
    if local and (divided or (states.zero and mesh.replicas > 1)):
        optimizer += _layout_cost("update", owned, machine, training)
    held = (*parameters.each, *(frozen.each if frozen else ()))
    most_copies = max((each.holders(mesh.replicas) for each in held), default=1)
    if not (local or frozen) or (most_copies == 1 and not states.offloaded):
        return DataParallelMoves(inside=inside, optimizer=optimizer)
    gather, reduce, over_copies = _over_data(parameters, frozen, mesh, states, machine, training)
    # without ZeRO in fp32 the gradients are reduced as they are
    if local and (states.zero or training.precision is not Precision.FP32):
        copied = parameters.copied(with_tied=with_tied)
        gather = gather + _layout_cost("gather", copied, machine, training)
        reduce = reduce + _layout_cost("reduce", copied, machine, training)
    moves = DataParallelMoves(
        gather=gather, reduce=reduce, over_copies=over_copies, inside=inside, optimizer=optimizer
    )
    if not states.offloaded:
        return moves
    cluster = machine.cluster
    return replace(
        moves,
        brought=copy_time(COPIED_BYTES * owned, cluster),
        taken=copy_time(COPIED_BYTES * owned, cluster, to_host=True),
        added=host_time(ADDED_BYTES * owned, cluster),
    )


def exposed_moves(
    groups: Sequence[tuple[int, DataParallelMoves]],
    time: LayerTime,
    machine: Machine,
    training: TrainingSpec,
) -> DataParallelTime:
    """The seconds of the moves of a layer that its compute, `time`, does not hide.

    groups    the ZeRO stage and the moves of each group of parameters, which share what compute
              hides
    """
    whole = _phases(groups, time, machine, training)
    if all(ZERO == moved.brought == moved.taken == moved.added for _, moved in groups):
        return whole
    on_device = [
        (zero, replace(moved, brought=ZERO, taken=ZERO, added=ZERO)) for zero, moved in groups
    ]
    alone = _phases(on_device, time, machine, training)
    return replace(
        whole,
        host=_beyond(whole.forward + whole.backward, alone.forward + alone.backward),
        host_step=_beyond(whole.step, alone.step),
    )


def _beyond(whole: Seconds, part: Seconds) -> Seconds:
    return Seconds(max(0.0, whole.value_s - part.value_s), Kind.ANALYTIC)


def _phases(
    groups: Sequence[tuple[int, DataParallelMoves]],
    time: LayerTime,
    machine: Machine,
    training: TrainingSpec,
) -> DataParallelTime:
    """Sorts the communication by the time when it runs, without the part that compute hides.

    A pass hides the communication of every micro-batch first, and that of the step in the rest of
    its window.
    """
    optimizer = inside = over_copies = added = ZERO
    forward = backward = ZERO  # of every micro-batch
    gathered = reduced = ZERO  # of the step
    for zero, moved in groups:
        optimizer += moved.optimizer
        inside += moved.inside
        if zero == 3:
            forward += moved.gather + moved.brought
            backward += moved.gather + moved.reduce + moved.brought + moved.taken
        else:
            gathered += moved.gather + moved.brought
        if zero == 2:
            backward += moved.reduce + moved.taken
        if zero < 2:
            reduced += moved.reduce + moved.over_copies + moved.taken
        else:
            over_copies += moved.over_copies
            added += moved.added

    def exposed(every: Seconds, once: Seconds, window_s: float) -> tuple[Seconds, Seconds]:
        if not training.overlap_grad_reduce:
            return every, once
        left_s = max(0.0, window_s - every.value_s)
        return under(every, window_s, machine), under(once, left_s, machine)

    forward, gathered = exposed(forward, gathered, time.forward_s)
    backward, reduced = exposed(backward, reduced, time.backward_s)
    return DataParallelTime(
        forward=forward,
        backward=backward + added,
        step=gathered + reduced + over_copies + inside,
        optimizer=optimizer,
    )


def _layout_cost(name: str, parameters: int, machine: Machine, training: TrainingSpec) -> Seconds:
    """Measured extra cost of a parallel layout for one layer of `parameters` on a rank.

    It comes besides the communication (parplan.profiles.machines.speeds.InStep).
    """
    added = measured_layout_costs(machine, training.stack)
    if added is None:
        return ZERO
    return host(getattr(added, name).seconds(training.precision.num_bytes * parameters))


def _over_data(
    parameters: LocalParameters,
    frozen: LocalParameters | None,
    mesh: Mesh,
    states: StateSharding,
    machine: Machine,
    training: TrainingSpec,
) -> tuple[Seconds, Seconds, Seconds]:
    """Gather of parameters, reduce-scatter of gradients and all-reduce of the shard over copies.

    The parameters are trained, and those of `frozen` are gathered with them. Gather and reduction
    run over the `states.shards` neighbours that hold one copy. Parameters of experts have their own
    groups, of all ranks of the stage with the same part of the same experts.
    """
    gather = reduce = over_copies = ZERO
    with_tied, gpus_per_node = states.with_tied, machine.cluster.gpus_per_node
    shards = states.shards if states.zero else 1
    width = training.gradient_precision.num_bytes
    narrow = narrow_weights(training, machine.cluster.device.compute_capability)
    for of_experts in (False, True):
        trained = parameters.held_alike(of_experts=of_experts)
        alike = trained or (frozen.held_alike(of_experts=of_experts) if frozen else [])
        if not alike:
            continue
        near = alike[0].sharers(shards)
        groups = alike[0].holders(mesh.replicas) // near
        neighbours = place_copies(mesh, near, gpus_per_node, of_experts=of_experts)
        copies = place_copies(mesh, groups, gpus_per_node, of_experts=of_experts, apart=near)
        whole = parameters.owned(with_tied=with_tied, of_experts=of_experts)
        gathered = parameters.gathered_bytes(
            training, with_tied=with_tied, of_experts=of_experts, narrow=narrow
        )
        if frozen:
            gathered += frozen.frozen_bytes(training, with_tied=with_tied, of_experts=of_experts)
        gather += collective_time(Collective.ALL_GATHER, gathered, neighbours, machine)
        if trained:
            owned = parameters.owned(shards, with_tied=with_tied, of_experts=of_experts)
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
    """All-reduces of weight gradients over the axes inside a stage.

    They run over axes that divide a product's tokens but not its weight: once a step, after the
    reduction over data parallelism, over the part that one of `shards` ZeRO shards holds, in fp32,
    as the executor runs them. Left out: the vectors of norms and biases, a few kilobytes.
    """
    return _summed_inside(local_parameters(layer, sharding), shards, machine, training)


def _summed_inside(
    parameters: LocalParameters, shards: int, machine: Machine, training: TrainingSpec
) -> Seconds:
    total = ZERO
    degrees = parameters.degrees
    for parameter in parameters.each:
        if parameter.summed_axes:
            held = -(-parameter.elements // parameter.holders(shards)) * FP32_BYTES
            partial = tuple(
                PARTIAL if axis in parameter.summed_axes else None for axis in range(len(degrees))
            )
            whole = (None,) * len(degrees)
            reduced = redistribute(held, partial, whole, degrees, machine)
            total += machine.corrected("tensor", reduced.time)
    return total


def shared_reduction(
    elements: int,
    holders: int,
    *,
    mesh: Mesh,
    machine: Machine,
    training: TrainingSpec,
) -> Seconds:
    """The all-reduce of gradients of parameters that layers of several pipeline ranks hold.

    elements    parameters of one tensor-parallel rank
    holders     layers that hold them, such as the two of a token table tied to the head
    """
    gpus_per_node = machine.cluster.gpus_per_node
    crosses = mesh.pp * mesh.stride(Axis.PP) > gpus_per_node
    ends = Mesh(pp=min(holders, mesh.pp), dp=gpus_per_node if crosses else 1, tp=1)
    num_bytes = training.gradient_precision.num_bytes * elements
    apart = mesh.stride(Axis.PP) * max(1, (mesh.pp - 1) // max(1, ends.pp - 1))
    where = replace(place(ends, Axis.PP, gpus_per_node), stride=apart)
    reduced = collective_time(Collective.ALL_REDUCE, num_bytes, where, machine)
    return machine.corrected("data", reduced)


def has_tied_head(head: LayerClass) -> bool:
    """Returns true when the head's matrix shares its values with the token embedding."""
    return head.kind is LayerKind.HEAD and any(
        p.tied for op in head.operators for p in op.parameters
    )
