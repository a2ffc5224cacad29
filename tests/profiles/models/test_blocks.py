"""Unlike blocks: their runs, their names, and the classes of the operator graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, LatentAttention, SharedExperts
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import BlockClass, LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

LLAMA = load_model("llama3-8b").spec
MIXTRAL = load_model("mixtral-8x7b").spec
TRAINING = TrainingSpec(global_batch_size=1, seq_length=64, stack=NEUTRAL)
LOCAL = (BlockRun(num_blocks=5, window=16), BlockRun())


def graph(model: ModelSpec):
    return build_graph(model, TRAINING, 1)


def test_runs_repeat_until_all_blocks_have_a_kind():
    model = replace(LLAMA, num_layers=14, blocks=LOCAL)

    assert [kind.window for kind in model.block_kinds] == [16] * 5 + [0] + [16] * 5 + [0, 16, 16]


def test_each_layer_has_the_key_of_its_class():
    model = graph(replace(LLAMA, num_layers=7, blocks=LOCAL))
    local, whole = BlockClass(0, "window-16"), BlockClass(1, "full")

    keys = [model.key(layer) for layer in range(9)]

    assert keys == [LayerKind.EMBEDDING, *[local] * 5, whole, local, LayerKind.HEAD]
    assert model.layer_class(local).key is not model.layer_class(whole).key
    assert [model.layer_class(key).operator("attention").attention.window for key in keys[5:7]] == [
        16,
        0,
    ]
    assert {key.role for key in keys[1:-1]} == {LayerKind.BLOCK}
    assert all(key.in_chunks for key in keys[1:-1])


def test_blocks_that_are_all_alike_keep_the_kind_as_their_key():
    model = graph(replace(LLAMA, blocks=(BlockRun(window=16),)))

    assert model.key(1) is LayerKind.BLOCK
    assert model.block is model.layer_class(LayerKind.BLOCK)


def test_dense_blocks_among_experts_have_their_own_operators():
    first = (BlockRun(experts=False), BlockRun(num_blocks=31))
    model = graph(replace(MIXTRAL, ffn_hidden_size=4096, blocks=first))

    assert [str(model.key(layer)) for layer in (1, 2, 32)] == ["dense", "experts", "experts"]
    dense, experts = (model.layer_class(model.key(layer)) for layer in (1, 2))
    assert "router" not in [operator.name for operator in dense.operators]
    assert "router" in [operator.name for operator in experts.operators]
    assert dense.operator("fc2").size("ffn") == 4096


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        pytest.param(
            MIXTRAL,
            {"blocks": (BlockRun(experts=False), BlockRun())},
            "ffn_hidden_size is 0, it must be at least 1",
            id="dense-blocks-without-a-width",
        ),
        pytest.param(
            LLAMA,
            {"shared_experts": SharedExperts(ffn_hidden_size=8)},
            "shared_experts is .* without num_experts",
            id="shared-experts-without-experts",
        ),
        pytest.param(
            LLAMA,
            {
                "latent": LatentAttention(
                    kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=8
                )
            },
            r"head_dim is 128, a head of latent attention has 8 \+ 4 features",
            id="latent-head-dim",
        ),
        pytest.param(
            LLAMA,
            {"norm_layout": "shared"},
            "norm_layout is shared without parallel_residual",
            id="shared-norm-in-sequence",
        ),
        pytest.param(
            LLAMA,
            {"blocks": (BlockRun(mixer="state_space"),)},
            "mixer state_space without state_space",
            id="no-state-space",
        ),
        pytest.param(LLAMA, {"qk_norm": "heads"}, "unknown qk_norm 'heads'", id="qk-norm"),
    ],
)
def test_a_contradiction_is_an_error_that_names_the_field(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(model, **changes)


def test_a_run_of_no_blocks_is_an_error():
    with pytest.raises(ConfigError, match="num_blocks is 0, it must be at least 1"):
        replace(LLAMA, blocks=(BlockRun(num_blocks=0), BlockRun()))


def test_a_block_has_a_window_or_a_chunk():
    with pytest.raises(ConfigError, match="window 8 and chunk 4"):
        BlockRun(window=8, chunk=4)


def test_a_block_has_a_mixer_or_a_feed_forward_network():
    with pytest.raises(ConfigError, match="neither a mixer nor a feed-forward network"):
        BlockRun(mixer="none", feed_forward=False)
