"""A training strategy: every input of a price but the model, the machine and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import Access, StateLocation
from parplan.costmodels.keyed_cache import HashedOnce
from parplan.costmodels.layers.model_states import OwnZero
from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.actions import Action, orders_of, placement_of
from parplan.costmodels.schedules.schedule import (
    AHEAD,
    LAST_KEEPS_ALL,
    SPLIT,
    V_SHAPED,
    Schedule,
    actions,
    rank_of,
    stages_of,
)
from parplan.profiles.models.operator_graph import LayerKey
from parplan.profiles.stack import ContextForm, TowerDivision

TP_OVERLAP_LEVELS = (0, 1, 2, 3)
Inside = tuple[int, int, int, int, ContextForm | None, int]  # tp, ep, etp, cp, its form, tp_rows


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """One way to run a layer: its recompute, ZeRO stage and sharding.

    kind        its layer class
    sharding    None for that of the layout
    home        location of the states of a layer in chunks
    on_host     operators of a block, in their order, whose saved tensors are offloaded
                (costmodels/memory/activation_copies.py)
    own_zero    operators whose parameters have another ZeRO stage than `zero`, and that stage
    """

    kind: LayerKey
    recompute: RecomputedOperators
    zero: int
    sharding: Sharding | None = None
    home: StateLocation = StateLocation.DEVICE
    on_host: tuple[str, ...] = ()
    own_zero: OwnZero = ()

    def zero_of(self, operator: str) -> int:
        """Returns the ZeRO stage of an operator's parameters."""
        return dict(self.own_zero).get(operator, self.zero)


def count_text(num_micro_batches: int, of_replicas: tuple[int, ...]) -> str:
    """Returns the micro-batches of a data-parallel rank as text: `8`, or `3 to 8`."""
    return f"{min(of_replicas)} to {num_micro_batches}" if of_replicas else f"{num_micro_batches}"


class _ShardedOnce(HashedOnce):
    """A hash and a sharding that are found once."""

    __slots__ = ("_sharding",)
    _sharding: Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout(_ShardedOnce):
    """The choices that all layers of a strategy share (EQUATIONS I1).

    sequence_parallel    activations between layers are divided by token over the tensor-parallel
                         ranks
    actions              action lists of a custom schedule, one CSV line per pipeline rank
                         (costmodels/schedules/actions.py)
    tp_overlap           level of sub-pipelined tensor parallelism in the blocks, 0 (none) to 3
                         (EQUATIONS P8)
    chunked              states of the blocks, or of the shards of a traced module, lie in chunks
                         (EQUATIONS O3), which data-parallel ranks own and gather as in ZeRO 3
    access               the unit of a block in chunks that has to be on the device together
    states_on_host       the hosts hold the states of all layers, as FSDP2 moves them (EQUATIONS O9)
    weights_over_data    blocks divide weights over the data-parallel ranks too
    tower                the way in which the tensor-parallel ranks run a tower
    pools                pool of each pipeline rank on an unequal cluster, else empty
    micro_batches_of_replicas   micro-batches of each data-parallel rank, where they differ; the
                         most is num_micro_batches (EQUATIONS P9)
    """

    __hash__ = HashedOnce.__hash__

    mesh: Mesh
    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    num_micro_batches: int
    sequence_parallel: bool
    actions: tuple[str, ...] = ()
    tp_overlap: int = 0
    chunked: bool = False
    access: Access = Access.BLOCK
    states_on_host: bool = False
    weights_over_data: bool = False
    tower: TowerDivision = TowerDivision.TENSOR
    pools: tuple[str, ...] = ()
    micro_batches_of_replicas: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> int:
        """Sequences of a step on all data-parallel ranks."""
        shares = self.micro_batches_of_replicas or (self.num_micro_batches,) * self.mesh.dp
        return self.micro_batch_size * sum(shares)

    @property
    def sharding(self) -> Sharding:
        try:
            return self._sharding
        except AttributeError:
            sharding = _sharding(self.mesh, self.sequence_parallel, self.tp_overlap)
            object.__setattr__(self, "_sharding", sharding)
            return sharding

    @property
    def over_data(self) -> Sharding:
        """Megatron's sharding over the data-parallel and the tensor-parallel axis."""
        return replace(self.sharding, data=self.mesh.dp)

    @property
    def of_blocks(self) -> Sharding:
        """The axes that the operators of blocks are divided over."""
        return self.over_data if self.weights_over_data else self.sharding

    def sharding_of(self, choice: LayerChoice) -> Sharding:
        """Returns the sharding of a layer of this layout."""
        return choice.sharding or self.sharding

    @property
    def num_virtual_stages(self) -> int:
        return self.mesh.pp * self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients may run apart from input gradients."""
        return self.schedule in SPLIT or any("W" in row for row in self.actions)

    @property
    def recomputes_ahead(self) -> bool:
        """True if recompute may run before the gradient that needs it exists."""
        return self.schedule in AHEAD or any("R" in row for row in self.actions)

    def keeps_all(self, rank: int) -> bool:
        """True if nothing may be recomputed on a pipeline rank."""
        return self.splits_backward or (
            self.schedule in LAST_KEEPS_ALL and rank == self.mesh.pp - 1
        )

    @property
    def equal_ranks(self) -> bool:
        """True if all ranks and chunks hold the same number of blocks.

        Else each rank may hold any number, at most one more on its first chunk.
        """
        free = self.virtual_stages == 1 or (
            self.virtual_stages == 2 and self.schedule in (*V_SHAPED, Schedule.CUSTOM)
        )
        return not free

    def rank_of(self, stage: int) -> int:
        """Returns the pipeline rank that runs a virtual stage."""
        if self.schedule is Schedule.CUSTOM:
            return next(
                rank for rank, stages in enumerate(_placement(self.actions)) if stage in stages
            )
        return rank_of(self.schedule, stage, self.mesh.pp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the virtual stages of a pipeline rank, by chunk."""
        if self.schedule is Schedule.CUSTOM:
            return _placement(self.actions)[rank]
        return stages_of(self.schedule, rank, self.mesh.pp, self.virtual_stages)

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """Returns the action lists of all pipeline ranks.

        Raises ConfigError if the schedule is not legal.
        """
        if self.schedule is Schedule.CUSTOM:
            return _orders(self.actions)
        ranks = range(self.mesh.pp)
        return tuple(
            actions(self.schedule, rank, self.mesh.pp, self.num_micro_batches, self.virtual_stages)
            for rank in ranks
        )


