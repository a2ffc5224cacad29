"""A plan of a described model beside the plans of other systems, with equal prices.

The row `megatron` is Megatron-LM's best plan, found by the search of `--for megatron`, so that it
lacks no argument that a plan for Megatron-LM may have. Where the stack of the plan is another
program's, all systems are priced as that stack runs; Megatron-LM keeps the choices and the switches
of its own. A training that its arguments do not say, such as that of a tower, has the row of
planner/baselines/systems.py, whose strategies have no switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from parplan.planner.baselines.optimum import Optimum
from parplan.planner.baselines.systems import Baseline, price_baseline
from parplan.planner.export.best_settings import best_settings
from parplan.planner.export.exported import nearest
from parplan.planner.export.fields.arguments import written
from parplan.planner.export.fields.configured import Priced
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.export.megatron.megatron_arguments import (
    BATCH,
    NEEDED,
    PARALLEL,
    RECOMPUTE,
    SHARDING,
)
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Prefer
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Request, SearchOptions
from parplan.planner.search.comparison import (
    OURS,
    Comparison,
    ComparisonRow,
    row,
    side,
    side_by_side,
)
from parplan.planner.search.equal_baselines import equal_baseline, equal_requests
from parplan.planner.search.what_if import request_of_plan
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.models.spec import TrainingSpec

BEST = "megatron"
_WHAT = (
    "Megatron-LM at its fastest: all that its arguments say, as plan --for megatron searches it, "
    "with every switch that hides or saves communication, counted by layout"
)
_ARGUMENTS = (*PARALLEL, *SHARDING, *RECOMPUTE, *BATCH, *NEEDED)
# facts of a stack that say what a program may be asked for, not how fast it runs
_CHOICES = (
    "schedules",
    "recompute",
    "mesh_orders",
    "context_forms",
    "context_alone",
    "divides_experts",
    "tower_divisions",
    "divided_ends",
    "tp_overlap",
    "weights_over_data",
    "tensor_grid",
)


def compare(plan: Plan, names: Iterable[str], options: SearchOptions | None = None) -> Comparison:
    """Compares `plan`, priced again, with the baselines `names` within the limit of `options`.

    A plan over unequal pools stands beside plans of equal nodes too, and systems count each of its
    GPUs as the slowest (planner/search/equal_baselines.py). Raises ConfigError for a plan without a
    price (planner/plan/reprice.py). `names`: a selection of `baselines.systems.baseline_names`.
    """
    options = options or SearchOptions()
    ours = reprice(plan)
    request = replace(request_of_plan(plan), options=options)
    equal = equal_requests(request)
    # No baseline has the token table on the host, and not every mesh of theirs could.
    price_cache = ours.price_cache.with_table(on_host=False)
    if isinstance(plan.cluster, UnequalCluster):  # systems without pools count on the slowest
        request = replace(request, cluster=plan.cluster.as_slowest)
        price_cache = price_cache.on(machine_for(request.cluster))
    limit = limit_bytes(plan.cluster, plan.training.stack, options)

    def row_of(name: str) -> ComparisonRow:
        if name in equal:
            return _equal_row(name, equal[name])
        best = best_megatron(request) if name == BEST else None
        if best is not None:
            return best
        baseline = price_baseline(name, price_cache, limit, options.deadline)
        return row(baseline, partial(assemble, price_cache=price_cache))

    mine = side(OURS, ours.plan, ours.strategy, ours.price)
    return side_by_side(plan, mine, (*equal, *names), row_of, options)


def _equal_row(name: str, request: Request) -> ComparisonRow:
    baseline, found = equal_baseline(name, request)
    if found is None:
        return ComparisonRow(baseline=baseline, side=None)
    compared = side(name, found.plan, found.strategy, found.price)
    return ComparisonRow(baseline=baseline, side=compared)


def best_megatron(request: Request) -> ComparisonRow | None:
    """Returns the row of Megatron-LM's best plan at the prices of a request.

    None where its arguments do not say the training, or nothing fits. Raises OutOfTimeError, also
    where the search has a plan, but no proof that it is the best.
    """
    training = _with_its_choices(request.training)
    target = replace(MEGATRON, stacks=(training.stack.name,))
    options = replace(request.options, prefer=Prefer.FASTEST, robust=None, on_program=None)
    try:
        plan = best_settings(replace(request, training=training, options=options), target)
    except (ConfigError, InfeasibleError):
        return None
    if plan.search.status is not Status.OPTIMAL:
        raise OutOfTimeError("the time was over before the best plan of Megatron-LM was known")
    today, counts = reprice(plan), plan.search.candidates
    own = Priced(today.strategy, today.price_cache, today.price)
    sheet, _ = nearest(plan, own, target)
    baseline = Baseline(
        name=BEST,
        what=_WHAT,
        candidates=counts.considered,
        optimum=Optimum(today.strategy, today.price, counts.solved),
        arguments=tuple(written(_ARGUMENTS, sheet.settings)),
    )
    compared = side(BEST, today.plan, today.strategy, today.price)
    return ComparisonRow(baseline=baseline, side=compared)


def _with_its_choices(training: TrainingSpec) -> TrainingSpec:
    """Returns a training on a stack that runs as before, with the choices of Megatron-LM."""
    stack = training.stack
    if stack.name in MEGATRON.stacks:
        return training
    own = load_stack(MEGATRON.stacks[0])
    stack = replace(stack, **{name: getattr(own, name) for name in _CHOICES})
    return replace(training, stack=stack, overlap_grad_reduce=own.overlap_grad_reduce)
