"""The page of the survey is what its file says, and every cell names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.survey import PAGE, matrix, page
from parplan.planner.schemes.every_scheme import SCHEMES
from parplan.planner.search_methods.methods import METHODS

ROOT = Path(__file__).parents[2]
TESTS, TABLES = matrix()["tests"], matrix()["tables"]


def test_the_page_is_what_the_file_says():
    assert PAGE.read_text("utf-8") == page(), "run python -m docs.survey"


@pytest.mark.parametrize("name", TESTS)
def test_a_named_test_exists(name):
    path, _, function = TESTS[name].partition("::")
    body = (ROOT / path).read_text("utf-8")
    assert re.search(rf"^def {function}\(", body, re.MULTILINE) if function else "def test_" in body


def test_every_row_has_all_cells_and_every_cell_a_test():
    used = set()
    for table in TABLES:
        for name, cells in table["rows"].items():
            assert len(cells) == len(table["columns"]) - 1, name
            tested = [cell for cell in cells if isinstance(cell, dict)]
            texts = len(cells) - len(tested)
            of_others = table["name"] == "Works" and name != "parplan"
            cited = {"published in", "source"} & {*table["columns"]}
            assert texts == (len(cells) if of_others else len(cited)), name
            assert all(len(cell) == 1 and set(cell.values()) <= TESTS.keys() for cell in tested)
            used |= {test for cell in tested for test in cell.values()}
    assert used == TESTS.keys()


def test_the_schemes_are_those_of_the_table_and_say_what_a_search_uses():
    (schemes,) = [table for table in TABLES if table["name"] == "Schemes"]
    assert list(schemes["rows"]) == [scheme.name for scheme in SCHEMES]
    for scheme in SCHEMES:
        _, searched, *_ = schemes["rows"][scheme.name]
        assert ("no" in searched) == (not scheme.searched)


def test_every_search_method_is_of_a_family():
    """Ours is an integer program; random and greedy search are the simplest of all."""
    (families,) = [table for table in TABLES if table["name"] == "Search methods"]
    done = [name for name, (_, here) in families["rows"].items() if "yes" in here]
    assert len(done) == len(METHODS.keys() - {"ours", "random", "greedy"})


def test_every_work_has_a_source():
    (works,) = [table for table in TABLES if table["name"] == "Works"]
    for name, (*_, source) in works["rows"].items():
        assert re.fullmatch(r"\[.+\]\((https://\S+|house\.md)\)", source), name
