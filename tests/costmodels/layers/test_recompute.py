"""Recompute: the operators that run again, saved tensors, and a backward pass that can be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.layers.recompute import (
    Recompute,
    ideal_saved_bytes,
    recompute_operators,
    saved_bytes,
    saved_tensors,
    workspace_bytes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import BlockClass, LayerClass
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel

S, B, H, A = 128, 2, 64, 4  # gpt-tiny
FLASH = TrainingSpec(global_batch_size=8, seq_length=S, stack=NEUTRAL)
UNFUSED = replace(FLASH, attention=AttentionKernel.UNFUSED)
GPT = load_model("gpt-tiny").spec
NEOX = replace(GPT, parallel_residual=True)
LLAMA = load_model("llama3-8b").spec

GPT_UNFUSED = build_graph(GPT, UNFUSED, B).block
GPT_FLASH = build_graph(replace(GPT, dropout=0.0), FLASH, B).block
LLAMA_FLASH = build_graph(LLAMA, FLASH, 1).block
BLOCKS = [
    build_graph(model, training, B).block
    for model in (GPT, NEOX, LLAMA)
    for training in (FLASH, UNFUSED)
]
SCORES = {"attention_softmax", "attention_mask", "attention_dropped"}
GPT_KEPT = {
    "block_input",
    "norm1",
    "qkv",
    "context",
    "residual1_mask",
    "residual1",
    "norm2",
    "fc1",
    "activation",
    "residual2_mask",
} | SCORES


def names(layer: LayerClass, level: Recompute) -> set[str]:
    kept = [tensor.name for tensor in saved_tensors(layer, recompute_operators(layer, level))]
    assert len(kept) == len(set(kept))
    return set(kept)


@pytest.mark.parametrize(
    ("layer", "level", "recomputed", "kept"),
    [
        pytest.param(GPT_UNFUSED, Recompute.NONE, set(), GPT_KEPT, id="gpt-unfused-none"),
        pytest.param(
            GPT_UNFUSED,
            Recompute.SELECTIVE,
            {"attention"},
            GPT_KEPT - SCORES,
            id="gpt-unfused-selective-drops-the-scores",
        ),
        pytest.param(
            GPT_FLASH,
            Recompute.NONE,
            set(),
            {
                "block_input",
                "norm1",
                "qkv",
                "attention_logsumexp",
                "context",
                "residual1",
                "norm2",
                "fc1",
                "activation",
            },
            id="gpt-flash-none",
        ),
        pytest.param(
            GPT_FLASH,
            Recompute.SELECTIVE,
            {"norm1", "norm2", "activation"},
            {"block_input", "qkv", "attention_logsumexp", "context", "residual1", "fc1"},
            id="gpt-flash-selective-drops-what-is-cheap",
        ),
        pytest.param(
            LLAMA_FLASH,
            Recompute.NONE,
            set(),
            {
                "block_input",
                "norm1",
                "qkv_rotated",
                "attention_logsumexp",
                "context",
                "residual1",
                "norm2",
                "fc1",
                "activation",
            },
            id="llama-none",
        ),
        pytest.param(
            LLAMA_FLASH,
            Recompute.SELECTIVE,
            {"norm1", "norm2", "activation"},
            {"block_input", "qkv_rotated", "attention_logsumexp", "context", "residual1", "fc1"},
            id="llama-selective",
        ),
    ],
)
def test_a_level_recomputes_and_keeps_what_a_hand_count_says(layer, level, recomputed, kept):
    assert set(recompute_operators(layer, level)) == recomputed
    assert names(layer, level) == kept


@pytest.mark.parametrize("layer", BLOCKS)
def test_full_recompute_keeps_only_the_input_of_the_block(layer):
    assert len(recompute_operators(layer, Recompute.FULL)) == len(layer.operators)
    assert names(layer, Recompute.FULL) == {"block_input"}


@pytest.mark.parametrize(
    ("level", "sharding", "per_sbh", "per_scores"),
    [
        # Korthikanti et al. 2022, table 2, bytes as multiples of s b h and of a s^2 b: the whole
        # line for each level
        pytest.param(Recompute.NONE, Sharding(), 34, 5, id="none"),
        pytest.param(Recompute.NONE, Sharding(4), 10 + 24 / 4, 5 / 4, id="none-tp"),
        pytest.param(Recompute.NONE, Sharding(4, True), 34 / 4, 5 / 4, id="none-tp-sp"),
        pytest.param(Recompute.SELECTIVE, Sharding(), 34, 0, id="selective"),
        pytest.param(Recompute.SELECTIVE, Sharding(4), 10 + 24 / 4, 0, id="selective-tp"),
        pytest.param(Recompute.SELECTIVE, Sharding(4, True), 34 / 4, 0, id="selective-tp-sp"),
        pytest.param(Recompute.FULL, Sharding(4), 2, 0, id="full-tp-stores-the-whole-input"),
        pytest.param(Recompute.FULL, Sharding(4, True), 2 / 4, 0, id="full-tp-sp"),
    ],
)
def test_saved_bytes_are_korthikantis_table(level, sharding, per_sbh, per_scores):
    recomputed = recompute_operators(GPT_UNFUSED, level)

    assert (
        saved_bytes(GPT_UNFUSED, sharding, recomputed)
        == per_sbh * S * B * H + per_scores * A * S * S * B
    )


@given(data=st.data())
def test_the_backward_pass_can_be_done_whatever_is_recomputed(data):
    """Every tensor a backward needs is saved or remade.

    Only recomputed operators remake it, from saved tensors.
    """
    layer = data.draw(st.sampled_from(BLOCKS))
    recomputed = data.draw(
        st.sets(st.sampled_from([operator.name for operator in layer.operators]))
    )

    there = {tensor.name for tensor in saved_tensors(layer, recomputed)}
    for operator in layer.operators:  # the forward's order
        if operator.name in recomputed:
            assert {tensor.name for tensor in operator.inputs} <= there, (
                f"{operator.name} cannot run again"
            )
            there |= {tensor.name for tensor in (*operator.outputs, *operator.saved)}

    assert {tensor.name for operator in layer.operators for tensor in operator.saved} <= there


@pytest.mark.slow
@given(data=st.data())
def test_no_tensor_is_kept_that_recomputation_makes(data):
    layer = data.draw(st.sampled_from(BLOCKS))
    recomputed = data.draw(
        st.sets(st.sampled_from([operator.name for operator in layer.operators]))
    )

    made = {
        tensor.name
        for operator in layer.operators
        if operator.name in recomputed
        for tensor in operator.outputs
    }
    if "attention_out" not in recomputed:
        made.discard(
            "context"
        )  # Korthikanti's selective recompute keeps the attention's output for the projection

    assert not made & {tensor.name for tensor in saved_tensors(layer, recomputed)}


@pytest.mark.slow
@given(data=st.data(), tp=st.sampled_from((1, 2, 4)), sequence_parallel=st.booleans())
def test_a_rank_keeps_at_least_its_share_and_tensor_with_sequence_parallelism_no_more(
    data, tp, sequence_parallel
):
    layer = data.draw(st.sampled_from(BLOCKS))
    recomputed = data.draw(
        st.sets(st.sampled_from([operator.name for operator in layer.operators]))
    )

    ideal, saved = (
        ideal_saved_bytes(layer, tp, recomputed),
        saved_bytes(layer, Sharding(tp, sequence_parallel), recomputed),
    )

    assert ideal <= saved
    if sequence_parallel or tp == 1:
        assert saved == ideal  # EQUATIONS M3: nothing is held twice; all sizes here divide


SBH = 2 * B * S * H  # bytes of a [batch, sequence, hidden] tensor
FC2_WEIGHTS = 2 * (4 * H * H + H)


def test_workspace_is_what_is_recomputed_and_the_widest_backward_of_an_operator():
    """The backward of fc2 comes first, when nothing is freed yet.

    Its input is four times as wide; fc1's gradients come when the activation's are gone.
    """
    widest = 4 * SBH + SBH + FC2_WEIGHTS
    saved = saved_bytes(GPT_FLASH, Sharding())

    assert workspace_bytes(GPT_FLASH, Sharding()) == widest
    every = recompute_operators(GPT_FLASH, Recompute.FULL)
    assert workspace_bytes(GPT_FLASH, Sharding(), every) == widest + saved - SBH


def test_a_row_parallel_operator_holds_the_whole_gradient_of_its_output():
    assert workspace_bytes(GPT_FLASH, Sharding(4, True)) == 4 * SBH // 4 + SBH + 2 * (
        4 * H * H // 4 + H
    )


def test_a_column_parallel_operator_holds_its_whole_gathered_input():
    head, tp = build_graph(replace(GPT, vocab_size=128), FLASH, B).head, 4
    logits = 2 * B * S * 128 // tp
    probabilities = 2 * logits

    assert workspace_bytes(head, Sharding(tp, True)) == max(
        SBH
        + logits
        + 2 * 128 * H // tp
        - probabilities,  # the product's gradients: the loss has freed its probabilities
        logits + 4 * B * S,
    )


def test_stored_scores_need_two_gradients_of_their_size():
    scores = 2 * B * A * S * S
    later = (
        saved_bytes(GPT_UNFUSED, Sharding()) - (2 * SBH + 3 * SBH) - (5 * scores) // 2
    )  # all but what norm1, qkv and attention keep

    assert workspace_bytes(GPT_UNFUSED, Sharding()) == max(
        2 * scores + 3 * SBH + SBH - later, 4 * SBH + SBH + FC2_WEIGHTS
    )


@pytest.mark.parametrize(
    ("stack", "model", "sharding", "more"),
    [
        pytest.param(
            replace(NEUTRAL, keeps_gathered_inputs=True),
            GPT,
            Sharding(4, True),
            2 * (SBH - SBH // 4),
            id="gathered-inputs",
        ),
        pytest.param(
            replace(NEUTRAL, keeps_gathered_inputs=True),
            GPT,
            Sharding(4),
            0,
            id="nothing-is-gathered-without-sequence-parallelism",
        ),
        pytest.param(
            replace(NEUTRAL, keeps_activated_gate=True),
            replace(GPT, gated_ffn=True),
            Sharding(4),
            4 * SBH // 4,
            id="activated-gate",
        ),
        pytest.param(replace(NEUTRAL, keeps_activated_gate=True), GPT, Sharding(), 0, id="no-gate"),
        pytest.param(
            replace(NEUTRAL, attention_kv_copies=1),
            GPT,
            Sharding(2),
            2 * SBH // 2,
            id="keys-and-values",
        ),
        pytest.param(
            replace(NEUTRAL, attention_output_copies=1),
            GPT,
            Sharding(2),
            SBH // 2,
            id="attention-output",
        ),
    ],
)
def test_a_stack_keeps_more(stack, model, sharding, more):
    layers = [build_graph(model, replace(FLASH, stack=of), B).block for of in (NEUTRAL, stack)]

    assert saved_bytes(layers[1], sharding, stack=stack) - saved_bytes(layers[0], sharding) == more


def test_one_sequence_changes_places_without_a_copy():
    training = replace(FLASH, stack=replace(NEUTRAL, attention_output_copies=1))

    assert saved_bytes(build_graph(GPT, training, 1).block, Sharding()) == saved_bytes(
        build_graph(GPT, FLASH, 1).block, Sharding()
    )


@pytest.mark.parametrize(("logit_bytes", "beyond"), [(6, 0), (4, 0), (10, 4)])
def test_the_loss_holds_what_the_stack_says_for_each_logit(logit_bytes, beyond):
    head, logits = build_graph(GPT, FLASH, B).head, B * S * GPT.padded_vocab_size

    more = workspace_bytes(
        head, Sharding(), stack=replace(NEUTRAL, logit_bytes=logit_bytes)
    ) - workspace_bytes(head, Sharding())

    assert more == beyond * logits


@pytest.mark.parametrize(("logit_bytes", "kept"), [(4, 2), (6, 4), (14, 4)])
def test_a_loss_that_holds_less_than_fp32_saves_its_logits(logit_bytes, kept):
    training = replace(FLASH, stack=replace(NEUTRAL, logit_bytes=logit_bytes))
    head, logits = build_graph(GPT, training, B).head, B * S * GPT.padded_vocab_size

    loss = head.operator("loss")
    assert sum(tensor.num_bytes for tensor in loss.saved) == kept * logits


def test_deferred_gradients_of_the_head_keep_their_inputs_and_the_gradients_of_logits():
    training = replace(FLASH, stack=replace(NEUTRAL, deferred_head_gradients=3))
    head = build_graph(GPT, training, B).head
    logits, states = B * S * GPT.padded_vocab_size, B * S * H
    sharding = Sharding(2)

    more = saved_bytes(head, sharding) - saved_bytes(build_graph(GPT, FLASH, B).head, sharding)
    assert more == 3 * 2 * (logits // 2 + states)


def test_a_stack_that_copies_latent_values_frees_the_tensor_that_holds_them_and_keys():
    model = load_model("deepseek-v2-lite").spec
    copying = replace(FLASH, stack=replace(NEUTRAL, copies_latent_values=True))
    views, copies = (
        saved_bytes(build_graph(model, training, 1).layer_class(BlockClass(0, "dense")), Sharding())
        for training in (FLASH, copying)
    )

    assert views - copies == 2 * S * model.num_heads * model.latent.nope_head_dim


def test_the_libraries_workspaces_are_there_all_the_time():
    stack = replace(NEUTRAL, workspace_bytes=1000)

    assert (
        workspace_bytes(GPT_FLASH, Sharding(), stack=stack)
        == workspace_bytes(GPT_FLASH, Sharding()) + 1000
    )
