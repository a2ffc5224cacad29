"""A model graph with frozen parameters and adapters: what fine-tuning leaves of the backward pass.

A frozen product has the gradient of its input alone and saves no input, but for the output of fused
attention, which that saves itself. Layers below the first
trained one have no backward pass and save nothing. An adapter (LoRA, Hu et al. 2021, arXiv
2106.09685) is two products beside a frozen one and their sum:

    y = x W^T + s (x A^T) B^T        A: rank x in, B: out x rank

Under tensor parallelism an adapter follows its product. Where that is divided by its output, A is
whole and B is divided by its output; where it is divided by its input, so is A, whose sums end in
the small tensor of its rank, and B is whole. The second is the row-parallel `linear_in` of NeMo's
ParallelLinearAdapter; for the first NeMo also divides the rank of A and gathers, peft does as here.

A tower has no adapters, and the gradient of the text does not pass it: where nothing of it is
trained, it has no backward pass.

An adapter of the experts' product has matrices of each expert, and runs on the same copies of
tokens. Ranks that divide the width of an expert divide one matrix of its adapter, and have the
other whole, for the copies that arrived at each.

FLOPs and saved tensors are EQUATIONS F1. The input of the first trained layer counts as one with a
gradient, as Hugging Face's `enable_input_require_grads` makes it. The sum is priced as a residual.
Left out: dropout inside adapters, and the gradient of the text's tokens behind
a frozen projector, which passes it by a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import groupby

from parplan.profiles.errors import ConfigError, did_you_mean
from parplan.profiles.models.fine_tuning import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    NORMS,
    PROJECTOR,
    TOWER,
    FineTuning,
)
from parplan.profiles.models.operator_graph import (
    ADAPTER_RANK,
    PRODUCTS,
    ROUTES,
    BlockClass,
    Dim,
    LayerClass,
    LayerKind,
    ModelGraph,
    ModelPart,
    Operator,
    OperatorKind,
    Parameter,
    RepeatedLayer,
)
from parplan.profiles.models.parts.shapes import elementwise, grouped, linear

_WHOLE_RANK = ((ADAPTER_RANK, "every rank of a stage has the whole rank of an adapter"),)


class State(StrEnum):
    """The work that fine-tuning leaves of a layer's backward pass."""

    TRAINED = "trained"
    FROZEN = "frozen"  # the gradient of its input alone
    FORWARD = "forward"  # nothing: no layer below it is trained


Variant = tuple[int, State]  # the id of a layer class, and what is left of it


def fine_tuned(graph: ModelGraph, tuning: FineTuning | None) -> ModelGraph:
    """Returns `graph` with the adapters and the frozen parameters of `tuning`.

    Raises ConfigError where a target is no product of a block, a frozen part does not exist, or
    nothing is trained.
    """
    if tuning is None:
        return graph
    rules = _Rules(tuning, graph)
    layers = [run.layer for run in graph.layers for _ in range(run.count)]
    variants = list(zip(map(id, layers), _states(layers, rules), strict=True))
    bases = {id(layer): layer for layer in layers}
    made = {each: rules.variant(bases[each[0]], each[1]) for each in dict.fromkeys(variants)}
    named = _named(made, bases)
    runs = [(variant, len(list(alike))) for variant, alike in groupby(variants)]
    return replace(
        graph, layers=tuple(RepeatedLayer(named[variant], count) for variant, count in runs)
    )


def _states(layers: list[LayerClass], rules: _Rules) -> list[State]:
    """Returns the state of each layer. Raises ConfigError where nothing is trained."""
    states: list[State] = []
    block = 0
    trained_before = {True: False, False: False}  # in the tower, and in all of the model
    for layer in layers:
        frozen = not rules.variant(layer, State.TRAINED).trained
        if _is_block(layer):
            frozen = frozen or rules.tuning.freezes_block(block)
            block += 1
        in_tower = layer.part is not ModelPart.LANGUAGE
        below = State.FROZEN if trained_before[in_tower] else State.FORWARD
        states.append(below if frozen else State.TRAINED)
        trained_before = {
            True: trained_before[True] or (in_tower and not frozen),
            False: trained_before[False] or not frozen,
        }
    if State.TRAINED not in states:
        raise ConfigError(
            "every parameter of the model is frozen", hint="freeze less, or add --lora-rank"
        )
    return states


