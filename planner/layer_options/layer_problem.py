"""One layer as a choice of a strategy for every operator.

An option of an operator states how each axis divides it, and whether it is recomputed. The cost
between two operators depends on the placement in which the maker leaves a tensor and on the
placement that the reader needs, not on their whole strategies, hence the *placement pairs*
(EQUATIONS I2). A placement here also says whether its side recomputes, which decides the bytes that
are saved.

One cost is no sum over pairs: the first reader of a tensor saves a copy while another reader saves
the maker's output. The costs leave the second out, so that they are a bound. Its bytes are beside
them in the link: fronts add them (planner/layer_options/layer_front.py), the catalogue prices them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.layer_price import StageAxes, edge_time
from parplan.costmodels.layers.model_states import StateSharding
from parplan.costmodels.layers.operator_price import (
    WHOLE,
    OperatorPrice,
    operator_prices,
    single_operator_sharding,
)
from parplan.costmodels.layers.tensor_flow import TensorFlow, saves_own_output
from parplan.costmodels.operators.compute import OperatorTime, operator_time
from parplan.costmodels.operators.host_launch import launch_s, more_launches
from parplan.costmodels.operators.legal_splits import divides, operator_splits
from parplan.costmodels.operators.micro_batches import of_all_sizes
from parplan.costmodels.operators.sharding import Place, Sharding, Splits
from parplan.planner.dominance import Array, Ints, Mask
from parplan.profiles.elementwise import Number
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    PRODUCTS,
    LayerClass,
    LayerKind,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.spec import TrainingSpec

T = TypeVar("T")

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
class StrategyCosts:
    """Seconds of one micro-batch and bytes of strategies, or of a tensor between two.

    Each is an array by option, or by left and needed placement; the first axis of LayerStrategies
    is the micro-batch size.

    state_bytes                   model states
    saved_bytes                   saved for the backward pass
    whole_bytes                   saved for the backward pass without any recompute
    forward_s, backward_s         the passes without recompute
    sent_forward, sent_backward   whether a collective is in the pass
    gradient_bytes                temporary bytes of the backward pass
    """

    time_s: Number
    state_bytes: Number
    saved_bytes: Number
    whole_bytes: Number
    forward_s: Number
    backward_s: Number
    sent_forward: Number
    sent_backward: Number
    gradient_bytes: Number

    def at(self, index: Any) -> StrategyCosts:
        """Returns the costs at an index of every array."""
        return StrategyCosts(*(getattr(self, name)[index] for name in _COSTS))

    def listed(self) -> list[StrategyCosts]:
        """Returns the costs of each entry as numbers, in the order of the flat arrays."""
        columns = (np.ravel(getattr(self, name)).tolist() for name in _COSTS)
        return [StrategyCosts(*row) for row in zip(*columns, strict=True)]


_COSTS = tuple(each.name for each in fields(StrategyCosts))


@dataclass(frozen=True, slots=True)
class StrategyOption:
    """One strategy of one operator; `inputs` are in the order of the operator's links.

    zero    the ZeRO stage of its parameters where it is a choice (`OperatorZero`), else None
    """

    splits: Splits
    recomputed: bool
    inputs: tuple[InputPlacement, ...]
    output: OutputPlacement
    zero: int | None = None


@dataclass(frozen=True, slots=True)
class BesideCopy:
    """The bytes of a tensor that are saved beside a copy of its first saver.

    own_copy     by placements, whether the reader is the first saver and saves its own copy
    more_bytes   by placements, that a later reader then saves where the maker left the tensor, if
                 no reader before it does; the first axis of LayerStrategies is the size
    """

    own_copy: Mask
    more_bytes: Array

    def of_size(self, number: int) -> BesideCopy:
        """Returns the bytes of one of the micro-batch sizes."""
        return BesideCopy(self.own_copy, self.more_bytes[number])


@dataclass(frozen=True, slots=True)
class TensorLink:
    """A tensor between two operators, by their numbers in the list of options.

    maker     BEFORE for the input of the layer
    reader    one past the last for the layer's output
    costs     by placement of `lefts` and of `needs`
    left      by option of the maker, the number of its placement
    needed    by option of the reader, the number of its placement
    beside    what the costs leave out where another reader saves the tensor too, None for nothing
    """

    maker: int
    reader: int
    lefts: tuple[OutputPlacement, ...]
    needs: tuple[InputPlacement, ...]
    costs: StrategyCosts
    left: Ints
    needed: Ints
    beside: BesideCopy | None = None

    def sides(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Returns the numbers of both placements, by row of one option for every operator."""
        none = np.zeros(len(chosen), np.int64)
        ends = self.reader == chosen.shape[1]
        return (
            none if self.maker == BEFORE else self.left[chosen[:, self.maker]],
            none if ends else self.needed[chosen[:, self.reader]],
        )


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """The options of every operator in topological order, and the links between them.

    costs                             by operator, those of its options
    products                          by operator, whether it launches two gradients
    launches                          by operator, those of its forward pass
    host_forward_s, host_backward_s   seconds in which the host launches one operator
    """

    names: tuple[str, ...]
    options: tuple[tuple[StrategyOption, ...], ...]
    costs: tuple[StrategyCosts, ...]
    links: tuple[TensorLink, ...]
    workspace_bytes: float = 0.0
    products: tuple[bool, ...] = ()
    launches: tuple[Number, ...] = ()
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    def incoming(self, reader: int) -> tuple[TensorLink, ...]:
        return tuple(link for link in self.links if link.reader == reader)

    def with_sizes(self) -> LayerProblem:
        """Returns the problem of one micro-batch size, with the size as first axis of its costs."""
        return replace(
            self,
            costs=tuple(costs.at(None) for costs in self.costs),
            links=tuple(replace(link, costs=link.costs.at(None)) for link in self.links),
        )

    def only(self, allowed: Callable[[str, StrategyOption], bool]) -> LayerProblem:
        """Returns the problem with the options that `allowed` accepts by operator name."""
        return self._with(
            [
                np.array([k for k, o in enumerate(options) if allowed(name, o)], np.int64)
                for name, options in zip(self.names, self.options, strict=True)
            ]
        )

    def of_size(self, number: int, kept: Sequence[Ints]) -> LayerProblem:
        """Returns the problem of one of the micro-batch sizes, with the `kept` options."""
        return replace(
            self,
            costs=tuple(costs.at(number) for costs in self.costs),
            links=tuple(
                replace(
                    link,
                    costs=link.costs.at(number),
                    beside=link.beside.of_size(number) if link.beside else None,
                )
                for link in self.links
            ),
        )._with(kept)

    def _with(self, kept: Sequence[Ints]) -> LayerProblem:
        """Returns the problem with some options of each operator, by their numbers."""
        return replace(
            self,
            options=tuple(
                tuple(options[k] for k in some.tolist())
                for options, some in zip(self.options, kept, strict=True)
            ),
            costs=tuple(costs.at(some) for costs, some in zip(self.costs, kept, strict=True)),
            links=tuple(
                replace(
                    link,
                    left=link.left if link.maker == BEFORE else link.left[kept[link.maker]],
                    needed=(
                        link.needed if link.reader == len(kept) else link.needed[kept[link.reader]]
                    ),
                )
                for link in self.links
            ),
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
    inside = StageAxes(sharding.degrees, machine, training)
    over_data = sharding.data > 1
    strategies = LayerStrategies(
        (layer,), inside, training, zero, dp, over_data=over_data, like=sharding
    )
    (problem,) = strategies.problems(sharding)
    return problem


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
    """A tensor between two placements: seconds, and the bytes that reader and maker save.

    part_bytes    what the first saver of the tensor saves of it
    """

    forward_s: Number
    backward_s: Number
    stored_bytes: Number
    part_bytes: Number
    own_copy: bool
    makers_bytes: Number


@dataclass(frozen=True, slots=True)
class _Strategies:
    """The strategies of an operator: options, their costs, and what `LayerStrategies` has of it."""

    options: tuple[StrategyOption, ...]
    costs: StrategyCosts
    kept: list[Ints]
    alone: dict[tuple[str, Place, Place], OperatorTime]


class LayerStrategies:
    """The strategies of every operator of a layer on the axes `inside`, and the links between them.

    All boundaries of the layer share them. The layer is given once for each micro-batch size, and
    all sizes are priced at once. With a `sharding` its split is the only one of each operator. With
    `over_data` the first axis are data-parallel ranks. Experts and sequences are divided as in
    `like`. What is priced for one number of ranks of the experts and one context form is in
    `shared`, for all that have the same `Sharding.base`.

    savers   by tensor, the first operator that saves it: its bytes count there
    alone    by reader and the placements of an input and of its gradient, the reader's seconds
    kept     by operator and micro-batch size, the numbers of the options that are legal, and that
             no other of the same placements beats
    """

    def __init__(
        self,
        layers: Sequence[LayerClass],
        inside: StageAxes,
        training: TrainingSpec,
        zero: int = 0,
        dp: int = 1,
        sharding: Sharding | None = None,
        *,
        over_data: bool = False,
        like: Sharding = WHOLE,
        shared: KeyedCache | None = None,
    ) -> None:
        self._shared = shared or KeyedCache()
        self.layer = layer = of_all_sizes(layers)
        self.over_data = over_data
        self.sizes = len(layers)
        self.inside = inside
        self.given = sharding
        self.like = like
        self.sharding = Sharding(
            math.prod(inside.degrees), axes=inside.degrees if len(inside.degrees) > 1 else ()
        )
        self.training = training
        self.states = StateSharding(zero, dp)
        self.index = {operator.name: i for i, operator in enumerate(layer.operators)}
        self.savers: dict[str, str] = {}
        for operator in layer.operators:
            for tensor in operator.saved:
                if tensor.name not in layer.outside:
                    self.savers.setdefault(tensor.name, operator.name)
        self.inside = inside.beside_mixture(
            (operator, operator_time(operator, self._megatron(like), inside.machine, training))
            for operator in layer.operators
            if inside.stack.overlap_exchanges
        )
        self.alone: dict[tuple[str, Place, Place], OperatorTime] = {}
        priced = [self._shared_strategies(operator) for operator in layer.operators]
        self.options = tuple(each.options for each in priced)
        self.costs = tuple(each.costs for each in priced)
        self.kept = [each.kept for each in priced]
        for each in priced:
            self.alone.update(each.alone)
        makers = _makers(layer)
        self.links = {
            (reader, position): self._shared_link(reader, position, maker)
            for reader, operator in enumerate(layer.operators)
            for position, tensor in enumerate(operator.inputs)
            if (maker := makers.get((reader, tensor.name))) is not None
        }

    def _shared_strategies(self, operator: Operator) -> _Strategies:
        """Returns the strategies of an operator, which others may share."""

        def make() -> _Strategies:
            priced = self._strategies(operator)
            alone = {key: time for key, time in self.alone.items() if key[0] == operator.name}
            return _Strategies(priced[0], priced[1], self._unbeaten(*priced), alone)

        return self._shared((operator.name, self._form(operator)), make)

    def _shared_link(self, reader: int, position: int, maker: str) -> TensorLink:
        """Returns the link to one input of a reader from its maker, which others may share."""
        form = self._form(self.layer.operators[reader])
        return self._shared((reader, position, form), lambda: self._link(reader, position, maker))

    def _form(self, operator: Operator) -> Hashable:
        """Returns what the price of an operator depends on beside the base of the sharding."""
        if operator.name not in self.layer.of_form:
            return None
        return self.like.experts, self.like.context

    def _megatron(self, like: Sharding) -> Sharding:
        """Returns Megatron's division over the axes, which is the only one of a mixture."""
        return replace(
            self.sharding,
            sequence_parallel=self.sharding.ranks > 1,
            ep=like.ep,
            etp=like.etp,
            cp=like.cp,
        )

    def problems(self, sharding: Sharding) -> tuple[LayerProblem, ...]:
        """Returns the problem of each micro-batch size, between layers of the same `sharding`."""
        problem = self.of_all_sizes(sharding)
        return tuple(problem.of_size(number, kept) for number, kept in enumerate(self.kept_of))

    @property
    def kept_of(self) -> list[list[Ints]]:
        """By micro-batch size and operator, the legal options that none beats."""
        return [[kept[number] for kept in self.kept] for number in range(self.sizes)]

    def without_recompute(self, kept: Sequence[Ints]) -> list[Ints]:
        """Returns by operator those of some options that are not recomputed."""
        return [
            some[[not options[k].recomputed for k in some.tolist()]]
            for options, some in zip(self.options, kept, strict=True)
        ]

    def of_all_sizes(self, sharding: Sharding) -> LayerProblem:
        """Returns the problem with the micro-batch size as the first axis of its costs."""
        boundary = sharding.boundary
        links = [
            self.links.get((reader, position))
            or self._link(reader, position, None, OutputPlacement(sharding.arrives(tensor), False))
            for reader, operator in enumerate(self.layer.operators)
            for position, tensor in enumerate(operator.inputs)
        ]
        if self.layer.kind is not LayerKind.HEAD:
            links.append(self._last_link(InputPlacement(boundary, boundary, False)))
        host_forward_s, host_backward_s = launch_s(self.inside.machine, self.training.stack)
        return LayerProblem(
            tuple(self.index),
            self.options,
            self.costs,
            tuple(links),
            workspace_bytes=self.training.stack.workspace_bytes,
            products=tuple(operator.kind in PRODUCTS for operator in self.layer.operators),
            launches=tuple(
                1 + more_launches(operator, self.like.ep, self.training.stack)
                for operator in self.layer.operators
            ),
            host_forward_s=host_forward_s,
            host_backward_s=host_backward_s,
        )

    def _by_size(self, values: Sequence[Number]) -> Array:
        """Returns values, each a number or one for each micro-batch size, by size and value."""
        table = np.empty((self.sizes, len(values)))
        for number, value in enumerate(values):
            table[:, number : number + 1] = value
        return table

    def _strategies(
        self, operator: Operator
    ) -> tuple[tuple[StrategyOption, ...], StrategyCosts, Array]:
        """Returns the options of an operator, their costs, and where they are legal, by size."""
        degrees = self.sharding.degrees
        ways: tuple[Splits, ...]
        if self.given is None:
            ways, _ = operator_splits(
                operator, degrees, over_data=self.over_data, etp=self.like.etp
            )
        else:
            ways = (self.given.splits(operator),)
        prices = operator_prices(
            operator,
            ways,
            self.inside,
            self.training,
            self.states,
            over_data=self.over_data,
            like=self.like,
        )
        repeats = (False, True) if may_recompute(operator) else (False,)
        options = tuple(
            self._option(operator, splits, price, recomputed=recomputed)
            for splits, price in zip(ways, prices, strict=True)
            for recomputed in repeats
        )

        def by_option(value: Callable[[OperatorPrice], Number]) -> Array:
            return np.repeat(self._by_size([value(price) for price in prices]), len(repeats), 1)

        recomputed = np.array([option.recomputed for option in options])
        forward_s = by_option(lambda price: price.forward_s)
        backward_s = by_option(lambda price: price.backward_s)
        whole_bytes = by_option(lambda price: price.saved_bytes)
        costs = StrategyCosts(
            time_s=np.where(recomputed, 2.0, 1.0) * forward_s + backward_s,
            state_bytes=by_option(lambda price: price.states.total),
            saved_bytes=np.where(recomputed, 0.0, whole_bytes),
            whole_bytes=whole_bytes,
            forward_s=forward_s,
            backward_s=backward_s,
            sent_forward=by_option(lambda price: price.ending.forward.value_s) > 0,
            sent_backward=by_option(lambda price: price.ending.backward.value_s) > 0,
            gradient_bytes=by_option(lambda price: price.temporary_bytes),
        )
        given = self.given is not None
        legal = self._by_size([given or divides(operator, splits, degrees) for splits in ways])
        return options, costs, np.repeat(legal, len(repeats), 1)

    def _option(
        self, operator: Operator, splits: Splits, price: OperatorPrice, *, recomputed: bool
    ) -> StrategyOption:
        sharding = single_operator_sharding(operator, splits, self.sharding.degrees, like=self.like)
        inputs = tuple(
            InputPlacement(
                sharding.place(operator, tensor),
                sharding.gradient_place(operator, tensor),
                recomputed,
            )
            for tensor in operator.inputs
        )
        for each in inputs:
            self.alone[operator.name, each.place, each.gradient] = price.compute
        output = OutputPlacement(sharding.place(operator, operator.outputs[0]), recomputed)
        return StrategyOption(splits, recomputed, inputs, output)

    @staticmethod
    def _unbeaten(
        options: tuple[StrategyOption, ...], costs: StrategyCosts, legal: Array
    ) -> list[Ints]:
        """Returns by size the legal options that no other of the same placements beats."""
        placements = [(option.inputs, option.output) for option in options]
        numbers = {placement: n for n, placement in enumerate(placements)}
        group = np.array([numbers[placement] for placement in placements])
        kept: list[Ints] = []
        for number, allowed in enumerate(legal):
            mine = costs.at(number)
            order = np.lexsort((mine.saved_bytes, mine.state_bytes, mine.time_s))
            order = order[allowed[order] > 0]
            held = [
                values[order]
                for values in (mine.state_bytes, mine.saved_bytes, mine.gradient_bytes)
            ]
            # options earlier in the order take no longer
            beats = np.triu(group[order][:, None] == group[order], 1)
            for values in held:
                beats &= values[:, None] <= values
            kept.append(order[~beats.any(axis=0)])
        return kept

    def _link(
        self, reader: int, position: int, maker: str | None, enters: OutputPlacement | None = None
    ) -> TensorLink:
        """Returns the link to one input of a reader from its maker, or from where it `enters`."""
        operator = self.layer.operators[reader]
        number = BEFORE if maker is None else self.index[maker]
        outputs = (enters,) if enters is not None else self._outputs(number)
        inputs = tuple(option.inputs[position] for option in self.options[reader])
        lefts, left = _numbered(outputs)
        needs, needed = _numbered(inputs)
        moves = self._moves(maker, operator, operator.inputs[position], lefts, needs)
        return TensorLink(number, reader, lefts, needs, moves[0], left, needed, moves[1])

    def _outputs(self, operator: int) -> tuple[OutputPlacement, ...]:
        return tuple(option.output for option in self.options[operator])

    def _moves(
        self,
        maker: str | None,
        reader: Operator,
        tensor: Tensor,
        lefts: tuple[OutputPlacement, ...],
        needs: tuple[InputPlacement, ...],
    ) -> tuple[StrategyCosts, BesideCopy | None]:
        """Returns the costs of a tensor by size and the placements of its maker and its reader.

        The second value are the bytes that they leave out, None for nothing.
        """
        first = self.savers.get(tensor.name) == reader.name
        outside = tensor.name in self.layer.outside
        # an operator may save a part of what it reads
        kept = next((saved for saved in reader.saved if saved.name == tensor.name), None)
        saves = not outside and kept is not None
        part = self._part_of_the_saver(reader, tensor)
        nobody_saves = tensor.name not in self.savers
        by = self.layer.operator(maker) if maker else None
        of_attention = by is not None and by.kind is OperatorKind.ATTENTION
        sources, source = _numbered([left.place for left in lefts])
        targets, target = _numbered([(needed.place, needed.gradient) for needed in needs])
        moved = [
            self._moved(
                TensorFlow(
                    tensor=tensor,
                    maker=maker,
                    reader=reader,
                    source=here,
                    target=there,
                    gradient=gradient,
                    makers_own=saves_own_output(by),
                ),
                kept or tensor,
                part,
            )
            for here in sources
            for there, gradient in targets
        ]

        def table(values: Sequence[Number]) -> Array:
            cells = self._by_size(values).reshape(self.sizes, len(sources), len(targets))
            return cells[:, source[:, None], target]

        again = np.array([needed.recomputed for needed in needs])
        remade = np.array([[left.recomputed] for left in lefts])
        own_copy = table([each.own_copy for each in moved]).astype(np.bool_)
        stored_bytes = table([each.stored_bytes for each in moved])
        rest_bytes = stored_bytes - table([each.part_bytes for each in moved])
        makers_bytes = table([each.makers_bytes for each in moved])
        forward_s = table([each.forward_s for each in moved])
        backward_s = table([each.backward_s for each in moved])
        stays = ~remade | (of_attention & ~again)
        saved = (not outside) & (saves | again)
        here = first | (saved & (own_copy | nobody_saves))
        costs = replace(
            _moving(forward_s, backward_s, again),
            saved_bytes=np.where(
                here & stays,
                stored_bytes + np.where(remade, 0.0, makers_bytes),
                np.where(saved & stays & again, np.maximum(rest_bytes, 0.0), 0.0),
            ),
            whole_bytes=np.where(first | (saves & own_copy), stored_bytes + makers_bytes, 0.0),
        )
        own = own_copy[0] & stays if first else np.zeros(stays.shape, np.bool_)
        more_bytes = np.where(stays & saved & ~here, stored_bytes, 0.0)
        left_out = own.any() or more_bytes.any()
        return costs, BesideCopy(own, more_bytes) if left_out else None

    def _part_of_the_saver(self, reader: Operator, tensor: Tensor) -> Tensor:
        """Returns the part of a tensor that its first saver saves, where that runs after a reader.

        A recomputed reader needs the rest of it too.
        """
        saver = self.savers.get(tensor.name)
        if saver is None or self.index[saver] <= self.index[reader.name]:
            return tensor
        saved = self.layer.operator(saver).saved
        return next(each for each in saved if each.name == tensor.name)

    def _moved(self, edge: TensorFlow, kept: Tensor, part: Tensor) -> _MovedTensor:
        """Prices the move between two placements, independent of recompute.

        kept    what the reader saves of the tensor
        part    what its first saver saves of it
        """
        time = edge_time(
            edge, self.alone[edge.reader.name, edge.target, edge.gradient], self.inside
        )
        degrees = self.sharding.degrees
        gathered = self.training.stack.keeps_gathered_inputs
        where = edge.target if gathered else edge.kept_place(degrees)
        return _MovedTensor(
            time.forward.value_s,
            time.backward.value_s,
            self.sharding.local_bytes(kept, where),
            self.sharding.local_bytes(part, where),
            edge.keeps_own_copy(degrees),
            self.sharding.local_bytes(kept, edge.source) if edge.kept_twice(degrees) else 0,
        )

    def _last_link(self, leaves: InputPlacement) -> TensorLink:
        """Returns the link from the last operator to the boundary."""
        last, tensor = len(self.options) - 1, self.layer.operators[-1].outputs[0]
        lefts, left = _numbered(self._outputs(last))

        def seconds(moves: Iterable[tuple[Place, Place]]) -> Array:
            each = [self.inside.moved(tensor, *places).value_s for places in moves]
            return self._by_size(each)[:, :, None]

        there_s = seconds((left.place, leaves.place) for left in lefts)
        back_s = seconds((leaves.place, left.place) for left in lefts)
        again = np.array([[left.recomputed] for left in lefts])
        costs = _moving(there_s, back_s, again)
        return TensorLink(last, last + 1, lefts, (leaves,), costs, left, np.zeros(1, np.int64))


def _moving(forward_s: Array, backward_s: Array, again: Mask) -> StrategyCosts:
    """Returns the costs of moving tensors that nobody saves; `again`: the reader is recomputed."""
    none = np.zeros_like(forward_s)
    return StrategyCosts(
        time_s=forward_s * np.where(again, 2.0, 1.0) + backward_s,
        state_bytes=none,
        saved_bytes=none,
        whole_bytes=none,
        forward_s=forward_s,
        backward_s=backward_s,
        sent_forward=forward_s > 0,
        sent_backward=backward_s > 0,
        gradient_bytes=none,
    )


def _numbered(values: Sequence[T]) -> tuple[tuple[T, ...], Ints]:
    """Returns the distinct values, and by value its number among them."""
    numbers: dict[T, int] = {}
    each = [numbers.setdefault(value, len(numbers)) for value in values]
    return tuple(numbers), np.array(each, np.int64)
