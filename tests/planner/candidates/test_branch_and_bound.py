"""The bound of a search that its time ends, and the answers that are worth a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
    BranchWatch,
    best_of,
    branch_and_bound,
)
from parplan.planner.objective import Objective
from parplan.profiles.errors import OutOfTimeError


@dataclass(frozen=True)
class Answer:
    value: float
    bound: float


@pytest.mark.parametrize(
    ("values", "replayed"),
    [
        pytest.param((10.0, 10.9, 11.1), 2, id="seconds"),
        pytest.param((-10.0, -9.1, -8.9), 2, id="negative-redundant-bytes"),
        pytest.param((0.0, 0.1), 1, id="none"),
    ],
)
def test_answers_within_a_tenth_of_the_best_are_replayed(
    values: tuple[float, ...], replayed: int
) -> None:
    answers = tuple(Answer(value, value) for value in values)

    outcome = BranchOutcome(answers, values[0], finished=True)

    assert outcome.to_replay == answers[:replayed]


def test_a_search_whose_time_ends_before_all_layouts_are_listed_proves_its_floor_alone() -> None:
    incumbent = Answer(5.0, 5.0)

    def listed() -> Iterator[tuple[float, ParallelLayout]]:
        raise OutOfTimeError("over", hint="")
        yield

    outcome = branch_and_bound(
        listed(),
        lambda *_: None,
        best_of,
        BranchWatch(objective=Objective.MEMORY, left_s=lambda: 1.0, on_progress=None),
        incumbents=(incumbent,),
        floor=-3.0,
    )

    assert outcome.solved == (incumbent,)
    assert (outcome.bound, outcome.finished) == (-3.0, False)
