"""The price of one layer on one rank: compute, tensor-parallel communication, and what data parallelism adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodels.collectives import Collective, collective_time
from costmodels.compute import OperatorTime, operator_time, optimizer_time
from costmodels.memory import owned_parameters
from costmodels.mesh import Axis, Mesh, place
from costmodels.sharding import Sharding
from profiles.measured import Machine
from profiles.model import LayerClass, LayerKind, Operator, OperatorKind
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


def _tensor_parallel_time(operator: Operator, sharding: Sharding, machine: Machine, stack: Stack, alone: OperatorTime) -> OperatorTime:
    """Collectives over the tensor-parallel axis around one operator (EQUATIONS T, rows TP and TP + SP).

    Under sequence parallelism a column-parallel input is kept as this rank's tokens and gathered again for the weight
    gradient, under the product that gives the input gradient (Korthikanti et al. 2022, section 4.2.2). Without it the input
    gradients are all-reduced, in an asynchronous stack under the product that gives the weight gradient. A stack may also run
    the gathers and reductions of sequence parallelism under their products, in pieces. `alone` is the operator's compute, of
    whose backward each of the two products takes half.
    """
    gradient_s = alone.backward.value_s / 2
    mesh = Mesh(pp=1, dp=1, tp=sharding.tp)
    placement = place(mesh, Axis.TP, machine.cluster.gpus_per_node)

    def collective(kind: Collective, num_bytes: int) -> Seconds:
        return collective_time(kind, num_bytes, placement, machine)

    def beside(kind: Collective, num_bytes: int, product_s: float) -> Seconds:
        whole = collective(kind, num_bytes)
        return _under(whole, product_s) if stack.overlap_tensor_parallel else whole

    forward, backward = ZERO, ZERO
    if sharding.gathers_input(operator):
        input_bytes = sum(tensor.num_bytes for tensor in operator.inputs)
        if sharding.sequence_parallel:
            forward += beside(Collective.ALL_GATHER, input_bytes, alone.forward.value_s)
            backward += beside(Collective.REDUCE_SCATTER, input_bytes, gradient_s)
            backward += _under(collective(Collective.ALL_GATHER, input_bytes), gradient_s)
        else:
            reduce = collective(Collective.ALL_REDUCE, input_bytes)
            backward += _under(reduce, gradient_s) if stack.async_tensor_parallel else reduce
    if sharding.reduces_output(operator):
        output_bytes = sum(tensor.num_bytes for tensor in operator.outputs)
        if sharding.sequence_parallel:
            forward += beside(Collective.REDUCE_SCATTER, output_bytes, alone.forward.value_s)
            backward += beside(Collective.ALL_GATHER, output_bytes, gradient_s)
        else:
            forward += collective(Collective.ALL_REDUCE, output_bytes)
    if operator.kind is OperatorKind.CROSS_ENTROPY and sharding.tp > 1:
        forward += collective(Collective.ALL_REDUCE, operator.outputs[0].num_bytes).scaled(LOSS_REDUCTIONS)
    return OperatorTime(forward, backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """Every operator of one layer class priced once, from which the price under any recompute set is a sum."""

    layer: LayerClass
    host_operator_s: float
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
            forward=forward, backward=self._launched(backward, tp_backward, len(self.compute) + products + collectives), recompute=repeated,
            tp_forward=tp_forward, tp_backward=tp_backward, tp_recompute=tp_repeated)

    def _forward(self, names: tuple[str, ...]) -> tuple[Seconds, Seconds]:
        compute = _sum(self.compute[name].forward for name in names)
        communication = _sum(self.tensor_parallel[name].forward for name in names)
        collectives = sum(self.tensor_parallel[name].forward.value_s > 0 for name in names)
        return self._launched(compute, communication, len(names) + collectives), communication

    def _launched(self, compute: Seconds, communication: Seconds, launches: int) -> Seconds:
        """The compute, with what the device waits for the host where launching takes longer than running."""
        waits_s = launches * self.host_operator_s - compute.value_s - communication.value_s
        return compute + Seconds(waits_s, Kind.ANALYTIC) if waits_s > 0 else compute


def price_operators(layer: LayerClass, sharding: Sharding, machine: Machine, training: TrainingSpec) -> LayerOperators:
    """Compute and tensor-parallel communication of every operator of `layer` on one rank."""
    compute = {op.name: operator_time(op, sharding, machine, training) for op in layer.operators}
    stack = training.stack
    communication = {op.name: _tensor_parallel_time(op, sharding, machine, stack, compute[op.name]) for op in layer.operators}
    return LayerOperators(layer=layer, host_operator_s=stack.host_operator_s, compute=compute, tensor_parallel=communication)


def _exposed(communication: Seconds, window_s: float, training: TrainingSpec) -> Seconds:
    """What `communication` adds to a step when it runs under `window_s` of compute; all of it without overlap."""
    return _under(communication, window_s) if training.overlap_grad_reduce else communication


def _under(communication: Seconds, window_s: float) -> Seconds:
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
    if mesh.dp == 1 or not parameters:
        return DataParallelTime(forward=ZERO, backward=ZERO, step=ZERO, optimizer=optimizer)

    gradient_bytes = training.gradient_precision.num_bytes * parameters
    gather = collective_time(Collective.ALL_GATHER, training.precision.num_bytes * parameters, placement, machine)
    scatter = collective_time(Collective.REDUCE_SCATTER, gradient_bytes, placement, machine)
    forward_s, backward_s = time.forward_s, time.backward_s
    if zero == 3:
        return DataParallelTime(
            forward=_exposed(gather, forward_s, training), backward=_exposed(gather + scatter, backward_s, training),
            step=ZERO, optimizer=optimizer)
    gather_step = _exposed(gather, forward_s, training)
    if zero == 2:
        return DataParallelTime(
            forward=ZERO, backward=_exposed(scatter, backward_s, training), step=gather_step, optimizer=optimizer)
    if zero == 1:
        return DataParallelTime(
            forward=ZERO, backward=ZERO, step=_exposed(scatter, backward_s, training) + gather_step, optimizer=optimizer)
    reduce = collective_time(Collective.ALL_REDUCE, gradient_bytes, placement, machine)
    return DataParallelTime(forward=ZERO, backward=ZERO, step=_exposed(reduce, backward_s, training), optimizer=optimizer)


def tied_reduction(embedding: LayerClass, *, mesh: Mesh, sharding: Sharding, machine: Machine, training: TrainingSpec) -> Seconds:
    """The all-reduce between the first and the last pipeline stage that sums the two gradients of a tied embedding."""
    stride = mesh.stride(Axis.PP) * (mesh.pp - 1)
    gpus_per_node = machine.cluster.gpus_per_node
    crosses = stride >= gpus_per_node or mesh.num_ranks > gpus_per_node
    ends = Mesh(pp=2, dp=gpus_per_node if crosses else 1, tp=1)
    elements = sum(p.num_elements for op in embedding.operators for p in op.parameters if op.parallel_dim == "vocab") // sharding.tp
    return collective_time(
        Collective.ALL_REDUCE, training.gradient_precision.num_bytes * elements, place(ends, Axis.PP, gpus_per_node), machine)


def has_tied_head(head: LayerClass) -> bool:
    """Whether the head's matrix shares its values with the token embedding."""
    return head.kind is LayerKind.HEAD and any(p.tied for op in head.operators for p in op.parameters)
