"""Gated delta blocks compute what transformers' do, and train like one process on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.executor.models.delta_rule_modules import delta_scan
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.blocks import BlockRun, DeltaRule, Mixer, QkNorm, SharedExperts
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.executor_plans import LLAMA, MIXTRAL, make_plan, recomputing
from tests.helpers.executor_world import (
    Worlds,
    reference_layers,
    require_as_one_process,
    require_same_as_theirs,
)

SEQ_LENGTH = 20
DELTA = replace(
    LLAMA,
    name="tiny-delta",
    num_layers=2,
    blocks=(BlockRun(mixer=Mixer.DELTA_RULE), BlockRun()),
    qk_norm=QkNorm.HEAD,
    rotary_fraction=0.5,
    attention_gate=True,
    delta_rule=DeltaRule(key_heads=2, key_head_dim=8, value_heads=4, value_head_dim=8),
)
NEXT = replace(
    MIXTRAL,
    name="tiny-next",
    blocks=DELTA.blocks,
    delta_rule=DELTA.delta_rule,
    qk_norm=QkNorm.HEAD,
    attention_gate=True,
    shared_experts=SharedExperts(ffn_hidden_size=24, gated=True),
)
WIDE = replace(
    NEXT,
    hidden_size=64,
    head_dim=16,
    expert_ffn_hidden_size=48,
    shared_experts=SharedExperts(ffn_hidden_size=48, gated=True),
    delta_rule=DeltaRule(key_heads=2, key_head_dim=16, value_heads=4, value_head_dim=16),
)
PLANS: dict[str, Plan] = {
    "pp2-dp2": make_plan(DELTA, pp=2, dp=2, zero=(1,)),
    "tp2-sp": make_plan(DELTA, tp=2, sp=True),
    "tp2-recompute": recomputing(
        make_plan(DELTA, tp=2),
        {"norm1", "norm2", "gate_proj", "conv", "steps", "scan", "gated_norm", "attention_gate"},
    ),
    "dp2-zero3-full-recompute": make_plan(DELTA, dp=2, zero=(3,), recompute="full"),
    "experts-dp2-tp2-ep2-sp": make_plan(NEXT, dp=2, tp=2, ep=2, sp=True, zero=(2,)),
    "bf16": make_plan(DELTA, dp=2, zero=(2,), precision=Precision.BF16),
}
WORLDS = Worlds(PLANS, slow=[name for name in PLANS if name != "tp2-sp"])


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_gated_delta_blocks_train_like_one_process_with_the_predicted_bytes(name):
    require_as_one_process(WORLDS, name)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_a_delta_scan_in_chunks_is_the_recurrence(chunk):
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(2, SEQ_LENGTH, *shape, generator=generator, dtype=torch.float64)

    query, key, value, shares = numbers(2, 5), numbers(2, 5), numbers(2, 3, 4), numbers(2, 3)
    falls = -numbers(2, 3)

    out = delta_scan(query, key, value, shares, falls, chunk)

    state = torch.zeros(2, 2, 3, 5, 4, dtype=torch.float64)
    for token in range(SEQ_LENGTH):
        state = state * falls[:, token].exp()[..., None, None]
        missing = value[:, token] - torch.einsum("bgn,bghnp->bghp", key[:, token], state)
        written = missing * shares[:, token, ..., None]
        state = state + torch.einsum("bgn,bghp->bghnp", key[:, token], written)
        expected = torch.einsum("bgn,bghnp->bghp", query[:, token], state)
        torch.testing.assert_close(out[:, token], expected)


CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 64,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "layer_types": ["linear_attention", "full_attention"],
    "tie_word_embeddings": False,
}


def _copy_norm(ours: nn.Module, theirs: nn.Module, name: str = "weight") -> None:
    ours.get_parameter(name).copy_(1 + theirs.weight)  # theirs are counted from one


def _copy_delta(ours: nn.Module, theirs: nn.Module, model: ModelSpec) -> None:
    shape = model.delta_rule
    ours.in_proj.weight.copy_(theirs.in_proj_qkvz.weight)
    ours.gate_proj.weight.copy_(theirs.in_proj_ba.weight)
    keys = shape.key_heads * shape.key_head_dim
    parts = theirs.conv1d.weight.squeeze(1).split((keys, keys, shape.value_size))
    by_head = [part.unflatten(0, (shape.key_heads, -1)) for part in parts]
    ours.conv.weight.copy_(torch.cat(by_head, dim=1).flatten(0, 1))
    for name in ("dt_bias", "A_log"):
        ours.steps.get_parameter(name).copy_(theirs.get_parameter(name))
    ours.gated_norm.weight.copy_(theirs.norm.weight)
    ours.out_proj.weight.copy_(theirs.out_proj.weight)


def _copy_attention(ours: nn.Module, theirs: nn.Module, model: ModelSpec) -> None:
    groups, size = model.num_kv_heads, model.head_dim
    by_head = theirs.q_proj.weight.unflatten(0, (groups, -1, 2 * size))
    query, gate = (part.flatten(1, 2) for part in by_head.split(size, dim=2))
    key, value = (each.weight.unflatten(0, (groups, -1)) for each in (theirs.k_proj, theirs.v_proj))
    ours.qkv.weight.copy_(torch.cat((query, key, value, gate), dim=1).flatten(0, 1))
    _copy_norm(ours.qk_norm, theirs.q_norm, "q_weight")
    _copy_norm(ours.qk_norm, theirs.k_norm, "k_weight")
    ours.attention_out.weight.copy_(theirs.o_proj.weight)


def _pairs(gate_up: Tensor) -> Tensor:
    """Gates and their values in turns, of rows that have all gates first."""
    return torch.stack(gate_up.chunk(2, dim=-2), dim=-2).flatten(-3, -2)


def _copy_experts(ours: nn.Module, theirs: nn.Module) -> None:
    ours.mixture.router.weight.copy_(theirs.gate.weight)
    held = ours.mixture.experts
    held.fc1.weight.copy_(_pairs(theirs.experts.gate_up_proj).transpose(1, 2).flatten(0, 1))
    held.fc2.weight.copy_(theirs.experts.down_proj.flatten(0, 1))
    shared = theirs.shared_expert
    ours.shared_fc1.weight.copy_(
        _pairs(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)))
    )
    ours.shared_fc2.weight.copy_(shared.down_proj.weight)
    ours.shared_gate.weight.copy_(theirs.shared_expert_gate.weight)


def test_qwen3_next_computes_what_transformers_computes_with_the_same_weights():
    transformers = pytest.importorskip("transformers")
    model = entry_from_config({"model_type": "qwen3_next", **CONFIG}, "qwen3/config.json").spec
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("qwen3_next", **CONFIG), attn_implementation="eager"
    )
    training = TrainingSpec(global_batch_size=2, seq_length=SEQ_LENGTH, stack=NEUTRAL)
    layers = reference_layers(model, training, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        layers["embedding"].tokens.weight.copy_(theirs.model.embed_tokens.weight)
        _copy_norm(layers["head"].norm, theirs.model.norm)
        layers["head"].lm_head.weight.copy_(theirs.lm_head.weight)
        for place, block in enumerate(theirs.model.layers):
            ours = layers[f"block{place}"]
            _copy_norm(ours.norm1, block.input_layernorm)
            _copy_norm(ours.norm2, block.post_attention_layernorm)
            _copy_experts(ours, block.mlp)
            if CONFIG["layer_types"][place] == "linear_attention":
                _copy_delta(ours, block.linear_attn, model)
            else:
                _copy_attention(ours, block.self_attn, model)

    require_same_as_theirs(layers, theirs, torch.randint(1, 128, (2, SEQ_LENGTH)))
