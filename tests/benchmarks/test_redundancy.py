"""benchmarks/papers/redundancy.py: its rows are what they are named, and savings add up."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.papers.redundancy import (
    CLASSES,
    LEVELS,
    Saving,
    alpa_measures,
    main,
    megatron_measures,
    run,
    setting_of,
)


@pytest.fixture(scope="module")
def setting():
    return setting_of("gpt-2.5b", 2)


@pytest.fixture(scope="module")
def rows_and_savings(setting):
    return run(setting)


def test_a_row_of_least_peak_peaks_lowest_and_a_row_of_least_time_is_fastest(setting):
    rows = list(megatron_measures(setting))
    for system in ("megatron", "megatron +sp", "megatron +sp +do"):
        for level in LEVELS:
            lean = next(
                r for r in rows if (r.system, r.recompute, r.picked) == (system, level, "memory")
            )
            fast = next(
                r for r in rows if (r.system, r.recompute, r.picked) == (system, level, "time")
            )
            assert lean.peak_gib <= fast.peak_gib
            assert fast.fits
            assert fast.step_s <= lean.step_s or not lean.fits


def test_each_further_flag_of_megatron_lowers_the_least_peak():
    rows = [
        row
        for row in megatron_measures(setting_of("gpt-2.5b", 8))
        if row.picked == "memory" and row.recompute == "none"
    ]

    peaks_gib = [row.peak_gib for row in rows]
    plain, sequence_parallel, distributed = peaks_gib
    assert distributed < sequence_parallel < plain


@pytest.mark.slow
def test_the_classes_add_up_to_the_peak_and_the_tensors_leave_the_reserve_out(rows_and_savings):
    for row in rows_and_savings[0]:
        assert sum(row.memory_gib[name] for name in CLASSES) == pytest.approx(
            row.peak_gib, abs=1e-3
        )
        assert row.peak_gib - row.tensors_gib == pytest.approx(row.memory_gib["reserve"], abs=1e-3)


@pytest.mark.slow
def test_ours_is_never_slower_than_a_plan_of_the_space_that_ours_contains(
    setting, rows_and_savings
):
    fastest = min(
        row.step_s
        for row in rows_and_savings[0]
        if row.system == "ours" and row.recompute == "best"
    )

    (alpa,) = alpa_measures(setting)
    assert fastest <= alpa.step_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_saving_is_of_the_same_recompute_and_under_the_limit_where_it_says_so(rows_and_savings):
    rows, savings = rows_and_savings

    assert {saving.recompute for saving in savings} == set(LEVELS)
    for saving in savings:
        theirs = next(
            r
            for r in rows
            if (r.system, r.recompute, r.picked) == ("megatron", saving.recompute, saving.against)
        )
        assert theirs.fits
        if saving.ours == "throughput in a third":
            assert saving.peak_saving >= 0.67
        else:
            ours = next(
                r
                for r in rows
                if (r.system, r.recompute, r.picked) == ("ours", saving.recompute, saving.ours)
            )
            assert saving.peak_saving == pytest.approx(1 - ours.peak_gib / theirs.peak_gib)
            assert saving.step_ratio == pytest.approx(ours.step_s / theirs.step_s)


@pytest.mark.parametrize(
    ("peak_saving", "step_ratio", "reaches"),
    [(0.67, 1.10, True), (0.66, 0.5, False), (0.9, 1.11, False), (0.9, 0.9, True)],
)
def test_a_saving_is_reached_with_both_the_memory_and_the_time(peak_saving, step_ratio, reaches):
    saving = Saving(
        model="gpt-2.5b",
        gpus=2,
        recompute="none",
        against="megatron",
        ours="memory",
        peak_saving=peak_saving,
        tensors_saving=0.0,
        redundant_saving=0.0,
        step_ratio=step_ratio,
    )

    assert saving.reaches is reaches


@pytest.mark.slow
def test_the_command_prints_a_summary_and_with_json_all_rows():
    text = CliRunner().invoke(main, ["--models", "gpt-1.5b", "--gpus", "2"])
    document = json.loads(
        CliRunner().invoke(main, ["--models", "gpt-1.5b", "--gpus", "2", "--json"]).stdout
    )

    assert text.exit_code == 0
    assert "settings with at least 67 % less peak memory" in text.stdout
    assert "gpt-1.5b on  2, recompute full" in text.stdout
    assert {row["system"] for row in document["rows"]} >= {
        "megatron",
        "zero-3",
        "fsdp",
        "alpa-like",
        "ours",
    }
    assert all(row["model"] == "gpt-1.5b" for row in document["savings"])
