"""A mixture of experts: router, tokens to the ranks of their experts, the experts, and back
(Mixtral, arXiv 2401.04088).

Each rank of an expert-parallel group holds as many experts, in rank order. A token goes to
`experts_per_token` of them, none is dropped, and however many arrive at a rank are multiplied
there: the parts that are exchanged are as uneven as the routing is. A copy of a token is its row in
the order of (expert, rank it came from, place there), so every run adds in the same order.

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
    """The product of rows, sorted by expert, with the matrix of each one's expert."""

    def __init__(self, num_experts: int, contracted: int, features: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts * features, contracted))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        matrices = local(self.weight).unflatten(0, (self.num_experts, -1)).unbind()
        return torch.cat(
            [
                functional.linear(own, matrix)
                for own, matrix in zip(rows.split(counts), matrices, strict=True)
            ]
        )


class Experts(nn.Module):
    """The feed-forward networks of the experts that a rank holds: a unit of its own for ZeRO."""

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
    """How many rows go to each rank of the group and come from it, the arrived ones' order by
    expert, and how many each has.
    """

    sent: list[int]
    received: list[int]
    by_expert: Tensor
    counts: list[int]


class MixtureOfExperts(nn.Module):
    """[batch, sequence, hidden] -> the same; computes on what a rank holds of it. `group`: who
    shares the experts, if not alone.

    operators: those of the graph that run here
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
            rows = self.experts(rows[exchange.by_expert], exchange.counts)[
                exchange.by_expert.argsort()
            ]
            rows = all_to_all_single_autograd(rows, exchange.sent, exchange.received, self.group)
        mine = rows[by_expert.argsort()].unflatten(0, (-1, self.experts_per_token))
        return torch.bmm(weights.to(mine.dtype).unsqueeze(1), mine).view(x.shape)

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, experts per token]: the experts of a token, best first, and their weights, which
        add up to one.
        """
        probabilities = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        return chosen, weights / weights.sum(dim=-1, keepdim=True)

    def _exchange(self, sizes: Tensor, group: dist.ProcessGroup) -> _Exchange:
        """What the ranks of `group` send each other when this one has `sizes` rows for every
        expert.
        """
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes, group=group)
        from_rank = arriving.view(group.size(), -1)  # [rank it comes from, expert of this rank]
        experts = torch.arange(from_rank.shape[1], device=sizes.device).repeat(group.size())
        return _Exchange(
            sent=sizes.view(group.size(), -1).sum(dim=1).tolist(),
            received=from_rank.sum(dim=1).tolist(),
            by_expert=experts.repeat_interleave(arriving).argsort(stable=True),
            counts=from_rank.sum(dim=0).tolist(),
        )

    def placement(self, operators: Mapping[str, OperatorPlacement]) -> OperatorPlacement:
        """From where it reads to where it leaves: all its operators are placed alike
        (executor/rules/expert_rules.py).
        """
        return OperatorPlacement(
            input=operators["router"].input, output=operators["combine"].output
        )

    def sum_over_tensor_parallel(self) -> None:
        """Its weights are whole and its tokens divided: the weights' gradients are this rank's
        summands.
        """
        for module in (self.router, self.experts.fc1, self.experts.fc2):
            module.summed_over_tp = ("weight",)


def held_experts(model: ModelSpec, ep_mesh: DeviceMesh | None) -> range:
    """The experts that this rank of `ep_mesh` holds; without a mesh all of them."""
    if ep_mesh is None:
        return range(model.num_experts)
    share = model.num_experts // ep_mesh.size()
    return range(share * ep_mesh.get_local_rank(), share * (ep_mesh.get_local_rank() + 1))


def divide_experts(layer: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Say that the experts of `layer` are one part of those that the ranks of `ep_mesh` hold
    together.
    """
    for module in layer.modules():
        if isinstance(module, MixtureOfExperts):
            module.group = ep_mesh.get_group()
        if isinstance(module, Grouped):
            module.weight = nn.Parameter(
                DTensor.from_local(module.weight.data, ep_mesh, (Shard(0),), run_check=False)
            )


def experts_of(layer: nn.Module) -> tuple[Experts, ...]:
    """The experts inside `layer`, without what chooses among them."""
    return tuple(module for module in layer.modules() if isinstance(module, Experts))
