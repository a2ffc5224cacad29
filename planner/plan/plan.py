"""The Plan, the only thing that leaves the planner, and its YAML: self-contained, versioned,
deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.consistency import require_consistent
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.prediction import Prediction, SearchRecord
from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import Hints, read_yaml
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_document, cluster_from_document
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


def host_gib(plan: Plan) -> float:
    """Of the host of the fullest node: what it holds for each of its devices. The ranks of a stage
    follow each other.
    """
    per_stage, a_node = plan.mesh.dp * plan.mesh.tp, plan.cluster.gpus_per_node
    held = [
        plan.predicted.memory_gib[rank // per_stage].host for rank in range(plan.mesh.num_ranks)
    ]
    return max(sum(held[first : first + a_node]) for first in range(0, len(held), a_node))


def layout_of(plan: Plan) -> ParallelLayout:
    """The outer choices of a plan."""
    pipeline = plan.pipeline
    return ParallelLayout(
        mesh=plan.mesh,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        micro_batch_size=pipeline.micro_batch_size,
        num_micro_batches=pipeline.num_micro_batches,
        sequence_parallel=any(p.sequence_parallel for p in plan.layer_plans.values()),
        actions=pipeline.actions,
        tp_overlap=pipeline.tp_overlap,
        chunked=plan.chunks is not None,
    )


class WrittenPlan(Protocol):
    """What every kind of plan file has."""

    @property
    def cluster(self) -> Cluster: ...


def plan_to_document(plan: WrittenPlan) -> dict[str, Any]:
    """The plan as plain dicts, lists, strings and numbers: what the file holds."""
    body: dict[str, Any] = document(plan)
    body["cluster"] = cluster_document(plan.cluster)
    return body


def plan_to_yaml(plan: WrittenPlan) -> str:
    """The plan as YAML; the same plan always gives the same text."""
    return yaml.safe_dump(
        plan_to_document(plan), sort_keys=False, default_flow_style=None, width=120
    )


def write_plan(plan: WrittenPlan, path: Path) -> None:
    """Write the plan atomically: a reader sees the old file or the new one, never a part. Raises
    ConfigError.
    """
    write_text(plan_to_yaml(plan), path, hint="choose another file with --output")


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError: not readable, not YAML, another version, unknown or
    missing keys, parts that differ.
    """
    return plan_from_document(load_plan(path), str(path))


def load_plan(path: Path) -> Any:
    """What a file holds. Raises ConfigError: not readable, not YAML."""
    return read_yaml(
        path, hints=Hints("make a plan with: plan --model NAME --gpus N", "make the plan again")
    )


def plan_from_document(body: Any, where: str) -> Plan:
    """The plan of what `plan_to_document` gives. Raises ConfigError with `where`, as `read_plan`
    does.
    """
    if isinstance(body, dict) and "shards" in body:
        raise ConfigError(
            f"{where}: it is the plan of a traced module, this needs one of a described model",
            hint="plan show and plan check --execute take plans of traced modules",
        )
    plan = parse(Plan, checked_document(body, where), where)
    require_consistent(plan, where)
    return plan


def checked_document(body: Any, where: str) -> dict[str, Any]:
    """The document of a plan of this version, with its cluster. Raises ConfigError."""
    if not isinstance(body, dict):
        raise ConfigError(
            f"{where}: a plan is a mapping, found {type(body).__name__}", hint="make the plan again"
        )
    version = body.get("plan_version")
    found = "missing" if version is None else repr(version)
    if version != PLAN_VERSION:
        raise ConfigError(
            f"{where}: plan_version is {found}, this parplan reads {PLAN_VERSION}",
            hint="make the plan again with this version",
        )
    if "cluster" in body:
        body = {**body, "cluster": cluster_from_document(body["cluster"], f"{where}: cluster")}
    if isinstance(
        body.get("training"), dict
    ):  # a file from before there were stacks was priced for a neutral one
        body = {**body, "training": {"stack": {}, **body["training"]}}
    return dict(body)
