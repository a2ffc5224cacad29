"""Replays the best layouts of a search in the simulator (EQUATIONS I6).

It adds strategies that may be better than the closed form says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import described_prices
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.baselines.stage_aware import StageAwareRoom, stage_aware
from parplan.planner.baselines.uniform_strategies import counted_ends, equal_blocks
from parplan.planner.candidates.branch_and_bound import BranchOutcome
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.planner.objective import Objective
from parplan.planner.search.local_changes import improved
from parplan.planner.search.search_session import (
    ROUNDING,
    DescribedPrices,
    SearchSession,
    SolvedCandidate,
)
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.stage_column import interchangeable_ends, worth_scheduling
from parplan.profiles.errors import InfeasibleError, OutOfTimeError

IMPROVED = 3  # strategies whose blocks are moved between stages
TOLD_APART = 9  # significant digits of a step, against another order of summation
WORTH_CHUNKS = 0.01  # share by which chunks must be faster where nothing leaves the device

Replayed = tuple[SolvedCandidate, Strategy, StepPrice]


def _equal_stages(solved: SolvedCandidate, session: SearchSession) -> Iterator[Strategy]:
    """The layout of `solved` with equally many blocks per stage, each stage on its fastest column.

    An end may count as one block. The closed form is exact on equal stages. On others it may be too
    short by less than a percent, and could rank a plan above a better one with equal stages.
    """
    layout, pp = solved.layout, solved.layout.mesh.pp
    num_layers = session.num_blocks
    for ends in counted_ends(num_layers, pp) if pp > 1 and layout.virtual_stages == 1 else ():
        blocks = equal_blocks(layout, num_layers, ends)
        ranks = [
            [
                c
                for c in rank_columns(
                    rank, layout, session.described.table_of(layout, rank)
                ).fastest(count, session.limit_bytes)
                if interchangeable_ends(rank, layout, c, chosen)
            ]
            for rank, (count, chosen) in enumerate(zip(blocks, solved.choice.columns, strict=True))
        ]
        if all(ranks):
            yield to_strategy(
                layout,
                tuple(
                    min(columns, key=lambda c: c.alone_s(layout.num_micro_batches))
                    for columns in ranks
                ),
            )


def _by_the_rule(solved: SolvedCandidate, session: SearchSession) -> Iterator[Strategy]:
    """Merak's one recompute knob on equal stages, at the least value that fits, where it applies.

    With it no plan is slower than the rule.
    """
    layout, price_cache = (
        solved.layout,
        described_prices(session.book_of(solved.layout, solved.choice)),
    )
    num_layers = session.num_blocks
    if layout.mesh.pp == 1 or layout.virtual_stages > 1 or layout.chunked or layout.pools:
        return
    if session.table.stage_recompute is not None:
        return  # the user's rule is another
    allowed = session.prices.recompute or tuple(Recompute)
    if not {Recompute.NONE, Recompute.FULL} <= set(allowed) or illegal_full_recompute(
        layout.tp_overlap, price_cache.model
    ):
        return
    for ends in counted_ends(num_layers, layout.mesh.pp):
        blocks = equal_blocks(layout, num_layers, ends)
        for zero in sorted({column.zero for column in solved.choice.columns}):
            counts = StageAwareRoom(
                layout, blocks, zero, price_cache, session.limit_bytes
            ).least_knob()
            if counts is not None:
                yield stage_aware(layout, blocks, counts, zero)


def _other_homes(solved: SolvedCandidate, session: SearchSession) -> Iterator[Strategy]:
    """The best columns of a chunked layout without a pipeline."""
    layout = solved.layout
    if layout.chunked and layout.mesh.pp == 1:
        columns = rank_columns(0, layout, session.table).fastest(
            session.num_blocks, session.limit_bytes
        )
        alike = (
            column for column in columns if column.looks_up == solved.choice.columns[0].looks_up
        )
        for column in worth_scheduling(alike, layout.num_micro_batches):
            yield to_strategy(layout, (column,))


def _idle_chunks(strategy: Strategy) -> bool:
    """True if all chunks of a strategy stay on the device: it is simpler without chunks."""
    return strategy.layout.chunked and all(
        choice.home is StateLocation.DEVICE for stage in strategy.stages for choice in stage
    )


def replayed_price(strategy: Strategy, price_cache: LayerPriceCache) -> StepPrice | None:
    """The price of a strategy, None where its exact schedule or its host lacks room."""
    try:
        price = price_step(strategy, price_cache)
    except InfeasibleError:
        return None
    host = max(memory.host for memory in price.memory)
    return price if host <= host_share_bytes(price_cache.machine.cluster) * (1 + ROUNDING) else None


def _tried(
    solved: SolvedCandidate, objective: Objective, session: SearchSession
) -> Iterator[Strategy]:
    """Yields the choice of a solved layout, then for throughput strategies that may be faster.

    Raises OutOfTimeError after the first.
    """
    yield session.prices.strategy(solved.layout, solved.choice.columns)
    if objective is Objective.THROUGHPUT:
        for columns in session.prices.also_replayed(solved.layout, session):
            yield session.prices.strategy(solved.layout, columns)
    if objective is Objective.THROUGHPUT and isinstance(session.prices, DescribedPrices):
        yield from (
            *_equal_stages(solved, session),
            *_by_the_rule(solved, session),
            *_other_homes(solved, session),
        )


def _unique(strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    seen = set[Strategy]()
    for strategy in strategies:
        if strategy not in seen:
            seen.add(strategy)
            yield strategy


def replay_best(
    outcome: BranchOutcome[SolvedCandidate], objective: Objective, session: SearchSession
) -> list[Replayed]:
    """Prices the best solved layouts in full, for throughput the fastest first.

    Ctrl-C and the time limit end it with the strategies replayed so far.
    """
    replayed: list[Replayed] = []
    try:
        for solved in outcome.to_replay:
            price_cache = session.book_of(solved.layout, solved.choice)
            priced: list[Replayed] = []
            try:
                for strategy in _unique(_tried(solved, objective, session)):
                    if replayed or priced:  # a plan late is better than none
                        session.deadline.check()
                    price = replayed_price(strategy, price_cache)
                    priced += [(solved, strategy, price)] if price else []
            finally:
                replayed += [min(priced, key=_told_apart)] if priced else []
    except (KeyboardInterrupt, OutOfTimeError):
        if not replayed:
            raise
    if objective is Objective.THROUGHPUT:
        replayed.sort(key=_told_apart)
        replayed[:IMPROVED] = [_improved(entry, session) for entry in replayed[:IMPROVED]]
        replayed.sort(key=_told_apart)
    return replayed


def _told_apart(replayed: Replayed) -> tuple[float, float]:
    """Sort key: the step as it counts, then the peak of the fullest device."""
    _, strategy, price = replayed
    counted_s = price.step_s
    if _idle_chunks(strategy):
        counted_s *= 1 + WORTH_CHUNKS
    return float(f"{counted_s:.{TOLD_APART}g}"), price.peak_bytes


def _improved(replayed: Replayed, session: SearchSession) -> Replayed:
    solved, strategy, price = replayed
    return (solved, *improved(solved, strategy, price, session))
