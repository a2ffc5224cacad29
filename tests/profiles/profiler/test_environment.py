"""The environment of a machine: nvidia-smi's texts, its identity, and its cluster."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.driver_names import CATALOGUE
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    cluster_from_document,
    load_cluster,
)
from parplan.profiles.machines.user_profile import ProfileEnvironment
from parplan.profiles.profiler import nvidia_smi as smi
from parplan.profiles.profiler.environment import (
    cluster_of,
    cpu_model_of,
    environment,
    fingerprint,
)
from parplan.profiles.profiler.nvidia_smi import gpu_facts, node_links, parse_gpu_facts, parse_links
from tests.helpers.synthetic_profiles import Machine

# nvidia-smi topo -m of a node of 4 GPUs and 2 NICs; the heading underlined, as since driver 510
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tNV12\tSYS\tPXB\tSYS\t0-63\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t0-63\t0\t\tN/A\n"
    "GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPXB\t64-127\t1\t\tN/A\n"
    "GPU3\tSYS\tNV12\tNV12\t X \tSYS\tPXB\t64-127\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\tN/A\n"  # an older driver, one GPU
A100 = ProfileEnvironment(
    date="2026-11-21",
    device="NVIDIA A100-SXM4-80GB",
    num_devices=4,
    torch="2.13.0+cu130",
    memory_bytes=84_987_740_160,
    num_sms=108,
    driver="580.95",
    cuda="13.0",
    sm_clock_mhz=1410.0,
    max_sm_clock_mhz=1410.0,
    power_limit_w=400.0,
)
UNKNOWN = replace(
    A100,
    device="NVIDIA RTX 6000 Ada Generation",
    memory_bytes=48 * 2**30,
    num_sms=142,
    host_memory_bytes=2**38,
)


def test_clocks_power_and_driver_are_those_of_the_first_gpu():
    text = "580.95.05, 1755, 1980, 2619, 2619, 700.00\n580.95.05, 345, 1980, 2619, 2619, 700.00\n"

    assert parse_gpu_facts(text) == {
        "driver": "580.95.05",
        "sm_clock_mhz": 1755.0,
        "max_sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "max_memory_clock_mhz": 2619.0,
        "power_limit_w": 700.0,
    }


@pytest.mark.parametrize(
    ("text", "actual"),
    [
        pytest.param(
            "550.54, [N/A], 1980, [Not Supported], 2619, [N/A]\n",
            {"driver": "550.54", "max_sm_clock_mhz": 1980.0, "max_memory_clock_mhz": 2619.0},
            id="not-supported",
        ),
        pytest.param("[N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\n", {}, id="nothing-known"),
        pytest.param(
            'Field "clocks.max.mem" is not a valid field to query.\n', {}, id="an-older-driver"
        ),
        pytest.param(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            {},
            id="no-driver",
        ),
        pytest.param("", {}, id="silent"),
    ],
)
def test_what_nvidia_smi_does_not_know_is_left_out(text, actual):
    assert parse_gpu_facts(text) == actual


def test_each_pair_of_gpus_and_each_gpu_with_each_nic_counts_once():
    links = parse_links(TOPOLOGY)

    assert links.gpus == {"NV12": 5, "SYS": 1}  # 6 pairs
    assert links.nics == {"PXB": 4, "SYS": 4}  # 4 GPUs x 2 NICs


@pytest.mark.parametrize(
    "text", [ALONE, "", "Failed to run topology matrix\n"], ids=["one-gpu", "silent", "failed"]
)
def test_one_gpu_or_none_has_no_links(text):
    assert (parse_links(text).gpus, parse_links(text).nics) == ({}, {})


@pytest.mark.parametrize(
    "program",
    ["#!/bin/sh\nexit 9\n", "#!/bin/sh\nsleep 5\n", None],
    ids=["fails", "hangs", "missing"],
)
def test_without_a_working_nvidia_smi_nothing_is_known_and_nothing_fails(
    program, tmp_path, monkeypatch
):
    if program:
        (tmp_path / "nvidia-smi").write_text(program)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(smi, "WAIT_S", 0.2)

    assert gpu_facts("GPU-1234") == {}
    assert node_links() == smi.Links()


def test_a_gpu_is_asked_by_what_torch_knows_it_by(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$3" = --id=GPU-1234 ] && echo 1.2, 3, 4, 5, 6, 7.5\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    assert gpu_facts("GPU-1234")["power_limit_w"] == 7.5
    assert gpu_facts(None) == {}


def test_the_environment_of_a_host_names_neither_it_nor_its_paths():
    described = environment("cpu")
    text = json.dumps(asdict(described))

    assert described.device == "cpu"
    assert described.num_devices == described.num_cores >= 1
    assert described.memory_bytes * described.num_devices <= described.host_memory_bytes
    assert described.torch.split(".")[0].isdigit()
    assert socket.gethostname() not in text
    assert "/" not in text.replace(described.cpu or "", "")


def test_a_machine_without_gpus_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="torch sees no GPU") as error:
        environment("cuda")
    assert "--device cpu" in error.value.hint


def test_a_node_of_gpus_is_what_torch_and_nvidia_smi_say(tmp_path, monkeypatch):
    import torch

    first = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=84_929_347_584,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid="12ab-34cd",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: first)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    (tmp_path / "topology").write_text(TOPOLOGY)
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in\n*topo*) cat "${0%/*}/topology";;\n'
        "*--id=GPU-12ab-34cd*) echo 580.95.05, 1755, 1980, 2619, 2619, 700.00;;\n"
        "*) exit 1;;\nesac\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    described = environment("cuda")

    assert (described.device, described.num_devices, described.memory_bytes, described.num_sms) == (
        first.name,
        4,
        first.total_memory,
        132,
    )
    assert (
        described.compute_capability,
        described.cuda,
        described.cudnn,
        described.nccl,
        described.driver,
    ) == (
        "9.0",
        "13.0",
        "91002",
        "2.27.3",
        "580.95.05",
    )
    assert (described.sm_clock_mhz, described.max_sm_clock_mhz, described.power_limit_w) == (
        1755.0,
        1980.0,
        700.0,
    )
    assert (described.gpu_links, described.nic_links) == (
        {"NV12": 5, "SYS": 1},
        {"PXB": 4, "SYS": 4},
    )
    assert "12ab" not in json.dumps(asdict(described))
    assert "mlx5" not in json.dumps(asdict(described))
    assert cluster_of(described).device == load_cluster("h100-80gb").device


def test_the_model_of_a_processor_is_read_and_missing_elsewhere():
    assert (
        cpu_model_of("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nflags : a\n")
        == "AMD EPYC 9654 96-Core Processor"
    )
    assert cpu_model_of("processor : 0\nCPU implementer : 0x41\n") is None


def test_dates_clocks_of_the_moment_and_numbers_of_gpus_do_not_separate_points_but_software_does():
    same = replace(A100, date="2027-01-01", sm_clock_mhz=345.0, num_devices=1, python="3.14")

    assert fingerprint(same) == fingerprint(A100)
    for change in (
        {"device": "NVIDIA A100-PCIE-40GB"},
        {"torch": "2.14"},
        {"driver": "581"},
        {"cuda": "13.1"},
        {"power_limit_w": 300.0},
    ):
        assert fingerprint(replace(A100, **change)) != fingerprint(A100)
    assert fingerprint(A100, "bf16") != fingerprint(A100, "fp32")


@pytest.mark.parametrize(("name", "cluster"), sorted(CATALOGUE.items()))
def test_every_name_in_the_catalogue_is_a_packaged_cluster(name, cluster):
    device = load_cluster(cluster).device
    there = ProfileEnvironment(
        date="",
        device=name,
        num_devices=2,
        torch="2",
        memory_bytes=device.memory_bytes,
        num_sms=device.num_sms,
    )

    actual = cluster_of(there)

    assert actual.device == device
    assert (actual.nodes, actual.gpus_per_node) == (1, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 10 * 2**30},
        {"num_sms": 14},
        {"device": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"},
    ],
    ids=["memory", "multiprocessors", "a-part"],
)
def test_a_gpu_that_is_not_what_its_name_says_has_what_was_measured(change):
    machine = Machine()
    records = (
        machine.linear(8192, 8192, 8192),
        machine.figures("device_copy", {"bytes": 1}, copied_bytes_per_s=1e11),
    )

    actual = cluster_of(replace(A100, **change), records).device

    assert actual.memory_bytes_per_s == 1e11
    assert "no datasheet" in actual.source


def test_an_unknown_gpu_is_as_fast_as_its_fastest_product_and_copy():
    machine = Machine()
    slow, fast = machine.linear(512, 512, 512), machine.linear(8192, 8192, 8192)
    records = (
        slow,
        fast,
        machine.figures("device_copy", {"bytes": 1}, copied_bytes_per_s=8e11),
        machine.figures("device_copy", {"bytes": 2}, copied_bytes_per_s=9e11),
        machine.figures(
            "transfer", {"bytes": 1}, to_device_bytes_per_s=2.5e10, from_device_bytes_per_s=2e10
        ),
    )

    cluster = cluster_of(UNKNOWN, records)

    fastest_us = min(timing.median_us for timing in fast.measured.times.values())
    assert cluster.device.peak_flops_per_s == {
        "bf16": pytest.approx(2 * 8192**3 / fastest_us * 1e6)
    }
    assert (
        cluster.device.memory_bytes_per_s,
        cluster.device.memory_bytes,
        cluster.device.num_sms,
    ) == (
        9e11,
        48 * 2**30,
        142,
    )
    assert (cluster.name, cluster.gpus_per_node, cluster.nodes) == (
        "nvidia-rtx-6000-ada-generation",
        4,
        1,
    )
    assert (cluster.host_memory_bytes, cluster.pcie_bytes_per_s) == (2**38, 2.5e10)
    assert cluster_from_document(cluster_document(cluster), "") == cluster


def test_a_host_is_a_node_of_its_cores():
    machine = Machine(precision="fp32")
    there = ProfileEnvironment(
        date="",
        device="cpu",
        num_devices=6,
        torch="2",
        memory_bytes=2**33,
        num_cores=6,
        host_memory_bytes=6 * 2**33,
        cpu="AMD EPYC",
    )
    records = (
        machine.linear(512, 512, 512),
        machine.figures("device_copy", {"bytes": 1}, copied_bytes_per_s=2e10),
        machine.figures("allocator", {}, context_bytes=3e8),
    )

    cluster = cluster_of(there, records)

    assert (cluster.name, cluster.device.name, cluster.gpus_per_node, cluster.device.num_sms) == (
        "cpu",
        "cpu",
        6,
        1,
    )
    assert (
        cluster.device.memory_bytes,
        cluster.host_memory_bytes,
        cluster.device.context_bytes,
    ) == (
        2**33,
        6 * 2**33,
        300_000_000,
    )
    assert list(cluster.device.peak_flops_per_s) == ["fp32"]
    assert "one core of AMD EPYC" in cluster.device.source


@pytest.mark.parametrize("missing", ["linear", "device_copy"])
def test_an_unknown_machine_of_which_nothing_was_measured_is_refused(missing):
    machine = Machine()
    records = {
        "linear": machine.linear(64, 64, 64),
        "device_copy": machine.figures("device_copy", {"bytes": 1}, copied_bytes_per_s=1e9),
    }
    del records[missing]

    with pytest.raises(ConfigError, match=f"{missing} was not measured"):
        cluster_of(UNKNOWN, records.values())
