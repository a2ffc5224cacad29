"""Parameters that several stages hold as copies, whose gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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
class SharedParameters:
    """This rank's copies, by name, of parameters that the same pipeline ranks hold.

    `group` holds those ranks; it is None where all copies are on one rank.
    """

    copies: Mapping[str, tuple[nn.Parameter, ...]]
    group: dist.ProcessGroup | None

    def sum_gradients(self) -> None:
        """Sets the gradient of every copy to the sum over all copies."""
        gradients = [
            [_gradient(parameter) for parameter in copies] for copies in self.copies.values()
        ]
        for first, *rest in gradients:
            for gradient in rest:
                first.add_(gradient)
        if self.group is not None:
            all_reduce([each[0] for each in gradients], self.group)
        for first, *rest in gradients:
            for gradient in rest:
                gradient.copy_(first)


def shared_names(cuts: Sequence[StageCut]) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages hold, with the indices of those stages."""
    holders: dict[str, list[int]] = {}
    for index, cut in enumerate(cuts):
        for name in cut.parameters:
            holders.setdefault(name, []).append(index)
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def check_shared(plan: TracedPlan, cuts: Sequence[StageCut]) -> None:
    """Raises ConfigError where the copies of a parameter would be sharded differently."""
    for name, stages in shared_names(cuts).items():
        zeros = sorted({min(plan.stages[k].zero, 1) for k in stages})
        if plan.mesh.dp > 1 and len(zeros) > 1:
            raise ConfigError(
                f"stages: {name} is held by stages {', '.join(map(str, stages))}, some with zero 0 "
                "and some with more",
                hint="use one zero for the stages that share a parameter",
            )


def build_shared(
    plan: TracedPlan, cuts: Sequence[StageCut], stages: Sequence[TracedStage]
) -> tuple[SharedParameters, ...]:
    """Builds this rank's shared parameters and their process groups; collective."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, owners in shared_names(cuts).items():
        by_ranks.setdefault(tuple(sorted({plan.stages[k].rank for k in owners})), []).append(name)
    here = [dict(stage.named()) for stage in stages]
    shared = []
    for ranks, names in by_ranks.items():
        group = _group(plan, ranks) if len(ranks) > 1 else None
        copies = {name: tuple(named[name] for named in here if name in named) for name in names}
        if all(copies.values()):
            shared.append(SharedParameters(copies=copies, group=group))
    return tuple(shared)


def _group(plan: TracedPlan, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Returns this rank's group; every rank creates the groups of all data-parallel coordinates."""
    here = None
    for dp, tp in product(range(plan.mesh.dp), range(plan.mesh.tp)):
        members = [plan.mesh.rank(pp, dp, tp) for pp in ranks]
        group = dist.new_group(members)
        here = group if dist.get_rank() in members else here
    return here


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
