"""The price of one layer on one rank: compute and tensor-parallel communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    exchange_once_time,
)
from parplan.costmodels.communication.hiding import under
from parplan.costmodels.communication.mesh import (
    place_axis,
)
from parplan.costmodels.communication.redistribution import redistribute
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.context_parallel import context_time
from parplan.costmodels.layers.exchange_windows import ExchangeWindows, exchange_windows
from parplan.costmodels.layers.grid_products import grid_moves
from parplan.costmodels.layers.tensor_flow import (
    Edges,
    TensorFlow,
    leaving_tensor,
    tensor_flows_of,
)
from parplan.costmodels.operators.compute import FREE, OperatorTime, operator_time
from parplan.costmodels.operators.host_launch import launch_s, more_launches
from parplan.costmodels.operators.operator_kernels import gathered_bytes
from parplan.costmodels.operators.sharding import PARTIAL, Place, Sharding
from parplan.profiles.elementwise import Number, anywhere, key_of, larger_of
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Kind, Seconds
from parplan.profiles.stack import Stack

# vocabulary-parallel cross entropy reduces the maximum, the target logit and the sum
LOSS_REDUCTIONS = 3


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

    def of_sizes(self, number: int) -> tuple[LayerTime, ...]:
        """Returns the time of each of `number` micro-batch sizes, the first axis of arrays."""
        each = (getattr(self, name).of_sizes(number) for name in _PASSES)
        return tuple(
            LayerTime(**dict(zip(_PASSES, seconds, strict=True)))
            for seconds in zip(*each, strict=True)
        )


_PASSES = tuple(each.name for each in fields(LayerTime))
_INFINITE = Seconds(math.inf, Kind.ANALYTIC)
ENDLESS = LayerTime(  # hides whatever can be hidden
    forward=_INFINITE,
    backward=_INFINITE,
    recompute=ZERO,
    tp_forward=ZERO,
    tp_backward=ZERO,
    tp_recompute=ZERO,
)
UNHIDING = LayerTime(  # hides nothing
    forward=ZERO,
    backward=ZERO,
    recompute=ZERO,
    tp_forward=ZERO,
    tp_backward=ZERO,
    tp_recompute=ZERO,
)


def _sum(parts: Iterable[Seconds]) -> Seconds:
    measured_s = interpolated_s = analytic_s = 0.0
    for part in parts:
        added = part.parts_s
        measured_s += added[0]
        interpolated_s += added[1]
        analytic_s += added[2]
    return Seconds.of_parts((measured_s, interpolated_s, analytic_s))


@dataclass(frozen=True, slots=True)
class StageAxes:
    """The axes inside a stage that divide its operators, on one machine in one training.

    once      the redistributions that were priced
    windows   compute that hides the exchanges of a mixture of experts
    """

    degrees: tuple[int, ...]
    machine: Machine
    training: TrainingSpec
    once: KeyedCache = field(default_factory=KeyedCache, compare=False)
    windows: ExchangeWindows = field(default=ExchangeWindows(), compare=False)

    @property
    def stack(self) -> Stack:
        return self.training.stack

    def beside_mixture(self, times: Iterable[tuple[Operator, OperatorTime]]) -> StageAxes:
        """Returns the axes beside the compute of a block with experts, which may hide exchanges.

        times    the operators of the block in their order, each with its compute
        """
        if not self.stack.overlap_exchanges:
            return self
        return replace(self, windows=exchange_windows(times))

    def moved(
        self, tensor: Tensor, source: Place, target: Place, reader: Operator | None = None
    ) -> Seconds:
        """Seconds to redistribute a tensor from one placement to another.

        reader   the product that reads what is gathered, which may read a cast of it
        """
        num_bytes = gathered_bytes(tensor, reader, self.training) if reader else tensor.num_bytes
        return self.moved_bytes(num_bytes, source, target)

    def moved_bytes(self, num_bytes: Number, source: Place, target: Place) -> Seconds:
        """Seconds to redistribute a tensor of so many bytes in all."""
        return self.once(
            (key_of(num_bytes), source, target),
            lambda: self.machine.corrected(
                "tensor", redistribute(num_bytes, source, target, self.degrees, self.machine).time
            ),
        )

    def beside(self, whole: Seconds, product_s: float) -> Seconds:
        """Exposed seconds of a gather or reduction of divided activations beside their product.

        It runs under the product where the stack does so.
        """
        return self.under(whole, product_s) if self.stack.overlap_tensor_parallel else whole

    def under(self, communication: Seconds, window_s: float) -> Seconds:
        """Seconds that communication adds to the compute that hides it."""
        return under(communication, window_s, self.machine)


def edge_time(edge: TensorFlow, alone: OperatorTime, inside: StageAxes) -> OperatorTime:
    """Collectives before a reader reads, and after it in the backward pass (EQUATIONS T2).

    A gathered input is saved as this rank's part and gathered a second time for the weight
    gradient, under the product that gives the input gradient (Korthikanti et al. 2022, section
    4.2.2). An asynchronous stack all-reduces input gradients under the product that gives the
    weight gradient. A stack may also run gathers and reduce-scatters under their products, in
    pieces. `alone` is the reader's compute; each of two products takes half of its backward. A
    frozen product gathers nothing again, and no second product hides its all-reduce, as in
    Megatron-LM's LinearWithFrozenWeight.
    """
    if edge.source == edge.target == edge.gradient:
        return FREE
    is_frozen = bool(edge.reader.parameters) and not edge.reader.trained
    gradient_s = alone.backward.value_s / (1 if is_frozen else 2)
    gathering = edge.reader if edge.gathers(inside.degrees) else None
    read = inside.moved(edge.tensor, edge.source, edge.target, gathering)
    forward = inside.beside(read, alone.forward.value_s)
    if not edge.reader.gradient:
        return OperatorTime(forward, ZERO)
    returned = inside.moved(edge.tensor, edge.gradient, edge.source)
    backward = ZERO
    if edge.gathers(inside.degrees) and edge.reader.saved and not is_frozen:
        backward += inside.under(read, gradient_s)
    if _whole_where_partial(edge.gradient, edge.source):
        asynchronous = inside.stack.async_tensor_parallel and not is_frozen
        backward += inside.under(returned, gradient_s) if asynchronous else returned
    elif inside.stack.async_reduce_scatter and not is_frozen:
        backward += inside.under(returned, gradient_s)
    else:
        backward += inside.beside(returned, gradient_s)
    return OperatorTime(forward, backward)


def own_communication(
    operator: Operator, sharding: Sharding, alone: OperatorTime, inside: StageAxes
) -> OperatorTime:
    """Communication of an operator whatever is around it.

    It ends the partial sums of an output and gathers its gradient backward, exchanges tokens with
    the ranks of their experts, and has attention read sequences that ranks divide.
    """
    if operator.exchanged is not None:
        time = _exchange_time(operator, operator.exchanged, sharding, inside)
    elif operator.kind is OperatorKind.ATTENTION and sharding.cp > 1:
        time = context_time(operator, sharding, alone, inside.machine, inside.stack)
    elif sharding.ranks == 1:
        return FREE
    else:
        time = _ending_time(operator, sharding, alone, inside)
    if sharding.rows > 1:
        time = time.plus(_grid_time(operator, sharding, inside))
    return time if operator.gradient else OperatorTime(time.forward, ZERO)


def _grid_time(operator: Operator, sharding: Sharding, inside: StageAxes) -> OperatorTime:
    """Gathers of weights and sums of norms over a grid of ranks, unhidden (EQUATIONS T7)."""
    forward, backward = grid_moves(operator, sharding, inside.training)
    return OperatorTime(
        _sum(inside.moved_bytes(*each) for each in forward),
        _sum(inside.moved_bytes(*each) for each in backward),
    )


def _ending_time(
    operator: Operator, sharding: Sharding, alone: OperatorTime, inside: StageAxes
) -> OperatorTime:
    if operator.kind is OperatorKind.CROSS_ENTROPY:
        return _loss_reductions(operator, sharding, inside)
    forward = backward = ZERO
    for tensor in operator.outputs:
        summed = sharding.place_inside(operator, tensor)
        ended = sharding.place(operator, tensor)
        if summed == ended:
            continue
        reduced = inside.moved(tensor, summed, ended)
        whole = _whole_where_partial(summed, ended)
        forward += reduced if whole else inside.beside(reduced, alone.forward.value_s)
        read = tuple(None if place == PARTIAL else place for place in summed)
        backward += inside.beside(
            inside.moved(tensor, ended, read, operator), alone.backward.value_s / 2
        )
    return OperatorTime(forward, backward)


def _whole_where_partial(summed: Place, ended: Place) -> bool:
    """True if there are partial sums, and a rank holds all of the tensor where they end."""
    ends = [end for place, end in zip(summed, ended, strict=True) if place == PARTIAL]
    return bool(ends) and not any(ends)


def loss_places(operator: Operator, sharding: Sharding) -> tuple[Place, Place]:
    """The placements of a number of each token before the ranks of a vocabulary sum it, and then.

    It stays with the tokens of a rank.
    """
    dims = [split.dim for split in sharding.splits(operator)]
    summed = tuple(PARTIAL if dim == operator.parallel_dim else dim for dim in dims)
    return summed, tuple(None if place == PARTIAL else place for place in summed)


def _loss_reductions(operator: Operator, sharding: Sharding, inside: StageAxes) -> OperatorTime:
    """Vocabulary-parallel cross entropy reduces three numbers per token.

    They are the maximum, the target's logit and the sum.
    """
    once = inside.moved(operator.outputs[0], *loss_places(operator, sharding))
    return OperatorTime(once.scaled(LOSS_REDUCTIONS), ZERO) if anywhere(once.value_s) else FREE


def leaving_time(layer: LayerClass, sharding: Sharding, inside: StageAxes) -> OperatorTime:
    """Redistribution of the layer's output to the boundary, and of its gradient back."""
    left = leaving_tensor(layer, sharding)
    if left is None or layer.kind is LayerKind.HEAD or left[1] == sharding.boundary:
        return FREE
    back = inside.moved(left[0], sharding.boundary, left[1])
    return OperatorTime(
        inside.moved(left[0], left[1], sharding.boundary),
        back if layer.operators[-1].gradient else ZERO,
    )


