"""Rates between device and host: lanes, shares of uplinks, stated memory and measured rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.host.offload import (
    HOST_BYTES_PER_S,
    HOST_SHARE,
    NUMA_SHARE,
    copy_time,
    host_adam_time,
    host_time,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    cluster_from_document,
    load_cluster,
    with_gpus,
)
from parplan.profiles.machines.measurements import Case, CaseFigures, CaseOutcome, Record
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import HostSpeed
from parplan.profiles.profiler.fits.host_fit import host_speed
from parplan.profiles.provenance import Kind

DGX1, DGX_A100 = load_cluster("v100-32gb"), load_cluster("a100-40gb")
BARE = replace(DGX1, pcie_node_bytes_per_s=None, host_bytes_per_s=None)


def measured(cluster, **rates):
    return replace(
        cluster, profile=replace(analytic_profile(cluster.device.name), host=HostSpeed(**rates))
    )


def test_without_the_fields_every_gpu_has_its_lane_and_the_host_what_is_assumed():
    assert copy_time(10**9, BARE).value_s == pytest.approx(1e9 / 15.75e9)
    assert host_time(10**9, BARE).value_s == pytest.approx(8e9 / HOST_BYTES_PER_S)


@pytest.mark.parametrize(
    ("gpus", "rate"), [(8, 63e9 / 8), (4, 63e9 / 8), (2, 63e9 / 8), (1, 15.75e9)]
)
def test_the_gpus_of_a_node_share_its_uplinks_and_none_gets_more_than_its_lane(gpus, rate):
    """GPUs 0 and 1 are behind one switch: two of them have one uplink, as eight have four."""
    assert copy_time(10**9, with_gpus(DGX1, gpus)).value_s == pytest.approx(1e9 / rate)


def test_stated_memory_is_reached_as_far_as_adam_was_seen_to():
    assert host_adam_time(10**9, DGX1).value_s == pytest.approx(28e9 * 8 / (HOST_SHARE * 136.5e9))


@pytest.mark.parametrize(("gpus", "rate"), [(1, 51.2e9), (2, 25.6e9), (4, 25.6e9), (8, 25.6e9)])
def test_a_process_reaches_the_numa_domain_of_its_gpu_which_it_shares(gpus, rate):
    """A DGX A100 has 8 domains of 51.2 GB/s, of which 4 have two GPUs each."""
    assert host_adam_time(10**9, with_gpus(DGX_A100, gpus)).value_s == pytest.approx(
        28e9 / (NUMA_SHARE * rate)
    )
    without = replace(with_gpus(DGX_A100, gpus), numa_domains=None, gpus_per_numa=None)
    assert host_adam_time(10**9, without).value_s == pytest.approx(
        28e9 * gpus / (HOST_SHARE * 409.6e9)
    )


def test_domains_without_their_gpus_are_an_error():
    with pytest.raises(
        ConfigError, match="numa_domains is 2 and gpus_per_numa None, they are stated together"
    ):
        replace(DGX1, gpus_per_numa=None)


def test_measured_copies_take_the_place_of_the_lane_but_not_of_what_is_shared():
    one_gpu = measured(with_gpus(DGX1, 1), to_device_bytes_per_s=12e9, from_device_bytes_per_s=13e9)

    assert copy_time(10**9, one_gpu).value_s == pytest.approx(1 / 12)
    assert copy_time(10**9, one_gpu, to_host=True).value_s == pytest.approx(1 / 13)
    assert copy_time(10**9, one_gpu).kind is Kind.INTERPOLATED
    eight = measured(DGX1, to_device_bytes_per_s=12e9)
    assert copy_time(10**9, eight).value_s == pytest.approx(8 / 63)
    assert copy_time(10**9, eight).kind is Kind.ANALYTIC


def test_measured_adam_of_one_process_bounds_its_part_of_the_host():
    slow = measured(DGX1, adam_bytes_per_s=1e9)
    fast = measured(DGX1, adam_bytes_per_s=1e12)

    assert host_adam_time(10**9, slow).value_s == pytest.approx(28)
    assert host_adam_time(10**9, slow).kind is Kind.INTERPOLATED
    assert host_adam_time(10**9, fast) == host_adam_time(10**9, DGX1)


def test_what_one_process_was_measured_to_reach_is_taken_as_it_is_where_there_is_no_other():
    alone = measured(with_gpus(DGX_A100, 1), adam_bytes_per_s=2e11)

    assert host_adam_time(10**9, alone).value_s == pytest.approx(28e9 / 2e11)
    assert host_adam_time(10**9, alone).kind is Kind.INTERPOLATED


def test_the_rates_are_the_best_of_their_records():
    def record(work, outcome=CaseOutcome.MEASURED, **figures):
        return Record(
            case=Case(work=work, sizes=(), precision="bf16", passes=()),
            outcome=outcome,
            measured=CaseFigures(figures=figures),
        )

    records = [
        record("transfer", to_device_bytes_per_s=9.0, both_bytes_per_s=7.0),
        record("transfer", to_device_bytes_per_s=11.0),
        record("device_copy", bytes_per_s=99.0),
        record("host_adam", CaseOutcome.UNSUPPORTED),
    ]

    assert host_speed(records) == HostSpeed(to_device_bytes_per_s=11.0)
    assert host_speed([*records, record("host_adam", bytes_per_s=5.0)]) == HostSpeed(
        to_device_bytes_per_s=11.0, adam_bytes_per_s=5.0
    )
    assert host_speed(records[2:]) is None


def test_a_cluster_file_gives_the_rates_back():
    for name in ("v100-32gb", "a100-40gb", "gh200-96gb"):
        cluster = load_cluster(name)
        assert cluster_from_document(cluster_document(cluster), name) == cluster
