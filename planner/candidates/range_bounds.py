"""Lower bounds of a layout over all ways to cut a model of several layer classes into stages.

Every range of layers has its least seconds on every stage, at its fastest choice within memory. The
bound is the closed form with the least pace, the least sum and the least tail of all paths from the
first layer to the last, found by dynamic programming over the cuts (EQUATIONS I7). A plan is a
path, so stages are contiguous by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import gradients_come_and_go, stashes, usable_bytes
from parplan.costmodels.schedules.schedule import AHEAD
from parplan.costmodels.step import bubble_share
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.range_tables import (
    RangeStates,
    RangeTables,
    even_path,
    from_first,
    from_last,
)
from parplan.planner.dominance import Array
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.stage_columns.stage_contents import Range
from parplan.profiles.models.operator_graph import LayerKind


class PathBounds(ABC):
    """The bounds of one layout over all paths, from the prices of ranges of layers by stage.

    share    share of a micro-batch that each rank but the first adds to a step
    fixed    the ranges of the stages, where they are given
    """

    def __init__(
        self, layout: ParallelLayout, share: float, fixed: tuple[Range, ...] | None = None
    ) -> None:
        self.layout, self._share = layout, share
        self._fixed = fixed

    @abstractmethod
    def unlimited_s(self, stage: int) -> Array:
        """Least seconds of a micro-batch by range on a stage, for any memory."""

    @abstractmethod
    def within_s(self, stage: int) -> Array:
        """The same within the memory of the stage, infinite where a range does not fit."""

    @property
    @abstractmethod
    def tail_s(self) -> Array:
        """Least seconds by range after the last micro-batch."""

    @abstractmethod
    def least_bytes(self, stage: int) -> Array:
        """Lower bound of the bytes of a device by range, for any choice of its layers."""

    @abstractmethod
    def stage_bytes(self, stage: int, *, hosted: bool) -> Array:
        """The same of one stage alone, infinite where states that are hosted fit no host."""

    @abstractmethod
    def redundant_bytes(self, stage: int) -> Array:
        """Least redundant bytes by range of one rank of a stage."""

    @property
    @abstractmethod
    def most_share(self) -> float:
        """Largest share of recompute in the seconds of a layer."""

    @cached_property
    def time_s(self) -> list[Array]:
        """Least seconds of a micro-batch by stage and range, infinite if a range cannot be used."""
        times = [self.within_s(stage) for stage in range(self.layout.num_virtual_stages)]
        for stage, only in enumerate(self._fixed or ()):
            kept = np.full_like(times[stage], np.inf)
            kept[only] = times[stage][only]
            times[stage] = kept
        return times

    @cached_property
    def _first_paces(self) -> list[Array]:
        return from_first(self.time_s, np.maximum)

    @cached_property
    def _paces(self) -> tuple[list[Array], list[Array]]:
        return self._first_paces, from_last(self.time_s, np.maximum)

    @cached_property
    def _first_sums(self) -> list[Array]:
        return from_first(self.time_s, np.add)

    @cached_property
    def _sums(self) -> tuple[list[Array], list[Array]]:
        return self._first_sums, from_last(self.time_s, np.add)

    @property
    def least_pace_s(self) -> float:
        """Least seconds of the slowest stage, infinite where the model does not fit."""
        return float(self._first_paces[-1][-1])

    @property
    def least_walk_s(self) -> float:
        """Least seconds of all stages together."""
        return float(self._first_sums[-1][-1])

    @cached_property
    def least_s(self) -> float:
        """Lower bound of every plan of the layout, infinite if there is none."""
        if not np.isfinite(self.least_pace_s):
            return np.inf
        return float(self._step_s(self.least_pace_s, self.least_walk_s) + self.least_tail_s)

    @cached_property
    def least_tail_s(self) -> float:
        """Least seconds after the last micro-batch, where the model fits."""
        return max(float(self.tail_s[np.isfinite(time)].min()) for time in self.time_s)

    def _step_s(self, pace_s: Array | float, walk_s: Array | float) -> Array:
        layout, share = self.layout, self._share
        slowest = np.maximum(pace_s, walk_s / layout.mesh.pp)
        repeats = layout.num_micro_batches - share
        paced = repeats * slowest if repeats else 0.0  # not 0 times infinity
        return np.asarray(paced + share * walk_s)

    def near(self, stage: int, cut_s: float) -> npt.NDArray[np.bool_]:
        """Returns by range of a stage whether the layout can take less than `cut_s` with it."""
        before, behind = self._paces[0][stage][:-1, None], self._paces[1][stage + 1][None, :]
        pace_s = np.maximum(np.maximum(before, behind), self.time_s[stage])
        pace_s = np.maximum(pace_s, self.least_pace_s)
        walk_s = (
            self._sums[0][stage][:-1, None] + self.time_s[stage] + self._sums[1][stage + 1][None, :]
        )
        step_s = self._step_s(pace_s, np.maximum(walk_s, self.least_walk_s)) + self.tail_s
        return np.asarray(np.isfinite(pace_s) & (step_s < cut_s))

    @cached_property
    def even_cuts(self) -> tuple[Range, ...] | None:
        """The ranges whose slowest is fastest for any memory, None if there are too few layers."""
        return even_path([self.unlimited_s(k) for k in range(self.layout.num_virtual_stages)])

    @cached_property
    def leanest_cuts(self) -> tuple[Range, ...] | None:
        """The ranges whose fullest stage holds least, None if there are too few layers.

        Their states fit the hosts if those of any ranges do.
        """
        return self._leanest(hosted=True) or self._leanest(hosted=False)

    @property
    def leanest_bytes(self) -> float:
        """Least bytes of the fullest stage, infinite where the states fit no host."""
        cuts = self.cuts or self.leanest_cuts
        assert cuts is not None, "a candidate has no more stages than layers"
        return max(float(self.least_bytes(stage)[layers]) for stage, layers in enumerate(cuts))

    def _leanest(self, *, hosted: bool) -> tuple[Range, ...] | None:
        stages = range(self.layout.num_virtual_stages)
        finite = [np.isfinite(self.unlimited_s(stage)) for stage in stages]
        kept = [self.stage_bytes(stage, hosted=hosted) for stage in stages]
        return even_path([np.where(finite[stage], kept[stage], np.inf) for stage in stages])

    @property
    def cuts(self) -> tuple[Range, ...] | None:
        """The ranges of the stages, where they are given."""
        return self._fixed

    @property
    def least_redundant_bytes(self) -> float:
        """Lower bound of the redundant bytes of the cluster: of states, by the leanest path."""
        by_stage = [
            np.where(np.isfinite(time), self.redundant_bytes(stage), np.inf)
            for stage, time in enumerate(self.time_s)
        ]
        least = float(from_first(by_stage, np.add)[-1][-1])
        return self.layout.mesh.ranks_per_stage * least


class RangeBounds(PathBounds):
    """The bounds of one layout within a memory limit.

    levels    the allowed levels of recompute
    zeros     the ZeRO stages that a stage may have
    """

    def __init__(
        self,
        layout: ParallelLayout,
        tables: RangeTables,
        levels: Sequence[Recompute],
        zeros: Sequence[int],
        limit_bytes: float,
        fixed: tuple[Range, ...] | None = None,
    ) -> None:
        super().__init__(layout, bubble_share(layout, tables.price_cache), fixed)
        self.tables, self._levels = tables, levels
        self._usable = usable_bytes(limit_bytes, layout.mesh, tables.price_cache)
        self._host_share = host_share_bytes(tables.price_cache.machine.cluster)
        b, sharding = layout.micro_batch_size, layout.sharding
        self._passes = tables.passes(b, sharding)
        self._states = [tables.states(b, layout.mesh, sharding, zero) for zero in zeros]
        self._data_s, tails_s = tables.least_data(b, layout.mesh, sharding, zeros)
        # parts of one rank add the gradients of what both hold without sending
        self._unsure_s = (
            tables.shared_s(layout.mesh, sharding) if layout.virtual_stages > 1 else 0.0
        )
        self._tails_s = tails_s - self._unsure_s
        self._once = KeyedCache()
        self._frees = gradients_come_and_go(layout, tables.price_cache)

    @cached_property
    def tail_s(self) -> Array:
        return self._tails_s

    def within_s(self, stage: int) -> Array:
        times = self.unlimited_s(stage)
        return np.asarray(np.where(self.least_bytes(stage) <= self._usable, times, np.inf))

    def unlimited_s(self, stage: int) -> Array:
        layout = self.layout
        hidden = layout.schedule in AHEAD or Recompute.NONE in self._allowed(layout.rank_of(stage))
        before, after = received = self._received[stage]

        def make() -> Array:
            times = self._plain_s + (0.0 if hidden else self._passes.recompute_s)
            return np.asarray(times + before[: self.tables.size, None] + after[None, :])

        return self._once(("unlimited", hidden, received.tobytes()), make)

    @cached_property
    def _received(self) -> Array:
        return self.tables.received(self.layout)

    @cached_property
    def _plain_s(self) -> Array:
        """Least seconds of passes without recompute by range, infinite where a range is empty."""
        size = self.tables.size
        empty = np.arange(size)[:, None] >= np.arange(size + 1)[None, :]
        return np.asarray(np.where(empty, np.inf, self._passes.time_s + self._data_s))

    def _allowed(self, rank: int) -> Sequence[Recompute]:
        return (Recompute.NONE,) if self.layout.keeps_all(rank) else self._levels

    def least_bytes(self, stage: int) -> Array:
        """Lower bound of the bytes of a device by range, for any choice of its layers.

        Where gradients come and go, they may not exist while the most activations do. A rank with
        several stages holds at least the bytes of one of them.
        """
        return self.stage_bytes(stage, hosted=True)

    def stage_bytes(self, stage: int, *, hosted: bool) -> Array:
        held = self._least_held if hosted else self._held_anywhere
        return np.asarray(held + self._in_flight(stage) * self._passes.kept)

    def _in_flight(self, stage: int) -> int:
        """Micro-batches that a stage holds at least."""
        layout = self.layout
        if layout.virtual_stages > 1:
            return 1
        return stashes(LayerKind.BLOCK, layout.rank_of(stage), layout)

    @cached_property
    def _least_held(self) -> Array:
        """Least bytes by range besides activations, at any ZeRO stage that fits the host."""
        return np.asarray(
            np.minimum.reduce([self._hosted(states, self._held(states)) for states in self._states])
        )

    def _hosted(self, states: RangeStates, values: Array) -> Array:
        """Returns values by range, infinite where the states are beyond the rank's host share."""
        return np.asarray(np.where(states.host <= self._host_share, values, np.inf))

    def _held(self, states: RangeStates) -> Array:
        """Bytes by range of states and messages."""
        held = states.held - (states.gradients if self._frees else 0.0)
        return np.asarray(held + self.layout.num_micro_batches * self._passes.sent)

    @cached_property
    def _held_anywhere(self) -> Array:
        """Least bytes by range besides activations, for hosts of any size."""
        return np.asarray(np.minimum.reduce([self._held(states) for states in self._states]))

    def redundant_bytes(self, stage: int) -> Array:
        return np.asarray(np.minimum.reduce([held.redundant for held in self._states]))

    @property
    def most_share(self) -> float:
        return self._passes.most_share


