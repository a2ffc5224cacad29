"""State-space blocks compute what transformers' do, and train like one process on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.executor.models.state_space_modules import scan
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.blocks import BlockRun, Mixer, StateSpace
from parplan.profiles.models.huggingface import entry_from_config
from parplan.profiles.models.spec import ModelSpec, Positions, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.executor_plans import LLAMA, make_plan, recomputing
from tests.helpers.executor_world import (
    Worlds,
    reference_layers,
    require_as_one_process,
    require_same_as_theirs,
)

SEQ_LENGTH = 20
HYBRID = replace(
    LLAMA,
    name="tiny-hybrid",
    positions=Positions.NONE,
    blocks=(
        BlockRun(mixer=Mixer.STATE_SPACE, feed_forward=False),
        BlockRun(mixer=Mixer.NONE),
        BlockRun(feed_forward=False),
        BlockRun(mixer=Mixer.STATE_SPACE),
    ),
    state_space=StateSpace(num_heads=8, head_dim=4, state_size=4, num_groups=4, chunk_size=6),
)


PLANS: dict[str, Plan] = {
    "pp2-dp2": make_plan(HYBRID, pp=2, dp=2, zero=(1,)),
    "dp2-tp2-sp": make_plan(HYBRID, dp=2, tp=2, sp=True, zero=(2,)),
    "tp2-recompute": recomputing(
        make_plan(HYBRID, tp=2), {"norm1", "norm2", "conv", "scan", "gated_norm"}
    ),
    "dp2-zero3-full-recompute": make_plan(HYBRID, dp=2, zero=(3,), recompute="full"),
}
WORLDS = Worlds(PLANS, slow=[name for name in PLANS if name != "pp2-dp2"])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_hybrid_trains_like_one_process_with_the_predicted_bytes(name):
    require_as_one_process(WORLDS, name)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_a_scan_in_chunks_is_the_recurrence(chunk):
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, SEQ_LENGTH, 2, 3, 4, generator=generator, dtype=torch.float64)
    falls = -torch.rand(2, SEQ_LENGTH, 2, 3, generator=generator, dtype=torch.float64)
    keys, queries = torch.randn(2, 2, SEQ_LENGTH, 2, 5, generator=generator, dtype=torch.float64)

    out = scan(u, falls, keys, queries, chunk)

    state = torch.zeros(2, 2, 3, 4, 5, dtype=torch.float64)
    for token in range(SEQ_LENGTH):
        state = state * falls[:, token].exp()[..., None, None]
        state = state + torch.einsum("bghp,bgn->bghpn", u[:, token], keys[:, token])
        expected = torch.einsum("bghpn,bgn->bghp", state, queries[:, token])
        torch.testing.assert_close(out[:, token], expected)


CONFIG = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "hybrid_override_pattern": "M-*-MEM",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
    "routed_scaling_factor": 2.5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
    "tie_word_embeddings": False,
}
BLOCKS = ["mamba", "mlp", "attention", "mlp", "mamba", "moe", "mamba"]


def _by_groups(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Rows of several parts, those of one group of heads after those of another."""
    parts = (part.unflatten(0, (CONFIG["n_groups"], -1)) for part in rows.split(sizes))
    return torch.cat(tuple(parts), dim=1).flatten(0, 1)


def _copy_mixer(ours: nn.Module, theirs: nn.Module, shape: StateSpace) -> None:
    state = shape.num_groups * shape.state_size
    mixed = (shape.inner_size, state, state)
    sizes = (shape.inner_size, *mixed, shape.num_heads)
    ours.in_proj.weight.copy_(_by_groups(theirs.in_proj.weight, sizes))
    ours.conv.weight.copy_(_by_groups(theirs.conv1d.weight.squeeze(1), mixed))
    ours.conv.bias.copy_(_by_groups(theirs.conv1d.bias, mixed))
    for name in ("dt_bias", "A_log", "D"):
        ours.steps.get_parameter(name).copy_(theirs.get_parameter(name))
    ours.gated_norm.weight.copy_(theirs.norm.weight)
    ours.out_proj.weight.copy_(theirs.out_proj.weight)


def _copy_experts(ours: nn.Module, theirs: nn.Module) -> None:
    ours.mixture.router.weight.copy_(theirs.gate.weight)
    ours.latent_down.weight.copy_(theirs.fc1_latent_proj.weight)
    ours.latent_up.weight.copy_(theirs.fc2_latent_proj.weight)
    held = ours.mixture.experts
    held.fc1.weight.copy_(theirs.experts.up_proj.transpose(1, 2).flatten(0, 1))
    held.fc2.weight.copy_(theirs.experts.down_proj.flatten(0, 1))
    ours.shared_fc1.weight.copy_(theirs.shared_experts.up_proj.weight)
    ours.shared_fc2.weight.copy_(theirs.shared_experts.down_proj.weight)


def _copy(layers: nn.ModuleDict, theirs: nn.Module, model: ModelSpec) -> None:
    layers["embedding"].tokens.weight.copy_(theirs.model.embeddings.weight)
    layers["head"].norm.weight.copy_(theirs.model.norm_f.weight)
    layers["head"].lm_head.weight.copy_(theirs.lm_head.weight)
    for place, (kind, block) in enumerate(zip(BLOCKS, theirs.model.layers, strict=True)):
        ours, mixer = layers[f"block{place}"], block.mixer
        (ours.norm2 if kind in ("mlp", "moe") else ours.norm1).weight.copy_(block.norm.weight)
        if kind == "mamba":
            _copy_mixer(ours, mixer, model.state_space)
        elif kind == "moe":
            _copy_experts(ours, mixer)
        elif kind == "mlp":
            ours.fc1.weight.copy_(mixer.up_proj.weight)
            ours.fc2.weight.copy_(mixer.down_proj.weight)
        else:
            parts = (getattr(mixer, f"{of}_proj").weight for of in "qkv")
            groups = [each.unflatten(0, (model.num_kv_heads, -1)) for each in parts]
            ours.qkv.weight.copy_(torch.cat(groups, dim=1).flatten(0, 1))
            ours.attention_out.weight.copy_(mixer.o_proj.weight)


def test_nemotron_h_computes_what_transformers_computes_with_the_same_weights():
    transformers = pytest.importorskip("transformers")
    model = entry_from_config({"model_type": "nemotron_h", **CONFIG}, "nemotron-h/config.json").spec
    torch.manual_seed(0)
    # transformers bounds step sizes from below, by less than any here
    given = {**CONFIG, "layers_block_type": BLOCKS, "time_step_min": 1e-6}
    del given["hybrid_override_pattern"]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("nemotron_h", **given), attn_implementation="eager"
    )
    training = TrainingSpec(global_batch_size=2, seq_length=SEQ_LENGTH, stack=NEUTRAL)
    layers = reference_layers(model, training, 0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        _copy(layers, theirs, model)

    require_same_as_theirs(layers, theirs, torch.randint(1, 128, (2, SEQ_LENGTH)))