def in_chunks(choice: LayerChoice, layout: ParallelLayout) -> bool:
    """True if the states of a layer of `layout` lie in chunks."""
    return layout.chunked and choice.kind.in_chunks


def _sharding(mesh: Mesh, sequence_parallel: bool, overlap: int) -> Sharding:
    inside = mesh.tp, mesh.ep, mesh.etp, mesh.cp, mesh.context_form, mesh.tp_rows
    return _alike(inside, sequence_parallel, overlap)


@lru_cache(maxsize=1024)
def _alike(inside: Inside, sequence_parallel: bool, overlap: int) -> Sharding:
    tp, ep, etp, cp, form, rows = inside
    inner = tp // rows if rows > 1 else etp
    return Sharding(
        tp,
        sequence_parallel,
        axes=(tp // inner, inner) if 1 < inner < tp else (),
        ep=ep,
        overlap=overlap,
        etp=etp,
        cp=cp,
        context_form=form,
        rows=rows,
    )


_placement = lru_cache(maxsize=8)(placement_of)
_orders = lru_cache(maxsize=8)(orders_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A layout and the layers of every virtual stage in model order.

    Stage k runs on pipeline rank `layout.rank_of(k)`.
    """

    layout: ParallelLayout
    stages: tuple[tuple[LayerChoice, ...], ...]

    @property
    def first_sharding(self) -> Sharding:
        """The sharding of the first layer, which has the token table of a described model."""
        return self.layout.sharding_of(self.stages[0][0])

    def layers_of(self, stage: int) -> tuple[int, int]:
        """Returns the first layer of a virtual stage in the model, and the end."""
        first = sum(map(len, self.stages[:stage]))
        return first, first + len(self.stages[stage])

    def holds(self, stage: int, layers: Iterable[int]) -> bool:
        """True if a virtual stage has one of these layers of the model."""
        first, end = self.layers_of(stage)
        return any(first <= layer < end for layer in layers)

    def chunks(self, rank: int) -> tuple[tuple[LayerChoice, ...], ...]:
        """Returns the model chunks of one pipeline rank, first chunk first."""
        return tuple(self.stages[stage] for stage in self.layout.stages_of(rank))
