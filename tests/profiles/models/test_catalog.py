"""Names and files -> models and clusters: datasheet figures in bytes and seconds, exact round
trips, errors with a place.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.profiles import catalog
from parplan.profiles.catalog import (
    cluster_document,
    cluster_from_document,
    cluster_names,
    load_cluster,
    load_model,
    load_stack,
    model_names,
    with_gpus,
)
from parplan.profiles.documents import reader
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelEntry, ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL

MODELS = (
    "gpt-1.5b",
    "gpt-175b",
    "gpt-1t",
    "gpt-2.5b",
    "gpt-20b",
    "gpt-22b",
    "gpt-530b",
    "gpt-7.5b",
    "gpt-8.3b",
    "gpt-tiny",
    "llama2-13b",
    "llama2-70b",
    "llama2-7b",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "mixtral-8x7b",
    "mixtral-tiny",
)
MEMBERS = (
    "gpt-1b",
    "gpt-2b",
    "gpt-4b",
    "gpt-6b",
    "gpt-8b",
    "gpt-10b",
    "gpt-12b",
    "gpt-15b",
    "gpt-18b",
    "gpt-20b-wide",
    "gpt-40b",
    "gpt-50b",
    "gpt-60b",
    "gpt-68b",
    "gpt-175b-s1024",
    "gpt-220b",
    "gpt-250b",
)
KNOWN = sorted((*MODELS, *MEMBERS))
CLUSTERS = (
    "a100-40gb",
    "a100-40gb-pcie",
    "a100-80gb",
    "a100-80gb-pcie",
    "a10g-24gb",
    "a800-80gb",
    "b200-180gb",
    "cpu",
    "gb200-186gb",
    "gh200-96gb",
    "h100-80gb",
    "h100-96gb-hbm2e",
    "h200-141gb",
    "l4-24gb",
    "rtx3090-24gb",
    "v100-16gb",
    "v100-32gb",
)


def test_the_packaged_names_are_listed_in_order():
    assert model_names() == MODELS
    assert cluster_names() == CLUSTERS


def test_listing_names_parses_no_file(monkeypatch):
    monkeypatch.setattr(catalog, "_read_yaml", lambda source: pytest.fail(f"read {source}"))

    assert len(model_names()) + len(cluster_names()) == len(MODELS) + len(CLUSTERS)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_is_complete_and_named_after_its_model(name):
    entry = load_model(name)

    assert entry.spec.name == name
    assert entry.source
    assert entry.seq_length <= entry.spec.max_seq_length
    TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_file_is_one_node_and_gives_a_source_for_each_part(name):
    cluster = load_cluster(name)

    assert (cluster.name, cluster.device.name, cluster.nodes) == (name, name, 1)
    assert cluster.device.source
    assert cluster.intra_node.source
    assert cluster.nic.source
    assert cluster.device.context_bytes < cluster.device.memory_bytes


@pytest.mark.parametrize(
    ("name", "shape"),
    [  # layers, hidden, heads, kv heads, head dim, ffn, vocabulary
        pytest.param("gpt-1.5b", (48, 1600, 25, 25, 64, 6400, 50257), id="gpt-1.5b"),
        pytest.param("gpt-2.5b", (54, 1920, 20, 20, 96, 7680, 51200), id="gpt-2.5b"),
        pytest.param("gpt-8.3b", (72, 3072, 32, 32, 96, 12288, 51200), id="gpt-8.3b"),
        pytest.param("gpt-20b", (44, 6144, 64, 64, 96, 24576, 51200), id="gpt-20b"),
        pytest.param("gpt-175b", (96, 12288, 96, 96, 128, 49152, 51200), id="gpt-175b"),
        pytest.param("gpt-530b", (105, 20480, 128, 128, 160, 81920, 51200), id="gpt-530b"),
        pytest.param("gpt-1t", (128, 25600, 160, 160, 160, 102400, 51200), id="gpt-1t"),
        pytest.param("llama2-7b", (32, 4096, 32, 32, 128, 11008, 32000), id="llama2-7b"),
        pytest.param("llama2-13b", (40, 5120, 40, 40, 128, 13824, 32000), id="llama2-13b"),
        pytest.param("llama2-70b", (80, 8192, 64, 8, 128, 28672, 32000), id="llama2-70b"),
        pytest.param("llama3-8b", (32, 4096, 32, 8, 128, 14336, 128256), id="llama3-8b"),
        pytest.param("llama3-70b", (80, 8192, 64, 8, 128, 28672, 128256), id="llama3-70b"),
        pytest.param("llama3-405b", (126, 16384, 128, 8, 128, 53248, 128256), id="llama3-405b"),
    ],
)
def test_model_shapes_are_the_published_ones(name, shape):
    spec = load_model(name).spec

    assert (
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.ffn_hidden_size,
        spec.vocab_size,
    ) == shape


def test_the_llama_files_say_what_sets_llama_apart():
    spec = load_model("llama3-8b").spec

    assert (spec.norm, spec.positions, spec.gated_ffn, spec.dropout) == (
        "rms_norm",
        "rotary",
        True,
        0.0,
    )
    assert (spec.linear_bias, spec.qkv_bias, spec.tied_embeddings) == (False, False, False)
    assert (spec.rope_theta, spec.norm_epsilon) == (500000.0, 1e-5)
    assert load_model("llama2-7b").spec.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("name", "batch", "seq"),
    [
        pytest.param("gpt-20b", 1024, 2048, id="the-benchmark-task"),
        pytest.param("gpt-8.3b", 512, 1024, id="merak"),
        pytest.param("gpt-175b", 1536, 2048, id="megatron"),
        pytest.param("llama2-70b", 1024, 4096, id="4-m-tokens"),
        pytest.param("llama3-405b", 2048, 8192, id="16-m-tokens"),
    ],
)
def test_training_defaults_come_from_the_model_file(name, batch, seq):
    entry = load_model(name)

    assert (entry.global_batch_size, entry.seq_length) == (batch, seq)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        pytest.param("gpt3_20b", "gpt-20b", id="nemo"),
        pytest.param("gpt3-175b", "gpt-175b", id="gpt3-dash"),
        pytest.param("GPT-20B", "gpt-20b", id="capitals"),
        pytest.param("llama3_8b", "llama3-8b", id="torchtitan"),
        pytest.param("Llama-2-7b", "llama2-7b", id="llama-2"),
        pytest.param("Llama-3.1-405B", "llama3-405b", id="llama-3.1"),
    ],
)
def test_other_projects_names_are_aliases(alias, name):
    assert load_model(alias) == load_model(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100", "a100-80gb"),
        ("H100", "h100-80gb"),
        ("A100_40GB", "a100-40gb"),
        ("rtx3090", "rtx3090-24gb"),
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
    "gh200-96gb": (4000e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 1, 1),
    "h200-141gb": (4800e9, (989e12, 989e12, 67e12), 132, 450e9, 50e9, 8, 8),
    "b200-180gb": (8000e9, (2250e12, 2250e12, 75e12), 148, 900e9, 50e9, 8, 8),
    "gb200-186gb": (8000e9, (2500e12, 2500e12, 80e12), 152, 900e9, 50e9, 72, 72),
    "rtx3090-24gb": (936e9, (71e12, 71e12, 35.6e12), 82, 15.75e9, 12.5e9, 1, 4),
    "a10g-24gb": (600e9, (70e12, 70e12, 35e12), 80, 15.75e9, 12.5e9, 1, 8),
    "l4-24gb": (300e9, (121e12, 121e12, 30.3e12), 58, 15.75e9, 12.5e9, 1, 8),
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
        ("gh200-96gb", 96),
        ("gb200-186gb", 186),
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
    body = yaml.safe_load(
        (catalog.files("parplan.configs") / "clusters" / f"{name}.yaml").read_text()
    )

    assert cluster_document(load_cluster(name)) == body
    assert cluster_from_document(body, "here") == load_cluster(name)


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


MODEL_YAML = """\
model:
  name: mine
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 4
  head_dim: 16
  ffn_hidden_size: 256
  vocab_size: 512
  max_seq_length: 128
