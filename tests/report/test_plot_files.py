"""A picture is written in every format, and the same picture has the same bytes."""

from __future__ import annotations

import pytest

from parplan.report.plots.sweep_plot import draw_sweep
from tests.helpers.cases import mostly_slow
from tests.helpers.synthetic_runs import estimated

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", mostly_slow(MAGIC, {"png"}))
def test_the_same_picture_has_the_same_bytes(suffix, tmp_path):
    plans = [estimated(pp=2, dp=2, tp=2, zero=1)]
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw_sweep(plans, first)
    draw_sweep(plans, second)

    assert first.read_bytes().startswith(MAGIC[suffix])
    assert first.read_bytes() == second.read_bytes()
    assert b"CreationDate" not in first.read_bytes()
    assert b"<dc:date>" not in first.read_bytes()
