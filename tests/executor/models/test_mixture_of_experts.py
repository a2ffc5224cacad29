"""Mixtures of experts: every mesh trains like one process, with the block of transformers.

Plans that cannot run are refused.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from parplan.costmodels.layers.recompute import saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.models.expert_exchange import held_experts
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.executor.models.transformer_layers import build_layer
from parplan.executor.rules.all_rules import nearest_legal, validate
from parplan.executor.rules.expert_rules import mixture_of
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import SharedExperts
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import LLAMA, MIXTRAL, SEQ_LENGTH, make_plan
from tests.helpers.executor_world import (
    TrainingOutcome,
    Worlds,
    require_parity,
    run_plans,
    run_reference,
)

ALL = "full"
FOUR = dataclasses.replace(MIXTRAL, num_layers=4)
# no rounding of bf16 sends a token elsewhere
ALL_CHOSEN = dataclasses.replace(MIXTRAL, experts_per_token=4)
# shared experts with a gate, and biases of router and experts
WHOLE = dataclasses.replace(
    MIXTRAL,
    shared_experts=SharedExperts(ffn_hidden_size=40, gated=True),
    expert_bias=True,
    router_bias=True,
)
BF16 = Precision.BF16
LISTS = ("norm1", "norm2", "activation")

PLANS: dict[str, Plan] = {
    "one-rank": make_plan(MIXTRAL),
    "dp2": make_plan(MIXTRAL, dp=2, zero=(2,)),
    "ep2-zero0": make_plan(MIXTRAL, dp=2, ep=2),
    "ep2-zero1": make_plan(MIXTRAL, dp=2, ep=2, zero=(1,)),
    "ep2-zero3-full-recompute": make_plan(MIXTRAL, dp=2, ep=2, zero=(3, 2), recompute=ALL),
    "ep2-selective-recompute": make_plan(MIXTRAL, dp=2, ep=2, zero=(2,), recompute=LISTS),
    "tp2": make_plan(MIXTRAL, tp=2, sp=True),
    "tp2-ep2": make_plan(MIXTRAL, tp=2, ep=2, sp=True, recompute=LISTS),
    "tp2-etp2": make_plan(MIXTRAL, tp=2, etp=2, sp=True, recompute=LISTS),
    "tp2-etp2-full-recompute": make_plan(MIXTRAL, tp=2, etp=2, sp=True, recompute=ALL),
    "bf16-ep2-zero0": make_plan(MIXTRAL, dp=2, ep=2, precision=BF16),
    "bf16-ep2-zero-mixed": make_plan(
        MIXTRAL, dp=2, ep=2, zero=(1, 3), recompute=ALL, precision=BF16
    ),
    "bf16-tp2-etp2": make_plan(ALL_CHOSEN, tp=2, etp=2, sp=True, precision=BF16),
    "dp4-ep2-zero-mixed": make_plan(MIXTRAL, dp=4, ep=2, zero=(0, 1)),
    "dp4-ep2-zero3": make_plan(MIXTRAL, dp=4, ep=2, zero=(3, 2)),
    "bf16-dp4-ep2-zero2": make_plan(MIXTRAL, dp=4, ep=2, zero=(2,), precision=BF16),
    "dp2-tp2-zero3": make_plan(MIXTRAL, dp=2, tp=2, sp=True, zero=(3, 0), recompute=ALL),
    "dp2-tp2-ep2-zero1": make_plan(MIXTRAL, dp=2, tp=2, ep=2, sp=True, zero=(1, 2)),
    "dp2-tp2-ep4": make_plan(MIXTRAL, dp=2, tp=2, ep=4, sp=True, zero=(1,)),
    "dp2-tp2-etp2-zero3": make_plan(MIXTRAL, dp=2, tp=2, etp=2, sp=True, zero=(3, 1)),
    "dp2-tp2-ep2-etp2": make_plan(MIXTRAL, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(2,)),
    "bf16-dp2-tp2-etp2": make_plan(
        ALL_CHOSEN, dp=2, tp=2, etp=2, sp=True, zero=(2, 0), precision=BF16
    ),
    "pp2-dp2-ep2": make_plan(MIXTRAL, pp=2, dp=2, ep=2, zero=(1,)),
    "pp2-dp2-ep2-interleaved": make_plan(
        FOUR, pp=2, dp=2, ep=2, zero=(1,), schedule=Schedule.INTERLEAVED, virtual_stages=2
    ),
    "pp2-dp2-tp2-sp-ep2-zero3": make_plan(
        MIXTRAL, pp=2, dp=2, tp=2, ep=2, sp=True, zero=(3,), recompute=ALL
    ),
    "shared-experts": make_plan(WHOLE),
    "shared-experts-ep2": make_plan(WHOLE, dp=2, ep=2, zero=(3,), recompute=ALL),
    "shared-experts-tp2": make_plan(WHOLE, tp=2, sp=True),
    "shared-experts-tp2-ep2": make_plan(
        WHOLE, tp=2, ep=2, sp=True, recompute=("norm2", "shared_fc1", "shared_activation")
    ),
    "shared-experts-etp2": make_plan(WHOLE, tp=2, etp=2, sp=True),
    "shared-experts-dp2-etp2": make_plan(WHOLE, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(1, 3)),
}
QUICK = {
    "dp2",
    "ep2-zero0",
    "ep2-zero3-full-recompute",
    "tp2-etp2",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - QUICK)


@cache
def reference(model: ModelSpec = MIXTRAL) -> TrainingOutcome:
    return run_reference(make_plan(model))


@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.multiproc
def test_a_plan_with_experts_trains_like_one_process(name):
    plan = PLANS[name]
    training_outcome = WORLDS.outcome(name)

    require_parity(plan, training_outcome, reference(plan.model))


@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.multiproc
def test_every_rank_holds_exactly_the_predicted_bytes(name):
    plan = PLANS[name]

    states = WORLDS.outcome(name).states

    assert len(states) == plan.mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }


@pytest.mark.multiproc
def test_the_experts_of_a_rank_are_its_part_of_all():
    alone = WORLDS.outcome("dp2").states[0, 0, 0][1]
    divided = WORLDS.outcome("ep2-zero0").states[0, 0, 0][1]
    experts = 2 * 4 * 3 * 32 * 24  # blocks, experts, matrices

    assert divided.parameters < alone.parameters - 4 * experts // 2


def to_the_first_two(mixture, tokens):
    """Returns a choice of experts 0 and 1 for every token, which one of two ranks holds."""
    scores = mixture.router(tokens).float()[:, :2].softmax(dim=-1)
    return torch.arange(2).expand(len(tokens), 2), scores


@pytest.mark.parametrize("name", mostly_slow(["ep2-zero0", "tp2-ep2", "tp2-etp2"], {"tp2-ep2"}))
@pytest.mark.multiproc
def test_a_rank_without_tokens_and_one_with_all_train_like_one_process(name, monkeypatch):
    monkeypatch.setattr(MixtureOfExperts, "_choose", to_the_first_two)

    (actual,) = run_plans([PLANS[name]])

    require_parity(PLANS[name], actual, run_reference(PLANS["one-rank"]))
    of_experts = actual.gradients["block0.mixture.experts.fc2.weight"].chunk(4)
    assert [bool(gradient.any()) for gradient in of_experts] == [True, True, False, False]


@pytest.mark.parametrize(
    ("name", "exchanges"),
    [
        pytest.param("dp2", 0, id="alone"),
        pytest.param("ep2-zero0", 4, id="there-and-back-in-both-passes"),
        pytest.param("ep2-zero3-full-recompute", 6, id="and-twice-again"),
        pytest.param("tp2-ep2", 4, id="not-again-with-a-list", marks=pytest.mark.slow),
        pytest.param("tp2-etp2", 0, id="divided-experts-gather"),
    ],
)
@pytest.mark.multiproc
def test_a_block_exchanges_tokens_as_often_as_is_priced(name, exchanges):
    actual = WORLDS.outcome(name).collectives

    assert actual["all_to_all_single"] == exchanges * 2 * 2  # blocks, micro-batches


# One process


TRAINING = TrainingSpec(global_batch_size=2, seq_length=SEQ_LENGTH, stack=NEUTRAL)


def block(model=MIXTRAL):
    return build_layer(model, TRAINING, LayerKind.BLOCK, 1, 0, torch.device("cpu"))


def test_every_parameter_of_the_graph_is_in_the_block():
    graph = build_graph(MIXTRAL, TRAINING, 1).block

    assert sum(p.numel() for p in block().parameters()) == graph.num_parameters
    assert block().mixture.operators == mixture_of(graph)


def test_each_expert_starts_from_its_own_values_wherever_it_is():
    first, second = (held_experts(4, 2, rank) for rank in (0, 1))
    weight = block().mixture.experts.fc1.weight.unflatten(0, (4, -1))

    assert (first, second) == (range(2), range(2, 4))
    assert len({matrix.sum().item() for matrix in weight}) == 4


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts():
    mixture = block().mixture
    mixture.router.weight.data.mul_(20)  # weights that differ
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(x)
    for i, token in enumerate(x[0]):
        scores = (mixture.router.weight @ token).softmax(0)
        best = scores.argsort(descending=True)[:2]
        for expert in best:
            wide = mixture.experts.fc1.weight.unflatten(0, (4, -1))[expert]
            gate, up = (token @ wide).unflatten(0, (-1, 2)).unbind(-1)
            out = mixture.experts.fc2.weight.unflatten(0, (4, -1))[expert] @ (
                torch.nn.functional.silu(gate) * up
            )
            expected[0, i] += scores[expert] / scores[best].sum() * out

    torch.testing.assert_close(mixture(x), expected)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    experts = block().mixture.experts
    rows = torch.randn(3, 32, requires_grad=True)

    experts(rows, [0, 3, 0, 0]).sum().backward()
    gradient = experts.fc1.weight.grad.unflatten(0, (4, -1)).abs().sum(dim=(1, 2))
    assert gradient[1] > 0
    assert gradient[[0, 2, 3]].tolist() == [0, 0, 0]

    nobody = torch.randn(0, 32, requires_grad=True)
    experts(nobody, [0, 0, 0, 0]).sum().backward()
    assert nobody.grad.shape == (0, 32)


def kept_bytes(model) -> int:
    """Bytes of the tensors that autograd keeps of a block, parameters aside."""
    layer, kept = block(model), {}
    expert_bytes = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(2, SEQ_LENGTH, 32, requires_grad=True))
    return sum(storage.nbytes() for address, storage in kept.items() if address not in expert_bytes)


def test_experts_keep_what_the_graph_says_and_the_order_of_the_copies():
    training = dataclasses.replace(TRAINING, precision=Precision.FP32)
    more = kept_bytes(MIXTRAL) - kept_bytes(LLAMA)
    predicted = [
        saved_bytes(build_graph(model, training, 2).block, Sharding()) for model in (MIXTRAL, LLAMA)
    ]

    copies = 2 * SEQ_LENGTH * 2
    assert (
        0 <= more - (predicted[0] - predicted[1]) <= 24 * copies
    )  # of a copy three numbers of 8 bytes at most


# What is refused, and what it would do


def with_block(plan, **changes):
    changed = dataclasses.replace(plan.layer_plans["block-0"], **changes)
    return dataclasses.replace(plan, layer_plans={**plan.layer_plans, "block-0": changed})


def moved(plan, operator, **changes):
    operators = plan.layer_plans["block-0"].operators
    return with_block(
        plan, operators={**operators, operator: dataclasses.replace(operators[operator], **changes)}
    )


ODD_WIDTH = dataclasses.replace(MIXTRAL, expert_ffn_hidden_size=25)
THREE = dataclasses.replace(MIXTRAL, num_experts=3)
TP2 = PLANS["tp2"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            make_plan(THREE, dp=2, ep=2), "ep 2 does not divide the 3 experts", id="experts"
        ),
        pytest.param(
            make_plan(LLAMA, dp=2, ep=2), "ep 2 divides experts, tiny-llama has none", id="dense"
        ),
        pytest.param(
            make_plan(MIXTRAL, tp=2),
            "router is placed otherwise than a mixture whose tp ranks divide the tokens",
            id="whole-tokens",
        ),
        pytest.param(
            moved(PLANS["tp2-etp2"], "fc2", input=(), parameters={"weight": ()}),
            "fc2 is placed otherwise than .* and the width of its experts",
            id="whole-experts",
        ),
        pytest.param(
            dataclasses.replace(
                PLANS["one-rank"],
                training=dataclasses.replace(PLANS["one-rank"].training, expert_capacity=1.5),
            ),
            "the executor drops no token",
            id="capacity",
        ),
        pytest.param(
            make_plan(
                dataclasses.replace(MIXTRAL, expert_ffn_hidden_size=25), tp=2, etp=2, sp=True
            ),
            "etp 2 does not divide the experts' width 25",
            id="width",
        ),
        pytest.param(
            with_block(PLANS["one-rank"], recompute=("dispatch",)),
            "of the experts only activation can run again",
            id="recompute",
        ),
        pytest.param(
            moved(TP2, "combine", input=("Shard(0)@tp",), output=("Shard(0)@tp",)),
            "combine is placed otherwise than a mixture whose tp ranks divide the tokens",
            id="placed-apart",
        ),
        pytest.param(
            moved(TP2, "fc1", parameters={"weight": ("Shard(1)@tp",)}),
            "fc1 is placed otherwise than .* its parameters not at all",
            id="divided-over-tp",
        ),
    ],
)
def test_what_experts_cannot_run_is_refused_and_the_nearest_plan_is_not(plan, message):
    with pytest.raises(ConfigError, match=message):
        validate(plan)
    validate(nearest_legal(plan))


def test_experts_that_do_not_divide_would_leave_one_with_nobody():
    held = [held_experts(3, 2, rank) for rank in (0, 1)]

    assert set().union(*held) == {0, 1}


def test_no_module_of_its_own_runs_the_dispatch_again():
    with pytest.raises(ConfigError, match="dispatch"):
        recomputed(block(), ("dispatch",), "block0")


@pytest.mark.multiproc
def test_a_mixture_placed_apart_would_not_run():
    apart = moved(TP2, "combine", input=("Shard(0)@tp",), output=("Shard(0)@tp",))

    with pytest.raises(ProcessRaisedException, match="must match the size"):
        run_plans([apart])


def test_gradients_that_a_tensor_parallel_rank_does_not_add_would_be_halves():
    """Each rank sees half of the tokens of experts that are whole on every rank."""
    layer, x = block(), torch.randn(2, SEQ_LENGTH, 32)
    whole = _expert_gradient(layer, x)
    half = _expert_gradient(layer, x[:, : SEQ_LENGTH // 2])

    assert (whole - half).abs().max() > 0.1 * whole.abs().max()


def _expert_gradient(layer, x):
    layer.zero_grad()
    layer.mixture(x).square().sum().backward()
    return layer.mixture.experts.fc1.weight.grad.clone()
