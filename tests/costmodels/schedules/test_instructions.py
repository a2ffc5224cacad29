"""Instruction lists have every message once at each end, and messages that meet are exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from parplan.costmodels.schedules.action_lists import action_lists
from parplan.costmodels.schedules.actions import ActionKind, orders_of, placement_of
from parplan.costmodels.schedules.instructions import (
    Exchange,
    Instruction,
    Message,
    StagePass,
    instruction_lists,
)
from parplan.costmodels.schedules.schedule import Schedule, csv_rows, legal
from parplan.costmodels.schedules.simulator import StageCost, run_lists
from tests.helpers.cases import of_every

CASES = [
    (csv_rows(schedule, p, m, v),)
    for schedule, p, m, v in product(Schedule, (2, 3, 5), (1, 4, 6, 9), (1, 2, 3))
    if schedule is not Schedule.CUSTOM and legal(schedule, p, m, v) is None
]
CASES.append(  # unequal stages of a custom V: a rank is its own neighbour
    (("0F0,3F0,3I0,3W0,0B0", "1F0,2F0,2B0,1B0"),)
)


def messages(instruction: Instruction) -> tuple[Message, ...]:
    if isinstance(instruction, Exchange):
        return instruction.send, instruction.receive
    return (instruction,) if isinstance(instruction, Message) else ()


def name(rank: int, message: Message) -> tuple[int, int, bool, int, int]:
    """Sender, receiver, kind, the stage that makes it and micro-batch, the same at both ends."""
    ends = (rank, message.peer) if message.sends else (message.peer, rank)
    back = -1 if message.gradient else 1
    maker = message.stage if message.sends else message.stage - back
    return (*ends, message.gradient, maker, message.micro_batch)


def exchanges(rows: Sequence[str]) -> list[int]:
    return [sum(isinstance(each, Exchange) for each in row) for row in instruction_lists(rows)]


@of_every(CASES)
def test_the_computations_are_those_of_the_action_list_in_its_order(rows):
    for row, instructions in zip(rows, instruction_lists(rows), strict=True):
        computed = [each for each in instructions if isinstance(each, StagePass)]
        assert [f"{each.stage}{each.work}{each.micro_batch}" for each in computed] == row.split(",")


@of_every(CASES)
def test_every_message_is_sent_once_and_received_once(rows):
    sent, received = Counter(), Counter()
    for rank, row in enumerate(instruction_lists(rows)):
        for message in (message for each in row for message in messages(each)):
            (sent if message.sends else received)[name(rank, message)] += 1

    assert sent == received
    assert set(sent.values()) <= {1}


@of_every(CASES)
def test_no_rank_waits_for_ever_where_every_send_waits_for_its_receiver(rows):
    """Each rank runs its list; a message needs both ends at it, an exchange both ends at it."""
    rest = {rank: list(reversed(row)) for rank, row in enumerate(instruction_lists(rows))}
    moved = True
    while moved:
        moved = False
        for rank, row in rest.items():
            while row and isinstance(row[-1], StagePass):
                row.pop()
                moved = True
            if not row:
                continue
            here = messages(row[-1])
            other = rest[here[0].peer]
            there = messages(other[-1]) if other else ()
            if {name(rank, each) for each in here} == {name(here[0].peer, each) for each in there}:
                row.pop()
                other.pop()
                moved = True

    assert not any(rest.values())


@of_every(CASES)
def test_a_computation_comes_after_the_messages_that_it_reads(rows):
    last = max(stage for stages in placement_of(rows) for stage in stages)
    for row in instruction_lists(rows):
        stages = {each.stage for each in row if isinstance(each, StagePass)}
        received: set[tuple[bool, int, int]] = set()
        for each in row:
            if isinstance(each, StagePass):
                if each.work is ActionKind.FORWARD and each.stage - 1 not in {-1, *stages}:
                    assert (False, each.stage, each.micro_batch) in received
                if each.work in "BIR" and each.stage != last and each.stage + 1 not in stages:
                    assert (True, each.stage, each.micro_batch) in received
            received |= {
                (message.gradient, message.stage, message.micro_batch)
                for message in messages(each)
                if not message.sends
            }


def with_next(schedule: Schedule, rank: int, num_ranks: int, m: int) -> int:
    """Exchanges of a rank with the next one, as the module's docstring counts them."""
    after = num_ranks - 1 - rank
    if not after:
        return 0
    if schedule is Schedule.SCP and after <= 3:
        return m - 3
    if schedule is Schedule.LAST_NO_RECOMPUTE and after == 1:
        return max(0, m - 2)
    return max(0, m - after)


KIN = (
    Schedule.ONE_F_ONE_B,
    Schedule.EARLY_RECOMPUTE,
    Schedule.LAST_NO_RECOMPUTE,
    Schedule.SCP,
)


@of_every([*product(KIN, (2, 3, 4, 7), (1, 2, 4, 7, 12))])
def test_1f1b_and_its_kin_have_the_closed_number_of_exchanges(schedule, num_ranks, m):
    if legal(schedule, num_ranks, m, 1) is not None:
        assert schedule is Schedule.SCP
        return
    ahead = [with_next(schedule, rank, num_ranks, m) for rank in range(num_ranks)]

    assert exchanges(csv_rows(schedule, num_ranks, m)) == [
        here + before for here, before in zip(ahead, [0, *ahead], strict=False)
    ]


