"""The dense feed-forward network of a block, and that of all tokens beside experts."""

from __future__ import annotations

from parplan.profiles.models.operator_graph import Dim, Operator, Tensor
from parplan.profiles.models.parts.shapes import Shapes, elementwise, linear


def feed_forward_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the two products of a dense block and the activation between them."""
    return _dense(x, shapes, shapes.model.ffn_hidden_size, "")


def shared_expert_operators(x: Tensor, combined: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the network that every token passes, and its sum with the output of the experts."""
    shared = shapes.model.shared_experts
    assert shared is not None, "the model has shared experts"
    dense = _dense(x, shapes, shared.ffn_hidden_size, "shared_")
    fed = dense[-1].outputs[0]
    gates: tuple[Operator, ...] = ()
    if shared.gated:
        gate = shapes.tokens("shared_gate", Dim("gate", 1))
        gated = shapes.tokens("shared_gated", shapes.hidden)
        gates = (
            linear("shared_gate", x, gate, parallel_dim=None, bias=False),
            elementwise("shared_gated", (fed, gate), gated, (fed, gate)),
        )
        fed = gated
    joined = shapes.tokens("expert_sum", shapes.hidden)
    return (*dense, *gates, elementwise("expert_sum", (combined, fed), joined))


def _dense(x: Tensor, shapes: Shapes, width: int, prefix: str) -> tuple[Operator, ...]:
    model = shapes.model
    halves = 2 if model.gated_ffn else 1
    fc1 = shapes.tokens(f"{prefix}fc1", Dim("ffn", width * halves, halves))
    fc2 = shapes.tokens(f"{prefix}fc2", shapes.hidden)
    activated = shapes.tokens(f"{prefix}activation", Dim("ffn", width))
    gate = kept_gate(shapes.tokens(f"{prefix}activated_gate", Dim("ffn", width)), shapes)
    bias = model.linear_bias
    return (
        linear(f"{prefix}fc1", x, fc1, parallel_dim="ffn", bias=bias),
        elementwise(f"{prefix}activation", (fc1,), activated, (fc1, *gate), parallel_dim="ffn"),
        linear(f"{prefix}fc2", activated, fc2, parallel_dim="ffn", bias=bias),
    )


def kept_gate(gate: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    """Returns the activated gate where the activation saves it."""
    keeps = shapes.model.gated_ffn and shapes.training.stack.keeps_activated_gate
    return (gate,) if keeps else ()
