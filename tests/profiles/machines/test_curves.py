"""The fitted forms, worked by hand, at their limits, and rising with their arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import (
    Chip,
    CollectiveCurve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    SizeBounds,
    deterministic_share,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
    spline_s,
)
from parplan.profiles.provenance import Kind

CHIP = Chip(peak_flops_per_s=100e12, bytes_per_s=1e12, num_sms=100)
MATMUL = MatmulCurve(
    launch_s=0.0,
    kind=Kind.INTERPOLATED,
    source="made up",
    efficiency=1.0,
    k_half=0.0,
    bandwidth_share=1.0,
)
FLASH = FlashCurve(
    launch_s=0.0,
    kind=Kind.INTERPOLATED,
    source="made up",
    efficiency=1.0,
    keys_half=0.0,
    head_half=0.0,
)
MEMORY = MemoryCurve(launch_s=5e-6, kind=Kind.INTERPOLATED, source="made up", bandwidth_share=0.5)
SPLINE = CollectiveCurve(
    collective="all_reduce",
    ranks=8,
    bytes=(1000, 10_000, 1_000_000),
    time_us=(10.0, 10.0, 1000.0),
    rows=0,
    median_error=0.0,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time_us": (10.0, 0.0, 1000.0)}, "a time of 0 us"),
        ({"time_us": (10.0,)}, "1 times at the bytes 1000, 10000, 1000000"),
        ({"bytes": (10_000, 1000, 1_000_000)}, "3 times at the bytes 10000, 1000"),
        ({"bytes": (), "time_us": ()}, "0 times"),
        ({"bytes": (0, 1, 2)}, "3 times at the bytes 0"),
    ],
)
def test_a_curve_has_positive_times_at_growing_bytes(change, message):
    with pytest.raises(ConfigError, match=f"a curve of all_reduce has {message}"):
        replace(SPLINE, **change)


def test_a_product_that_fills_every_multiprocessor_runs_at_the_peak():
    product = Product(
        m=2560, n=1280, k=4096
    )  # 10 x 10 tiles of 256 x 128 on 100 multiprocessors: one whole wave

    compute_s, memory_s = 2 * 2560 * 1280 * 4096 / 100e12, product.num_bytes / 1e12
    assert matmul_s(product, MATMUL, CHIP) == pytest.approx(
        (compute_s**4 + memory_s**4) ** 0.25, rel=1e-12
    )


def test_one_tile_too_many_costs_a_wave():
    whole = matmul_s(Product(m=2560, n=1280, k=65536), MATMUL, CHIP)
    ragged = matmul_s(Product(m=2561, n=1280, k=65536), MATMUL, CHIP)

    assert 1.05 < ragged / whole <= 2.0  # smaller tiles soften the step from one wave to two


def test_a_thin_product_is_bound_by_its_bytes():
    product = Product(m=1, n=8192, k=8192)

    fast = replace(CHIP, peak_flops_per_s=1e15)
    assert matmul_s(product, MATMUL, fast) == pytest.approx(
        2 * (8192 + 8192**2 + 8192) / 1e12, rel=0.01
    )


def test_the_power_limit_slows_training_but_not_one_small_product():
    hot = replace(MATMUL, throttle=0.2, throttle_flops=1e12)
    small, large = Product(m=2560, n=1280, k=1024), Product(m=25600, n=12800, k=40960)

    assert matmul_s(small, hot, CHIP, sustained=False) == pytest.approx(
        matmul_s(small, MATMUL, CHIP), rel=0.01
    )
    assert matmul_s(large, hot, CHIP, sustained=False) == pytest.approx(
        1.2 * matmul_s(large, MATMUL, CHIP), rel=0.01
    )
    assert matmul_s(large, hot, CHIP) == pytest.approx(
        1.2 * matmul_s(large, MATMUL, CHIP), rel=0.01
    )


def test_accumulation_into_fp32_moves_more_bytes():
    assert Product(m=10, n=20, k=30).num_bytes == 2 * (300 + 600 + 200)
    assert Product(m=10, n=20, k=30, result_bytes=8, batch=2).num_bytes == 2 * (
        2 * (300 + 600) + 8 * 200
    )


@given(m=st.integers(1, 8192), n=st.integers(1, 8192), k=st.integers(1, 8192))
def test_more_work_in_m_or_n_never_takes_less_time(m, n, k):
    curve = replace(MATMUL, k_half=128.0, bandwidth_share=0.7)
    base = matmul_s(Product(m=m, n=n, k=k), curve, CHIP)

    assert base > 0
    assert matmul_s(Product(m=2 * m, n=n, k=k), curve, CHIP) >= base * (1 - 1e-12)
    assert matmul_s(Product(m=m, n=2 * n, k=k), curve, CHIP) >= base * (1 - 1e-12)
    assert matmul_s(Product(m=m, n=n, k=2 * k), curve, CHIP) >= base * (1 - 1e-12)


def test_flash_attention_by_hand():
    # 100 heads of 1280 queries: 1,000 tiles, 10 waves; the last one half empty
    flops = 4.0 * 100 * 1280 * 1280 * 64
    time_s = flash_attention_s(
        flops, heads=100, seq=1280, keys=1280.0, head_dim=64, curve=FLASH, chip=CHIP
    )

    assert time_s == pytest.approx(flops / 100e12 * 10.5 / 10, rel=1e-12)


def test_flash_attention_pads_the_head_and_needs_keys():
    def price(**changed):
        sizes = {"heads": 100, "seq": 1280, "keys": 1280.0, "head_dim": 64, **changed}
        return flash_attention_s(1e12, curve=replace(FLASH, keys_half=1280.0), chip=CHIP, **sizes)

    assert price(head_dim=40) == pytest.approx(price() * 64 / 40)
    assert price(keys=640.0) == pytest.approx(price() * (1 + 2) / (1 + 1))


def test_memory_bound_by_hand():
    assert memory_bound_s(10**9, MEMORY, 1e12) == pytest.approx(5e-6 + 2e-3, rel=1e-12)
    assert memory_bound_s(0, MEMORY, 1e12) == 5e-6


@pytest.mark.parametrize(
    ("n_bytes", "expected_s"),
    [
        pytest.param(0, 10e-6, id="nothing-is-latency-only"),
        pytest.param(1000, 10e-6, id="first-knot"),
        pytest.param(100_000, 100e-6, id="between-knots-log-log"),
        pytest.param(1_000_000, 1000e-6, id="last-knot"),
        pytest.param(3_000_000, 3000e-6, id="beyond-the-last-at-its-bandwidth"),
    ],
)
def test_spline_by_hand(n_bytes, expected_s):
    assert spline_s(SPLINE, n_bytes) == pytest.approx(expected_s, rel=1e-12)


def test_a_curve_is_analytic_outside_its_bounds():
    bounded = replace(MATMUL, bounds=SizeBounds(low=(64, 64, 64), high=(1024, 1024, 1024)))

    assert bounded.kind_at((64, 1024, 100)) is Kind.INTERPOLATED
    assert bounded.kind_at((64, 1025, 100)) is Kind.ANALYTIC
    assert MATMUL.kind_at((64, 64, 64)) is Kind.ANALYTIC


@pytest.mark.parametrize(
    ("heads", "share"),
    [
        pytest.param(32, 128 / 200, id="4-blocks-a-head-in-2-rounds"),
        pytest.param(50, 1.0, id="2-blocks-a-head-in-1-round"),
        pytest.param(130, 130 / 200, id="1-block-a-head-in-2-rounds"),
    ],
)
def test_a_deterministic_backward_pass_leaves_multiprocessors_idle_in_its_last_round(heads, share):
    assert deterministic_share(heads, CHIP) == pytest.approx(share)
