"""The price of one layer on one rank: compute, tensor-parallel communication, and what data parallelism adds to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from costmodels.collectives import Collective, collective_time
from costmodels.compute import FP32_BYTES, FREE, OperatorTime, operator_time, optimizer_time
from costmodels.edges import Edge, edges_of, leaves
from costmodels.memory import owned_parameters
from costmodels.mesh import Axis, Mesh, place
from costmodels.redistribution import redistribute
from costmodels.sharding import PARTIAL, Place, Sharding
from profiles.measured import Machine
from profiles.model import LayerClass, LayerKind, Operator, OperatorKind, Tensor
from profiles.provenance import ZERO, Kind, Seconds
from profiles.spec import TrainingSpec
from profiles.stack import Stack

# What a second of hidden communication costs the compute it runs under: its kernels hold 16 to 24 of an A100's 108
# multiprocessors, and memory bandwidth. Assumed from that share.
CONTENTION = 0.2
LOSS_REDUCTIONS = 3  # vocabulary-parallel cross entropy reduces the maximum, the target logit and the sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """One micro-batch through one layer, without data-parallel communication."""

    forward: Seconds
    backward: Seconds
    recompute: Seconds
    tp_forward: Seconds
    tp_backward: Seconds
    tp_recompute: Seconds

    @property
    def forward_s(self) -> float:
        return self.forward.value_s + self.tp_forward.value_s

    @property
    def backward_s(self) -> float:
        return self.backward.value_s + self.tp_backward.value_s

    @property
    def recompute_s(self) -> float:
        return self.recompute.value_s + self.tp_recompute.value_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.recompute_s


_INFINITE = Seconds(math.inf, Kind.ANALYTIC)
ENDLESS = LayerTime(  # hides whatever can be hidden
    forward=_INFINITE, backward=_INFINITE, recompute=ZERO, tp_forward=ZERO, tp_backward=ZERO, tp_recompute=ZERO)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelTime:
    """What data parallelism and ZeRO add to one layer, as far as compute does not hide it.

    forward, backward: in every micro-batch (gathers and reductions of ZeRO 2 and 3); step: once a step (reduction of
    the gradients, gathering of the updated parameters); optimizer: the update of the parameters this rank owns.
    """

    forward: Seconds
    backward: Seconds
    step: Seconds
    optimizer: Seconds

    @property
    def per_micro_batch_s(self) -> float:
        return self.forward.value_s + self.backward.value_s

    @property
    def per_step_s(self) -> float:
        return self.step.value_s + self.optimizer.value_s


def _sum(parts: Iterable[Seconds]) -> Seconds:
    total = ZERO
    for part in parts:
        total = total + part
    return total


@dataclass(frozen=True, slots=True)
class Inside:
    """The axes inside a stage that divide its operators, on one machine, and what the stack runs under compute."""

    degrees: tuple[int, ...]
    machine: Machine
    stack: Stack

    def moved(self, tensor: Tensor, source: Place, target: Place) -> Seconds:
        """Seconds to bring a tensor from one placement to another."""
        return self.machine.corrected("tensor", redistribute(tensor.num_bytes, source, target, self.degrees, self.machine).time)

    def beside(self, whole: Seconds, product_s: float) -> Seconds:
        """Gathers and reductions of divided activations: under their product where the stack does so."""
        return under(whole, product_s) if self.stack.overlap_tensor_parallel else whole


def edge_time(edge: Edge, alone: OperatorTime, inside: Inside) -> OperatorTime:
    """Collectives before a reader reads, and behind it in the backward pass (EQUATIONS T, rows TP and TP + SP).

    An input that is gathered is kept as this rank's part and gathered again for the weight gradient, under the product that
    gives the input gradient (Korthikanti et al. 2022, section 4.2.2). Input gradients that are all-reduced are so, in an
    asynchronous stack, under the product that gives the weight gradient. A stack may also run gathers and reduce-scatters
    under their products, in pieces. `alone` is the reader's compute, of whose backward each of two products takes half.
    """
    if edge.source == edge.target == edge.gradient:
        return FREE
    gradient_s = alone.backward.value_s / 2
    read = inside.moved(edge.tensor, edge.source, edge.target)
    returned = inside.moved(edge.tensor, edge.gradient, edge.source)
    backward = ZERO
    if edge.gathers(inside.degrees) and edge.reader.saved:
        backward += under(read, gradient_s)
    if PARTIAL in edge.gradient and not any(edge.source):
        backward += under(returned, gradient_s) if inside.stack.async_tensor_parallel else returned
    else:
        backward += inside.beside(returned, gradient_s)
    return OperatorTime(inside.beside(read, alone.forward.value_s), backward)


def ending_time(operator: Operator, sharding: Sharding, alone: OperatorTime, inside: Inside) -> OperatorTime:
    """What ends the partial sums of an operator's output, and gathers the output's gradient again in the backward pass."""
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        return _loss_reductions(operator, sharding, inside)
    forward = backward = ZERO
    for tensor in operator.outputs:
        summed, ended = sharding.place_inside(operator, tensor), sharding.place(operator, tensor)
        if summed == ended:
            continue
        reduced = inside.moved(tensor, summed, ended)
        forward += inside.beside(reduced, alone.forward.value_s) if any(ended) else reduced
        whole = tuple(None if place == PARTIAL else place for place in summed)
        backward += inside.beside(inside.moved(tensor, ended, whole), alone.backward.value_s / 2)
    return OperatorTime(forward, backward)


def _loss_reductions(operator: Operator, sharding: Sharding, inside: Inside) -> OperatorTime:
    """Vocabulary-parallel cross entropy reduces per token the maximum, the target's logit and the sum."""
    partial = tuple(PARTIAL if split.dim == operator.parallel_dim else None for split in sharding.splits(operator))
    once = inside.moved(operator.outputs[0], partial, (None,) * len(partial))
    return OperatorTime(once.scaled(LOSS_REDUCTIONS), ZERO) if once.value_s else FREE


