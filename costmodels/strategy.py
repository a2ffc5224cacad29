"""A complete training strategy: everything a price needs besides the model, the machine and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.mesh import Mesh
from costmodels.recompute import Again
from costmodels.schedules import Schedule
from costmodels.sharding import Sharding
from profiles.model import LayerKind


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """How one layer is run: what it recomputes, its ZeRO stage, and its sharding where that is not the frame's."""

    kind: LayerKind
    recompute: Again
    zero: int
    sharding: Sharding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The outer choices that the layers of a strategy share (EQUATIONS I1).

    sequence_parallel: between layers, activations are divided by token over the tensor-parallel ranks
    """

    mesh: Mesh
    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    num_micro_batches: int
    sequence_parallel: bool

    @property
    def sharding(self) -> Sharding:
        return Sharding(self.mesh.tp, self.sequence_parallel, ep=self.mesh.ep)

    def sharding_of(self, choice: LayerChoice) -> Sharding:
        """How a layer of this frame is divided."""
        return choice.sharding or self.sharding

    @property
    def num_virtual_stages(self) -> int:
        return self.mesh.pp * self.virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A frame and the layers of every virtual stage in model order; stage k runs on pipeline rank k % pp."""

    frame: Frame
    stages: tuple[tuple[LayerChoice, ...], ...]

    def chunks(self, rank: int) -> tuple[tuple[LayerChoice, ...], ...]:
        """The model chunks of one pipeline rank, first chunk first."""
        return self.stages[rank :: self.frame.mesh.pp]
