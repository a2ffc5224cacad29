"""Prices of strategies for an attack.

The functions are those of `price_step`, memory first, and each rank's memory is priced once.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import device_memory
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import StepCosts, step_costs
from parplan.costmodels.step import price_step, simulated_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.objective import Objective
from parplan.planner.search.search_session import ROUNDING
from parplan.profiles.models.operator_graph import LayerKind

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy that fits, with its value and its tie-breaks.

    value  the simulated step in seconds, or redundant bytes over all GPUs
    """

    strategy: Strategy
    value: float
    step_s: float
    peak_bytes: float
    work_s: float

    @property
    def key(self) -> tuple[float, float, float]:
        return self.value, self.work_s, self.peak_bytes


class Prices:
    """Prices under one price cache and memory limit.

    evaluations  counts the priced steps and memories of ranks
    slowest_s    the longest step that the memory objective allows
    leanest      the least peak of strategies with a value of at most `as_good`
    """

    def __init__(
        self,
        price_cache: PriceCache,
        limit_bytes: float,
        objective: Objective = Objective.THROUGHPUT,
        slowest_s: float = INFINITY,
    ) -> None:
        self.price_cache = price_cache
        self.limit_bytes = limit_bytes
        self.objective = objective
        self.slowest_s = slowest_s
        self.evaluations = 0
        self.as_good = 0.0
        self.leanest = INFINITY
        self._memory: dict[object, RankMemory] = {}
        self._block_s: dict[object, float] = {}

    def memory(self, strategy: Strategy, rank: int) -> RankMemory:
        """Return the memory of a device of one pipeline rank."""
        key = strategy.layout, rank, strategy.chunks(rank)
        memory = self._memory.get(key)
        if memory is None:
            self.evaluations += 1
            memory = self._memory[key] = device_memory(strategy, rank, self.price_cache)
        return memory

    def fits(self, strategy: Strategy, rank: int) -> bool:
        """Return True if a rank is within the limit."""
        return self.memory(strategy, rank).total <= self.limit_bytes * (1 + ROUNDING)

    def block_s(self, choice: LayerChoice, layout: ParallelLayout) -> float:
        """Seconds that one block of `choice` adds to its rank in a step; they order the moves."""
        key = choice, layout
        if key not in self._block_s:
            sharding = layout.sharding_of(choice)
            time = self.price_cache.layer_time(
                choice.kind, layout.micro_batch_size, sharding, choice.recompute
            )
            data = self.price_cache.data_parallel(
                choice.kind, layout.micro_batch_size, layout.mesh, sharding, choice.zero
            )
            per_pass = time.total_s + data.forward.value_s + data.backward.value_s
            self._block_s[key] = (
                layout.num_micro_batches * per_pass + data.step.value_s + data.optimizer.value_s
            )
        return self._block_s[key]

    def saved_bytes(self, choice: LayerChoice, layout: ParallelLayout) -> int:
        """Bytes that one block of `choice` saves of a micro-batch."""
        return self.price_cache.activations(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        ).saved

    def work_s(self, strategy: Strategy) -> float:
        """Seconds of all ranks for their blocks, without waiting."""
        return sum(
            self.block_s(choice, strategy.layout)
            for stage in strategy.stages
            for choice in stage
            if choice.kind is LayerKind.BLOCK
        )

    def busiest_s(self, strategy: Strategy) -> float:
        """Busy seconds of the rank with most work, also of a strategy that does not fit."""
        self.evaluations += 1
        return busiest_s(strategy.layout, step_costs(strategy, self.price_cache))

    def price(self, strategy: Strategy, cut: float = INFINITY) -> Candidate | None:
        """Return the priced strategy, or None.

        None if it does not fit, is too slow, or cannot be below `cut`.
        """
        ranks = range(strategy.layout.mesh.pp)
        if not all(self.fits(strategy, rank) for rank in ranks):
            return None
        self.evaluations += 1
        peak_bytes = max(self.memory(strategy, rank).total for rank in ranks)
        if self.objective is Objective.MEMORY:
            return self._leanness(strategy, peak_bytes)
        costs = step_costs(strategy, self.price_cache)
        if busiest_s(strategy.layout, costs) > cut * (1 + ROUNDING):
            return None
        step_s = simulated_step(strategy, costs).step_s
        return self._noted(Candidate(strategy, step_s, step_s, peak_bytes, self.work_s(strategy)))

    def _leanness(self, strategy: Strategy, peak_bytes: float) -> Candidate | None:
        price = price_step(strategy, self.price_cache)
        if price.step_s > self.slowest_s:
            return None
        redundant = sum(rank.total for rank in price.redundant)
        value = strategy.layout.mesh.ranks_per_stage * redundant
        return self._noted(
            Candidate(strategy, value, price.step_s, peak_bytes, self.work_s(strategy))
        )

    def _noted(self, candidate: Candidate) -> Candidate:
        if candidate.value <= self.as_good and candidate.peak_bytes < self.leanest:
            self.leanest = candidate.peak_bytes
        return candidate


def busiest_s(layout: ParallelLayout, costs: StepCosts) -> float:
    """Busy seconds of the rank with most work: no schedule is shorter."""
    busy = (
        sum(cost.forward_s + cost.backward_s + cost.recompute_s for cost in row)
        for row in costs.stages
    )
    return max(
        layout.num_micro_batches * pass_s + tail_s
        for pass_s, tail_s in zip(busy, costs.tail_s, strict=True)
    )
