"""Location of states and activations: some of the data-parallel ranks together, or the host."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.executor.rules.all_rules import validate
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import (
    OPTIONS,
    Worlds,
    reference_layers,
    require_parity,
    run_plans,
    run_reference,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

BF16 = Precision.BF16
STATES = Offload.STATES
EVERYTHING = ("norm1", "qkv", "attention", "attention_out", "norm2", "fc1", "activation", "fc2")


def held_by(plan: Plan, ranks: int | Mapping[str, int]) -> Plan:
    """`plan` with `zero_ranks` on every layer plan, or on those that are named."""
    layer_plans = {
        name: dataclasses.replace(
            layer_plan, zero_ranks=ranks if isinstance(ranks, int) else ranks.get(name)
        )
        for name, layer_plan in plan.layer_plans.items()
    }
    return dataclasses.replace(plan, layer_plans=layer_plans)


def on_host(
    plan: Plan, *what: Offload, only: tuple[str, ...] = (), keep: tuple[str, ...] = ()
) -> Plan:
    """Returns `plan` with `what` on the host for every layer plan, or for the named ones.

    `keep` names the operators whose activations the blocks keep.
    """

    def moved(actual: LayerPlan) -> LayerPlan:
        return dataclasses.replace(
            actual, offload=what, keep_on_host=keep if actual.layer is LayerKind.BLOCK else ()
        )

    layer_plans = {
        name: moved(layer_plan) if not only or name in only else layer_plan
        for name, layer_plan in plan.layer_plans.items()
    }
    return dataclasses.replace(plan, layer_plans=layer_plans)


PLANS: dict[str, Plan] = {
    **{
        f"dp4-zero{zero}-over-2": held_by(make_plan(LLAMA, dp=4, zero=(zero,)), 2)
        for zero in (1, 2, 3)
    },
    "dp4-every-block-otherwise": held_by(
        make_plan(LLAMA, dp=4, zero=(3, 2, 1, 0)), {"block-3": 2, "block-1": 1, "embedding-3": 2}
    ),
    "dp4-bf16-tied-zero3-over-2": held_by(make_plan(GPT, dp=4, zero=(3,), precision=BF16), 2),
    "pp2-dp4-tied-zero2-over-2": held_by(
        make_plan(GPT, pp=2, dp=4, zero=(2,), num_micro_batches=2), 2
    ),
    "dp4-tp2-sp-zero3-over-2": held_by(make_plan(LLAMA, dp=4, tp=2, sp=True, zero=(3,)), 2),
    "states": on_host(make_plan(GPT), STATES),
    "states-zero3-one-rank": on_host(make_plan(GPT, zero=(3,)), STATES),
    "states-bf16": on_host(make_plan(GPT, precision=BF16), STATES),
    "activations-full-recompute": on_host(make_plan(GPT, recompute="full"), keep=EVERYTHING),
    "activations-selective-recompute": on_host(
        make_plan(LLAMA, recompute=("norm1", "attention", "norm2")), keep=EVERYTHING
    ),
    "dp2-states-of-every-rank-alone": held_by(
        on_host(make_plan(LLAMA, dp=2, zero=(3,)), STATES), 1
    ),
    "dp2-some-blocks": on_host(
        make_plan(LLAMA, dp=2, zero=(0, 1, 2, 3)),
        STATES,
        keep=("norm1", "attention", "fc2"),
        only=("block-0", "block-1", "block-3"),
    ),
    "tp2-sp-both": on_host(make_plan(GPT, tp=2, sp=True), STATES, keep=EVERYTHING),
    "pp2-both-tied": on_host(make_plan(GPT, pp=2), STATES, keep=EVERYTHING),
}


SLOW = (
    "dp2-some-blocks",
    "pp2-both-tied",
    "dp4-every-block-otherwise",
    "dp4-zero1-over-2",
    "dp4-zero2-over-2",
    "dp4-zero3-over-2",
    "pp2-dp4-tied-zero2-over-2",
    "dp4-bf16-tied-zero3-over-2",
    "states-bf16",
    "activations-full-recompute",
    "dp4-tp2-sp-zero3-over-2",
)
WORLDS = Worlds(PLANS, SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS.params())
def test_a_plan_trains_like_one_process_wherever_its_states_are(name):
    plan = PLANS[name]
    validate(plan)
    training_outcome, expected = (
        WORLDS.outcome(name),
        run_reference(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))),
    )

    require_parity(plan, training_outcome, expected)


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_exactly_the_predicted_bytes_on_device_and_host(name):
    states = WORLDS.outcome(name).states

    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "gathers", "reduce_scatters"), [(1, 6, 6), (2, 6, 12), (3, 24, 12)]
)
def test_copies_of_the_shards_are_added_up_once_a_step(zero, gathers, reduce_scatters):
    actual = WORLDS.outcome(f"dp4-zero{zero}-over-2").collectives

    assert actual["_allgather_base_"] == gathers
    assert actual["_reduce_scatter_base_"] == reduce_scatters
    assert actual["allreduce_"] == 1 + 1  # one bucket, and the loss


SAME: tuple[Plan, ...] = (
    make_plan(GPT, dp=2, zero=(3,), precision=BF16),
    make_plan(GPT, pp=2, precision=BF16),
    make_plan(GPT, tp=2, precision=BF16),
    make_plan(GPT, dp=2, zero=(0,)),
    on_host(make_plan(GPT, dp=2, zero=(1,), precision=BF16), STATES),
)


def test_every_mesh_starts_from_the_same_fp32_values_bit_by_bit():
    """Whatever the precision: the masters of bf16 are fp32."""
    expected = {
        name: value.detach()
        for name, value in reference_layers(GPT, SAME[0].training, OPTIONS.seed).named_parameters(
            remove_duplicate=False
        )
    }
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_initial, args=(2, folder), nprocs=2, start_method="fork")
        actual = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]

    for plan in range(len(SAME)):
        values = actual[0][plan] | actual[1][plan]
        assert values.keys() == expected.keys()
        assert all(
            value.dtype == torch.float32 and torch.equal(value, expected[name])
            for name, value in values.items()
        )


def _initial(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    torch.save([_whole(plan) for plan in SAME], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _whole(plan: Plan) -> dict[str, torch.Tensor]:
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    named = [
        item
        for stage in trainer.pipeline.stages
        for item in stage.body.named_parameters(remove_duplicate=False)
    ]
    return {name.replace(_CHECKPOINT_PREFIX, ""): _all_of(value).detach() for name, value in named}


def _all_of(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.slow
def test_the_first_loss_in_bf16_is_the_same_on_any_number_of_ranks_and_at_any_zero_stage():
    plans = [
        make_plan(GPT, precision=BF16),
        *(make_plan(GPT, dp=2, zero=(zero,), precision=BF16) for zero in range(4)),
    ]

    one_rank, *two = [
        trained.losses[0] for trained in (*run_plans(plans[:1]), *run_plans(plans[1:]))
    ]

    assert two == [two[0]] * 4
    assert two[0] == pytest.approx(
        one_rank, rel=2**-23
    )  # the micro-batches are the same, their losses are added in another order
