"""The gated delta rule of a block as modules: Yang et al. 2024, arXiv 2412.06464, section 3.

Features lie by heads of keys, so that a tensor-parallel shard holds whole ones with their heads of
values. Those of the first projection are, of each: query, key, values, and the gates of the output;
those of the second are the shares that tokens write and their decays. Operators save what their
priced kernels do, and make the rest again in the backward pass. The authors' kernels run on GPUs
alone, and torch has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.models.operators import rms_norm
from parplan.executor.models.run_again import run_again
from parplan.executor.models.state_space_modules import Convolution, decays, in_chunks
from parplan.executor.tensors import local
from parplan.profiles.models.blocks import DeltaRule
from parplan.profiles.models.parts.delta_rule import CHUNK
from parplan.profiles.models.spec import ModelSpec

EPSILON = 1e-6  # of the norm of queries and keys, as flash-linear-attention has it


def _shape(model: ModelSpec) -> DeltaRule:
    assert model.delta_rule is not None, "the model has blocks with a delta rule"
    return model.delta_rule


def _parts_of(projected: Tensor, shape: DeltaRule) -> tuple[Tensor, Tensor]:
    """Returns queries, keys and values, and the gates, of the output of the first projection."""
    sizes = [each // shape.key_heads for each in (shape.conv_size, shape.value_size)]
    mixed, gates = projected.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
    return mixed, gates


def delta_rule_convolution(model: ModelSpec) -> Convolution:
    shape = _shape(model)
    return Convolution(
        shape.conv_size,
        shape.conv_kernel,
        lambda projected: _parts_of(projected, shape)[0],
        bias=False,
    )


class DeltaSteps(nn.Module):
    """The share of its values that a token writes, and the logarithm of its decay, in fp32.

    With b and a of the second projection, and by head of values:

        share = sigmoid(b)        decay = -exp(A_log) softplus(a + dt_bias)
    """

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        shape = _shape(model)
        self.values_of_key = shape.value_heads // shape.key_heads
        for name in ("dt_bias", "A_log"):
            self.register_parameter(name, nn.Parameter(torch.empty(shape.value_heads)))

    def forward(self, gates: Tensor) -> Tensor:
        """Returns [batch, sequence, shares and decays by head of keys]."""
        by_key = gates.unflatten(-1, (-1, 2, self.values_of_key))
        by_head = (local(each).unflatten(0, (-1, self.values_of_key)) for each in self.parameters())
        out: Tensor = _Steps.apply(by_key, *by_head)
        return out.flatten(2)


class _Steps(torch.autograd.Function):
    """Shares and decays, of which the output alone is saved."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, bias: Tensor, decay: Tensor) -> Tensor:
        shares, steps = gates.float().unbind(-2)
        falls = -decay.float().exp() * functional.softplus(steps + bias.float())
        out = torch.stack((shares.sigmoid(), falls), dim=-2)
        ctx.save_for_backward(out, decay)
        ctx.types = gates.dtype, bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, decay = ctx.saved_tensors
        (shares, falls), (by_shares, by_falls) = out.unbind(-2), gradient.unbind(-2)
        rate = decay.float().exp()
        # the derivative of softplus is a sigmoid: 1 - exp(-softplus)
        by_steps = by_falls * rate * (falls / rate).expm1()
        by_gates = torch.stack((by_shares * shares * (1 - shares), by_steps), dim=-2)
        by_bias, by_decay = (each.sum((0, 1)) for each in (by_steps, by_falls * falls))
        gates, bias = ctx.types
        return by_gates.to(gates), by_bias.to(bias), by_decay.to(decay.dtype)


class DeltaScan(nn.Module):
    """The delta rule over the tokens of a sequence, in chunks, all in fp32."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.shape = _shape(model)

    def forward(self, mixed: Tensor, steps: Tensor) -> Tensor:
        return run_again(self._run, mixed, steps)

    def _run(self, mixed: Tensor, steps: Tensor) -> Tensor:
        shape = self.shape
        size, values = shape.key_head_dim, shape.value_size // shape.key_heads
        groups = mixed.float().unflatten(-1, (-1, 2 * size + values))
        query, key, value = groups.split((size, size, values), dim=-1)
        value = value.unflatten(-1, (-1, shape.value_head_dim))
        shares, falls = steps.unflatten(-1, (value.shape[2], 2, -1)).unbind(-2)
        out = delta_scan(_normed(query) * size**-0.5, _normed(key), value, shares, falls, CHUNK)
        return out.flatten(2).to(mixed.dtype)


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def delta_scan(
    query: Tensor, key: Tensor, value: Tensor, shares: Tensor, falls: Tensor, chunk: int
) -> Tensor:
    """Returns the outputs of a gated delta rule, in chunks of tokens.

    query, key      [batch, sequence, heads of keys, features]
    value           [batch, sequence, heads of keys, heads of values of each, features]
    shares, falls   what a token writes and the logarithm of its decay, like `value` by head

    A head has a matrix M of its key by its value features, and a token does

        M = exp(fall) M;    M = M + share k (v - k M);    y = q M

    The values that the tokens of a chunk write in place of theirs solve a triangular system
    (section 3.3): T w = share v - share exp(falls since its begin) k M, with M at its begin.
    """
    length = value.shape[1]
    query, key, value, shares, falls = in_chunks((query, key, value, shares, falls), chunk)
    sums, between = decays(falls)  # [batch, chunks, i, ..] and [batch, chunks, i, j, ..]
    overlaps = torch.einsum("bcign,bcjgn->bcijg", key, key).unsqueeze(-1)
    system = (shares.unsqueeze(3) * overlaps * between).permute(0, 1, 4, 5, 2, 3)
    read = torch.einsum("bcign,bcigh->bcghin", key, shares * sums.exp())
    written = (shares.unsqueeze(-1) * value).permute(0, 1, 3, 4, 2, 5)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((written, read), dim=-1), upper=False, unitriangular=True
    )
    written, read = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    scores = torch.einsum("bcign,bcjgn->bcijg", query, key).unsqueeze(-1) * between
    scores = scores.permute(0, 1, 4, 5, 2, 3)
    asked = torch.einsum("bcign,bcigh->bcghin", query, sums.exp())
    left = torch.einsum("bcign,bcigh->bcghni", key, (sums[:, :, -1:] - sums).exp())
    kept = sums[:, :, -1].exp()[..., None, None]
    state = written.new_zeros((*written[:, 0].shape[:-2], key.shape[-1], value.shape[-1]))
    outs = []
    for place in range(written.shape[1]):
        new = written[:, place] - read[:, place] @ state
        outs.append(asked[:, place] @ state + scores[:, place] @ new)
        state = kept[:, place] * state + left[:, place] @ new
    return torch.stack(outs, dim=1).permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :length]


class DeltaNorm(nn.Module):
    """The norm of each head of values, before its gate."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.shape = _shape(model)
        self.weight = nn.Parameter(torch.empty(self.shape.value_head_dim))
        self.epsilon = model.norm_epsilon

    def forward(self, scanned: Tensor, projected: Tensor) -> Tensor:
        return run_again(self._run, scanned, projected, local(self.weight))

    def _run(self, scanned: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
        by_head = scanned.float().unflatten(-1, (-1, self.shape.value_head_dim))
        gates = _parts_of(projected, self.shape)[1].flatten(2).view(by_head.shape).float()
        normed = rms_norm(by_head, None, self.epsilon) * weight.float()
        return (normed * functional.silu(gates)).flatten(2).to(scanned.dtype)
