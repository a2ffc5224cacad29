"""The fit recovers known terms, leaves unseen terms neutral, and its residuals are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.validation.fitted_row import FittedRow
from parplan.planner.validation.priced_rows import PricedRow, price_row
from parplan.planner.validation.row_cells import OPTIONAL
from parplan.planner.validation.term_fit import (
    Fit,
    _quantile,
    _residuals,
    bounds_of,
    fit_terms,
    residuals_of,
    terms_of,
    terms_to_yaml,
)
from parplan.profiles.machines.stack_terms import EVERY_STACK, Terms, shipped_terms

ROW = dict.fromkeys(OPTIONAL, "") | {
    "id": "made-1",
    "framework": "InternEvo",
    "gpu": "a100-80g-sxm",
    "n_gpus": "8",
    "gpus_per_node": "8",
    "model": "made",
    "layers": "4",
    "hidden": "2048",
    "heads": "16",
    "ffn_hidden": "8192",
    "gated_ffn": "false",
    "vocab": "51200",
    "seq_len": "2048",
    "global_batch": "64",
    "micro_batch": "4",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "sequence_parallel": "false",
    "zero_stage": "1",
    "recompute": "none",
    "dtype": "bf16",
}
SLOWDOWN = ("stacks", "internevo", "kernel_slowdown")
HOST = ("stacks", "internevo", "host_operator_s")
ALLOCATOR = ("stacks", "internevo", "allocator_share")


def rows_of(source: str, truth: dict, *, memory: bool = False) -> list[dict]:
    """Returns rows whose measured figures are the prices under the terms `truth`."""
    rows = []
    for index, micro_batch in enumerate(("2", "4", "8")):
        row = {
            **ROW,
            "id": f"{source}-{index}",
            "micro_batch": micro_batch,
            "memory_kind": "nvidia-smi",
        }
        priced = price_row(row, terms_of(truth), held_out=False)
        rows.append(
            {
                **row,
                "step_time_s": repr(priced.predicted_s),
                "peak_memory_gib": repr(priced.predicted_gib) if memory else "",
            }
        )
    return rows


TRUTH = {SLOWDOWN: 1.25, HOST: bounds_of(HOST).neutral}


def test_a_fit_prices_its_rows_as_the_validation_does():
    row = {**rows_of("one", TRUTH)[0], "peak_memory_gib": "20"}
    terms = terms_of({**TRUTH, SLOWDOWN: 1.4, ALLOCATOR: 0.2})
    priced = price_row(row, terms, held_out=False)

    assert FittedRow(row, priced).errors(terms) == (priced.error, priced.memory_error)


@pytest.mark.slow
def test_a_slowdown_is_found_again_and_terms_that_no_row_shows_stay_neutral():
    terms = fit_terms([*rows_of("one", TRUTH), *rows_of("two", TRUTH)])

    terms_ = terms.stacks["internevo"]
    assert terms_["kernel_slowdown"].value == pytest.approx(1.25, rel=0.02)
    assert terms_["host_operator_s"].value == pytest.approx(bounds_of(HOST).neutral, rel=0.15)
    assert (terms_["kernel_slowdown"].fitted_on, terms_["kernel_slowdown"].rows) == (
        ("one", "two"),
        6,
    )
    assert "allocator_share" not in terms_


@pytest.mark.slow
def test_a_term_without_an_experiment_is_that_of_the_others():
    slower = {**TRUTH, SLOWDOWN: 1.5}

    without = (
        fit_terms([*rows_of("one", TRUTH), *rows_of("two", slower)])
        .stacks["internevo"]["kernel_slowdown"]
        .without
    )

    assert without["one"] == pytest.approx(1.5, rel=0.02)
    assert without["two"] == pytest.approx(1.25, rel=0.02)


@pytest.mark.slow
def test_the_only_experiment_of_a_stack_falls_back_to_neutral_when_no_other_stack_is_fitted():
    without = fit_terms(rows_of("one", TRUTH)).stacks["internevo"]["kernel_slowdown"].without

    assert without == {"one": 1.0}


@pytest.mark.slow
def test_the_allocators_share_is_fitted_to_what_whole_devices_hold():
    truth = {**TRUTH, ALLOCATOR: 0.15}

    share = fit_terms(rows_of("one", truth, memory=True)).stacks["internevo"]["allocator_share"]

    assert share.value == pytest.approx(0.15, rel=0.06)


def test_rows_that_leave_a_setting_open_or_run_slower_on_purpose_are_not_fitted():
    good, *rest = rows_of("one", TRUTH)
    rest[0]["recompute"] = ""
    rest[1]["notes"] = "deterministic kernels"

    assert [row.row["id"] for row in Fit([good, *rest]).rows["one"]] == [good["id"]]


def test_a_quantile_is_a_value_that_enough_do_not_exceed():
    assert _quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert _quantile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
    assert _quantile([], 0.9) == 0.0


def priced(**change):
    return PricedRow(
        "made-1", "made", **{"measured_s": 1.0, "predicted_s": 1.0, "capacity_gib": 100.0, **change}
    )


def test_bands_hold_eight_rows_in_ten_and_toy_runs_have_no_part_in_that_of_memory():
    rows = [
        priced(measured_s=1.0 + 0.01 * i, measured_gib=50.0 + i, predicted_gib=50.0)
        for i in range(10)
    ]
    toy = priced(measured_gib=5.0, predicted_gib=1.0)

    residuals = _residuals([*rows, toy])

    assert residuals.time_band == pytest.approx(0.07)
    assert (residuals.memory_band, residuals.memory_rows) == (pytest.approx(0.14), 10)


@pytest.mark.parametrize(
    ("change", "margin"),
    [
        pytest.param({"measured_gib": 60.0, "predicted_gib": 50.0}, 0.1, id="needed-more"),
        pytest.param({"measured_gib": 40.0, "predicted_gib": 50.0}, 0.04, id="needed-less"),
        pytest.param({"out_of_memory": True, "predicted_total_gib": 80.0}, 0.2, id="ran-out"),
        pytest.param(
            {"out_of_memory": True, "predicted_total_gib": 120.0}, 0.04, id="ran-out-as-predicted"
        ),
    ],
)
def test_the_margin_covers_what_runs_needed_beyond_their_prediction(change, margin):
    assert _residuals([priced(**change)]).memory_margin == pytest.approx(margin)


def test_stacks_that_share_terms_share_residuals():
    row = {**ROW, "framework": "NeMo 24.05"}
    residuals = residuals_of(
        [row],
        [price_row({**row, "step_time_s": "1.0"}, Terms(residuals=shipped_terms().residuals))],
    )

    assert residuals["nemo"] == residuals["megatron-core"] == residuals[EVERY_STACK]
    assert "nanotron" not in residuals


def test_the_file_is_ascii_and_the_same_for_the_same_terms():
    terms = replace(shipped_terms())

    assert terms_to_yaml(terms) == terms_to_yaml(shipped_terms())
    assert terms_to_yaml(terms).isascii()
