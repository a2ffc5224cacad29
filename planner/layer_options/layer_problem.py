"""One layer as a choice of a strategy for every operator.

An option of an operator states how each axis divides it, and whether it is recomputed. The cost
between two operators depends on the placement in which the maker leaves a tensor and on the
placement that the reader needs, not on their whole strategies, hence the *placement pairs*
(EQUATIONS I2). A placement here also says whether its side recomputes, which decides the bytes that
are saved.

One cost is no sum over pairs: the first reader of a tensor saves a copy while another reader saves
the maker's output. The problem leaves the second out; the catalogue prices it
(planner/layer_options/catalogue.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from parplan.costmodels.layers.layer_price import StageAxes, edge_time
from parplan.costmodels.layers.operator_price import (
    OperatorPrice,
    operator_price,
    single_operator_sharding,
)
from parplan.costmodels.layers.tensor_flow import TensorFlow, saves_own_output
from parplan.costmodels.operators.host_launch import launch_s
from parplan.costmodels.operators.sharding import Place, Sharding, Splits, operator_splits
from parplan.planner.dominance import Array
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec

BEFORE = -1  # the maker of the layer's input


@dataclass(frozen=True, slots=True)
class OutputPlacement:
    """The placement in which a maker leaves its output, and whether the maker is recomputed."""

    place: Place
    recomputed: bool


@dataclass(frozen=True, slots=True)
class InputPlacement:
    """The placements of an input and its gradient, and whether the reader is recomputed."""

    place: Place
    gradient: Place
    recomputed: bool


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Seconds of one micro-batch and bytes of a strategy or of a tensor between two.

    state_bytes                   model states
    saved_bytes                   saved for the backward pass
    whole_bytes                   saved for the backward pass without any recompute
    forward_s, backward_s         the passes without recompute
    sent_forward, sent_backward   whether a collective is in the pass
    """

    time_s: float = 0.0
    state_bytes: float = 0.0
    saved_bytes: float = 0.0
    whole_bytes: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    sent_forward: bool = False
    sent_backward: bool = False

    def no_worse(self, cost: StrategyCost) -> bool:
        return (
            self.time_s <= cost.time_s
            and self.state_bytes <= cost.state_bytes
            and self.saved_bytes <= cost.saved_bytes
        )


@dataclass(frozen=True, slots=True)
class StrategyOption:
    """One strategy of one operator.

    inputs           in the order of the operator's links
    gradient_bytes   temporary bytes of its backward pass
    """

    splits: Splits
    recomputed: bool
    inputs: tuple[InputPlacement, ...]
    output: OutputPlacement
    cost: StrategyCost
    gradient_bytes: float


@dataclass(frozen=True)
class TensorLink:
    """A tensor between two operators, by their numbers in the list of options.

    `maker` is BEFORE for the input of the layer; `reader` is one past the last for its output.
    `cells` has every pair of the placements `lefts` and `needs`, in that order.
    """

    maker: int
    reader: int
    lefts: tuple[OutputPlacement, ...]
    needs: tuple[InputPlacement, ...]
    cells: Mapping[tuple[OutputPlacement, InputPlacement], StrategyCost]

    @cached_property
    def time_s(self) -> Array:
        """Seconds by left and needed placement."""
        return self._table("time_s")

    @cached_property
    def saved_bytes(self) -> Array:
        """Saved bytes by left and needed placement."""
        return self._table("saved_bytes")

    def _table(self, name: str) -> Array:
        values = [getattr(cost, name) for cost in self.cells.values()]
        return np.array(values).reshape(len(self.lefts), len(self.needs))


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """The options of every operator in topological order, and the links between them.

    enters, leaves                    the fixed placements at the boundary of the layer
    products                          by operator, whether it launches two gradients
    host_forward_s, host_backward_s   seconds in which the host launches one operator
    """

    names: tuple[str, ...]
    options: tuple[tuple[StrategyOption, ...], ...]
    links: tuple[TensorLink, ...]
    enters: OutputPlacement
    leaves: InputPlacement | None
    workspace_bytes: float = 0.0
    products: tuple[bool, ...] = ()
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    def incoming(self, reader: int) -> tuple[TensorLink, ...]:
        return tuple(link for link in self.links if link.reader == reader)

    def only(self, allowed: Callable[[str, StrategyOption], bool]) -> LayerProblem:
        """Returns the problem with the options that `allowed` accepts by operator name."""
        pairs = zip(self.names, self.options, strict=True)
        return replace(
            self,
            options=tuple(tuple(o for o in options if allowed(name, o)) for name, options in pairs),
        )


def may_recompute(operator: Operator) -> bool:
    """Returns whether an operator can run again alone: a new dropout mask would differ."""
    masks = any(tensor.element_bytes == 1 for tensor in operator.saved)
    return operator.repeatable and (operator.kind is OperatorKind.ATTENTION or not masks)


