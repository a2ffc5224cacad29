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

    num_micro_batches   micro-batches of a data-parallel rank in a step; the most of any, where
                     their shares of the batch differ
    virtual_stages   model chunks per pipeline rank, 1 unless the schedule is interleaved, zbv or
                     dualpipev
    actions          of a custom schedule alone, the actions of each pipeline rank as a line of
                     torch's compute-only CSV
    tp_overlap       level of sub-pipelined tensor parallelism in the blocks: all-reduces of one
                     half of a micro-batch run under the compute of the other. 0 none, 1 inside each
                     linear, 2 inside a block, 3 across the blocks of a stage
    micro_batches_of_replicas   micro-batches of each data-parallel rank in rank order; the file has
                     it only where they differ (EQUATIONS P9)
    """

    __pydantic_config__ = _FORBID

    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    num_micro_batches: int
    actions: tuple[str, ...] = ()
    tp_overlap: int = 0
    micro_batches_of_replicas: tuple[int, ...] = ()

    def micro_batches(self, dp: int) -> tuple[int, ...]:
        """Micro-batches of each of `dp` data-parallel ranks."""
        return self.micro_batches_of_replicas or (self.num_micro_batches,) * dp

    def __post_init__(self) -> None:
        _require_shares(self)
        if self.tp_overlap not in TP_OVERLAP_LEVELS:
            raise ConfigError(f"pipeline: tp_overlap is {self.tp_overlap}, it must be 0, 1, 2 or 3")
        if bool(self.actions) != (self.schedule is Schedule.CUSTOM):
            raise ConfigError(
                f"pipeline: schedule {self.schedule} has {len(self.actions)} lines of actions; "
                "custom, and only it, has some"
            )


def _require_shares(pipeline: PipelinePlan) -> None:
    """Raises ConfigError unless unequal shares of the batch fit the other fields."""
    shares = pipeline.micro_batches_of_replicas
    if not shares:
        return
    where = "pipeline: micro_batches_of_replicas"
    if min(shares) < 1 or max(shares) != pipeline.num_micro_batches:
        raise ConfigError(
            f"{where} has {min(shares)} to {max(shares)}, the least must be 1 or more and the most "
            f"num_micro_batches, {pipeline.num_micro_batches}",
            hint="correct either",
        )
    if min(shares) == max(shares):
        raise ConfigError(f"{where} has {shares[0]} for all of them", hint="leave it out")
    if pipeline.schedule is Schedule.CUSTOM:
        raise ConfigError(
            f"{where} with schedule custom, whose actions are of one number of micro-batches",
            hint="leave it out, or use another schedule",
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
