"""Blocks whose operators divide batch or weight over data-parallel ranks, and over tp as well."""

import dataclasses
import random
from dataclasses import asdict, replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.operators.legal_splits import operator_splits
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import run_reference
from parplan.executor.rules.all_rules import nearest_legal, validate
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import LayerRun, OperatorPlacement, Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.transformer import build_graph
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import Worlds, require_parity

SHORT_GPT = dataclasses.replace(GPT, num_layers=2)
SHORT_LLAMA = dataclasses.replace(LLAMA, num_layers=2)
CHAIN = ("norm2", "fc1", "activation")


def with_random_divisions(plan: Plan, seed: int) -> Plan:
    """Returns `plan` with random legal divisions of each block over both axes."""
    draw = random.Random(seed)
    over = Sharding(plan.mesh.tp, data=plan.mesh.dp)
    batch = plan.pipeline.micro_batch_size * plan.mesh.dp
    operators = build_graph(plan.model, plan.training, batch).block.operators
    plans = dict(plan.layer_plans)

    def drawn() -> dict[str, OperatorPlacement]:
        placed = {}
        for operator in operators:
            legal, _ = operator_splits(operator, over.degrees, over_data=True)
            own = replace(over, own=((operator.name, draw.choice(legal)),))
            placed[operator.name] = OperatorPlacement(**asdict(placements(operator, own)))
        return placed

    def divided(run: LayerRun) -> LayerRun:
        if not blocks_of(plan, run):
            return run
        name = f"{run.plan}-{run.first}"
        layer_plan = plan.layer_plans[run.plan]
        plans[name] = replace(layer_plan, operators=drawn())
        while not plans[name].divides_over_data:
            plans[name] = replace(layer_plan, operators=drawn())
        return replace(run, plan=name)

    stages = tuple(
        replace(stage, layers=tuple(divided(run) for run in stage.layers)) for stage in plan.stages
    )
    used = {run.plan for stage in stages for run in stage.layers}
    return replace(
        plan, stages=stages, layer_plans={name: plans[name] for name in plans if name in used}
    )


PLANS = {
    "dp2-tp2-gpt": with_random_divisions(make_plan(GPT, dp=2, tp=2, zero=(0, 3)), 0),
    "dp2-tp2-llama-recomputed": with_random_divisions(
        make_plan(LLAMA, dp=2, tp=2, sp=True, zero=(1, 2), recompute=CHAIN), 1
    ),
    "dp2-tp2-bf16": with_random_divisions(
        make_plan(SHORT_GPT, dp=2, tp=2, zero=(0, 3), precision=Precision.BF16), 2
    ),
    "dp2-pp2-gpt-full-recompute": with_random_divisions(
        make_plan(SHORT_GPT, pp=2, dp=2, zero=(2,), recompute="full"), 3
    ),
    "dp2-llama": with_random_divisions(make_plan(SHORT_LLAMA, dp=2, zero=(1,)), 4),
    **{
        f"dp2-tp2-{name}-zero{zero}-{seed}": with_random_divisions(
            make_plan(model, dp=2, tp=2, sp=seed % 2 == 0, zero=(zero,), recompute=again), seed
        )
        for seed, (name, model, zero, again) in enumerate(
            (name, model, zero, again)
            for name, model in (("gpt", SHORT_GPT), ("llama", SHORT_LLAMA))
            for zero in range(4)
            for again in ((), CHAIN)
        )
    },
    "pp2-dp2-tp2-interleaved-bf16": with_random_divisions(
        make_plan(
            GPT,
            pp=2,
            dp=2,
            tp=2,
            zero=(3,),
            precision=Precision.BF16,
            schedule=Schedule.INTERLEAVED,
            virtual_stages=2,
        ),
        5,
    ),
}
PLAIN = {"dp2-llama"}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - PLAIN)


@pytest.mark.parametrize("name", WORLDS.params())
def test_weights_over_data_train_like_one_process(name):
    plan = PLANS[name]
    validate(plan)

    require_parity(
        plan, WORLDS.outcome(name), run_reference(replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)))
    )


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_the_predicted_bytes(name):
    states = WORLDS.outcome(name).states

    assert len(states) == PLANS[name].mesh.num_ranks
    assert all(predicted == measured for predicted, measured in states.values())


def test_a_division_that_leaves_partial_gradients_is_refused():
    plan = PLANS["dp2-tp2-gpt"]
    name = next(name for name, each in plan.layer_plans.items() if each.divides_over_data)
    operators = {**plan.layer_plans[name].operators, "norm1": OperatorPlacement()}
    wrong = replace(
        plan,
        layer_plans={
            **plan.layer_plans,
            name: replace(plan.layer_plans[name], operators=operators),
        },
    )

    with pytest.raises(ConfigError, match="norm1 has placements that dp 2 x tp 2 cannot give it"):
        validate(wrong)
    validate(nearest_legal(wrong))
