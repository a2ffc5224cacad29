"""Pools and joins: file round trip, the equal cluster that promises no more, errors by place."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.inventory.cluster_check import Weight, check_document
from parplan.profiles.machines.machine_catalog import cluster_from_document, load_cluster
from parplan.profiles.machines.pool_documents import (
    machine_document,
    machine_from_document,
    pools_of_text,
)
from parplan.profiles.machines.unequal_cluster import UnequalCluster, require_equal

LINE = {"name": "line", "gb_per_s_in_total": 12.5, "latency_us": 900.0, "source": "provider"}
SPINE = {"name": "spine", "gb_per_s_of_node": 10.0, "latency_us": 8.0, "source": "wiring plan"}
POOLS = [
    {"name": "old", "gpu": "a100-80gb", "nodes": 4},
    {"name": "new", "gpu": "h100-80gb", "nodes": 2, "stack": "megatron-core"},
]


def _mixed(**changes: object) -> UnequalCluster:
    body = {"name": "mixed", "pools": POOLS, "joins": [LINE], **changes}
    cluster = machine_from_document(body, "mixed.yaml")
    assert isinstance(cluster, UnequalCluster)
    return cluster


def test_a_file_of_pools_is_read_and_written_alike():
    cluster = _mixed()

    assert machine_from_document(machine_document(cluster), "again") == cluster
    assert [pool.cluster.num_gpus for pool in cluster.pools] == [32, 16]
    assert cluster.by_name["new"].stack == "megatron-core"
    assert cluster.join_of("new", "old").latency_s == pytest.approx(900e-6)


def test_as_one_cluster_it_is_the_slowest_of_everything():
    cluster = _mixed()
    old, new = (load_cluster(name) for name in ("a100-80gb", "h100-80gb"))

    assert cluster.num_gpus == 48
    assert cluster.device.name == "a100-80gb"
    assert cluster.device.memory_bytes == min(old.device.memory_bytes, new.device.memory_bytes)
    assert cluster.intra_node.bytes_per_s == old.intra_node.bytes_per_s
    assert cluster.node_bytes_per_s == pytest.approx(12.5e9 / 4)  # four nodes share the line


def test_a_join_of_each_node_grows_with_the_nodes():
    join = _mixed(joins=[SPINE]).join_of("old", "new")

    assert join.bytes_per_s(4) == pytest.approx(40e9)
    assert _mixed().join_of("old", "new").bytes_per_s(4) == pytest.approx(12.5e9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joins": []}, "0 joins between the pools old and new"),
        ({"joins": [LINE, SPINE]}, "2 joins between"),
        ({"joins": [{**LINE, "pools": ["old", "nw"]}]}, "nw"),
        ({"joins": [{**LINE, "gb_per_s_of_node": 3.0}]}, "stated twice"),
        ({"pools": POOLS[:1]}, "pools are old"),
        ({"pools": [{**POOLS[0], "stack": "x"}, POOLS[1]]}, "unknown stack 'x'"),
        ({"pools": [{**POOLS[0], "node": 1}, POOLS[1]]}, "pools: old: unknown key node"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        _mixed(**changes)

    assert "mixed.yaml" in str(error.value)


def test_pools_of_the_command_line_meet_at_the_slower_nics():
    cluster = pools_of_text("a100-80gb:32+h100:16")

    assert [pool.cluster.num_gpus for pool in cluster.pools] == [32, 16]
    slower = load_cluster("a100-80gb").node_bytes_per_s
    assert cluster.join_of("a100-80gb", "h100-80gb").node_bytes_per_s == slower
    with pytest.raises(ConfigError, match="h100 is not NAME:GPUS"):
        pools_of_text("a100-80gb:32+h100")
    with pytest.raises(ConfigError, match="a100-80gb is not NAME:GPUS"):
        pools_of_text("a100-80gb+h100-80gb", 64)
    with pytest.raises(ConfigError, match="names a100-80gb twice"):
        pools_of_text("a100-80gb:32+a100-80gb:32")
    with pytest.raises(ConfigError, match="33 GPUs do not fill whole nodes") as error:
        pools_of_text("a100-80gb:33+h100:16")
    assert "--gpus " not in str(error.value.hint)


def test_the_check_of_a_file_names_the_pool_and_the_join():
    body = {"name": "mixed", "pools": POOLS, "joins": [{**SPINE, "gb_per_s_of_node": 3200.0}]}

    _, findings = check_document(body, "mixed.yaml")

    keys = {finding.key: finding for finding in findings}
    assert keys["joins.spine.gb_per_s_of_node"].weight is Weight.UNLIKELY
    assert any(key.startswith("pools.old.") for key in keys)


def test_what_needs_equal_nodes_refuses_pools():
    with pytest.raises(ConfigError, match="plan size needs equal nodes"):
        require_equal(_mixed(), "plan size")
    with pytest.raises(ConfigError, match="the cluster has pools"):
        cluster_from_document(machine_document(_mixed()), "mixed.yaml")
