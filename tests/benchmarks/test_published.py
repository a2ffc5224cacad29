"""Published configurations cost what `plan estimate` says; the first one is the search's plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.prices.published_ranking import (
    PUBLISHED,
    Published,
    as_published,
    frames_of,
    peak_bytes,
    place,
    ranked,
    request_of,
)
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.units import gib
from tests.helpers.planning import estimate_plan, find_plan


@pytest.fixture(scope="module")
def request_20b():
    return request_of("gpt-20b", 64, "h100-80gb", 256)


@pytest.fixture(scope="module")
def small():
    return request_of("gpt-2.5b", 2, "h100-80gb", 8)


@pytest.fixture(scope="module")
def candidates(small):
    return ranked(small)


def named(name: str) -> Published:
    return next(row for row in PUBLISHED if row.name == name)


def question_of(request):
    price_cache = request.price_cache
    return price_cache.model, price_cache.machine.cluster, price_cache.training


@pytest.mark.parametrize(
    ("name", "mesh", "schedule", "virtual_stages", "micro_batch_size", "num_micro_batches"),
    [
        pytest.param(
            "NeMo gpt3-20b",
            Mesh(pp=1, dp=32, tp=2),
            Schedule.ONE_F_ONE_B,
            1,
            2,
            4,
            id="its-own-model",
        ),
        pytest.param(
            "NeMo nemotron-22b, 2024",
            Mesh(pp=4, dp=8, tp=2),
            Schedule.INTERLEAVED,
            11,
            2,
            16,
            id="one-block-a-virtual-stage",
        ),
    ],
)
def test_a_published_configuration_costs_what_an_estimate_says(
    request_20b,
    name,
    mesh,
    schedule,
    virtual_stages,
    micro_batch_size,
    num_micro_batches,
):
    layout = ParallelLayout(
        mesh=mesh,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=True,
    )

    predicted = estimate_plan(*question_of(request_20b), layout, zero=1).predicted

    assert frames_of(named(name), request_20b) == [layout]
    price = as_published(layout, request_20b.price_cache)
    assert price.step_s == pytest.approx(predicted.step_time_s.value, rel=1e-5)
    assert gib(peak_bytes(price)) == pytest.approx(
        max(stage.total for stage in predicted.memory_gib), abs=1e-3
    )


def test_a_row_without_a_micro_batch_stands_for_all_of_its_mesh(request_20b):
    layouts = frames_of(named("Megatron-LM 32B"), request_20b)

    assert [layout.micro_batch_size for layout in layouts] == [1, 2, 4, 8, 16, 32]
    assert {(layout.mesh.tp, layout.mesh.pp, layout.sequence_parallel) for layout in layouts} == {
        (8, 1, True)
    }


@pytest.mark.slow
def test_the_first_candidate_is_the_plan_of_the_search(small, candidates):
    plan = find_plan(*question_of(small))

    assert candidates[0].step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-3)
    assert candidates[0].layout.mesh == plan.mesh
    assert all(
        peak_bytes(candidate.price) <= small.limit_bytes * (1 + 1e-9) for candidate in candidates
    )


def test_a_row_ranks_behind_the_candidates_that_are_faster(small, candidates):
    row = replace(named("NeMo gpt3-20b"), num_layers=small.price_cache.model.num_layers)

    placing = place(row, candidates, small)

    assert placing is not None
    assert placing.fits
    faster = [
        candidate
        for candidate in candidates
        if candidate.step_s < placing.price.step_s and candidate.layout != placing.layout
    ]
    assert placing.rank == len(faster) + 1
    assert (
        placing.mesh_rank
        == len({candidate.layout.mesh for candidate in faster} - {placing.layout.mesh}) + 1
    )
    assert placing.best is not None
    assert placing.best.step_s <= placing.price.step_s * (1 + 1e-9)
    assert candidates[placing.best_rank - 1] is placing.best


def test_a_row_that_is_not_legal_has_no_place(small, candidates):
    assert place(named("Megatron-LM 32B"), candidates, small) is None


def test_every_row_names_its_source_and_is_legal_for_its_size_class(request_20b):
    assert all("@" in row.citation for row in PUBLISHED)
    assert all(frames_of(row, request_20b) for row in PUBLISHED)
