"""Parameters that several stages hold: a copy on each, and one gradient, the sum over the
copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from parplan.executor.sharding.zero_units import all_reduce
from parplan.executor.tensors import local
from parplan.executor.traced.program_cut import StageCut
from parplan.executor.traced.traced_stages import TracedStage
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """By name, this rank's copies of parameters that the same pipeline ranks hold, and the group of
    those; None where it is one rank.
    """

    copies: Mapping[str, tuple[nn.Parameter, ...]]
    group: dist.ProcessGroup | None

    def sum_gradients(self) -> None:
        """Give every copy the sum of the gradients of all."""
        own = [[_gradient(parameter) for parameter in copies] for copies in self.copies.values()]
        for first, *others in own:
            for other in others:
                first.add_(other)
        if self.group is not None:
            all_reduce([each[0] for each in own], self.group)
        for first, *others in own:
            for other in others:
                other.copy_(first)


def shared_names(cuts: Sequence[StageCut]) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages hold, with those stages."""
    found: dict[str, list[int]] = {}
    for index, cut in enumerate(cuts):
        for name in cut.parameters:
            found.setdefault(name, []).append(index)
    return {name: tuple(stages) for name, stages in found.items() if len(stages) > 1}


def check_shared(plan: TracedPlan, cuts: Sequence[StageCut]) -> None:
    """Raises ConfigError where the copies of a parameter would be held in different shards."""
    for name, stages in shared_names(cuts).items():
        zeros = sorted({min(plan.stages[k].zero, 1) for k in stages})
        if plan.mesh.dp > 1 and len(zeros) > 1:
            raise ConfigError(
                f"stages: {name} is held by stages {', '.join(map(str, stages))}, some with zero 0 and some with more",
                hint="use one zero for the stages that share a parameter",
            )


def build_shared(
    plan: TracedPlan, cuts: Sequence[StageCut], stages: Sequence[TracedStage]
) -> tuple[Shared, ...]:
    """What this rank shares; collective."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, owners in shared_names(cuts).items():
        by_ranks.setdefault(tuple(sorted({plan.stages[k].rank for k in owners})), []).append(name)
    here = [dict(stage.named()) for stage in stages]
    found = []
    for ranks, names in by_ranks.items():
        group = _group(plan, ranks) if len(ranks) > 1 else None
        copies = {name: tuple(named[name] for named in here if name in named) for name in names}
        if all(copies.values()):
            found.append(Shared(copies=copies, group=group))
    return tuple(found)


def _group(plan: TracedPlan, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of this rank among those of all data-parallel coordinates: every rank makes every
    group.
    """
    own = None
    for place in range(plan.mesh.ranks_per_stage):
        members = [pp * plan.mesh.ranks_per_stage + place for pp in ranks]
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    return own


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
