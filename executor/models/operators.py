"""The operators of a described model as modules, without attention and experts.

The layouts let a tensor-parallel shard along dim 0 hold whole units: gated fc1 rows are (ffn, gate
and up). A module with `on_shards` computes on the local shards of its inputs and parameters; the
others run on DTensors. Activations are [batch, sequence, feature].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from parplan.executor.context.context_attention import Context
from parplan.executor.context.zigzag import part_of
from parplan.executor.tensors import local
from parplan.profiles.models.functions import Activations
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.profiler.gpus import is_gpu

aten = torch.ops.aten


class Linear(nn.Linear):
    """A product with the rows or columns of the weight on this rank.

    `adds_bias` is false where the product gives partial sums.
    """

    on_shards = True
    adds_bias = True

    def forward(self, x: Tensor) -> Tensor:
        bias = local(self.bias) if self.adds_bias and self.bias is not None else None
        return functional.linear(x, local(self.weight), bias)


class PartlyBiased(Linear):
    """A product of queries, keys and values, or of keys and values, whose keys have no bias.

    Its features are those of heads by groups of keys, as those of attention are.
    """

    def __init__(self, contracted: int, features: int, biased: int, head_dim: int) -> None:
        super().__init__(contracted, features, bias=False)
        self.bias = nn.Parameter(torch.empty(biased))
        self.head_dim = head_dim
        groups = (features - biased) // head_dim
        self.before = features // head_dim // groups - 2  # heads of a group before its key

    def forward(self, x: Tensor) -> Tensor:
        each = local(self.bias).unflatten(0, (-1, self.before + 1, self.head_dim))
        of_keys = torch.zeros_like(each[:, :1])
        bias = torch.cat((each[:, : self.before], of_keys, each[:, self.before :]), dim=1)
        return functional.linear(x, local(self.weight), bias.flatten())


class LayerNorm(nn.LayerNorm):
    on_shards = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, self.normalized_shape, local(self.weight), local(self.bias), self.eps
        )


class RMSNorm(nn.RMSNorm):
    """The norm of the first features of a token, as many as the weight has."""

    on_shards = True

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x[..., : self.normalized_shape[0]], local(self.weight), self.eps)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Returns x / rms(x) over the last dim, times the weight if there is one."""
    if is_gpu(x.device):
        return functional.rms_norm(x, x.shape[-1:], weight, epsilon)
    return _RmsNorm.apply(x, weight, epsilon)


class _RmsNorm(torch.autograd.Function):
    """Torch's norm with the saved tensors of its kernel for GPUs: the input and 1 / rms(x).

    On CPUs torch has no backward kernel and also saves the normed input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        out, inverse = aten._fused_rms_norm(x, x.shape[-1:], weight, epsilon)
        ctx.save_for_backward(x, inverse, *(() if weight is None else (weight,)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, inverse, *weights = ctx.saved_tensors
        normed, by_normed = x.float() * inverse, gradient.float()
        by_weight = None
        for weight in weights:
            by_weight = (by_normed * normed).flatten(0, -2).sum(0).to(weight.dtype)
            by_normed = by_normed * weight.float()
        along = (by_normed * normed).mean(-1, keepdim=True)
        return (inverse * (by_normed - normed * along)).to(x.dtype), by_weight, None


class Tokens(nn.Embedding):
    """The token table.

    `on_shards` is false where it is divided over the vocabulary: the rows of other ranks are masked
    by DTensor.
    """

    on_shards = False

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.weight
        if self.on_shards:
            return functional.embedding(ids, local(weight))
        if isinstance(weight, DTensor):
            # DTensor makes the gradient of a vocabulary shard whole; this no-op cuts it at once
            weight = weight.redistribute(placements=weight.placements)
        return functional.embedding(ids, weight)


class SharedTokens(Tokens):
    """Looks token ids up in the matrix of another module, which alone has it as a parameter."""

    def __init__(self, owner: nn.Module) -> None:
        nn.Module.__init__(self)
        self._owners = (owner,)  # in a tuple it is no submodule

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._owners[0].get_parameter("weight")


class LearnedPositions(nn.Module):
    """Adds the learned position table to the token embeddings."""

    context: Context | None = None

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.max_seq_length, model.hidden_size))
        self.dropout = model.dropout

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Returns `x` with the positions of its tokens in their sequence, or documents.

        places   those of the tokens of whole sequences in their documents, [batch, sequence]
        """
        # on a grid of ranks x is a plain tensor, and the table a part of each row
        weight = self.weight if isinstance(x, DTensor) else local(self.weight)
        rows = self._rows(weight, x.shape[1], places)
        return _dropout(x + rows, self.dropout if self.training else 0.0)

    def _rows(self, weight: Tensor, length: int, places: Tensor | None) -> Tensor:
        """Returns the rows of this rank's `length` tokens."""
        rank, ranks = (self.context.rank, self.context.ranks) if self.context else (0, 1)
        if places is not None:
            own = part_of(places, rank, ranks, dim=1) if ranks > 1 else places
            return functional.embedding(own, weight)
        if ranks == 1:
            return weight[:length]
        return part_of(weight[: ranks * length], rank, ranks, dim=0)


