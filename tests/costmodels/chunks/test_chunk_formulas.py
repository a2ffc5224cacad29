"""Closed forms of chunk needs and moves, against published coefficients and counted moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.profiles.errors import ConfigError
from tests.helpers.chunk_formulas import (
    OwnedShares,
    chunks_fit,
    collective_bytes,
    copied_in_bytes,
    copied_out_bytes,
    device_bytes,
    host_bytes,
    state_bytes,
)

SHARES = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda tenths: tuple(sorted(tenths)))


def counted(
    num_chunks: int,
    host: int,
    apart: int,
    micro_batches: int,
    *,
    in_parameters: bool,
    clean: bool,
    width: int = 2,
    gradient: int = 2,
    returned: int = 2,
    staying: int = 0,
) -> tuple[int, int]:
    """Bytes to the device and from it of one step over chunks of one parameter, moved one by one.

    The last `host` chunks are at home on the host and leave the device as soon as they are used,
    but for the first `staying` of them.
    """
    into = out = 0
    here: set[int] = set()
    at_home, kept = (
        range(num_chunks - host, num_chunks),
        range(num_chunks - host, num_chunks - host + staying),
    )
    for sweep in range(2 * micro_batches):
        backward = sweep % 2 == 1
        for chunk in reversed(at_home) if backward else at_home:
            into += width * (chunk not in here)
            here.add(chunk)
            out += gradient * backward
            if chunk not in kept:
                here.discard(chunk)
                overwritten = backward and in_parameters
                out += 0 if clean or overwritten else width
    return into + returned * apart, out + gradient * apart


@pytest.mark.parametrize(
    ("in_parameters", "gradient", "expected"), [(True, 2, 14), (False, 2, 16), (False, 4, 18)]
)
def test_a_parameter_has_14_bytes_where_its_gradient_takes_its_place_else_16_or_18(
    in_parameters, gradient, expected
):
    assert state_bytes(in_parameters=in_parameters, gradient=gradient) == expected


@given(SHARES)
def test_published_coefficients_of_the_traffic_are_those_of_patrickstar(tenths):
    delta, gamma = (tenth / 10 for tenth in tenths)
    shares = OwnedShares(parameters=1e9, delta=delta, gamma=gamma)

    assert copied_in_bytes(shares, returned_width=4) == pytest.approx(
        1e9 * (4 * delta + 4 * max(0, gamma - delta))
    )
    assert copied_out_bytes(shares, clean_copies=False) == pytest.approx(
        1e9 * (4 * delta + 2 * max(0, gamma - delta))
    )


@given(
    SHARES,
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from((2, 4)),
    st.integers(0, 10),
)
def test_traffic_is_what_moving_chunks_one_by_one_counts(
    tenths, micro_batches, in_parameters, clean, gradient, staying
):
    host, both = tenths
    staying = min(staying, host) if clean else 0
    shares = OwnedShares(parameters=10, delta=host / 10, gamma=both / 10)
    into, out = counted(
        10,
        host,
        both - host,
        micro_batches,
        in_parameters=in_parameters,
        clean=clean,
        gradient=gradient,
        staying=staying,
    )

    assert copied_in_bytes(
        shares, num_micro_batches=micro_batches, staying=staying / 10
    ) == pytest.approx(into)
    assert copied_out_bytes(
        shares,
        num_micro_batches=micro_batches,
        gradient=gradient,
        in_parameters=in_parameters,
        clean_copies=clean,
    ) == pytest.approx(out)


@given(SHARES, st.booleans(), st.integers(1, 10))
def test_device_and_host_together_hold_every_state_once(tenths, in_parameters, used):
    delta, gamma = (tenth / 10 for tenth in tenths)
    shares = OwnedShares(parameters=1e6, delta=delta, gamma=gamma, utilisation=used / 10)
    together = device_bytes(shares, in_parameters=in_parameters) + host_bytes(
        shares, in_parameters=in_parameters
    )

    assert together == pytest.approx(1e6 * state_bytes(in_parameters=in_parameters) * 10 / used)


def test_the_host_also_buffers_what_it_takes_and_returns_of_parameters_on_the_device():
    shares = OwnedShares(parameters=100, delta=0.2, gamma=0.5)

    assert host_bytes(shares, returned=True) - host_bytes(shares) == pytest.approx(2 * 30)


def test_what_fits_is_published_with_15b_on_eight_v100():
    """PatrickStar trains 15B parameters on 8 V100 with 240 GB.

    States take 14 * 15e9 / 8 = 26.25 GB a GPU, besides the memory that is no state.
    """
    owned = 15e9 / 8
    room = 8e9
    host = 240e9

    assert not chunks_fit(OwnedShares(parameters=owned, delta=0.0, gamma=0.0), room, host, 8)
    assert chunks_fit(OwnedShares(parameters=owned, delta=0.0, gamma=0.9), room, host, 8)
    assert not chunks_fit(
        OwnedShares(parameters=owned, delta=0.0, gamma=0.9), room, 160e9, 8
    )  # 12 * 0.9 * 15e9 = 162 GB
    assert chunks_fit(OwnedShares(parameters=owned, delta=1.0, gamma=1.0), 0, 210e9, 8)


@pytest.mark.parametrize(("broadcast", "coefficient"), [(False, 6), (True, 10)])
def test_chunk_groups_send_6_bytes_a_parameter_and_broadcasts_10(broadcast, coefficient):
    for ranks in (1, 2, 8):
        assert collective_bytes(1e9, ranks, broadcast=broadcast) == pytest.approx(
            coefficient * (ranks - 1) / ranks * 1e9
        )
    assert collective_bytes(1e9, 8, num_micro_batches=3, broadcast=broadcast) == pytest.approx(
        3 * collective_bytes(1e9, 8, broadcast=broadcast)
    )


def test_shares_outside_0_to_1_are_an_error():
    with pytest.raises(ConfigError, match=r"delta 1\.5"):
        OwnedShares(parameters=1, delta=1.5, gamma=1)
