"""The table of schemes and its formulas fit 80 columns, and its document has both."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from parplan.planner.schemes.every_scheme import SCHEMES, priced_schemes
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL
from parplan.report.plans.scheme_table import print_formulas, print_schemes, schemes_document
from tests.helpers.planning import request

REQUEST = request(
    load_model("gpt-20b").spec,
    with_gpus(load_cluster("a100-80gb"), 64),
    TrainingSpec(global_batch_size=1024, seq_length=2048, stack=NEUTRAL),
)


@pytest.fixture(scope="module")
def priced():
    return list(priced_schemes(REQUEST, 4))


def lines_of(print_it):
    out = io.StringIO()
    print_it(Console(file=out, width=80))
    return out.getvalue().splitlines()


@pytest.mark.slow
def test_the_table_has_a_line_for_each_scheme_within_80_columns(priced):
    lines = lines_of(lambda out: print_schemes(priced, REQUEST, out))

    assert max(map(len, lines)) <= 80
    for scheme in SCHEMES:
        assert any(line.startswith(f"  {scheme.name} ") for line in lines), scheme.name
    (pipeline,) = [line.split() for line in lines if line.startswith("  pipeline, 1F1B ")]
    assert pipeline[2:5] == ["32", "x", "2"]


def test_every_step_has_its_kind(priced):
    kinds = {row.scheme: row.cost.kind for row in schemes_document(priced).schemes if row.cost}
    text = " ".join(line.strip() for line in lines_of(lambda o: print_schemes(priced, REQUEST, o)))

    assert kinds["ZeRO 1"] is Kind.INTERPOLATED
    assert kinds["local SGD"] is kinds["PipeDream-2BW"] is Kind.ANALYTIC
    assert "predicted (analytic, interpolated), not measured" in text
    assert "64 x a100-80gb of 79.2 GiB" in text
    assert "0.00 us" not in text


def test_formulas_fit_80_columns_and_have_a_source_each():
    lines = lines_of(print_formulas)

    assert max(map(len, lines)) <= 80
    for scheme in SCHEMES:
        assert any(line.startswith(scheme.name) and scheme.source in line for line in lines)
    assert sum(line.startswith("  time ") for line in lines) == len(SCHEMES)


def test_the_document_has_formulas_beside_costs(priced):
    rows = {row.scheme: row for row in schemes_document(priced).schemes}

    local, pipeline = rows["local SGD"], rows["pipeline, 1F1B"]
    assert local.changes_convergence
    assert local.formulas.time == "C/n + AR(4 w)/H"
    assert local.cost is not None
    assert local.cost.step_s > 0
    assert (pipeline.gpus, pipeline.copies) == (32, 2)
    assert pipeline.reason == "pp 64 is more than the 44 layers"
