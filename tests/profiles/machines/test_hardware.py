"""Devices and clusters as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster


def test_a_peak_is_looked_up_by_precision():
    device = load_cluster("a100-80gb").device

    assert device.peak("bf16") == 312e12
    assert device.peak("fp32") == 19.5e12


def test_a_missing_precision_says_which_ones_the_device_has():
    with pytest.raises(
        ConfigError, match=r"v100-32gb has no bf16 arithmetic \(it has fp16, fp32\)"
    ):
        load_cluster("v100-32gb").device.peak("bf16")


def test_a_cluster_counts_its_devices():
    cluster = replace(load_cluster("a100-80gb"), nodes=3)

    assert cluster.num_gpus == 24


@pytest.mark.parametrize("field", ["nodes", "gpus_per_node", "nics_per_node"])
def test_a_cluster_without_nodes_devices_or_nics_is_refused(field):
    cluster = load_cluster("a100-80gb")

    with pytest.raises(
        ConfigError, match=f"cluster a100-80gb: {field} is 0, it must be from 1 to 10,000,000"
    ):
        replace(cluster, **{field: 0})
