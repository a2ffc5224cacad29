"""Legal placements of an operator over the tensor-parallel axis, and the fault of any other.

    operator                  input      weight, bias           output
    matmul, by batch          Shard(0)   whole                  Shard(0)
            by sequence       Shard(1)   whole                  Shard(1)
            by its outputs    whole      Shard(0), Shard(0)     Shard(2)
            by its sums       Shard(2)   Shard(1), whole        whole, Shard(0) or Shard(1):
                              all-reduced or reduce-scattered
    attention, rotary         Shard(0) or Shard(2), whole heads; the same output
    norm                      Shard(0) or Shard(1); the same output
    norm of heads             Shard(0), Shard(1) or Shard(2), whole heads; the same output
    state space               Shard(0) or Shard(2), whole groups of heads; the same output
    activation, residual      Shard(0), Shard(1) or Shard(2); the same output
    token table, by rows      ids whole  Shard(0)               whole, Shard(0) or Shard(1)
            by columns        ids whole  Shard(1)               Shard(2)
            by tokens         ids cut    whole                  Shard(0) or Shard(1)
    position table            Shard(0), Shard(1) or Shard(2), where Shard(1) cuts the table too;
                              the same output
    loss                      Shard(0), Shard(1) or Shard(2) of the logits; the sum is whole

Every operator may also be whole. The head's product is like any other. A tied table is divided
alike in embedding and head. Activations are [batch, sequence, feature].
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.operators.sharding import GRID
from parplan.executor.placed_layers import rank_tokens
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.models.operator_graph import (
    Dim,
    LayerClass,
    LayerKind,
    ModelPart,
    Operator,
    OperatorKind,
)
from parplan.profiles.models.parts.cross_attention import ATTENDED
from parplan.profiles.models.towers import Tower
from parplan.profiles.models.transformer import build_graph

Entries = tuple[str, ...]

WHOLE: Entries = ()
BATCH: Entries = ("Shard(0)@tp",)
SEQUENCE: Entries = ("Shard(1)@tp",)
FEATURES: Entries = ("Shard(2)@tp",)
ROWS, COLUMNS = BATCH, SEQUENCE  # of a weight [features out, features in], and of a table
TOKENS = (BATCH, SEQUENCE)
GRID_STREAM: Entries = ("Shard(0)@tp_rows", "Shard(2)@tp_columns")  # between layers on a grid
OF_SCANS = ("conv", "steps", "scan", "gated_norm")  # operators that hold groups of heads

_SHARD = re.compile(r"Shard\((\d+)\)@tp")


def features_of(operator: Operator) -> Entries:
    """Return the division of the last dim of an operator's output, or of its input without one."""
    tensor = (*operator.outputs, *operator.inputs)[0]
    return (f"Shard({len(tensor.dims) - 1})@tp",)


def shard_dim(entries: Entries) -> int | None:
    """Return the dim that the plan's `("Shard(1)@tp",)` divides, or None if the tensor is whole."""
    match = _SHARD.fullmatch(entries[0]) if len(entries) == 1 else None
    return int(match[1]) if match else None


