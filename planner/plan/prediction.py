"""What a plan should cost, and what its search proved of it.

Quantities here are in the units a person reads (GiB, seconds); the cost models keep bytes. Every
predicted number says whether it was measured, interpolated or computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.profiles.provenance import Kind

_FORBID = {"extra": "forbid"}


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    MEMORY = "memory"
    PEAK = "peak"


class Status(StrEnum):
    """`optimal`: proven within the stated gap. `feasible`: the best found when the time ran out or
    Ctrl-C came. `estimate`: priced by hand, nothing was searched.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A predicted number and where it comes from."""

    __pydantic_config__ = _FORBID

    value: float
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the step time goes, on the pipeline rank that takes longest; the parts add up to the
    step time.

    host_comm_s: copies between device and host that compute does not hide, and what the host adds
    up
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
    """Peak GiB per device of one pipeline rank by class; `capacity` is what the device has, `host`
    what its host holds for it.
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
class RedundantGib:
    """GiB of one device beyond its share of one copy (EQUATIONS R1); temporaries are a largest
    moment, the rest adds up.
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
    """One layer of a layer plan on a device of pipeline rank `stage`, the first that runs it, and
    its operators.
    """

    __pydantic_config__ = _FORBID

    stage: int
    layer: RedundantGib
    operators: Mapping[str, RedundantGib]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """GiB held beyond one copy of everything, summed over the cluster (EQUATIONS R1).

    stages: of one device of every pipeline rank; layers: by layer plan, of one device and its
    micro-batches in flight
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
    """Eight in ten of `rows` measurements, which the fit of the prices had not seen, were within +-
    `share` of their prediction.

    stack: whose measurements, `all` for those of every stack
    """

    __pydantic_config__ = _FORBID

    share: float
    rows: int
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """`time`: of the step and of what is derived from it (tokens per second, MFU). `memory`: of
    every stage's total.
    """

    __pydantic_config__ = _FORBID

    time: Band
    memory: Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan should cost. `error_band` is None where nothing was measured on the device."""

    __pydantic_config__ = _FORBID

    step_time_s: Quantity
    tokens_per_s_per_gpu: Quantity
    mfu: Quantity
    error_band: ErrorBand | None = None
    breakdown: Breakdown
    memory_gib: tuple[StageMemory, ...]
    redundancy_gib: Redundancy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another candidate that was solved: the best plan of that mesh, schedule and micro-batch.

    inside_error_band: its step time is within the band of the plan's, so that the prices cannot say
    which is faster
    """

    __pydantic_config__ = _FORBID

    mesh: Mesh
    pipeline: PipelinePlan
    sequence_parallel: bool
    step_time_s: Quantity
    peak_memory_gib: float
    redundancy_gib: float
    inside_error_band: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """`pruned` are illegal, do not fit, or are above the best by their bound; `left` were not
    solved when the search ended.
    """

    __pydantic_config__ = _FORBID

    considered: int
    pruned: int
    solved: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """The place of a plan on a front of step time, peak memory and redundant memory, and the limit
    its search was given.

    number: from 1, fastest first, of `points`; complete: whether the front was walked to its end
    memory_limit_gib: of the throughput objective, None for the fastest of all
    max_slowdown: of the memory objective, None for the least redundant of all
    """

    __pydantic_config__ = _FORBID

    number: int
    points: int
    complete: bool
    memory_limit_gib: float | None = None
    max_slowdown: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """What was proven: `value` of the objective (s or GiB) under the closed-form price, a lower
    `bound`, their `gap`.

    `fastest_step_time_s` is the closed form of the fastest plan, which the slowdown of the
    objectives memory and peak is measured by.
    front: where the plan is on a front (planner/search/pareto.py), None for the plan of a single
    search
    solver_failure: on how many candidates the solver failed, and how; None when it did not
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
    runners_up: tuple[RunnerUp, ...] = ()
