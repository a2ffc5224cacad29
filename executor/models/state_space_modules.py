"""The state-space mixer of a block as modules: Mamba-2, Dao and Gu 2024, arXiv 2405.21060.

Features lie by groups of heads, so that a tensor-parallel shard holds whole groups. Those of the
first projection are, in each group: gate, input, both projections of the state, and the step sizes
of its heads. Operators save their inputs alone and make the rest again in the backward pass, as
the kernels of the paper's authors do; those run on GPUs alone, and torch has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.executor.models.operators import rms_norm
from parplan.executor.models.run_again import run_again
from parplan.executor.tensors import local
from parplan.profiles.models.blocks import StateSpace
from parplan.profiles.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Projected:
    """The parts of the first projection, each [batch, sequence, groups, features of the group]."""

    gate: Tensor
    mixed: Tensor
    steps: Tensor


def parts_of(x: Tensor, shape: StateSpace) -> Projected:
    """Cuts the output of the first projection, [batch, sequence, features of whole groups]."""
    sizes = [each // shape.num_groups for each in (shape.inner_size, shape.conv_size)]
    heads = shape.num_heads // shape.num_groups
    return Projected(*x.unflatten(-1, (-1, sum(sizes) + heads)).split((*sizes, heads), dim=-1))


class _Mixer(nn.Module):
    """An operator of the mixer, on the groups of this rank."""

    on_shards = True

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        assert model.state_space is not None, "the model has state-space blocks"
        self.shape = model.state_space


class Convolution(nn.Module):
    """The causal convolution of each channel over the tokens before it, and SiLU.

    mixed_of    returns the channels, a part of the first projection, by groups of heads
    """

    on_shards = True

    def __init__(
        self, channels: int, kernel: int, mixed_of: Callable[[Tensor], Tensor], *, bias: bool
    ) -> None:
        super().__init__()
        self.mixed_of = mixed_of
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, projected: Tensor) -> Tensor:
        bias = () if self.bias is None else (local(self.bias),)
        return run_again(self._run, projected, local(self.weight), *bias)

    def _run(self, projected: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.mixed_of(projected).flatten(2).transpose(1, 2)
        x = functional.pad(x, (weight.shape[1] - 1, 0))
        out = functional.conv1d(x, weight.unsqueeze(1), bias, groups=x.shape[1])
        return functional.silu(out).transpose(1, 2).contiguous()


def state_space_convolution(model: ModelSpec) -> Convolution:
    shape = model.state_space
    assert shape is not None, "the model has state-space blocks"
    return Convolution(
        shape.conv_size,
        shape.conv_kernel,
        lambda projected: parts_of(projected, shape).mixed,
        bias=shape.conv_bias,
    )


class StepSizes(_Mixer):
    """The step size of each head in fp32; it also holds the decay and the skip of each head."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        for name in ("dt_bias", "A_log", "D"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.shape.num_heads)))

    def forward(self, projected: Tensor) -> Tensor:
        return run_again(self._run, projected, local(self.dt_bias))

    def _run(self, projected: Tensor, bias: Tensor) -> Tensor:
        steps = parts_of(projected, self.shape).steps.flatten(2)
        return functional.softplus(steps.float() + bias.float())


