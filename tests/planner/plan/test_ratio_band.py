"""The band of a ratio comes from pairs of measured runs of one grid, and from what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.prediction import Band, ErrorBand
from parplan.planner.plan.ratio_band import (
    GridRun,
    differences,
    pairs_of,
    ratio_share,
    shape_of,
    shipped_ratio_bands,
)

SHAPE = shape_of(Mesh(pp=2, dp=4, tp=1), 2)
RUN = GridRun(
    id="fast",
    experiment="made",
    grid="one",
    traits=("stack megatron-core", "chip Ampere"),
    shape=SHAPE,
    predicted_s=1.0,
    deviation=0.2,
)


def test_a_pair_is_the_predicted_fastest_run_and_another_of_its_grid():
    other = replace(
        RUN, id="slow", shape=shape_of(Mesh(pp=1, dp=4, tp=2), 2), predicted_s=2.0, deviation=0.5
    )
    alone = replace(RUN, id="alone", grid="another")
    busy = [replace(RUN, id=name, grid="") for name in ("busy", "busier")]

    (pair,) = pairs_of([other, RUN, alone, *busy])

    assert pair.id == "fast slow"
    assert pair.deviation == pytest.approx((2.0 * 1.5) / (1.0 * 1.2) / 2.0 - 1)
    assert pair.traits == (*RUN.traits, "another tp", "another pp")


def test_runs_that_are_off_alike_have_a_ratio_as_predicted():
    (pair,) = pairs_of([RUN, replace(RUN, id="slow", predicted_s=1.3)])

    assert pair.deviation == pytest.approx(0.0)


def test_the_shipped_band_is_that_of_the_plan_and_of_what_differs():
    some = Band(share=0.5, rows=1, stack="all", like=dict.fromkeys(RUN.traits, 1))
    band = ErrorBand(time=some, memory=some)
    other = shape_of(Mesh(pp=2, dp=4, tp=1), 4)

    assert ratio_share(band, SHAPE, SHAPE) == shipped_ratio_bands().share(RUN.traits)
    assert ratio_share(band, SHAPE, other) == shipped_ratio_bands().share(
        (*RUN.traits, *differences(SHAPE, other))
    )


def test_the_shipped_table_has_pairs_of_every_kind_of_difference():
    rows_of = shipped_ratio_bands().rows_of

    assert min(rows_of[f"another {name}"] for name in ("tp", "pp", "micro-batch")) > 100
