"""Recompute: which operators run again, what the layer keeps because of it, and that the backward pass can always be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.recompute import (
    Recompute,
    ideal_saved_bytes,
    kept_tensors,
    recompute_operators,
    saved_bytes,
    workspace_bytes,
)
from costmodels.sharding import Sharding
from profiles.catalog import load_model
from profiles.model import LayerClass
from profiles.spec import AttentionKernel, TrainingSpec
from profiles.transformer import build_graph

S, B, H, A = 128, 2, 64, 4  # gpt-tiny
FLASH = TrainingSpec(global_batch_size=8, seq_length=S)
UNFUSED = replace(FLASH, attention=AttentionKernel.UNFUSED)
GPT = load_model("gpt-tiny").spec
NEOX = replace(GPT, parallel_residual=True)
LLAMA = load_model("llama3-8b").spec

GPT_UNFUSED = build_graph(GPT, UNFUSED, B).block
GPT_FLASH = build_graph(replace(GPT, dropout=0.0), FLASH, B).block
LLAMA_FLASH = build_graph(LLAMA, FLASH, 1).block
BLOCKS = [build_graph(model, training, B).block for model in (GPT, NEOX, LLAMA) for training in (FLASH, UNFUSED)]
SCORES = {"attention_softmax", "attention_mask", "attention_dropped"}
GPT_KEPT = {
    "block_input", "norm1", "qkv", "context", "residual1_mask", "residual1", "norm2", "fc1", "activation", "residual2_mask"} | SCORES


def names(layer: LayerClass, level: Recompute) -> set[str]:
    kept = [tensor.name for tensor in kept_tensors(layer, recompute_operators(layer, level))]
    assert len(kept) == len(set(kept))
    return set(kept)


@pytest.mark.parametrize(("layer", "level", "again", "kept"), [
    pytest.param(GPT_UNFUSED, Recompute.NONE, set(), GPT_KEPT, id="gpt-unfused-none"),
    pytest.param(GPT_UNFUSED, Recompute.SELECTIVE, {"attention"}, GPT_KEPT - SCORES, id="gpt-unfused-selective-drops-the-scores"),
    pytest.param(GPT_FLASH, Recompute.NONE, set(), {
        "block_input", "norm1", "qkv", "attention_logsumexp", "context", "residual1", "norm2", "fc1", "activation"}, id="gpt-flash-none"),
    pytest.param(GPT_FLASH, Recompute.SELECTIVE, {"norm1", "norm2", "activation"}, {
        "block_input", "qkv", "attention_logsumexp", "context", "residual1", "fc1"}, id="gpt-flash-selective-drops-what-is-cheap"),
    pytest.param(LLAMA_FLASH, Recompute.NONE, set(), {
        "block_input", "norm1", "qkv_rotated", "attention_logsumexp", "context", "residual1", "norm2", "fc1", "activation"},
        id="llama-none"),
    pytest.param(LLAMA_FLASH, Recompute.SELECTIVE, {"norm1", "norm2", "activation"}, {
        "block_input", "qkv_rotated", "attention_logsumexp", "context", "residual1", "fc1"}, id="llama-selective"),
])
def test_a_level_recomputes_and_keeps_what_a_hand_count_says(layer, level, again, kept):
    assert set(recompute_operators(layer, level)) == again
    assert names(layer, level) == kept


@pytest.mark.parametrize("layer", BLOCKS)
def test_full_recompute_keeps_only_the_input_of_the_block(layer):
    assert len(recompute_operators(layer, Recompute.FULL)) == len(layer.operators)
    assert names(layer, Recompute.FULL) == {"block_input"}


@pytest.mark.parametrize(("level", "sharding", "per_sbh", "per_scores"), [
    # Korthikanti et al. 2022, table 2, bytes as multiples of s b h and of a s^2 b: the whole line for each level
    pytest.param(Recompute.NONE, Sharding(), 34, 5, id="none"),
    pytest.param(Recompute.NONE, Sharding(4), 10 + 24 / 4, 5 / 4, id="none-tp"),
    pytest.param(Recompute.NONE, Sharding(4, True), 34 / 4, 5 / 4, id="none-tp-sp"),
    pytest.param(Recompute.SELECTIVE, Sharding(), 34, 0, id="selective"),
    pytest.param(Recompute.SELECTIVE, Sharding(4), 10 + 24 / 4, 0, id="selective-tp"),
    pytest.param(Recompute.SELECTIVE, Sharding(4, True), 34 / 4, 0, id="selective-tp-sp"),
    pytest.param(Recompute.FULL, Sharding(4), 2, 0, id="full-tp-stores-the-whole-input"),
    pytest.param(Recompute.FULL, Sharding(4, True), 2 / 4, 0, id="full-tp-sp"),
])
def test_saved_bytes_are_korthikantis_table(level, sharding, per_sbh, per_scores):
    again = recompute_operators(GPT_UNFUSED, level)

    assert saved_bytes(GPT_UNFUSED, sharding, again) == per_sbh * S * B * H + per_scores * A * S * S * B


@given(data=st.data())
def test_the_backward_pass_can_be_done_whatever_is_recomputed(data):
    """Every tensor a backward needs is kept, or remade from what is kept by recomputed operators alone."""
    layer = data.draw(st.sampled_from(BLOCKS))
    again = data.draw(st.sets(st.sampled_from([operator.name for operator in layer.operators])))

    there = {tensor.name for tensor in kept_tensors(layer, again)}
    for operator in layer.operators:  # the forward's order
        if operator.name in again:
            assert {tensor.name for tensor in operator.inputs} <= there, f"{operator.name} cannot run again"
            there |= {tensor.name for tensor in (*operator.outputs, *operator.saved)}

    assert {tensor.name for operator in layer.operators for tensor in operator.saved} <= there


@given(data=st.data())
def test_no_tensor_is_kept_that_recomputation_makes(data):
    layer = data.draw(st.sampled_from(BLOCKS))
    again = data.draw(st.sets(st.sampled_from([operator.name for operator in layer.operators])))

    made = {tensor.name for operator in layer.operators if operator.name in again for tensor in operator.outputs}
    if "attention_out" not in again:
        made.discard("context")  # Korthikanti's selective recompute keeps the attention's output for the projection

    assert not made & {tensor.name for tensor in kept_tensors(layer, again)}


@given(data=st.data(), tp=st.sampled_from((1, 2, 4)), sequence_parallel=st.booleans())
def test_a_rank_keeps_at_least_its_share_and_tensor_with_sequence_parallelism_no_more(data, tp, sequence_parallel):
    layer = data.draw(st.sampled_from(BLOCKS))
    again = data.draw(st.sets(st.sampled_from([operator.name for operator in layer.operators])))

    ideal, saved = ideal_saved_bytes(layer, tp, again), saved_bytes(layer, Sharding(tp, sequence_parallel), again)

    assert ideal <= saved
    if sequence_parallel or tp == 1:
        assert saved == ideal  # EQUATIONS M3: nothing is held twice; all sizes here divide


def test_workspace_is_what_is_recomputed_and_the_widest_operators_gradients():
    widest = 2 * (B * S * 4 * H) + 2 * (B * S * 4 * H)  # the gradients of the activation's input and output
    saved = saved_bytes(GPT_FLASH, Sharding())
    kept = 2 * B * S * H

    assert workspace_bytes(GPT_FLASH, Sharding()) == widest
    every = recompute_operators(GPT_FLASH, Recompute.FULL)
    assert workspace_bytes(GPT_FLASH, Sharding(), every) == widest + saved - kept


def test_a_column_parallel_operator_holds_its_whole_gathered_input():
    gathered = 2 * B * S * H + 2 * B * S * H  # fc1 at tp 4: the whole input, a quarter of an output four times as wide

    assert workspace_bytes(GPT_FLASH, Sharding(4, True)) == gathered
