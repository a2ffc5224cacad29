"""The images of a sequence on the command line."""

from __future__ import annotations

import pytest

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.pins import require_possible
from parplan.commands.requests.requests import request_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model


def request(model, **options):
    return request_of(TargetOptions(model=model, gpus=8, **options))


def test_images_and_their_tokens_are_the_model_s_by_default_and_are_named():
    seen = request("qwen2-vl-7b")

    assert seen.model == load_model("qwen2-vl-7b").spec
    assert "--images-per-sequence 1 (of 1280 tokens)" in seen.assumed
    assert not any("images" in phrase for phrase in request("llama3-8b").assumed)


def test_images_of_another_size_have_as_many_patches_as_become_their_tokens():
    tower = request("qwen2-vl-7b", images_per_sequence=4, image_tokens=256).model.tower

    assert (tower.images, tower.patches, tower.image_tokens) == (4, 1024, 256)


def test_no_image_leaves_the_text_alone():
    text = request("qwen2-vl-7b", images_per_sequence=0)

    assert text.model.tower is None
    assert text.model.left_out == ("the vision tower",)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama3-8b", {"images_per_sequence": 2}, "llama3-8b has no tower"),
        ("llama3-8b", {"image_tokens": 256}, "llama3-8b has no tower"),
        ("gemma-3-4b", {"image_tokens": 300}, "an image of gemma-3-4b has 256"),
        ("whisper-large-v3", {"images_per_sequence": 2}, "has one recording"),
        ("whisper-large-v3", {"images_per_sequence": 0}, "has one recording"),
        (
            "qwen2-vl-7b",
            {"images_per_sequence": 7},
            "7 images of 1280 tokens are longer than the sequence of 8192",
        ),
    ],
)
def test_images_that_a_model_cannot_have_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        request(model, **options)


def test_a_pin_that_would_divide_images_is_refused_by_name():
    target, pins = TargetOptions(model="qwen2-vl-7b", gpus=8), PinOptions(cp=(2, 4))

    with pytest.raises(ConfigError, match="--cp is pinned: context parallelism does not divide"):
        require_possible(request_of(target, pins))
    require_possible(request_of(target, PinOptions(cp=(1, 2))))
