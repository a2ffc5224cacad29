"""The operator graph has the published activation memory (EQUATIONS M3), FLOPs and parameters."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerClass, LayerKind, OperatorKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel

GPT = ModelSpec(
    name="gpt",
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2048,
    vocab_size=1024,
    max_seq_length=256,
    dropout=0.1,
)
LLAMA = ModelSpec(
    name="llama",
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_hidden_size=1408,
    vocab_size=1024,
    max_seq_length=256,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
)
UNFUSED = TrainingSpec(
    global_batch_size=8, seq_length=256, attention=AttentionKernel.UNFUSED, stack=NEUTRAL
)
FLASH = replace(UNFUSED, attention=AttentionKernel.FLASH)
ATTENTION_CORE = frozenset({"attention"})


def block_of(model, training=UNFUSED, micro_batch_size=4) -> LayerClass:
    return build_graph(model, training, micro_batch_size).block


def stored_bytes(
    block: LayerClass, sharding: Sharding, recompute: frozenset[str] = frozenset()
) -> int:
    """Returns the bytes of a block that one rank saves for its backward pass.

    A recomputed operator saves its inputs, a block that is recomputed whole its own.
    """
    if recompute == frozenset(operator.name for operator in block.operators):
        assert block.input is not None
        return sharding.local_bytes(block.input, sharding.boundary)
    tensors = {
        tensor.name: tensor
        for operator in block.operators
        for tensor in (operator.inputs if operator.name in recompute else operator.saved)
    }
    return sum(tensor.num_bytes // megatron_parts(tensor, sharding) for tensor in tensors.values())


def megatron_parts(tensor, sharding):
    """Korthikanti et al. 2022: features of heads and ffn over tp, all else by token under SP."""
    features = any(tensor.has(dim) for dim in ("heads", "ffn", "vocab"))
    return sharding.tp if features or (sharding.sequence_parallel and tensor.has("sequence")) else 1


def everything(block: LayerClass) -> frozenset[str]:
    return frozenset(operator.name for operator in block.operators)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT, id="small"),
        pytest.param(load_model("gpt-22b").spec, id="gpt-22b"),
        pytest.param(load_model("gpt-175b").spec, id="gpt-175b"),
    ],
)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_gpt_block_stores_what_korthikanti_counts_term_by_term(model, micro_batch_size, tp):
    s, b = UNFUSED.seq_length, micro_batch_size
    t = tp
    h, a = model.hidden_size, model.num_heads
    block = block_of(model, UNFUSED, b)
    parallel, sequence_parallel = Sharding(tp=t), Sharding(tp=t, sequence_parallel=True)
    scores = 5 * a * s / h

    assert stored_bytes(block, Sharding()) == s * b * h * (34 + scores)
    assert stored_bytes(block, parallel) == s * b * h * (10 + 24 / t + scores / t)
    assert stored_bytes(block, sequence_parallel) == s * b * h / t * (34 + scores)
    assert stored_bytes(block, sequence_parallel, ATTENTION_CORE) == s * b * h * 34 / t
    assert stored_bytes(block, parallel, everything(block)) == 2 * s * b * h
    assert stored_bytes(block, sequence_parallel, everything(block)) == 2 * s * b * h / t


def test_a_gpt_block_without_dropout_keeps_no_masks():
    s, b = 256, 4
    h, a = 512, 8

    assert (
        stored_bytes(block_of(replace(GPT, dropout=0.0)), Sharding())
        == s * b * h * 32 + 2 * a * s * s * b
    )


@pytest.mark.parametrize(
    ("dropout", "per_token"),
    [pytest.param(0.1, 34, id="dropout"), pytest.param(0.0, 32, id="none")],
)
def test_flash_attention_keeps_a_log_sum_exp_instead_of_the_scores(dropout, per_token):
    s, b = 256, 4
    h, a = 512, 8
    block = block_of(replace(GPT, dropout=dropout), FLASH)

    assert stored_bytes(block, Sharding()) == per_token * s * b * h + 4 * a * b * s
    assert (
        stored_bytes(block, Sharding(tp=2, sequence_parallel=True))
        == (per_token * s * b * h + 4 * a * b * s) / 2
    )


def test_a_gated_block_with_grouped_queries_stores_what_a_hand_count_says():
    s, b = 256, 4
    h, a = 512, 8
    q, kv = 512, 128
    f = 1408
    # block input, its norm, the middle of the block, its norm
    whole = 2 * h + 2 * h + 2 * h + 2 * h
    heads = 2 * (q + 2 * kv) + 2 * q + 4 * a  # rotated q, k, v; the context; the log-sum-exp (fp32)
    ffn = 2 * 2 * f + 2 * f  # both halves of the gated product, and their product

    block = block_of(LLAMA, FLASH)

    assert stored_bytes(block, Sharding()) == s * b * (whole + heads + ffn)
    assert stored_bytes(block, Sharding(tp=2)) == s * b * (whole + (heads + ffn) // 2)


def test_a_parallel_residual_block_shares_the_input_of_its_two_norms():
    one_more_norm_input = 256 * 4 * 512 * 2
    mask = 256 * 4 * 512

    difference = stored_bytes(block_of(GPT), Sharding()) - stored_bytes(
        block_of(replace(GPT, parallel_residual=True)), Sharding()
    )

    assert difference == one_more_norm_input + mask


def test_fp32_doubles_every_activation_but_the_masks():
    s, b = 256, 4
    h, a = 512, 8
    fp32 = replace(UNFUSED, precision=Precision.FP32)

    assert (
        stored_bytes(block_of(GPT, fp32), Sharding())
        == s * b * h * (2 * 32 + 2) + (2 * 4 + 1) * a * s * s * b
    )


# Korthikanti et al. 2022, arXiv 2205.05198, figure 7: % of the tensor-parallel baseline, TP 8, read
# off the chart
PUBLISHED = {
    "gpt-22b": {"sequence parallel": 66.84, "selective": 49.42, "both": 16.18, "full": 7.64},
    "gpt-175b": {"sequence parallel": 62.04, "selective": 56.53, "both": 18.49, "full": 8.71},
    "gpt-530b": {"sequence parallel": 58.31, "selective": 62.04, "both": 20.27, "full": 9.42},
    "gpt-1t": {"sequence parallel": 58.31, "selective": 62.04, "both": 20.27, "full": 9.42},
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_savings_against_tensor_parallelism_match_korthikantis_figure_7(name):
    block = block_of(load_model(name).spec, replace(UNFUSED, seq_length=2048), 1)
    parallel, sequence_parallel = Sharding(tp=8), Sharding(tp=8, sequence_parallel=True)
    baseline = stored_bytes(block, parallel)
    stored = {
        "sequence parallel": stored_bytes(block, sequence_parallel),
        "selective": stored_bytes(block, parallel, ATTENTION_CORE),
        "both": stored_bytes(block, sequence_parallel, ATTENTION_CORE),
        "full": stored_bytes(block, parallel, everything(block)),
    }

    for technique, percent in PUBLISHED[name].items():
        assert 100 * stored[technique] / baseline == pytest.approx(percent, abs=0.15), technique


@pytest.mark.parametrize(
    ("name", "pp", "virtual_stages", "micro_batch_size", "none_gib", "both_gib"),
    [
        pytest.param("gpt-22b", 1, 1, 4, 59.25, 9.5625, id="gpt-22b"),
        pytest.param("gpt-175b", 8, 3, 1, 66.84375, 12.3515625, id="gpt-175b"),
        pytest.param("gpt-530b", 35, 3, 1, 114.0234375, 23.076171875, id="gpt-530b"),
        pytest.param("gpt-1t", 64, 1, 1, 131.25, 26.5625, id="gpt-1t"),
    ],
)
def test_first_stage_activations_equal_korthikantis_figure_1(
    name, pp, virtual_stages, micro_batch_size, none_gib, both_gib
):
    """Figure 1: L (1 + (P - 1) / (P v)) layers in flight when interleaved, L when not, TP 8.

    The figure is analytic in the paper, so the test is exact.
    """
    model = load_model(name).spec
    layers = (
        model.num_layers * (1 + (pp - 1) / (pp * virtual_stages))
        if virtual_stages > 1
        else model.num_layers
    )
    block = block_of(model, replace(UNFUSED, seq_length=2048), micro_batch_size)

    assert layers * stored_bytes(block, Sharding(tp=8)) / 2**30 == pytest.approx(none_gib, rel=1e-9)
    both = stored_bytes(block, Sharding(tp=8, sequence_parallel=True), ATTENTION_CORE)
    assert layers * both / 2**30 == pytest.approx(both_gib, rel=1e-9)


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-20b", "gpt-175b", "gpt-1t"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_model_flops_are_megatrons_formula_exactly(name, micro_batch_size):
    entry = load_model(name)
    model = entry.spec
    s, b = entry.seq_length, micro_batch_size
    layers, h = model.num_layers, model.hidden_size
    v = model.padded_vocab_size
    graph = build_graph(model, TrainingSpec(global_batch_size=8, seq_length=s, stack=NEUTRAL), b)

    # 72 B S L h^2 (1 + S / (6 h) + V / (12 L h)), and 96 B S L h^2 (1 + S / (6 h) + V / (16 L h))
    # with full recompute
    assert (
        graph.model_flops
        == 72 * b * s * layers * h**2 + 12 * b * s**2 * layers * h + 6 * b * s * v * h
    )
    recomputed = graph.model_flops + layers * graph.block.flops_forward
    assert recomputed == 96 * b * s * layers * h**2 + 16 * b * s**2 * layers * h + 6 * b * s * v * h


def test_flops_of_a_gated_block_with_grouped_queries_by_hand():
    s, b = 256, 4
    h, f = 512, 1408
    q, kv = 512, 128
    forward = 2 * b * s * (h * (q + 2 * kv) + q * h + h * 2 * f + f * h) + 4 * b * s**2 * q

    block = block_of(LLAMA, FLASH)

    assert block.flops_forward == forward
    assert block.flops_backward == 2 * forward


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        pytest.param(
            "gpt-1.5b", 1.558e9, 0.001, id="gpt-1.5b"
        ),  # GPT-2 XL: 1,557,611,200 before the vocabulary is padded
        pytest.param("gpt-2.5b", 2.5e9, 0.005, id="gpt-2.5b"),  # Megatron-LM 2019, table 1
        pytest.param("gpt-8.3b", 8.3e9, 0.005, id="gpt-8.3b"),  # Megatron-LM 2019, table 1
        pytest.param("gpt-7.5b", 7.5e9, 0.005, id="gpt-7.5b"),  # Narayanan et al. 2021, table 1
        pytest.param("gpt-20b", 20.26e9, 0.001, id="gpt-20b"),
        pytest.param("gpt-22b", 22e9, 0.005, id="gpt-22b"),  # Korthikanti et al. 2022, table 3
        pytest.param("gpt-175b", 174.6e9, 0.001, id="gpt-175b"),  # Narayanan et al. 2021, table 1
        pytest.param("gpt-530b", 529.6e9, 0.001, id="gpt-530b"),  # Narayanan et al. 2021, table 1
        pytest.param("gpt-1t", 1008.0e9, 0.001, id="gpt-1t"),  # Narayanan et al. 2021, table 1
        pytest.param(
            "llama2-7b", 6_738_415_616, 0.0, id="llama2-7b"
        ),  # the released checkpoints, exactly
        pytest.param("llama2-13b", 13_015_864_320, 0.0, id="llama2-13b"),
        pytest.param("llama2-70b", 68_976_648_192, 0.0, id="llama2-70b"),
        pytest.param("llama3-8b", 8_030_261_248, 0.0, id="llama3-8b"),
        pytest.param("llama3-70b", 70_553_706_496, 0.0, id="llama3-70b"),
        pytest.param("llama3-405b", 405_853_388_800, 0.0, id="llama3-405b"),
    ],
)
def test_parameter_counts_are_the_published_ones(name, published, tolerance):
    parameters = build_graph(load_model(name).spec, FLASH, 1).num_parameters

    assert parameters == pytest.approx(published, rel=tolerance, abs=0)


def test_a_tied_head_counts_once_and_an_untied_one_twice():
    table = GPT.padded_vocab_size * GPT.hidden_size
    tied = build_graph(replace(GPT, tied_embeddings=True), FLASH, 1)
    untied = build_graph(replace(GPT, tied_embeddings=False), FLASH, 1)

    assert untied.num_parameters - tied.num_parameters == table
    assert tied.head.num_parameters == untied.head.num_parameters


def test_the_vocabulary_is_padded_to_a_multiple_of_128():
    graph = build_graph(replace(GPT, vocab_size=1025), FLASH, 1)

    assert graph.embedding.operator("tokens").parameters[0].shape == (1152, 512)
    assert graph.head.operator("lm_head").parameters[0].shape == (1152, 512)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GPT, id="gpt"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(replace(GPT, parallel_residual=True), id="neox"),
        pytest.param(replace(LLAMA, qkv_bias=True), id="qwen"),
    ],
)
def test_every_layer_is_a_connected_dag_in_topological_order(model):
    for layer in build_graph(model, FLASH, 1):
        assert nx.is_directed_acyclic_graph(layer.graph)
        assert nx.is_weakly_connected(layer.graph)
        order = {operator.name: place for place, operator in enumerate(layer.operators)}
        assert all(order[maker] < order[reader] for maker, reader in layer.graph.edges)


def test_each_layer_class_occurs_as_often_as_the_model_says():
    graph = build_graph(GPT, FLASH, 1)

    assert [(run.layer.kind, run.count) for run in graph.layers] == [
        (LayerKind.EMBEDDING, 1),
        (LayerKind.BLOCK, 6),
        (LayerKind.HEAD, 1),
    ]
    assert [graph.layer_class(kind).kind for kind in LayerKind] == list(LayerKind)


def test_a_layers_input_is_the_tensor_that_no_operator_of_it_makes():
    graph = build_graph(GPT, FLASH, 1)

    assert graph.embedding.input is None
    assert graph.block.input is not None
    assert graph.block.input.name == "block_input"
    assert graph.head.input is not None
    assert graph.head.input.num_bytes == graph.block.input.num_bytes


def test_rotary_positions_are_an_operator_and_have_no_table():
    graph = build_graph(LLAMA, FLASH, 1)

    assert "rotary" in graph.block.graph
    assert [operator.name for operator in graph.embedding.operators] == ["tokens"]
    assert graph.block.operator("attention").inputs[0].name == "qkv_rotated"


def test_the_loss_keeps_fp32_probabilities_on_the_last_layer():
    loss = build_graph(GPT, FLASH, 4).head.operator("loss")

    assert loss.kind is OperatorKind.CROSS_ENTROPY
    assert [tensor.num_bytes for tensor in loss.saved] == [4 * 256 * 1024 * 4]


def test_an_operator_knows_the_extent_of_its_dims_and_no_others():
    qkv = block_of(LLAMA).operator("qkv")

    assert (qkv.size("heads"), qkv.size("hidden")) == (512 + 2 * 128, 512)
    with pytest.raises(KeyError, match="qkv has no dim vocab"):
        qkv.size("vocab")


@pytest.mark.parametrize("field", ["batch", "sequence"])
def test_flops_and_bytes_grow_with_the_micro_batch_and_the_sequence(field):
    small = block_of(GPT)
    large = (
        block_of(GPT, micro_batch_size=8)
        if field == "batch"
        else block_of(GPT, replace(UNFUSED, seq_length=512))
    )

    assert large.flops_forward >= 2 * small.flops_forward
    assert stored_bytes(large, Sharding()) >= 2 * stored_bytes(small, Sharding())
