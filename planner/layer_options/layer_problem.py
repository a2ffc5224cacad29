"""One layer as a choice of a strategy for every operator: the options, and what each pair of
placements costs between them.

An option of an operator is how each axis divides it, and whether it is recomputed. What lies
between two operators depends on where the maker leaves a tensor and where the reader wants it, not
on their strategies in full: hence *placement* pairs (EQUATIONS I2). A placement here also says
whether its side recomputes, which decides what is kept of the tensor.

One thing is not a sum over pairs: a tensor that its first reader keeps as a copy of its own, while
another keeps what the maker left. The second is left out; the catalogue prices it
(planner/layer_options/catalogue.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from parplan.costmodels.layers.layer_price import StageAxes, edge_time
from parplan.costmodels.layers.operator_price import OperatorPrice, operator_price, single
from parplan.costmodels.layers.tensor_flow import TensorFlow, keeps_output
from parplan.costmodels.operators.host_launch import launch_s
from parplan.costmodels.operators.sharding import Place, Sharding, Splits, operator_splits
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec

BEFORE = -1  # the maker of what enters the layer


@dataclass(frozen=True, slots=True)
class LeftTensor:
    """Where a maker leaves its output, and whether it makes the output again in the backward
    pass.
    """

    place: Place
    again: bool


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """Where a reader wants an input and leaves its gradient, and whether the reader runs again."""

    place: Place
    gradient: Place
    again: bool


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Seconds of one micro-batch, bytes of model states, bytes kept for the backward pass, and kept
    without any recompute.

    forward_s, backward_s: of the passes without recompute; sent_forward, sent_backward: whether a
    collective is among them
    """

    time_s: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    whole_bytes: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    sent_forward: bool = False
    sent_backward: bool = False

    def no_worse(self, other: StrategyCost) -> bool:
        return (
            self.time_s <= other.time_s
            and self.state_bytes <= other.state_bytes
            and self.saved_bytes <= other.saved_bytes
        )


@dataclass(frozen=True, slots=True)
class StrategyOption:
    """One strategy of one operator; `inputs` in the order of the operator's links. `gradient_bytes`
    is its backward pass's.
    """

    splits: Splits
    again: bool
    inputs: tuple[WantedTensor, ...]
    output: LeftTensor
    cost: StrategyCost
    gradient_bytes: float


@dataclass(frozen=True, slots=True)
class TensorLink:
    """A tensor from option list `maker` (BEFORE: the layer's input) to `reader` (one past the last:
    the layer after).
    """

    maker: int
    reader: int
    cells: Mapping[tuple[LeftTensor, WantedTensor], StrategyCost]


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """`options[i]` of operator i in topological order, and the links between them; `enters` and
    `leaves` are fixed.

    products: which operators launch two gradients; host_forward_s, host_backward_s: what the host
    needs to launch one
    """

    names: tuple[str, ...]
    options: tuple[tuple[StrategyOption, ...], ...]
    links: tuple[TensorLink, ...]
    enters: LeftTensor
    leaves: WantedTensor | None
    workspace_bytes: float = 0.0
    products: tuple[bool, ...] = ()
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    def incoming(self, reader: int) -> tuple[TensorLink, ...]:
        return tuple(link for link in self.links if link.reader == reader)

    def only(self, allowed: Callable[[str, StrategyOption], bool]) -> LayerProblem:
        """The problem with the options that `allowed` says yes to, by operator name."""
        pairs = zip(self.names, self.options, strict=True)
        return replace(
            self,
            options=tuple(tuple(o for o in options if allowed(name, o)) for name, options in pairs),
        )


def may_recompute(operator: Operator) -> bool:
    """Whether an operator can run again by itself: one that draws a dropout mask would draw
    another, but for attention's.
    """
    masks = any(tensor.element_bytes == 1 for tensor in operator.saved)
    return operator.kind is OperatorKind.ATTENTION or not masks


def layer_problem(
    layer: LayerClass,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
    *,
    zero: int = 0,
    dp: int = 1,
) -> LayerProblem:
    """The problem of `layer` over the axes and with the boundary of `sharding`, with states at ZeRO
    stage `zero`.
    """
    return _Builder(
        layer, sharding, StageAxes(sharding.degrees, machine, training.stack), training, zero, dp
    ).build()


