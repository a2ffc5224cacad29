"""The parts of a block that are one access each, and their order in its passes (EQUATIONS O7).

By blocks, the pass of a block is one access: all its parameters are on the device together. By
operators, an access is an operator with parameters and those behind it without any; a norm joins
the product after it. A gpt block has four: norm and qkv with attention, attention_out, norm and
fc1, fc2.

A block that is recomputed as a whole runs its parts forward again before its backward pass. The
last part runs again and backward in one access. A block that recomputes some operators needs, in
the backward pass of a part, also the parameters of the operators that make its tensors again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from parplan.costmodels.host.state_location import Access
from parplan.costmodels.layers.recompute import made_inside
from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind


@dataclass(frozen=True, slots=True)
class PartPass:
    """One access in a pass of a block.

    part       its number in the block, in the order of the forward pass
    reads      the parts whose parameters it needs
    makes      the parts whose gradients it makes
    rerun      it is a forward pass that runs again
    ends       it is the last access of the block's pass
    """

    part: int = 0
    reads: tuple[int, ...] = (0,)
    makes: tuple[int, ...] = ()
    rerun: bool = False
    ends: bool = True


WHOLE = PartPass(makes=(0,))  # of a layer that is one part


def parts_of(layer: LayerClass, access: Access) -> tuple[tuple[Operator, ...], ...]:
    """Returns the operators of each part of a layer, in their order."""
    if access is Access.BLOCK:
        return (layer.operators,)
    parts: list[list[Operator]] = [[]]
    joins = True  # the next operator with parameters belongs to the part before it
    for operator in layer.operators:
        if operator.parameters:
            if not joins:
                parts.append([])
            joins = operator.kind is OperatorKind.NORM
        parts[-1].append(operator)
    return tuple(map(tuple, parts))


def tensor_counts(layer: LayerClass, access: Access) -> tuple[int, ...]:
    """Returns the number of tensors of each part, as `block_tensors` lists them."""
    return tuple(
        sum(not parameter.tied for operator in part for parameter in operator.parameters)
        for part in parts_of(layer, access)
    )


def part_passes(
    layer: LayerClass, access: Access, recomputed: Collection[str], *, backward: bool
) -> tuple[PartPass, ...]:
    """Returns the accesses of a forward or backward pass that recomputes some operators."""
    parts = parts_of(layer, access)
    last = len(parts) - 1
    if not backward:
        return tuple(PartPass(part, (part,), ends=part == last) for part in range(last + 1))
    whole = len(set(recomputed)) == len(layer.operators)
    reruns = range(last) if whole else range(0)
    return (
        *(PartPass(part, (part,), rerun=True, ends=False) for part in reruns),
        *(
            PartPass(
                part,
                (part,) if whole else _read(part, parts, frozenset(recomputed)),
                (part,),
                ends=part == 0,
            )
            for part in reversed(range(last + 1))
        ),
    )


def _read(
    part: int, parts: tuple[tuple[Operator, ...], ...], recomputed: frozenset[str]
) -> tuple[int, ...]:
    """Returns the parts whose parameters the backward pass of a part may need."""
    makers = {
        tensor.name: (number, operator)
        for number, operators in enumerate(parts)
        for operator in operators
        if operator.name in recomputed
        for tensor in (*operator.outputs, *made_inside(operator))
    }
    needed = [tensor.name for operator in parts[part] for tensor in operator.saved]
    needed += [
        tensor.name
        for operator in parts[part]
        if operator.name in recomputed
        for tensor in operator.inputs
    ]
    read, seen = {part}, set[str]()
    while needed:
        name = needed.pop()
        if name in seen or name not in makers:
            continue
        seen.add(name)
        number, operator = makers[name]
        if operator.parameters:
            read.add(number)
        needed += [tensor.name for tensor in operator.inputs]
    return tuple(sorted(read))
