"""Small changes of a pipeline's best strategy that shorten its simulated step (EQUATIONS I6).

The columns of a search price a step by its closed form, which is exact only for equal stages, and
they hold equal numbers of blocks on both chunks of a rank. The simulator has neither limit. So the
ranks of the best strategies get other columns, one at a time, and blocks move between stages,
within the memory of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schedules.simulator import least_step_s
from parplan.costmodels.stage_costs import StepCosts, step_costs, with_other_ranks
from parplan.costmodels.step import (
    StepPrice,
    bubble_share,
    closed_form_s,
    price_step,
    simulated_step_s,
)
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.deadline import in_time
from parplan.planner.search.search_session import DescribedPrices, SearchSession, SolvedCandidate
from parplan.planner.stage_columns.block_counts import to_strategy
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.stage_column import StageColumn, interchangeable_ends
from parplan.profiles.errors import OutOfTimeError
from parplan.profiles.models.operator_graph import LayerKind

WORTH_MOVING = 1e-4  # share of the step
MOST_TRIED = 120  # simulated strategies for each kind of change
NEAR = 0.03  # share by which a column alone may be slower than the column that it replaces


def improved(
    solved: SolvedCandidate, strategy: Strategy, price: StepPrice, session: SearchSession
) -> tuple[Strategy, StepPrice]:
    """The strategy or a change of it with a shorter simulated step, and its price.

    solved: the choice of the search for that layout. Strategies without a pipeline or in chunks
    stay unchanged. Blocks are not moved between equal ranks, with halves from block to block, or
    with activations on the host. Ctrl-C and the time limit end it with the best so far.
    """
    layout, price_cache = strategy.layout, session.book_of(solved.layout, solved.choice)
    described = isinstance(session.prices, DescribedPrices)
    by_cuts = described or layout.virtual_stages > 1 or layout.pools
    if layout.mesh.pp == 1 or layout.chunked or not by_cuts:
        return strategy, price
    best, best_s = strategy, price.step_s
    try:
        for change in _changes(solved, session) if described else (session.prices.moved,):
            best, best_s = _climbed(best, best_s, change, price_cache, session)
    except (KeyboardInterrupt, OutOfTimeError):
        pass
    return (best, price_step(best, price_cache)) if best is not strategy else (strategy, price)


# Other strategies, and the ranks that differ.
Changes = Callable[[Strategy], Iterable[tuple[Strategy, tuple[int, ...]]]]


def _changes(solved: SolvedCandidate, session: SearchSession) -> tuple[Changes, ...]:
    """The changes of a described model's strategy."""
    columns = _other_columns(solved, session)
    others = partial(_with_other_columns, alternatives=columns, solved=solved)
    if session.table.stage_recompute is not None:
        return others, partial(_moved_under_a_rule, session=session)
    return others, _moved


def _climbed(
    strategy: Strategy,
    step_s: float,
    changes: Changes,
    price_cache: LayerPriceCache,
    session: SearchSession,
) -> tuple[Strategy, float]:
    """The strategy after all changes that made it faster, one by one, and its simulated step."""
    best, best_s = strategy, step_s
    best_costs = step_costs(strategy, price_cache)
    tried, climbing = 0, True
    while climbing:
        climbing = False
        for changed, ranks in changes(best):
            session.deadline.check()
            tried += 1
            costs = with_other_ranks(best_costs, changed, ranks, price_cache)
            changed_s = _step_below_s(changed, costs, best_s * (1 - WORTH_MOVING))
            if changed_s is not None and _fits(changed, ranks, price_cache, session):
                best, best_s = changed, changed_s
                best_costs = costs
                climbing = True
                break
            if tried >= MOST_TRIED:
                return best, best_s
    return best, best_s


def _step_below_s(strategy: Strategy, costs: StepCosts, limit_s: float) -> float | None:
    """Simulated seconds of the step, None where it is not below `limit_s`."""
    layout = strategy.layout
    if not layout.splits_backward and layout.schedule is not Schedule.CUSTOM:
        least_s = least_step_s(
            layout.num_micro_batches, costs.stages, costs.tail_s, ahead=layout.recomputes_ahead
        )
        if least_s >= limit_s:
            return None
    step_s = simulated_step_s(strategy, costs)
    return step_s if step_s < limit_s else None


def _other_columns(solved: SolvedCandidate, session: SearchSession) -> list[list[StageColumn]]:
    """By rank, equally large columns about as fast as the chosen one. Raises OutOfTimeError.

    A column is as fast where it takes about as long alone, or where the step is shorter with it and
    no tail behind the first rank: the ranks before may pass back their last micro-batch meanwhile.
    """
    layout, passes = solved.layout, solved.layout.num_micro_batches
    columns, share = solved.choice.columns, bubble_share(layout, session.price_cache)

    def hidden_tails_s(rank: int, column: StageColumn) -> float:
        changed = (*columns[:rank], column, *columns[rank + 1 :])
        times_s, first_s = [each.time_s for each in changed], changed[0].tail_s
        return closed_form_s(times_s, (first_s,), passes, share)

    alternatives = []
    for rank, chosen in enumerate(in_time(columns, session.deadline)):
        table = session.described.table_of(layout, rank)
        every = rank_columns(rank, layout, table).fastest(chosen.num_blocks, session.limit_bytes)
        slowest_s = chosen.alone_s(passes) * (1 + NEAR)
        alternatives.append(
            [
                column
                for column in every
                if column != chosen
                and interchangeable_ends(rank, layout, column, chosen)
                and (
                    column.alone_s(passes) < slowest_s
                    or hidden_tails_s(rank, column) < solved.choice.step_s
                )
            ]
        )
    return alternatives


