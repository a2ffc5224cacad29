"""The order of a block's parts: norms, residuals, shared experts, blocks of one part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.profiles.models.blocks import NormLayout
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
LLAMA = load_model("llama3-8b").spec
MIXER = ["qkv", "rotary", "attention", "attention_out"]
FFN = ["fc1", "activation", "fc2"]


def names(layer):
    return [operator.name for operator in layer.operators]


def block(model):
    return build_graph(model, TRAINING, 1).layer_class(LayerKind.BLOCK)


@pytest.mark.parametrize(
    ("layout", "parallel", "order"),
    [
        pytest.param(
            NormLayout.PRE,
            False,
            ["norm1", *MIXER, "residual1", "norm2", *FFN, "residual2"],
            id="pre",
        ),
        pytest.param(
            NormLayout.POST,
            False,
            [*MIXER, "post_norm1", "residual1", *FFN, "post_norm2", "residual2"],
            id="post",
        ),
        pytest.param(
            NormLayout.BOTH,
            False,
            [
                *("norm1", *MIXER, "post_norm1", "residual1"),
                *("norm2", *FFN, "post_norm2", "residual2"),
            ],
            id="both",
        ),
        pytest.param(NormLayout.SHARED, True, ["norm1", *MIXER, *FFN, "residual2"], id="one-norm"),
        pytest.param(
            NormLayout.PRE, True, ["norm1", *MIXER, "norm2", *FFN, "residual2"], id="parallel"
        ),
    ],
)
def test_norms_stand_where_the_layout_has_them(layout, parallel, order):
    model = replace(LLAMA, norm_layout=layout, parallel_residual=parallel)

    assert names(block(model)) == order


def test_every_operator_reads_what_an_earlier_one_makes():
    for name in ("deepseek-tiny", "gpt-oss-tiny", "gemma-tiny", "qwen3-moe-tiny", "falcon-7b"):
        graph = build_graph(load_model(name).spec, TRAINING, 1)
        for layer in graph:
            made = {layer.input.name} if layer.input else set()
            for operator in layer.operators:
                assert {tensor.name for tensor in operator.inputs} <= made, operator.name
                made |= {tensor.name for tensor in operator.outputs}


def test_a_shared_expert_runs_beside_the_others_and_is_added():
    graph = build_graph(load_model("deepseek-tiny").spec, TRAINING, 1)
    layer = graph.layer_class(graph.key(2))

    assert names(layer)[-6:] == [
        "combine",
        "shared_fc1",
        "shared_activation",
        "shared_fc2",
        "expert_sum",
        "residual2",
    ]
    assert layer.operator("shared_fc1").parallel_dim == "ffn"
    assert [t.name for t in layer.operator("expert_sum").inputs] == ["combine", "shared_fc2"]


def test_a_gate_multiplies_the_shared_expert_of_qwen_2():
    layer = block(load_model("qwen2-57b-a14b").spec)

    assert layer.operator("shared_gate").num_parameters == 3584
    assert [t.name for t in layer.operator("expert_sum").inputs] == ["combine", "shared_gated"]


def test_experts_and_their_router_have_biases():
    graph = build_graph(load_model("gpt-oss-20b").spec, TRAINING, 1)
    layer = graph.layer_class(graph.key(1))

    assert [p.shape for p in layer.operator("fc1").parameters] == [(32, 5760, 2880), (32, 5760)]
    assert [p.shape for p in layer.operator("fc2").parameters] == [(32, 2880, 2880), (32, 2880)]
    assert [p.shape for p in layer.operator("router").parameters] == [(32, 2880), (32,)]


def test_a_block_of_one_part_adds_that_part_alone():
    graph = build_graph(load_model("nemotron-h-tiny").spec, TRAINING, 1)
    scan, feed_forward, attention = (graph.layer_class(key) for key in graph.keys[1:-1])

    assert names(scan) == [
        *("norm1", "in_proj", "conv", "steps", "scan", "gated_norm", "out_proj"),
        "residual1",
    ]
    assert names(feed_forward) == ["norm2", *FFN, "residual2"]
    assert names(attention) == ["norm1", "qkv", "attention", "attention_out", "residual1"]
    assert {layer.operators[-1].outputs[0].name for layer in (scan, feed_forward, attention)} == {
        "block_output"
    }


def test_the_scan_of_a_state_space_block_has_the_flops_of_its_products():
    graph = build_graph(load_model("nemotron-h-8b").spec, replace(TRAINING, seq_length=8192), 1)
    scan = graph.layer_class(graph.keys[1]).operator("scan")
    chunk, groups, state, inner = 128, 8, 128, 8192

    by_hand = 2 * 8192 * (chunk * (groups * state + inner) + 2 * state * inner)
    assert scan.flops_forward == pytest.approx(by_hand, rel=1e-3)


def test_capped_logits_are_kept_beside_the_probabilities():
    head = build_graph(load_model("gemma-2-9b").spec, TRAINING, 1).head

    assert names(head) == ["norm", "lm_head", "logit_cap", "loss"]
    assert [tensor.name for tensor in head.operator("logit_cap").saved] == ["capped_logits"]


def test_tokens_are_compressed_before_they_are_sent_to_their_experts():
    graph = build_graph(load_model("nemotron-3-super-120b-a12b").spec, TRAINING, 1)
    experts = next(each for each in map(graph.layer_class, graph.keys) if each.has_experts)

    assert experts.operator("dispatch").outputs[0].dims[-1].size == 1024
    assert [p.shape for p in experts.operator("fc1").parameters] == [(512, 2688, 1024)]
    assert [p.shape for p in experts.operator("latent_up").parameters] == [(4096, 1024)]
    assert experts.operator("shared_fc1").inputs[0].name == "norm2"


def test_weights_multiply_the_output_of_experts_or_their_activation():
    def kept(gated, weighs):
        stack = replace(TRAINING.stack, weighs_activations=weighs)
        model = replace(load_model("mixtral-8x7b").spec, gated_ffn=gated)
        block = build_graph(model, replace(TRAINING, stack=stack), 1).block
        saved = {tensor.name for operator in block.operators for tensor in operator.saved}
        return saved & {"fc1", "activation", "unweighted", "fc2"}

    assert kept(True, False) == kept(False, False) == {"fc1", "activation", "fc2"}
    assert kept(True, True) == {"fc1", "activation"}
    assert kept(False, True) == {"fc1", "unweighted", "activation"}


def test_an_encoder_meets_all_keys():
    model = load_model("gpt-tiny").spec
    encoder = replace(model, bidirectional=True)
    causal, whole = (
        build_graph(each, TRAINING, 1).block.operator("attention").attention
        for each in (model, encoder)
    )

    assert (causal.causal, whole.causal) == (True, False)
    assert whole.keys_met(1024) == 2 * causal.keys_met(1024)


def test_a_norm_of_plain_operations_saves_what_autograd_saves():
    torch = pytest.importorskip("torch")
    plain = replace(TRAINING, stack=replace(NEUTRAL, plain_kernels=("rms_norm",)))
    x = torch.ones(plain.seq_length, LLAMA.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(LLAMA.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.setdefault(each.untyped_storage().data_ptr(), each), lambda each: each
    ):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        weight * (wide * scale).to(x.dtype)

    norm = build_graph(LLAMA, plain, 1).layer_class(LayerKind.BLOCK).operators[0]

    of_tokens = [each for each in kept.values() if each.numel() == x.numel()]
    assert sum(each.num_bytes for each in norm.saved) == sum(each.nbytes for each in of_tokens)
    assert block(LLAMA).operators[0].saved == norm.inputs