def _dropout(x: Tensor, probability: float) -> Tensor:
    """Drops out this rank's part of `x`; tensor-parallel ranks draw the same mask."""
    if not probability:
        return x
    if not isinstance(x, DTensor):
        return functional.dropout(x, probability)
    dropped = functional.dropout(x.to_local(), probability)
    return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False)


Halves = tuple[Tensor, Tensor]  # of gate and up, or of their gradients


class _Gated(torch.autograd.Function):
    """A function of gate and up, which saves only its input, as fused kernels do.

    Autograd would also save the activated gate.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ahead: Callable[[Tensor, Tensor], Tensor],
        back: Callable[[Tensor, Tensor, Tensor], Halves],
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.back = back
        return ahead(*_halves(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.stack(ctx.back(gradient, *_halves(x)), dim=-1).flatten(-2), None, None


def _halves(x: Tensor) -> Halves:
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


def _silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _silu_gate_back(gradient: Tensor, gate: Tensor, up: Tensor) -> Halves:
    sigmoid = gate.sigmoid()
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return gradient * up * slope, gradient * gate * sigmoid


def _gelu_gate(approximate: str, gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate=approximate) * up


def _gelu_gate_back(approximate: str, gradient: Tensor, gate: Tensor, up: Tensor) -> Halves:
    by_gate = aten.gelu_backward(gradient * up, gate, approximate=approximate)
    return by_gate, gradient * functional.gelu(gate, approximate=approximate)


# gpt-oss, arXiv 2508.10925: bounds of gate and up, and the factor inside the sigmoid, which is
# also that of the quick gelu
GATE_BOUND = 7.0
GATE_SLOPE = 1.702


def _bounded_gate(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=GATE_BOUND)
    return (up.clamp(-GATE_BOUND, GATE_BOUND) + 1) * (gate * (GATE_SLOPE * gate).sigmoid())


def _bounded_gate_back(gradient: Tensor, gate: Tensor, up: Tensor) -> Halves:
    bounded = gate.clamp(max=GATE_BOUND)
    sigmoid = (GATE_SLOPE * bounded).sigmoid()
    slope = sigmoid * (1 + GATE_SLOPE * bounded * (1 - sigmoid))
    by_gate = gradient * (up.clamp(-GATE_BOUND, GATE_BOUND) + 1) * slope
    inside = up.abs() <= GATE_BOUND
    return by_gate * (gate <= GATE_BOUND), gradient * bounded * sigmoid * inside


_GATED = {
    Activations.SILU: (_silu_gate, _silu_gate_back),
    Activations.GELU: (partial(_gelu_gate, "none"), partial(_gelu_gate_back, "none")),
    Activations.GELU_TANH: (partial(_gelu_gate, "tanh"), partial(_gelu_gate_back, "tanh")),
    Activations.BOUNDED_SILU: (_bounded_gate, _bounded_gate_back),
}


class _QuickGelu(torch.autograd.Function):
    """x sigmoid(1.702 x), which saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * (GATE_SLOPE * x).sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = (GATE_SLOPE * x).sigmoid()
        return gradient * sigmoid * (1 + GATE_SLOPE * x * (1 - sigmoid))


PLAIN_ACTIVATIONS: dict[Activations, Callable[[Tensor], Tensor]] = {
    Activations.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activations.GELU: functional.gelu,
    Activations.QUICK_GELU: lambda x: _QuickGelu.apply(x),
    Activations.RELU: functional.relu,
    Activations.RELU_SQUARED: lambda x: functional.relu(x).square(),
    Activations.SILU: functional.silu,
}


class Activation(nn.Module):
    """The activation of a feed-forward network.

    A gated one multiplies it with the other half (Shazeer 2020, arXiv 2002.05202).
    """

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gated = model.gated_ffn
        default = Activations.SILU if model.gated_ffn else Activations.GELU_TANH
        self.function = model.functions.activation or default

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return PLAIN_ACTIVATIONS[self.function](x)
        return _Gated.apply(x, *_GATED[self.function])


class Residual(nn.Module):
    """Adds the (dropped-out) outputs of sublayers to the residual stream."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.factor = model.functions.residual_factor

    def forward(self, x: Tensor, *branches: Tensor) -> Tensor:
        for branch in branches:
            dropped = functional.dropout(branch, self.dropout, self.training)
            x = torch.add(x, dropped, alpha=self.factor)
        return x


class Gated(nn.Module):
    """Multiplies features by a sigmoid, one number a token (the shared expert of Qwen2-MoE)."""

    on_shards = True

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class Sum(nn.Module):
    """Adds the outputs of the experts and of the network beside them."""

    on_shards = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def operator_module(layer: nn.Module, name: str) -> nn.Module | None:
    """Returns the module of an operator of the layer, its mixture or the experts, None if none.

    The name of an operator of multi-token prediction begins with that of its module.
    """
    inside, _, rest = name.partition(".")
    if rest:
        return operator_module(layer.get_submodule(inside), rest)
    mixture = getattr(layer, "mixture", None)
    for holder in (layer, mixture, getattr(mixture, "experts", None)):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


class Joined(nn.Module):
    """Lays the features of two tensors side by side."""

    on_shards = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=-1)


class SoftCap(nn.Module):
    """Bounds logits: c tanh(x / c)."""

    on_shards = True

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        return self.bound * (x / self.bound).tanh()
