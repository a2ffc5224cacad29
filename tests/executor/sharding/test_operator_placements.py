"""Divisions of a block's operators over the tensor-parallel axis.

Legal divisions give the losses and gradients of one process and hold the bytes that their
placements say; the others are refused.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.models.transformer_layers import build_layer
from parplan.executor.rules.all_rules import validate
from parplan.executor.sharding.place import Axes, place_layer
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Positions, Precision
from parplan.profiles.stack import AttentionKernel
from tests.helpers.executor_plans import (
    BATCH,
    BATCH_ATTENTION,
    BATCH_FEED_FORWARD,
    GPT,
    HIDDEN_STREAM,
    LLAMA,
    MEGATRON,
    MEGATRON_SEQUENCE,
    PATCHWORK,
    SEQ_LENGTH,
    SEQUENCE,
    TOKEN_FEED_FORWARD,
    WHOLE,
    make_plan,
    with_divisions,
)
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    TrainingOutcome,
    Worlds,
    require_parity,
    run_plans,
    run_reference,
    worst_gradient,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

NEOX = dataclasses.replace(
    GPT,
    name="tiny-neox",
    positions=Positions.ROTARY,
    rotary_fraction=0.25,
    parallel_residual=True,
    tied_embeddings=False,
)
SHORT_GPT = dataclasses.replace(GPT, num_layers=2)
SHORT_LLAMA = dataclasses.replace(LLAMA, num_layers=2)
BF16 = Precision.BF16
CHAIN = ("norm2", "fc1", "activation")
LONG = ("norm1", "qkv", "rotary", "attention", "attention_out", "norm2", "fc1", "activation")
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2}

PLANS: dict[str, Plan] = {
    "tp2-gpt-ulysses-and-data-parallel": with_divisions(make_plan(GPT, tp=2), SEQUENCE, BATCH),
    "tp2-gpt-token-mlp-megatron-hidden-stream": with_divisions(
        make_plan(GPT, tp=2, sp=True),
        TOKEN_FEED_FORWARD,
        BATCH_FEED_FORWARD,
        MEGATRON,
        HIDDEN_STREAM,
    ),
    "tp2-llama-ends-in-batch-attention": with_divisions(
        make_plan(LLAMA, tp=2), WHOLE, SEQUENCE, PATCHWORK, BATCH_ATTENTION
    ),
    "tp2-neox-ulysses-and-token-mlp": with_divisions(
        make_plan(NEOX, tp=2, sp=True), SEQUENCE, TOKEN_FEED_FORWARD
    ),
    "tp2-gpt-unfused-recomputed-chain": with_divisions(
        make_plan(
            GPT,
            tp=2,
            recompute=(*CHAIN, "residual1", "attention"),
            attention=AttentionKernel.UNFUSED,
        ),
        PATCHWORK,
        MEGATRON_SEQUENCE,
        SEQUENCE,
        HIDDEN_STREAM,
    ),
    "tp4-gpt": with_divisions(make_plan(SHORT_GPT, tp=4), SEQUENCE, PATCHWORK),
    "pp2-tp2-llama-gpipe": with_divisions(
        make_plan(SHORT_LLAMA, pp=2, tp=2, schedule=Schedule.GPIPE), BATCH_ATTENTION, HIDDEN_STREAM
    ),
    "tp2-llama-recomputed-token-mlp": with_divisions(
        make_plan(SHORT_LLAMA, tp=2, recompute=LONG), TOKEN_FEED_FORWARD, SEQUENCE
    ),
    **{
        f"dp2-tp2-llama-zero{zero}": with_divisions(
            make_plan(SHORT_LLAMA, dp=2, tp=2, zero=(zero,), recompute=LONG),
            TOKEN_FEED_FORWARD,
            SEQUENCE,
        )
        for zero in (0, 1, 2, 3)
    },
    **{
        f"dp2-tp2-bf16-zero{a}{b}": with_divisions(
            make_plan(SHORT_GPT, dp=2, tp=2, zero=(a, b), precision=BF16, recompute=CHAIN),
            TOKEN_FEED_FORWARD,
            PATCHWORK,
        )
        for a, b in ((1, 0), (2, 3))
    },
    "pp2-dp2-tp2-gpt-tied-zero-mixed": with_divisions(
        make_plan(GPT, pp=2, dp=2, tp=2, zero=(1, 3, 2, 0), blocks=(1, 3)),
        TOKEN_FEED_FORWARD,
        BATCH,
        PATCHWORK,
        SEQUENCE,
    ),
    "pp2-dp2-tp2-llama-interleaved-recompute": with_divisions(
        make_plan(LLAMA, pp=2, dp=2, tp=2, sp=True, zero=(3,), recompute=LONG, **INTERLEAVED),
        MEGATRON_SEQUENCE,
        SEQUENCE,
        BATCH,
        PATCHWORK,
    ),
    "pp2-dp2-tp2-bf16-full-recompute": with_divisions(
        make_plan(SHORT_GPT, pp=2, dp=2, tp=2, zero=(0, 2), recompute="full", precision=BF16),
        MEGATRON_SEQUENCE,
        PATCHWORK,
    ),
}


PLAIN = {
    "tp2-gpt-token-mlp-megatron-hidden-stream",
    "tp2-llama-recomputed-token-mlp",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - PLAIN)


def reference(plan: Plan) -> TrainingOutcome:
    return run_reference(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)))


@pytest.mark.parametrize("name", WORLDS.params())
def test_a_plan_whose_operators_are_divided_one_by_one_trains_like_one_process(name):
    plan = PLANS[name]
    validate(plan)
    training_outcome, expected = WORLDS.outcome(name), reference(plan)

    require_parity(plan, training_outcome, expected)


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_the_bytes_that_the_placements_say(name):
    plan = PLANS[name]

    states = WORLDS.outcome(name).states

    assert len(states) == plan.mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }


@pytest.mark.parametrize(
    ("name", "over_dp"),
    [
        pytest.param("tp2-llama-recomputed-token-mlp", 0, id="alone"),
        *(
            pytest.param(
                f"dp2-tp2-llama-zero{zero}", zero == 0, id=f"{zero}", marks=pytest.mark.slow
            )
            for zero in range(4)
        ),
    ],
)
def test_whole_weights_over_divided_tokens_are_reduced_over_tp_once_a_step(name, over_dp):
    plan = PLANS[name]
    micro_batches = plan.pipeline.num_micro_batches
    loss = 3 * micro_batches + 1  # three numbers a token, and the sum of all

    actual = WORLDS.outcome(name).collectives

    assert micro_batches == 2
    assert actual["allreduce_"] == 1 + over_dp + loss
    # activations are all-reduced behind the embedding, and before the head in the backward pass;
    # recomputed blocks add none
    assert actual["all_reduce"] == 2 * micro_batches


def _changed(plan: Plan, operator: str, **changes) -> Plan:
    """`plan` with other placements of one operator in all its blocks."""

    def changed(actual: LayerPlan) -> LayerPlan:
        if actual.layer is not LayerKind.BLOCK:
            return actual
        placement = dataclasses.replace(actual.operators[operator], **changes)
        return dataclasses.replace(actual, operators={**actual.operators, operator: placement})

    return dataclasses.replace(
        plan,
        layer_plans={name: changed(layer_plan) for name, layer_plan in plan.layer_plans.items()},
    )


BATCHED = ("Shard(0)@tp",)
TOKENS = ("Shard(1)@tp",)
FEATURES = ("Shard(2)@tp",)
LLAMA2, GPT2 = make_plan(LLAMA, tp=2), make_plan(GPT, tp=2)
ODD_BATCH = make_plan(GPT, tp=2, global_batch_size=6)
ODD_SEQUENCE = dataclasses.replace(GPT2, training=dataclasses.replace(GPT2.training, seq_length=15))
ODD_FFN = make_plan(dataclasses.replace(LLAMA, ffn_hidden_size=61), tp=2)
SPLIT = {"weight": BATCHED, "bias": BATCHED}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            _changed(GPT2, "attention", input=TOKENS, output=TOKENS),
            "operator attention: it cannot be divided by sequence: queries need every key",
            id="attention-by-sequence",
        ),
        pytest.param(
            _changed(LLAMA2, "rotary", input=TOKENS, output=TOKENS),
            "operator rotary: it cannot be divided by sequence: positions count from",
            id="rotary-by-sequence",
        ),
        pytest.param(
            _changed(GPT2, "norm1", input=FEATURES, output=FEATURES),
            "operator norm1: a norm needs the whole hidden",
            id="norm-by-hidden",
        ),
        pytest.param(
            _changed(GPT2, "norm1", input=TOKENS),
            "operator norm1: input Shard.1. and output whole differ",
            id="norm-that-moves",
        ),
        pytest.param(
            _changed(GPT2, "norm2", parameters={"weight": BATCHED}),
            "operator norm2: its parameters must be whole",
            id="norm-weight",
        ),
        pytest.param(
            _changed(GPT2, "activation", output=()),
            "operator activation: input Shard.2. and output",
            id="activation",
        ),
        pytest.param(
            _changed(GPT2, "residual1", input=TOKENS, output=()),
            "operator residual1: input Shard.1. and output",
            id="residual",
        ),
        pytest.param(
            _changed(GPT2, "fc1", input=TOKENS),
            "operator fc1: input Shard.1. and output Shard.2. with weight Shard.0.",
            id="rows-of-tokens",
        ),
        pytest.param(
            _changed(GPT2, "fc1", output=()),
            "operator fc1: input whole and output whole with weight Shard.0.",
            id="rows-gathered",
        ),
        pytest.param(
            _changed(GPT2, "fc2", output=FEATURES),
            "operator fc2: .* its sums are reduced to whole",
            id="sums-by-features",
        ),
        pytest.param(
            _changed(GPT2, "fc2", input=()),
            "operator fc2: input whole .* reads Shard.2.",
            id="columns-of-whole-input",
        ),
        pytest.param(
            _changed(GPT2, "qkv", parameters={}),
            "operator qkv: input whole and output Shard.2. with weight whole",
            id="whole-weight",
        ),
        pytest.param(
            _changed(GPT2, "qkv", parameters={"weight": BATCHED}),
            "operator qkv: bias whole with weight Shard.0.",
            id="bias",
        ),
        pytest.param(
            _changed(GPT2, "qkv", parameters={**SPLIT, "scale": ()}),
            "operator qkv: it has no parameter scale",
            id="no-parameter",
        ),
        pytest.param(
            _changed(GPT2, "fc2", parameters={"weight": FEATURES}),
            "operator fc2: weight placement .* d below 2",
            id="no-dim",
        ),
        pytest.param(
            _changed(GPT2, "residual2", output=("Partial@tp",)),
            "operator residual2: output placement .'Partial@tp'",
            id="partial",
        ),
        pytest.param(
            make_plan(LLAMA, tp=4),
            "operator rotary: tp 4 does not divide num_kv_heads 2",
            id="kv-heads",
        ),
        pytest.param(
            with_divisions(ODD_BATCH, BATCH),
            "operator norm1: tp 2 does not divide micro_batch_size 3",
            id="batch",
        ),
        pytest.param(
            with_divisions(ODD_SEQUENCE, SEQUENCE),
            "operator norm1: tp 2 does not divide seq_length 15",
            id="sequence",
        ),
        pytest.param(
            ODD_FFN, "operator activation: tp 2 does not divide features 61", id="gate-and-up-pairs"
        ),
    ],
)
def test_a_division_that_cannot_run_is_refused_and_its_operator_named(plan, message):
    with pytest.raises(ConfigError, match=message):
        validate(plan)


@pytest.mark.slow
def test_attention_or_positions_over_a_part_of_the_sequence_give_wrong_gradients():
    divided = with_divisions(make_plan(SHORT_LLAMA, tp=2), SEQUENCE)
    plans = [
        _changed(divided, name, input=TOKENS, output=TOKENS) for name in ("attention", "rotary")
    ]

    errors = [
        worst_gradient(run_plan, reference(plan))[0]
        for plan, run_plan in zip(plans, run_plans(plans), strict=True)
    ]

    assert min(errors) > 1000 * GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        pytest.param(
            _changed(GPT2, "norm1", input=FEATURES, output=FEATURES),
            "normalized_shape",
            id="norm-by-hidden",
        ),
        pytest.param(make_plan(LLAMA, tp=4), "unflatten", id="half-a-kv-group"),
        pytest.param(
            _changed(GPT2, "qkv", parameters={}),
            "invalid for input of size|unflatten|shape",
            id="whole-weight-called-divided",
        ),
        pytest.param(
            _changed(GPT2, "fc1", input=TOKENS),
            "size of tensor|shape|Sharding",
            id="rows-of-tokens",
        ),
    ],
)
def test_shapes_show_why_other_divisions_are_refused(plan, error):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.mesh.tp)
    try:
        mesh = init_device_mesh("cpu", (plan.mesh.tp,), mesh_dim_names=("tp",))
        block = build_layer(plan.model, plan.training, LayerKind.BLOCK, 1, 0, torch.device("cpu"))
        place_layer(block, plan.layer_plans["block-0"].operators, Axes(tp=mesh), "block0")
        x = torch.randn(2, SEQ_LENGTH, plan.model.hidden_size)
        with pytest.raises((RuntimeError, ValueError), match=error):
            block(DTensor.from_local(x, mesh, (Replicate(),)))
    finally:
        dist.destroy_process_group()
