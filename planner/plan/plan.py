"""The Plan, the only result that leaves the planner. `plan_file.py` reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import (
    Access,
    ChunkCommunication,
    Eviction,
    StateLocation,
)
from parplan.planner.plan.pipeline_plan import LayerRange, PipelinePlan, PipelineStage
from parplan.planner.plan.prediction import Prediction, SearchRecord
from parplan.profiles.displayed import Displayed
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerKey, LayerKind, ModelGraph
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import TowerDivision

PLAN_VERSION = 2
_FORBID = {"extra": "forbid"}


OVER_DATA = "@dp"  # the end of a placement over the data-parallel axis


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlacement:
    """DTensor placements such as `Shard(0)@tp`, for each mesh axis that is not Replicate.

    The data-parallel axis has entries where some operator of the layer divides its weight over it:
    then the batch is that of all data-parallel ranks.
    """

    __pydantic_config__ = _FORBID

    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    input: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The parallelism of one layer.

    block          the class of a block, where those of the model are of several; the file has it
                   only there
    zero           0 replicated states, 1 optimizer states sharded over dp, 2 gradients too, 3
                   parameters too (EQUATIONS M2)
    zero_ranks     number of neighbouring data-parallel ranks that share one copy of the states;
                   None for all of dp
    offload        states that the host holds: `states` (fp32 parameters, gradients and optimizer
                   states); in a plan with chunks `optimizer` (master parameters and moments), and
                   `parameters` too; of the embedding `lookup` (the table, looked up on the host),
                   and of the head too where it shares the table, whose states alone are there
    recompute      the operators that run again in the backward pass (all: full recompute)
    keep_on_host   the operators of a block whose saved tensors the host holds between the forward
                   and the backward pass
    own_zero       the operators of a block whose parameters have another ZeRO stage than `zero`,
                   and that stage; the file has it only where there are any
    tower          of the layers of a tower that tensor-parallel ranks do not divide as blocks:
                   `images` (every rank has its own), or `repeated` (every rank has all)
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
    own_zero: Mapping[str, int] = field(default_factory=dict)
    block: str = ""
    tower: TowerDivision | None = None

    def key(self, graph: ModelGraph) -> LayerKey:
        """Returns its layer class in a model. Raises ConfigError where the model has none such."""
        known = {str(key): key for key in graph.keys if key.role is self.layer}
        name = self.block or self.layer.value
        if name not in known:
            raise unknown_name_error("class of layers", name, known, where=f"model {graph.name}")
        return known[name]

    @property
    def highest_zero(self) -> int:
        """The highest ZeRO stage of its operators."""
        return max(self.zero, *self.own_zero.values()) if self.own_zero else self.zero

    @property
    def divides_over_data(self) -> bool:
        """True if data-parallel ranks divide the weight of an operator."""
        return any(
            entry.endswith(OVER_DATA)
            for placed in self.operators.values()
            for entries in placed.parameters.values()
            for entry in entries
        )

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero is {self.zero}, it must be 0, 1, 2 or 3")
        for name, zero in self.own_zero.items():
            if zero not in (0, 1, 2, 3):
                raise ConfigError(f"own_zero.{name} is {zero}, it must be 0, 1, 2 or 3")
        if self.own_zero and self.layer is not LayerKind.BLOCK:
            raise ConfigError(
                f"own_zero is of operators of a block, this is the {self.layer}",
                hint="leave own_zero out",
            )
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
class LayerRun(LayerRange):
    """Consecutive layers on one layer plan.

    plan   a name of `layer_plans`
    """

    __pydantic_config__ = _FORBID

    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan(PipelineStage):
    """One (virtual) pipeline stage of a described model.

    pool   the pool of an unequal cluster that runs it; the file has it only there
    """

    __pydantic_config__ = _FORBID

    layers: tuple[LayerRun, ...]
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Blocks of one pipeline rank whose states have the same location, in chunks of one size.

    The chunks hold the parameters in the order of use.

    home             location of the states
    chunk_elements   elements of a chunk, the same for parameters, gradients and optimizer states
    num_chunks       chunks of the group, a multiple of dp. Each run of dp chunks is gathered as a
                     whole, and each data-parallel rank owns one of them; a parameter may lie in two
                     chunks
    utilisation      share of the chunks' elements that are parameters
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

    device_bytes          bytes of the device that tensors may fill, which decides the evictions
    smallest_bytes        the least device_bytes with which it can run
    in_bytes, out_bytes   predicted bytes that move to the device and from it, exact
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
    """The chunks that hold the states of the blocks (EQUATIONS O1, O3, O4), and their transfers.

    communication    how data-parallel ranks gather and reduce the chunks of a group: all at once,
                     or one after the other
    access    the unit of a block that has to be on the device together: `block`, or `operator`
    """

    __pydantic_config__ = _FORBID

    eviction: Eviction
    groups: tuple[ChunkGroup, ...]
    ranks: tuple[ChunkRank, ...]
    communication: ChunkCommunication = ChunkCommunication.GROUP
    access: Access = Access.BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """The sequences of a plan in the global batch of pools that divide it (EQUATIONS P10).

    first   number of the plan's first sequence in the whole batch, from 0
    of      sequences of the whole batch; the plan's own are its global_batch_size
    """

    __pydantic_config__ = _FORBID

    first: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Displayed):
    """A strategy for one model on one cluster, with its predicted cost and its search record.

    module   source of the external module that the executor runs; None for its own model
    chunks   the chunks that hold the states of the blocks; None where there are none
    batch_share   the plan's part of the batch of several pools; the file has it only there
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
    batch_share: BatchShare | None = None

    @property
    def whole_batch(self) -> BatchShare:
        """The place of the plan's sequences in a global batch, that of all pools if there are any.

        The number `of` sequences is that of a step.
        """
        return self.batch_share or BatchShare(first=0, of=self.training.global_batch_size)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pool of each pipeline rank, none on equal nodes."""
        by_rank = {stage.rank: stage.pool for stage in self.stages if stage.pool}
        return tuple(by_rank[rank] for rank in sorted(by_rank))