def leaving_time(layer: LayerClass, sharding: Sharding, inside: Inside) -> OperatorTime:
    """From where the last operator leaves the layer's output to the boundary, and its gradient back."""
    left = leaves(layer, sharding)
    if left is None or layer.kind is LayerKind.HEAD or left[1] == sharding.boundary:
        return FREE
    return OperatorTime(inside.moved(left[0], left[1], sharding.boundary), inside.moved(left[0], sharding.boundary, left[1]))


def _communication(layer: LayerClass, sharding: Sharding, compute: Mapping[str, OperatorTime], inside: Inside) -> dict[str, OperatorTime]:
    """By operator, the collectives before and after it over the axes inside the stage."""
    if sharding.tp == 1:
        return dict.fromkeys(compute, FREE)
    found = {operator.name: ending_time(operator, sharding, compute[operator.name], inside) for operator in layer.operators}
    for (reader, _), edge in edges_of(layer, sharding).items():
        found[reader] = found[reader].plus(edge_time(edge, compute[reader], inside))
    last = layer.operators[-1].name
    found[last] = found[last].plus(leaving_time(layer, sharding, inside))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """Every operator of one layer class priced once, from which the price under any recompute set is a sum."""

    layer: LayerClass
    host_forward_s: float
    host_backward_s: float
    compute: dict[str, OperatorTime]
    tensor_parallel: dict[str, OperatorTime]

    def time(self, recompute: Iterable[str] = ()) -> LayerTime:
        """One micro-batch through the layer when the operators named in `recompute` run again in the backward pass.

        No pass is faster than the host launches it: operators, collectives, and both gradients of a product.
        """
        again = tuple(recompute)
        forward, tp_forward = self._forward(tuple(self.compute))
        repeated, tp_repeated = self._forward(again)
        backward = _sum(time.backward for time in self.compute.values())
        tp_backward = _sum(time.backward for time in self.tensor_parallel.values())
        products = sum(op.kind is OperatorKind.MATMUL for op in self.layer.operators)
        collectives = sum(time.backward.value_s > 0 for time in self.tensor_parallel.values())
        return LayerTime(
            forward=forward, recompute=repeated,
            backward=_launched(backward, tp_backward, (len(self.compute) + products + collectives) * self.host_backward_s),
            tp_forward=tp_forward, tp_backward=tp_backward, tp_recompute=tp_repeated)

    def _forward(self, names: tuple[str, ...]) -> tuple[Seconds, Seconds]:
        compute = _sum(self.compute[name].forward for name in names)
        communication = _sum(self.tensor_parallel[name].forward for name in names)
        collectives = sum(self.tensor_parallel[name].forward.value_s > 0 for name in names)
        return _launched(compute, communication, (len(names) + collectives) * self.host_forward_s), communication


def _launched(compute: Seconds, communication: Seconds, host_s: float) -> Seconds:
    """The compute, with what the device waits for the host where launching takes longer than running."""
    waits_s = host_s - compute.value_s - communication.value_s
    return compute + Seconds(waits_s, Kind.ANALYTIC) if waits_s > 0 else compute


def price_operators(layer: LayerClass, sharding: Sharding, machine: Machine, training: TrainingSpec) -> LayerOperators:
    """Compute and tensor-parallel communication of every operator of `layer` on one rank."""
    compute = {op.name: operator_time(op, sharding, machine, training) for op in layer.operators}
    communication = _communication(layer, sharding, compute, Inside(sharding.degrees, machine, training.stack))
    host_s = training.stack.host_operator_s
    return LayerOperators(
        layer=layer, host_forward_s=host_s * machine.launch_factor("forward"), host_backward_s=host_s * machine.launch_factor("backward"),
        compute=compute, tensor_parallel=communication)


def _exposed(communication: Seconds, window_s: float, training: TrainingSpec) -> Seconds:
    """What `communication` adds to a step when it runs under `window_s` of compute; all of it without overlap."""
    return under(communication, window_s) if training.overlap_grad_reduce else communication


