"""Matrix products: each of the three of a linear layer alone, and those of unfused attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from parplan.executor.measuring.operands import Maker
from parplan.executor.measuring.trials import Graph, TimedPasses, Trial, TrialStep
from parplan.executor.models.operators import Linear

Sizes = Mapping[str, int]


def linear(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of [1, m, k] x [n, k]^T.

    Each gradient is that of one operand alone, so the graph has one product. The gradient of the
    bias is a case of its own.
    """
    return (
        TimedPasses(_linear(sizes, ("x", "weight", "bias")), {"forward": "forward"}),
        TimedPasses(_linear(sizes, ("x",)), {"backward": "input_gradient"}),
        TimedPasses(_linear(sizes, ("weight",)), {"backward": "weight_gradient"}),
    )


def bias_gradient(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the pass that sums an output's gradient over tokens.

    It is the backward pass of a linear layer in which the bias alone has a gradient.
    """
    biased = {"m": sizes["tokens"], "n": sizes["width"], "k": 1, "bias": 1}
    return (TimedPasses(_linear(biased, ("bias",)), {"backward": "time"}),)


def _linear(sizes: Sizes, learned: tuple[str, ...]) -> Callable[[Maker], Trial]:
    def make(maker: Maker) -> Trial:
        with torch.device("meta"):
            module = Linear(sizes["k"], sizes["n"], bias=bool(sizes["bias"]))
        module = maker.module(module)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in learned)
        x = maker.normal(1, sizes["m"], sizes["k"], learned="x" in learned)
        leaves = tuple(tensor for tensor in (x, *module.parameters()) if tensor.requires_grad)
        return Graph(lambda: module(x), (x,), leaves, maker.gradient(1, sizes["m"], sizes["n"]))

    return make


def batched(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the passes of a batched product [m, k] x [k, n], as unfused attention lays it out.

    The forward product is queries times transposed keys if n > k, else probabilities times values.
    The backward product of the former is that of the probabilities' gradient. That of the latter
    has its left operand transposed, as two of its three uses have (the gradients of values and
    keys).
    """
    batch, m = sizes["batch"], sizes["m"]
    n, k = sizes["n"], sizes["k"]

    def make(backward: bool, maker: Maker) -> Trial:
        transposed = backward and n <= k
        if transposed:
            left = maker.normal(batch, k, m).transpose(1, 2)
        else:
            left = maker.normal(batch, m, k)
        right = maker.normal(batch, n, k).transpose(1, 2) if n > k else maker.normal(batch, k, n)
        return TrialStep(lambda: left @ right, (left,))

    return (
        TimedPasses(lambda maker: make(False, maker), {"time": "forward"}),
        TimedPasses(lambda maker: make(True, maker), {"time": "backward"}),
    )
