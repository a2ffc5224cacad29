"""Families of models: published shapes by name, user files first, and models between members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.models import model_catalog
from parplan.profiles.models.families import parse_family
from parplan.profiles.models.model_catalog import (
    family_members,
    family_names,
    load_family,
    load_model,
    model_names,
)
from parplan.profiles.models.spec import Precision

PUBLISHED = {  # PatrickStar's examples (arXiv 2108.05818): hidden size and blocks
    "1b": (2048, 20),
    "2b": (2048, 40),
    "4b": (2304, 64),
    "6b": (3072, 53),
    "8b": (3072, 72),
    "10b": (4096, 50),
    "12b": (4096, 60),
    "15b": (4096, 78),
    "18b": (4096, 90),
    "20b-wide": (8192, 25),
    "40b": (8192, 50),
    "50b": (8192, 62),
    "60b": (8192, 75),
    "68b": (9216, 66),
    "175b-s1024": (12288, 96),
}
DOCUMENT = {
    "name": "own",
    "model": {
        "vocab_size": 100,
        "max_seq_length": 64,
        "norm": "layer_norm",
        "positions": "learned",
        "dropout": 0.0,
        "tied_embeddings": True,
    },
    "members": {
        "s": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
        "m": {"hidden_size": 96, "num_layers": 4, "num_heads": 6},
    },
    "training": {"global_batch_size": 8, "seq_length": 32},
    "source": "made up",
}


@pytest.mark.parametrize("label", PUBLISHED)
def test_a_member_is_found_by_name_and_has_the_published_shape(label):
    spec = load_model(f"gpt-{label}").spec

    assert (spec.hidden_size, spec.num_layers) == PUBLISHED[label]
    assert spec.name == f"gpt-{label}"
    assert (spec.head_dim * spec.num_heads, spec.ffn_hidden_size) == (
        spec.hidden_size,
        4 * spec.hidden_size,
    )
    assert spec.max_seq_length == load_model(f"gpt-{label}").seq_length == 1024


def test_no_member_has_the_name_of_a_model_of_another_shape():
    names = [entry.spec.name for name in family_names() for entry in load_family(name).members]

    assert not set(names) & set(model_names())
    assert [entry.spec.name for entry in family_members()] == names


def test_a_file_of_its_own_hides_a_member_of_that_name(monkeypatch):
    monkeypatch.setattr(model_catalog, "model_names", lambda: ("gpt-7.5b", "gpt-18b"))
    monkeypatch.setattr(
        model_catalog,
        "_model_from_file",
        lambda source: replace(load_family("gpt").members[0], source="of its own"),
    )

    assert load_model("gpt-18b").source == "of its own"
    assert "gpt-18b" not in {entry.spec.name for entry in family_members()}


def test_a_model_between_members_takes_the_heads_of_the_nearest_width():
    spec = load_family("gpt").of_width(5120, 33).spec

    assert (spec.name, spec.num_layers, spec.hidden_size, spec.num_heads, spec.head_dim) == (
        "gpt-h5120-l33",
        33,
        5120,
        16,
        320,
    )
    assert spec.vocab_size == load_model("gpt-18b").spec.vocab_size
    with pytest.raises(ConfigError, match="the hidden size 5001 is not a multiple of the 16 heads"):
        load_family("gpt").of_width(5001, 33)


def test_members_out_of_order_are_refused():
    backwards = {**DOCUMENT, "members": dict(reversed(list(DOCUMENT["members"].items())))}

    assert [entry.spec.name for entry in parse_family(DOCUMENT, "x.yaml").members] == [
        "own-s",
        "own-m",
    ]
    with pytest.raises(
        ConfigError, match=r"x\.yaml: members: own-s is not larger than own-m before it"
    ):
        parse_family(backwards, "x.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"members": {}}, "members is empty", id="none"),
        pytest.param(
            {"members": {"s": {"hidden_size": 64, "num_layers": 2, "num_heads": 5}}},
            r"members\.s: the hidden size 64",
            id="heads",
        ),
        pytest.param({"sizes": {}}, "sizes", id="unknown-key"),
    ],
)
def test_a_wrong_family_file_is_an_error_that_names_the_place(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_family({**DOCUMENT, **change}, "x.yaml")


@pytest.mark.parametrize(
    ("gpu", "requested", "precision", "phrase"),
    [
        pytest.param(
            "v100-32gb",
            None,
            Precision.FP16,
            "--precision fp16 (the device has no bf16)",
            id="v100",
        ),
        pytest.param("v100-32gb", "fp32", Precision.FP32, None, id="requested"),
        pytest.param("a100-40gb", None, Precision.BF16, "--precision bf16", id="a100"),
    ],
)
def test_the_default_precision_is_fp16_where_the_device_has_no_bf16(
    gpu, requested, precision, phrase
):
    request = request_of(TargetOptions(model="gpt-1b", gpus=8, gpu=gpu, precision=requested))

    assert request.training.precision is precision
    assert request.training.gradient_precision is Precision.FP32
    assert [text for text in request.assumed if text.startswith("--precision")] == (
        [phrase] if phrase else []
    )
