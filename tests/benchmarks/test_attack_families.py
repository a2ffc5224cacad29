"""The seeded requests of all families, and the attack on the plan of one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.search.attack_families import main
from benchmarks.search.attacks.families import FAMILIES, asked_requests


def test_a_number_is_the_same_request_again_and_every_family_has_its_turn(tmp_path):
    round_of_all = list(asked_requests(0, len(FAMILIES), tmp_path, 1.0))

    assert [asked.family for asked in round_of_all] == list(FAMILIES)
    assert list(asked_requests(3, 1, tmp_path, 1.0)) == round_of_all[3:4]


@pytest.mark.slow
def test_a_plan_that_is_attacked_has_a_row_and_no_finding(tmp_path):
    asked = ("--requests", "1", "--only", "context", "--time-limit", "30")

    result = CliRunner().invoke(main, [*asked, "--models", str(tmp_path)])

    assert result.exit_code == 0, result.output
    assert "findings 0" in result.output
    assert result.output.endswith("1 requests, 0 findings\n")
