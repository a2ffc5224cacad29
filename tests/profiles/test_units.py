"""Conversions and the texts that the reports print."""

from __future__ import annotations

import pytest

from parplan.profiles import units
from parplan.profiles.units import (
    GB,
    GIB,
    KIB,
    MIB,
    TERA,
    format_bytes,
    format_count,
    format_seconds,
    gib,
    tflops,
)


def test_binary_and_decimal_units_are_not_mixed():
    assert (KIB, MIB, GIB) == (2**10, 2**20, 2**30)
    assert (GB, TERA) == (10**9, 10**12)


def test_bytes_and_flops_convert_by_their_unit():
    assert gib(80 * 2**30) == 80.0
    assert tflops(312e12) == 312.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        pytest.param(20.13, "20.1 s", id="seconds"),
        pytest.param(1.0, "1 s", id="one-second"),
        pytest.param(4321.0, "4,321 s", id="thousands-keep-every-digit"),
        pytest.param(0.00325, "3.25 ms", id="milliseconds"),
        pytest.param(12e-6, "12 us", id="microseconds"),
        pytest.param(0.0, "0 us", id="zero"),
    ],
)
def test_a_duration_is_said_in_the_unit_of_a_person(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        pytest.param(512, "512 B", id="bytes"),
        pytest.param(2048, "2.0 KiB", id="kib"),
        pytest.param(3.5 * MIB, "3.5 MiB", id="mib"),
        pytest.param(61.2 * GIB, "61.2 GiB", id="gib"),
        pytest.param(1.25 * 1024 * GIB, "1.2 TiB", id="tib"),
    ],
)
def test_a_size_is_said_in_binary_units(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        pytest.param(432, "432", id="plain"),
        pytest.param(1_500, "1.5 k", id="thousands"),
        pytest.param(1_500_000, "1.5 M", id="millions"),
        pytest.param(20_262_014_976, "20.3 B", id="billions"),
        pytest.param(1_008_038_758_400, "1.01 T", id="trillions"),
    ],
)
def test_a_count_is_said_with_three_digits(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (16412.3, 4, "16,410"),
        (999.96, 4, "1,000"),
        (1980.0, 3, "1,980"),
        (0.012345, 3, "0.0123"),
        (2.5e-7, 3, "0.00000025"),
        (312.0, 3, "312"),
        (1.5e12, 4, "1,500,000,000,000"),
        (0.0, 3, "0"),
        (-12345.0, 3, "-12,300"),
    ],
)
def test_a_number_for_people_has_its_digits_and_no_exponent(value, digits, text):
    assert units.format_number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999.7, "1,000 s"), (0.9997, "1,000 ms"), (9.997e-4, "1,000 us")]
)
def test_a_duration_that_is_rounded_up_to_a_thousand_has_no_exponent(value, text):
    assert units.format_seconds(value) == text


def test_a_count_of_one_has_the_noun_in_the_singular():
    assert (units.counted(1, "stage"), units.counted(0, "stage"), units.counted(1024, "stage")) == (
        "1 stage",
        "0 stages",
        "1,024 stages",
    )
