"""The plans of a job whose pools divide the batch, one plan file for each pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from parplan.planner.plan.plan import BatchShare, Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL

# Optimizers whose update of an element depends on sums over its tensor.
SUMMING = (Optimizer.ADAFACTOR, Optimizer.MUON)


def plans_of_run(named: Sequence[tuple[str, AnyPlan]]) -> tuple[AnyPlan, ...]:
    """Returns the plans of a run: one plan, or those of pools that divide the batch.

    named   each plan with the name of its file
    Raises ConfigError where they are no job, or one plan is a part of one.
    """
    described = []
    for name, plan in named:
        if not isinstance(plan, TracedPlan):
            described.append((name, plan))
        elif len(named) > 1:
            raise ConfigError(
                f"{name}: it is the plan of a traced module, and pools train described models",
                hint="run it alone",
            )
        else:
            return (plan,)
    if len(described) > 1:
        return joined_plans(described)
    require_alone(*described[0])
    return (described[0][1],)


def joined_plans(named: Sequence[tuple[str, Plan]]) -> tuple[Plan, ...]:
    """Returns the plans of several pools with their places in the batch, in the order of pools.

    named   each plan with the name of its file
    Raises ConfigError where they are no job together, or a plan is of another place in the batch
    than it states.
    """
    ends = list(
        itertools.accumulate((plan.training.global_batch_size for _, plan in named), initial=0)
    )
    for problem in _obstacles(named):
        raise ConfigError(problem, hint="start a job with plans of one run of plan --pools data")
    placed = []
    for (name, plan), first in zip(named, ends, strict=False):
        share = BatchShare(first=first, of=ends[-1])
        if plan.batch_share not in (None, share):
            own = plan.training.global_batch_size
            raise ConfigError(
                f"{name}: it is planned for sequences {_range(plan.batch_share, own)}, and has "
                f"{_range(share, own)} among the files given",
                hint="name the files of all pools, in the order of the pools",
            )
        placed.append(replace(plan, batch_share=share))
    return tuple(placed)


def require_alone(name: str, plan: Plan) -> None:
    """Raises ConfigError for a plan whose sequences are those of one pool among several."""
    share, own = plan.batch_share, plan.training.global_batch_size
    if share is not None:
        raise ConfigError(
            f"{name}: it is planned for sequences {_range(share, own)}, which are those of one "
            "pool",
            hint="name the files of all pools, or delete batch_share to train on these alone",
        )


def _range(share: BatchShare, own: int) -> str:
    return f"{share.first} to {share.first + own - 1} of {share.of}"


def _obstacles(named: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """Yields the reasons why plans cannot run as the pools of one job."""
    first_name, first = named[0]
    for name, plan in named:
        if plan.chunks is not None:
            yield f"{name}: its states lie in chunks, whose gradients pools cannot add"
        if plan.module is not None:
            yield f"{name}: it trains a module, and pools train described models"
        if plan.model != first.model:
            yield f"{name}: its model {plan.model.name} is not that of {first_name}"
        if _common(plan.training) != _common(first.training):
            yield f"{name}: its training differs from that of {first_name}"
        if _state_bytes(plan.training) != _state_bytes(first.training):
            yield f"{name}: its masters or moments are of other types than those of {first_name}"
        if plan.training.optimizer is Optimizer.ADAM_8BIT and plan.mesh.tp != first.mesh.tp:
            yield (
                f"{name}: tp {plan.mesh.tp} rounds the moments of 8-bit Adam otherwise than tp "
                f"{first.mesh.tp} of {first_name}, and the pools' parameters would part"
            )
        if plan.training.optimizer in SUMMING and _rounds_parameters(plan.training):
            yield (
                f"{name}: {plan.training.optimizer} sums in another order on every mesh, and "
                f"parameters of {plan.training.precision} without masters would part"
            )


def _rounds_parameters(training: TrainingSpec) -> bool:
    return training.precision is not Precision.FP32 and not training.has_masters


def _state_bytes(training: TrainingSpec) -> tuple[float, float]:
    return training.stack.master_bytes, training.stack.moment_bytes


def _common(training: TrainingSpec) -> TrainingSpec:
    """Returns a training without the parts that pools have of their own."""
    return replace(training, global_batch_size=1, stack=NEUTRAL, overlap_grad_reduce=True)
