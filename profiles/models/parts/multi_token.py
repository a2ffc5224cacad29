"""Multi-token prediction: modules behind the blocks that predict one token further each.

DeepSeek-V3, arXiv 2412.19437, section 2.2. A module joins the state of a token with the embedding
of the next one, and passes both through one more block. All predictions share the product with the
vocabulary, and the table is a copy of that of the embedding, or with tied embeddings that product's
matrix. The modules belong to the head, whose
operators are not recomputed.
"""

from __future__ import annotations

import re
from dataclasses import replace

from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Tensor
from parplan.profiles.models.parts.block import block_operators
from parplan.profiles.models.parts.shapes import Shapes, elementwise, linear

MODULE = "mtp"  # the beginning of the names of a module's operators, before its number


def is_in_module(operator: str) -> bool:
    """Returns whether the operator of this name is in a module."""
    return re.match(rf"{MODULE}\d+\.", operator) is not None


def multi_token_operators(x: Tensor, shapes: Shapes) -> tuple[tuple[Operator, ...], list[Tensor]]:
    """Returns the operators of all modules, and the states that predict tokens.

    shapes    those of a block of the kind that the modules have
    """
    operators: list[Operator] = []
    states: list[Tensor] = []
    for number in range(1, shapes.model.mtp_layers + 1):
        module = _module(x, shapes, f"{MODULE}{number}.")
        # all modules look tokens up in the table of the first, or in a tied head's matrix
        owns_table = number == 1 and not shapes.model.tied_embeddings
        operators += module if owns_table else map(_without_table, module)
        states.append(operators[-1].outputs[0])
        x = operators[-2].outputs[0]
    return tuple(operators), states


def _module(x: Tensor, shapes: Shapes, prefix: str) -> tuple[Operator, ...]:
    """Returns the embedding, two norms, the projection, a block, and the norm behind it."""
    hidden = shapes.hidden
    embedded = shapes.tokens(f"{prefix}embedded", hidden)
    state_normed = shapes.tokens(f"{prefix}state_norm", hidden)
    embedding_normed = shapes.tokens(f"{prefix}embedding_norm", hidden)
    joined = shapes.tokens(f"{prefix}joined", Dim("joined", 2 * hidden.size))
    projected = shapes.tokens(f"{prefix}block_input", hidden)
    block = tuple(_prefixed(operator, prefix) for operator in block_operators(shapes))
    normed = shapes.tokens(f"{prefix}norm", hidden)
    return (
        shapes.norm(f"{prefix}state_norm", x, state_normed),
        shapes.look_up(f"{prefix}tokens", embedded, tied=True),
        shapes.norm(f"{prefix}embedding_norm", embedded, embedding_normed),
        elementwise(f"{prefix}joined", (state_normed, embedding_normed), joined),
        linear(f"{prefix}projection", joined, projected, parallel_dim=None, bias=False),
        *block,
        shapes.norm(f"{prefix}norm", block[-1].outputs[0], normed),
    )


def _without_table(operator: Operator) -> Operator:
    is_table = operator.kind is OperatorKind.EMBEDDING
    return replace(operator, parameters=()) if is_table else operator


def _prefixed(operator: Operator, prefix: str) -> Operator:
    def named(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, name=f"{prefix}{tensor.name}") for tensor in tensors)

    return replace(
        operator,
        name=f"{prefix}{operator.name}",
        inputs=named(operator.inputs),
        outputs=named(operator.outputs),
        saved=named(operator.saved),
    )
