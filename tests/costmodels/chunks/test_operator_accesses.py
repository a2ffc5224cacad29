"""Chunk schedules whose accesses are operators: closed forms, and the same by blocks."""

from __future__ import annotations

from itertools import product

import pytest

from parplan.costmodels.chunks.chunk_operations import ChunkAction
from parplan.costmodels.chunks.chunk_time import stream_costs
from parplan.costmodels.chunks.copy_streams import run_streams
from parplan.costmodels.chunks.eviction import residencies
from parplan.costmodels.host.state_location import Access, Eviction
from parplan.costmodels.layers.recompute import Recompute
from tests.helpers.chunked import BOOKS, DEV, HOST, OPT, chunked, schedule, smallest_bytes

OPERATOR = Access.OPERATOR
PARTS = 4
GROUPS = 3  # of a block: attention, fc1, fc2


def by_operator(homes, **choices):
    return chunked(homes, access=OPERATOR, **choices)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("book", ["half", "mixed", "full"])
def test_whole_recompute_gathers_every_group_but_a_blocks_last_three_times(m, book):
    homes = (DEV, OPT, HOST, HOST)
    prices = BOOKS[book]

    made = schedule(by_operator(homes, dp=2, m=m), prices=prices)

    layout = made.groups[0].chunk_layout
    assert layout.num_groups == GROUPS
    group = layout.group_elements
    width = prices.training.precision.num_bytes
    # the first group of the first block is used last, and first by the next micro-batch
    gathers = m * len(homes) * (3 * GROUPS - 1) - (m - 1)
    assert made.moved(ChunkAction.GATHER) == gathers * width * group
    gradient = 2 if made.in_parameters else prices.training.gradient_precision.num_bytes
    assert made.moved(ChunkAction.REDUCE) == m * len(homes) * GROUPS * gradient * group
    assert len(made.moments) == m * len(homes) * (3 * PARTS - 1)


@pytest.mark.parametrize("m", [1, 3])
def test_without_recompute_the_turn_at_the_last_block_needs_no_gather(m):
    made = schedule(by_operator((HOST,) * 4, dp=2, m=m, recompute=Recompute.NONE))

    width = BOOKS["half"].training.precision.num_bytes
    group = made.groups[0].chunk_layout.group_elements
    # the last product of the last block is used forward and at once backward
    assert made.moved(ChunkAction.GATHER) == (m * (4 * 2 * GROUPS - 1) - (m - 1)) * width * group


def test_with_ample_room_every_chunk_of_the_host_comes_once():
    made = schedule(by_operator((DEV, HOST, HOST), dp=2, m=1), more=20.0)

    layout = made.groups[-1].chunk_layout
    assert made.in_bytes == layout.num_groups * layout.chunk_elements * 2


def test_opt_fetches_no_more_than_any_choice_over_the_accesses_of_operators():
    """Every sequence of evictions of a small device is tried."""
    again, back = [0, 1], [2, 1, 0]
    needs = [[group] for group in (0, 1, 2, *again, *back)]

    for places in (1, 2, 3):
        held = residencies(needs, [places] * len(needs), Eviction.OPT)
        least = min(_fetches(needs, places, choices) for choices in product(range(3), repeat=8))
        assert len(held) == least


def _fetches(needs, places, choices):
    here, fetched = [], 0
    for (group,), choice in zip(needs, choices, strict=True):
        if group not in here:
            fetched += 1
            if len(here) == places:
                here.pop(choice % places)
            here.append(group)
    return fetched


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.NONE])
@pytest.mark.parametrize("dp", [2, 4])
def test_operators_need_less_of_the_device_than_blocks(dp, recompute):
    homes = (HOST,) * 4
    fine, coarse = (
        smallest_bytes(chunked(homes, dp=dp, recompute=recompute, access=access), 0, BOOKS["half"])
        for access in (OPERATOR, Access.BLOCK)
    )

    group = schedule(by_operator(homes, dp=dp, recompute=recompute)).groups[0]
    block = sum(tensor.elements for tensor in group.chunk_layout.tensors) // len(homes)
    assert group.chunk_layout.group_elements < block / 2
    # parameters and gradients in 16 bits, of which fc1 is a third
    assert coarse - fine > 2 * (block - group.chunk_layout.group_elements)


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.NONE, Recompute.SELECTIVE])
def test_the_accesses_of_a_step_take_as_long_as_its_blocks(recompute):
    seconds = []
    for access in Access:
        strategy = chunked((DEV, HOST, HOST), dp=2, m=2, recompute=recompute, access=access)
        made = schedule(strategy, more=1.0)
        costs = stream_costs(strategy, 0, made, BOOKS["half"])
        seconds.append(run_streams(made, costs).compute_s)

    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)


def test_every_access_counts_no_more_than_the_budget_and_no_less_than_its_group():
    made = schedule(by_operator((DEV, OPT, HOST), dp=2, m=2))

    group_bytes = 2 * made.groups[0].chunk_layout.group_elements
    assert max(moment.device_bytes for moment in made.moments) <= made.device_bytes
    assert all(moment.chunk_bytes >= group_bytes for moment in made.moments)
