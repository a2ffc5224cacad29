"""Bytes of parameters, gradients and optimizer states on one rank (EQUATIONS M1, M2, M7).

They are exact to the row. Data-parallel shards are those of torch.chunk along the first dim of each
tensor-parallel shard, as FSDP2 lays them out: the prediction is compared with the bytes that the
executor really holds.

Held during a step, bytes per parameter, D data-parallel ranks:

    bf16/fp16   ZeRO 0        1           2           3
    parameters  2             2           2           0        gathered copies are temporary
    gradients   g             g           g/D         g/D
    optimizer   12            12/D        12/D        12/D     fp32 master weights and two moments

    fp32        ZeRO 0        1           2           3
    parameters  4             4 + 4/D     4 + 4/D     4/D      the shard beside its gathered copy
    gradients   4             4           4/D         4/D
    optimizer   8             8/D         8/D         8/D

with g = 4 for fp32 gradients and 2 otherwise, and 8 bytes of moments by AdamW; other optimizers
have other moments (costmodels/operators/optimizers.py). Without masters (`Stack.master_bytes` 0)
parameters of 16 bits are held as those in fp32 are, in half the bytes. Some stacks hold further
whole copies of the gradients (`gradient_copy_bytes`), or 2/D of parameters under ZeRO 3. A frozen
parameter has neither gradients nor states: it has its weights alone, whole at ZeRO 0 to 2 and one
D-th at ZeRO 3 (EQUATIONS F3). Source: Rajbhandari et al. 2020, arXiv 1910.02054, for the ZeRO
stages; FSDP2 of torch 2.13 for resident bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from parplan.costmodels.layers.narrow_products import NarrowWeights
from parplan.costmodels.operators.kernels import FP32_BYTES
from parplan.costmodels.operators.operator_kernels import SCALED_ELEMENTS, may_be_narrow
from parplan.costmodels.operators.optimizers import OPTIMIZERS, WholeTensor, moments_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.operator_graph import (
    PRODUCTS,
    LayerClass,
    Operator,
    OperatorKind,
    Parameter,
)
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import TowerDivision

OwnZero = tuple[tuple[str, int], ...]  # operators whose ZeRO stage is not the layer's
# fp32 copies of a layer's parameters that ZeRO holds beside them (`zero_buffer_bytes`)
ZERO_2_COPIES, ZERO_3_COPIES = 2, 4
# operators whose whole matrix over divided tokens has a gradient to sum inside a stage
SUMMED = (*PRODUCTS, OperatorKind.EMBEDDING)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of the model states on one rank, by class."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, added: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + added.parameters,
            self.gradients + added.gradients,
            self.optimizer + added.optimizer,
        )


@dataclass(frozen=True, slots=True)
class StateSharding:
    """The division of a layer's states over data-parallel ranks.

    zero       ZeRO stage
    shards     data-parallel ranks that hold one copy of sharded states together
    with_tied  counts the head's copy of a tied embedding
    offloaded  the host holds the states (EQUATIONS O9)
    """

    zero: int
    shards: int
    with_tied: bool = True
    offloaded: bool = False


def chunk_shape(shape: tuple[int, ...], parts: int, index: int = 0) -> tuple[int, ...]:
    """The shape of part `index` when torch.chunk cuts `shape` into `parts` along its first dim.

    Part 0 is the largest.
    """
    rows = -(-shape[0] // parts)
    return max(0, min(rows, shape[0] - index * rows)), *shape[1:]


def chunk_elements(shape: tuple[int, ...], parts: int, index: int = 0) -> int:
    """Elements of a part of `chunk_shape`."""
    return math.prod(chunk_shape(shape, parts, index))


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter on one tensor-parallel rank.

    over_data    ranks that it is divided over, of the replicas of the stage, or for one of experts
                 of all its ranks; 1 where each has a copy
    inside       ranks of the stage for each replica among which its copies are
    of_experts   it is one for each expert
    summed_axes  axes inside a stage over which the gradient of a matrix is a sum
    whole        the tensor before any division
    matrices     the matrices of `whole` that lie here, or parts of which lie here
    trained      it has a gradient and optimizer states
    quantised    it is frozen in 8 bits
    of_product   it is the weight of a product that may be narrow
    """

    shape: tuple[int, ...]
    tied: bool
    over_data: int
    inside: int
    of_experts: bool
    summed_axes: tuple[int, ...]
    whole: WholeTensor
    matrices: int = 1
    trained: bool = True
    quantised: bool = False
    of_product: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def is_narrow(self, narrow: NarrowWeights | None) -> bool:
        """Returns true for the weight of a product in a narrow format."""
        return (
            narrow is not None
            and self.of_product
            and (narrow.experts or not self.of_experts)
            and not self.quantised
        )

    def holders(self, replicas: int) -> int:
        """The number of ranks with the same part of it, of those of `replicas` of the stage."""
        return max(1, replicas * self.inside // self.over_data)

    def sharers(self, shards: int) -> int:
        """The number of ranks that hold one copy of its sharded states together.

        One shard is the whole, on however many ranks of a replica experts have copies.
        """
        return self.holders(shards) if shards > 1 else 1


@dataclass(frozen=True, slots=True, eq=False)
class LocalParameters:
    """The parameters of a layer on one tensor-parallel rank; equal ones are one object.

    degrees    of the axes inside the stage
    """

    each: tuple[LocalParameter, ...]
    degrees: tuple[int, ...]

    @property
    def trained(self) -> LocalParameters:
        """The parameters that have gradients."""
        return self._those(trained=True)

    @property
    def frozen(self) -> LocalParameters:
        return self._those(trained=False)

    def _those(self, *, trained: bool) -> LocalParameters:
        chosen = tuple(each for each in self.each if each.trained == trained)
        return self if len(chosen) == len(self.each) else _alike(chosen, self.degrees)

    def owned(
        self, shards: int = 1, *, with_tied: bool = True, of_experts: bool | None = None
    ) -> int:
        """Elements of the largest of `shards` data-parallel shards; see `owned_parameters`."""
        return _owned(self, shards, with_tied, of_experts)

    def frozen_bytes(
        self, training: TrainingSpec, *, with_tied: bool = True, of_experts: bool | None = None
    ) -> int:
        """Bytes of the frozen parameters on one tensor-parallel rank."""
        return sum(
            frozen_bytes(each.elements, training, quantised=each.quantised)
            for each in self.frozen.each
            if of_experts in (None, each.of_experts) and (with_tied or not each.tied)
        )

    def held_alike(self, *, of_experts: bool) -> list[LocalParameter]:
        """Returns the parameters of experts, or those of which every replica has a copy."""
        return [
            each
            for each in self.each
            if each.of_experts == of_experts and (of_experts or each.over_data == 1)
        ]

    def gathered_bytes(
        self,
        training: TrainingSpec,
        *,
        with_tied: bool = True,
        of_experts: bool | None = None,
        narrow: NarrowWeights | None = None,
    ) -> int:
        """Bytes that ranks gather of its parameters, with casts of the weights of `narrow`."""
        width = training.precision.num_bytes
        whole = width * self.owned(with_tied=with_tied, of_experts=of_experts)
        if narrow is None or narrow.gathered == width:
            return whole
        parameters = self.each if of_experts is None else self.held_alike(of_experts=of_experts)
        cast = sum(each.elements for each in parameters if each.is_narrow(narrow))
        return whole - math.floor((width - narrow.gathered) * cast)

    def copied(self, shards: int = 1, *, with_tied: bool = True) -> int:
        """Elements of the largest shard of the parameters that data parallelism may have copies of.

        They are all but those that data-parallel ranks divide as tensor-parallel ranks do.
        """
        return sum(self.owned(shards, with_tied=with_tied, of_experts=own) for own in (False, True))


def _local(
    operator: Operator, sharding: Sharding, *, sums_weights: bool
) -> tuple[LocalParameter, ...]:
    sums_weights = sums_weights and operator.kind in SUMMED
    return tuple(
        LocalParameter(
            sharding.parameter_shape(operator, parameter),
            parameter.tied,
            sharding.ep * sharding.etp
            if parameter.of_experts
            else sharding.over_data(operator, parameter),
            sharding.tp if parameter.of_experts else 1,
            parameter.of_experts,
            sharding.summed_axes(operator, parameter)
            if sums_weights and parameter.trained and len(parameter.dims) > 1
            else (),
            whole_tensor(operator, parameter),
            -(-parameter.shape[0] // sharding.parts(operator, parameter.dims[0].name))
            if parameter.of_experts
            else 1,
            parameter.trained,
            parameter.quantised,
            may_be_narrow(operator) and parameter is operator.parameters[0],
        )
        for parameter in operator.parameters
    )


def whole_tensor(operator: Operator, parameter: Parameter) -> WholeTensor:
    """Returns a parameter as an optimizer sees it; each expert has a matrix of its own."""
    shape = parameter.shape[1:] if parameter.of_experts else parameter.shape
    return WholeTensor(
        num_elements=parameter.num_elements,
        table=operator.kind not in PRODUCTS or operator.parallel_dim == "vocab",
        matrix=shape if len(shape) > 1 else (),
    )


@functools.lru_cache(maxsize=4096)
def local_parameters(
    layer: LayerClass, sharding: Sharding, names: frozenset[str] | None = None
) -> LocalParameters:
    """Returns the parameters of `layer` on one tensor-parallel rank, or of its operators `names`.

    Megatron's sharding sums gradients of weights inside a stage only in layers with experts or
    adapters.
    """
    sums_weights = (
        bool(sharding.own)
        or sharding.tower is TowerDivision.IMAGES
        or layer.has_experts
        or any(operator.is_adapter for operator in layer.operators)
    )
    each = (
        _local(op, sharding, sums_weights=sums_weights)
        for op in layer.operators
        if names is None or op.name in names
    )
    return _alike(tuple(parameter for some in each for parameter in some), sharding.degrees)


def stage_groups(
    layer: LayerClass, zero: int, own_zero: OwnZero
) -> tuple[tuple[int, frozenset[str]], ...]:
    """Returns by ZeRO stage, ascending, the operators whose parameters are one group.

    The parameters of a group are gathered and reduced together. Operators without parameters are
    in no group; a layer without any is one group at stage `zero`.
    """
    own = dict(own_zero)
    stages = {op.name: own.get(op.name, zero) for op in layer.operators if op.parameters}
    return tuple(
        (stage, frozenset(name for name, its in stages.items() if its == stage))
        for stage in sorted(set(stages.values())) or [zero]
    )


@functools.lru_cache(maxsize=8192)
def _owned(local: LocalParameters, shards: int, with_tied: bool, of_experts: bool | None) -> int:
    """Returns `LocalParameters.owned`, which a search asks for once for each of its meshes."""
    parameters = local.each if of_experts is None else local.held_alike(of_experts=of_experts)
    return sum(
        chunk_elements(parameter.shape, parameter.sharers(shards))
        for parameter in parameters
        if with_tied or not parameter.tied
    )


@functools.lru_cache(maxsize=4096)
def _alike(each: tuple[LocalParameter, ...], degrees: tuple[int, ...]) -> LocalParameters:
    return LocalParameters(each, degrees)


def states_of(
    elements: int, shard: int, zero: int, training: TrainingSpec, moments: int
) -> StateBytes:
    """States of `elements` parameters of a tensor-parallel rank.

    shard: the parameters among them that this data-parallel rank owns; moments: bytes of the
    moments of the parameters that it updates
    """
    updated = elements if zero == 0 else shard
    gradients = training.gradient_precision.num_bytes * (shard if zero >= 2 else elements)
    gathered = elements if zero < 3 else 0
    width = training.precision.num_bytes
    if not training.has_masters:
        parameters = width * (elements if zero == 0 else gathered + shard)
        return StateBytes(parameters, gradients, moments)
    masters = training.stack.master_bytes * updated
    if zero == 3 and training.stack.keeps_shards:
        gathered = shard
    return StateBytes(width * gathered, gradients, masters + moments)


def least_moments(training: TrainingSpec) -> float:
    """Bytes of moments that every element of every tensor has at least."""
    least = OPTIMIZERS[training.optimizer].least_moments
    return min(least, least * training.stack.moment_bytes / FP32_BYTES)


def frozen_bytes(elements: int, training: TrainingSpec, *, quantised: bool) -> int:
    """Bytes of frozen weights: in the training's precision, or in 8 bits with their scales."""
    if quantised:
        return elements + FP32_BYTES * -(-elements // SCALED_ELEMENTS)
    return training.precision.num_bytes * elements


def offloaded_states(elements: int, zero: int, training: TrainingSpec) -> StateBytes:
    """Bytes left on the device for `elements` parameters with states on the host (EQUATIONS O9).

    These are gathered copies of the parameters, and gradients that are not reduced.
    """
    return StateBytes(
        parameters=training.precision.num_bytes * elements if zero < 3 else 0,
        gradients=training.gradient_precision.num_bytes * elements if zero < 2 else 0,
    )


def gradient_copy_bytes(dp: int, training: TrainingSpec) -> int:
    """Bytes per parameter of a second, whole copy of the gradients on every rank.

    16-bit gradients beside fp32 ones, and the buckets of data parallelism, where the stack has them
    (`Stack`).
    """
    stack, width = training.stack, training.precision.num_bytes
    copies = 0
    if stack.keeps_low_precision_gradients and training.gradient_precision.num_bytes > width:
        copies += 1
    if stack.ddp_buckets and dp > 1:
        copies += 1
    return width * copies


def layer_states(
    layer: LayerClass,
    sharding: Sharding,
    states: StateSharding,
    training: TrainingSpec,
    *,
    dp_rank: int = 0,
) -> StateBytes:
    """States of one `layer` on data-parallel rank `dp_rank`."""
    return held_states(local_parameters(layer, sharding).each, states, training, dp_rank=dp_rank)


def operator_states(
    operator: Operator,
    sharding: Sharding,
    states: StateSharding,
    training: TrainingSpec,
    *,
    dp_rank: int = 0,
    narrow: NarrowWeights | None = None,
) -> StateBytes:
    """States of one operator's parameters on data-parallel rank `dp_rank`, as `layer_states`."""
    local = _local(operator, sharding, sums_weights=False)
    return held_states(local, states, training, dp_rank=dp_rank, narrow=narrow)


def held_states(
    parameters: Iterable[LocalParameter],
    states: StateSharding,
    training: TrainingSpec,
    *,
    dp_rank: int = 0,
    narrow: NarrowWeights | None = None,
) -> StateBytes:
    """States of `parameters` on data-parallel rank `dp_rank`.

    They are linear in the elements, in those of the rank's shard, and in the bytes of moments, by
    number of ranks that hold the same parameters. Under ZeRO 3 casts of weights are temporary.
    """
    elements: dict[int, int] = {}
    owned: dict[int, int] = {}
    frozen = 0
    casts = 0.0
    moments: dict[int, int] = {}
    for parameter in parameters:
        if states.with_tied or not parameter.tied:
            if narrow is not None and parameter.is_narrow(narrow) and states.zero < 3:
                width = training.precision.num_bytes
                casts += (narrow.held - width) * parameter.elements
            same = parameter.holders(states.shards)
            index = dp_rank * same // states.shards  # neighbours hold different experts
            if not parameter.trained:
                held = parameter.elements
                if states.zero == 3:
                    held = chunk_elements(parameter.shape, same, index)
                frozen += frozen_bytes(held, training, quantised=parameter.quantised)
                continue
            shard = chunk_shape(parameter.shape, same, index)
            updated = shard if states.zero else parameter.shape
            elements[same] = elements.get(same, 0) + parameter.elements
            owned[same] = owned.get(same, 0) + math.prod(shard)
            moments[same] = moments.get(same, 0) + moments_bytes(
                training.optimizer, updated, parameter.whole, training.stack.moment_bytes
            )
    total = StateBytes(frozen + math.ceil(casts))
    for same, number in elements.items():
        stage = states.zero if same > 1 or states.offloaded else 0
        if states.offloaded:
            total += offloaded_states(number, stage, training)
        else:
            total += states_of(number, owned[same], stage, training, moments[same])
        total += StateBytes(gradients=gradient_copy_bytes(same, training) * number)
    return total


def step_copy_bytes(owned: int, training: TrainingSpec) -> int:
    """Bytes of the fp32 gradient copies of `owned` parameters for the optimizer's step.

    Zero unless the stack makes them.
    """
    if training.gradient_precision is Precision.FP32:
        return 0
    return training.stack.step_copy_bytes * owned


def owned_parameters(
    layer: LayerClass,
    sharding: Sharding,
    shards: int = 1,
    *,
    with_tied: bool = True,
    of_experts: bool | None = None,
) -> int:
    """Parameters of `layer` on one tensor-parallel rank.

    shards: the largest of so many data-parallel shards of them; of_experts: only expert parameters,
    or only those of which every data-parallel rank has a copy
    """
    return local_parameters(layer, sharding).owned(
        shards, with_tied=with_tied, of_experts=of_experts
    )


def ideal_states(
    num_parameters: int,
    ranks: int,
    training: TrainingSpec,
    moments: int | None = None,
    frozen: float = 0.0,
) -> tuple[float, float, float]:
    """Parameter, gradient and optimizer bytes per rank without redundancy (EQUATIONS R2).

    They are divided over `ranks` ranks: those of trained parameters, and the bytes of `frozen`
    ones. In mixed precision the fp32 master is the one copy of the trained weights, so the ideal
    has no 16-bit copy besides.

    moments: bytes of one copy of the moments; None for the least of any parameters of that number
    """
    share = num_parameters / ranks
    width = least_moments(training)
    if moments is not None and num_parameters:
        width = moments / num_parameters
    masters = training.stack.master_bytes if training.has_masters else 0
    trained = 0 if masters else training.precision.num_bytes * share
    return (
        trained + frozen / ranks,
        training.gradient_precision.num_bytes * share,
        (masters + width) * share,
    )


def ideal_states_of(
    parameters: Iterable[LocalParameter], ranks: int, training: TrainingSpec
) -> tuple[float, float, float]:
    """Returns `ideal_states` of `parameters`, which no rank divides; tied ones count elsewhere."""
    counted = [parameter for parameter in parameters if not parameter.tied]
    frozen = sum(
        frozen_bytes(each.elements, training, quantised=each.quantised)
        for each in counted
        if not each.trained
    )
    trained = [parameter for parameter in counted if parameter.trained]
    moments = sum(
        moments_bytes(training.optimizer, p.shape, p.whole, training.stack.moment_bytes)
        for p in trained
    )
    return ideal_states(sum(p.elements for p in trained), ranks, training, moments, frozen)


def operators_ideal_states(
    operators: Iterable[Operator], ranks: int, training: TrainingSpec
) -> tuple[float, float, float]:
    """Returns `ideal_states` of the parameters of some operators."""
    parameters = (p for each in operators for p in _local(each, Sharding(), sums_weights=False))
    return ideal_states_of(parameters, ranks, training)


def zero_buffer_bytes(
    num_parameters: int,
    zero: int,
    dp: int,
    training: TrainingSpec,
    gathered_bytes: int | None = None,
) -> int:
    """Temporary bytes that ZeRO needs for a layer of `num_parameters` on a tensor-parallel rank.

    gathered_bytes: of the parameters when they are gathered; None: in the precision of training

    ZeRO 1 casts one layer for its reduce-scatter; ZeRO 2 and 3 also hold the layer's unreduced
    gradient; ZeRO 3 also the gathered parameters of the current and the prefetched layer (EQUATIONS
    M2). A stack whose gradients lie in one contiguous buffer reduces and gathers in place at ZeRO 1
    and 2; it may flatten them into a bucket at any stage.
    """
    bucket = training.stack.bucket_elements * training.gradient_precision.num_bytes
    if zero == 0 or dp == 1 or (zero < 3 and not training.stack.zero_buffers):
        return bucket if dp > 1 else 0
    reduce_input = training.gradient_precision.num_bytes * num_parameters
    unreduced = training.precision.num_bytes * num_parameters if zero >= 2 else 0
    if gathered_bytes is None:
        gathered_bytes = training.precision.num_bytes * num_parameters
    gathered = 2 * gathered_bytes if zero == 3 else 0
    return reduce_input + unreduced + gathered
