"""The least redundant plan with host offload; only bytes on the devices count (EQUATIONS R3).

Offload costs time, which the slowdown limits, and host memory, which has its own limit. A device
fills only the budget that its column was priced with, one budget per pipeline rank: a larger
budget would cache parameters it could refetch, which counts as redundancy. Every answer is priced
with the exact schedules of its chunks on these budgets, and its simulated step must be within the
slowdown too; where it is not, a faster choice of the layout is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.memory.rank_memory import usable_bytes
from parplan.costmodels.price_cache import PriceCache, described_prices
from parplan.costmodels.step import StepPrice, bubble_share, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
    BranchWatch,
    best_of,
    branch_and_bound,
)
from parplan.planner.candidates.lower_bounds import redundancy_bound_bytes
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.master import Master, MasterChoice, lower_bound_s
from parplan.planner.master import redundancy_bound_bytes as columns_redundancy_bound_bytes
from parplan.planner.objective import Objective
from parplan.planner.search.search_results import one_copy_bytes
from parplan.planner.search.search_session import ROUNDING, SearchSession
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.chunk_columns import ChunkColumns, Columns, lean_step_bytes
from parplan.planner.stage_columns.embedding_columns import AnyEnds, ColumnMaker
from parplan.planner.stage_columns.stage_column import RankTimeLimit, StageColumn
from parplan.profiles.errors import InfeasibleError

TRIES = 6  # attempts at a faster plan of a layout whose exact step is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanChoice:
    """The least redundant choice of one layout, priced exactly.

    value, bound: redundant bytes of the cluster
    price_cache: its prices, with the budgets of its devices
    """

    layout: ParallelLayout
    choice: MasterChoice
    value: float
    bound: float
    strategy: Strategy
    price: StepPrice
    price_cache: PriceCache


def search_leanest_on_host(
    layouts: Sequence[ParallelLayout],
    session: SearchSession,
    incumbent: LeanChoice,
    *,
    closed_s: float,
    step_s: float,
) -> BranchOutcome[LeanChoice]:
    """Searches the layouts by their bound of redundant bytes, until none can be below the best.

    incumbent: the plan to be beaten
    closed_s, step_s: limits of the step, in the closed form and simulated
    """
    dropped: list[float] = []
    bounded = (
        (
            redundancy_bound_bytes(layout, session.table)
            + _least_home_bytes(layout, session, closed_s),
            layout,
        )
        for layout in layouts
        if session.prices.may_fit(layout, session.limit_bytes)
        and session.prices.least_s(layout, session.limit_bytes) <= closed_s
    )
    outcome = branch_and_bound(
        bounded,
        lambda layout, bound, cut, _: _solve(
            layout, bound, cut, session, closed_s, step_s, dropped
        ),
        best_of,
        BranchWatch(
            objective=Objective.MEMORY, left_s=session.left_s, on_progress=session.on_progress
        ),
        incumbents=(incumbent,),
        floor=-one_copy_bytes(session.prices),
    )
    return replace(outcome, bound=min((outcome.bound, *dropped)))


def _solve(
    layout: ParallelLayout,
    bound: float,
    cut: float,
    session: SearchSession,
    slowest_s: float,
    step_s: float,
    dropped: list[float],
) -> LeanChoice | None:
    """The answer of one layout.

    Where the closed form has a leaner choice whose exact step is too long, its bound is added to
    `dropped`. The closed-form limit is then bisected: it falls where the exact step is too long,
    and rises where it is not.
    """
    choice = _choose(layout, cut, session, slowest_s)
    if choice is None:
        return None
    least = choice.redundant_bytes if choice.proven else bound
    if layout.chunked:  # one step of mixes, and one of columns
        least -= (
            2
            * layout.mesh.num_ranks
            * lean_step_bytes(layout, described_prices(session.price_cache))
        )
    lean = _priced(layout, choice, least, session)
    if lean is None or lean.price.step_s <= step_s:
        dropped += [least] if lean is None else []
        return lean
    high_s, best = choice.step_s, None
    low_s = high_s * (step_s / lean.price.step_s) ** 2
    for _ in range(TRIES):
        middle_s = (low_s + high_s) / 2
        choice = _choose(layout, cut, session, middle_s)
        lean = None if choice is None else _priced(layout, choice, least, session)
        if choice and not (lean and lean.price.step_s <= step_s):
            high_s = min(middle_s, choice.step_s)
            continue
        low_s, best = middle_s, lean or best
        cut = best.value if best else cut
    dropped += [] if best else [least]
    return best


def _choose(
    layout: ParallelLayout, cut: float, session: SearchSession, slowest_s: float
) -> MasterChoice | None:
    """The least redundant choice within `slowest_s` in the closed form, if it is below `cut`."""
    num_layers = session.num_blocks
    share = bubble_share(layout, session.price_cache)
    pace = RankTimeLimit(
        layout.num_micro_batches - share, slowest_s - session.described.time_bound(layout).total_s
    )
    options = session.columns(layout, partial(_columns, session, pace), slowest_s)
    if options is None:
        return None
    least_s = lower_bound_s(layout, options, num_layers, share)
    least = columns_redundancy_bound_bytes(layout, options, num_layers)
    if least_s is None or least is None or least_s > slowest_s or least >= cut:
        return None
    master = Master(layout, options, num_layers, tied=session.price_cache.tied, share=share)
    choice = master.leanest(slowest_s, session.options.solver, session.solver_limit_s())
    return choice if choice and choice.redundant_bytes < cut else None


def _least_home_bytes(layout: ParallelLayout, session: SearchSession, slowest_s: float) -> float:
    """Lower bound of a layout's device states above those with all blocks at their leanest.

    In the time that `slowest_s` leaves besides compute, the host can update and fetch only some
    blocks. The bytes of a rank are convex in its blocks, so all ranks together hold no less than
    with equal shares. Infinite where compute takes all of the time, 0 without chunks.
    """
    if not layout.chunked:
        return 0.0
    table, time = session.table, session.described.time_bound(layout)
    catalogue = table.catalogue
    passes, blocks = layout.num_micro_batches, session.num_blocks / layout.mesh.pp
    repeats, room_s = passes - bubble_share(layout, session.price_cache), slowest_s - time.total_s
    spare_s = room_s - repeats * blocks * time.block_s
    if spare_s < 0:
        return float("inf")
    least = []
    for weight_layout in catalogue.fastest_s(layout.micro_batch_size, layout.sharding):
        costs = table.block_costs(
            layout, catalogue.with_weight_layout(weight_layout, layout.sharding)
        )
        held = {home: float(cost.device.total) for home, cost in costs.items()}
        updated = min(
            blocks, *(spare_s / cost.host_adam_s for cost in costs.values() if cost.host_adam_s)
        )
        on_host = 0.0
        if StateLocation.HOST in costs:
            # Only the first pass of a step finds the last block's parameters on the device.
            swept_s = repeats * costs[StateLocation.HOST].fetch_s / passes
            on_host = min(updated, 1 + room_s / (2 * passes * swept_s) if swept_s else blocks)
        optimizer_bytes = held.get(StateLocation.OPTIMIZER, held[StateLocation.DEVICE])
        total = (
            on_host * held.get(StateLocation.HOST, 0.0)
            + (updated - on_host) * optimizer_bytes
            + (blocks - updated) * held[StateLocation.DEVICE]
        )
        least.append(total - blocks * min(held.values()))
    return layout.mesh.num_ranks * min(least)


def _columns(
    session: SearchSession, pace: RankTimeLimit, rank: Columns | ColumnMaker, count: int
) -> list[StageColumn]:
    if isinstance(rank, AnyEnds):
        return [column for way in rank.ways for column in _columns(session, pace, way, count)]
    if isinstance(rank, ChunkColumns):
        return rank.leanest(count, session.limit_bytes, pace)
    columns = session.prices.lean_columns(rank, count, session.limit_bytes)
    return [
        column for column in columns if pace.repeats * column.time_s + column.tail_s <= pace.room_s
    ]


def _priced(
    layout: ParallelLayout, choice: MasterChoice, bound: float, session: SearchSession
) -> LeanChoice | None:
    """A choice with the exact schedules of its chunks, None where device or host lacks room."""
    price_cache = described_prices(session.book_of(layout, choice))
    strategy = to_strategy(layout, choice.columns)
    if layout.chunked:
        budgets = tuple(
            int(usable_bytes(column.memory_bytes, layout.mesh, price_cache)) + 1
            for column in choice.columns
        )
        price_cache = price_cache.within(replace(price_cache.chunking, device_bytes=budgets))
    try:
        price = price_step(strategy, price_cache)
    except InfeasibleError:
        return None
    fullest = max(memory.total for memory in price.memory)
    host = max(memory.host for memory in price.memory)
    host_limit = host_share_bytes(price_cache.machine.cluster)
    if fullest > session.limit_bytes * (1 + ROUNDING) or host > host_limit * (1 + ROUNDING):
        return None
    return LeanChoice(
        layout=layout,
        choice=choice,
        value=choice.redundant_bytes,
        bound=bound,
        strategy=strategy,
        price=price,
        price_cache=price_cache,
    )
