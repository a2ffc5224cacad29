"""Formats of products: what casts move, who runs them, and plans of older files."""

from __future__ import annotations

import pytest

from parplan.costmodels.operators.compute import narrow_curve
from parplan.planner.plan.old_plans import in_todays_form
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, stack_names
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.product_formats import (
    FORMATS,
    PROMOTED_SUMS,
    ProductFormat,
    gradient_slowdown,
    narrow_efficiency,
    narrow_power,
)
from tests.helpers.command_runs import fail, succeed


def test_every_format_has_a_row():
    assert set(FORMATS) == set(ProductFormat)


def test_narrow_products_reach_less_of_their_peak_and_start_as_slowly_as_others():
    profile = shipped_profile("b200-180gb")
    assert profile is not None
    curve = profile.compute.forward
    fp8 = narrow_curve(curve, 2.0, "fp8", 10.0)

    assert fp8.efficiency == pytest.approx(0.95 * curve.efficiency)
    assert fp8.k_half / fp8.efficiency == pytest.approx(2 * curve.k_half / curve.efficiency)
    assert fp8.throttle == pytest.approx(0.9 * (1 + curve.throttle) - 1)
    assert narrow_power(9.0) == 1
    assert narrow_efficiency("fp4", 10.3) < narrow_efficiency("fp4", 10.0)


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("fp8-delayed", 2 + 2),
        ("fp8-current", 4 + 1),
        ("mxfp8", 2 + 2 * 33 / 32),
        ("nvfp4", 4 + 2 * (0.5 + 1 / 16)),
    ],
)
def test_a_cast_reads_16_bits_and_writes_the_copies(name, moved):
    assert FORMATS[ProductFormat(name)].cast_bytes(2) == moved


def test_gradients_promote_their_sums_in_fp8_before_blackwell():
    assert gradient_slowdown("fp8", 9.0) == PROMOTED_SUMS
    assert gradient_slowdown("fp8", 10.0) == gradient_slowdown("fp4", 10.0) == 1.0
    assert gradient_slowdown("fp8", None) == 1.0


def test_the_formats_of_the_stacks_have_a_device_that_runs_them():
    named = {each for name in stack_names() for each in load_stack(name).product_formats}

    assert named == set(ProductFormat)
    b200 = load_cluster("b200-180gb").device
    assert all(FORMATS[each].peak in b200.peak_flops_per_s for each in named)


def test_a_format_is_an_option_of_precision():
    plan = succeed(
        *("--model", "gpt-1.5b", "--gpus", "8", "--gpu", "b200-180gb"),
        *("--precision", "mxfp8", "--json"),
    )

    assert '"products": "mxfp8"' in plan.stdout
    assert '"precision": "bf16"' in plan.stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--gpu", "h100-80gb", "--precision", "mxfp8"), "h100-80gb has no products in mxfp8"),
        (("--gpu", "h100-80gb", "--precision", "nvfp4"), "h100-80gb has no fp4 arithmetic"),
        (("--gpu", "h100-80gb", "--stack", "nanotron", "--fp8"), "runs no products in fp8"),
        (("--gpu", "b200-180gb", "--precision", "mxfp8", "--fp8"), "both name a format"),
    ],
)
def test_what_runs_no_such_products_is_an_error(options, problem):
    assert problem in fail(2, "--model", "gpt-1.5b", "--gpus", "8", *options)


def test_an_older_plan_in_fp8_scales_by_tensor():
    body = {"plan_version": 2, "training": {"fp8_matmuls": True}}

    assert in_todays_form(body, "here")["training"] == {"products": "fp8-current", "stack": {}}
    plain = in_todays_form({"plan_version": 2, "training": {"fp8_matmuls": False}}, "here")
    assert plain["training"] == {"stack": {}}