class Scan(_Mixer):
    """The state space over the tokens of a sequence, in chunks (section 6 of the paper).

    With step sizes t of a head, a = -exp(A_log) t and inputs u = t x, all in fp32:

        y_i = sum over j <= i of exp(a_(j+1) + .. + a_i) (C_i . B_j) u_j + D x_i

    Tokens of one chunk read each other; those before it are in a state that it begins with.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.of_heads: tuple[StepSizes, ...] = ()  # the module with the decay and the skip

    def forward(self, mixed: Tensor, steps: Tensor) -> Tensor:
        (held,) = self.of_heads
        return run_again(self._run, mixed, steps, local(held.A_log), local(held.D))

    def _run(self, mixed: Tensor, steps: Tensor, decay: Tensor, skip: Tensor) -> Tensor:
        shape = self.shape
        inner, state = shape.inner_size // shape.num_groups, shape.state_size
        groups = mixed.float().unflatten(-1, (-1, inner + 2 * state))
        x, keys, queries = groups.split((inner, state, state), dim=-1)
        x = x.unflatten(-1, (-1, shape.head_dim))
        steps = steps.unflatten(-1, (x.shape[2], -1))
        falls = -steps * decay.float().exp().unflatten(0, (x.shape[2], -1))
        out = scan(x * steps.unsqueeze(-1), falls, keys, queries, shape.chunk_size)
        out = out + skip.float().unflatten(0, (x.shape[2], -1)).unsqueeze(-1) * x
        return out.flatten(2).to(mixed.dtype)


def scan(u: Tensor, falls: Tensor, keys: Tensor, queries: Tensor, chunk: int) -> Tensor:
    """Returns the outputs of a state space, in chunks of tokens.

    u               inputs, [batch, sequence, groups, heads of a group, head_dim]
    falls           logarithms of the decay, [batch, sequence, groups, heads of a group]
    keys, queries   projections to and from the state, [batch, sequence, groups, state size]
    """
    length = u.shape[1]
    u, falls, keys, queries = in_chunks((u, falls, keys, queries), chunk)
    sums, weights = decays(falls)
    scores = torch.einsum("bcign,bcjgn->bcijg", queries, keys)
    inside = torch.einsum("bcijg,bcijgh,bcjghp->bcighp", scores, weights, u)
    left = (sums[:, :, -1:] - sums).exp()
    added = torch.einsum("bcjgn,bcjgh,bcjghp->bcghpn", keys, left, u)
    before = _states_before(added, sums[:, :, -1].exp())
    read = torch.einsum("bcign,bcghpn,bcigh->bcighp", queries, before, sums.exp())
    return (inside + read).flatten(1, 2)[:, :length]


def in_chunks(tensors: Sequence[Tensor], chunk: int) -> list[Tensor]:
    """Cuts the tokens, dim 1, into chunks: [batch, chunks, tokens of one, ..].

    Tokens of zeros behind the end fill up the last one, and change nothing before them.
    """
    length = tensors[0].shape[1]
    chunk = min(chunk, length)
    return [
        functional.pad(each, (0, 0) * (each.ndim - 2) + (0, -length % chunk)).unflatten(
            1, (-1, chunk)
        )
        for each in tensors
    ]


def decays(falls: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithms of the decay since the begin of a chunk, and the decay between tokens.

    falls   of each token, [batch, chunks, tokens, ..]

    The second is [batch, chunks, i, j, ..], of what token j <= i left there; 0 for other tokens.
    """
    sums = falls.cumsum(dim=2)
    places = torch.arange(falls.shape[2], device=falls.device)
    between = sums.unsqueeze(3) - sums.unsqueeze(2)
    unread = (places[:, None] < places).view(len(places), -1, *(1,) * (falls.ndim - 3))
    return sums, between.masked_fill(unread, float("-inf")).exp()


def _states_before(added: Tensor, kept: Tensor) -> Tensor:
    """Returns the state before each chunk.

    added   what each chunk adds, [batch, chunks, groups, heads, head_dim, state size]
    kept    the factor of the state before it, [batch, chunks, groups, heads]
    """
    state = torch.zeros_like(added[:, 0])
    states = []
    for each, factor in zip(added.unbind(1), kept.unbind(1), strict=True):
        states.append(state)
        state = state * factor[..., None, None] + each
    return torch.stack(states, dim=1)


class GatedNorm(_Mixer):
    """The norm of each group's features, after their gate."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__(model)
        self.weight = nn.Parameter(torch.empty(self.shape.inner_size))
        self.epsilon = model.norm_epsilon

    def forward(self, scanned: Tensor, projected: Tensor) -> Tensor:
        return run_again(self._run, scanned, projected, local(self.weight))

    def _run(self, scanned: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
        gate = parts_of(projected, self.shape).gate
        x = scanned.unflatten(-1, gate.shape[2:]).float() * functional.silu(gate.float())
        normed = rms_norm(x, None, self.epsilon).flatten(2)
        return (normed * weight.float()).to(scanned.dtype)
