"""Whole layouts to attack with.

They are any layout within the pins, its blocks on the fastest mix of two choices that fits, and
random layouts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from benchmarks.search.attacks.allowed import zero_stages
from benchmarks.search.attacks.moves import fewest
from benchmarks.search.attacks.palette import Palette
from benchmarks.search.attacks.prices import Candidate, Prices
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.request import Request as PlanningRequest
from parplan.planner.search.estimate import UniformChoices, default_blocks, estimate_plan
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.models.operator_graph import LayerKind


def laid_out(
    layout: ParallelLayout, blocks: Sequence[int], ranks: Sequence[Sequence[LayerChoice]], zero: int
) -> Strategy:
    """Return a strategy with `blocks[r]` blocks on rank r, in turn on the choices of `ranks[r]`.

    Embedding and head have ZeRO stage `zero`.
    """
    stages: list[tuple[LayerChoice, ...]] = [()] * layout.num_virtual_stages
    for rank, count in enumerate(blocks):
        stages_of_rank, remaining = layout.stages_of(rank), list(ranks[rank])
        num_stages = len(stages_of_rank)
        rest = count % num_stages
        sizes = [count // num_stages + (1 if i < rest else 0) for i in range(num_stages)]
        if rank == 0 and layout.equal_ranks and rest:  # the first stage is shorter
            sizes.sort()
        for stage, size in zip(stages_of_rank, sizes, strict=True):
            stages[stage] = tuple(remaining[:size])
            del remaining[:size]
    stages[0] = (LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zero), *stages[0])
    stages[-1] = (*stages[-1], LayerChoice(LayerKind.HEAD, Recompute.NONE, zero))
    return Strategy(layout=layout, stages=tuple(stages))


def splits(layout: ParallelLayout, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Yield splits of the blocks over ranks.

    The first is even. If ranks may differ, splits follow that leave the first and the last rank a
    block less.
    """
    even = default_blocks(layout, num_layers)
    yield even
    if layout.equal_ranks or layout.mesh.pp < 3:
        return
    for ends in ((-1,), (0, -1)):
        if all(even[end] > layout.virtual_stages for end in ends):
            blocks = list(even)
            for index, end in enumerate(ends):
                blocks[end] -= 1
                blocks[1 + index % (layout.mesh.pp - 2)] += 1
            yield tuple(blocks)


class Layouts:
    """Strategies that fill the layouts of one request."""

    def __init__(self, prices: Prices, palette: Palette, pins: Constraints) -> None:
        self.prices = prices
        self.palette = palette
        self.pins = pins
        self.num_layers = prices.price_cache.model.num_layers

    def roomy(self, layout: ParallelLayout) -> float:
        """Seconds of the layout's busiest rank on devices without a memory limit.

        The split is even, without recompute.
        """
        blocks = default_blocks(layout, self.num_layers)
        zero = min(zero_stages(layout, self.pins))
        kept = LayerChoice(LayerKind.BLOCK, Recompute.NONE, zero)
        strategy = laid_out(layout, blocks, [[kept] * count for count in blocks], zero)
        return self.prices.busiest_s(strategy)

    def best(self, layout: ParallelLayout, cut: float) -> Candidate | None:
        """Return the best strategy of a layout, with one ZeRO stage and two ways a rank at most."""
        made = (
            self._mixed(layout, blocks, zero)
            for blocks in splits(layout, self.num_layers)
            for zero in zero_stages(layout, self.pins)
        )
        priced = (self.prices.price(strategy, cut) for strategy in made if strategy is not None)
        return min(
            (candidate for candidate in priced if candidate is not None),
            key=lambda candidate: candidate.key,
            default=None,
        )

    def _mixed(self, layout: ParallelLayout, blocks: Sequence[int], zero: int) -> Strategy | None:
        ranks = [
            [way.at(zero) for way in self.palette.ways(layout, rank)]
            for rank in range(layout.mesh.pp)
        ]
        chosen: list[list[LayerChoice]] = [
            [choices[0]] * count for choices, count in zip(ranks, blocks, strict=True)
        ]
        for rank in range(layout.mesh.pp):
            fitting = self._fitting(layout, blocks, chosen, rank, ranks[rank], zero)
            if fitting is None:
                return None
            chosen[rank] = fitting
        return laid_out(layout, blocks, chosen, zero)

    def _fitting(
        self,
        layout: ParallelLayout,
        blocks: Sequence[int],
        chosen: list[list[LayerChoice]],
        rank: int,
        choices: list[LayerChoice],
        zero: int,
    ) -> list[LayerChoice] | None:
        """Return the fastest choice that fits a rank, as its blocks' choices.

        As many blocks as possible run on the next faster choice.
        """

        def with_(layers: list[LayerChoice]) -> Strategy:
            return laid_out(layout, blocks, [*chosen[:rank], layers, *chosen[rank + 1 :]], zero)

        front, count = self._front(choices, layout), blocks[rank]
        place = fewest(lambda n: self.prices.fits(with_([front[n]] * count), rank), len(front) - 1)
        lean, faster = front[place], front[max(0, place - 1)]
        if not self.prices.fits(with_([lean] * count), rank):
            return None
        leaner = fewest(
            lambda n: self.prices.fits(with_([lean] * n + [faster] * (count - n)), rank), count
        )
        return [lean] * leaner + [faster] * (count - leaner)

    def _front(self, choices: list[LayerChoice], layout: ParallelLayout) -> list[LayerChoice]:
        """Return the choices that no other dominates in time and saved bytes, fastest first."""
        front: list[LayerChoice] = []
        for choice in sorted(
            choices,
            key=lambda choice: (
                self.prices.block_s(choice, layout),
                self.prices.saved_bytes(choice, layout),
            ),
        ):
            if not front or self.prices.saved_bytes(choice, layout) < self.prices.saved_bytes(
                front[-1], layout
            ):
                front.append(choice)
        return front


def random_layout(
    chance: random.Random,
    request: PlanningRequest,
    pins: Constraints,
    layouts: Sequence[ParallelLayout],
) -> Plan | None:
    """Return a random layout as `estimate` prices it, or None if `estimate` refuses it.

    ZeRO stage, level of recompute and split of blocks are random too.
    """
    layout = chance.choice(layouts)
    blocks = list(default_blocks(layout, request.model.num_layers))
    if not layout.equal_ranks and layout.mesh.pp > 1 and chance.random() < 0.5:
        taken, given = chance.sample(range(layout.mesh.pp), 2)
        blocks[taken], blocks[given] = blocks[taken] - 1, blocks[given] + 1
    try:
        return estimate_plan(
            PlanRequest(model=request.model, cluster=request.cluster, training=request.training),
            layout,
            UniformChoices(
                zero=chance.choice(zero_stages(layout, pins)),
                recompute=chance.choice(
                    pins.resolved(request.training.stack).recompute or tuple(Recompute)
                ),
                blocks=blocks,
                zero_ranks=pins.zero_ranks,
            ),
        )
    except (ConfigError, InfeasibleError):
        return None
