"""The Plan, the only thing that leaves the planner, and its YAML: self-contained, versioned,
deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.prediction import Prediction, SearchRecord
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.provenance import Kind

PLAN_VERSION = 1
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlacement:
    """DTensor placements of one operator, one entry per mesh axis that is not Replicate, such as
    `Shard(0)@tp`.
    """

    __pydantic_config__ = _FORBID

    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """How one layer is run: `recompute` names the operators that run again in the backward pass
    (all: full recompute).

    zero: 0 replicated states, 1 optimizer states sharded over dp, 2 gradients too, 3 parameters too
    (EQUATIONS M2).
    zero_ranks: how many neighbouring data-parallel ranks hold one copy of the states together; None
    for all of dp
    offload: what the host keeps of the states: `states` (fp32 parameters, their gradients, the
    optimizer's); where the plan has chunks
        `optimizer` (master and moments), and `parameters` too; of the embedding `lookup` (the
        table, looked up there)
    keep_on_host: the operators of a block whose kept tensors the host keeps from the forward to the
    backward pass
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
            raise ConfigError(
                f"zero_ranks is {self.zero_ranks}, it must be at least 1",
                hint="leave it out for all of dp",
            )
        if Offload.ACTIVATIONS in self.offload:
            raise ConfigError(
                "offload has activations, a layer plan names the operators that keep them",
                hint="name those in keep_on_host",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Consecutive layers on one layer plan: `blocks` first and last (inclusive) block, None for
    embedding and head.
    """

    __pydantic_config__ = _FORBID

    plan: str
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One (virtual) pipeline stage: the layers it holds in order, and the pipeline rank that runs
    it.
    """

    __pydantic_config__ = _FORBID

    rank: int
    layers: tuple[LayerRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Blocks of one pipeline rank whose states have the same home: their parameters in use order,
    in chunks of one size.

    chunk_elements: of a chunk, the same for parameters, gradients and optimizer states
    num_chunks: of the group, a multiple of dp; dp chunks in a row are a block, gathered whole: each
    data-parallel rank owns one, and a
        parameter may lie in two
    utilisation: share of the chunks' elements that are parameters
    """

    __pydantic_config__ = _FORBID

    stage: int
    home: StateLocation
    chunk_elements: int
    num_chunks: int
    utilisation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRank:
    """The chunks of one device of a pipeline rank in a step.

    device_bytes: what tensors may fill of the device, which decides what is evicted;
    smallest_bytes: with less it cannot run in_bytes, out_bytes: predicted to move to the device and
    from it, exact
    """

    __pydantic_config__ = _FORBID

    stage: int
    device_bytes: int
    smallest_bytes: int
    in_bytes: int
    out_bytes: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How the states of the blocks are held in chunks (EQUATIONS O1, O3, O4), and what that moves
    between host and device.
    """

    __pydantic_config__ = _FORBID

    eviction: Eviction
    groups: tuple[ChunkGroup, ...]
    ranks: tuple[ChunkRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy for one model on one cluster, with its predicted cost and the record of the search
    that found it.

    module: whose module the executor runs; None for its own
    chunks: how the states of the blocks are held in chunks; None where they are not
    """

    __pydantic_config__ = _FORBID

    plan_version: int
    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec
    mesh: Mesh
    pipeline: PipelinePlan
    layer_plans: Mapping[str, LayerPlan]
    stages: tuple[StagePlan, ...]
    predicted: Prediction
    search: SearchRecord
    module: ModuleSource | None = None
    chunks: ChunkPlan | None = None
