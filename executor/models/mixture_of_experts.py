"""A mixture of experts: router, dispatch, experts, combination (Mixtral, arXiv 2401.04088).

Every rank of an expert-parallel group holds the same number of experts, in rank order. A token goes
to `experts_per_token` of them, and none is dropped: a rank multiplies all rows that arrive, so the
exchanged parts are as uneven as the routing. Rows are ordered by (expert, source rank, position
there), so every run adds in the same order.

The experts' matrices lie one under the other in a parameter of [experts * features, contracted];
over an expert-parallel mesh it is a DTensor divided by rows. Left out: a load-balancing loss, a
limit of tokens for an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from parplan.executor.rules.expert_rules import MIXTURE
from parplan.executor.tensors import local
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.models.spec import ModelSpec


class Grouped(nn.Module):
    """Multiplies rows, which are sorted by expert, with the matrix of their expert."""

    def __init__(self, num_experts: int, contracted: int, features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts * features, contracted))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        matrices = local(self.weight).unflatten(0, (self.num_experts, -1)).unbind()
        return torch.cat(
            [
                functional.linear(part, matrix)
                for part, matrix in zip(rows.split(counts), matrices, strict=True)
            ]
        )


class Experts(nn.Module):
    """The feed-forward networks of the experts on one rank; ZeRO shards them as a separate unit."""

    def __init__(self, model: ModelSpec, held: range, activation: nn.Module) -> None:
        super().__init__()
        hidden, width = model.hidden_size, model.expert_ffn_hidden_size
        self.held = held
        self.fc1 = Grouped(len(held), hidden, width * (2 if model.gated_ffn else 1))
        self.activation = activation
        self.fc2 = Grouped(len(held), width, hidden)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return self.fc2(self.activation(self.fc1(rows, counts)), counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """The rows that this rank exchanges with the ranks of its group.

    sent       rows for each rank
    received   rows from each rank
    by_expert  order of the received rows by expert
    counts     received rows of each expert
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor
    counts: list[int]


class MixtureOfExperts(nn.Module):
    """Maps [batch, sequence, hidden] to the same shape, on this rank's tokens.

    operators  the operators of the model graph that run here
    group      the ranks that share the experts; None where one rank holds them all
    """

    on_shards = True
    operators = MIXTURE
    group: dist.ProcessGroup | None = None

    def __init__(self, model: ModelSpec, router: nn.Module, experts: Experts) -> None:
        super().__init__()
        self.num_experts = model.num_experts
        self.experts_per_token = model.experts_per_token
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen, weights = self._choose(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        rows = tokens[by_expert // self.experts_per_token]
        sizes = chosen.flatten().bincount(minlength=self.num_experts)
        if self.group is None:
            rows = self.experts(rows, sizes.tolist())
        else:
            exchange = self._exchange(sizes, self.group)
            rows = all_to_all_single_autograd(rows, exchange.received, exchange.sent, self.group)
            rows = self.experts(rows[exchange.by_expert], exchange.counts)
            rows = rows[exchange.by_expert.argsort()]
            rows = all_to_all_single_autograd(rows, exchange.sent, exchange.received, self.group)
        by_token = rows[by_expert.argsort()].unflatten(0, (-1, self.experts_per_token))
        return torch.bmm(weights.to(by_token.dtype).unsqueeze(1), by_token).view(x.shape)

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token and their weights, both [tokens, experts per token].

        The best expert comes first; the weights of a token add up to one.
        """
        probabilities = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        return chosen, weights / weights.sum(dim=-1, keepdim=True)

    def _exchange(self, sizes: Tensor, group: dist.ProcessGroup) -> _Exchange:
        """Exchanges the rows per expert, `sizes`, with the ranks of `group`."""
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=group)
        from_rank = arriving.view(group.size(), -1)  # [source rank, expert of this rank]
        experts = torch.arange(from_rank.shape[1], device=sizes.device).repeat(group.size())
        return _Exchange(
            sent=sizes.view(group.size(), -1).sum(dim=1).tolist(),
            received=from_rank.sum(dim=1).tolist(),
            by_expert=experts.repeat_interleave(arriving).argsort(stable=True),
            counts=from_rank.sum(dim=0).tolist(),
        )

    def placement(self, operators: Mapping[str, OperatorPlacement]) -> OperatorPlacement:
        """Returns the input placement of the router and the output placement of the combination.

        All operators of a mixture are placed alike (executor/rules/expert_rules.py).
        """
        first, last = operators["router"], operators["combine"]
        return OperatorPlacement(input=first.input, output=last.output)

    def sum_over_tensor_parallel(self) -> None:
        """Marks the weights: their gradients are this rank's summands.

        The weights are whole and the tokens divided.
        """
        for module in (self.router, self.experts.fc1, self.experts.fc2):
            module.summed_over_tp = ("weight",)


def held_experts(model: ModelSpec, ep_mesh: DeviceMesh | None) -> range:
    """Returns the experts on this rank of `ep_mesh`, or all experts without a mesh."""
    if ep_mesh is None:
        return range(model.num_experts)
    share = model.num_experts // ep_mesh.size()
    first = share * ep_mesh.get_local_rank()
    return range(first, first + share)


def divide_experts(layer: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Declares the experts of `layer` to be this rank's part of those on `ep_mesh`."""
    for module in layer.modules():
        if isinstance(module, MixtureOfExperts):
            module.group = ep_mesh.get_group()
        if isinstance(module, Grouped):
            local_rows = module.weight.data
            divided = DTensor.from_local(local_rows, ep_mesh, (Shard(0),), run_check=False)
            module.weight = nn.Parameter(divided)


def experts_of(layer: nn.Module) -> tuple[Experts, ...]:
    """Returns the experts inside `layer`, without their routers."""
    return tuple(module for module in layer.modules() if isinstance(module, Experts))
