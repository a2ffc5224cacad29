"""The tables of accuracy in README and docs are what `plan validate` prints."""

from __future__ import annotations

import json
import math
import re

import pytest

from docs.accuracy import (
    HOLDOUT,
    LINES,
    PAGE,
    PAGE_HEAD,
    README,
    README_HEAD,
    documents,
    price_kept_apart,
    with_table,
)
from parplan.planner.validation.configuration import experiment_of
from parplan.planner.validation.row_cells import source_of
from parplan.planner.validation.step_rows import read_table
from parplan.planner.validation.step_table import price_table
from parplan.profiles.machines.deviations import shipped_deviations
from parplan.profiles.machines.stack_terms import shipped_terms
from tests.helpers.documented import ROOT

GOLDEN = json.loads((ROOT / "tests/golden/validation.json").read_text(encoding="utf-8"))
PLACES = 0.06  # a rounded percentage beside one of other digits


def table(path, head) -> dict[str, list[str]]:
    """Returns the other cells of a table by its first."""
    after = path.read_text(encoding="utf-8").partition(f"{head}\n")[2]
    lines = re.match(r"(\|.*\n)*", after)[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("line", [one for one in LINES if one.sources[0] in GOLDEN])
def test_a_source_has_the_errors_that_the_golden_table_has(line):
    if len(line.sources) > 1:
        pytest.skip("several sources in one line have no line in the golden table")
    [source] = line.sources
    cells = table(PAGE, PAGE_HEAD)[f"{line.name} ({source})"]
    golden = GOLDEN[source]

    assert cells[0] == f"{golden['priced']}/{golden['rows']}"
    for cell, name in zip(cells[1:4], ("mape_time", "median_time", "bias_time"), strict=True):
        assert float(cell.split()[0]) == pytest.approx(100 * golden[name], abs=PLACES)
    if golden["mape_memory"] is not None:
        assert float(cells[5].split()[0]) == pytest.approx(100 * golden["mape_memory"], abs=PLACES)


def test_the_readme_has_the_figures_of_the_page_and_names_the_worst():
    page, readme = table(PAGE, PAGE_HEAD), table(README, README_HEAD)

    for line in (one for one in LINES if one.in_readme):
        rows, time, *_, memory = page[f"{line.name} ({', '.join(line.sources)})"]
        assert readme[line.name] == [rows, time.split(" (")[0], memory]
    worst = [
        max(float(cells[place].split()[0]) for cells in page.values() if cells[place])
        for place in (1, -1)
    ]
    said = re.search(
        r"worst are ([\d.]+) % in time .* and ([\d.]+) % in memory", README.read_text()
    )
    assert [float(one) for one in said.groups()] == worst


def test_a_table_is_replaced_under_its_head_alone():
    text = "before\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nafter | x |\n"

    assert with_table(text, "| a | b |", [("5", ""), ("6", "7")]) == (
        "before\n\n| a | b |\n|---|---|\n| 5 | |\n| 6 | 7 |\n\nafter | x |\n"
    )
    with pytest.raises(ValueError, match="no table has the head"):
        with_table(text, "| c |", [])


@pytest.mark.slow
def test_the_tables_are_those_of_the_priced_rows():
    for path, text in documents(price_table(read_table()), price_kept_apart()).items():
        assert path.read_text(encoding="utf-8") == text, "run python -m docs.accuracy"


def test_no_price_is_fitted_to_a_row_that_is_kept_apart():
    apart = read_table(HOLDOUT)
    names = {experiment_of(row) for row in apart}
    terms = [term for each in shipped_terms().stacks.values() for term in each.values()]
    fitted = {name for term in terms for name in term.fitted_on}

    assert names.isdisjoint(fitted | {run.experiment for run in shipped_deviations()})
    assert {source_of(row) for row in apart}.isdisjoint(map(source_of, read_table()))
    for row in apart:
        assert row["citation"]
        mesh = [int(row[degree] or 1) for degree in ("dp", "tp", "pp", "cp")]
        assert math.prod(mesh) == int(row["n_gpus"]), row["id"]
