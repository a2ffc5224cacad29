"""The build of profiles: refused rows, fits that find made-up constants, a file that reads back."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace

import numpy as np
import pytest

from parplan.profiles.build.__main__ import (
    BLACKWELL_CURVES,
    HOPPER_KERNELS,
    LIMITS,
    _line,
    from_datasheet,
    shipped_profile_to_yaml,
    slowed,
)
from parplan.profiles.build.attention_curves import (
    CACHE_WRITE,
    PUBLISHED_SEQS,
    _flash,
    _published_rows,
    blackwell_flash2,
    flash_price,
)
from parplan.profiles.build.blackwell import STEADY, STREAMS_OF_HOPPER
from parplan.profiles.build.grouped_curves import GROUPED, grouped_family
from parplan.profiles.build.link_curves import _curves
from parplan.profiles.build.machine_recipes import DATASHEETS, RECIPES, VARIANTS
from parplan.profiles.build.recipes import FitContext, chip_of
from parplan.profiles.machines.curve_fitting import (
    CurveFamily,
    MeasurementTables,
    Score,
    fit,
    fit_score,
    rounded,
)
from parplan.profiles.machines.curves import (
    Chip,
    Curve,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    flash_attention_s,
    grouped_s,
    matmul_s,
    memory_bound_s,
    spline_s,
)
from parplan.profiles.machines.machine_catalog import cluster_names, load_cluster
from parplan.profiles.machines.shipped_profiles import (
    analytic_profile,
    machine_for,
    read_profile,
    shipped_profile,
)
from parplan.profiles.machines.speeds import ASSUMED_GROUPED, PassCurves
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import FlashKernel

CHIP = Chip(peak_flops_per_s=1e15, bytes_per_s=1e12, num_sms=100)
COLUMNS = ("gpu", "op", "elements", "time_us", "source", "flag")


def write(path, columns, rows):
    with path.open("w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([columns, *rows])


def made_up_family(rows):
    return CurveFamily(
        device="made-up",
        name="copy",
        rows=rows,
        sizes=lambda row: (int(row["elements"]),),
        start=(1e-6, 0.9),
        curve=lambda x: MemoryCurve(
            launch_s=float(x[0]),
            bandwidth_share=float(x[1]),
            kind=Kind.INTERPOLATED,
            source="made up",
        ),
        price=lambda row, curve: memory_bound_s(float(row["elements"]), curve, 1e12),
    )


def made_up_rows(noise):
    return [
        {"elements": str(n), "time_us": str((5.0 + n / 0.6e6) * wobble)}
        for n, wobble in zip((2**i for i in range(10, 34)), noise, strict=False)
    ]


def test_rows_that_no_profile_may_rest_on_are_refused(tmp_path):
    write(
        tmp_path / "elementwise.csv",
        COLUMNS,
        [
            ("A", "gelu", 1, 1, "x/good a", ""),
            ("A", "gelu", 2, 1, "x/good a", "strided_qkv"),
            ("A", "gelu", 3, 1, "x/good a", "tiny_gradients"),
            ("A", "gelu", 4, 1, "x/good a", "host_timed other_run_differs"),
            ("A", "gelu", 5, 1, "stas00/ml-engineering b", ""),
            ("B", "gelu", 6, 1, "x/good a", ""),
            ("A", "norm", 7, 1, "y/other a", ""),
        ],
    )
    tables = MeasurementTables((tmp_path,))

    def elements(**options):
        return [
            row["elements"]
            for row in tables.rows("elementwise", {"gpu": "A", "source": ("x/",)}, **options)
        ]

    assert elements() == ["1", "2"]
    assert elements(allow="tiny_gradients") == ["1", "2", "3"]


def test_a_fit_finds_the_constants_behind_exact_rows():
    scores: list[Score] = []
    curve = made_up_family(made_up_rows([1.0] * 24)).fitted(scores)

    assert (curve.launch_s, curve.bandwidth_share) == (
        pytest.approx(5e-6, rel=1e-3),
        pytest.approx(0.6, rel=1e-3),
    )
    assert (curve.bounds.low, curve.bounds.high) == ((2**10,), (2**33,))
    assert scores[0].median < 1e-3
    assert scores[0].crossed[0] < 1e-3


def test_a_fit_follows_the_median_not_the_outlier():
    noise = [1.0] * 24
    noise[20] = 10.0
    curve = made_up_family(made_up_rows(noise)).fitted([])

    assert curve.bandwidth_share == pytest.approx(0.6, rel=0.01)


def test_a_fit_is_deterministic_and_rounds_what_it_keeps():
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 24).tolist()
    first = made_up_family(made_up_rows(noise)).fitted([])
    second = made_up_family(made_up_rows(noise)).fitted([])

    assert (first.launch_s, first.bandwidth_share) == (second.launch_s, second.bandwidth_share)
    assert first.launch_s == rounded(first.launch_s)


def test_a_constant_that_does_not_matter_stays_finite():
    x = fit(lambda x: x[0] * np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]), (1.0, 7.0))

    assert x == pytest.approx([2.0, 7.0], rel=1e-3)


def test_a_score_is_in_absolute_percent():
    line = fit_score("d", "f", np.array([1.1, 0.8, 1.0]), np.ones(3), np.array([2.0, 1.0, 1.0]))

    assert (line.median, line.mean) == (pytest.approx(0.1), pytest.approx(0.1))
    assert line.crossed == (0.0, pytest.approx(1 / 3))
    assert "10.0%" in str(line)


def test_a_collective_spline_rises_even_where_rows_do_not(tmp_path):
    columns = ("gpu", "collective", "nodes", "ranks", "bytes", "time_us", "source", "flag")
    rows = [
        (
            "A",
            name,
            1,
            ranks,
            512 * 2**i,
            (10.0 + 512 * 2**i / 1e5) * (0.8 if i == 6 else 1.0),
            "x/good a",
            "",
        )
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for ranks in (2, 4, 8)
        for i in range(21)
    ]
    write(tmp_path / "collectives.csv", columns, rows)
    curves = tuple(_curves(MeasurementTables((tmp_path,)), "made-up", ("A",), ("x/",), []))

    assert len(curves) == 12
    for curve in curves:
        assert list(curve.time_us) == sorted(curve.time_us)
        assert spline_s(curve, 2**29) == pytest.approx((10.0 + 2**29 / 1e5) / 1e6, rel=0.05)
        assert spline_s(curve, 512) == pytest.approx(10e-6, rel=0.05)


def test_a_profile_reads_back_as_it_was_written():
    text = shipped_profile_to_yaml(analytic_profile("made-up"))

    assert shipped_profile_to_yaml(read_profile(text, "made-up.yaml")) == text
    assert text.isascii()


def test_every_packaged_device_has_a_recipe_a_variant_or_a_datasheet():
    built = [part.device for group in (RECIPES, VARIANTS, DATASHEETS) for part in group]

    assert sorted([*built, "cpu"]) == sorted(cluster_names())
    assert len(set(built)) == len(built)


def test_a_variant_is_built_after_its_lender():
    known = [recipe.device for recipe in RECIPES]
    for variant in VARIANTS:
        assert variant.lender in known
        known.append(variant.device)


def every_curve(profile):
    for value in (getattr(profile.compute, name) for name in profile.compute.__dataclass_fields__):
        if isinstance(value, PassCurves):
            yield from (value.forward, value.backward)
        elif isinstance(value, Curve):
            yield value


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.device)
def test_a_variant_ships_curves_of_its_lender_and_calls_them_analytic(variant):
    measured = (
        {"forward", "input_gradient", "weight_gradient", "flash_forward", "flash_backward"}
        if variant.gpu
        else set()
    )
    if variant.device in GROUPED:
        measured.add("grouped")
    profile = shipped_profile(variant.device)
    for name in profile.compute.__dataclass_fields__:
        curve = getattr(profile.compute, name)
        if isinstance(curve, Curve):
            assert curve.kind is (Kind.INTERPOLATED if name in measured else Kind.ANALYTIC), name
            assert (
                variant.lender in curve.source
                or variant.gpu in curve.source
                or "assumed" in curve.source
            ), name


@pytest.mark.parametrize(
    "device", [recipe.device for recipe in RECIPES] + [variant.device for variant in VARIANTS]
)
def test_every_shipped_profile_prices_training_and_is_what_the_writer_writes(device):
    profile = shipped_profile(device)

    assert profile.name == device
    assert (
        read_profile(shipped_profile_to_yaml(profile), device).intra.link_share
        == profile.intra.link_share
    )
    for curve in every_curve(profile):
        assert curve.source
        assert all(
            0 < getattr(curve, share) <= 1
            for share in ("efficiency", "bandwidth_share")
            if hasattr(curve, share)
        )
    rising = [spline.time_us for spline in profile.intra.curves]
    assert all(list(times) == sorted(times) for times in rising)


def test_a_slower_link_keeps_the_shares_of_its_lender_and_no_curve():
    a100 = shipped_profile("a100-80gb").intra
    a800 = shipped_profile("a800-80gb").intra
    pcie = shipped_profile("a100-80gb-pcie").intra

    assert (a800.link_share, a800.link_bytes_per_s, a800.curves) == (a100.link_share, 200e9, ())
    assert (pcie.link_share, pcie.link_bytes_per_s, pcie.kind) == (0.75, 31.5e9, Kind.ANALYTIC)
    assert not machine_for(load_cluster("a800-80gb")).collective_curves
    assert shipped_profile("h800-80gb").intra.link_bytes_per_s == 200e9
    assert shipped_profile("h800-80gb").compute.forward.kind is Kind.ANALYTIC
    assert len(machine_for(load_cluster("h100-96gb-hbm2e")).collective_curves) == 4


def test_a_lower_power_limit_slows_what_power_limits_and_nothing_else():
    product = MatmulCurve(
        launch_s=1e-6,
        kind=Kind.INTERPOLATED,
        source="a",
        efficiency=0.8,
        k_half=100.0,
        bandwidth_share=0.8,
        throttle=0.2,
    )
    attention = FlashCurve(
        launch_s=1e-6,
        kind=Kind.INTERPOLATED,
        source="a",
        efficiency=0.8,
        keys_half=100.0,
        head_half=20.0,
    )
    copy = MemoryCurve(launch_s=1e-6, kind=Kind.INTERPOLATED, source="a", bandwidth_share=0.8)

    assert slowed(product, 0.25).throttle == pytest.approx(2 * 1.2 - 1)
    assert slowed(attention, 0.25).efficiency == pytest.approx(0.4)
    assert slowed(copy, 0.25) is copy


@pytest.mark.parametrize(("device", "lender"), list(LIMITS.items()))
def test_a_carried_power_limit_makes_products_analytic(device, lender):
    compute, limit = shipped_profile(device).compute, shipped_profile(lender).compute.forward
    for curve in (compute.forward, compute.input_gradient, compute.weight_gradient):
        assert (curve.throttle, curve.throttle_flops, curve.kind) == (
            limit.throttle,
            limit.throttle_flops,
            Kind.ANALYTIC,
        )
        assert lender in curve.source


@pytest.mark.parametrize(
    "sheet", [sheet for sheet in DATASHEETS if not sheet.links], ids=lambda sheet: sheet.device
)
def test_a_profile_from_a_datasheet_is_analytic_throughout(sheet):
    profile = from_datasheet(sheet, MeasurementTables(()), [])

    assert {curve.kind for curve in every_curve(profile)} == {Kind.ANALYTIC}
    assert profile.intra.kind is profile.inter.kind is Kind.ANALYTIC
    assert profile.compute.forward.efficiency / (
        1 + profile.compute.forward.throttle
    ) == pytest.approx(sheet.efficiency * sheet.sustained, rel=1e-3)
    assert shipped_profile_to_yaml(
        read_profile(shipped_profile_to_yaml(profile), sheet.device)
    ) == shipped_profile_to_yaml(profile)


def attention_rows(flag, passes):
    """Returns exact rows of a kernel at 600 TFLOP/s and less.

    The flagged rows have `passes` over k and v at 1 TB/s more.
    """
    curve = FlashCurve(
        launch_s=5e-6,
        kind=Kind.INTERPOLATED,
        source="made up",
        efficiency=0.8,
        keys_half=300.0,
        head_half=30.0,
    )
    rows = []
    for seq in (512, 1024, 2048, 4096, 8192, 16384):
        for head_dim in (64, 96, 128):
            for heads in (64, 96, 128):
                flops = 4.0 * heads * seq * seq / 2 * head_dim
                seconds = flash_attention_s(
                    flops,
                    heads=heads,
                    seq=seq,
                    keys=seq / 2,
                    head_dim=head_dim,
                    curve=curve,
                    chip=CHIP,
                )
                seconds += passes * 2 * 2 * heads * seq * head_dim / 1e12
                rows.append(
                    {
                        "kernel": "made-up",
                        "batch": "1",
                        "heads": str(heads),
                        "kv_heads": str(heads),
                        "seq": str(seq),
                        "head_dim": str(head_dim),
                        "v_head_dim": str(head_dim),
                        "causal": "1",
                        "time_us": str(1e6 * seconds),
                        "flag": flag,
                        "source": "made up",
                    }
                )
    return rows


def test_the_cache_writes_of_inference_rows_are_told_from_the_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(FitContext, "lender", lambda self, gpu: CHIP)
    context = FitContext(
        recipe=RECIPES[0],
        cluster=load_cluster("a100-80gb"),
        tables=MeasurementTables((tmp_path,)),
        scores=[],
    )
    rows = [*attention_rows("", 0.0), *attention_rows(CACHE_WRITE, 3.0)]

    curve = _flash(context, RECIPES[0].gpu, "forward", rows)

    assert type(curve) is FlashCurve
    assert (curve.efficiency, curve.keys_half, curve.head_half) == (
        pytest.approx(0.8, rel=0.01),
        pytest.approx(300.0, rel=0.02),
        pytest.approx(30.0, rel=0.05),
    )
    assert context.scores[0].median < 0.01


@pytest.mark.parametrize("kernel", ["flash2", "flash3"])
def test_published_speeds_as_rows_give_the_speeds_back(kernel):
    rows = _published_rows(kernel)
    longest = next(row for row in rows if (row["seq"], row["head_dim"]) == ("16384", "128"))

    assert len(rows) == 2 * len(PUBLISHED_SEQS)
    flops = 2.5 * 4 * 16384 * 16384 * 2048
    assert flops / (float(longest["time_us"]) / 1e6) == pytest.approx(
        {"flash2": 322e12, "flash3": 561e12}[kernel]
    )


def test_hoppers_curves_reproduce_the_published_figures_they_were_not_fitted_to():
    """FlashAttention-3 forward, causal, 2k to 16k tokens, against a fit to inference rows.

    The speeds are those of figure 5 of arXiv 2407.08608.
    """
    device, curve = (
        load_cluster("h100-80gb").device,
        shipped_profile("h100-80gb").compute.flash_forward,
    )
    chip = Chip(
        peak_flops_per_s=device.peak("bf16"),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=device.num_sms,
    )
    price = flash_price(chip, 1.0)
    published = {64: (371, 420, 460, 473), 128: (521, 579, 602, 616)}
    for head_dim, bars in published.items():
        for seq, tflops in zip((2048, 4096, 8192, 16384), bars, strict=True):
            row = {
                "batch": str(16384 // seq),
                "heads": str(2048 // head_dim),
                "seq": str(seq),
                "head_dim": str(head_dim),
                "v_head_dim": str(head_dim),
                "causal": "1",
                "flag": "",
            }
            measured_s = 4.0 * 16384 * seq / 2 * 2048 / tflops / 1e12
            assert price(row, curve) == pytest.approx(measured_s, rel=0.15)


@pytest.mark.parametrize(("device", "curve_kernel"), list(HOPPER_KERNELS.items()))
def test_older_kernels_are_slower_on_hopper_and_the_own_one_is_not_listed(device, curve_kernel):
    speeds = shipped_profile(device).compute.flash_kernels

    assert curve_kernel not in speeds
    assert (
        speeds[FlashKernel.FLASH1].forward
        < speeds.get(FlashKernel.FLASH2, speeds[FlashKernel.CUDNN]).forward
    )
    if curve_kernel is FlashKernel.FLASH3:
        assert 0.5 < speeds[FlashKernel.FLASH2].backward < speeds[FlashKernel.CUDNN].backward < 1.0


@pytest.mark.parametrize("device", BLACKWELL_CURVES)
def test_the_speed_of_flash_attention_2_on_blackwell_is_that_of_its_published_bars(device):
    compute = shipped_profile(device).compute

    assert compute.flash_kernels == {
        FlashKernel.FLASH2: blackwell_flash2(compute, chip_of(load_cluster(device)))
    }


def test_a_line_of_the_report_has_room_for_the_longest_name():
    longest = Score(device="a100-80gb-pcie", family="matmul y", rows=61, median=0.01, mean=0.02)
    short = Score(device="cpu", family="matmul y", rows=61, median=0.01, mean=0.02)

    assert _line(longest).index("matmul") == _line(short).index("matmul")


def test_the_constants_of_grouped_products_are_found_again_and_dw_is_no_row(tmp_path):
    profile = shipped_profile("b200-180gb")
    chip = chip_of(load_cluster(profile.name))
    made = replace(ASSUMED_GROUPED, slowdown=1.3, launch_s=5e-6)
    columns = (
        "gpu",
        "what",
        "pass",
        "groups",
        "m_per_group",
        "n",
        "k",
        "time_us",
        "source",
        "flag",
    )
    rows = []
    for groups, m, n, k in itertools.product((8, 64, 160), (128, 512, 4096), (4096,), (2048, 7168)):
        single_s = matmul_s(Product(m=m, n=n, k=k, batch=groups), profile.compute.forward, chip)
        time_us = 1e6 * grouped_s(single_s, groups, made)
        row = (GROUPED[profile.name], "grouped_gemm", "y", groups, m, n, k, time_us, "made", "")
        rows.append(row)
        rows.append((*row[:2], "dw", *row[3:7], 1.0, "made", ""))
    with (tmp_path / "grouped_matmul.csv").open("w", newline="") as file:
        csv.writer(file).writerows((columns, *rows))

    family = grouped_family(profile, MeasurementTables((tmp_path,)))
    curve = family.fit(family.rows)

    assert len(family.rows) == len(rows) // 2
    assert curve.slowdown == pytest.approx(1.3, rel=1e-2)
    assert curve.launch_s == pytest.approx(5e-6, rel=1e-2)


@pytest.mark.parametrize("device", list(STEADY))
def test_products_of_grace_blackwell_stay_at_the_limit_of_runs_that_sampled_the_power(device):
    forward = shipped_profile(device).compute.forward

    assert forward.throttle == STEADY[device].throttle
    assert STEADY["gb300-279gb"].throttle < STEADY["gb200-186gb"].throttle
    assert STEADY[device].source in forward.source


@pytest.mark.parametrize("device", STREAMS_OF_HOPPER)
def test_kernels_bound_by_memory_reach_less_of_it_on_blackwell_than_on_hopper(device):
    compute, hopper = shipped_profile(device).compute, shipped_profile("gh200-96gb").compute

    for name in ("norm", "elementwise", "residual", "softmax", "cross_entropy"):
        for way in ("forward", "backward"):
            here, there = getattr(getattr(compute, name), way), getattr(getattr(hopper, name), way)
            assert here.bandwidth_share == pytest.approx(0.78 * there.bandwidth_share, abs=1e-3)
            assert here.launch_s == there.launch_s
