"""The executor's whole Block, forward and backward, as a rank runs it for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parplan.executor.measuring.layer_operations import DROPOUT
from parplan.executor.measuring.operands import Maker, model_spec
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.trials import Graph, TimedPasses, both
from parplan.executor.models.transformer_layers import Block
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL


@dataclass(slots=True)
class WholeBlock(Graph):
    """A Graph whose parameters add their gradients to the step's.

    In fp32 autograd adds them. In 16 bits the executor adds them to fp32 gradients after the
    layer's backward pass.
    """

    parameters: tuple[nn.Parameter, ...] = ()
    accumulated: tuple[Tensor, ...] = ()

    def release(self, step: str) -> None:
        Graph.release(self, step)
        self.leaves[0].grad = None

    def backward(self) -> None:
        assert self.out is not None
        torch.autograd.backward(self.out, self.gradient)
        self.gradients = (self.leaves[0].grad,)  # type: ignore[assignment]
        for parameter, sum_ in zip(self.parameters, self.accumulated, strict=True):
            sum_.add_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None


def block_specs(sizes: Sizes) -> tuple[ModelSpec, TrainingSpec]:
    """Return the one-block model of a case, and its training."""
    model = model_spec(
        hidden_size=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        ffn_hidden_size=sizes["ffn"],
        gated_ffn=bool(sizes["gated"]),
        norm=Norm.RMS_NORM if sizes["rms"] else Norm.LAYER_NORM,
        positions=Positions.ROTARY if sizes["rotary"] else Positions.LEARNED,
        dropout=DROPOUT if sizes["dropout"] else 0.0,
        linear_bias=not sizes["rms"],
        qkv_bias=not sizes["rms"],
    )
    return model, TrainingSpec(
        global_batch_size=sizes["batch"],
        seq_length=sizes["seq"],
        precision=Precision.FP32,
        stack=NEUTRAL,
    )


def block(sizes: Sizes) -> tuple[TimedPasses, ...]:
    model, training = block_specs(sizes)
    shape = (sizes["batch"], sizes["seq"], sizes["hidden"])

    def trial(maker: Maker) -> WholeBlock:
        with torch.device("meta"):
            module = Block(build_graph(model, training, 1).block, model, training)
        module = maker.module(module)
        x = maker.normal(*shape, learned=True)
        parameters = tuple(module.parameters())
        accumulated = tuple(maker.zeros_like(parameter, torch.float32) for parameter in parameters)
        if maker.dtype is torch.float32:
            _lay_out(parameters, accumulated)
            parameters = accumulated = ()
        return WholeBlock(
            lambda: module(x),
            (x,),
            (x,),
            maker.gradient(*shape),
            parameters=parameters,
            accumulated=accumulated,
        )

    return both(trial)


def _lay_out(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
