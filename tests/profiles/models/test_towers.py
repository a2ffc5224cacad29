"""The shape of a tower: what follows from it, and contradictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import text_alone
from parplan.profiles.models.towers import Projection, Tower

QWEN = load_model("qwen2.5-vl-7b").spec
GEMMA = load_model("gemma-3-4b").spec
LLAMA = load_model("llama4-scout").spec
WHISPER = load_model("whisper-large-v3").spec


def test_images_have_the_published_numbers_of_tokens():
    sizes = [(m.tower.tokens, m.tower.image_tokens) for m in (QWEN, GEMMA, LLAMA, WHISPER)]

    assert sizes == [(5120, 1280), (4096, 256), (577, 144), (1500, 0)]


def test_a_tower_has_two_more_layers_than_blocks():
    assert QWEN.num_blocks == 28 + 32 + 2
    assert text_alone(QWEN).num_blocks == QWEN.num_layers == 28


def test_windows_are_in_turns_with_full_attention():
    kinds = QWEN.tower.block_kinds

    assert [n for n, kind in enumerate(kinds) if not kind.window] == [7, 15, 23, 31]
    assert {kind.window for kind in kinds} == {0, (112 // 14) ** 2}


@pytest.mark.parametrize(
    ("products", "divided"),
    [
        pytest.param([(8, False)], (0,), id="one"),
        pytest.param([(8, True), (4, False)], (8, 0), id="two"),
        pytest.param([(8, True), (8, True), (4, False)], (8, 0, 0), id="a-pair-and-one"),
        pytest.param([(2, False), (8, True), (4, False)], (0, 8, 0), id="one-and-a-pair"),
    ],
)
def test_an_activated_product_is_divided_with_the_one_behind_it(products, divided):
    projector = tuple(Projection(width=width, activated=active) for width, active in products)

    assert replace(QWEN.tower, projector=projector).divided_widths == divided


def test_the_text_alone_names_the_tower_that_it_leaves_out():
    assert text_alone(QWEN).left_out == ("the vision tower",)
    assert text_alone(QWEN).tower is None
    assert text_alone(text_alone(QWEN)) == text_alone(QWEN)
    with pytest.raises(ConfigError, match="there is no text alone"):
        text_alone(WHISPER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 7}, "1280 is not a multiple of the 7 heads"),
        ({"merged": 7}, "5120 is not a multiple of the 7 patches of one token"),
        ({"projector": ()}, "0 products in its projector, and attended is false"),
        ({"attended": True}, "2 products in its projector, and attended is true"),
        ({"attended": True, "projector": ()}, "one image a sequence"),
        ({"images": 0}, "images is 0"),
        ({"blocks": (BlockRun(window=-1),)}, "window is -1"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(QWEN.tower, **changes)


def test_a_model_and_its_tower_agree():
    with pytest.raises(ConfigError, match="tower ends in 2048 features, hidden_size is 3584"):
        replace(QWEN, tower=replace(QWEN.tower, projector=(Projection(width=2048),)))
    with pytest.raises(ConfigError, match="a tower has none"):
        replace(WHISPER, dropout=0.1)
    assert isinstance(QWEN.tower, Tower)