def _with_other_columns(
    strategy: Strategy,
    alternatives: Sequence[Sequence[StageColumn]],
    solved: SolvedCandidate,
) -> Iterator[tuple[Strategy, tuple[int, ...]]]:
    """The strategy with one rank's stages from a column of `alternatives`.

    Ranks whose number of blocks differs from their column are left out.
    """
    layout, columns = strategy.layout, solved.choice.columns
    for rank, chosen in enumerate(columns):
        held = sum(len(_blocks(strategy.stages[stage])) for stage in layout.stages_of(rank))
        if held != chosen.num_blocks:
            continue
        for column in alternatives[rank]:
            made = to_strategy(layout, (*columns[:rank], column, *columns[rank + 1 :]))
            stages = list(strategy.stages)
            for stage in layout.stages_of(rank):
                stages[stage] = made.stages[stage]
            yield replace(strategy, stages=tuple(stages)), (rank,)


def _fits(
    strategy: Strategy, ranks: Sequence[int], price_cache: LayerPriceCache, session: SearchSession
) -> bool:
    return all(
        rank_memory(strategy, rank, price_cache).total
        <= min(session.limit_bytes, prices_at(strategy.layout, rank, price_cache).most_bytes)
        for rank in ranks
    )


def _moved(strategy: Strategy) -> Iterator[tuple[Strategy, tuple[int, int]]]:
    """The strategy with one block on another stage, near stages first, and the ranks of both.

    The block gets the choice of its new neighbours.
    """
    layout, num_stages = strategy.layout, len(strategy.stages)
    on_host = any(choice.on_host for stage in strategy.stages for choice in stage)
    if layout.equal_ranks or layout.tp_overlap == 3 or on_host:
        return
    pairs = [
        (here, there) for here in range(num_stages) for there in range(num_stages) if here != there
    ]
    for here, there in sorted(pairs, key=lambda pair: abs(pair[0] - pair[1])):
        blocks = _blocks(strategy.stages[here])
        if len(blocks) > 1 and _blocks(strategy.stages[there]):
            stages = list(strategy.stages)
            stages[here] = _without_one(stages[here], blocks[-1])
            stages[there] = _with_one_more(stages[there])
            yield (
                replace(strategy, stages=tuple(stages)),
                (layout.rank_of(here), layout.rank_of(there)),
            )


def _moved_under_a_rule(
    strategy: Strategy, session: SearchSession
) -> Iterator[tuple[Strategy, tuple[int, int]]]:
    """The strategy with one block on another stage, both stages on their fastest columns.

    A rule for the recompute of the stages gives a stage of another length other recompute.
    """
    ranks = range(len(strategy.stages))
    counts = [len(_blocks(stage)) for stage in strategy.stages]
    pairs = [(here, there) for here in ranks for there in ranks if here != there]
    for here, there in sorted(pairs, key=lambda pair: abs(pair[0] - pair[1])):
        if counts[here] == 1:
            continue
        stages = list(strategy.stages)
        for rank, count in ((here, counts[here] - 1), (there, counts[there] + 1)):
            stages[rank] = _fastest_stage(rank, count, strategy, session)
        if all(stages):
            yield replace(strategy, stages=tuple(stages)), (here, there)


def _fastest_stage(
    rank: int, num_blocks: int, strategy: Strategy, session: SearchSession
) -> tuple[LayerChoice, ...]:
    """The fastest stage of a number of blocks whose ends match the present ones, or nothing."""
    layout = strategy.layout
    ends = [choice for choice in strategy.stages[rank] if choice.kind.role is not LayerKind.BLOCK]
    columns = [
        column
        for column in rank_columns(rank, layout, session.described.table_of(layout, rank)).fastest(
            num_blocks, session.limit_bytes
        )
        if all(_alike_end(column, choice, layout) for choice in ends)
    ]
    if not columns:
        return ()
    fastest = min(columns, key=lambda column: column.alone_s(layout.num_micro_batches))
    return to_strategy(layout, (fastest,) * layout.mesh.pp).stages[rank]


def _alike_end(column: StageColumn, choice: LayerChoice, layout: ParallelLayout) -> bool:
    """True if embedding or head of a column is sharded over both axes as in the present stage."""
    sharding = dict(column.ends).get(choice.kind, layout.sharding)
    return (column.zero > 0) == (choice.zero > 0) and sharding == layout.sharding_of(choice)


def _blocks(stage: Sequence[LayerChoice]) -> list[LayerChoice]:
    return [choice for choice in stage if choice.kind.role is LayerKind.BLOCK]


def _without_one(stage: tuple[LayerChoice, ...], block: LayerChoice) -> tuple[LayerChoice, ...]:
    last = len(stage) - 1 - stage[::-1].index(block)
    return stage[:last] + stage[last + 1 :]


def _with_one_more(stage: tuple[LayerChoice, ...]) -> tuple[LayerChoice, ...]:
    block = _blocks(stage)[-1]
    last = len(stage) - 1 - stage[::-1].index(block)
    return stage[: last + 1] + stage[last:]
