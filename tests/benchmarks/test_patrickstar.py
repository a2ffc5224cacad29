"""The benchmark of PatrickStar's published figures: closed forms, chunk sizes and evictions."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.papers import patrickstar, patrickstar_published
from benchmarks.papers.patrickstar_published import (
    MEMBERS,
    Largest,
    Rules,
    largest_published,
    num_parameters,
    packed,
    searched_size,
    states_fit,
)
from parplan.costmodels.chunks.chunk_layout import SizedTensor, pack
from parplan.profiles.models.model_catalog import load_model

STATED = {
    ("v100-32gb", 8): "18B",
    ("a100-40gb", 8): "68B",
    ("a100-40gb", 32): "175B",
}  # docs/patrickstar.md


def test_the_largest_models_are_those_of_the_published_figures():
    labels = {(each.gpu, each.gpus): each.label for each in largest_published()}

    assert STATED.items() <= labels.items()
    assert {gpus: label for (gpu, gpus), label in labels.items() if gpu == "v100-32gb"} == {
        1: "12B",
        2: "12B",
        4: "12B",
        8: "18B",
    }


def test_every_figure_belongs_to_a_size():
    for labels, figures in (
        (patrickstar_published.V100, patrickstar_published.PATRICKSTAR_V100),
        (patrickstar_published.A100, patrickstar_published.PATRICKSTAR_A100),
        (patrickstar_published.A100, patrickstar_published.DEEPSPEED_A100),
    ):
        assert all(len(row) <= len(labels) for row in figures.values())


@pytest.mark.parametrize(("label", "size"), [("10B", 128), ("20B", 288), ("68B", 384)])
def test_utilisation_is_that_of_packing_every_tensor(label, size):
    model = load_model(MEMBERS[label]).spec
    block = patrickstar_published.tensors_of(model)
    every = [
        SizedTensor(f"{number}.{tensor.name}", tensor.elements)
        for number in range(model.num_layers)
        for tensor in block
    ]

    chunks = pack(every, size << 20)
    filled_up = -(-chunks.num_chunks // 8) * 8

    assert packed(model, size << 20, 8) == chunks.used_elements / (
        filled_up * chunks.chunk_elements
    )


@pytest.mark.parametrize(
    "each",
    [
        each
        for each in largest_published()
        if (each.gpu, each.gpus) in (("v100-32gb", 8), ("a100-40gb", 8))
    ],
)
def test_the_closed_form_is_within_15_percent_of_the_largest_on_8_gpus(each):
    label = num_parameters(load_model(MEMBERS[each.label]).spec)

    assert patrickstar.closed_largest(each, 0.8) == pytest.approx(label, rel=0.15)


def test_of_the_published_shapes_175b_is_the_largest_that_the_closed_form_fits_on_32_gpus():
    cluster = patrickstar.cluster_of("a100-40gb", 32)
    fits = []
    for name in ("gpt-175b-s1024", "gpt-220b"):
        model = load_model(name).spec
        size, utilisation = searched_size(model, 32)
        fits.append(states_fit(model, cluster, Rules(), 8, utilisation, size))

    assert fits == [True, False]


def test_less_usable_memory_holds_less():
    each = Largest(gpu="a100-40gb", gpus=8, label="68B")

    assert patrickstar.closed_largest(each, 0.8) < patrickstar.closed_largest(each, 0.9)


@pytest.mark.slow
def test_opt_moves_no_more_than_lru_and_fifo_and_room_never_moves_more():
    table = patrickstar.eviction("gpt-1b", rooms=(0, 0.25))
    moved = {row[:3]: [float(cell) for cell in row[3:]] for row in table.rows}

    for (schedule, number, _), values in moved.items():
        assert all(
            best <= value
            for best, value in zip(moved[schedule, number, "opt"], values, strict=True)
        )
        assert values == sorted(values, reverse=True)
    assert len(moved) == 12


def test_the_planners_chunks_are_better_used_than_those_of_patrickstars_search():
    shares = [
        (float(row[-3][:-2]), float(row[-1][:-2]))
        for row in patrickstar.chunk_sizes(sizes=(64,)).rows
    ]

    assert all(used > 99.9 for _, used in shares)
    assert all(used > searched for searched, used in shares)


def test_waiting_for_copies_is_never_faster_and_the_planner_keeps_to_the_rules():
    plan = patrickstar.planned(load_model("gpt-4b").spec, "v100-32gb", 1, 4, 0.8)

    assert patrickstar.waited_s(plan) > plan.predicted.step_time_s.value
    assert (plan.mesh.pp, plan.mesh.tp, plan.pipeline.num_micro_batches) == (1, 1, 1)
    assert max(stage.total for stage in plan.predicted.memory_gib) <= 0.8 * 31.74


def test_the_command_prints_json_alone():
    body = json.loads(
        CliRunner()
        .invoke(patrickstar.main, ["--part", "chunks", "--json"], catch_exceptions=False)
        .stdout
    )

    assert body["kind"] == "analytic"
    assert [table["part"] for table in body["tables"]] == ["chunks"]