def layer_problem(
    layer: LayerClass,
    sharding: Sharding,
    machine: Machine,
    training: TrainingSpec,
    *,
    zero: int = 0,
    dp: int = 1,
) -> LayerProblem:
    """Returns the problem of `layer` over the axes and with the boundary of `sharding`."""
    inside = StageAxes(sharding.degrees, machine, training.stack)
    return LayerStrategies(layer, inside, training, zero, dp).problem(sharding.boundary)


def _makers(layer: LayerClass) -> dict[tuple[int, str], str]:
    """The maker of each input by the reader's number; an operator in place makes its input anew."""
    makers: dict[tuple[int, str], str] = {}
    last: dict[str, str] = {}
    for reader, operator in enumerate(layer.operators):
        for tensor in operator.inputs:
            if tensor.name in last:
                makers[reader, tensor.name] = last[tensor.name]
        last.update({tensor.name: operator.name for tensor in operator.outputs})
    return makers


@dataclass(frozen=True, slots=True)
class _MovedTensor:
    """A tensor between two placements: seconds, and the bytes that reader and maker save."""

    forward_s: float
    backward_s: float
    stored_bytes: float
    own_copy: bool
    makers_bytes: float


class LayerStrategies:
    """The strategies of every operator of a layer on the axes `inside`, and the links between them.

    All boundaries of the layer share them. With a `sharding` its split is the only one of each
    operator.

    savers   by tensor, the first operator that saves it: its bytes count there
    alone    by reader and the placements of an input and of its gradient, the price of the reader
    """

    def __init__(
        self,
        layer: LayerClass,
        inside: StageAxes,
        training: TrainingSpec,
        zero: int = 0,
        dp: int = 1,
        sharding: Sharding | None = None,
    ) -> None:
        self.layer = layer
        self.inside = inside
        self.given = sharding
        self.sharding = Sharding(
            math.prod(inside.degrees), axes=inside.degrees if len(inside.degrees) > 1 else ()
        )
        self.training = training
        self.zero = zero
        self.dp = dp
        self.index = {operator.name: i for i, operator in enumerate(layer.operators)}
        self.savers: dict[str, str] = {}
        for operator in layer.operators:
            for tensor in operator.saved:
                if tensor.name not in layer.outside:
                    self.savers.setdefault(tensor.name, operator.name)
        self.moved: dict[tuple[str, str, Place, Place, Place], _MovedTensor] = {}
        self.alone: dict[tuple[str, Place, Place], OperatorPrice] = {}
        self.options = tuple(
            self._undominated(list(self._options(operator))) for operator in layer.operators
        )
        makers = _makers(layer)
        self.links = {
            (reader, position): self._link(reader, position, maker)
            for reader, operator in enumerate(layer.operators)
            for position, tensor in enumerate(operator.inputs)
            if (maker := makers.get((reader, tensor.name))) is not None
        }

    def problem(self, boundary: Place) -> LayerProblem:
        """Returns the problem of the layer between layers whose activations lie at `boundary`."""
        enters = OutputPlacement(boundary, False)
        ends = self.layer.kind is LayerKind.HEAD
        leaves = None if ends else InputPlacement(boundary, boundary, False)
        links = [
            self.links.get((reader, position)) or self._link(reader, position, None, enters)
            for reader, operator in enumerate(self.layer.operators)
            for position, _ in enumerate(operator.inputs)
        ]
        if leaves is not None:
            links.append(self._last_link(leaves))
        host_forward_s, host_backward_s = launch_s(self.inside.machine, self.training.stack)
        return LayerProblem(
            tuple(self.index),
            self.options,
            tuple(links),
            enters,
            leaves,
            workspace_bytes=self.training.stack.workspace_bytes,
            products=tuple(
                operator.kind is OperatorKind.MATMUL for operator in self.layer.operators
            ),
            host_forward_s=host_forward_s,
            host_backward_s=host_backward_s,
        )

    def _options(self, operator: Operator) -> Iterator[StrategyOption]:
        legal: Iterable[Splits]
        if self.given is not None:
            legal = (self.given.splits(operator),)
        else:
            legal, _ = operator_splits(operator, self.sharding.degrees)
        for splits in legal:
            price = operator_price(
                operator, splits, self.inside, self.training, zero=self.zero, dp=self.dp
            )
            yield self._option(operator, splits, price, recomputed=False)
            if may_recompute(operator):
                yield self._option(operator, splits, price, recomputed=True)

    def _option(
        self, operator: Operator, splits: Splits, price: OperatorPrice, *, recomputed: bool
    ) -> StrategyOption:
        operator_sharding = single_operator_sharding(operator, splits, self.sharding.degrees)
        for tensor in operator.inputs:
            self.alone[
                operator.name,
                operator_sharding.place(operator, tensor),
                operator_sharding.gradient_place(operator, tensor),
            ] = price
        return StrategyOption(
            splits=splits,
            recomputed=recomputed,
            inputs=tuple(
                InputPlacement(
                    operator_sharding.place(operator, t),
                    operator_sharding.gradient_place(operator, t),
                    recomputed,
                )
                for t in operator.inputs
            ),
            output=OutputPlacement(
                operator_sharding.place(operator, operator.outputs[0]), recomputed
            ),
            cost=StrategyCost(
                time_s=price.forward_s * (2 if recomputed else 1) + price.backward_s,
                state_bytes=price.states.total,
                saved_bytes=0.0 if recomputed else price.saved_bytes,
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
        """Returns the options that no other of the same placements beats."""
        kept: list[StrategyOption] = []
        for option in sorted(
            options, key=lambda o: (o.cost.time_s, o.cost.state_bytes, o.cost.saved_bytes)
        ):
            alike = (
                rival
                for rival in kept
                if (rival.inputs, rival.output) == (option.inputs, option.output)
            )
            if not any(
                rival.cost.no_worse(option.cost) and rival.gradient_bytes <= option.gradient_bytes
                for rival in alike
            ):
                kept.append(option)
        return tuple(kept)

    def _link(
        self, reader: int, position: int, maker: str | None, enters: OutputPlacement | None = None
    ) -> TensorLink:
        """Returns the link to one input of a reader from its maker, or from where it `enters`."""
        operator = self.layer.operators[reader]
        tensor = operator.inputs[position]
        number = BEFORE if maker is None else self.index[maker]
        lefts = (enters,) if enters is not None else self._outputs(number)
        needs = tuple(dict.fromkeys(option.inputs[position] for option in self.options[reader]))
        cells = self._cells(maker, operator, tensor, lefts, needs)
        return TensorLink(number, reader, lefts, needs, cells)

    def _outputs(self, operator: int) -> tuple[OutputPlacement, ...]:
        return tuple(dict.fromkeys(option.output for option in self.options[operator]))

    def _cells(
        self,
        maker: str | None,
        reader: Operator,
        tensor: Tensor,
        lefts: tuple[OutputPlacement, ...],
        needs: tuple[InputPlacement, ...],
    ) -> dict[tuple[OutputPlacement, InputPlacement], StrategyCost]:
        """Returns the cost of a tensor by the placements of its maker and its reader."""
        first = self.savers.get(tensor.name) == reader.name
        outside = tensor.name in self.layer.outside
        saves = not outside and any(tensor.name == saved.name for saved in reader.saved)
        nobody_saves = tensor.name not in self.savers
        by = self.layer.operator(maker) if maker else None
        of_attention = by is not None and by.kind is OperatorKind.ATTENTION
        makers_own = saves_own_output(by)

        def cell(left: OutputPlacement, needed: InputPlacement) -> StrategyCost:
            moved = self._moved(maker, reader, tensor, left.place, needed, makers_own=makers_own)
            own_copy = moved.own_copy
            saved_here = first or (
                not outside and (saves or needed.recomputed) and (own_copy or nobody_saves)
            )
            stays = of_attention and not needed.recomputed
            kept = saved_here and (not left.recomputed or stays)
            makers = 0.0 if left.recomputed else moved.makers_bytes
            whole = first or (saves and own_copy)
            return StrategyCost(
                time_s=moved.forward_s * (2 if needed.recomputed else 1) + moved.backward_s,
                forward_s=moved.forward_s,
                backward_s=moved.backward_s,
                sent_forward=moved.forward_s > 0,
                sent_backward=moved.backward_s > 0,
                saved_bytes=moved.stored_bytes + makers if kept else 0.0,
                whole_bytes=moved.stored_bytes + moved.makers_bytes if whole else 0.0,
            )

        return {(left, needed): cell(left, needed) for left in lefts for needed in needs}

    def _moved(
        self,
        maker: str | None,
        reader: Operator,
        tensor: Tensor,
        source: Place,
        needed: InputPlacement,
        *,
        makers_own: bool,
    ) -> _MovedTensor:
        """Prices the move between two placements, independent of recompute."""
        key = (reader.name, tensor.name, source, needed.place, needed.gradient)
        if key not in self.moved:
            edge = TensorFlow(
                tensor=tensor,
                maker=maker,
                reader=reader,
                source=source,
                target=needed.place,
                gradient=needed.gradient,
                makers_own=makers_own,
            )
            time = edge_time(
                edge, self.alone[reader.name, needed.place, needed.gradient].compute, self.inside
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

    def _last_link(self, leaves: InputPlacement) -> TensorLink:
        """Returns the link from the last operator to the boundary."""
        last, tensor = len(self.options) - 1, self.layer.operators[-1].outputs[0]

        def cost(left: OutputPlacement) -> StrategyCost:
            there = self.inside.moved(tensor, left.place, leaves.place)
            back = self.inside.moved(tensor, leaves.place, left.place)
            return StrategyCost(
                time_s=there.value_s * (2 if left.recomputed else 1) + back.value_s,
                forward_s=there.value_s,
                backward_s=back.value_s,
                sent_forward=there.value_s > 0,
                sent_backward=back.value_s > 0,
            )

        lefts = self._outputs(last)
        cells = {(left, leaves): cost(left) for left in lefts}
        return TensorLink(last, last + 1, lefts, (leaves,), cells)