@dataclass(frozen=True, slots=True)
class _MovedTensor:
    """A tensor between two placements: seconds, and the bytes that the reader, and beside it the
    maker, keep of it.
    """

    forward_s: float
    backward_s: float
    stored_bytes: float
    own_copy: bool
    makers_bytes: float


class _Builder:
    """What the options and links of one problem share."""

    def __init__(
        self,
        layer: LayerClass,
        sharding: Sharding,
        inside: StageAxes,
        training: TrainingSpec,
        zero: int,
        dp: int,
    ) -> None:
        self.layer, self.sharding, self.inside, self.training, self.zero, self.dp = (
            layer,
            sharding,
            inside,
            training,
            zero,
            dp,
        )
        self.index = {operator.name: i for i, operator in enumerate(layer.operators)}
        self.makers = {tensor.name: op.name for op in layer.operators for tensor in op.outputs}
        self.savers: dict[str, str] = {}  # the first operator that saves a tensor: it counts there
        for operator in layer.operators:
            for tensor in operator.saved:
                self.savers.setdefault(tensor.name, operator.name)
        self.moved: dict[tuple[str, str, Place, Place, Place], _MovedTensor] = {}
        self.alone: dict[
            tuple[str, Place, Place], OperatorPrice
        ] = {}  # by reader, and where it has its input and that gradient

    def build(self) -> LayerProblem:
        options = tuple(
            self._undominated(list(self._options(operator))) for operator in self.layer.operators
        )
        boundary = LeftTensor(self.sharding.boundary, False)
        ends = self.layer.kind is LayerKind.HEAD
        leaves = (
            None if ends else WantedTensor(self.sharding.boundary, self.sharding.boundary, False)
        )
        links = [link for i in range(len(options)) for link in self._links(i, options, boundary)]
        if leaves is not None:
            links.append(self._last_link(options, leaves))
        host_forward_s, host_backward_s = launch_s(self.inside.machine, self.training.stack)
        return LayerProblem(
            tuple(self.index),
            options,
            tuple(links),
            boundary,
            leaves,
            workspace_bytes=self.training.stack.workspace_bytes,
            products=tuple(
                operator.kind is OperatorKind.MATMUL for operator in self.layer.operators
            ),
            host_forward_s=host_forward_s,
            host_backward_s=host_backward_s,
        )

    def _options(self, operator: Operator) -> Iterator[StrategyOption]:
        legal, _ = operator_splits(operator, self.sharding.degrees)
        for splits in legal:
            price = operator_price(
                operator, splits, self.inside, self.training, zero=self.zero, dp=self.dp
            )
            yield self._option(operator, splits, price, again=False)
            if may_recompute(operator):
                yield self._option(operator, splits, price, again=True)

    def _option(
        self, operator: Operator, splits: Splits, price: OperatorPrice, *, again: bool
    ) -> StrategyOption:
        own = single(operator, splits, self.sharding.degrees)
        for tensor in operator.inputs:
            self.alone[
                operator.name, own.place(operator, tensor), own.gradient_place(operator, tensor)
            ] = price
        return StrategyOption(
            splits=splits,
            again=again,
            inputs=tuple(
                WantedTensor(own.place(operator, t), own.gradient_place(operator, t), again)
                for t in operator.inputs
            ),
            output=LeftTensor(own.place(operator, operator.outputs[0]), again),
            cost=StrategyCost(
                time_s=price.forward_s * (2 if again else 1) + price.backward_s,
                state_bytes=price.states.total,
                saved_bytes=0.0 if again else price.saved_bytes,
                whole_bytes=price.saved_bytes,
                forward_s=price.forward_s,
                backward_s=price.backward_s,
                sent_forward=price.ending.forward.value_s > 0,
                sent_backward=price.ending.backward.value_s > 0,
            ),
            gradient_bytes=price.temporary_bytes,
        )

    @staticmethod
    def _undominated(options: list[StrategyOption]) -> tuple[StrategyOption, ...]:
        """Of options with the same placements, those that no other beats in time, states, kept and
        gradient bytes.
        """
        kept: list[StrategyOption] = []
        for option in sorted(
            options, key=lambda o: (o.cost.time_s, o.cost.state_bytes, o.cost.saved_bytes)
        ):
            alike = (
                other
                for other in kept
                if (other.inputs, other.output) == (option.inputs, option.output)
            )
            if not any(
                other.cost.no_worse(option.cost) and other.gradient_bytes <= option.gradient_bytes
                for other in alike
            ):
                kept.append(option)
        return tuple(kept)

    def _links(
        self, reader: int, options: tuple[tuple[StrategyOption, ...], ...], boundary: LeftTensor
    ) -> Iterator[TensorLink]:
        operator = self.layer.operators[reader]
        for position, tensor in enumerate(operator.inputs):
            name = self.makers.get(tensor.name)
            maker = BEFORE if name is None else self.index[name]
            lefts = (
                dict.fromkeys(o.output for o in options[maker])
                if name is not None
                else {boundary: None}
            )
            wanted = dict.fromkeys(option.inputs[position] for option in options[reader])
            yield TensorLink(
                maker,
                reader,
                {(a, b): self._cell(name, operator, tensor, a, b) for a in lefts for b in wanted},
            )

    def _cell(
        self,
        maker: str | None,
        reader: Operator,
        tensor: Tensor,
        left: LeftTensor,
        wanted: WantedTensor,
    ) -> StrategyCost:
        moved = self._moved(maker, reader, tensor, left.place, wanted)
        first = self.savers.get(tensor.name) == reader.name
        saves = any(tensor.name == saved.name for saved in reader.saved)
        needed = first or (
            (saves or wanted.again) and (moved.own_copy or tensor.name not in self.savers)
        )
        stays = (
            maker is not None
            and self.layer.operator(maker).kind is OperatorKind.ATTENTION
            and not wanted.again
        )
        kept = needed and (not left.again or stays)
        makers = 0.0 if left.again else moved.makers_bytes
        return StrategyCost(
            time_s=moved.forward_s * (2 if wanted.again else 1) + moved.backward_s,
            forward_s=moved.forward_s,
            backward_s=moved.backward_s,
            sent_forward=moved.forward_s > 0,
            sent_backward=moved.backward_s > 0,
            saved_bytes=moved.stored_bytes + makers if kept else 0.0,
            whole_bytes=moved.stored_bytes + moved.makers_bytes
            if first or (saves and moved.own_copy)
            else 0.0,
        )

    def _moved(
        self,
        maker: str | None,
        reader: Operator,
        tensor: Tensor,
        source: Place,
        wanted: WantedTensor,
    ) -> _MovedTensor:
        """The move between two placements, whatever runs again."""
        key = (reader.name, tensor.name, source, wanted.place, wanted.gradient)
        if key not in self.moved:
            edge = TensorFlow(
                tensor=tensor,
                maker=maker,
                reader=reader,
                source=source,
                target=wanted.place,
                gradient=wanted.gradient,
                makers_own=keeps_output(self.layer.operator(maker) if maker else None),
            )
            time = edge_time(
                edge, self.alone[reader.name, wanted.place, wanted.gradient].compute, self.inside
            )
            degrees = self.sharding.degrees
            self.moved[key] = _MovedTensor(
                time.forward.value_s,
                time.backward.value_s,
                self._stored_bytes(edge),
                edge.keeps_own_copy(degrees),
                self.sharding.local_bytes(tensor, source) if edge.kept_twice(degrees) else 0.0,
            )
        return self.moved[key]

    def _stored_bytes(self, edge: TensorFlow) -> float:
        where = (
            edge.target
            if self.training.stack.keeps_gathered_inputs
            else edge.kept_place(self.sharding.degrees)
        )
        return self.sharding.local_bytes(edge.tensor, where)

    def _last_link(
        self, options: tuple[tuple[StrategyOption, ...], ...], leaves: WantedTensor
    ) -> TensorLink:
        """From the last operator to the boundary."""
        last, tensor = len(options) - 1, self.layer.operators[-1].outputs[0]

        def cost(left: LeftTensor) -> StrategyCost:
            there = self.inside.moved(tensor, left.place, leaves.place)
            back = self.inside.moved(tensor, leaves.place, left.place)
            return StrategyCost(
                time_s=there.value_s * (2 if left.again else 1) + back.value_s,
                forward_s=there.value_s,
                backward_s=back.value_s,
                sent_forward=there.value_s > 0,
                sent_backward=back.value_s > 0,
            )

        return TensorLink(
            last,
            last + 1,
            {(left, leaves): cost(left) for left in dict.fromkeys(o.output for o in options[last])},
        )