@dataclass(frozen=True, slots=True)
class PricedBase:
    """The operators of a layer with the base of a sharding (`Sharding.base`).

    flows    the edges of the layer, which all shardings of that base share
    """

    flows: Edges
    operators: LayerOperators


def _communication(
    layer: LayerClass,
    sharding: Sharding,
    compute: Mapping[str, OperatorTime],
    inside: StageAxes,
    base: PricedBase | None,
) -> dict[str, OperatorTime]:
    """Collectives of each operator over the axes inside the stage, and exchanges of tokens.

    base    has those of the operators whose price does not depend on more
    """
    inside = inside.beside_mixture(
        (operator, compute[operator.name]) for operator in layer.operators
    )
    known = base.operators.tensor_parallel if base else {}
    times = {
        operator.name: own_communication(operator, sharding, compute[operator.name], inside)
        if base is None or operator.name in layer.of_form
        else known[operator.name]
        for operator in layer.operators
    }
    if sharding.ranks == 1:
        return times
    summed: set[str] = set()
    flows = base.flows if base else tensor_flows_of(layer, sharding)
    for (reader, name), edge in flows.items():
        # readers of one whole tensor add up their summands of its gradient before the ranks do
        if edge.source == edge.target and PARTIAL in edge.gradient:
            if name in summed:
                continue
            summed.add(name)
        if base is None or reader in layer.of_form:
            times[reader] = times[reader].plus(edge_time(edge, compute[reader], inside))
    last = layer.operators[-1].name
    if base is None or last in layer.of_form:
        times[last] = times[last].plus(leaving_time(layer, sharding, inside))
    return times


