"""The predicted cost of a plan, and the result of its search.

Quantities are in the units that people read (GiB, seconds); the cost models use bytes. Every
predicted number states whether it was measured, interpolated or computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.usage.goodput import Failures
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.certificate_record import Certificate
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.profiles.provenance import Kind

_FORBID = {"extra": "forbid"}
MOST_BOUNDED = 100  # numbers of nodes that all get the bound of their candidates, 0.3 s each


class Status(StrEnum):
    """The proof of a plan.

    `optimal` is proven within the stated gap. `feasible` is the best plan when the time ran out or
    Ctrl-C came. `estimate` is a layout that was priced without a search.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A predicted number and its source."""

    __pydantic_config__ = _FORBID

    value: float
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The step time by cause, on the pipeline rank that takes longest; the parts add up to it.

    host_comm_s   copies between device and host that compute does not hide, and additions on the
                  host
    """

    __pydantic_config__ = _FORBID

    compute_s: Quantity
    recompute_s: Quantity
    tp_comm_s: Quantity
    dp_comm_s: Quantity
    pp_comm_s: Quantity
    pp_bubble_s: Quantity
    optimizer_s: Quantity
    host_comm_s: Quantity = Quantity(value=0.0, kind=Kind.ANALYTIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak GiB per device of one pipeline rank by class.

    capacity   memory of the device
    host       host memory that is held for the device
    """

    __pydantic_config__ = _FORBID

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    reserve: float
    total: float
    capacity: float
    host: float = 0.0
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWait:
    """One pipeline rank in the schedule of a step.

    idle_share   share of the step in which it waits for its turn in the schedule (the bubble) or
                 for a transfer
    in_flight    the most micro-batches between their forward pass and the end of their backward
                 pass at once, counted in each of its virtual stages
    """

    __pydantic_config__ = _FORBID

    stage: int
    idle_share: float
    in_flight: int


def mean_idle_share(waits: Sequence[StageWait]) -> float | None:
    """Returns the mean share of the step in which a pipeline rank waits; None without ranks."""
    return fmean(each.idle_share for each in waits) if waits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantGib:
    """GiB of one device beyond its share of one copy (EQUATIONS R1).

    Temporaries are a largest moment; the other classes add up.
    """

    __pydantic_config__ = _FORBID

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRedundancy:
    """One layer of a layer plan on a device, and its operators.

    stage   the first pipeline rank that runs it
    """

    __pydantic_config__ = _FORBID

    stage: int
    layer: RedundantGib
    operators: Mapping[str, RedundantGib]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """GiB held beyond one copy of everything, summed over the cluster (EQUATIONS R1).

    stages   one device of every pipeline rank
    layers   by layer plan, one device with its micro-batches in flight
    """

    __pydantic_config__ = _FORBID

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    total: float
    kind: Kind
    stages: tuple[RedundantGib, ...] = ()
    layers: Mapping[str, LayerRedundancy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The band around a prediction that held eight in ten of `rows` measurements.

    The fit of the prices did not use these measurements. The band is +- `share` of the prediction.

    stack   the stack of the measurements, `all` for those of every stack
    like    of them, the number with each trait of the plan; empty for the band of a stack
    """

    __pydantic_config__ = _FORBID

    share: float
    rows: int
    stack: str
    like: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """The error bands of a plan.

    time     of the step and of figures derived from it (tokens per second, MFU)
    memory   of the total of every stage
    """

    __pydantic_config__ = _FORBID

    time: Band
    memory: Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted cost of a plan.

    error_band   None where no measured step has what the plan has
    waits        by pipeline rank; empty in older files
    """

    __pydantic_config__ = _FORBID

    step_time_s: Quantity
    tokens_per_s_per_gpu: Quantity
    mfu: Quantity
    error_band: ErrorBand | None = None
    breakdown: Breakdown
    memory_gib: tuple[StageMemory, ...]
    redundancy_gib: Redundancy
    waits: tuple[StageWait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another candidate that was solved: the best plan of its mesh, schedule and micro-batch.

    inside_error_band   its step over the plan's (over the fastest plan's where another is
                        preferred) is within the error band of such ratios, so that the prices
                        cannot tell which of them is faster
    worst_loss          the largest share by which its step is longer than the best of such plans,
                        when compute or a bandwidth is 20 % off; None where that was not priced
    """

    __pydantic_config__ = _FORBID

    mesh: Mesh
    pipeline: PipelinePlan
    sequence_parallel: bool
    step_time_s: Quantity
    peak_memory_gib: float
    redundancy_gib: float
    inside_error_band: bool = False
    worst_loss: float | None = None
    weights_over_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The numbers of candidates of a search.

    pruned   are illegal, do not fit, or have a lower bound above the best
    left     were not solved when the search ended
    """

    __pydantic_config__ = _FORBID

    considered: int
    pruned: int
    solved: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A point on a front of step time, peak memory and redundant memory, and its search limit.

    number             from 1, fastest first, of `points`
    complete           whether the front was walked to its end
    memory_limit_gib   of the throughput objective, None for the fastest of all
    max_slowdown       of the memory objective, None for the least redundant of all
    """

    __pydantic_config__ = _FORBID

    number: int
    points: int
    complete: bool
    memory_limit_gib: float | None = None
    max_slowdown: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TieChoice:
    """The choice of the plan among those inside the error band of the fastest.

    prefer       the preference of the request
    reason       why this plan was chosen
    slowdown     share by which its step is longer than that of the fastest plan
    worst_loss   as that of a runner-up
    """

    __pydantic_config__ = _FORBID

    prefer: Prefer
    reason: str
    slowdown: float = 0.0
    worst_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """A machine of which one figure is off by a share (planner/plan/corners.py).

    what                `compute`, `inside_node` or `across_nodes` for a speed, `memory` for the
                        bytes of a device
    factor              its ratio to what was priced
    best_step_time_s    shortest step of the plans that fit there; None where none fits
    proven              a search of this corner ended, so that its best plan is among the plans
    """

    __pydantic_config__ = _FORBID

    what: str
    factor: float
    best_step_time_s: float | None
    proven: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustPlan:
    """A plan as it is priced, and in every corner.

    steps_s        step as it is priced, then in each corner; None where the plan does not fit
    worst_step_s   the longest of them
    speed_regret   worst regret where a speed is off, or nothing; None where the plan does not fit
    regret         worst regret of all corners; None where the plan does not fit and another does
    worst_corner   number of the corner with the worst regret, from 0; None as it is priced
    """

    __pydantic_config__ = _FORBID

    plan: RunnerUp
    steps_s: tuple[float | None, ...]
    worst_step_s: float
    speed_regret: float | None
    regret: float | None
    worst_corner: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """The worst case of plans when compute, links or memory are off by a share.

    The regret of a plan in a corner is the share by which its step is longer than the shortest of
    all plans that fit there.

    plans          the plan of the file first, then its runners-up and the best plan of each corner
    least_regret   number of the plan with the least worst regret, from 0; None where each does not
                   fit in some corner
    """

    __pydantic_config__ = _FORBID

    share: float
    corners: tuple[Corner, ...]
    plans: tuple[RobustPlan, ...]
    least_regret: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProof:
    """The proof of a plan's blocks by the integer program of a block.

    programs   number of programs solved, for every division of operators in the plan
    gap        largest share by which a layer with no more saved bytes and no larger workspace is
               faster; 0.0 where none is
    """

    __pydantic_config__ = _FORBID

    programs: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFirst:
    """The second half of a search that puts memory first: the fastest plan among the leanest.

    slack         share by which redundant memory may be above the least of all plans
    step_s        closed form of the plan, the fastest with so little redundant memory
    step_bound_s  no such plan is faster
    """

    __pydantic_config__ = _FORBID

    slack: float
    step_s: float
    step_bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareChoice:
    """The choice of the nodes that wait as spares, so that the run advances most (EQUATIONS D3).

    gpus              GPUs of all nodes, of those that wait too
    failures          failures as stated, with the number of spare nodes that was chosen
    goodput           share of the time in which the run advances
    goodput_without   the same where all nodes train and none waits
    advance_s         seconds of the cluster's time for one step of the run
    bound_s           no number of nodes takes less; of over 100 this rests on the work of one node
    gap               gap between both
    considered        numbers of nodes, each with a bound
    searched          numbers of nodes whose plans were searched
    finished          whether the search of the numbers ran to its end
    """

    __pydantic_config__ = _FORBID

    gpus: int
    failures: Failures
    goodput: float
    goodput_without: float
    advance_s: float
    bound_s: float
    gap: float
    considered: int
    searched: int
    finished: bool

    @property
    def is_proven(self) -> bool:
        """True if no bound rests on the work of one node."""
        return self.considered <= MOST_BOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """The result of a search under the closed-form price.

    value                 value of the objective (s or GiB)
    bound                 lower bound of the objective
    gap                   gap between both
    fastest_step_time_s   step of the fastest plan, the base of the slowdown in the objectives
                          memory and peak; in the others its closed form
    front                 the point of the plan on a front (planner/search/pareto.py), None for the
                          plan of a single search
    solver_failure        the number of candidates on which the solver failed, and its failure; None
                          without one
    memory_first          where memory comes first: value, bound and gap are those of the least
                          redundant plan of all, and the plan is the fastest with about as little
    stopped_by            the limit that ended the search before its proof, the memory cap; None
                          where it was the time limit, Ctrl-C or the solver, or none
    layers                the proof of the plan's blocks by their integer program, None where no
                          operator has a choice, or where it was not solved
    certificate           the integer programs of the search, None where none was asked for
    launcher              the launcher whose settings alone were searched, None for all plans
    preference            the choice among plans that are as fast within the error band; value,
                          bound and gap are those of the fastest. None for other objectives
    method                the search method that found the plan, which proves nothing; None for the
                          search of the planner
    robust                the worst cases of the plans, None where they were not asked for
    spares                the choice of the spare nodes, None where all GPUs of the request train
    """

    __pydantic_config__ = _FORBID

    objective: Objective
    status: Status
    value: float
    bound: float
    gap: float
    fastest_step_time_s: float
    candidates: Candidates
    front: FrontPoint | None = None
    solver_failure: str | None = None
    stopped_by: str | None = None
    layers: LayerProof | None = None
    certificate: Certificate | None = None
    memory_first: MemoryFirst | None = None
    launcher: str | None = None
    preference: TieChoice | None = None
    robust: Robustness | None = None
    spares: SpareChoice | None = None
    method: str | None = None
    runners_up: tuple[RunnerUp, ...] = ()

    @staticmethod
    def of_estimate(step_s: float, closed_form_s: float) -> SearchRecord:
        """Returns the record of one strategy that was priced without a search."""
        return SearchRecord(
            objective=Objective.THROUGHPUT,
            status=Status.ESTIMATE,
            value=round(step_s, 6),
            bound=0.0,
            gap=1.0,
            fastest_step_time_s=round(closed_form_s, 6),
            candidates=Candidates(considered=1, pruned=0, solved=1, left=0),
        )