def test_gpipe_sends_every_message_alone():
    assert exchanges(csv_rows(Schedule.GPIPE, 4, 8)) == [0] * 4


def test_scp_unpairs_the_exchanges_that_merak_unpairs():
    """The first two of the last stage, the first ones of the two stages before it."""
    rows = instruction_lists(csv_rows(Schedule.SCP, 4, 6))

    def gradients_alone(rank: int) -> list[int]:
        return [
            each.micro_batch
            for each in rows[rank]
            if isinstance(each, Message) and each.gradient and not each.sends
        ]

    plain = instruction_lists(csv_rows(Schedule.ONE_F_ONE_B, 4, 6))
    alone_in_1f1b = {
        rank: [
            each.micro_batch
            for each in plain[rank]
            if isinstance(each, Message) and each.gradient and not each.sends
        ]
        for rank in range(3)
    }
    assert gradients_alone(2) == [0, 1, *alone_in_1f1b[2]]
    assert gradients_alone(1) == [0, *alone_in_1f1b[1]]
    assert gradients_alone(0) == alone_in_1f1b[0]


def costs(num_ranks: int) -> list[list[StageCost]]:
    """Unequal stages, with one transfer time for both directions of a cut."""
    cut_s = [0.0, *(0.1 + 0.07 * rank for rank in range(num_ranks - 1)), 0.0]
    return [
        [
            StageCost(
                forward_s=1.0 + 0.3 * (rank % 3),
                backward_s=2.0 + 0.5 * (rank % 2),
                recompute_s=0.0,
                receive_forward_s=cut_s[rank],
                receive_backward_s=cut_s[rank + 1],
                stash_bytes=0.0,
            )
        ]
        for rank in range(num_ranks)
    ]


def rendezvous_s(rows: Sequence[str], stages: Sequence[Sequence[StageCost]]) -> float:
    """Seconds of a step in which both ends of an exchange begin it and leave it together."""
    lists = instruction_lists(rows)
    clock_s = [0.0] * len(lists)
    rest = [list(reversed(row)) for row in lists]
    sent_s: dict[tuple[int, int, bool, int, int], float] = {}
    ready_s: dict[tuple[int, bool, int], tuple[float, float]] = {}

    def receive_s(rank: int, message: Message) -> float:
        cost = stages[rank][0]
        return cost.receive_backward_s if message.gradient else cost.receive_forward_s

    def step(rank: int) -> bool:
        each = rest[rank][-1]
        if isinstance(each, Exchange):
            peer = each.send.peer
            if not (rest[peer] and isinstance(rest[peer][-1], Exchange)):
                return False
            if rest[peer][-1].send.peer != rank:
                return False
            together_s = max(clock_s[rank], clock_s[peer])
            clock_s[rank] = together_s + receive_s(rank, each.receive)
            clock_s[peer] = together_s + receive_s(peer, rest[peer][-1].receive)
            rest[peer].pop()
        elif isinstance(each, Message):
            key = name(rank, each)
            if each.sends:
                sent_s[key] = clock_s[rank]
            elif key not in sent_s:
                return False
            else:  # waited for where it is read
                place = (each.stage, each.gradient, each.micro_batch)
                ready_s[place] = sent_s[key], receive_s(rank, each)
        else:
            gradient = each.work is not ActionKind.FORWARD
            place = (each.stage, gradient, each.micro_batch)
            if place in ready_s:
                arrived_s, transfer_s = ready_s[place]
                clock_s[rank] = max(clock_s[rank], arrived_s) + transfer_s
            cost = stages[rank][0]
            clock_s[rank] += cost.backward_s if gradient else cost.forward_s
        rest[rank].pop()
        return True

    while any(rest):
        assert any(step(rank) for rank in range(len(rest)) if rest[rank])
    return max(clock_s)


@pytest.mark.parametrize(("num_ranks", "m"), [(2, 4), (4, 6), (5, 12), (6, 3)])
def test_an_exchange_is_priced_as_one_wait_of_both_ranks(num_ranks, m):
    """A simulated step has the length of one whose exchanges begin and end at both ranks at once.

    Each of them therefore pays one transfer for an exchange of two messages.
    """
    rows = csv_rows(Schedule.ONE_F_ONE_B, num_ranks, m)
    stages = costs(num_ranks)

    simulated = run_lists(action_lists(orders_of(rows), placement_of(rows), m), stages)

    assert rendezvous_s(rows, stages) == pytest.approx(simulated.step_s, rel=1e-12)


def test_both_ends_of_an_exchange_name_the_same_two_messages():
    lists = instruction_lists(csv_rows(Schedule.ONE_F_ONE_B, 3, 5))

    def pairs(rank: int) -> Iterator[frozenset[tuple[int, int, bool, int, int]]]:
        for each in lists[rank]:
            if isinstance(each, Exchange):
                yield frozenset(name(rank, message) for message in messages(each))

    seen = Counter(pair for rank in range(3) for pair in pairs(rank))
    assert set(seen.values()) == {2}
