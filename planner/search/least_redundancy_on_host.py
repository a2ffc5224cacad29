"""The least redundant plan among those that may keep something on the host: the devices' bytes are what counts (EQUATIONS R3).

What the host takes off the devices is paid for in time, which the slowdown limits, and in memory of the host, which is one more limit.
A device fills only the budget that its column was priced with, one a pipeline rank: with more it would keep parameters that it can fetch
again. Every answer is priced with the exact schedules of its chunks, on those budgets, and takes no longer than the slowdown allows
in the simulated step either; where it would, the frame is asked again for a faster one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from parplan.costmodels.host.state_location import Home
from parplan.costmodels.memory.rank_memory import usable_bytes
from parplan.costmodels.price_cache import PriceBook
from parplan.costmodels.step import StepPrice, bubble_share, price_step
from parplan.costmodels.strategy import Frame, Strategy
from parplan.planner.candidates.branch_and_bound import Outcome, best_of, branch
from parplan.planner.candidates.lower_bounds import redundancy_bound_bytes
from parplan.planner.host_options.location_costs import host_share_bytes
from parplan.planner.master import Choice, Master, lower_bound_s
from parplan.planner.master import redundancy_bound_bytes as columns_redundancy_bound_bytes
from parplan.planner.plan.prediction import Objective
from parplan.planner.search.search_session import ROUNDING, Session
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.chunk_columns import ChunkColumns, Columns, lean_step_bytes
from parplan.planner.stage_columns.columns import Column, Pace
from parplan.planner.stage_columns.embedding_columns import EitherTable, Ways
from parplan.profiles.errors import InfeasibleError

TRIES = 6  # how often a frame whose exact step is too long is asked for a faster plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lean:
    """The least redundant choice of one frame, priced exactly; `value` and `bound` in redundant bytes of the cluster.

    book: its prices, with the budgets of its devices
    """

    frame: Frame
    choice: Choice
    value: float
    bound: float
    strategy: Strategy
    price: StepPrice
    book: PriceBook


def search_leanest_on_host(
    frames: Sequence[Frame], session: Session, incumbent: Lean, *, closed_s: float, step_s: float,
) -> Outcome[Lean]:
    """Frames one after the other by their bound of redundant bytes, until none can be below the best.

    incumbent: the plan to be beaten; closed_s, step_s: what a step may take, in the closed form and simulated
    """
    dropped: list[float] = []
    bounded = (
        (redundancy_bound_bytes(frame, session.table) + _least_home_bytes(frame, session, closed_s), frame)
        for frame in frames
        if session.prices.may_fit(frame, session.limit_bytes) and session.prices.least_s(frame, session.limit_bytes) <= closed_s)
    outcome = branch(
        Objective.MEMORY, bounded,
        lambda frame, bound, cut, _: _solve(frame, bound, cut, session, closed_s, step_s, dropped), best_of, left_s=session.left_s,
        on_progress=session.on_progress, incumbent=incumbent)
    return replace(outcome, bound=min((outcome.bound, *dropped)))


def _solve(
    frame: Frame, bound: float, cut: float, session: Session, slowest_s: float, step_s: float, dropped: list[float],
) -> Lean | None:
    """The answer of one frame; where its closed form has a leaner one that takes too long, the bound of that is `dropped`.

    Then what the closed form may take is halved in on: less where the exact step is too long, more where it is not.
    """
    choice = _choose(frame, cut, session, slowest_s)
    if choice is None:
        return None
    least = choice.redundant_bytes if choice.proven else bound
    least -= 2 * frame.chunked * frame.mesh.num_ranks * lean_step_bytes(frame, session.book)  # a step of mixes, and one of columns
    found = _priced(frame, choice, least, session)
    if found is None or found.price.step_s <= step_s:
        dropped += [least] if found is None else []
        return found
    high_s, best = choice.step_s, None
    low_s = high_s * (step_s / found.price.step_s) ** 2
    for _ in range(TRIES):
        middle_s = (low_s + high_s) / 2
        choice = _choose(frame, cut, session, middle_s)
        found = None if choice is None else _priced(frame, choice, least, session)
        if choice and not (found and found.price.step_s <= step_s):
            high_s = min(middle_s, choice.step_s)
            continue
        low_s, best = middle_s, found or best
        cut = best.value if best else cut
    dropped += [] if best else [least]
    return best


def _choose(frame: Frame, cut: float, session: Session, slowest_s: float) -> Choice | None:
    """The least redundant choice of a frame in `slowest_s` of the closed form, None where it is not below `cut`."""
    num_layers, share = session.book.model.num_layers, bubble_share(frame, session.book)
    pace = Pace(frame.num_micro_batches - share, slowest_s - session.time_bound(frame).total_s)
    options = session.columns(frame, partial(_columns, session, pace), slowest_s)
    if options is None:
        return None
    least_s, least = lower_bound_s(frame, options, num_layers, share), columns_redundancy_bound_bytes(frame, options, num_layers)
    if least_s is None or least is None or least_s > slowest_s or least >= cut:
        return None
    master = Master(frame, options, num_layers, tied=session.book.tied, share=share)
    choice = master.leanest(slowest_s, session.options.solver, session.solver_limit_s())
    return choice if choice and choice.redundant_bytes < cut else None


def _least_home_bytes(frame: Frame, session: Session, slowest_s: float) -> float:
    """By how much the states on the devices of a frame in chunks are more than with all blocks at their leanest home, at least.

    In the time that `slowest_s` leaves besides compute, the host updates but so many blocks, and fetches but so many. Of a rank this is
    convex in its blocks, so that the ranks together hold no less than with equal shares. Infinite where compute takes all of the time.
    """
    if not frame.chunked:
        return 0.0
    table, catalogue, time = session.table, session.table.catalogue, session.time_bound(frame)
    passes, blocks = frame.num_micro_batches, session.book.model.num_layers / frame.mesh.pp
    repeats, room_s = passes - bubble_share(frame, session.book), slowest_s - time.total_s
    spare_s = room_s - repeats * blocks * time.block_s
    if spare_s < 0:
        return float("inf")
    least = []
    for layout in catalogue.fastest_s(frame.micro_batch_size, frame.sharding):
        costs = table.block_costs(frame, catalogue.with_layout(layout, frame.sharding))
        held = {home: float(cost.device.total) for home, cost in costs.items()}
        updated = min(blocks, *(spare_s / cost.host_adam_s for cost in costs.values() if cost.host_adam_s))
        on_host = 0.0
        if Home.HOST in costs:
            swept_s = repeats * costs[Home.HOST].fetch_s / passes  # all but the first pass of a step find none of the last block's
            on_host = min(updated, 1 + room_s / (2 * passes * swept_s) if swept_s else blocks)
        others = held.get(Home.OPTIMIZER, held[Home.DEVICE])
        total = on_host * held.get(Home.HOST, 0.0) + (updated - on_host) * others + (blocks - updated) * held[Home.DEVICE]
        least.append(total - blocks * min(held.values()))
    return frame.mesh.num_ranks * min(least)


def _columns(session: Session, pace: Pace, rank: Columns | Ways, count: int) -> list[Column]:
    if isinstance(rank, EitherTable):
        return [column for way in rank.ways for column in _columns(session, pace, way, count)]
    if isinstance(rank, ChunkColumns):
        return rank.leanest(count, session.limit_bytes, pace)
    found = session.prices.lean_columns(rank, count, session.limit_bytes)
    return [column for column in found if pace.repeats * column.time_s + column.tail_s <= pace.room_s]


def _priced(frame: Frame, choice: Choice, bound: float, session: Session) -> Lean | None:
    """A choice with the exact schedules of its chunks, None where those need more of the device or of its host than there is."""
    book, strategy = session.book_of(choice), to_strategy(frame, choice.columns)
    if frame.chunked:
        budgets = tuple(int(usable_bytes(column.memory_bytes, frame.mesh, book)) + 1 for column in choice.columns)
        book = book.within(replace(book.chunking, device_bytes=budgets))
    try:
        price = price_step(strategy, book)
    except InfeasibleError:
        return None
    fullest, host = (max(getattr(memory, name) for memory in price.memory) for name in ("total", "host"))
    if fullest > session.limit_bytes * (1 + ROUNDING) or host > host_share_bytes(book.machine.cluster) * (1 + ROUNDING):
        return None
    return Lean(frame=frame, choice=choice, value=choice.redundant_bytes, bound=bound, strategy=strategy, price=price, book=book)
