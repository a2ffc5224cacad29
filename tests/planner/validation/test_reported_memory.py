"""A row's memory figure: which one it names, and the pipeline rank it is of."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.planner.validation.reported_memory import (
    Figure,
    figure_of,
    measured_as,
    predicted_gib,
)
from parplan.profiles.units import GIB

OUTSIDE = {"communicators": 1 * GIB, "context": 0.5 * GIB}
STATES = StateBytes(2 * GIB, 2 * GIB, 4 * GIB)
FIRST = RankMemory(
    states=STATES, activations=8 * GIB, temporaries=1 * GIB, allocator_reserve=2 * GIB, **OUTSIDE
)
LAST = RankMemory(
    states=STATES, activations=1 * GIB, temporaries=5 * GIB, allocator_reserve=1 * GIB, **OUTSIDE
)


@pytest.mark.parametrize(
    ("memory_kind", "figure"),
    [
        ("torch max_memory_allocated, max over ranks", Figure.ALLOCATED),
        ("peak_allocated_memory_gib", Figure.ALLOCATED),
        ("torch max allocated (converted from GB=1e9, as labelled)", Figure.ALLOCATED),
        ("Peak Memory Active (GiB)", Figure.ALLOCATED),
        (
            '"Memory Usage ... GB" as printed (nanotron peak, rank of the output PP stage)',
            Figure.ALLOCATED,
        ),
        ("max over GPUs of torch max_memory_reserved (MiB/1024)", Figure.RESERVED),
        ('as printed "Peak Memory (GB)" - torchtitan prints GiB', Figure.RESERVED),
        ("nvidia-smi rounded GB", Figure.DEVICE),
        ("GPU memory GB as printed (tool unspecified)", Figure.DEVICE),
        ("allocated-last-stage", Figure.ALLOCATED),
        ("OOM", Figure.DEVICE),
        ("unspecified", Figure.DEVICE),
        ("", Figure.DEVICE),
    ],
)
def test_the_figure_is_read_off_the_cell(memory_kind, figure):
    assert figure_of(memory_kind) is figure


@pytest.mark.parametrize(
    ("figure", "expected_gib"),
    [(Figure.ALLOCATED, 17.0), (Figure.RESERVED, 19.0), (Figure.DEVICE, 20.5)],
)
def test_each_figure_counts_more_than_the_one_before(figure, expected_gib):
    assert measured_as(FIRST, figure) == expected_gib * GIB


@pytest.mark.parametrize(
    "memory_kind",
    [
        "torch max_memory_allocated on the logging rank (last PP stage rank writes tensorboard)",
        "allocated-last-stage",
    ],
)
def test_a_row_of_the_last_rank_is_compared_with_the_last_rank(memory_kind):
    assert predicted_gib((FIRST, LAST), memory_kind) == 14.0


def test_the_fullest_rank_counts_everywhere_else():
    assert predicted_gib((FIRST, LAST), "torch max_memory_allocated, max over ranks") == 17.0
    assert predicted_gib((FIRST, LAST), "nvidia-smi") == 20.5
