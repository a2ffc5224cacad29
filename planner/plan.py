"""The Plan, the only thing that leaves the planner, and its YAML: self-contained, versioned, deterministic.

Quantities here are in the units a person reads (GiB, seconds); the cost models keep bytes. Every predicted number
says whether it was measured, interpolated or computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import yaml

from costmodels.chunks.home import Eviction, Home
from costmodels.mesh import Mesh
from costmodels.offload import Offload
from costmodels.schedules import Schedule
from costmodels.strategy import TP_OVERLAP_LEVELS, Frame
from profiles.catalog import cluster_document, cluster_from_document
from profiles.errors import ConfigError, unknown_name_error
from profiles.files import write_text
from profiles.hardware import Cluster
from profiles.model import LayerKind
from profiles.module import ModuleSource
from profiles.provenance import Kind
from profiles.schema import document, parse
from profiles.spec import ModelSpec, TrainingSpec

PLAN_VERSION = 1
_FORBID = {"extra": "forbid"}


class Objective(StrEnum):
    THROUGHPUT = "throughput"
    MEMORY = "memory"


class Status(StrEnum):
    """`optimal`: proven within the stated gap. `feasible`: the best found when the time ran out or Ctrl-C came.
    `estimate`: priced by hand, nothing was searched."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How micro-batches flow; `virtual_stages` model chunks per pipeline rank (1 unless interleaved or zbv).

    actions: of a custom schedule, and only of that, what each pipeline rank runs, as a line of torch's compute-only CSV
    tp_overlap: level of sub-pipelined tensor parallelism in the blocks: all-reduces of one half of a micro-batch under the compute of the
        other. 0 none, 1 inside each linear, 2 inside a block, 3 across the blocks of a stage
    """

    __pydantic_config__ = _FORBID

    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    num_micro_batches: int
    actions: tuple[str, ...] = ()
    tp_overlap: int = 0

    def __post_init__(self) -> None:
        if self.tp_overlap not in TP_OVERLAP_LEVELS:
            raise ConfigError(f"pipeline: tp_overlap is {self.tp_overlap}, it must be 0, 1, 2 or 3")
        if bool(self.actions) != (self.schedule is Schedule.CUSTOM):
            raise ConfigError(f"pipeline: schedule {self.schedule} has {len(self.actions)} lines of actions; custom, and only it, has some")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlacement:
    """DTensor placements of one operator, one entry per mesh axis that is not Replicate, such as `Shard(0)@tp`."""

    __pydantic_config__ = _FORBID

    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """How one layer is run: `recompute` names the operators that run again in the backward pass (all: full recompute).

    zero: 0 replicated states, 1 optimizer states sharded over dp, 2 gradients too, 3 parameters too (EQUATIONS M2).
    zero_ranks: how many neighbouring data-parallel ranks hold one copy of the states together; None for all of dp
    offload: what the host keeps of the states: `states` (fp32 parameters, their gradients, the optimizer's); where the plan has chunks
        `optimizer` (master and moments), and `parameters` too; of the embedding `lookup` (the table, looked up there)
    keep_on_host: the operators of a block whose kept tensors the host keeps from the forward to the backward pass
    """

    __pydantic_config__ = _FORBID

    layer: LayerKind
    sequence_parallel: bool
    zero: int
    zero_ranks: int | None = None
    offload: tuple[Offload, ...] = ()
    recompute: tuple[str, ...] = ()
    keep_on_host: tuple[str, ...] = ()
    operators: Mapping[str, OperatorPlacement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero is {self.zero}, it must be 0, 1, 2 or 3")
        if self.zero_ranks is not None and self.zero_ranks < 1:
            raise ConfigError(f"zero_ranks is {self.zero_ranks}, it must be at least 1", hint="leave it out for all of dp")
        if Offload.ACTIVATIONS in self.offload:
            raise ConfigError(
                "offload has activations, a layer plan names the operators that keep them", hint="name those in keep_on_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Consecutive layers on one layer plan: `blocks` first and last (inclusive) block, None for embedding and head."""

    __pydantic_config__ = _FORBID

    plan: str
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One (virtual) pipeline stage: the layers it holds in order, and the pipeline rank that runs it."""

    __pydantic_config__ = _FORBID

    rank: int
    layers: tuple[LayerRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Blocks of one pipeline rank whose states have the same home: their parameters in use order, in chunks of one size.

    chunk_elements: of a chunk, the same for parameters, gradients and optimizer states
    num_chunks: of the group, a multiple of dp; of dp chunks in a row each data-parallel rank owns one
    utilisation: share of the chunks' elements that are parameters
    """

    __pydantic_config__ = _FORBID

    stage: int
    home: Home
    chunk_elements: int
    num_chunks: int
    utilisation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRank:
    """The chunks of one device of a pipeline rank in a step.

    device_bytes: what tensors may fill of the device, which decides what is evicted; smallest_bytes: with less it cannot run
    in_bytes, out_bytes: predicted to move to the device and from it, exact
    """

    __pydantic_config__ = _FORBID

    stage: int
    device_bytes: int
    smallest_bytes: int
    in_bytes: int
    out_bytes: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """How the states of the blocks are held in chunks (EQUATIONS O), and what that moves between host and device."""

    __pydantic_config__ = _FORBID

    eviction: Eviction
    groups: tuple[ChunkGroup, ...]
    ranks: tuple[ChunkRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A predicted number and where it comes from."""

    __pydantic_config__ = _FORBID

    value: float
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the step time goes, on the pipeline rank that takes longest; the parts add up to the step time.

    host_comm_s: copies between device and host that compute does not hide, and what the host adds up
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
    """Peak GiB per device of one pipeline rank by class; `capacity` is what the device has, `host` what its host holds for it."""

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
    """GiB of one device beyond its share of one copy (EQUATIONS R); temporaries are a largest moment, the rest adds up."""

    __pydantic_config__ = _FORBID

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRedundancy:
    """One layer of a layer plan on a device of pipeline rank `stage`, the first that runs it, and its operators."""

    __pydantic_config__ = _FORBID

    stage: int
    layer: RedundantGib
    operators: Mapping[str, RedundantGib]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """GiB held beyond one copy of everything, summed over the cluster (EQUATIONS R).

    stages: of one device of every pipeline rank; layers: by layer plan, of one device and its micro-batches in flight
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
    """Eight in ten of `rows` measurements, which the fit of the prices had not seen, were within +- `share` of their prediction.

    stack: whose measurements, `all` for those of every stack
    """

    __pydantic_config__ = _FORBID

    share: float
    rows: int
    stack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """`time`: of the step and of what is derived from it (tokens per second, MFU). `memory`: of every stage's total."""

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

    inside_error_band: its step time is within the band of the plan's, so that the prices cannot say which is faster
    """

    __pydantic_config__ = _FORBID

    mesh: Mesh
    pipeline: Pipeline
    sequence_parallel: bool
    step_time_s: Quantity
    peak_memory_gib: float
    redundancy_gib: float
    inside_error_band: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """`pruned` are illegal, do not fit, or are above the best by their bound; `left` were not solved when the search ended."""

    __pydantic_config__ = _FORBID

    considered: int
    pruned: int
    solved: int
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """The place of a plan on a front of step time, peak memory and redundant memory, and the limit its search was given.

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
    """What was proven: `value` of the objective (s or GiB) under the closed-form price, a lower `bound`, their `gap`.

    `fastest_step_time_s` is the closed form of the fastest plan, which the memory objective's slowdown is measured by.
    front: where the plan is on a front (planner/pareto.py), None for the plan of a single search
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy for one model on one cluster, with its predicted cost and the record of the search that found it.

    module: whose module the executor runs; None for its own
    chunks: how the states of the blocks are held in chunks; None where they are not
    """

    __pydantic_config__ = _FORBID

    plan_version: int
    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec
    mesh: Mesh
    pipeline: Pipeline
    layer_plans: Mapping[str, LayerPlan]
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    search: SearchRecord
    module: ModuleSource | None = None
    chunks: Chunks | None = None


def frame_of(plan: Plan) -> Frame:
    """The outer choices of a plan."""
    pipeline = plan.pipeline
    return Frame(
        mesh=plan.mesh, schedule=pipeline.schedule, virtual_stages=pipeline.virtual_stages, micro_batch_size=pipeline.micro_batch_size,
        num_micro_batches=pipeline.num_micro_batches, sequence_parallel=any(p.sequence_parallel for p in plan.layer_plans.values()),
        actions=pipeline.actions, tp_overlap=pipeline.tp_overlap, chunked=plan.chunks is not None)


class Written(Protocol):
    """What every kind of plan file has."""

    @property
    def cluster(self) -> Cluster: ...


def to_document(plan: Written) -> dict[str, Any]:
    """The plan as plain dicts, lists, strings and numbers: what the file holds."""
    body: dict[str, Any] = document(plan)
    body["cluster"] = cluster_document(plan.cluster)
    return body


def to_yaml(plan: Written) -> str:
    """The plan as YAML; the same plan always gives the same text."""
    return yaml.safe_dump(to_document(plan), sort_keys=False, default_flow_style=None, width=120)


def write(plan: Written, path: Path) -> None:
    """Write the plan atomically: a reader sees the old file or the new one, never a part. Raises ConfigError."""
    write_text(to_yaml(plan), path, hint="choose another file with --output")


def read(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError: not readable, not YAML, another version, unknown or missing keys."""
    return from_document(load(path), str(path))


def load(path: Path) -> Any:
    """What a file holds. Raises ConfigError: not readable, not YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="make a plan with: plan --model NAME --gpus N") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = f"{path}:{line + 1}" if line is not None else str(path)
        raise ConfigError(f"{place}: not YAML: {getattr(error, 'problem', None) or error}", hint="make the plan again") from None


def from_document(body: Any, where: str) -> Plan:
    """The plan of what `to_document` gives. Raises ConfigError with `where`, as `read` does."""
    if isinstance(body, dict) and "shards" in body:
        raise ConfigError(f"{where}: it is the plan of a traced module, this needs one of a described model",
                          hint="plan show and plan check --execute take plans of traced modules")
    plan = parse(Plan, checked_document(body, where), where)
    _require_whole(plan, where)
    return plan


def checked_document(body: Any, where: str) -> dict[str, Any]:
    """The document of a plan of this version, with its cluster. Raises ConfigError."""
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: a plan is a mapping, found {type(body).__name__}", hint="make the plan again")
    version = body.get("plan_version")
    found = "missing" if version is None else repr(version)
    if version != PLAN_VERSION:
        raise ConfigError(
            f"{where}: plan_version is {found}, this parplan reads {PLAN_VERSION}", hint="make the plan again with this version")
    if "cluster" in body:
        body = {**body, "cluster": cluster_from_document(body["cluster"], f"{where}: cluster")}
    return dict(body)


def _require_whole(plan: Plan, where: str) -> None:
    """Raises ConfigError where the parts of a file do not fit together: stages without their plan, rank or memory."""
    known, ranks = plan.layer_plans, range(plan.mesh.pp)
    for index, stage in enumerate(plan.stages):
        unknown = [run.plan for run in stage.layers if run.plan not in known]
        if unknown:
            raise unknown_name_error("layer plan", unknown[0], known, where=f"{where}: stages.{index}")
        if stage.rank not in ranks:
            raise ConfigError(f"{where}: stages.{index}: rank is {stage.rank}, the mesh has pp {plan.mesh.pp}", hint="make the plan again")
    if [memory.stage for memory in plan.predicted.memory_gib] != list(ranks):
        raise ConfigError(
            f"{where}: predicted.memory_gib has {len(plan.predicted.memory_gib)} stages, the mesh has pp {plan.mesh.pp}",
            hint="make the plan again")
    if plan.chunks is not None and [rank.stage for rank in plan.chunks.ranks] != list(ranks):
        raise ConfigError(
            f"{where}: chunks.ranks has {len(plan.chunks.ranks)} stages, the mesh has pp {plan.mesh.pp}", hint="make the plan again")
