"""No source of the shipped table of measured steps is further off than in the golden table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from parplan.planner.validation.scores import score
from parplan.planner.validation.step_rows import read_table
from parplan.planner.validation.step_table import price_table

GOLDEN = Path(__file__).parents[2] / "golden" / "validation.json"
ERRORS = ("mape_time", "median_time", "bias_time", "regret_at_1", "mape_memory", "bias_memory")
DIGITS = 4
TOLERANCE = 0.002  # of an error, absolute
ROUNDING = 0.0002  # of tau
REFRESH = (
    "a change that is meant: "
    "pytest tests/planner/validation/test_golden_validation.py --update-golden, "
    "and say the numbers before and after"
)

Table = dict[str, dict[str, object]]


def worse(golden: Table, table: Table) -> list[str]:
    """Returns a line for each figure that got worse."""
    lines = [f"{source}: is gone" for source in golden if source not in table]
    for source in golden.keys() & table.keys():
        before, after = golden[source], table[source]
        lines += [
            f"{source}: {name} {before[name]} -> {after[name]}"
            for name in ERRORS
            if _is_worse_error(before[name], after[name])
        ]
        if before["kendall_tau"] is not None and (
            after["kendall_tau"] is None or after["kendall_tau"] < before["kendall_tau"] - ROUNDING
        ):
            lines.append(f"{source}: kendall_tau {before['kendall_tau']} -> {after['kendall_tau']}")
        if after["priced"] < before["priced"]:
            lines.append(f"{source}: priced {before['priced']} -> {after['priced']}")
    return sorted(lines)


def error_table(priced):
    """Returns the rounded scores by source."""
    return {
        source: {
            name: round(value, DIGITS) if isinstance(value, float) else value
            for name, value in asdict(source_score).items()
        }
        for source, source_score in score(priced).items()
    }


def _is_worse_error(before: float | None, after: float | None) -> bool:
    return before is not None and (after is None or abs(after) > abs(before) + TOLERANCE)


@pytest.mark.slow
@pytest.mark.in_every_part
def test_no_source_got_worse(update_golden):
    table = error_table(price_table(read_table()))
    if update_golden:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))

    lines = worse(golden, table)

    assert not lines, "\n".join((*lines, REFRESH))


SOURCE = {
    "mape_time": 0.05,
    "median_time": 0.04,
    "bias_time": -0.03,
    "regret_at_1": 0.0,
    "mape_memory": None,
    "bias_memory": None,
    "kendall_tau": 0.9,
    "priced": 10,
}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param({"mape_time": 0.0521}, "made: mape_time 0.05 -> 0.0521", id="time"),
        pytest.param({"regret_at_1": 0.01}, "made: regret_at_1 0.0 -> 0.01", id="regret"),
        pytest.param({"mape_time": None}, "made: mape_time 0.05 -> None", id="no-time"),
        pytest.param(
            {"bias_time": 0.04}, "made: bias_time -0.03 -> 0.04", id="bias-of-the-other-sign"
        ),
        pytest.param({"kendall_tau": 0.89}, "made: kendall_tau 0.9 -> 0.89", id="tau"),
        pytest.param({"kendall_tau": None}, "made: kendall_tau 0.9 -> None", id="no-tau"),
        pytest.param({"priced": 9}, "made: priced 10 -> 9", id="a-row-lost"),
    ],
)
def test_what_got_worse_is_said(change, line):
    assert worse({"made": SOURCE}, {"made": {**SOURCE, **change}}) == [line]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="the-same"),
        pytest.param({"mape_time": 0.0515, "bias_time": -0.0315}, id="within-the-tolerance"),
        pytest.param(
            {
                "mape_time": 0.01,
                "bias_time": 0.0,
                "kendall_tau": 1.0,
                "priced": 11,
                "mape_memory": 0.5,
            },
            id="better",
        ),
    ],
)
def test_what_did_not_get_worse_passes(change):
    assert worse({"made": SOURCE}, {"made": {**SOURCE, **change}, "new": SOURCE}) == []


def test_a_source_that_is_gone_is_said():
    assert worse({"made": SOURCE}, {}) == ["made: is gone"]
