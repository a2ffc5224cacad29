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
    with pytest.raises(ConfigError, match="no node with GPUs"):
        chosen_partition((), None)


def test_switches_of_a_level_join_the_nodes_of_the_largest():
    levels = levels_of_topology(recorded.SWITCHES)

    assert [(each.level, each.nodes, each.switches) for each in levels] == [(0, 4, 2), (1, 8, 1)]
    assert list(host_names("a[08-10,2],b,c3")) == ["a08", "a09", "a10", "a2", "b", "c3"]
