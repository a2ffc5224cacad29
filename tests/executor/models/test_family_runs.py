"""Models of published families train like one process on every mesh, and hold the predicted bytes.

They have blocks of several classes: first dense blocks, windows in turns.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from parplan.executor.rules.all_rules import validate
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.blocks import (
    BlockRun,
    LatentAttention,
    NormLayout,
    QkNorm,
    SharedExperts,
)
from parplan.profiles.models.functions import Activations, Functions, RouterScores
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import AttentionKernel, ContextForm
from tests.helpers.executor_plans import (
    LLAMA,
    MEGATRON_SEQUENCE,
    MIXTRAL,
    SEQUENCE,
    make_plan,
    with_divisions,
)
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    TrainingOutcome,
    Worlds,
    require_parity,
    run_reference,
    worst_gradient,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

IN_TURNS = (BlockRun(window=6), BlockRun())
DEEPSEEK = replace(
    MIXTRAL,
    name="tiny-deepseek",
    num_layers=4,
    num_kv_heads=4,
    head_dim=12,
    ffn_hidden_size=48,
    blocks=(BlockRun(experts=False), BlockRun(num_blocks=3)),
    latent=LatentAttention(
        q_rank=20, kv_rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=6
    ),
    shared_experts=SharedExperts(ffn_hidden_size=24),
    functions=Functions(router_scores=RouterScores.SIGMOID, router_factor=2.5),
)
GPT_OSS = replace(
    MIXTRAL,
    name="tiny-gpt-oss",
    num_layers=4,
    blocks=IN_TURNS,
    sinks=True,
    qkv_bias=True,
    output_bias=True,
    expert_bias=True,
    router_bias=True,
    functions=Functions(activation=Activations.BOUNDED_SILU),
)
GEMMA = replace(
    LLAMA,
    name="tiny-gemma",
    tied_embeddings=True,
    blocks=IN_TURNS,
    attention_soft_cap=2.0,
    logit_soft_cap=3.0,
    norm_layout=NormLayout.BOTH,
    functions=Functions(
        activation=Activations.GELU_TANH, embedding_factor=5.5, window_rope_theta=500.0
    ),
)
QWEN3_MOE = replace(MIXTRAL, name="tiny-qwen3-moe", qk_norm=QkNorm.HEAD)
OLMO2 = replace(
    LLAMA, name="tiny-olmo2", qk_norm=QkNorm.WHOLE, norm_layout=NormLayout.POST, num_layers=2
)
QWEN3 = replace(LLAMA, name="tiny-qwen3", qk_norm=QkNorm.HEAD, num_layers=2)
LATENT = replace(
    LLAMA,
    name="tiny-latent",
    num_layers=2,
    num_kv_heads=4,
    head_dim=12,
    latent=DEEPSEEK.latent,
    sinks=True,
)
LLAMA4 = replace(
    LLAMA,
    name="tiny-chunks",
    qk_norm=QkNorm.PLAIN,
    blocks=(BlockRun(chunk=4), BlockRun(rotary=False)),
)


def divided(model: ModelSpec, *choices: str) -> Plan:
    """A plan of tp 2 whose blocks divide all operators in one of the ways, in turns."""
    names = [operator.name for operator in build_graph(model, TRAINING, 1).block.operators]
    return with_divisions(
        make_plan(model, tp=2, sp=True), *(dict.fromkeys(names, choice) for choice in choices)
    )


LLAMA4_ROUTED = replace(
    MIXTRAL,
    name="tiny-llama4",
    experts_per_token=1,
    qk_norm=QkNorm.PLAIN,
    blocks=LLAMA4.blocks,
    shared_experts=SharedExperts(ffn_hidden_size=24),
    functions=Functions(router_scores=RouterScores.SIGMOID_INPUTS, router_normed=False),
)
COMPRESSED = replace(MIXTRAL, name="tiny-compressed", expert_latent_size=16)
TRAINING = make_plan().training
PLANS: dict[str, Plan] = {
    "qwen3-norms-by-sequence": with_divisions(
        make_plan(QWEN3, tp=2, sp=True),
        {**MEGATRON_SEQUENCE, "qk_norm": "sequence"},
        {**SEQUENCE, "qk_norm": "features"},
    ),
    "latent-by-batch-and-whole": divided(LATENT, "batch", "whole"),
    "deepseek-tp2-sp": make_plan(DEEPSEEK, tp=2, sp=True, recompute=("norm1", "norm2")),
    "deepseek-pp2-dp2-ep2-zero3": make_plan(
        DEEPSEEK, pp=2, dp=2, ep=2, zero=(3,), recompute="full"
    ),
    "deepseek-pp2-dp2-tp2-ep2-etp2": make_plan(
        DEEPSEEK, pp=2, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(1,), recompute=("q_up", "kv_up")
    ),
    "deepseek-recompute-up": make_plan(
        DEEPSEEK, dp=2, recompute=("q_norm", "q_up", "kv_norm", "kv_up", "attention")
    ),
    "deepseek-cp2": make_plan(DEEPSEEK, cp=2, form=ContextForm.RING),
    "deepseek-unfused": make_plan(DEEPSEEK, tp=2, sp=True, attention=AttentionKernel.UNFUSED),
    "gpt-oss-dp2-ep2": make_plan(replace(GPT_OSS, num_layers=2), dp=2, ep=2, zero=(2,)),
    "gpt-oss-tp2-ep2": make_plan(GPT_OSS, tp=2, ep=2, sp=True, recompute=("attention",)),
    "gpt-oss-cp2-all-to-all": make_plan(GPT_OSS, cp=2, form=ContextForm.ALL_TO_ALL),
    "gpt-oss-cp2-ring": make_plan(GPT_OSS, cp=2, form=ContextForm.RING),
    "gpt-oss-unfused": make_plan(GPT_OSS, dp=2, attention=AttentionKernel.UNFUSED),
    "gemma-tp2-sp-recompute": make_plan(
        replace(GEMMA, num_layers=2),
        tp=2,
        sp=True,
        recompute=("norm1", "attention", "post_norm1", "activation"),
    ),
    "gemma-pp2-dp2-tp2-sp": make_plan(GEMMA, pp=2, dp=2, tp=2, sp=True, zero=(3, 1)),
    "gemma-cp2": make_plan(GEMMA, cp=2, form=ContextForm.ALL_GATHER),
    "gemma-unfused": make_plan(GEMMA, tp=2, attention=AttentionKernel.UNFUSED),
    "qwen3-moe-tp2-etp2": make_plan(QWEN3_MOE, tp=2, etp=2, sp=True),
    "qwen3-moe-tp2": make_plan(QWEN3_MOE, tp=2, sp=True, recompute=("qkv", "qk_norm", "rotary")),
    "qwen3-moe-dp2-tp2-ep2-etp2": make_plan(
        QWEN3_MOE, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(2,), recompute="full"
    ),
    "olmo2-tp2-sp": make_plan(OLMO2, tp=2, sp=True, recompute=("qkv", "qk_norm")),
    "compressed-dp2-ep2": make_plan(COMPRESSED, dp=2, ep=2, zero=(1,)),
    "compressed-tp2-ep2": make_plan(COMPRESSED, tp=2, ep=2, sp=True, recompute="full"),
    "compressed-tp2-etp2": make_plan(COMPRESSED, tp=2, etp=2, sp=True, recompute=("norm2",)),
    "llama4-dp2-ep2": make_plan(LLAMA4_ROUTED, dp=2, ep=2, zero=(2,)),
    "llama4-tp2-etp2": make_plan(LLAMA4_ROUTED, tp=2, etp=2, sp=True, recompute=("norm2",)),
    "chunks-tp2-sp": make_plan(
        replace(LLAMA4, num_layers=2), tp=2, sp=True, recompute=("norm1", "qkv")
    ),
}
QUICK = {
    "deepseek-tp2-sp",
    "gpt-oss-dp2-ep2",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - QUICK)


@cache
def reference(model: ModelSpec, attention: AttentionKernel) -> TrainingOutcome:
    return run_reference(make_plan(model, attention=attention))


@pytest.mark.parametrize("name", PLANS)
def test_no_rule_refuses_a_plan_of_unlike_blocks(name):
    validate(PLANS[name])


@pytest.mark.parametrize("name", WORLDS.params())
def test_a_plan_of_unlike_blocks_trains_like_one_process(name):
    plan = PLANS[name]
    expected = reference(plan.model, plan.training.attention)

    if plan.model is not OLMO2:
        require_parity(plan, WORLDS.outcome(name), expected)
        return
    # its norms have gradients near 1e-5, of which fp32 in one process misses 1.3e-6 of 1e-4
    error, parameter = worst_gradient(WORLDS.outcome(name), expected)
    assert error <= 2 * GRADIENT_TOLERANCE, f"{error} in {parameter}"
    assert WORLDS.outcome(name).losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_exactly_the_predicted_bytes(name):
    states = WORLDS.outcome(name).states

    assert len(states) == PLANS[name].mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }
