"""The pipeline of a plan: its schedule and micro-batches, and the layers of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS
from parplan.profiles.errors import ConfigError

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The pipeline schedule of a plan and its micro-batches.

    virtual_stages   model chunks per pipeline rank, 1 unless the schedule is interleaved, zbv or
                     dualpipev
    actions          of a custom schedule alone, the actions of each pipeline rank as a line of
                     torch's compute-only CSV
    tp_overlap       level of sub-pipelined tensor parallelism in the blocks: all-reduces of one
                     half of a micro-batch run under the compute of the other. 0 none, 1 inside each
                     linear, 2 inside a block, 3 across the blocks of a stage
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
            raise ConfigError(
                f"pipeline: schedule {self.schedule} has {len(self.actions)} lines of actions; "
                "custom, and only it, has some"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Consecutive layers, by their index in the model's sequence of layers.

    Of a described model 0 is the embedding, then come the blocks, and the head is the last. The
    layers of a traced module are its shards.

    first, last   the first and the last layer, both included
    """

    __pydantic_config__ = _FORBID

    first: int
    last: int

    @property
    def indices(self) -> range:
        """The indices of the layers."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One (virtual) pipeline stage: its layers in order, and the pipeline rank that runs it."""

    __pydantic_config__ = _FORBID

    rank: int
    layers: tuple[LayerRange, ...]

    @property
    def first(self) -> int:
        """The index of the stage's first layer."""
        return self.layers[0].first

    @property
    def end(self) -> int:
        """The index after that of the stage's last layer."""
        return self.layers[-1].last + 1
