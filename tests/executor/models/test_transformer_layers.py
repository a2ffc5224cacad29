from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

from parplan.executor.models.attention import SelfAttention
from parplan.executor.models.transformer_layers import build_layer
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, SEQ_LENGTH
from tests.helpers.executor_world import forward, reference_layers

CPU = torch.device("cpu")
NEOX = dataclasses.replace(
    GPT,
    name="tiny-neox",
    positions=Positions.ROTARY,
    rotary_fraction=0.25,
    parallel_residual=True,
    tied_embeddings=False,
)
TRAINING = TrainingSpec(global_batch_size=2, seq_length=SEQ_LENGTH, stack=NEUTRAL)
MODELS = [pytest.param(model, id=model.name) for model in (GPT, LLAMA, NEOX)]


@pytest.mark.parametrize("kind", list(LayerKind))
@pytest.mark.parametrize("model", MODELS)
def test_every_operator_has_a_module_of_its_name_with_its_parameters(model, kind):
    layer = build_layer(model, TRAINING, kind, 1, 0, CPU)
    expected = {
        operator.name: {parameter.name: parameter.shape for parameter in operator.parameters}
        for operator in build_graph(model, TRAINING, 1).layer_class(kind).operators
    }

    actual = {
        name: {
            parameter_name: tuple(parameter.shape)
            for parameter_name, parameter in module.named_parameters()
        }
        for name, module in layer.named_children()
    }

    assert actual == expected


@pytest.mark.parametrize("model", MODELS)
def test_the_model_has_as_many_parameters_as_the_operator_graph(model):
    layers = reference_layers(model, TRAINING, 0)

    assert (
        sum(parameter.numel() for parameter in layers.parameters())
        == build_graph(model, TRAINING, 1).num_parameters
    )


def test_initial_values_depend_on_seed_layer_and_parameter_alone():
    first = build_layer(GPT, TRAINING, LayerKind.BLOCK, 1, 0, CPU)
    repeated = build_layer(GPT, TRAINING, LayerKind.BLOCK, 1, 0, CPU)
    other_layer = build_layer(GPT, TRAINING, LayerKind.BLOCK, 2, 0, CPU)
    other_seed = build_layer(GPT, TRAINING, LayerKind.BLOCK, 1, 1, CPU)

    assert torch.equal(first.fc1.weight, repeated.fc1.weight)
    assert not torch.equal(first.fc1.weight, other_layer.fc1.weight)
    assert not torch.equal(first.fc1.weight, other_seed.fc1.weight)


def test_a_tied_head_starts_from_the_values_of_the_embedding_wherever_it_is_built():
    embedding = build_layer(GPT, TRAINING, LayerKind.EMBEDDING, 0, 3, CPU)
    head = build_layer(GPT, TRAINING, LayerKind.HEAD, 5, 3, CPU)

    assert torch.equal(embedding.tokens.weight, head.lm_head.weight)


@pytest.mark.parametrize("model", MODELS)
def test_unfused_attention_equals_flash_attention(model):
    qkv = torch.randn(
        2, SEQ_LENGTH, model.q_size + 2 * model.kv_size, generator=torch.Generator().manual_seed(0)
    )

    flash, unfused = (SelfAttention(model, kernel)(qkv) for kernel in AttentionKernel)

    torch.testing.assert_close(unfused, flash, rtol=1e-5, atol=1e-6)


def test_a_shard_of_whole_kv_groups_attends_like_the_whole():
    attention = SelfAttention(LLAMA, AttentionKernel.FLASH)
    qkv = torch.randn(
        2, SEQ_LENGTH, LLAMA.q_size + 2 * LLAMA.kv_size, generator=torch.Generator().manual_seed(0)
    )

    halves = [attention(half) for half in qkv.chunk(2, dim=-1)]

    torch.testing.assert_close(torch.cat(halves, dim=-1), attention(qkv))


HF_LLAMA = dataclasses.replace(LLAMA, vocab_size=128, rope_theta=500.0)
HF_MIXTRAL = dataclasses.replace(MIXTRAL, vocab_size=128, rope_theta=500.0)
HF_GPT = dataclasses.replace(GPT, vocab_size=128)


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, model: ModelSpec
) -> torch.Tensor:
    """Separate projections as the rows of the fused one, (kv groups, queries + 2, head_dim)."""
    parts = (
        rows.unflatten(0, (model.num_kv_heads, -1, model.head_dim)) for rows in (query, key, value)
    )
    return torch.cat(tuple(parts), dim=1).flatten(0, 2)