training: {global_batch_size: 8, seq_length: 128}
source: made up
"""


def test_a_model_is_read_from_a_file_of_the_same_shape(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL_YAML)

    assert load_model(str(path)) == ModelEntry(
        spec=ModelSpec(
            name="mine",
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            ffn_hidden_size=256,
            vocab_size=512,
            max_seq_length=128,
        ),
        global_batch_size=8,
        seq_length=128,
        source="made up",
    )


def test_a_cluster_is_read_from_a_file_of_the_same_shape(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({**cluster_document(load_cluster("h100-80gb")), "name": "mine", "nodes": 4})
    )

    cluster = load_cluster(str(path))

    assert cluster == replace(load_cluster("h100-80gb"), name="mine", nodes=4)


@pytest.mark.parametrize(
    "folder", [pytest.param(False, id="file"), pytest.param(True, id="folder")]
)
def test_a_hugging_face_configuration_is_read_from_a_file_or_its_folder(tmp_path, folder):
    path = tmp_path / "my-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 256,
                "max_position_embeddings": 512,
            }
        )
    )

    spec = load_model(str(path.parent if folder else path)).spec

    assert (spec.name, spec.num_layers, spec.gated_ffn) == ("my-llama", 2, True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("gpt-20", "did you mean 'gpt-20b'?", id="near"),
        pytest.param("zzz", f"known: {', '.join(KNOWN)}", id="far"),
    ],
)
def test_an_unknown_model_is_an_error_that_suggests_a_name(name, hint):
    with pytest.raises(ConfigError) as caught:
        load_model(name)

    assert (caught.value.message, caught.value.hint) == (f"unknown model {name!r}", hint)


def test_an_unknown_cluster_is_an_error_that_suggests_a_name():
    with pytest.raises(ConfigError, match="unknown cluster 'h1000'") as caught:
        load_cluster("h1000")

    assert caught.value.hint == "did you mean 'h100-80gb'?"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "num_layers: 2", "num_layer: 2", "unknown key model.num_layer", id="misspelt-key"
        ),
        pytest.param("  num_layers: 2\n", "", "model.num_layers is missing", id="missing-key"),
        pytest.param(
            "num_layers: 2",
            "num_layers: two",
            "model.num_layers: input should be a valid integer",
            id="wrong-type",
        ),
        pytest.param(
            "num_layers: 2",
            "num_layers: 0",
            "model mine: num_layers is 0, it must be from 1 to 4,096",
            id="refused-value",
        ),
        pytest.param(
            "seq_length: 128}",
            "seq_length: 0}",
            "training.seq_length: input should be greater than or equal to 1",
            id="no-tokens",
        ),
        pytest.param("source: made up\n", "", "source is missing", id="no-source"),
        pytest.param(
            "num_heads: 4", "num_heads: [4", ":6: not YAML: ", id="broken-yaml-with-its-line"
        ),
        pytest.param(
            MODEL_YAML, "- 1\n", "the document must be a mapping, found list", id="a-list"
        ),
        pytest.param(
            MODEL_YAML, "", "the document must be a mapping, found NoneType", id="an-empty-file"
        ),
    ],
)
def test_a_wrong_model_file_is_an_error_with_its_place(tmp_path, old, new, message):
    path = tmp_path / "mine.yaml"
    path.write_text(MODEL_YAML.replace(old, new))

    with pytest.raises(ConfigError) as caught:
        load_model(str(path))

    assert caught.value.message.startswith(str(path))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"peak_tflops": {"bf17": 1}},
            r"here: device\.peak_tflops\.bf17: input should be 'fp8', 'bf16', 'fp16' or 'fp32'",
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param(
            "config.json",
            '{\n"model_type": "llama",\n',
            ":3: not JSON: ",
            id="broken-json-with-its-line",
        ),
        pytest.param("config.json", "[1]", ": a model is a mapping, found list", id="json-list"),
        pytest.param("mine.yaml", "\xff", ":1: not UTF-8 text", id="not-text"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_an_error_with_its_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, encoding="latin-1")

    with pytest.raises(ConfigError) as caught:
        load_model(str(path))

    assert f"{name}{message}" in caught.value.message


@pytest.mark.parametrize("load", [load_model, load_cluster])
def test_a_missing_file_is_an_error_that_names_it(load, tmp_path):
    path = tmp_path / "none.yaml"

    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file or directory"):
        load(str(path))


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


def test_a_broken_packaged_file_is_named_by_its_place_in_the_package(monkeypatch):
    monkeypatch.setattr(reader, "read_text", lambda *_: "model: ]")

    with pytest.raises(ConfigError, match=r"^configs/models/gpt-20b\.yaml:1: not YAML"):
        load_model("gpt-20b")
