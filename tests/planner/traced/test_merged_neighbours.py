"""Cuts by merging neighbours: wide cuts go, equal ones stay, and no pair could still gain."""

from __future__ import annotations

from random import Random

import pytest

from parplan.planner.traced.boundary_values import Values
from parplan.planner.traced.merged_neighbours import merged_neighbours
from parplan.planner.traced.repeated_blocks import repeated_blocks, units
from parplan.planner.traced.shards import Cutting, CutWay, cut_at, shard
from parplan.profiles.models.traced_model import TracedModel
from tests.helpers.traced_models import join, linear, model_of, traced_spec, value
from tests.planner.traced.test_shards import GPT, TRAINING

MERGE = Cutting(way=CutWay.MERGE)


def of_widths(widths: list[int]) -> TracedModel:
    """Returns a chain of linears that give tensors of these widths."""
    operators, x = [], value("batch_x")
    for number, width in enumerate(widths):
        operators.append(linear(f"l{number}", x, f"y{number}", width))
        x = value(f"y{number}", width)
    return model_of(*operators)


def bounds_of(model: TracedModel, splits: tuple[int, ...] = ()) -> list[int]:
    values = Values(model, units(model, repeated_blocks(model)))
    return merged_neighbours(values, values.legal_cuts(), splits)


@pytest.mark.parametrize(
    ("widths", "bounds"),
    [
        ([8, 8, 8, 8], [0, 1, 2, 3, 4]),  # equal cuts stay
        ([8, 32, 8, 32, 8, 8], [0, 1, 3, 5, 6]),  # the wide ones go
        ([8, 16, 32, 16, 8, 8], [0, 1, 5, 6]),
        ([32, 16, 8, 16, 32], [0, 3, 5]),  # the ends have only one side
    ],
)
def test_wide_cuts_go_and_equal_cuts_stay(widths, bounds):
    assert bounds_of(of_widths(widths)) == bounds


def test_a_split_point_stays_however_wide():
    assert bounds_of(of_widths([8, 32, 8, 32, 8, 8]), (2,)) == [0, 1, 2, 3, 5, 6]


def test_a_value_that_passes_by_does_not_count():
    operators = [
        linear("a", value("batch_x"), "y0"),
        linear("b", value("y0"), "y1", 32),
        linear("c", value("y1", 32), "y2"),
        join("d", (value("y2"), value("y0")), "y3"),
        linear("e", value("y3"), "y4"),
        join("f", (value("y4"), value("y0")), "loss"),
    ]

    # b, c and d read y0 once together; e, by which it passes, stays beside f
    assert bounds_of(model_of(*operators)) == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("seed", range(8))
def test_no_pair_that_is_left_gains_by_joining(seed):
    chance = Random(seed)
    widths = [chance.choice((8, 16, 24, 32)) for _ in range(12)]
    kept = bounds_of(of_widths(widths))

    def sides(first: int, end: int) -> tuple[int, int]:
        given = widths[end - 1] if end < len(widths) else widths[first - 1]
        return (widths[first - 1] if first else given), given

    for first, cut, end in zip(kept, kept[1:], kept[2:], strict=False):
        assert sum(sides(first, end)) >= max(sum(sides(first, cut)), sum(sides(cut, end)))


def test_a_gpt_has_the_shards_of_the_quota_but_for_its_last_norm():
    model = traced_spec(GPT, TRAINING)

    merged, walked = shard(model, MERGE), shard(model)

    assert len(merged.shards) == len(walked.shards)
    assert [each.name for each in merged.shards[:8]] == [each.name for each in walked.shards[:8]]
    assert merged.shards[8].name == "h.3.ln_2 to head.norm"


def test_a_model_is_cut_again_where_it_was_cut_and_nowhere_else():
    model = of_widths([8, 32, 8, 32, 8, 8])
    merged = shard(model, MERGE)

    again = cut_at(model, [each.first for each in merged.shards])

    assert again is not None
    assert again.shards == merged.shards
    assert cut_at(model, [0, 3, 2]) is None
    assert cut_at(model, [1, 2]) is None