def _is_block(layer: LayerClass) -> bool:
    """Returns True for a block of the language model."""
    return layer.kind is LayerKind.BLOCK and layer.part is ModelPart.LANGUAGE


def _named(
    made: Mapping[Variant, LayerClass], bases: Mapping[int, LayerClass]
) -> Mapping[Variant, LayerClass]:
    """Returns the variants with names of their own, where blocks of one class became several."""
    blocks = [each for each, layer in made.items() if layer.kind is LayerKind.BLOCK]
    if len(blocks) == len({number for number, _ in blocks}):
        return made

    def name(variant: Variant) -> str:
        base = bases[variant[0]].block
        return f"{base.name}-{variant[1]}" if base else variant[1].value

    numbered = {
        variant: replace(made[variant], block=BlockClass(number, name(variant)))
        for number, variant in enumerate(blocks)
    }
    return {**made, **numbered}


class _Rules:
    """The rules of one fine-tuning for the layers of one model.

    Raises ConfigError where a target is no product of a block, or a frozen part does not exist.
    """

    def __init__(self, tuning: FineTuning, graph: ModelGraph) -> None:
        self.tuning = tuning
        blocks = [run for run in graph.layers if _is_block(run.layer)]
        self.targets = _targets(tuning, [run.layer for run in blocks])
        self._tied = any(p.tied for op in graph.head.operators for p in op.parameters)
        parts = {run.layer.part for run in graph.layers}
        for part in tuning.freeze:
            if part in (TOWER, PROJECTOR) and ModelPart.TOWER not in parts:
                raise ConfigError(
                    f"--freeze {part}: {graph.name} has no tower", hint=f"leave out {part}"
                )
        tuning.require_blocks(sum(run.count for run in blocks), graph.name)

    def variant(self, layer: LayerClass, state: State) -> LayerClass:
        """Returns a layer as fine-tuning leaves it."""
        made: list[Operator] = []
        needs_gradient = (
            layer.kind is not LayerKind.EMBEDDING and layer.part is not ModelPart.PATCHES
        )
        for operator in layer.operators:
            tuned = self._tuned(operator, layer, all_of_it=state is not State.TRAINED)
            needs_gradient = needs_gradient or tuned.trained
            runs_back = needs_gradient and state is not State.FORWARD
            base = tuned if runs_back else _forward_only(tuned)
            adapted = state is State.TRAINED and _is_block(layer)
            if adapted and operator.name in self.targets:
                made += adapter_operators(base, self.tuning.lora_rank)
            else:
                made.append(base)
        return replace(layer, operators=tuple(made))

    def _tuned(self, operator: Operator, layer: LayerClass, *, all_of_it: bool) -> Operator:
        """Returns an operator with its frozen parameters."""
        eight_bits = self.tuning.base_bits == 8 and _is_block(layer)
        parameters = []
        for parameter in operator.parameters:
            frozen = all_of_it or self._freezes(operator, parameter, layer)
            quantised = eight_bits and frozen and _is_matrix(operator, parameter)
            parameters.append(replace(parameter, trained=not frozen, quantised=quantised))
        tuned = replace(operator, parameters=tuple(parameters))
        if operator.kind in PRODUCTS and operator.parameters and not tuned.trained:
            kept = tuple(tensor for tensor in operator.saved if tensor.name in _kept(layer))
            return replace(tuned, saved=kept, flops_backward=operator.flops_forward)
        return tuned

    def _freezes(self, operator: Operator, parameter: Parameter, layer: LayerClass) -> bool:
        tuning = self.tuning
        if tuning.lora_rank or (operator.kind is OperatorKind.NORM and tuning.freezes(NORMS)):
            return True
        if self._tied and (parameter.tied or operator.kind is OperatorKind.EMBEDDING):
            return tuning.freezes(EMBEDDING) or tuning.freezes(HEAD)
        parts = {ModelPart.PATCHES: TOWER, ModelPart.TOWER: TOWER, ModelPart.PROJECTOR: PROJECTOR}
        ends = {LayerKind.EMBEDDING: EMBEDDING, LayerKind.HEAD: HEAD}
        named = parts.get(layer.part) or ends.get(layer.kind)
        return named is not None and tuning.freezes(named)