def local_shape(shape: Sequence[int], entries: Entries, **degrees: int) -> tuple[int, ...]:
    """Return the shape of one rank's part of a tensor that `entries` divide.

    degrees    the number of ranks on each axis that has an entry
    """
    parts = [1] * len(shape)
    for entry in entries:
        dim, axis = entry.removeprefix("Shard(").split(")@")
        parts[int(dim)] *= degrees[axis]
    return tuple(size // count for size, count in zip(shape, parts, strict=True))


def tp_degrees(mesh: Mesh) -> dict[str, int]:
    """Return the number of ranks on each axis that divides the operators of a replica."""
    return {"tp": mesh.tp, GRID[0]: mesh.tp_rows, GRID[1]: mesh.tp_columns}


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """An operator whose placements the executor cannot run, or would run to wrong gradients."""

    layer_plan: str
    layer: LayerKind
    operator: Operator
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided:
    """A dim of `size` units that `tp` does not divide; `what` names it."""

    layer_plan: str
    operator: str
    what: str
    size: int


def misplaced(plan: Plan) -> Iterator[Misplaced]:
    """Yield every operator whose placements do not fit its kind, whatever the size of tp."""
    for name, of, operator in _operators(plan):
        layer = of.kind
        placement = plan.layer_plans[name].operators.get(operator.name)
        if placement is None:
            yield Misplaced(
                layer_plan=name, layer=layer, operator=operator, problem="it has no placement"
            )
            continue
        for problem in _problems(operator, layer, placement):
            yield Misplaced(layer_plan=name, layer=layer, operator=operator, problem=problem)
            break


def table_division(layer_plan: LayerPlan, name: str) -> tuple[Entries, bool]:
    """Return how an operator of embedding or head divides the token table.

    The second value is true where ranks hold parts of the gradient of a whole table.
    """
    placement = layer_plan.operators.get(name, OperatorPlacement())
    weight = placement.parameters.get("weight", WHOLE)
    return weight, weight == WHOLE and placement.output in TOKENS


def table_placement(division: tuple[Entries, bool]) -> OperatorPlacement:
    """Return a placement of the token table of an embedding with a division."""
    weight, summed = division
    output = SEQUENCE if summed else WHOLE
    if weight == COLUMNS:
        output = FEATURES
    return OperatorPlacement(parameters={"weight": weight}, input=WHOLE, output=output)


def loses_by_tokens(plan: AnyPlan) -> bool:
    """Return whether every tensor-parallel rank has the loss of its part of the tokens.

    The ranks of a traced module all have the whole loss.
    """
    return isinstance(plan, Plan) and any(
        layer_plan.operators["loss"].input in TOKENS
        for layer_plan in plan.layer_plans.values()
        if "loss" in layer_plan.operators
    )


def undivided(plan: Plan) -> Iterator[Undivided]:
    """Yield every dim that an operator's placements divide unevenly."""
    for name, layer, operator in _operators(plan):
        placement = plan.layer_plans[name].operators.get(operator.name, OperatorPlacement())
        for what, size in _divided_sizes(plan, layer, operator, placement):
            if size % plan.mesh.tp:
                yield Undivided(layer_plan=name, operator=operator.name, what=what, size=size)


def nearest_placement(plan: Plan, fault: Misplaced) -> OperatorPlacement:
    """Return the legal placement nearest to the plan's.

    It differs in the fewest entries and, among equals, divides the most.
    """
    operator = fault.operator
    had = plan.layer_plans[fault.layer_plan].operators.get(operator.name, OperatorPlacement())
    names = [parameter.name for parameter in operator.parameters]
    legal = []
    for read, gives, *held in itertools.product(
        dict.fromkeys((features_of(operator), FEATURES, SEQUENCE, BATCH, WHOLE)),
        repeat=2 + len(names),
    ):
        placement = OperatorPlacement(
            parameters=dict(zip(names, held, strict=True)), input=read, output=gives
        )
        if not any(_problems(operator, fault.layer, placement)):
            legal.append(placement)

    def changes(placement: OperatorPlacement) -> int:
        sides = (placement.input != had.input, placement.output != had.output)
        return sum(sides) + sum(
            entries != had.parameters.get(name, WHOLE)
            for name, entries in placement.parameters.items()
        )

    return min(legal, key=changes)


def _operators(plan: Plan) -> Iterator[tuple[str, LayerClass, Operator]]:
    if plan.mesh.tp > 1 and plan.mesh.tp_rows == 1:  # executor/rules/grid_rules.py
        graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
        for name, layer_plan in plan.layer_plans.items():
            if layer_plan.divides_over_data:  # executor/rules/over_data_rules.py
                continue
            layer = graph.layer_class(layer_plan.key(graph))
            for operator in layer.operators:
                if not operator.on_copies:  # executor/rules/expert_rules.py has their placements
                    yield name, layer, operator


def _problems(operator: Operator, layer: LayerKind, placement: OperatorPlacement) -> Iterator[str]:
    yield from _entries(operator, placement)
    yield from _rule(operator, layer, placement)


def _entries(operator: Operator, placement: OperatorPlacement) -> Iterator[str]:
    """Yield faults of entries that are not one shard of a dim that the tensor has."""
    num_dims = {
        "input": max((3, *(len(each.dims) for each in operator.inputs))),
        "output": max((3, *(len(each.dims) for each in operator.outputs))),
        **{parameter.name: len(parameter.shape) for parameter in operator.parameters},
    }
    for name, entries in {
        "input": placement.input,
        "output": placement.output,
        **placement.parameters,
    }.items():
        if name not in num_dims:
            yield f"it has no parameter {name}"
        elif entries and shard_dim(entries) not in range(num_dims[name]):
            yield (
                f"{name} placement {list(entries)} is not one Shard(d)@tp with d below "
                f"{num_dims[name]}"
            )


def _rule(operator: Operator, layer: LayerKind, placement: OperatorPlacement) -> Iterator[str]:
    """Yield faults against the rule of the operator's kind."""
    if operator.kind is OperatorKind.EMBEDDING or layer is LayerKind.EMBEDDING:
        yield from _embedding_rule(operator, placement)
    elif operator.kind is OperatorKind.CROSS_ENTROPY:
        yield from _loss_rule(placement)
    elif operator.kind is OperatorKind.MATMUL and operator.parameters:
        yield from _matmul_rule(operator, placement)
    else:
        yield from _same_rule(operator, placement)


def _matmul_rule(operator: Operator, placement: OperatorPlacement) -> Iterator[str]:
    weight = placement.parameters.get("weight", ())
    bias = placement.parameters.get("bias", ())
    sizes = {parameter.name: parameter for parameter in operator.parameters}
    if weight != WHOLE:
        divided = sizes["weight"].dims[shard_dim(weight)].name
        yield from (
            f"its {dim} cannot be divided: {why}"
            for dim, why in operator.undivided
            if dim == divided
        )
    has_bias = "bias" in sizes
    legal_bias = WHOLE
    if weight == WHOLE:
        allowed = [(entries, entries) for entries in (WHOLE, BATCH, SEQUENCE)]
        why = "a whole weight reads and gives whole features, divided alike by batch or sequence"
    elif weight == ROWS:
        allowed = [(WHOLE, features_of(operator))]
        legal_bias = ROWS
        why = f"a weight divided by rows reads the whole input and gives {_text(allowed[0][1])}"
    else:
        allowed = [(FEATURES, output) for output in (WHOLE, BATCH, SEQUENCE)]
        why = (
            "a weight divided by columns reads Shard(2) and its sums are reduced to whole, "
            "Shard(0) or Shard(1)"
        )
    if (placement.input, placement.output) not in allowed:
        yield (
            f"input {_text(placement.input)} and output {_text(placement.output)} with weight "
            f"{_text(weight)}: {why}"
        )
    if has_bias and bias != legal_bias:
        yield f"bias {_text(bias)} with weight {_text(weight)}, it must be {_text(legal_bias)}"


def _same_rule(operator: Operator, placement: OperatorPlacement) -> Iterator[str]:
    """Yield faults of an operator without a product: input and output must be divided alike."""
    if placement.input != placement.output:
        yield f"input {_text(placement.input)} and output {_text(placement.output)} differ"
    for parameter in operator.parameters:
        entries = placement.parameters.get(parameter.name, WHOLE)
        by_heads = placement.input == FEATURES and parameter.tensor_dim("heads") == 0
        if entries != (ROWS if by_heads else WHOLE):
            yield f"its parameters must be {'Shard(0)' if by_heads else 'whole'}"
    over_heads = operator.parallel_dim == "heads"
    in_chunks = operator.kind is OperatorKind.MATMUL  # the scan of a state space
    reads_sequences = in_chunks or any(name == "sequence" for name, _ in operator.undivided)
    if reads_sequences and placement.input == SEQUENCE:
        why = (
            "queries need every key before them"
            if operator.kind is OperatorKind.ATTENTION
            else "positions count from a shard's start"
        )
        yield f"it cannot be divided by sequence: {why}"
    elif operator.kind is OperatorKind.ELEMENTWISE:
        yield from _undivided_dims(operator, placement)
    if operator.kind is OperatorKind.NORM and not over_heads and placement.input == FEATURES:
        yield "a norm needs the whole hidden dim of a token"


def _undivided_dims(operator: Operator, placement: OperatorPlacement) -> Iterator[str]:
    """Yield the reason why the dim that the input is divided by cannot be divided."""
    dims, dim = operator.outputs[0].dims, shard_dim(placement.input)
    for name, reason in operator.undivided:
        if dim is not None and dim < len(dims) and dims[dim].name == name:
            yield f"it cannot be divided by {name}: {reason}"


def _embedding_rule(operator: Operator, placement: OperatorPlacement) -> Iterator[str]:
    """Yield faults of the token table, which reads ids, and of the position table."""
    is_table = operator.kind is OperatorKind.EMBEDDING
    weight = placement.parameters.get("weight", ())
    legal_weights = [COLUMNS] if placement.output == FEATURES else [WHOLE]
    if is_table and placement.output != FEATURES:
        legal_weights.append(ROWS)
    if weight not in legal_weights:
        legal = " or ".join(map(_text, legal_weights))
        yield f"weight {_text(weight)} with output {_text(placement.output)}, it must be {legal}"
    if placement.input != (WHOLE if is_table else placement.output):
        expected = "whole" if is_table else "as its output"
        yield f"input {_text(placement.input)}, it must be {expected}"


def _loss_rule(placement: OperatorPlacement) -> Iterator[str]:
    """Yield faults of the loss, whose output is one sum."""
    if placement.output != WHOLE or any(placement.parameters.values()):
        yield f"output {_text(placement.output)}, the loss is one sum"


def _divided_sizes(
    plan: Plan, layer: LayerClass, operator: Operator, placement: OperatorPlacement
) -> Iterator[tuple[str, int]]:
    """Yield the sizes that the placement divides, with their names."""
    for parameter in operator.parameters:
        dim = shard_dim(placement.parameters.get(parameter.name, ()))
        if dim is not None:
            yield (
                f"{operator.name}.{parameter.name} of shape {parameter.shape}",
                parameter.shape[dim],
            )
    tower = plan.model.tower
    if layer.part is ModelPart.LANGUAGE and not any(
        each.name == ATTENDED for each in operator.inputs
    ):
        tower = None
    sizes = (plan.pipeline.micro_batch_size, rank_tokens(plan))
    names = ("micro_batch_size", "seq_length" if plan.mesh.cp == 1 else "seq_length / cp")
    for tensors, entries in (
        (operator.inputs, placement.input),
        (operator.outputs, placement.output),
    ):
        dim = shard_dim(entries)
        if dim is None or not tensors:
            continue
        if tower is not None:
            size, name = _tower_size(tower, operator, tensors[-1].dims[dim])
        elif dim < len(sizes):
            size, name = sizes[dim], names[dim]
        elif operator.name in OF_SCANS:
            size, name = _groups_of_heads(tensors[0].dims[dim]), "groups of heads of a scan"
        elif operator.parallel_dim == "heads" and operator.kind is not OperatorKind.MATMUL:
            size, name = plan.model.num_kv_heads, "num_kv_heads"
        else:
            size, name = tensors[0].dims[dim].size, "features"
        yield f"{name} {size}", size


def _groups_of_heads(features: Dim) -> int:
    return features.size // features.unit


def _tower_size(tower: Tower, operator: Operator, divided: Dim) -> tuple[int, str]:
    """Return what ranks divide of a dim of an operator of a tower, with its name."""
    by_heads = divided.name == "heads" and operator.kind is not OperatorKind.MATMUL
    size = tower.num_heads if by_heads else divided.size
    return size, f"{divided.name} of the {tower.name} tower"


def _text(entries: Entries) -> str:
    return entries[0].removesuffix("@tp") if entries else "whole"