def _copy_llama(layers, theirs) -> None:
    layers["embedding"].tokens.weight.copy_(theirs.model.embed_tokens.weight)
    layers["head"].norm.weight.copy_(theirs.model.norm.weight)
    layers["head"].lm_head.weight.copy_(theirs.lm_head.weight)
    for i, block in enumerate(theirs.model.layers):
        ours = layers[f"block{i}"]
        attention = block.self_attn
        mlp = block.mlp
        ours.norm1.weight.copy_(block.input_layernorm.weight)
        ours.norm2.weight.copy_(block.post_attention_layernorm.weight)
        ours.qkv.weight.copy_(
            _grouped(
                attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, HF_LLAMA
            )
        )
        ours.attention_out.weight.copy_(attention.o_proj.weight)
        ours.fc1.weight.copy_(
            torch.stack((mlp.gate_proj.weight, mlp.up_proj.weight), dim=1).flatten(0, 1)
        )
        ours.fc2.weight.copy_(mlp.down_proj.weight)


def _copy_mixtral(layers, theirs) -> None:
    layers["embedding"].tokens.weight.copy_(theirs.model.embed_tokens.weight)
    layers["head"].norm.weight.copy_(theirs.model.norm.weight)
    layers["head"].lm_head.weight.copy_(theirs.lm_head.weight)
    for i, block in enumerate(theirs.model.layers):
        ours = layers[f"block{i}"]
        attention = block.self_attn
        experts = block.mlp.experts
        ours.norm1.weight.copy_(block.input_layernorm.weight)
        ours.norm2.weight.copy_(block.post_attention_layernorm.weight)
        ours.qkv.weight.copy_(
            _grouped(
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.v_proj.weight,
                HF_MIXTRAL,
            )
        )
        ours.attention_out.weight.copy_(attention.o_proj.weight)
        ours.mixture.router.weight.copy_(block.mlp.gate.weight)
        # [expert, gate and up, ffn, hidden] to [expert, hidden, ffn, gate and up]
        gate_up = experts.gate_up_proj.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        ours.mixture.experts.fc1.weight.copy_(gate_up.flatten(2).flatten(0, 1))
        ours.mixture.experts.fc2.weight.copy_(experts.down_proj.flatten(0, 1))


def _copy_gpt(layers, theirs) -> None:
    layers["embedding"].tokens.weight.copy_(theirs.transformer.wte.weight)
    layers["embedding"].positions.weight.copy_(theirs.transformer.wpe.weight)
    layers["head"].norm.load_state_dict(theirs.transformer.ln_f.state_dict())
    for i, block in enumerate(theirs.transformer.h):
        ours = layers[f"block{i}"]
        ours.norm1.load_state_dict(block.ln_1.state_dict())
        ours.norm2.load_state_dict(block.ln_2.state_dict())
        ours.qkv.weight.copy_(_grouped(*block.attn.c_attn.weight.T.chunk(3), HF_GPT))
        ours.qkv.bias.copy_(_grouped(*block.attn.c_attn.bias.chunk(3), HF_GPT))
        for linear, conv in (
            (ours.attention_out, block.attn.c_proj),
            (ours.fc1, block.mlp.c_fc),
            (ours.fc2, block.mlp.c_proj),
        ):
            linear.weight.copy_(conv.weight.T)
            linear.bias.copy_(conv.bias)


def _llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ_LENGTH,
            rope_theta=500.0,
            rms_norm_eps=HF_LLAMA.norm_epsilon,
            tie_word_embeddings=False,
        )
    )


def _mixtral():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=SEQ_LENGTH,
        rope_theta=500.0,
        rms_norm_eps=HF_MIXTRAL.norm_epsilon,
        tie_word_embeddings=False,
    )
    return transformers.MixtralForCausalLM._from_config(config, experts_implementation="eager")


def _gpt():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128,
            n_embd=32,
            n_inner=64,
            n_layer=4,
            n_head=4,
            n_positions=SEQ_LENGTH,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


@pytest.mark.parametrize(
    ("model", "build", "copy"),
    [
        pytest.param(HF_LLAMA, _llama, _copy_llama, id="llama"),
        pytest.param(HF_GPT, _gpt, _copy_gpt, id="gpt2"),
        pytest.param(HF_MIXTRAL, _mixtral, _copy_mixtral, id="mixtral"),
    ],
)
def test_the_model_computes_what_hugging_face_computes_with_the_same_weights(model, build, copy):
    torch.manual_seed(0)
    theirs, layers = build(), reference_layers(model, TRAINING, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.05
            )  # biases and norms away from 0 and 1
        copy(layers, theirs)
    ids = torch.randint(128, (2, SEQ_LENGTH))

    ours = forward(layers, ids)
    expected = theirs(ids).logits
    for logits in (ours, expected):
        functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        layers["embedding"].tokens.weight.grad,
        theirs.get_input_embeddings().weight.grad,
        rtol=1e-4,
        atol=1e-6,
    )
