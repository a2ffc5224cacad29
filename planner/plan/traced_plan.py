"""The plan of a traced module: its shards, the stages that run them, and their parallelism.

It shares the parts of the plan of a described model (planner/plan/plan.py): cluster, training,
mesh, pipeline, prediction, search. A shard is a layer of the module: a run of operators in the
order in which the module ran them. The executor traces the module again and cuts it at the same
places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.planner.plan.pipeline_plan import PipelinePlan, PipelineStage
from parplan.planner.plan.plan import ChunkPlan, Plan
from parplan.planner.plan.prediction import Prediction, SearchRecord
from parplan.profiles.displayed import Displayed
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.tp_rules import TpRules

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSummary:
    """The traced model in numbers.

    unit      the unit of `training.seq_length`: tokens or samples
    counted   the buffers that a forward pass writes, each rank from its own samples
    """

    __pydantic_config__ = _FORBID

    name: str
    num_parameters: int
    num_operators: int
    flops_per_sequence: int
    unit: str
    counted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Operators [first, end) of the trace.

    name     name of the modules that the operators belong to
    layer    a letter, the same for shards that are alike
    starts   name of the first operator, by which the executor checks that its trace is the same
    """

    __pydantic_config__ = _FORBID

    name: str
    layer: str
    first: int
    end: int
    starts: str
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeList:
    """Operators of some alike shards of a stage that run again in the backward pass.

    shards   the shards
    places   the places of the operators in each of these shards, from 0
    """

    __pydantic_config__ = _FORBID

    shards: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHome:
    """Shards of a stage whose states lie in chunks, with one location.

    home     location of the states
    shards   the shards
    """

    __pydantic_config__ = _FORBID

    home: StateLocation
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStage(PipelineStage):
    """One (virtual) pipeline stage of a traced module.

    zero              its ZeRO stage
    recompute         the layers that run again as a whole in the backward pass
    recompute_lists   the shards of which some operators run again
    homes             in a plan with chunks, the shards that they hold, by location
    """

    __pydantic_config__ = _FORBID

    zero: int
    recompute: tuple[int, ...] = ()
    recompute_lists: tuple[RecomputeList, ...] = ()
    homes: tuple[ShardHome, ...] = ()

    def places_again(self, shard: int) -> tuple[int, ...]:
        """Returns the places of the operators of a shard's recompute list, if it has one."""
        lists = (each.places for each in self.recompute_lists if shard in each.shards)
        return next(lists, ())

    @property
    def home_of(self) -> dict[int, StateLocation]:
        """The location of the states of each shard in chunks."""
        return {shard: each.home for each in self.homes for shard in each.shards}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The division of one operator of a shard over the tensor-parallel ranks.

    place      the operator's place in the shard, from 0
    dim        the name of the dim that the ranks divide
    """

    __pydantic_config__ = _FORBID

    place: int
    dim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPlan(Displayed):
    """A strategy for a traced module on one cluster, with its predicted cost and search record.

    shardings   by `layer` of the shards, the operators that the tensor-parallel ranks divide; every
                rank computes all others whole, and views follow the tensors that they view
    tp_rules    what the user says of tensor parallelism; None where all of it was derived
    offload     states that the host holds: `states` (fp32 parameters, gradients and optimizer
                states of all shards), or none
    chunks      the chunks that hold the states of shards, without embedding, head and shards with
                shared parameters; None where there are none

    Raises ConfigError for any other offload, and for locations of chunks in a plan without any.
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
    shardings: Mapping[str, tuple[SplitPlan, ...]] = field(default_factory=dict)
    tp_rules: TpRules | None = None
    offload: tuple[Offload, ...] = ()
    chunks: ChunkPlan | None = None

    def __post_init__(self) -> None:
        for what in self.offload:
            if what is not Offload.STATES:
                raise ConfigError(
                    f"offload has {what}, the host holds the states of a traced module or nothing",
                    hint="use states, or leave offload out",
                )
        homes = any(stage.homes for stage in self.stages)
        if homes != (self.chunks is not None):
            raise ConfigError(
                "chunks and the homes of shards are there together, this plan has one of them",
                hint="make the plan again",
            )
        if self.chunks is not None and self.states_on_host:
            raise ConfigError(
                "offload has states, which are of whole layers, beside chunks",
                hint="use one of them",
            )

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool of each pipeline rank: none, as a traced module is planned on equal nodes."""
        return ()

    @property
    def states_on_host(self) -> bool:
        """True if the hosts hold the states of all shards."""
        return Offload.STATES in self.offload


AnyPlan = Plan | TracedPlan


def model_name(plan: AnyPlan) -> str:
    """Returns the name of the plan's model or module."""
    return plan.traced.name if isinstance(plan, TracedPlan) else plan.model.name
