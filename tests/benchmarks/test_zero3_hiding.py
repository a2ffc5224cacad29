"""The share of ZeRO 3's traffic that a step hid: the priced one where it took as long as priced."""

from __future__ import annotations

import pytest

from benchmarks.prices.zero3_hiding import hiding_of, hiding_table
from parplan.planner.validation.priced_rows import price_row
from tests.helpers.measured_rows import FULL

ZERO3 = {
    **FULL,
    "framework": "llm-foundry (composer, FSDP)",
    "dp": "16",
    "tp": "1",
    "pp": "1",
    "sequence_parallel": "false",
    "zero_stage": "3",
    "step_time_s": "1.0",
}


def test_a_step_as_priced_hid_what_the_price_hides():
    predicted_s = price_row(ZERO3, held_out=True).predicted_s

    found = hiding_of({**ZERO3, "step_time_s": repr(predicted_s)})

    assert found.hidden == pytest.approx(found.priced)
    assert 0 < found.priced <= 1
    assert 0 < found.traffic < 1


def test_a_longer_step_hid_less():
    slow, fast = (hiding_of({**ZERO3, "step_time_s": text}) for text in ("0.9", "0.4"))

    assert slow.hidden < fast.hidden
    assert slow.priced == fast.priced


@pytest.mark.parametrize("change", [{"zero_stage": "1"}, {"gpu": "tpu-v5"}, {"recompute": ""}])
def test_other_rows_tell_nothing(change):
    assert hiding_of({**ZERO3, **change}) is None


def test_a_kind_without_traffic_has_no_figures():
    table = hiding_table([hiding_of(ZERO3)], least=1.0)

    assert [list(column.cells) for column in table.columns][:3] == [["1"], ["0"], ["-"]]
