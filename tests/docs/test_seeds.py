"""The page of the four systems names code and tests that exist, and is what its file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.seeds import PAGE, page, systems

ROOT = Path(__file__).parents[2]
FEATURES = [feature for system in systems() for feature in system["features"]]


def test_the_page_is_what_the_file_says():
    assert PAGE.read_text("utf-8") == page(), "run python -m docs.seeds"


def test_every_feature_of_the_four_systems_has_a_row():
    numbers = {"M": 13, "R": 10, "S": 9, "P": 14}
    assert [feature["id"] for feature in FEATURES] == [
        f"{letter}{n}" for letter, most in numbers.items() for n in range(1, most + 1)
    ]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature["id"])
def test_the_code_and_the_test_of_a_feature_exist(feature):
    if not feature["code"]:
        assert feature["missing"]
        return
    assert (ROOT / feature["code"]).is_file()
    path, _, name = feature["test"].partition("::")
    body = (ROOT / path).read_text("utf-8")
    assert re.search(rf"^def {name}\(", body, re.MULTILINE) if name else "def test_" in body
