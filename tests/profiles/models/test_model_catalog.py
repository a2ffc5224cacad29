"""Model names and files -> models: published shapes, aliases, errors with a place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parplan.profiles.documents import reader
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.model_catalog import load_model, model_names
from parplan.profiles.models.spec import ModelEntry, ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.helpers.published_configs import CONFIGS

MODELS = (
    "deepseek-tiny",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "dots.llm1",
    "ernie-4.5-0.3b",
    "ernie-4.5-21b-a3b",
    "ernie-4.5-300b-a47b",
    "falcon-40b",
    "falcon-7b",
    "gemma-2-27b",
    "gemma-2-9b",
    "gemma-3-12b",
    "gemma-3-27b",
    "gemma-3-4b",
    "gemma-tiny",
    "glm-4-9b",
    "glm-4-9b-0414",
    "glm-4.5",
    "glm-4.5-air",
    "gpt-1.5b",
    "gpt-175b",
    "gpt-1t",
    "gpt-2.5b",
    "gpt-20b",
    "gpt-22b",
    "gpt-530b",
    "gpt-7.5b",
    "gpt-8.3b",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "gpt-oss-tiny",
    "gpt-tiny",
    "granite-3-3b-a800m",
    "granite-3-8b",
    "granite-4-h-small",
    "granite-4-h-tiny",
    "granite-4-micro",
    "hunyuan-7b",
    "hunyuan-a13b",
    "kimi-k2",
    "llama2-13b",
    "llama2-70b",
    "llama2-7b",
    "llama3-405b",
    "llama3-70b",
    "llama3-8b",
    "llama4-maverick",
    "llama4-scout",
    "minimax-m2",
    "mistral-7b",
    "mistral-small-3.1-24b",
    "mixtral-8x22b",
    "mixtral-8x7b",
    "mixtral-tiny",
    "moonlight-16b-a3b",
    "nemotron-3-nano-30b-a3b",
    "nemotron-3-nano-4b",
    "nemotron-3-super-120b-a12b",
    "nemotron-3.5-lightning",
    "nemotron-h-8b",
    "nemotron-h-tiny",
    "olmo-2-13b",
    "olmo-2-32b",
    "olmo-2-7b",
    "olmo-3-32b",
    "olmo-3-7b",
    "phi-3-mini",
    "phi-4",
    "phi-4-mini",
    "qwen2-57b-a14b",
    "qwen2-vl-7b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen2.5-7b",
    "qwen2.5-vl-7b",
    "qwen3-14b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "qwen3-8b",
    "qwen3-moe-tiny",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
    "qwen3.5-9b",
    "seed-oss-36b",
    "smollm3-3b",
    "whisper-large-v3",
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


def test_the_packaged_names_are_listed_in_order():
    assert model_names() == MODELS
    assert len(MODELS) >= 40


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_that_of_its_configuration(name):
    published = entry_from_config(CONFIGS[name], f"{name}/config.json").spec

    assert load_model(name).spec == replace(published, rope_theta=load_model(name).spec.rope_theta)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # billions of parameters, as their makers state them; the vocabulary is padded here
        pytest.param("deepseek-v2", 236, 21, id="deepseek-v2"),
        pytest.param("deepseek-v2-lite", 15.7, 2.4, id="deepseek-v2-lite"),
        pytest.param("deepseek-v3", 671, 37, id="deepseek-v3"),
        pytest.param("kimi-k2", 1040, 32, id="kimi-k2"),
        pytest.param("moonlight-16b-a3b", 15.29, 2.24, id="moonlight"),
        pytest.param("gpt-oss-20b", 20.9, 3.6, id="gpt-oss-20b"),
        pytest.param("gpt-oss-120b", 116.8, 5.1, id="gpt-oss-120b"),
        pytest.param("qwen3-8b", 8.2, 8.2, id="qwen3-8b"),
        pytest.param("qwen3-30b-a3b", 30.5, 3.3, id="qwen3-30b-a3b"),
        pytest.param("qwen3-235b-a22b", 235, 22, id="qwen3-235b-a22b"),
        pytest.param("mixtral-8x22b", 141, 39, id="mixtral-8x22b"),
        pytest.param("gemma-2-27b", 27.2, 27.2, id="gemma-2-27b"),
        pytest.param("glm-4.5", 355, 32, id="glm-4.5"),
        pytest.param("glm-4.5-air", 106, 12, id="glm-4.5-air"),
        pytest.param("olmo-2-32b", 32.2, 32.2, id="olmo-2-32b"),
        pytest.param("phi-4", 14.7, 14.7, id="phi-4"),
        pytest.param("nemotron-h-8b", 8.1, 8.1, id="nemotron-h-8b"),
        pytest.param("nemotron-3-nano-30b-a3b", 31.6, 3.6, id="nemotron-3-nano"),
        pytest.param("nemotron-3-nano-4b", 3.97, 3.97, id="nemotron-3-nano-4b"),
        pytest.param("nemotron-3-super-120b-a12b", 120.6, 12.7, id="nemotron-3-super"),
        pytest.param("olmo-3-32b", 32.2, 32.2, id="olmo-3-32b"),
        pytest.param("qwen3-next-80b-a3b", 80, 3, id="qwen3-next-80b-a3b"),
        pytest.param("seed-oss-36b", 36, 36, id="seed-oss-36b"),
        pytest.param("ernie-4.5-300b-a47b", 300, 47, id="ernie-4.5-300b-a47b"),
        pytest.param("hunyuan-a13b", 80, 13, id="hunyuan-a13b"),
        pytest.param("dots.llm1", 142, 14, id="dots.llm1"),
        pytest.param("minimax-m2", 230, 10, id="minimax-m2"),
        pytest.param("granite-4-h-small", 32, 9, id="granite-4-h-small"),
        pytest.param("phi-4-mini", 3.8, 3.8, id="phi-4-mini"),
        pytest.param("llama4-scout", 109, 17, id="llama4-scout"),
        pytest.param("llama4-maverick", 400, 17, id="llama4-maverick"),
    ],
)
def test_sizes_are_those_that_the_makers_state(name, total, active):
    """Some count the embedding and the vision tower, and some do not: up to 5 % and 1.7 B apart."""
    spec = replace(load_model(name).spec, mtp_layers=0)
    graph = build_graph(spec, TrainingSpec(global_batch_size=1, seq_length=128, stack=NEUTRAL), 1)

    assert graph.num_parameters / 1e9 == pytest.approx(total, rel=0.05)
    assert graph.num_active_parameters / 1e9 == pytest.approx(active, rel=0.05, abs=1.7)


def test_listing_names_parses_no_file(monkeypatch):
    monkeypatch.setattr(reader, "read_text", lambda *_: pytest.fail("read a file"))

    assert len(model_names()) == len(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_file_is_complete_and_named_after_its_model(name):
    entry = load_model(name)

    assert entry.spec.name == name
    assert entry.source
    assert entry.seq_length <= entry.spec.max_seq_length
    TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )


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
            MODEL_YAML, "- 1\n", "the document must be a mapping, found a list", id="a-list"
        ),
        pytest.param(
            MODEL_YAML, "", "the document must be a mapping, found nothing", id="an-empty-file"
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
    ("name", "content", "message"),
    [
        pytest.param(
            "config.json",
            '{\n"model_type": "llama",\n',
            ":3: not JSON: ",
            id="broken-json-with-its-line",
        ),
        pytest.param("config.json", "[1]", ": a model is a mapping, found a list", id="json-list"),
        pytest.param("mine.yaml", "\xff", ":1: not UTF-8 text", id="not-text"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_an_error_with_its_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, encoding="latin-1")

    with pytest.raises(ConfigError) as caught:
        load_model(str(path))

    assert f"{name}{message}" in caught.value.message


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "none.yaml"

    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file or directory"):
        load_model(str(path))


def test_a_broken_packaged_file_is_named_by_its_place_in_the_package(monkeypatch):
    monkeypatch.setattr(reader, "read_text", lambda *_: "model: ]")

    with pytest.raises(ConfigError, match=r"^configs/models/gpt-20b\.yaml:1: not YAML"):
        load_model("gpt-20b")