def _exchange_time(
    operator: Operator, copies: Tensor, sharding: Sharding, inside: StageAxes
) -> OperatorTime:
    """The all-to-all of token copies to or from their experts' ranks (EQUATIONS C3, T3).

    The backward pass runs the reverse. Routing is balanced: every rank sends one ep-th of its
    copies to each rank of its group, or a token once where the stack does so.
    """
    if sharding.ep == 1:
        return FREE
    stride = sharding.etp
    gpus_per_node = inside.machine.cluster.gpus_per_node
    where = place_axis(sharding.ep, stride, sharding.ep * stride, gpus_per_node)
    num_bytes = sharding.tensor_bytes(operator, copies)
    if inside.stack.sends_tokens_once:
        once = exchange_once_time(num_bytes, copies.size("chosen"), where, inside.machine)
    else:
        once = collective_time(Collective.ALL_TO_ALL, num_bytes, where, inside.machine)
    once = inside.machine.corrected("tensor", once)
    if not inside.stack.overlap_exchanges:
        return OperatorTime(once, once)
    windows = inside.windows
    if operator.kind is OperatorKind.DISPATCH:
        hidden = inside.under(once, windows.dispatch)
        return OperatorTime(hidden, hidden)
    return OperatorTime(
        inside.under(once, windows.combine_forward), inside.under(once, windows.combine_backward)
    )


