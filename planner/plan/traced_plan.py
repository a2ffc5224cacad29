"""The plan of a model that was traced, not described: which of its shards run on which stage, and
how.

It shares the parts of the plan of a built-in model (planner/plan/plan.py): cluster, training, mesh,
pipeline, prediction, search. A shard is a run of operators in the order in which the module ran
them; the executor traces the module again and cuts it at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.prediction import Prediction, SearchRecord
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import TrainingSpec

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSummary:
    """What a reader wants to know of the traced model; `unit` is what `training.seq_length` counts
    in a sequence: tokens or samples.
    """

    __pydantic_config__ = _FORBID

    name: str
    num_parameters: int
    num_operators: int
    flops_per_sequence: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Operators [first, end) of the trace. `name` is that of the modules they belong to; `starts`
    that of its first operator, by which the executor knows that it traced the same; `layer` a
    letter, the same for shards that are alike.
    """

    __pydantic_config__ = _FORBID

    name: str
    layer: str
    first: int
    end: int
    starts: str
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStage:
    """One (virtual) pipeline stage: shards [first, end), the pipeline rank that runs it, its ZeRO
    stage, and which of the shards run again in the backward pass.
    """

    __pydantic_config__ = _FORBID

    rank: int
    first: int
    end: int
    zero: int
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPlan:
    """A strategy for a traced module on one cluster, with its predicted cost and the record of the
    search that found it.
    """

    __pydantic_config__ = _FORBID

    plan_version: int
    module: ModuleSource
    traced: TracedSummary
    cluster: Cluster
    training: TrainingSpec
    mesh: Mesh
    pipeline: PipelinePlan
    shards: tuple[ShardPlan, ...]
    stages: tuple[ShardStage, ...]
    predicted: Prediction
    search: SearchRecord