def may_recompute(levels: Sequence[Recompute]) -> bool:
    """Returns whether levels have any recompute."""
    return set(levels) != {Recompute.NONE}


class CloserBounds(RangeBounds):
    """Bounds that include the recompute without which a range does not fit its device.

    A byte less of saved activations takes seconds of recompute. At every price of a byte, a range
    takes no less than its layers with their bytes at that price, less the room at that price (a
    Lagrangian bound). The room is that of one ZeRO stage.
    """

    def within_s(self, stage: int) -> Array:
        allowed = self._allowed(self.layout.rank_of(stage))
        hidden = self.layout.schedule in AHEAD and may_recompute(allowed)
        if hidden or Recompute.NONE not in allowed:
            return super().within_s(stage)
        data_s = [
            self._hosted(
                states, states.per_micro_batch_s + self._recompute_s(stage, states, allowed)
            )
            for states in self._states
        ]
        return np.asarray(self.unlimited_s(stage) - self._data_s + np.minimum.reduce(data_s))

    def _recompute_s(
        self, stage: int, states: RangeStates, allowed: Sequence[Recompute]
    ) -> Array | float:
        """Least seconds of recompute by range, infinite where no choice fits."""
        passes = self._passes
        room = (self._usable - self._held(states)) / self._in_flight(stage)
        if not may_recompute(allowed):
            return np.asarray(np.where(passes.whole <= room, 0.0, np.inf))
        if np.all(passes.whole <= room):
            return 0.0
        least_s = np.zeros_like(room)
        for price, priced_s in zip(passes.prices, passes.priced_s, strict=True):
            least_s = np.maximum(least_s, priced_s - price * room)
        return np.asarray(np.where(passes.kept <= room, least_s, np.inf))