def under(communication: Seconds, window_s: float) -> Seconds:
    """What communication adds to the compute that hides it: max(0, c - window) + CONTENTION min(c, window)."""
    if not communication.value_s:
        return ZERO
    hidden = min(1.0, window_s / communication.value_s)
    return communication.scaled(1 - hidden + CONTENTION * hidden)


def data_parallel_time(
    layer: LayerClass, time: LayerTime, *, mesh: Mesh, sharding: Sharding, zero: int, machine: Machine, training: TrainingSpec,
    with_tied: bool = True,
) -> DataParallelTime:
    """Reductions, gathers and the optimizer step of one layer at ZeRO stage `zero` (EQUATIONS M2, T).

    ZeRO 0 reduces gradients once a step by all-reduce, ZeRO 1 by reduce-scatter and gathers the updated parameters;
    ZeRO 2 reduce-scatters after every micro-batch; ZeRO 3 also gathers in every forward and every backward pass. A
    reduction hides under the backward pass of its own layer, a gather under the forward pass (one-layer prefetch).
    """
    placement = place(mesh, Axis.DP, machine.cluster.gpus_per_node)
    parameters = owned_parameters(layer, sharding, with_tied=with_tied)
    owned = owned_parameters(layer, sharding, mesh.dp, with_tied=with_tied) if zero else parameters
    optimizer = optimizer_time(owned, machine, training)
    inside = summed_inside(layer, sharding, mesh.dp if zero else 1, machine, training)
    if mesh.dp == 1 or not parameters:
        return DataParallelTime(forward=ZERO, backward=ZERO, step=inside, optimizer=optimizer)
    gradient_bytes = training.gradient_precision.num_bytes * parameters

    def exposed(communication: Seconds, window_s: float) -> Seconds:
        return _exposed(machine.corrected("data", communication), window_s, training)

    if zero == 0:
        reduce = collective_time(Collective.ALL_REDUCE, gradient_bytes, placement, machine)
        step = exposed(reduce, time.backward_s) + inside
        return DataParallelTime(forward=ZERO, backward=ZERO, step=step, optimizer=optimizer)
    gather = collective_time(Collective.ALL_GATHER, training.precision.num_bytes * parameters, placement, machine)
    scatter = collective_time(Collective.REDUCE_SCATTER, gradient_bytes, placement, machine)
    if zero == 3:
        return DataParallelTime(
            forward=exposed(gather, time.forward_s), backward=exposed(gather + scatter, time.backward_s), step=inside, optimizer=optimizer)
    gathered, scattered = exposed(gather, time.forward_s), exposed(scatter, time.backward_s)
    if zero == 2:
        return DataParallelTime(forward=ZERO, backward=scattered, step=gathered + inside, optimizer=optimizer)
    return DataParallelTime(forward=ZERO, backward=ZERO, step=scattered + gathered + inside, optimizer=optimizer)


def summed_inside(layer: LayerClass, sharding: Sharding, shards: int, machine: Machine, training: TrainingSpec) -> Seconds:
    """All-reduces of weight gradients over the axes inside a stage that divide a product's tokens but not its weight.

    Once a step, after the reduction over data parallelism, of what one of `shards` ZeRO shards holds, in fp32, as the executor
    runs them. Left out: the vectors of norms and biases, a few kilobytes.
    """
    total, degrees = ZERO, sharding.degrees
    for operator in layer.operators if sharding.own else ():
        for parameter in operator.parameters if operator.kind is OperatorKind.MATMUL else ():
            axes = sharding.summed_axes(operator, parameter) if len(parameter.dims) > 1 else ()
            if axes:
                held = -(-math.prod(sharding.parameter_shape(operator, parameter)) // shards) * FP32_BYTES
                partial = tuple(PARTIAL if axis in axes else None for axis in range(len(degrees)))
                total += machine.corrected("tensor", redistribute(held, partial, (None,) * len(degrees), degrees, machine).time)
    return total


def tied_reduction(embedding: LayerClass, *, mesh: Mesh, sharding: Sharding, machine: Machine, training: TrainingSpec) -> Seconds:
    """The all-reduce between the first and the last pipeline stage that sums the two gradients of a tied embedding."""
    stride = mesh.stride(Axis.PP) * (mesh.pp - 1)
    gpus_per_node = machine.cluster.gpus_per_node
    crosses = stride >= gpus_per_node or mesh.num_ranks > gpus_per_node
    ends = Mesh(pp=2, dp=gpus_per_node if crosses else 1, tp=1)
    elements = sum(p.num_elements for op in embedding.operators for p in op.parameters if op.parallel_dim == "vocab") // sharding.tp
    return machine.corrected("data", collective_time(
        Collective.ALL_REDUCE, training.gradient_precision.num_bytes * elements, place(ends, Axis.PP, gpus_per_node), machine))


def has_tied_head(head: LayerClass) -> bool:
    """Whether the head's matrix shares its values with the token embedding."""
    return head.kind is LayerKind.HEAD and any(p.tied for op in head.operators for p in op.parameters)
