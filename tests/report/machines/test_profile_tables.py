"""A profile as text, as JSON values and as a picture, and two of them compared."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import cache

import pytest
from rich.console import Console

from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import CollectiveCurve
from parplan.profiles.machines.machine_catalog import cluster_document
from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    with_memory_facts,
)
from parplan.profiles.profiler.fits.profile_fit import fit_profile
from parplan.report.machines.profile_diff import (
    changed_environment,
    compared,
    diff_document,
    print_diff,
)
from parplan.report.machines.profile_document import profile_document
from parplan.report.machines.profile_series import series_of
from parplan.report.machines.profile_tables import figures_of, print_profile
from parplan.report.plots.profile_plot import draw_profile
from tests.helpers.cases import mostly_slow
from tests.helpers.synthetic_profiles import CLUSTER, Machine

LINKS = analytic_profile("a100-80gb")
SIZES = (1024, 2**20, 2**30)
RING = CollectiveCurve(
    collective="all_reduce",
    ranks=8,
    bytes=SIZES,
    time_us=(20.0, 40.0, 5000.0),
    rows=3,
    median_error=0.01,
)
HERE = ProfileEnvironment(
    date="2026-11-21",
    device="NVIDIA A100-SXM4-80GB",
    num_devices=8,
    torch="2.13.0+cu130",
    driver="580.95",
    cuda="13.0",
    cpu="AMD EPYC",
    num_cores=64,
    host_memory_bytes=2**40,
    sm_clock_mhz=1410.0,
    max_sm_clock_mhz=1410.0,
    power_limit_w=400.0,
    gpu_links={"NV12": 28},
)


def profile_of(records, environment=HERE, curves=(RING,)):
    intra = replace(LINKS.intra, curves=curves)
    return with_memory_facts(
        UserProfile(
            profile_version=PROFILE_VERSION,
            device="a100-80gb",
            precision="bf16",
            environment=environment,
            cluster=cluster_document(CLUSTER),
            profile=fit_profile(records, CLUSTER, "bf16", intra=intra, inter=LINKS.inter),
            records=tuple(records),
        )
    )


@cache
def own():
    return profile_of(Machine(noise=0.03).every())


def printed(profile, width=160):
    out = io.StringIO()
    print_profile(profile, Console(file=out, width=width))
    return out.getvalue()


def compared_text(a, b):
    out = io.StringIO()
    print_diff(a, b, ("a.yaml", "b.yaml"), Console(file=out, width=120))
    return out.getvalue()


def row(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_the_text_says_on_what_it_was_measured():
    text = printed(own())

    assert text.startswith("a100-80gb, bf16: 122 of 124 cases measured\n")
    assert re.search(r"^  measured +2026-11-21 on 8 x NVIDIA A100-SXM4-80GB$", text, re.MULTILINE)
    assert re.search(
        r"^  software +torch 2\.13\.0\+cu130, CUDA 13\.0, driver 580\.95$", text, re.MULTILINE
    )
    assert re.search(r"^  clocks +SM 1410 of 1410 MHz, limit 400 W$", text, re.MULTILINE)
    assert re.search(r"^  host +AMD EPYC, 64 cores, 1\.0 TiB$", text, re.MULTILINE)
    assert re.search(r"^  links +28 x NV12 between GPUs$", text, re.MULTILINE)
    assert re.search(
        r"^  memory +reserved beyond allocated 4\.0 %, context 476\.8 MiB, granularity 512 B$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^  transfers +copied 1,800 GB/s, host launch 8\.00 us, "
        r"to device 24 GB/s, from device 22 GB/s$",
        text,
        re.MULTILINE,
    )


def test_a_curve_has_its_points_its_ends_and_its_errors():
    text, curve = printed(own()), own().profile.compute.forward
    gelu = own().profile.compute.named["gelu"].forward
    smallest, *_, largest = sorted(curve.points, key=lambda point: point[0] * point[1] * point[2])
    m, n, k, time_us = smallest

    cells = row(text, "forward ")

    assert cells[:7] == ["forward", "18", str(m), "x", str(n), "x", str(k)]
    assert float(cells[12]) == pytest.approx(2 * m * n * k / time_us / 1e6, rel=0.01)  # TFLOP/s
    assert float(cells[13]) == pytest.approx(
        2 * largest[0] * largest[1] * largest[2] / largest[3] / 1e6, rel=0.01
    )
    assert cells[14:] == [
        "TFLOP/s",
        f"{100 * curve.median_error:.1f}",
        "%",
        f"{100 * curve.worst_error:.1f}",
        "%",
    ]
    cells = row(text, "gelu.forward")
    assert cells[1:6] == ["7", "256.0", "KiB", "1.0", "GiB"]
    assert float(cells[7].replace(",", "")) == pytest.approx(
        gelu.points[-1][0] / gelu.points[-1][1] / 1e3, rel=0.01
    )  # GB/s


def test_what_overlap_costs_is_said_where_it_was_measured():
    assert "overlap" not in printed(own())

    text = printed(replace(own(), profile=replace(own().profile, contention=0.31)))

    assert re.search(
        r"^  overlap +a second of communication costs the compute that it runs under 0\.31 s$",
        text,
        re.MULTILINE,
    )


def test_groups_across_nodes_and_several_at_once_are_told_apart():
    across = replace(RING, nodes=2, groups=4)
    text = printed(
        replace(
            own(), profile=replace(own().profile, inter=replace(LINKS.inter, crossing=(across,)))
        )
    )

    assert re.search(r"^all_reduce +8 ranks +3 ", text, re.MULTILINE)
    assert re.search(r"^all_reduce +2 x 8 ranks, 4 groups +3 ", text, re.MULTILINE)


def test_failures_come_with_their_reasons_and_collectives_with_their_groups():
    text = printed(own())

    assert "2 of 124 cases not measured" in text
    assert re.search(
        r"linear m=65536 n=65536 k=65536 bias=0 bf16 +out of memory +tried to allocate 8\.00 GiB",
        text,
    )
    assert re.search(r"linear m=131072 .* hung +no answer in 60 s", text)
    assert row(text, "all_reduce") == [
        "all_reduce",
        "8",
        "ranks",
        "3",
        "1.0",
        "KiB",
        "20.0",
        "us",
        "1.0",
        "GiB",
        "215",
        "GB/s",
    ]


def test_what_nobody_measured_is_called_assumed():
    text = printed(profile_of([Machine().linear(512, 512, 512)], curves=()))

    assumed = text.split("assumed, not measured: ")[1].replace("\n ", "")
    assert {"norm.forward", "optimizer", "flash_backward"} <= set(assumed.strip().split(", "))
    assert "weight_gradient" not in assumed
    assert "all_reduce" not in text


def test_a_profile_of_factors_only_has_nothing_to_show():
    only = UserProfile(profile_version=PROFILE_VERSION, device="a100-80gb")

    assert printed(only) == "a100-80gb: nothing measured\n"
    assert profile_document(only).curves == ()


def test_the_values_for_programs_are_those_of_the_text():
    body = json.loads(json.dumps(document(profile_document(own()))))

    forward = next(curve for curve in body["curves"] if curve["name"] == "forward")
    assert (forward["points"], forward["unit"], forward["last_sizes"]) == (
        18,
        "flops_per_s",
        [8192, 4096, 16384],
    )
    assert [failure["outcome"] for failure in body["failures"]] == ["out_of_memory", "hung"]
    assert body["memory"] == {
        "allocator_share": 0.04,
        "context_bytes": 500_000_000,
        "communicator_bytes": None,
        "granularity_bytes": 512,
    }
    assert body["figures"]["to_device_bytes_per_s"] == 2.4e10
    assert body["collectives"][0]["collective"] == "all_reduce"


def test_of_several_sizes_of_a_figure_the_largest_counts():
    machine = Machine()
    records = [
        machine.figures("device_copy", {"bytes": n}, copied_bytes_per_s=rate)
        for n, rate in ((1, 1e9), (2, 3e9), (3, 2e9))
    ]

    assert figures_of(replace(own(), records=tuple(records))) == {"copied_bytes_per_s": 3e9}


def test_points_are_beside_what_the_curve_says_of_them():
    of_one_work = [
        curve for curve in series_of(own()) if curve.curve.rows == len(curve.points)
    ]  # residual is fitted to its class
    assert len(of_one_work) == len(series_of(own())) - 2
    for curve in of_one_work:
        errors = sorted(abs(point.fitted_s / point.time_s - 1) for point in curve.points)
        assert errors[-1] == pytest.approx(curve.curve.worst_error, rel=0.01)
        assert [point.work for point in curve.points] == sorted(
            point.work for point in curve.points
        )


SMALL = profile_of([Machine().streamed("gelu", n_bytes) for n_bytes in (2**20, 2**24)], curves=())


@pytest.mark.parametrize(
    ("suffix", "start"),
    mostly_slow([("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")], {("svg", b"<?xml")}),
)
def test_the_picture_is_written_in_the_format_of_its_name(suffix, start, tmp_path):
    path = tmp_path / f"own.{suffix}"

    draw_profile(SMALL, path)

    assert path.read_bytes().startswith(start)


def test_the_picture_names_its_panels_curves_and_limits(tmp_path):
    two = replace(RING, ranks=2)
    draw_profile(
        replace(
            own(), profile=replace(own().profile, intra=replace(LINKS.intra, curves=(two, RING)))
        ),
        tmp_path / "own.svg",
    )

    text = (
        tmp_path / "own.svg"
    ).read_text()  # matplotlib keeps each text as a comment beside its glyphs
    for shown in (
        "matrix products by FLOPs",
        "fused attention by FLOPs",
        "operations bound by memory, by size",
        "all reduce by size",
        "weight_gradient",
        "gelu.backward",
        "8 ranks",
        "2 ranks",
        "peak, 312 TFLOP/s",
        "memory, 2,039 GB/s",
        "forward fitted, m = n = k",
    ):
        assert f"<!-- {shown} -->" in text, shown


def test_only_what_was_measured_gets_a_panel(tmp_path):
    draw_profile(SMALL, tmp_path / "own.svg")

    text = (tmp_path / "own.svg").read_text()
    assert "operations bound by memory" in text
    assert "matrix products" not in text
    assert "all reduce" not in text


def test_a_profile_without_points_is_not_drawn_and_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_profile(
            UserProfile(profile_version=PROFILE_VERSION, device="a100-80gb"), tmp_path / "own.png"
        )
    with pytest.raises(ConfigError, match="cannot write"):
        draw_profile(SMALL, tmp_path / "missing" / "own.png")


def test_a_profile_does_not_differ_from_itself():
    assert changed_environment(own(), own()) == {}
    for curve in compared(own(), own()):
        assert (curve.median, curve.only_a, curve.only_b) == (1.0, 0, 0)


def slower(record, factor):
    times = {
        name: replace(timing, median_us=factor * timing.median_us)
        for name, timing in record.measured.times.items()
    }
    return replace(record, measured=replace(record.measured, times=times))


def test_ratios_are_of_the_second_file_over_the_first_by_case_and_pass():
    machine = Machine()
    shared = [machine.linear(m, 512, 512) for m in (64, 128, 256)]
    a = profile_of([*shared, machine.linear(8, 8, 8)], curves=())
    slowed = [
        slower(record, factor) for record, factor in zip(shared, (1.5, 0.5, 1.1), strict=True)
    ]
    b = profile_of(
        [*slowed, machine.streamed("gelu", 4096), machine.failed(CaseOutcome.HUNG, "")],
        replace(HERE, driver="581", gpu_links={}),
        (),
    )

    forward = next(curve for curve in compared(a, b) if curve.name == "forward")
    text = compared_text(a, b)

    assert (forward.median, forward.only_a, forward.only_b) == (pytest.approx(1.1), 1, 0)
    assert [case for case, _ in forward.worst] == [
        shared[1].case.key,
        shared[0].case.key,
        shared[2].case.key,
    ]  # half is farther than 1.5
    assert row(text, "forward ") == ["forward", "3", "1", "0", "1.100", "0.500", "1.500"]
    assert "only in b.yaml: gelu.forward (1), gelu.backward (1)" in text
    assert re.search(r"^  driver +580\.95 +581$", text, re.MULTILINE)
    assert re.search(r"^  gpu_links +28 x NV12 +-$", text, re.MULTILINE)
    assert re.search(r"^forward +0\.500 +linear m=128 n=512 k=512 bias=0 bf16$", text, re.MULTILINE)


def test_at_most_five_cases_of_a_curve_are_named():
    machine = Machine()
    records = [machine.linear(64 * m, 512, 512) for m in range(1, 9)]
    a = profile_of([slower(record, 1.0**index) for index, record in enumerate(records)], curves=())
    b = profile_of([slower(record, 1.2**index) for index, record in enumerate(records)], curves=())

    body = json.loads(json.dumps(document(diff_document(a, b))))["curves"][0]

    assert body["name"] == "forward"
    assert [case["ratio"] for case in body["farthest"]] == pytest.approx(
        [1.2**index for index in (7, 6, 5, 4, 3)]
    )
    assert compared_text(a, b).count("\nforward  ") == 6


def test_machines_that_measured_nothing_in_common_say_so():
    a, b = (
        profile_of([Machine().linear(64, 64, 64)], curves=()),
        profile_of([Machine().linear(128, 64, 64)], curves=()),
    )

    text = compared_text(a, b)

    assert "no case was measured in both" in text
    assert "only in a.yaml: forward (1), input_gradient (1), weight_gradient (1)" in text
    assert diff_document(a, b).curves[0].median_ratio is None


def test_figures_of_the_same_case_are_compared():
    a = profile_of([Machine().figures("launch", {}, host_launch_s=8e-06)], curves=())
    b = profile_of([Machine().figures("launch", {}, host_launch_s=1.2e-05)], curves=())

    assert row(compared_text(a, b), "launch")[-3:] == ["0.000008", "0.000012", "1.500"]
    assert document(diff_document(a, b))["figures"] == {
        "launch bf16: host_launch_s": {"a": 8e-6, "b": 1.2e-5}
    }
