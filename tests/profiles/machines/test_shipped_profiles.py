"""Profiles: what ships is whole, rising and honest about itself; what does not is analytic."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import resources

import pytest

from parplan.profiles.build.__main__ import shipped_profile_to_yaml
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import Chip, Curve, Product, matmul_s
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import (
    analytic_profile,
    machine_for,
    read_profile,
    shipped_profile,
)
from parplan.profiles.machines.speeds import PassCurves
from parplan.profiles.provenance import Kind

SHIPPED = ("a100-40gb", "a100-80gb", "b200-180gb", "h100-80gb", "h200-141gb", "v100-32gb")
NOT_MEASURED = ("cpu",)


def compute_curves(profile):
    for field in fields(profile.compute):
        value = getattr(profile.compute, field.name)
        if isinstance(value, Curve):
            yield field.name, value
        elif isinstance(value, PassCurves):
            yield f"{field.name} forward", value.forward
            yield f"{field.name} backward", value.backward


def text_of(device):
    return (resources.files("parplan.profiles") / "data" / f"{device}.yaml").read_text(
        encoding="ascii"
    )


@pytest.mark.parametrize("device", SHIPPED)
def test_a_shipped_profile_is_that_of_its_device_and_says_where_each_curve_is_from(device):
    profile = machine_for(load_cluster(device)).profile

    assert profile.name == device
    assert all(curve.source for _, curve in compute_curves(profile))
    assert all(
        curve.rows > 0 for name, curve in compute_curves(profile) if curve.kind is Kind.INTERPOLATED
    )


@pytest.mark.parametrize("device", SHIPPED)
def test_the_shipped_files_are_what_the_writer_writes(device):
    assert shipped_profile_to_yaml(shipped_profile(device)) == text_of(device)


@pytest.mark.parametrize("device", SHIPPED)
def test_shares_of_a_datasheet_figure_lie_between_nothing_and_all(device):
    for name, curve in compute_curves(shipped_profile(device)):
        shares = [
            getattr(curve, field)
            for field in ("efficiency", "bandwidth_share")
            if hasattr(curve, field)
        ]
        assert all(0 < share <= 1 for share in shares), name


@pytest.mark.parametrize("device", SHIPPED)
def test_every_collective_curve_rises_with_bytes(device):
    for curve in shipped_profile(device).intra.curves:
        assert list(curve.time_us) == sorted(curve.time_us), (curve.collective, curve.ranks)
        assert list(curve.bytes) == sorted(set(curve.bytes))


@pytest.mark.parametrize("device", NOT_MEASURED)
def test_a_device_without_measurements_is_analytic_throughout(device):
    machine = machine_for(load_cluster(device))

    assert machine.profile is analytic_profile(device)
    assert {curve.kind for _, curve in compute_curves(machine.profile)} == {Kind.ANALYTIC}
    assert machine.profile.intra.kind is machine.profile.inter.kind is Kind.ANALYTIC
    assert not machine.collective_curves


def test_a_chip_with_another_memory_carries_curves_over_and_says_so():
    for name, curve in compute_curves(shipped_profile("a100-40gb")):
        assert curve.kind is Kind.ANALYTIC, name
        assert "a100-80gb" in curve.source or "assumed" in curve.source


def test_collective_curves_hold_only_on_the_link_they_were_measured_on():
    cluster = load_cluster("a100-80gb")
    pcie = replace(cluster, intra_node=replace(cluster.intra_node, bytes_per_s=25e9))

    assert set(machine_for(cluster).collective_curves) == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
    assert not machine_for(pcie).collective_curves


# Rows of matmul.csv of the measurements: ai-dynamo/aiconfigurator (Apache-2.0), SGLang collector,
# bf16, forward, y[m,n], us.
A100_PRODUCTS = (
    (4096, 4096, 4096, 548.896),
    (4096, 12288, 4096, 1675.465),
    (4096, 8192, 8192, 2194.34),
    (8192, 4096, 1024, 300.487),
    (8192, 1536, 12288, 1314.847),
    (8192, 8192, 8192, 4280.406),
    (8192, 12288, 12288, 9581.051),
)
H100_PRODUCTS = (
    (4096, 4096, 4096, 178.462),
    (4096, 12288, 4096, 519.615),
    (4096, 8192, 8192, 682.898),
    (8192, 4096, 1024, 97.388),
    (8192, 1536, 16384, 514.364),
    (8192, 8192, 8192, 1673.006),
    (8192, 12288, 12288, 3441.386),
)


@pytest.mark.parametrize(
    ("device", "rows", "median", "worst"),
    [
        pytest.param("a100-80gb", A100_PRODUCTS, 0.04, 0.08, id="a100"),
        pytest.param("h100-80gb", H100_PRODUCTS, 0.06, 0.15, id="h100"),
    ],
)
def test_large_forward_products_are_within_the_stated_error_of_published_times(
    device, rows, median, worst
):
    device_spec, curve = load_cluster(device).device, shipped_profile(device).compute.forward
    chip = chip_of_device(device_spec)
    errors = sorted(
        abs(matmul_s(Product(m=m, n=n, k=k), curve, chip, sustained=False) * 1e6 / time_us - 1)
        for m, n, k, time_us in rows
    )

    assert errors[len(errors) // 2] < median
    assert errors[-1] < worst


def chip_of_device(device):
    return Chip(
        peak_flops_per_s=device.peak("bf16"),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=device.num_sms,
    )


def test_a_malformed_profile_is_an_error_that_names_the_file_and_the_key():
    with pytest.raises(ConfigError, match=r"broken\.yaml: found text"):
        read_profile("just text", "broken.yaml")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*flash_colonels"):
        read_profile(text_of("h100-80gb").replace("flash_kernels", "flash_colonels"), "broken.yaml")
