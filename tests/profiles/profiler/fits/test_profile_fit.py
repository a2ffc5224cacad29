"""Curves of a machine's records: constants come back, and few points are sane.

An unmeasured curve stays an assumption.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.profiles.documents.schema import document
from parplan.profiles.machines.curves import Chip, Product, matmul_s, memory_bound_s
from parplan.profiles.machines.hardware import Device
from parplan.profiles.machines.measured_points import curves_of
from parplan.profiles.machines.measurements import CaseOutcome, CasePass
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import Compute
from parplan.profiles.profiler.fits.profile_fit import fit_compute, fit_profile
from parplan.profiles.provenance import Kind
from tests.helpers.synthetic_profiles import CLUSTER, CURVES, LINEARS, Machine

ASSUMED = analytic_profile("a100-80gb").compute
CHIP = Chip(peak_flops_per_s=312e12, bytes_per_s=2.039e12, num_sms=108)
# Microseconds on one core of AMD EPYC, torch 2.13, fp32, while the other core was busy: m, n, k of
# a linear layer; bytes of gelu.
HOST_PRODUCTS = (
    (128, 64, 64, 17.4),
    (128, 192, 64, 41.0),
    (128, 256, 64, 57.3),
    (128, 64, 256, 57.6),
    (128, 768, 768, 2038.1),
    (128, 2304, 768, 6429.2),
    (128, 3072, 768, 8627.2),
    (128, 768, 3072, 8308.9),
    (512, 64, 64, 58.6),
    (512, 192, 64, 164.8),
    (512, 256, 64, 214.0),
    (512, 64, 256, 215.1),
    (512, 768, 768, 8815.9),
    (512, 2304, 768, 27903.5),
    (512, 3072, 768, 28009.6),
    (512, 768, 3072, 25801.9),
    (2048, 64, 64, 194.9),
    (2048, 192, 64, 548.7),
    (2048, 256, 64, 913.2),
    (2048, 64, 256, 718.7),
    (2048, 768, 768, 26517.7),
    (2048, 2304, 768, 78606.7),
    (2048, 3072, 768, 118783.9),
    (2048, 768, 3072, 109712.2),
)
HOST_GELU = ((131072, 14.5), (524288, 39.1), (2097152, 129.9), (8388608, 493.5), (33554432, 2946.6))
HOST = replace(
    CLUSTER,
    device=Device(
        name="cpu",
        memory_bytes=2**34,
        memory_bytes_per_s=2.3e10,
        peak_flops_per_s={"fp32": 9.36e10},
        num_sms=1,
        context_bytes=0,
        source="",
    ),
)


@cache
def exact() -> Compute:
    return fit_compute(Machine().every(), CLUSTER, "bf16")


@cache
def noisy() -> Compute:
    return fit_compute(Machine(noise=0.05).every(), CLUSTER, "bf16")


def measured() -> list[str]:
    """The names of the curves that the records of a machine measure."""
    names = {name for name, curve in curves_of(exact()).items() if curve.rows}
    return sorted(names & set(curves_of(CURVES)))


def host_records(products=HOST_PRODUCTS, gelu=HOST_GELU):
    machine = Machine(precision="fp32")
    return [
        *(
            machine.record(
                "linear",
                {"m": m, "n": n, "k": k, "bias": 0},
                [(CasePass(name="forward", curve="forward", sizes=(m, n, k)), time_us / 1e6)],
            )
            for m, n, k, time_us in products
        ),
        *(
            machine.record(
                "gelu",
                {"elements": n_bytes},
                [(CasePass(name="forward", curve="gelu.forward", sizes=(n_bytes,)), time_us / 1e6)],
            )
            for n_bytes, time_us in gelu
        ),
    ]


def test_the_constants_that_made_the_points_come_back():
    for name in measured():
        actual, true = curves_of(exact())[name], curves_of(CURVES)[name]

        assert actual.kind is Kind.INTERPOLATED, name
        assert actual.worst_error < 0.01, name
        assert actual.launch_s == pytest.approx(true.launch_s, rel=0.05), name
        for constant in {"efficiency", "bandwidth_share"} & {*actual.__dataclass_fields__}:
            made = getattr(true, constant)
            assert getattr(actual, constant) == pytest.approx(made, rel=0.02), name


@pytest.mark.slow
def test_errors_of_noisy_points_are_those_of_the_noise():
    for name in measured():
        actual = curves_of(noisy())[name]

        # the median of 5 % of noise is 3.4 %; a fit of few points has less
        assert 0.0 < actual.median_error < 0.08, name
        assert actual.median_error <= actual.worst_error < 0.25, name


def test_the_errors_of_a_curve_are_those_of_its_own_predictions():
    curve = noisy().forward
    errors = sorted(
        abs(matmul_s(Product(m=m, n=n, k=k), curve, CHIP, sustained=True) * 1e6 / time_us - 1)
        for m, n, k, time_us in ((*map(int, point[:3]), point[3]) for point in curve.points)
    )

    assert curve.rows == len(LINEARS) == len(errors)
    assert curve.worst_error == pytest.approx(errors[-1], rel=1e-3)
    assert curve.median_error == pytest.approx((errors[8] + errors[9]) / 2, rel=1e-3)


def test_bounds_are_the_smallest_and_largest_measured_sizes():
    assert (exact().forward.bounds.low, exact().forward.bounds.high) == (
        (512, 1024, 1024),
        (8192, 4096, 16384),
    )
    assert (exact().weight_gradient.bounds.low, exact().weight_gradient.bounds.high) == (
        (1024, 1024, 512),
        (16384, 4096, 8192),
    )
    assert (exact().flash_forward.bounds.low, exact().flash_forward.bounds.high) == (
        (512, 64),
        (4096, 128),
    )
    assert (exact().batched_forward.bounds.low, exact().batched_forward.bounds.high) == (
        (512, 64),
        (2048, 128),
    )
    assert exact().forward.kind_at((8192, 4096, 16385)) is Kind.ANALYTIC


def test_a_class_is_fitted_to_all_of_its_members_and_has_the_points_of_none():
    assert (
        exact().elementwise.backward.rows
        == exact().named["gelu"].backward.rows + exact().named["bias_gradient"].backward.rows
    )
    assert exact().elementwise.backward.points == ()
    assert len(exact().named["gelu"].backward.points) == exact().named["gelu"].backward.rows
    assert exact().residual.forward.rows == 2 * len(
        exact().residual.forward.points
    )  # residual, and dropped_residual's beside it
    assert exact().named["bias_gradient"].forward.kind is Kind.ANALYTIC  # it has no such pass


def test_an_operation_of_no_known_class_has_a_curve_too():
    compute = fit_compute(
        [
            Machine().record(
                "odd", {}, [(CasePass(name="time", curve="odd.forward", sizes=(2**20,)), 1e-4)]
            )
        ],
        CLUSTER,
        "bf16",
    )

    assert memory_bound_s(2**20, compute.named["odd"].forward, CHIP.bytes_per_s) == pytest.approx(
        1e-4, rel=0.05
    )


def test_without_points_every_curve_is_the_assumption_marked_analytic():
    compute = fit_compute([Machine().failed(CaseOutcome.HUNG, "")], CLUSTER, "bf16")

    assert document(compute) == document(ASSUMED)
    assert all(curve.kind is Kind.ANALYTIC for curve in curves_of(compute).values())


def without_backward(record, slower: float):
    times = {
        name: replace(timing, median_us=timing.median_us * slower)
        for name, timing in record.measured.times.items()
        if name == "forward"
    }
    return replace(record, measured=replace(record.measured, times=times))


def test_a_backward_pass_without_points_follows_a_forward_pass_that_is_slower_than_assumed():
    """A time budget that ends early leaves forward passes alone."""
    measured = (record for record in Machine().every() if record.measured)
    records = [without_backward(record, slower=20.0) for record in measured]

    compute = fit_compute(records, CLUSTER, "bf16")

    for passes in (compute.elementwise, compute.norm, compute.softmax):
        first, second = (
            memory_bound_s(1 << 24, curve, CHIP.bytes_per_s)
            for curve in (passes.forward, passes.backward)
        )
        assert second > 0.9 * first  # the assumed shares of bandwidth differ by less
    assert compute.flash_backward.efficiency < ASSUMED.flash_backward.efficiency / 10


def test_a_gradient_without_points_is_that_of_the_forward_product_marked_analytic():
    machine = Machine()
    passes = [
        (
            CasePass(name="forward", curve="forward", sizes=shape),
            machine.product_s(shape, "forward"),
        )
        for shape in LINEARS
    ]
    records = [
        machine.record(
            "linear", dict(zip("mnk", case_pass.sizes, strict=True)), [(case_pass, time_s)]
        )
        for case_pass, time_s in passes
    ]

    fitted = fit_compute(records, CLUSTER, "bf16")

    assert (
        fitted.input_gradient.kind,
        fitted.input_gradient.rows,
        fitted.input_gradient.points,
    ) == (
        Kind.ANALYTIC,
        0,
        (),
    )
    assert (
        fitted.input_gradient.efficiency
        == fitted.forward.efficiency
        == pytest.approx(CURVES.forward.efficiency, rel=0.02)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 7, 15])
def test_a_few_points_make_a_sane_curve(count, first):
    machine = Machine()
    actual = fit_compute(
        [machine.linear(*shape) for shape in LINEARS[first : first + count]], CLUSTER, "bf16"
    ).forward

    assert actual.median_error < 0.03
    assert 0.4 < actual.efficiency < 1.2
    for shape in LINEARS:  # the largest of them takes 10,000 times as long as the smallest
        m, n, k = shape
        predicted_s = matmul_s(Product(m=m, n=n, k=k), actual, CHIP, sustained=True)
        assert 0.6 < predicted_s / machine.product_s(shape, "forward") < 1.6


@pytest.mark.parametrize("n_bytes", [2**12, 2**20, 2**30])
def test_one_point_of_an_operation_bound_by_memory_is_met(n_bytes):
    record = Machine().record(
        "gelu",
        {},
        [(CasePass(name="forward", curve="gelu.forward", sizes=(n_bytes,)), 3e-5 + n_bytes / 5e11)],
    )

    curve = fit_compute([record], CLUSTER, "bf16").named["gelu"].forward

    assert memory_bound_s(n_bytes, curve, CHIP.bytes_per_s) == pytest.approx(
        3e-5 + n_bytes / 5e11, rel=0.05
    )


@pytest.mark.parametrize("launch_s", [4e-8, 4e-6, 4e-5, 4e-4, 4e-3])
def test_a_launch_far_from_the_assumed_one_is_found(launch_s):
    sizes = [2**power for power in (12, 16, 20, 24, 28)]
    records = [
        Machine().record(
            "gelu",
            {"elements": n_bytes},
            [
                (
                    CasePass(name="forward", curve="gelu.forward", sizes=(n_bytes,)),
                    launch_s + n_bytes / 1e12,
                )
            ],
        )
        for n_bytes in sizes
    ]

    actual = fit_compute(records, CLUSTER, "bf16").named["gelu"].forward

    assert actual.launch_s == pytest.approx(launch_s, rel=0.05)
    assert actual.bandwidth_share * CHIP.bytes_per_s == pytest.approx(1e12, rel=0.05)


def test_a_point_whose_repeats_disagree_counts_less():
    machine = Machine()
    good = machine.streamed("gelu", 2**26, ("forward",))

    def spoilt(spread: float):
        bad = machine.streamed("gelu", 2**28, ("forward",))
        timing = replace(
            bad.measured.times["forward"],
            median_us=2 * bad.measured.times["forward"].median_us,
            spread=spread,
        )
        bad = replace(bad, measured=replace(bad.measured, times={"forward": timing}))
        return (
            fit_compute([good, bad], CLUSTER, "bf16").named["gelu"].forward.bandwidth_share
            / CURVES.elementwise.forward.bandwidth_share
        )

    assert spoilt(2.0) == pytest.approx(1.0, abs=0.05)
    assert spoilt(0.0) < 0.9


def test_products_with_odd_rows_do_not_bend_the_curve_of_an_accelerator():
    machine = Machine()
    odd = [machine.linear(m, 50257, k) for m, _, k in LINEARS]
    slow = [
        replace(
            record,
            measured=replace(
                record.measured,
                times={
                    name: replace(timing, median_us=2.3 * timing.median_us)
                    for name, timing in record.measured.times.items()
                },
            ),
        )
        for record in odd
    ]

    fitted = fit_compute([*(machine.linear(*shape) for shape in LINEARS), *slow], CLUSTER, "bf16")

    assert fitted.forward.efficiency == pytest.approx(exact().forward.efficiency, rel=1e-6)
    assert fitted.weight_gradient.efficiency == pytest.approx(
        exact().weight_gradient.efficiency, rel=1e-6
    )
    assert (
        len(fitted.forward.points) == len(LINEARS) + len(LINEARS) // 2
    )  # they stay points; two n of LINEARS are one 50257
    assert fitted.forward.bounds.high == (8192, 50257, 16384)
    only = fit_compute(slow, CLUSTER, "bf16").forward
    assert only.rows == len(slow)
    assert only.efficiency < 0.5 * exact().forward.efficiency


def test_points_of_a_host_core_are_met_within_their_noise():
    fitted = fit_compute(host_records(), HOST, "fp32")

    assert fitted.forward.median_error < 0.12
    assert fitted.forward.worst_error < 0.3
    assert 0.7 < fitted.forward.efficiency < 1.05
    assert fitted.forward.k_half < 16
    assert fitted.named["gelu"].forward.median_error < 0.12


def test_a_host_has_no_tiles_that_a_width_could_fill_in_part():
    actual = fit_compute(host_records(), HOST, "fp32").forward
    chip = Chip(peak_flops_per_s=9.36e10, bytes_per_s=2.3e10, num_sms=1)

    def arithmetic_s(n: int) -> float:
        bare = replace(actual, launch_s=0.0, bandwidth_share=1e9)
        return matmul_s(Product(m=1024, n=n, k=64, operand_bytes=4, result_bytes=4), bare, chip)

    assert actual.untiled
    assert not exact().forward.untiled
    assert arithmetic_s(96) == pytest.approx(1.5 * arithmetic_s(64), rel=1e-6)


@pytest.mark.parametrize("index", range(len(HOST_PRODUCTS)))
def test_one_point_of_a_host_core_says_about_what_all_say(index):
    m, n, k, time_us = HOST_PRODUCTS[index]
    actual = fit_compute(host_records(HOST_PRODUCTS[index : index + 1], ()), HOST, "fp32").forward
    chip = Chip(peak_flops_per_s=9.36e10, bytes_per_s=2.3e10, num_sms=1)
    product = Product(m=m, n=n, k=k, operand_bytes=4, result_bytes=4)

    assert matmul_s(product, actual, chip, sustained=True) * 1e6 == pytest.approx(time_us, rel=0.02)
    assert 0.5 < actual.efficiency < 1.5


def test_a_profile_has_the_links_and_the_contention_that_it_is_given():
    links = analytic_profile("a100-80gb")

    profile = fit_profile(
        Machine().every(), CLUSTER, "bf16", intra=links.intra, inter=links.inter, contention=0.3
    )

    assert (profile.name, profile.intra, profile.inter, profile.contention) == (
        "a100-80gb",
        links.intra,
        links.inter,
        0.3,
    )
    assert document(profile.compute) == document(exact())


def test_no_curve_has_a_throttle_of_its_own():
    assert {
        curve.throttle for curve in curves_of(noisy()).values() if hasattr(curve, "throttle")
    } == {0.0}
