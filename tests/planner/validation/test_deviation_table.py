"""The deviations that bands are made of: of every priced row, and of some on computed kernels."""

from __future__ import annotations

import csv
import io
from dataclasses import fields

import pytest

from parplan.planner.validation.deviation_table import (
    SOME_ROWS,
    deviations_of,
    deviations_on_computed_kernels,
    deviations_to_csv,
    main,
)
from parplan.profiles.machines.deviations import Deviation, cells, shipped_deviations
from tests.helpers.measured_rows import ROW

TIMED = {**ROW, "id": "made-1", "step_time_s": "30.0", "source": "a page"}


def test_a_deviation_is_measured_over_predicted_with_the_traits_of_the_row():
    (deviation,) = deviations_of([TIMED])
    (twice,) = deviations_of([{**TIMED, "step_time_s": "60.0"}])

    assert 1 + twice.time == pytest.approx(2 * (1 + deviation.time))
    assert "chip Ampere" in deviation.traits
    assert (deviation.id, deviation.citation, deviation.memory) == ("made-1", "a page", None)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"notes": "deterministic kernels"}, id="slower-on-purpose"),
        pytest.param({"gpu": "tpu-v5"}, id="not-priced"),
        pytest.param({"step_time_s": ""}, id="nothing-measured"),
    ],
)
def test_a_row_that_says_nothing_of_a_plan_has_no_deviation(change):
    assert deviations_of([{**TIMED, **change}]) == []


def test_some_rows_count_as_of_a_device_that_nobody_measured():
    rows = [{**TIMED, "id": f"made-{number}"} for number in range(SOME_ROWS + 2)]

    computed = deviations_on_computed_kernels(rows)

    assert len(computed) == SOME_ROWS
    assert all("computed kernels" in each.traits for each in computed)
    assert computed[0].time != deviations_of(rows[:1])[0].time


def test_the_file_has_what_is_read_of_it():
    lines = list(csv.reader(io.StringIO(deviations_to_csv(shipped_deviations()))))

    assert lines[0] == [field.name for field in fields(Deviation)]
    assert lines[1:] == [list(cells(each)) for each in shipped_deviations()]


def test_a_table_that_is_no_table_is_refused(tmp_path, capsys):
    path = tmp_path / "steps.csv"
    path.write_text("a,b\n1,2\n")

    with pytest.raises(SystemExit):
        main(["--steps", str(path)])
    assert "no column" in capsys.readouterr().err
