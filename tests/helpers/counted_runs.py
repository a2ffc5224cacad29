"""Bytes that the ranks of a plan send in a real step on gloo."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parplan.executor.checking.dry_run import _axes
from parplan.executor.checking.observed_rank import _NAMESPACES, Observed
from parplan.executor.checking.parity import OPTIONS
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan

NUMBERS = "alltoall_base_"  # of tokens, which ranks tell one another ahead of them


class Counted(Observed):
    """Counts the collectives of real tensors without the numbers of tokens, and no memory.

    told    exchanges of these numbers
    """

    told = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and name == NUMBERS:
            self.told += 1
        elif func.namespace in _NAMESPACES:
            self._count(name, args, out)
        return out


def balanced(mixture: MixtureOfExperts, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a choice with which every expert gets as many tokens of each rank."""
    number, of_token = mixture.num_experts, mixture.experts_per_token
    chosen = torch.arange(len(tokens) * of_token).view(-1, of_token) % number
    weights = mixture.router(tokens).float().softmax(dim=-1).gather(1, chosen)
    return chosen, weights / weights.sum(dim=-1, keepdim=True)


def sent_by_rank(plan: Plan) -> list[tuple[str, str, int, int]]:
    """Returns axis, kind, calls and bytes of what this rank sends in its second step.

    In the first the stages of a pipeline also tell one another the shapes of their tensors. Gloo
    must have run as many collectives, since DTensor can run some that no mode sees.
    """
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    trainer.gradients(0)
    with profile(activities=[ProfilerActivity.CPU]) as trace, Counted() as counted:
        counted.axes = _axes(trainer)
        trainer.gradients(1)
    ran = Counter(event.name for event in trace.events() if event.name.startswith("gloo:"))
    del ran["gloo:send"]  # a message counts on the rank that receives it
    calls = sum(each.calls for each in counted.sent())
    assert ran.total() == calls + counted.told, (ran, counted.sent())
    return [(each.axis, str(each.kind), each.calls, each.num_bytes) for each in counted.sent()]
