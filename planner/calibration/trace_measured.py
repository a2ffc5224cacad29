"""Traces of a run's ranks beside its plan become measured parts of its step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import rank_time
from parplan.costmodels.strategy import Strategy
from parplan.planner.calibration.group_causes import DATA, TENSOR, cause_of
from parplan.planner.calibration.measured_run import MeasuredRun, in_proportion, plain_prices
from parplan.planner.calibration.priced_classes import priced_classes_s
from parplan.planner.calibration.step_account import UNTOLD, StepAccount, account_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.runs.timelines import Key
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.user_profile import digest
from parplan.profiles.traces.trace_record import Phase, RankTrace, WorkClass

# Parts of less of the step are not compared: kernels and waits of a step vary by as much.
LEAST_SHARE = 0.005
PASSES = (Phase.FORWARD.value, Phase.BACKWARD.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraces:
    """The run that traces measured, and the accounts of all its steps and ranks.

    priced_s   the plan's busy seconds of the same ranks by class of kernels
    """

    run: MeasuredRun
    num_ranks: int
    accounts: tuple[StepAccount, ...]
    priced_s: Mapping[WorkClass, float]


def measured_by_traces(traces: Sequence[RankTrace], plan: Plan) -> MeasuredTraces:
    """Returns the measurements of the traced steps of `plan`.

    The parts are those of the median step of each rank, and their means over the ranks of a stage.
    Raises ConfigError: a trace of another number of ranks, or of no known rank in a pipeline.
    """
    every: list[StepAccount] = []
    typical: defaultdict[int, list[StepAccount]] = defaultdict(list)
    for trace in traces:
        accounts = [account_of(step, partial(cause_of, mesh=plan.mesh)) for step in trace.steps]
        every += accounts
        by_time = sorted(accounts, key=lambda account: account.step_s)
        typical[_pipeline_rank(trace, plan)].append(by_time[(len(by_time) - 1) // 2])
    step_s = fmean(account.step_s for of_stage in typical.values() for account in of_stage)
    first = traces[0]
    fingerprint = first.fingerprint
    if len(traces) > 1:
        fingerprint = digest(" ".join(sorted(trace.fingerprint for trace in traces)))
    run = MeasuredRun(
        name=first.file,
        fingerprint=fingerprint,
        source=f"{first.tool} trace {fingerprint} of {first.date}",
        date=first.date,
        device=first.device,
        plan=plan,
        step_s=step_s,
        parts=_parts(typical, plan, LEAST_SHARE * step_s),
        priced_parts=traced_parts_s,
    )
    return MeasuredTraces(
        run=run,
        num_ranks=len(traces),
        accounts=tuple(every),
        priced_s=_priced_classes(typical, plan),
    )


def traced_parts_s(strategy: Strategy, price_cache: PriceCache) -> dict[Key, float]:
    """Returns the priced seconds of the parts that a trace tells apart, by pipeline rank.

    A recompute is part of the backward pass. Transfers between stages are left out: in a trace
    their kernels also wait for the other stage.
    """
    seconds: dict[Key, float] = {}
    for rank in range(strategy.layout.mesh.pp):
        time = rank_time(strategy, rank, price_cache)
        seconds[Phase.FORWARD.value, rank] = time.forward.value_s
        seconds[Phase.BACKWARD.value, rank] = time.backward.value_s + time.recompute.value_s
        seconds[Phase.OPTIMIZER.value, rank] = time.optimizer.value_s
        seconds[TENSOR, rank] = time.tp_comm.value_s
        seconds[DATA, rank] = time.dp_comm.value_s
    return seconds


def _parts(
    accounts: Mapping[int, Sequence[StepAccount]], plan: Plan, least_s: float
) -> dict[Key, float]:
    """Returns the means over the ranks of a stage."""
    parts: dict[Key, float] = {}
    for pp, of_rank in accounts.items():
        for cause in {cause for account in of_rank for cause in account.by_cause}:
            seconds = fmean(account.by_cause[cause] for account in of_rank)
            if seconds >= least_s:
                parts[cause, pp] = seconds
    if any(cause == UNTOLD for cause, _ in parts):
        _divide_passes(parts, plan)
    return parts


def _priced_classes(ranks: Collection[int], plan: Plan) -> dict[WorkClass, float]:
    """Returns the means over pipeline ranks, without a calibration of the plan."""
    price_cache = plain_prices(plan)
    strategy = strategy_of(plan, price_cache)
    each = [priced_classes_s(strategy, rank, price_cache) for rank in ranks]
    kinds = {kind for one in each for kind in one}
    return {kind: fmean(one.get(kind, 0.0) for one in each) for kind in kinds}


def _divide_passes(parts: dict[Key, float], plan: Plan) -> None:
    """Divides time of passes that the trace does not tell apart in the proportion of the prices.

    Both passes then get the same factor.
    """
    price_cache = plain_prices(plan)
    prices = traced_parts_s(strategy_of(plan, price_cache), price_cache)
    for _, pp in [key for key in parts if key[0] == UNTOLD]:
        priced_s = {(name, pp): prices[name, pp] for name in PASSES}
        for key, share_s in in_proportion(parts.pop((UNTOLD, pp)), priced_s).items():
            parts[key] = parts.get(key, 0.0) + share_s


def _pipeline_rank(trace: RankTrace, plan: Plan) -> int:
    mesh = plan.mesh
    if trace.world_size not in (None, mesh.num_ranks):
        raise ConfigError(
            f"{trace.file}: it is of a run of {trace.world_size} ranks, the plan has "
            f"{mesh.num_ranks} ({mesh})",
            hint="give the plan of that run: plan estimate .. -o plan.yaml writes it",
        )
    if mesh.pp == 1:
        return 0
    if trace.rank is None or not 0 <= trace.rank < mesh.num_ranks:
        raise ConfigError(
            f"{trace.file}: distributedInfo.rank is {trace.rank}, the stage of a pipeline of "
            f"{mesh.pp} is not known without the rank",
            hint="record after torch.distributed.init_process_group",
        )
    return mesh.coordinates(trace.rank)[0]
