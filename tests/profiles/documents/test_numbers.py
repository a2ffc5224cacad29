"""One parser of numbers: what it takes, what it refuses, and the words of its errors."""

from __future__ import annotations

import pytest

from parplan.profiles.documents.numbers import real, real_of, whole, whole_of
from parplan.profiles.documents.ranges import COUNT, Range
from parplan.profiles.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "as_whole", "as_real"),
    [
        ("8", 8, 8.0),
        ("+8", 8, 8.0),
        ("007", 7, 7.0),
        ("1.5", None, 1.5),
        (".5", None, 0.5),
        ("2.", None, 2.0),
        ("1e-5", None, 1e-5),
        ("1E3", None, 1e3),
        (8, 8, 8.0),
        (1.5, None, 1.5),
        ("", None, None),
        (" 8", None, None),
        ("8\n", None, None),
        ("1_000", None, None),
        ("0x10", None, None),
        ("nan", None, None),
        ("inf", None, None),
        ("1e999", None, None),
        (float("nan"), None, None),
        (float("inf"), None, None),
        ("\u00b2", None, None),
        ("\u0663", None, None),
        ("9" * 5000, None, None),
        pytest.param(10**5000, None, None, id="5000-digits"),
        ("1" * 19, None, 1111111111111111111.0),
        (True, None, None),
        (None, None, None),
        ([8], None, None),
        (b"8", None, None),
    ],
)
def test_a_number_is_ascii_digits_or_a_finite_value(value, as_whole, as_real):
    assert (whole_of(value), real_of(value)) == (as_whole, as_real)


def test_whole_numbers_are_not_below_zero_unless_their_range_is():
    assert (whole_of("-3"), whole_of("-3", Range(-5, 5)), whole_of("6", Range(-5, 5))) == (
        None,
        -3,
        None,
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        pytest.param("x", "'x'", id="text"),
        pytest.param("9" * 5000, f"'{'9' * 80}...'", id="5000-digits"),
        pytest.param(10**5000, "an integer of more than 18 digits", id="value-of-5000-digits"),
        pytest.param(None, "nothing", id="null"),
        pytest.param(True, "true", id="switch"),
        pytest.param(float("nan"), "nan", id="nan"),
        pytest.param([1], "a list", id="list"),
        pytest.param(b"1", "a bytes", id="bytes"),
        pytest.param("0", "'0'", id="out-of-range"),
    ],
)
def test_an_error_says_what_was_found_what_is_needed_and_where(value, found):
    with pytest.raises(ConfigError) as raised:
        whole(value, "--gpus", "run.sh:3", COUNT, "give a count")

    needed = "a whole number from 1 to 1,000,000,000"
    assert raised.value.message == f"run.sh:3: --gpus is {found}, needed is {needed}"
    assert raised.value.hint == "give a count"


def test_a_real_number_out_of_its_range_is_an_error():
    with pytest.raises(ConfigError, match="f: ts is -1, needed is a number from 0 to 5"):
        real(-1, "ts", "f", Range(0, 5))