@dataclass(frozen=True, kw_only=True)
class LayerOperators:
    """Every operator of one layer class priced once; the price under any recompute set is a sum.

    more_launches    launches beside those of the operators, in the forward pass; a backward pass
                     has as many, and for a product twice as many
    """

    layer: LayerClass
    more_launches: Mapping[str, float] = field(default_factory=dict)
    host_forward_s: float
    host_backward_s: float
    compute: dict[str, OperatorTime]
    tensor_parallel: dict[str, OperatorTime]

    def time(self, recompute: Iterable[str] = ()) -> LayerTime:
        """Prices one micro-batch through the layer; the backward pass recomputes `recompute`.

        No pass is faster than the host launches it: operators, collectives, and both gradients of a
        product (EQUATIONS K9).
        """
        forward, tp_forward = self._forward(tuple(self.compute))
        repeated, tp_repeated = self.again(recompute)
        backward = _sum(time.backward for time in self.compute.values())
        tp_backward = _sum(time.backward for time in self.tensor_parallel.values())
        collectives = sum(time.backward.value_s > 0 for time in self.tensor_parallel.values())
        launches = self.layer.gradient_launches + collectives + self._more_gradient_launches
        return LayerTime(
            forward=forward,
            recompute=repeated,
            backward=launched(backward, tp_backward, launches * self.host_backward_s),
            tp_forward=tp_forward,
            tp_backward=tp_backward,
            tp_recompute=tp_repeated,
        )

    def again(self, recompute: Iterable[str]) -> tuple[Seconds, Seconds]:
        """Prices the recompute of some operators, and its collectives."""
        return self._forward(tuple(recompute))

    def by_part(
        self,
        whole: LayerTime,
        recompute: Collection[str],
        parts: Sequence[Sequence[Operator]],
    ) -> tuple[LayerTime, ...]:
        """Divides the seconds of a layer over its parts, in shares of their operators' seconds."""

        def shares(times: Mapping[str, float]) -> list[float]:
            sums = [sum(times.get(operator.name, 0.0) for operator in part) for part in parts]
            return [each / (sum(sums) or 1.0) for each in sums]

        def seconds(name: str) -> dict[str, float]:
            return {
                key: getattr(time, name).value_s + getattr(self.tensor_parallel[key], name).value_s
                for key, time in self.compute.items()
            }

        forward = seconds("forward")
        repeated = shares({name: forward[name] for name in recompute})
        return tuple(
            LayerTime(
                forward=whole.forward.scaled(ahead),
                backward=whole.backward.scaled(back),
                recompute=whole.recompute.scaled(again),
                tp_forward=whole.tp_forward.scaled(ahead),
                tp_backward=whole.tp_backward.scaled(back),
                tp_recompute=whole.tp_recompute.scaled(again),
            )
            for ahead, back, again in zip(
                shares(forward), shares(seconds("backward")), repeated, strict=True
            )
        )

    @property
    def _more_gradient_launches(self) -> float:
        return sum(
            self.more_launches.get(operator.name, 0.0) * (1 + operator.weight_gradient)
            for operator in self.layer.operators
            if operator.gradient
        )

    @property
    def weight_time(self) -> Seconds:
        """Seconds of the backward pass for gradients of weights, which zero-bubble defers."""
        return _sum(time.weight for time in self.compute.values())

    def _forward(self, names: tuple[str, ...]) -> tuple[Seconds, Seconds]:
        compute = _sum(self.compute[name].forward for name in names)
        communication = _sum(self.tensor_parallel[name].forward for name in names)
        collectives = sum(self.tensor_parallel[name].forward.value_s > 0 for name in names)
        operators = sum(self.compute[name] is not FREE for name in names)
        more = sum(self.more_launches.get(name, 0.0) for name in names)
        launches = operators + collectives + more
        return launched(compute, communication, launches * self.host_forward_s), communication


def launched(compute: Seconds, communication: Seconds, host_s: float) -> Seconds:
    """Adds to the compute the device's wait for the host where launching is slower than running."""
    waits_s = host_s - compute.value_s - communication.value_s
    if not anywhere(waits_s > 0):
        return compute
    return compute + Seconds(larger_of(waits_s, 0.0), Kind.ANALYTIC)


def price_operators(
    layer: LayerClass,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
    inside: StageAxes | None = None,
    time_of: Callable[[Operator], OperatorTime] | None = None,
    base: PricedBase | None = None,
) -> LayerOperators:
    """Compute and tensor-parallel communication of every operator of `layer` on one rank.

    inside, time_of    prices of redistributions and of operators that others share
    base               the operators with the base of the sharding, None where they have no price
    """
    inside = inside or StageAxes(sharding.degrees, machine, training)
    time_of = time_of or (lambda operator: operator_time(operator, sharding, machine, training))
    compute = {
        operator.name: time_of(operator)
        if base is None or operator.name in layer.of_experts
        else base.operators.compute[operator.name]
        for operator in layer.operators
    }
    forward_s, backward_s = launch_s(machine, training.stack)
    return LayerOperators(
        layer=layer,
        host_forward_s=forward_s,
        host_backward_s=backward_s,
        more_launches={
            operator.name: more
            for operator in layer.operators
            if (more := more_launches(operator, sharding.ep, training.stack))
        },
        compute=compute,
        tensor_parallel=_communication(layer, sharding, compute, inside, base),
    )
