"""`plan init`: files from options, tools, a scheduler and answers; what a check finds in them."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from parplan.cli import main
from parplan.profiles.inventory import found_machine
from parplan.profiles.machines.machine_catalog import cluster_document, load_cluster
from tests.profiles.inventory import recorded

TOOLS = {
    found_machine.NVIDIA_SMI: recorded.NVIDIA_SMI,
    found_machine.IBSTAT: recorded.IBSTAT,
    found_machine.NUMACTL: recorded.NUMACTL,
}


def run(*arguments, answers=None):
    return CliRunner().invoke(main, ["init", *map(str, arguments)], input=answers)


def written(path, *arguments, answers=None):
    result = run(path, *arguments, answers=answers)
    assert result.exit_code == 0, result.output
    return load_cluster(str(path))


def test_options_make_a_file_that_reads_back_and_says_where_figures_are_from(tmp_path):
    path = tmp_path / "mine.yaml"
    cluster = written(
        path,
        *("--gpu", "h100-80gb", "--nodes", 64, "--no-look", "--no-ask"),
        *("--level", "leaf:32", "--level", "pod:64:2.5", "--rails"),
        *("--nics", 4, "--nic-gbit-per-s", 200, "--network", "roce", "--host-memory", "1TiB"),
    )

    assert (cluster.name, cluster.nodes, cluster.device.name) == ("mine", 64, "h100-80gb")
    assert (cluster.nics_per_node, cluster.nic.name, cluster.nic.bytes_per_s) == (4, "roce", 25e9)
    assert cluster.host_memory_bytes == 2**40
    assert [(t.name, t.nodes, t.oversubscription, t.rails) for t in cluster.tiers] == [
        ("leaf", 32, 1.0, True),
        ("pod", 64, 2.5, False),
    ]
    text = path.read_text()
    assert "nodes: 64  # given" in text
    assert "gpus: 8  # of h100-80gb in plan clusters: check it" in text


def test_the_tools_of_the_machine_fill_the_file(tmp_path, monkeypatch):
    facts = found_machine.found_machine(lambda command: TOOLS.get(tuple(command), ""))
    monkeypatch.setattr(found_machine, "found_machine", lambda: facts)

    cluster = written(tmp_path / "found.yaml", "--nodes", 2, "--no-ask")

    assert (cluster.device.name, cluster.gpus_per_node, cluster.nodes) == ("h100-80gb", 8, 2)
    assert (cluster.nics_per_node, cluster.nic.name, cluster.nic.bytes_per_s) == (2, "ib-ndr", 50e9)
    assert (cluster.numa_domains, cluster.gpus_per_numa) == (2, 4)
    assert "found by ibstat" in (tmp_path / "found.yaml").read_text()


def test_a_gpu_that_is_not_packaged_is_named_with_its_tool(tmp_path, monkeypatch):
    tools = {found_machine.NVIDIA_SMI: "NVIDIA L40, 46068\n" * 8}
    facts = found_machine.found_machine(lambda command: tools.get(tuple(command), ""))
    monkeypatch.setattr(found_machine, "found_machine", lambda: facts)

    result = run(tmp_path / "l40.yaml", "--no-ask")

    assert "no machine with NVIDIA L40, found by nvidia-smi" in result.output
    assert "name a like one with --gpu" in result.output


def test_a_scheduler_says_nodes_gpus_and_switches(tmp_path):
    (tmp_path / "sinfo.txt").write_text(recorded.SINFO)
    (tmp_path / "switches.txt").write_text(recorded.SWITCHES)

    cluster = written(
        tmp_path / "slurm.yaml",
        *("--sinfo", tmp_path / "sinfo.txt", "--switches", tmp_path / "switches.txt"),
        *("--no-look", "--no-ask"),
    )

    assert (cluster.device.name, cluster.nodes, cluster.gpus_per_node) == ("h100-80gb", 16, 8)
    assert [tier.nodes for tier in cluster.tiers] == [4]


def test_questions_are_asked_for_what_is_not_known_and_enter_takes_the_usual(tmp_path):
    cluster = written(
        tmp_path / "asked.yaml", "--no-look", "--ask", answers="mi300x\n4\n\n\n\n2\n1.5\n"
    )

    assert (cluster.device.name, cluster.nodes, cluster.gpus_per_node) == ("mi300x-192gb", 4, 8)
    assert (cluster.tiers[0].nodes, cluster.tiers[0].oversubscription) == (2, 1.5)


def test_a_file_is_not_overwritten_unasked_and_a_gpu_must_be_known(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("mine")

    kept = run(path, "--gpu", "h100", "--no-look", "--no-ask")
    unknown = run(tmp_path / "new.yaml", "--no-look", "--no-ask")
    level = run(tmp_path / "new.yaml", "--gpu", "h100", "--level", "leaf:1")

    assert "exists" in kept.output
    assert path.read_text() == "mine"
    assert "no GPU was found" in unknown.output
    assert "needed NAME:NODES" in level.output
    assert not (tmp_path / "new.yaml").exists()


def changed(tmp_path, change):
    document = cluster_document(load_cluster("h100-80gb"))
    change(document)
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(document))
    return run("--check", path, "--json")


@pytest.mark.parametrize(
    ("change", "key", "hint"),
    [
        pytest.param(
            lambda d: d["device"].update(memory_gib=80 * 1.074),
            "device.memory_gib",
            "total_memory",
            id="gb-as-gib",
        ),
        pytest.param(
            lambda d: d["device"]["peak_tflops"].update(bf16=1979),
            "device.peak_tflops.bf16",
            "sparsity",
            id="sparse-peak",
        ),
        pytest.param(
            lambda d: d["node"]["link"].update(gb_per_s=900),
            "node.link.gb_per_s",
            "both directions",
            id="both-directions",
        ),
        pytest.param(
            lambda d: d["node"]["link"].update(gb_per_s=3600),
            "node.link.gb_per_s",
            "divide by 8",
            id="gbit-of-a-link",
        ),
        pytest.param(
            lambda d: d["node"]["nic"].update(gb_per_s=400),
            "node.nic.gb_per_s",
            "write 50",
            id="gbit-of-a-nic",
        ),
        pytest.param(
            lambda d: d["node"]["nic"].update(latency_us=4000),
            "node.nic.latency_us",
            "microseconds",
            id="nanoseconds",
        ),
        pytest.param(
            lambda d: d["node"].update(nics=3), "node.nics", "count the NICs", id="unequal-nics"
        ),
        pytest.param(
            lambda d: d.update(nodes=50, levels=[{"name": "leaf", "nodes": 32, "source": "x"}]),
            "levels",
            "whole units|scheduler",
            id="leaves-not-full",
        ),
        pytest.param(
            lambda d: d.update(nodes=50), "levels", "leaves and pods", id="many-nodes-no-level"
        ),
    ],
)
def test_a_check_names_the_key_and_one_action(tmp_path, change, key, hint):
    result = changed(tmp_path, change)

    found = [each for each in json.loads(result.stdout)["findings"] if each["key"] == key]
    assert found, result.stdout
    assert any(word in found[0]["hint"] for word in hint.split("|"))
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param(lambda d: d["node"].update(nic_gbit=400), "nic_gbit", id="unknown-key"),
        pytest.param(lambda d: d["node"].pop("gpus"), "gpus", id="missing-key"),
        pytest.param(lambda d: d["node"].update(gpus="eight"), "gpus", id="wrong-type"),
        pytest.param(lambda d: d["node"].update(hosts=3), "3 hosts", id="hosts-not-dividing"),
        pytest.param(
            lambda d: d.update(levels=[{"name": "leaf", "source": "x"}]), "leaf", id="no-size"
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_wrong_and_ends_with_2(tmp_path, change, word):
    result = changed(tmp_path, change)
    (found,) = json.loads(result.stdout)["findings"]

    assert (found["weight"], result.exit_code) == ("wrong", 2)
    assert word in found["message"]
    assert found["hint"]


def test_prices_stand_beside_what_nccl_tests_printed(tmp_path):
    path = tmp_path / "a100.yaml"
    path.write_text(yaml.safe_dump(cluster_document(load_cluster("a100-80gb"))))
    output = tmp_path / "all_reduce.txt"
    output.write_text(
        "# nThread 1 nGpus 8 minBytes 1073741824 maxBytes 1073741824 step: 2(factor) iters: 20\n"
        "# all_reduce_perf\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     "
        "time   algbw   busbw #wrong\n"
        "  1073741824     268435456     float     sum      -1   8100.0  132.56  231.98      0   "
        "8100.0  132.56  231.98      0\n"
    )

    result = run(
        *("--check", path, "--nccl-tests", output, "--test-nodes", 1),
        *("--test-ranks-per-node", 8, "--json"),
    )

    (row,) = json.loads(result.stdout)["collectives"]
    assert (row["collective"], row["nodes"], row["ranks_per_node"]) == ("all_reduce", 1, 8)
    assert row["measured_us"] == 8100
    assert abs(row["error"]) < 0.1
