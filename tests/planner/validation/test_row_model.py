"""The model of a measured row, and the blocks of its stages."""

from __future__ import annotations

import pytest

from parplan.planner.validation.configuration import configuration_of
from parplan.planner.validation.priced_rows import price_row
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.spec import Positions
from tests.helpers.measured_rows import FULL, ROW


def test_the_cells_of_a_recipe_are_the_shape_of_a_model():
    model = configuration_of(
        {
            **FULL,
            "framework": "NeMo",
            "layers": "8",
            "latent": "96 64 32 16 32",
            "experts": "8",
            "top_k": "2",
            "moe_ffn_hidden": "512",
            "shared_ffn_hidden": "1024",
            "dense_layers": "2",
            "mtp_layers": "1",
            "tied": "false",
            "positions": "rotary",
        }
    ).model

    assert (model.latent.q_rank, model.latent.value_head_dim, model.head_dim) == (96, 32, 48)
    assert model.blocks == (BlockRun(num_blocks=2, experts=False), BlockRun(num_blocks=6))
    assert (model.ffn_hidden_size, model.expert_ffn_hidden_size) == (4096, 512)
    assert (model.shared_experts.ffn_hidden_size, model.mtp_layers) == (1024, 1)
    assert (model.tied_embeddings, model.positions) == (False, Positions.ROTARY)


def test_the_letters_of_a_hybrid_are_blocks_of_one_part_each():
    change = {"layer_pattern": "M-M*|M-M*", "layers": "", "state_space": "16 64 128 8"}

    configuration = configuration_of({**FULL, **change})

    assert configuration.stages == (4, 4)
    assert configuration.model.num_layers == 8
    assert configuration.model.state_space.num_groups == 8
    assert price_row({**ROW, **change}).reason is None


def test_a_vocabulary_over_the_pipeline_is_a_part_of_it_on_every_rank():
    row = {**ROW, "framework": "Megatron-LM fork, 1F1B, method baseline", "vocab": "256000"}
    divided = price_row({**row, "framework": "Megatron-LM fork, 1F1B, method vocab-1"})

    assert divided.predicted_s < price_row(row).predicted_s
    interlaced = price_row({**row, "framework": "Megatron-LM fork, 1F1B, method interlaced"})
    assert interlaced.predicted_s == divided.predicted_s
    whole, parts = (
        price_row({**each, "memory_kind": "allocated", "tied": "false"}).predicted_gib
        for each in (row, {**row, "framework": "Megatron-LM fork, 1F1B, method interlaced"})
    )
    # a half of the table and one of the head are as much as the whole head of the last rank
    assert parts == pytest.approx(whole, rel=0.2)
    assert configuration_of(FULL | {"framework": "fork, method vocab-2"}).in_flight == 1.5


def test_an_encoder_reads_the_tokens_behind_each():
    assert configuration_of({**FULL, "model": "bert/bert_tp1"}).model.bidirectional
    assert not configuration_of(FULL).model.bidirectional


def test_frameworks_that_divide_blocks_unevenly_are_priced_so():
    nanotron = configuration_of({**FULL, "framework": "nanotron v0.5"})
    assert sum(nanotron.stages) == 8
    assert nanotron.stages[0] > nanotron.stages[-1]  # the head counts as compute of the last stage

    redis = {
        **FULL,
        "framework": "Megatron-LM fork, 1F1B, method redis",
        "layers": "32",
        "pp": "8",
        "dp": "2",
        "tp": "1",
    }
    assert configuration_of({**redis, "vocab": "128000"}).stages == (4, 4, 4, 4, 4, 5, 5, 2)
    assert (
        price_row({**redis, "vocab": "50000"}).reason
        == "layers moved between stages, how many is not stated"
    )


def test_a_release_test_has_the_vocabulary_and_dropout_of_its_defaults():
    row = {
        **FULL,
        "framework": "Megatron-LM CI (dev container)",
        "vocab": "",
        "notes": "tied embeddings",
    }
    model = configuration_of(row).model

    assert (model.vocab_size, model.dropout, model.tied_embeddings) == (50257, 0.1, True)
    assert not configuration_of({**row, "notes": ""}).model.tied_embeddings


def test_a_model_that_no_stages_divide_is_laid_out_as_megatron_bridge_does():
    row = {**FULL, "framework": "NeMo", "layers": "13", "vpp": "4", "global_batch": "32"}
    configuration = configuration_of(row)
    layout = configuration.layout(2, 4)

    assert configuration.stages_of(layout) == (1, 2, 2, 2, 2, 2, 2, 0)
    assert price_row(row).reason is None
