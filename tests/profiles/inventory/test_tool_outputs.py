"""Recorded outputs of tools and of a scheduler become the facts that they show."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.inventory.scheduler import (
    chosen_partition,
    host_names,
    levels_of_topology,
    partitions_of_sinfo,
)
from parplan.profiles.inventory.tool_outputs import (
    gpus_of_lspci,
    gpus_of_nvidia_smi,
    gpus_of_rocm_smi,
    links_of_topology,
    nics_of_ibstat,
    nics_of_lspci,
    numa_of_numactl,
)
from parplan.profiles.machines.driver_names import named_device, scheduled_device
from tests.profiles.inventory import recorded


def test_gpus_are_counted_and_named_by_each_tool():
    nvidia = gpus_of_nvidia_smi(recorded.NVIDIA_SMI)
    amd = gpus_of_rocm_smi(recorded.ROCM_SMI)
    pci = gpus_of_lspci(recorded.LSPCI)

    assert (nvidia.name, nvidia.count, nvidia.memory_bytes) == (
        "NVIDIA H100 80GB HBM3",
        8,
        81559 * 2**20,
    )
    assert (amd.name, amd.count, amd.memory_bytes) == ("AMD Instinct MI300X", 2, 206141652992)
    assert (pci.name, pci.count) == ("NVIDIA H100 80GB HBM3", 2)
    assert named_device(nvidia.name, nvidia.memory_bytes) == "h100-80gb"
    assert named_device(amd.name, amd.memory_bytes) == "mi300x-192gb"
    assert named_device(nvidia.name, 20 * 2**30) is None  # a part of a GPU


def test_nics_are_the_active_ports_of_the_highest_rate():
    active = nics_of_ibstat(recorded.IBSTAT)
    adapters = nics_of_lspci(recorded.LSPCI)

    assert (active.count, active.gbit_per_s, active.network) == (2, 400, "infiniband")
    assert (adapters.count, adapters.gbit_per_s) == (2, 400)


def test_numa_domains_and_bridged_pairs():
    numa = numa_of_numactl(recorded.NUMACTL)

    assert (numa.domains, numa.memory_bytes) == (2, (1031725 + 1032160) * 2**20)
    assert links_of_topology(recorded.TOPOLOGY_PAIRS).joined_gpus == 2
    assert links_of_topology(recorded.TOPOLOGY_PAIRS.replace("NV12", "PHB")).joined_gpus == 1


@pytest.mark.parametrize(
    "read",
    [
        gpus_of_nvidia_smi,
        gpus_of_rocm_smi,
        gpus_of_lspci,
        nics_of_ibstat,
        nics_of_lspci,
        numa_of_numactl,
        links_of_topology,
    ],
)
@pytest.mark.parametrize("text", ["", "command not found", "{}", "[1]", "a, b, c\n"])
def test_other_texts_show_nothing(read, text):
    assert read(text) is None


def test_sinfo_lines_of_one_kind_of_node_are_added():
    partitions = partitions_of_sinfo(recorded.SINFO)
    largest, old = chosen_partition(partitions, None), chosen_partition(partitions, "old")

    assert (largest.name, largest.nodes, largest.gpu, largest.gpus_per_node) == (
        "gpu",
        16,
        "h100",
        8,
    )
    assert largest.memory_bytes == 2063885 * 2**20
    assert (old.nodes, old.gpus_per_node, old.memory_bytes) == (20, 4, 1031700 * 2**20)
    assert scheduled_device(largest.gpu) == "h100-80gb"
    assert scheduled_device(old.gpu) == "a100-80gb"
    assert scheduled_device("abacus") is None
    with pytest.raises(ConfigError, match="no partition cpu with GPUs"):
        chosen_partition(partitions, "cpu")
    with pytest.raises(ConfigError, match="no node with whole GPUs"):
        chosen_partition((), None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gpu* 16 gpu:4 515000", ("", 4, 16)),
        ("gpu 16 gpu:a100:4(S:0-1) 515000+", ("a100", 4, 16)),
        ("gpu 16 gpu:a100:no_consume:4 1", ("a100", 4, 16)),
        ("gpu 16 gpu:nvidia_h100_80gb_hbm3:8(IDX:0-7) 1", ("nvidia_h100_80gb_hbm3", 8, 16)),
        ("gpu 2 gpu:a100_3g.20gb:4,gpu:a100:2 1", ("a100", 2, 2)),
        ("gpu 2 gres:tmp:1,gpu:v100:8 1", ("v100", 8, 2)),
        ("mig 16 gpu:1g.5gb:7 515000", None),
        ("mig 16 gpu:a100_3g.20gb:2(S:0-1) 515000", None),
        ("cpu 16 (null) 515000", None),
        ("gpu \u00b2 gpu:4 1", None),
        ("gpu 16 gpu:\u00b2 1", None),
        (f"gpu {'9' * 5000} gpu:4 1", None),
        ("gpu 16 gpu:0 1", None),
    ],
)
def test_whole_gpus_of_a_partition_are_counted_and_slices_are_not(line, expected):
    found = partitions_of_sinfo(f"{line}\n")

    assert [(each.gpu, each.gpus_per_node, each.nodes) for each in found] == (
        [] if expected is None else [expected]
    )


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("gpu[1-9999999]", "names more than 1,000,000 hosts"),
        ("gpu[1-99999999999]", "is '99999999999', needed is a whole number"),
        ("gpu[a-b]", "a host of gpu.* is 'a', needed is a whole number"),
    ],
)
def test_a_range_of_hosts_is_bounded(hosts, message):
    with pytest.raises(ConfigError, match=message):
        levels_of_topology(f"SwitchName=s0 Level=0 LinkSpeed=1 Nodes={hosts}")


def test_switches_of_a_level_join_the_nodes_of_the_largest():
    levels = levels_of_topology(recorded.SWITCHES)

    assert [(each.level, each.nodes, each.switches) for each in levels] == [(0, 4, 2), (1, 8, 1)]
    assert list(host_names("a[08-10,2],b,c3")) == ["a08", "a09", "a10", "a2", "b", "c3"]
