"""A mixture of experts: router, dispatch, experts, combination (Mixtral, arXiv 2401.04088).

A token goes to `experts_per_token` experts, and none is dropped: a rank multiplies all rows that
arrive, so the exchanged parts are as uneven as the routing. Rows are ordered by expert and by rank
of origin (executor/models/expert_exchange.py), so every run adds in the same order.

The matrices of the experts lie one under the other in a parameter of [experts * hidden, width], in
both products: ranks divide it by rows where they hold whole experts, and by columns where they hold
parts of each. Biases lie side by side, [features, experts]. Left out: a load-balancing loss, a
limit of tokens for an expert, groups of experts and corrections of the balance, which change the
choice alone (DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from parplan.executor.models.adapters import SCALE, A, B
from parplan.executor.models.expert_exchange import (
    ETP,
    ExpertRanks,
    Routes,
    by_expert,
    by_origin,
    count_rows,
    exchanged,
    on_own_rows,
    returned,
)
from parplan.executor.tensors import local
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.models.functions import RouterScores
from parplan.profiles.models.spec import ModelSpec

NONE: Mapping[str, int] = MappingProxyType({})
BIASES = "biases"  # an attribute of parameters that are several vectors
Remember = Callable[..., None]  # of tensors, how to make them, and what from


class Grouped(nn.Module):
    """Multiplies rows, which are sorted by expert, with the matrix of their expert.

    widens    whether it maps the hidden features to the experts' width, or back
    summands  number of ranks that add up their results
    has_width whether it reads or gives the experts' width, which ranks may divide
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        width: int,
        *,
        widens: bool,
        bias: bool,
        summands: int,
        has_width: bool = True,
    ) -> None:
        super().__init__()
        self.has_width = has_width
        self.num_experts = num_experts
        self.widens = widens
        self.summands = summands
        self.weight = nn.Parameter(torch.empty(num_experts * hidden, width))
        features = width if widens else hidden
        self.bias = nn.Parameter(torch.empty(features, num_experts)) if bias else None

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        matrices = local(self.weight).unflatten(0, (self.num_experts, -1)).unbind()
        parts = zip(rows.split(counts), matrices, self._biases(), strict=True)
        return torch.cat([self._product(*each) for each in parts])

    def _product(self, rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, matrix.t() if self.widens else matrix, bias)

    def _biases(self) -> Sequence[Tensor | None]:
        """Returns the bias of each expert, of which ranks that add up results add a part each.

        The gradient is that of the whole: every such rank has the gradients of all rows.
        """
        if self.bias is None:
            return [None] * self.num_experts
        bias = local(self.bias)
        if self.summands > 1:
            bias = bias - (bias * (1 - 1 / self.summands)).detach()
        return bias.unbind(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """The rows of one pass over the ranks that divide experts."""

    routes: Routes
    ranks: ExpertRanks
    remember: Remember | None

    def gathered(self, arrived: Tensor) -> Tensor:
        """Returns rows by expert, which ranks with parts of it gather, in both passes."""
        rows = by_expert(arrived, self.routes, self.ranks)
        if self.remember is not None and self.ranks.degree(ETP) > 1:
            again = partial(by_expert, routes=self.routes, ranks=self.ranks)
            self.remember((rows,), lambda saved: (again(saved),), arrived, ahead=False)
        return rows

    def ended(self, rows: Tensor) -> Tensor:
        """Returns the sums of parts, of the rows that arrived at this rank."""
        return by_origin(rows, self.routes, self.ranks)

    def alone(self, product: nn.Module, rows: Tensor) -> Tensor:
        """Returns a product of the rows that arrived at this rank."""
        return on_own_rows(product, rows, self.routes, self.ranks)


class Experts(nn.Module):
    """The feed-forward networks of the experts on one rank; ZeRO shards them as a separate unit.

    held   the experts on this rank
    parts  number of ranks that divide the width of each
    adapters  ranks of the adapters of fc1 and fc2, where they have any
    """

    def __init__(
        self,
        model: ModelSpec,
        held: range,
        parts: int,
        activation: nn.Module,
        adapters: Mapping[str, int] = NONE,
    ) -> None:
        super().__init__()
        hidden = model.expert_latent_size or model.hidden_size
        width = model.expert_ffn_hidden_size // parts
        halves = 2 if model.gated_ffn else 1
        bias = model.expert_bias
        self.held = held
        self.fc1 = Grouped(len(held), hidden, width * halves, widens=True, bias=bias, summands=1)
        self.activation = activation
        self.fc2 = Grouped(len(held), hidden, width, widens=False, bias=bias, summands=parts)

        self.adapters = adapters
        for name, rank in adapters.items():
            self._add_adapter(name, rank)

    def _add_adapter(self, name: str, rank: int) -> None:
        """Adds the products of an adapter; one of them has no part of the experts' width."""
        base = self.get_submodule(name)
        hidden, width = base.weight.shape[0] // base.num_experts, base.weight.shape[1]
        plain = partial(Grouped, base.num_experts, bias=False, summands=1)
        if base.widens:
            first = plain(rank, hidden, widens=False, has_width=False)
            second = plain(rank, width, widens=True)
        else:
            first = plain(rank, width, widens=False)
            second = plain(hidden, rank, widens=False, has_width=False)
        self.add_module(name + A, first)
        self.add_module(name + B, second)

    def forward(self, rows: Tensor, counts: Sequence[int], across: Across | None = None) -> Tensor:
        """Returns the rows after their experts.

        rows     by expert; with `across` those that arrived at this rank, in their order
        counts   rows of each expert, on all ranks with parts of it
        across   the ranks with parts of experts that have adapters
        """
        if across is not None:
            return self._adapted(rows, counts, across)
        return self._product("fc2", self.activation(self._product("fc1", rows, counts)), counts)

    def _adapted(self, arrived: Tensor, counts: Sequence[int], across: Across) -> Tensor:
        """Returns the rows that arrived at this rank after experts that ranks divide.

        The product of an adapter without the width runs on the rows that arrived here: of the first
        before its small result is gathered, of the second behind the sum of the parts.
        """
        wide = self.fc1(across.gathered(arrived), counts)
        if "fc1" in self.adapters:
            small = across.gathered(across.alone(self.get_submodule(f"fc1{A}"), arrived))
            wide = torch.add(wide, self.get_submodule(f"fc1{B}")(small, counts), alpha=SCALE)
        active = self.activation(wide)
        out = across.ended(self.fc2(active, counts))
        if "fc2" in self.adapters:
            small = across.ended(self.get_submodule(f"fc2{A}")(active, counts))
            added = across.alone(self.get_submodule(f"fc2{B}"), small)
            out = torch.add(out, added, alpha=SCALE)
        return out

    def _product(self, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns a product with its adapter, if it has one."""
        out: Tensor = self.get_submodule(name)(rows, counts)
        if name not in self.adapters:
            return out
        small = self.get_submodule(name + A)(rows, counts)
        return torch.add(out, self.get_submodule(name + B)(small, counts), alpha=SCALE)


class MixtureOfExperts(nn.Module):
    """Maps [batch, sequence, hidden] to the same shape, on this rank's tokens.

    operators  the operators of the model graph that run here
    ranks      the ranks that share the experts; None where one rank holds them all whole
    remember   records how to gather the rows of ranks with parts of an expert, which the backward
               pass gathers again as any gathered input (executor/sharding/place.py)
    apart      whether the experts have copies on other ranks than the router, which add their
               gradients
    """

    on_shards = True
    ranks: ExpertRanks | None = None
    remember: Remember | None = None
    apart = False

    def __init__(
        self,
        model: ModelSpec,
        router: nn.Module,
        experts: Experts,
        operators: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.operators = operators
        self.num_experts = model.num_experts
        self.experts_per_token = model.experts_per_token
        self.functions = model.functions
        self.weighs_inputs = model.functions.router_scores is RouterScores.SIGMOID_INPUTS
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, compressed: Tensor | None = None) -> Tensor:
        """Returns the sum of a token's experts.

        compressed   what is sent to the experts in place of `x`, which the router reads
        """
        chosen, weights = self._choose(x.flatten(0, 1))
        x = x if compressed is None else compressed
        tokens = x.flatten(0, 1)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // self.experts_per_token]
        if self.weighs_inputs:
            rows = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        routes = count_rows(chosen, self.num_experts, self.ranks)
        rows = self._pass(rows, routes)
        by_token = rows[order.argsort()].unflatten(0, (-1, self.experts_per_token))
        if self.weighs_inputs:
            return by_token.sum(dim=1).view(x.shape)
        return torch.bmm(weights.to(by_token.dtype).unsqueeze(1), by_token).view(x.shape)

    def _pass(self, rows: Tensor, routes: Routes) -> Tensor:
        """Returns the rows, sorted by expert, after their experts on any rank."""
        ranks = self.ranks
        if ranks is None:
            return self.experts(rows, routes.counts)
        arrived = exchanged(rows, routes, ranks)
        across = Across(routes=routes, ranks=ranks, remember=self.remember)
        if self.experts.adapters and ranks.degree(ETP) > 1:
            return returned(self.experts(arrived, routes.counts, across), routes, ranks)
        rows = self.experts(across.gathered(arrived), routes.counts)
        return returned(by_origin(rows, routes, ranks), routes, ranks)

    def _choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token and their weights, both [tokens, experts per token].

        The best expert comes first.
        """
        logits = self.router(tokens).float()
        soft = self.functions.router_scores is RouterScores.SOFTMAX
        scores = logits.softmax(dim=-1) if soft else logits.sigmoid()
        weights, chosen = scores.topk(self.experts_per_token, dim=-1)
        if self.functions.router_normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        factor = self.functions.router_factor
        return chosen, weights if factor == 1.0 else weights * factor

    def placement(self, operators: Mapping[str, OperatorPlacement]) -> OperatorPlacement:
        """Returns the input placement of the router and the output placement of the combination.

        executor/rules/expert_rules.py has the placements of the operators between them.
        """
        first, last = operators["router"], operators["combine"]
        return OperatorPlacement(input=first.input, output=last.output)

    def sum_over_tensor_parallel(self) -> None:
        """Marks the weights whose gradients are this tensor-parallel rank's summands.

        They are whole and the tokens divided. Experts apart are not among them.
        """
        summed = (self.router,) if self.apart else (self.router, *grouped_of(self.experts))
        for module in summed:
            module.summed_over_tp = tuple(
                name for name, parameter in module.named_parameters() if parameter.requires_grad
            )


def divide_experts(layer: nn.Module, ranks: ExpertRanks) -> None:
    """Declares the experts of `layer` to be this rank's part of those on `ranks`."""
    for module in layer.modules():
        if isinstance(module, MixtureOfExperts):
            module.apart = True
            module.ranks = ranks if ranks.divides else None
    if ranks.divides:
        for module in grouped_of(layer):
            _divide(module, ranks)


def _divide(module: Grouped, ranks: ExpertRanks) -> None:
    divides = ranks.degree(ETP) > 1
    over_width: tuple[Placement, ...] = (Shard(1),) if divides else ()
    if divides and not module.has_width:
        over_width = (Replicate(),)
        module.summed_over_tp = ("weight",)  # each such rank has the gradients of its rows
    over = {"weight": (Shard(0), *over_width)}
    features = (Shard(0) if module.widens else Replicate(),)
    over["bias"] = (Shard(1), *(features if over_width else ()))
    for name, parameter in list(module.named_parameters()):
        divided = DTensor.from_local(parameter.data, ranks.parts, over[name], run_check=False)
        module.register_parameter(name, nn.Parameter(divided))


def experts_of(layer: nn.Module) -> tuple[Experts, ...]:
    """Returns the experts inside `layer`, without their routers."""
    return tuple(module for module in layer.modules() if isinstance(module, Experts))


def grouped_of(layer: nn.Module) -> tuple[Grouped, ...]:
    """Returns the products of experts inside `layer`."""
    return tuple(module for module in layer.modules() if isinstance(module, Grouped))


def mark_biases(layer: nn.Module) -> None:
    """Marks the biases of experts, once their parameters are those that the optimizer updates."""
    for module in grouped_of(layer):
        if module.bias is not None:
            setattr(module.bias, BIASES, True)