def _kept(layer: LayerClass) -> frozenset[str]:
    """Returns the names of the outputs that fused attention saves itself.

    They count at the product that reads them, as where that saves them too.
    """
    return frozenset(
        out.name
        for operator in layer.operators
        if operator.kind is OperatorKind.ATTENTION
        and not any(tensor.has("keys") for tensor in operator.saved)
        for out in operator.outputs
    )


def _is_matrix(operator: Operator, parameter: Parameter) -> bool:
    return operator.kind is OperatorKind.MATMUL and len(parameter.dims) == 2


def _forward_only(operator: Operator) -> Operator:
    return replace(operator, gradient=False, saved=(), flops_backward=0)


def _is_router(operator: Operator) -> bool:
    """Returns whether it gives the scores of experts, which no adapter changes."""
    return any(tensor.has(ROUTES) for tensor in operator.outputs)


def _targets(tuning: FineTuning, blocks: list[LayerClass]) -> tuple[str, ...]:
    """Returns the operators that have adapters. Raises ConfigError for one that cannot."""
    products = tuple(
        dict.fromkeys(
            operator.name
            for layer in blocks
            for operator in layer.operators
            if operator.kind in PRODUCTS and operator.parameters and not _is_router(operator)
        )
    )
    if tuning.lora_targets == (ALL_LINEAR,):
        return products
    for target in tuning.adapted_operators:
        if target not in products:
            raise ConfigError(
                f"--lora-targets {target} is no product of a block that can have an adapter",
                hint=did_you_mean(target, products) or f"name {', '.join(products)}",
            )
    return tuning.adapted_operators


def adapter_operators(base: Operator, rank: int) -> tuple[Operator, ...]:
    """Returns a frozen product with an adapter of `rank`: the product, A, B and their sum."""
    (x,), (out,) = base.inputs, base.outputs
    by_input = base.parallel_dim is not None and base.parallel_dim == base.contracted
    small = replace(x, name=f"{base.name}_lora_a", dims=(*x.dims[:-1], Dim(ADAPTER_RANK, rank)))
    added = replace(out, name=f"{base.name}_lora_b")
    plain = replace(out, name=f"{base.name}_base")
    by_output = None if by_input else base.parallel_dim
    experts = next((each.dims[0] for each in base.parameters if each.of_experts), None)
    copies = base.flops_forward // (2 * x.dims[-1].size * out.dims[-1].size)
    product = linear if experts is None else partial(grouped, experts=experts, copies=copies)
    undivided = (*(() if experts is None else base.undivided), *_WHOLE_RANK)
    first = product(
        small.name,
        x,
        small,
        parallel_dim=base.parallel_dim if by_input else None,
        bias=False,
        undivided=undivided,
    )
    second = product(
        added.name, small, added, parallel_dim=by_output, bias=False, undivided=undivided
    )
    joined = elementwise(f"{base.name}_lora_sum", (plain, added), out, parallel_dim=by_output)
    adapter = (replace(each, repeatable=base.repeatable) for each in (first, second, joined))
    return replace(base, outputs=(plain,)), *adapter
