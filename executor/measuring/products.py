"""Products: linear layers, each of their three products alone, and those of un-fused attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from parplan.executor.measuring.operands import Maker
from parplan.executor.measuring.trials import Graph, TimedPasses, Trial, TrialStep
from parplan.executor.models.transformer_layers import Linear

Sizes = Mapping[str, int]


def linear(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """[1, m, k] x [n, k]^T. Each gradient is that of one operand alone, so that the graph has one
    product; that of the bias is a case of its own.
    """
    return (
        TimedPasses(_linear(sizes, ("x", "weight", "bias")), {"forward": "forward"}),
        TimedPasses(_linear(sizes, ("x",)), {"backward": "input_gradient"}),
        TimedPasses(_linear(sizes, ("weight",)), {"backward": "weight_gradient"}),
    )


def bias_gradient(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """The sum over tokens of an output's gradient: the backward pass of a linear layer whose bias
    alone has one.
    """
    ones = {"m": sizes["tokens"], "n": sizes["width"], "k": 1, "bias": 1}
    return (TimedPasses(_linear(ones, ("bias",)), {"backward": "time"}),)


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
    """One batched product [m, k] x [k, n], as un-fused attention lays out its operands.

    forward: queries times transposed keys where n > k, else probabilities times values. backward:
    the first is that of the probabilities' gradient; the second has its left operand transposed, as
    two of its three uses have (the gradients of values and keys).
    """
    batch, m, n, k = (sizes[name] for name in ("batch", "m", "n", "k"))

    def make(backward: bool, maker: Maker) -> Trial:
        turned = backward and n <= k
        left = maker.normal(batch, k, m).transpose(1, 2) if turned else maker.normal(batch, m, k)
        right = maker.normal(batch, n, k).transpose(1, 2) if n > k else maker.normal(batch, k, n)
        return TrialStep(lambda: left @ right, (left,))

    return (
        TimedPasses(lambda maker: make(False, maker), {"time": "forward"}),
        TimedPasses(lambda maker: make(True, maker), {"time": "backward"}),
    )
