"""Names and files -> clusters and stacks: datasheet figures, exact round trips, errors by place."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.resources import files

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.profiles.documents import reader
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    cluster_from_document,
    cluster_names,
    load_cluster,
    load_stack,
    with_gpus,
)

CLUSTERS = (
    "a100-40gb",
    "a100-40gb-pcie",
    "a100-80gb",
    "a100-80gb-pcie",
    "a10g-24gb",
    "a800-80gb",
    "b200-180gb",
    "b300-270gb",
    "cpu",
    "gaudi3-128gb",
    "gb200-186gb",
    "gb300-279gb",
    "gh200-96gb",
    "h100-80gb",
    "h100-80gb-pcie",
    "h100-94gb-nvl",
    "h100-96gb-hbm2e",
    "h20-96gb",
    "h200-141gb",
    "h800-80gb",
    "l4-24gb",
    "l40s-48gb",
    "mi250x-64gb",
    "mi300x-192gb",
    "mi325x-256gb",
    "mi355x-288gb",
    "rtx3090-24gb",
    "rtx4090-24gb",
    "rtx5090-32gb",
    "rtxa6000-48gb",
    "rtxpro6000-96gb",
    "v100-16gb",
    "v100-32gb",
)


def test_the_packaged_names_are_listed_in_order():
    assert cluster_names() == CLUSTERS


def test_listing_names_parses_no_file(monkeypatch):
    monkeypatch.setattr(reader, "read_text", lambda *_: pytest.fail("read a file"))

    assert len(cluster_names()) == len(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_file_is_one_node_and_gives_a_source_for_each_part(name):
    cluster = load_cluster(name)

    assert (cluster.name, cluster.device.name, cluster.nodes) == (name, name, 1)
    assert cluster.device.source
    assert cluster.intra_node.source
    assert cluster.nic.source
    assert cluster.device.context_bytes < cluster.device.memory_bytes


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100", "a100-80gb"),
        ("H100", "h100-80gb"),
        ("A100_40GB", "a100-40gb"),
        ("rtx3090", "rtx3090-24gb"),
        ("H100-PCIe", "h100-80gb-pcie"),
        ("rtx-pro-6000", "rtxpro6000-96gb"),
    ],
)
def test_a_short_device_name_is_an_alias(alias, name):
    assert load_cluster(alias) == load_cluster(name)


# bytes/s of memory; FLOP/s of bf16, fp16, fp32 (dense); SMs; bytes/s of link and of one NIC, one
# direction; NICs; GPUs
DATASHEETS = {
    "v100-16gb": (900e9, (None, 125e12, 15.7e12), 80, 150e9, 12.5e9, 4, 8),
    "v100-32gb": (900e9, (None, 125e12, 15.7e12), 80, 150e9, 12.5e9, 4, 8),
    "a100-40gb": (1555e9, (312e12, 312e12, 19.5e12), 108, 300e9, 25e9, 8, 8),
    "a100-80gb": (2039e9, (312e12, 312e12, 19.5e12), 108, 300e9, 25e9, 8, 8),
    "a100-40gb-pcie": (1555e9, (312e12, 312e12, 19.5e12), 108, 31.5e9, 25e9, 2, 8),
    "a100-80gb-pcie": (1935e9, (312e12, 312e12, 19.5e12), 108, 31.5e9, 25e9, 2, 8),
    "a800-80gb": (2039e9, (312e12, 312e12, 19.5e12), 108, 200e9, 25e9, 8, 8),
    "h100-80gb": (3350e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 8, 8),
    "h100-96gb-hbm2e": (2400e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 8, 8),
    "h800-80gb": (3350e9, (989e12, 989e12, 67e12), 132, 200e9, 50e9, 8, 8),
    "gh200-96gb": (4000e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 1, 1),
    "h200-141gb": (4800e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 8, 8),
    "b200-180gb": (8000e9, (2250e12, 2250e12, 75e12), 148, 900e9, 50e9, 8, 8),
    "gb200-186gb": (8000e9, (2500e12, 2500e12, 80e12), 152, 900e9, 50e9, 72, 72),
    "b300-270gb": (7700e9, (2250e12, 2250e12, 75e12), 148, 900e9, 100e9, 8, 8),
    "gb300-279gb": (8000e9, (2500e12, 2500e12, 80e12), 152, 900e9, 100e9, 72, 72),
    "rtx3090-24gb": (936e9, (71e12, 71e12, 35.6e12), 82, 15.75e9, 12.5e9, 1, 4),
    "a10g-24gb": (600e9, (70e12, 70e12, 35e12), 80, 15.75e9, 12.5e9, 1, 8),
    "l4-24gb": (300e9, (121e12, 121e12, 30.3e12), 58, 15.75e9, 12.5e9, 1, 8),
    "h100-80gb-pcie": (2039e9, (756e12, 756e12, 51e12), 114, 63e9, 50e9, 2, 8),
    "h100-94gb-nvl": (3938e9, (835e12, 835e12, 60e12), 132, 63e9, 50e9, 2, 8),
    "h20-96gb": (4000e9, (148e12, 148e12, 44e12), 78, 450e9, 50e9, 8, 8),
    "l40s-48gb": (864e9, (362e12, 362e12, 91.6e12), 142, 31.5e9, 50e9, 4, 8),
    "rtx4090-24gb": (1008e9, (165.2e12, 165.2e12, 82.6e12), 128, 15.75e9, 25e9, 1, 8),
    "rtx5090-32gb": (1792e9, (209.5e12, 209.5e12, 104.8e12), 170, 31.5e9, 25e9, 1, 8),
    "rtxa6000-48gb": (768e9, (154.8e12, 154.8e12, 38.7e12), 84, 31.5e9, 25e9, 1, 8),
    "rtxpro6000-96gb": (1597e9, (467.8e12, 467.8e12, 117e12), 188, 63e9, 50e9, 4, 8),
    "mi250x-64gb": (1638.4e9, (191.5e12, 191.5e12, 47.9e12), 110, 200e9, 25e9, 4, 8),
    "mi300x-192gb": (5300e9, (1307.4e12, 1307.4e12, 163.4e12), 304, 448e9, 50e9, 8, 8),
    "mi325x-256gb": (6000e9, (1307.4e12, 1307.4e12, 163.4e12), 304, 448e9, 50e9, 8, 8),
    "mi355x-288gb": (8000e9, (2516.6e12, 2516.6e12, 157.3e12), 256, 537.6e9, 50e9, 8, 8),
    "gaudi3-128gb": (3670e9, (1678e12, 459e12, 229e12), 64, 525e9, 75e9, 8, 8),
}


@pytest.mark.parametrize("name", list(DATASHEETS))
def test_datasheet_figures_are_decimal_units_exactly(name):
    """Peers multiplied TB/s by 1024**4 and got bandwidths 7-10 % wrong."""
    cluster = load_cluster(name)
    device = cluster.device
    peaks = tuple(device.peak_flops_per_s.get(precision) for precision in ("bf16", "fp16", "fp32"))

    assert (
        device.memory_bytes_per_s,
        peaks,
        device.num_sms,
        cluster.intra_node.bytes_per_s,
        cluster.nic.bytes_per_s,
        cluster.nics_per_node,
        cluster.gpus_per_node,
    ) == DATASHEETS[name]


@pytest.mark.parametrize(
    ("name", "nominal_gb"),
    [
        ("v100-32gb", 32),
        ("a100-40gb", 40),
        ("a100-80gb", 80),
        ("h100-80gb", 80),
        ("h200-141gb", 141),
        ("b200-180gb", 180),
        ("rtx3090-24gb", 24),
        ("a10g-24gb", 24),
        ("l4-24gb", 24),
        ("v100-16gb", 16),
        ("a100-40gb-pcie", 40),
        ("a100-80gb-pcie", 80),
        ("a800-80gb", 80),
        ("h100-96gb-hbm2e", 96),
        ("h800-80gb", 80),
        ("gh200-96gb", 96),
        ("gb200-186gb", 186),
        ("b300-270gb", 270),
        ("gb300-279gb", 279),
        ("h100-80gb-pcie", 80),
        ("h100-94gb-nvl", 94),
        ("h20-96gb", 96),
        ("rtx4090-24gb", 24),
        ("rtx5090-32gb", 32),
        ("rtxa6000-48gb", 48),
        ("rtxpro6000-96gb", 96),
        ("mi250x-64gb", 64),
        ("mi300x-192gb", 192),
        ("mi325x-256gb", 256),
        ("mi355x-288gb", 288),
        ("gaudi3-128gb", 128),
    ],
)
def test_memory_is_what_the_driver_offers_close_to_the_nominal_size(name, nominal_gb):
    """HBM parts are named in GB or GiB; the driver keeps up to 2 GiB of the card back."""
    offered = load_cluster(name).device.memory_bytes

    assert (
        (nominal_gb - 2) * 2** 30 < offered < nominal_gb * 2** 30
        or nominal_gb * 10** 9 < offered < nominal_gb * 1.07 * 10** 9
    )


def test_the_classic_bandwidth_bug_is_not_here():
    cluster = load_cluster("a100-80gb")

    assert cluster.device.memory_bytes == round(79.15 * 2**30)
    assert cluster.device.memory_bytes_per_s == 2.039e12
    assert cluster.device.memory_bytes_per_s != 2.039 * 1024**4
    assert cluster.nic.latency_s == 4e-6


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_document_of_a_cluster_is_the_file_it_came_from(name):
    body = yaml.safe_load((files("parplan.configs") / "clusters" / f"{name}.yaml").read_text())

    assert cluster_document(load_cluster(name)) == body
    assert cluster_from_document(body, "here") == load_cluster(name)


@pytest.mark.parametrize(
    ("gpus", "per_node", "hosts"),
    [(72, None, 18), (144, None, 18), (128, 64, 16), (8, None, 2), (2, None, 1), (6, None, 3)],
)
def test_the_gpus_of_an_nvlink_domain_are_on_hosts_of_four(gpus, per_node, hosts):
    """NVL72: 18 trays of 4 GPUs; fewer GPUs are equal parts of no more than a tray has."""
    cluster = with_gpus(load_cluster("gb200"), gpus, per_node)

    assert cluster.hosts_per_node == hosts
    assert cluster.gpus_per_node % hosts == 0
    assert with_gpus(load_cluster("h100"), gpus, per_node).hosts_per_node == 1


def test_a_smaller_node_keeps_the_islands_that_fit_it():
    assert with_gpus(load_cluster("h100-nvl"), 4).islands
    assert not with_gpus(load_cluster("h100-nvl"), 1).islands


SIZES = st.decimals(min_value="0.01", max_value="100000", places=3).map(float)


@settings(deadline=None)
@given(memory=SIZES, bandwidth=SIZES, peak=SIZES, latency=SIZES, context=SIZES, host=SIZES)
def test_any_cluster_document_comes_back_unchanged(memory, bandwidth, peak, latency, context, host):
    body = cluster_document(load_cluster("a100-80gb"))
    body["device"].update(
        memory_gib=memory,
        memory_gb_per_s=bandwidth,
        context_gib=context,
        peak_tflops={"bf16": peak},
    )
    body["node"]["link"].update(gb_per_s=bandwidth, latency_us=latency)
    body["node"].update(host_memory_gib=host, pcie_gb_per_s=bandwidth)

    cluster = cluster_from_document(body, "here")

    assert cluster_document(cluster) == body
    assert (
        cluster_from_document(yaml.safe_load(yaml.safe_dump(cluster_document(cluster))), "here")
        == cluster
    )


@settings(deadline=None)
@given(
    bandwidth=st.floats(min_value=1e6, max_value=1e13),
    memory=st.integers(min_value=1, max_value=2**45),
)
def test_measured_figures_stay_within_one_unit_in_the_last_place(bandwidth, memory):
    cluster = load_cluster("a100-80gb")
    cluster = replace(cluster, pcie_bytes_per_s=bandwidth, host_memory_bytes=memory)

    back = cluster_from_document(cluster_document(cluster), "here")

    assert back.host_memory_bytes == memory
    assert back.pcie_bytes_per_s == pytest.approx(bandwidth, rel=3 * sys.float_info.epsilon)


@pytest.mark.parametrize(
    ("num_gpus", "per_node", "expected"),
    [
        pytest.param(64, None, (8, 8, 8), id="whole-nodes"),
        pytest.param(8, None, (1, 8, 8), id="one-node"),
        pytest.param(2, None, (1, 2, 2), id="part-of-a-node"),
        pytest.param(1, None, (1, 1, 1), id="one-gpu"),
        pytest.param(12, 4, (3, 4, 4), id="smaller-nodes-have-fewer-nics"),
        pytest.param(32, 16, (2, 16, 16), id="larger-nodes"),
        pytest.param(4, 8, (1, 4, 4), id="fewer-than-the-given-node"),
    ],
)
def test_gpus_are_counted_off_in_nodes(num_gpus, per_node, expected):
    cluster = with_gpus(load_cluster("a100-80gb"), num_gpus, per_node)

    assert (cluster.nodes, cluster.gpus_per_node, cluster.nics_per_node) == expected
    assert cluster.num_gpus == num_gpus


def test_a_node_keeps_at_least_one_nic():
    assert with_gpus(load_cluster("a10g-24gb"), 8, 2).nics_per_node == 1


@pytest.mark.parametrize(
    ("num_gpus", "per_node", "message", "hint"),
    [
        pytest.param(
            12,
            None,
            "12 GPUs do not fill whole nodes of 8 a100-80gb",
            "use --gpus 8 or --gpus 16, or set --gpus-per-node to a divisor of 12",
            id="part-of-a-second-node",
        ),
        pytest.param(
            9,
            4,
            "9 GPUs do not fill whole nodes of 4 a100-80gb",
            "use --gpus 8 or --gpus 12, or set --gpus-per-node to a divisor of 9",
            id="given-node-size",
        ),
        pytest.param(0, None, "--gpus is 0, it must be at least 1", None, id="no-gpus"),
        pytest.param(8, 0, "--gpus-per-node is 0, it must be at least 1", None, id="empty-nodes"),
    ],
)
def test_gpus_that_fill_no_whole_nodes_are_an_error_with_the_nearest_counts(
    num_gpus, per_node, message, hint
):
    with pytest.raises(ConfigError) as caught:
        with_gpus(load_cluster("a100-80gb"), num_gpus, per_node)

    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_a_cluster_is_read_from_a_file_of_the_same_shape(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({**cluster_document(load_cluster("h100-80gb")), "name": "mine", "nodes": 4})
    )

    cluster = load_cluster(str(path))

    assert cluster == replace(load_cluster("h100-80gb"), name="mine", nodes=4)


def test_an_unknown_cluster_is_an_error_that_suggests_a_name():
    with pytest.raises(ConfigError, match="unknown cluster 'h1000'") as caught:
        load_cluster("h1000")

    assert caught.value.hint == "did you mean 'h100-80gb'?"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"peak_tflops": {"bf17": 1}},
            r"here: device\.peak_tflops\.bf17: input should be 'fp4', 'fp8', 'bf16', 'fp16' or",
            id="precision",
        ),
        pytest.param(
            {"memory_gib": -1},
            r"here: device\.memory_gib: input should be greater than 0, found -1",
            id="negative",
        ),
        pytest.param(
            {"memory_gb_per_s": float("inf")},
            r"here: device\.memory_gb_per_s: input should be a finite number",
            id="infinite",
        ),
        pytest.param(
            {"memory_gb": 80}, r"here: unknown key device\.memory_gb", id="wrong-unit-in-the-key"
        ),
    ],
)
def test_a_wrong_cluster_document_is_an_error_with_the_keys_path(change, message):
    body = cluster_document(load_cluster("a100-80gb"))
    body["device"].update(change)

    with pytest.raises(ConfigError, match=message):
        cluster_from_document(body, "here")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "none.yaml"

    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file or directory"):
        load_cluster(str(path))


def test_a_stack_file_keeps_what_it_states_and_takes_the_other_fitted_terms(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nterms_of: megatron-core\nkernel_slowdown: 1.5\n")
    shipped = load_stack("megatron-core")

    stack = load_stack(str(path))

    assert stack.kernel_slowdown == 1.5 != shipped.kernel_slowdown
    assert stack.host_operator_s == shipped.host_operator_s

    path.write_text("name: mine\nterms_of: megatron-cor\n")
    with pytest.raises(
        ConfigError, match=r"unknown stack 'megatron-cor' in terms_of of .*mine.yaml"
    ):
        load_stack(str(path))
