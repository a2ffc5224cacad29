"""The catalogue: the options for one class of blocks that a search chooses from (EQUATIONS I3).

For each layout of the weights (the weights that tensor parallelism divides) it has the front over
placements and recompute of every operator. A front is computed once for each micro-batch and
sharding, when the search needs it. The exact prices of the options come from the price cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute, ideal_saved_bytes
from parplan.costmodels.layers.tensor_flow import moved_by_several, shared_beside_a_copy
from parplan.costmodels.operators.micro_batches import numbers_of_tensors
from parplan.costmodels.operators.sharding import BATCH, Sharding, Split, Splits, TokenPart
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.layer_options.end_options import EndOptions
from parplan.planner.layer_options.front_corners import PRICES, FrontCorners, front_corners
from parplan.planner.layer_options.layer_front import Allowed, layer_fronts, least_times_of_sizes_s
from parplan.planner.layer_options.layer_option import LayerOption, WeightLayout, unbeaten
from parplan.planner.layer_options.layer_problem import (
    LayerProblem,
    LayerStrategies,
    StrategyOption,
)
from parplan.planner.layer_options.layer_program import PickedStrategies, evaluate
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.planner.request import MAX_MICRO_BATCH_SIZE, Constraints, sizes_of
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    EXPERT_WIDTH,
    LayerKey,
    LayerKind,
    Operator,
    Parameter,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec


def divided_dims(price_cache: PriceCache, key: LayerKey = LayerKind.BLOCK) -> tuple[str, ...]:
    """Returns the parallel dims of the weights of a class of blocks: heads and ffn."""
    return tuple(
        dict.fromkeys(
            op.parallel_dim
            for op in price_cache.layer(key, 1).operators
            if op.parameters and op.parallel_dim
        )
    )


@dataclass(frozen=True)
class _OneNode:
    """A machine with one node and no memory sizes, which block prices ignore; equal by its text."""

    text: str
    machine: Machine = field(compare=False)


def catalogue_of(
    price_cache: PriceCache, pins: Constraints, key: LayerKey = LayerKind.BLOCK
) -> Catalogue:
    """Returns the catalogue of a class of blocks for a search over the prices of `price_cache`.

    The options of a block depend neither on the number of nodes nor on the size of their memory, so
    that requests that differ only in these share a catalogue.
    """
    cluster = price_cache.machine.cluster
    device = replace(cluster.device, memory_bytes=1)
    machine = replace(
        price_cache.machine, cluster=replace(cluster, nodes=1, device=device, host_memory_bytes=1)
    )
    node = _OneNode(f"{machine.cluster} {machine.profile}", machine)
    return _catalogue(
        price_cache.model, price_cache.training, node, pins.recompute, pins.megatron_sharding, key
    )


@lru_cache(maxsize=16)
def _catalogue(
    model: ModelSpec,
    training: TrainingSpec,
    node: _OneNode,
    recompute: tuple[Recompute, ...] | None,
    megatron_sharding: bool,
    key: LayerKey,
) -> Catalogue:
    return Catalogue(
        PriceCache(model, training, node.machine, sizes=sizes_of(training)),
        recompute,
        megatron_sharding=megatron_sharding,
        problems=_block_problems(model, training, node),
        key=key,
    )


@lru_cache(maxsize=16)
def _block_problems(model: ModelSpec, training: TrainingSpec, node: _OneNode) -> BlockProblems:
    return BlockProblems(PriceCache(model, training, node.machine))


class BlockProblems:
    """The choices of a strategy for every operator of a layer, mostly a block, each made once."""

    def __init__(self, price_cache: PriceCache) -> None:
        self.price_cache = price_cache
        self._once = KeyedCache()

    def __call__(
        self, micro_batch_size: int, sharding: Sharding, kind: LayerKey = LayerKind.BLOCK
    ) -> LayerProblem:
        sizes, strategies = self.of_sizes(micro_batch_size, sharding, kind)
        problems = self._once(
            (sizes, _axes(kind, sharding), sharding.boundary, sharding.reads_tower),
            lambda: strategies.problems(sharding),
        )
        return problems[sizes.index(micro_batch_size * sharding.data)]

    def of_sizes(
        self, micro_batch_size: int, sharding: Sharding, kind: LayerKey = LayerKind.BLOCK
    ) -> tuple[tuple[int, ...], LayerStrategies]:
        """Returns the choices for all sizes that are priced with a size, and these sizes.

        Each is the sequences on all ranks that divide the batch of an operator.
        """
        sizes = self._alike(micro_batch_size * sharding.data, sharding.part, kind)
        return sizes, self._once(
            (sizes, _axes(kind, sharding)), lambda: self._strategies(kind, sizes, sharding)
        )

    def _strategies(
        self, kind: LayerKey, sizes: tuple[int, ...], sharding: Sharding
    ) -> LayerStrategies:
        price_cache = self.price_cache
        base = (
            kind,
            sizes,
            sharding.degrees,
            sharding.rows,
            sharding.data,
            sharding.etp,
            sharding.part,
            sharding.tower,
        )
        return LayerStrategies(
            [price_cache.graph(size, sharding.part).layer_class(kind) for size in sizes],
            price_cache.inside(sharding.degrees),
            price_cache.training,
            over_data=sharding.data > 1,
            sharding=sharding if sharding.one_way else None,
            like=sharding,
            shared=self._once(("shared", base), KeyedCache),
        )

    def _alike(self, micro_batch_size: int, of: TokenPart, kind: LayerKey) -> tuple[int, ...]:
        """Returns the sizes that are priced with a size, whose blocks have the same tensors.

        Those of embedding and head are the sizes of the first blocks.
        """
        if kind.role is not LayerKind.BLOCK:
            kind = self.price_cache.key(1, 1)

        def tensors(size: int) -> tuple[tuple[int, ...], ...]:
            return self._once(
                ("tensors", kind, size, of),
                lambda: numbers_of_tensors(self.price_cache.graph(size, of).layer_class(kind)),
            )

        mine = tensors(micro_batch_size)
        return tuple(size for size in _sizes_with(micro_batch_size) if tensors(size) == mine)


def _axes(kind: LayerKey, sharding: Sharding) -> Hashable:
    """Returns all that the choices for the operators of a layer depend on beside its sizes."""
    return (
        kind,
        sharding.degrees,
        sharding.rows,
        sharding.data,
        sharding.experts,
        sharding.context,
        sharding.tower,
    )


def _sizes_with(micro_batch_size: int) -> tuple[int, ...]:
    """Returns the micro-batch sizes that are priced at once: a size, halved and doubled."""
    odd = micro_batch_size // (micro_batch_size & -micro_batch_size)
    largest = max(micro_batch_size, MAX_MICRO_BATCH_SIZE)
    return tuple(odd << n for n in range((largest // odd).bit_length()))


class Catalogue:
    """The options of a layer by micro-batch and sharding, each list computed once.

    recompute   the levels that are allowed, None for any list of operators
    problems    the choices of a strategy for every operator of a block
    key         the class of the blocks

    The operators of a mixture of experts have Megatron's division: they are one module.
    """

    def __init__(
        self,
        price_cache: PriceCache,
        recompute: tuple[Recompute, ...] | None = None,
        *,
        megatron_sharding: bool = False,
        problems: BlockProblems | None = None,
        key: LayerKey = LayerKind.BLOCK,
    ) -> None:
        self.price_cache, self.key = price_cache, key
        self.problem = problems or BlockProblems(price_cache)
        self.levels = tuple(level for level in Recompute if recompute is None or level in recompute)
        operators = price_cache.layer(key, 1).operators
        self.by_operator = recompute is None
        self.free = not megatron_sharding
        self._options: dict[tuple[int, Sharding], tuple[LayerOption, ...]] = {}
        self._operators = {operator.name: operator for operator in operators}
        self._mixture = frozenset(op.name for op in operators if op.in_mixture)
        self._once = KeyedCache()
        self._fastest_s: dict[tuple[int, Sharding], dict[WeightLayout, float]] = {}
        self._dims = divided_dims(price_cache, key)

    def weight_layouts(self, sharding: Sharding) -> list[WeightLayout]:
        """Returns the divisions of the weights over the axes of `sharding`, the whole one first.

        Experts are divided as `sharding` says. Weights that data-parallel ranks divide are divided
        over the tensor-parallel ranks too, and the others over these or over none. Some weight is
        always divided over the first axis: otherwise the layout would be that of another mesh.
        """
        always = frozenset({EXPERT_WIDTH} if sharding.etp > 1 else ())
        dims = [dim for dim in self._dims if dim != EXPERT_WIDTH]
        subsets = [
            always | {dim for i, dim in enumerate(dims) if bits >> i & 1}
            for bits in reversed(range(min(1, len(dims)), 2 ** len(dims)))
        ]
        inside = [frozenset((dim, False) for dim in subset) for subset in subsets]
        if sharding.data == 1:
            return inside
        over_data = [frozenset((dim, True) for dim in subset) for subset in subsets]
        if sharding.tp == 1:
            return over_data
        return [
            over | within
            for over in over_data
            for within in inside
            if {dim for dim, _ in over} <= {dim for dim, _ in within}
        ]

    def reads_over_data(self, weight_layout: WeightLayout) -> int:
        """Returns the number of tensors that the weights read which data-parallel ranks divide."""
        over_data = {dim for dim, over in weight_layout if over}
        return len(
            {
                operator.inputs[0].name
                for operator in self._operators.values()
                if operator.parallel_dim in over_data
                and operator.parallel_dim != operator.contracted
                and weights_of(operator)
            }
        )

    @property
    def least_levels(self) -> tuple[Recompute, ...]:
        """Returns the recompute levels that include the one with the fewest saved bytes.

        No list of operators saves fewer bytes than full recompute.
        """
        return (Recompute.FULL,) if self.by_operator else self.levels

    def fastest_s(self, micro_batch_size: int, sharding: Sharding) -> dict[WeightLayout, float]:
        """Returns the least seconds of a micro-batch in a block, by layout of the weights."""
        key = micro_batch_size, sharding
        if key not in self._fastest_s:
            self._fastest_s |= self._least_s(micro_batch_size, sharding)
        return self._fastest_s[key]

    def divides(self, sharding: Sharding) -> bool:
        """Returns whether operators may have other shardings than Megatron's."""
        return self.free and sharding.ranks > 1 and not (sharding.overlap or sharding.one_way)

    def divides_ends(self, sharding: Sharding) -> bool:
        """Returns whether embedding and head may have other shardings than Megatron's."""
        return self.price_cache.training.stack.divided_ends and self.divides(sharding)

    def _least_s(
        self, b: int, sharding: Sharding
    ) -> dict[tuple[int, Sharding], dict[WeightLayout, float]]:
        """Returns the least seconds for a size, and for those that are priced with it."""
        weight_layouts = self.weight_layouts(sharding)
        if not self.divides(sharding):
            levels_s = (
                self.price_cache.layer_time(self.key, b, sharding, level).total_s
                for level in self.levels
            )
            return {(b, sharding): {weight_layouts[0]: min(levels_s)}}
        sizes, strategies = self.problem.of_sizes(b, sharding, self.key)
        least_s = least_times_of_sizes_s(
            strategies.of_all_sizes(sharding),
            [strategies.without_recompute(kept) for kept in strategies.kept_of],
            [self._allowed(each, None, sharding) for each in weight_layouts],
        )
        return {
            (size // sharding.data, sharding): {
                weight_layout: time_s
                for weight_layout, time_s in zip(weight_layouts, times_s, strict=True)
                if time_s is not None
            }
            for size, times_s in zip(sizes, least_s, strict=True)
            if size % sharding.data == 0
        }

    def corners(
        self, micro_batch_size: int, sharding: Sharding, *, keeps_all: bool
    ) -> dict[WeightLayout, FrontCorners]:
        """Returns by layout of the weights corners that bound the options of a block from below.

        They are empty where the options are more than choices for the operators: sub-pipelined
        blocks, and dropout that saves other bytes. keeps_all: nothing is recomputed.
        """
        if not self.by_operator or sharding.overlap or self.price_cache.plain_dropout:
            return {}
        return self._once(
            ("corners", micro_batch_size, sharding, keeps_all),
            lambda: self._corners(micro_batch_size, sharding, keeps_all),
        )

    def _corners(
        self, b: int, sharding: Sharding, keeps_all: bool
    ) -> dict[WeightLayout, FrontCorners]:
        """Returns the corners of all choices for the operators, with the options of Megatron."""
        found = self._corners_of_sizes(b, sharding, keeps_all)
        if sharding.data > 1:
            return found
        levels = (Recompute.NONE,) if keeps_all else self.levels
        presets = [self.preset(level, b, sharding) for level in levels]
        megatron = presets[0].weight_layout
        return found | {megatron: found.get(megatron, FrontCorners.none()).beside(presets)}

    def _corners_of_sizes(
        self, b: int, sharding: Sharding, keeps_all: bool
    ) -> dict[WeightLayout, FrontCorners]:
        """Returns the corners of one of the micro-batch sizes that are priced with each other."""
        sizes, strategies = self.problem.of_sizes(b, sharding, self.key)
        weight_layouts = self.weight_layouts(sharding)[: None if self.divides(sharding) else 1]

        def make() -> list[list[FrontCorners | None]]:
            kept = strategies.kept_of
            if keeps_all:
                kept = [strategies.without_recompute(each) for each in kept]
            return front_corners(
                strategies.of_all_sizes(sharding),
                kept,
                [self._allowed(each, None, sharding) for each in weight_layouts],
                self._prices_of_bytes(b, sharding),
            )

        of_sizes = self._once(("corners of sizes", sizes, sharding, keeps_all), make)
        corners = of_sizes[sizes.index(b * sharding.data)]
        return {
            weight_layout: each
            for weight_layout, each in zip(weight_layouts, corners, strict=True)
            if each is not None
        }

    def _prices_of_bytes(self, b: int, sharding: Sharding) -> list[float]:
        """Returns prices of a saved byte about that of full recompute, in seconds."""
        plain = replace(sharding, data=1)
        whole, least = (self.preset(level, b, plain) for level in (Recompute.NONE, Recompute.FULL))
        price = (least.time_s - whole.time_s) / max(1.0, whole.saved_bytes - least.saved_bytes)
        return [price * factor for factor in PRICES]

    def with_weight_layout(self, weight_layout: WeightLayout, sharding: Sharding) -> Sharding:
        """Returns a sharding with that weight layout; other operators are replicated."""
        megatron = replace(sharding, data=1)

        def splits(operator: Operator, dim: str) -> Splits:
            inside = megatron.splits(operator)
            if (dim, False) not in weight_layout:
                inside = (Split(),) * len(inside)
            if sharding.data == 1:
                return inside
            ends = BATCH if dim == operator.contracted else None
            return (Split(dim, ends) if (dim, True) in weight_layout else Split(BATCH), *inside)

        own = (
            (operator.name, splits(operator, operator.parallel_dim))
            for operator in self._operators.values()
            if operator.parameters and operator.parallel_dim
        )
        return replace(
            sharding,
            own=tuple(
                (name, each) for name, each in own if each != sharding.splits(self._operators[name])
            ),
        )

    def options(self, micro_batch_size: int, sharding: Sharding) -> tuple[LayerOption, ...]:
        """Returns the options that no other of the same weight layout beats, fastest first.

        The values compared are time, saved bytes, workspace and redundancy.
        """
        key = micro_batch_size, sharding
        if key not in self._options:
            self._options[key] = unbeaten(self._found(micro_batch_size, sharding))
        return self._options[key]

    def _found(self, b: int, sharding: Sharding) -> Iterator[LayerOption]:
        for level in self.levels if sharding.data == 1 else ():
            if level is not Recompute.FULL or not illegal_full_recompute(
                sharding.overlap, self.price_cache.model
            ):
                yield self.preset(level, b, sharding)
        divides = self.divides(sharding)
        if not divides and not self.by_operator:
            return
        problem = self.problem(b, replace(sharding, overlap=0), self.key)
        weight_layouts = self.weight_layouts(sharding)[: None if divides else 1]
        variants = [
            (weight_layout, recompute)
            for weight_layout in weight_layouts
            for recompute in ((None,) if self.by_operator else self.levels)
        ]
        fronts = layer_fronts(problem, [self._allowed(*each, sharding) for each in variants])
        by_point = [
            weight_layout
            for (weight_layout, _), front in zip(variants, fronts, strict=True)
            for _ in front
        ]
        for weight_layout, picked in zip(
            by_point, evaluate(problem, np.concatenate(fronts)), strict=True
        ):
            yield self._option(picked, weight_layout, b, sharding)

    def ends(
        self, kind: LayerKind, micro_batch_size: int, sharding: Sharding
    ) -> tuple[LayerOption, ...]:
        """Returns the ways to divide embedding or head, Megatron's first."""

        def make() -> tuple[LayerOption, ...]:
            ways = EndOptions(kind, micro_batch_size, sharding, self.price_cache)
            if ways.only_megatron or not self.divides_ends(sharding):
                return (ways.megatron(),)
            others = ways.others(self.problem(micro_batch_size, sharding, kind))
            return (ways.megatron(), *others)

        return self._once(("ends", kind, micro_batch_size, sharding), make)

    def alternatives(
        self, micro_batch_size: int, sharding: Sharding, kind: LayerKind = LayerKind.BLOCK
    ) -> Iterator[LayerProblem]:
        """Yields the choices of layers that divide their weights as `sharding` does.

        There is one for each allowed level of recompute, or one for all lists of operators.
        """
        plain = replace(sharding, own=())
        if kind.role is not LayerKind.BLOCK:
            if self.divides_ends(plain):
                ways = EndOptions(kind, micro_batch_size, plain, self.price_cache)
                yield ways.alike(self.problem(micro_batch_size, plain, kind), sharding)
            return
        problem = self.problem(micro_batch_size, plain, self.key)
        divided = frozenset(
            (operator.parallel_dim, over_data)
            for operator in self._operators.values()
            if operator.parallel_dim in self._dims and operator.parameters
            for over_data in weight_divided(operator, sharding.splits(operator), sharding)
        )
        weight_layout = divided if self.divides(plain) else self.weight_layouts(plain)[0]
        for level in (None,) if self.by_operator else self.levels:
            yield problem.only(self._allowed(weight_layout, level, plain))

    def _allowed(
        self, weight_layout: WeightLayout, level: Recompute | None, sharding: Sharding
    ) -> Allowed:
        """Returns a test of options for a weight layout and a recompute level (None: any)."""
        names = (
            frozenset(self.price_cache.recompute_operators(self.key, level))
            if level
            else frozenset[str]()
        )

        def allowed(name: str, option: StrategyOption) -> bool:
            operator = self._operators[name]
            if level is not None and option.recomputed != (name in names):
                return False
            if not self.free or sharding.overlap or sharding.one_way or name in self._mixture:
                return option.splits == sharding.splits(operator)
            dim = operator.parallel_dim
            if sharding.ranks == 1 or dim is None or not weights_of(operator):
                return True
            axes = self._weight_divided(name, option.splits, sharding)
            return axes == {over_data for divided, over_data in weight_layout if divided == dim}

        return allowed

    def _weight_divided(self, name: str, splits: Splits, sharding: Sharding) -> frozenset[bool]:
        return self._once(
            (name, splits, sharding.degrees, sharding.data),
            lambda: weight_divided(self._operators[name], splits, sharding),
        )

    def _option(
        self, picked: PickedStrategies, weight_layout: WeightLayout, b: int, sharding: Sharding
    ) -> LayerOption:
        """Returns an option of the catalogue; it names the splits that differ from Megatron's."""
        chosen = list(zip(self._operators.values(), picked.options, strict=True))
        splits = tuple(
            (op.name, option.splits)
            for op, option in chosen
            if option.splits != sharding.splits(op)
        )
        names = tuple(op.name for op, option in chosen if option.recomputed)
        divided = replace(sharding, own=splits)
        block = self.price_cache.kept_layer(self.key, b * sharding.data, sharding.part)
        saved_bytes = picked.saved_bytes
        workspace_bytes = picked.workspace_bytes
        # The problem adds over pairs of operators. It does not know copies and moves of one tensor
        # that several share; its bytes are those of GPUs and of whole micro-batches.
        shared = self._once(
            ("shared", b * sharding.data, divided),
            lambda: shared_beside_a_copy(block, divided) or moved_by_several(block, divided),
        )
        time_s = (
            self.price_cache.layer_time(self.key, b, divided, names).total_s
            if sharding.overlap or shared
            else picked.launched_s
        )
        if sharding.overlap or shared or self.price_cache.plain_dropout:
            size = self.price_cache.activations(self.key, b, divided, names)
            saved_bytes, workspace_bytes = float(size.saved), float(size.workspace)
        return LayerOption(
            kind=self.key,
            recompute=names,
            sharding=divided,
            weight_layout=weight_layout,
            time_s=time_s,
            saved_bytes=saved_bytes,
            ideal_saved_bytes=ideal_saved_bytes(block, sharding.ranks, names),
            workspace_bytes=workspace_bytes,
        )

    def preset(self, level: Recompute, b: int, sharding: Sharding) -> LayerOption:
        """Returns the option with Megatron's sharding at a level of recompute."""
        size = self.price_cache.activations(self.key, b, sharding, level)
        return LayerOption(
            kind=self.key,
            recompute=self.price_cache.recompute_operators(self.key, level),
            sharding=sharding,
            weight_layout=self.weight_layouts(sharding)[0],
            time_s=self.price_cache.layer_time(self.key, b, sharding, level).total_s,
            saved_bytes=float(size.saved),
            ideal_saved_bytes=size.ideal_saved,
            workspace_bytes=float(size.workspace),
        )


def weights_of(operator: Operator) -> list[Parameter]:
    """Returns the weight matrices of an operator; a vector goes with what its operator makes."""
    return [parameter for parameter in operator.parameters if len(parameter.dims) > 1]


def weight_divided(operator: Operator, splits: Splits, sharding: Sharding) -> frozenset[bool]:
    """Returns the axes of `sharding` that divide the operator's weight.

    True stands for the axis of data-parallel ranks, False for the others.
    """
    weights = weights_of(operator)
    return frozenset(
        axis == 0 and sharding.data > 1
        for axis, (split, degree) in enumerate(zip(splits, sharding.degrees, strict=True))
        if degree > 1 and any(weight.tensor_dim(split.dim) is not None for weight in weights)
    )
