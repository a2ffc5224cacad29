"""A measured row that a fit prices under many values of the terms.

What the terms leave alone is made once: the strategy of the row, and the memory for each share of
the allocator. `price_row` gives the same errors.
"""

from __future__ import annotations

from parplan.costmodels.chunks.chunk_memory import device_memory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import simulated_step_s
from parplan.costmodels.strategy import Strategy
from parplan.planner.validation.configuration import Configuration, configuration_of
from parplan.planner.validation.priced_rows import PricedRow, held, strategy_of
from parplan.planner.validation.reported_memory import Figure, figure_of, predicted_gib
from parplan.planner.validation.row_cells import Row
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.stack_terms import Terms


def counts_the_allocator(row: Row) -> bool:
    """Returns whether the row's memory depends on what the allocator holds beyond its tensors."""
    return bool(row["peak_memory_gib"]) and figure_of(row["memory_kind"]) is not Figure.ALLOCATED


class FittedRow:
    """A row that leaves no setting open, with the figures that were measured."""

    def __init__(self, row: Row, priced: PricedRow) -> None:
        self.row = row
        self._measured_s = priced.measured_s
        self._measured_gib = priced.measured_gib if counts_the_allocator(row) else None
        self._strategy: Strategy | None = None
        self._gib: dict[float, float] = {}

    def errors(self, terms: Terms) -> tuple[float | None, float | None]:
        """Returns the relative errors of time and memory, None for what was not measured."""
        configuration = configuration_of(self.row, terms)
        price_cache = PriceCache(
            configuration.model,
            configuration.training,
            machine_for(configuration.cluster, terms),
        )
        strategy = self._strategy_of(configuration, price_cache)
        time = memory = None
        if self._measured_s:
            step_s = simulated_step_s(strategy, step_costs(strategy, price_cache))
            time = step_s / self._measured_s - 1
        if self._measured_gib:
            predicted = self._predicted_gib(configuration, strategy, price_cache)
            memory = predicted / self._measured_gib - 1
        return time, memory

    def _strategy_of(self, configuration: Configuration, price_cache: PriceCache) -> Strategy:
        if self._strategy is None:
            (micro_batch,) = configuration.micro_batches
            (virtual_stages,) = configuration.virtual_stages
            (levels,) = configuration.recompute
            layout = configuration.layout(micro_batch, virtual_stages)
            self._strategy = strategy_of(configuration, layout, levels, price_cache)
        return self._strategy

    def _predicted_gib(
        self, configuration: Configuration, strategy: Strategy, price_cache: PriceCache
    ) -> float:
        share = configuration.training.stack.allocator_share
        if share not in self._gib:
            ranks = range(strategy.layout.mesh.pp)
            memory = [device_memory(strategy, rank, price_cache) for rank in ranks]
            (levels,) = configuration.recompute
            ranks_held = held(configuration, memory, levels, strategy.layout, price_cache)
            self._gib[share] = predicted_gib(ranks_held, self.row["memory_kind"])
        return self._gib[share]
