"""Divisions of embedding and head over the tensor-parallel axis train like one process."""

from __future__ import annotations

import dataclasses

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.rules.all_rules import nearest_legal, validate
from parplan.planner.plan.plan import OperatorPlacement, Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.transformer import build_graph
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import Worlds, require_parity, run_reference

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

ENDS = (LayerKind.EMBEDDING, LayerKind.HEAD)
SHORT_GPT = dataclasses.replace(GPT, num_layers=2)
SHORT_LLAMA = dataclasses.replace(LLAMA, num_layers=2)
WHOLE, HIDDEN, VOCAB = Split(), Split("hidden"), Split("vocab")
SEQUENCE, BATCH = Split("sequence"), Split("batch")


def with_ends(plan: Plan, **splits: Split) -> Plan:
    """Returns `plan` with other splits of operators of embedding and head, by name."""
    own = tuple((name, (split,)) for name, split in splits.items())
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    layer_plans = dict(plan.layer_plans)
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.layer in ENDS:
            sharding = Sharding(plan.mesh.tp, layer_plan.sequence_parallel, own)
            operators = {
                operator.name: OperatorPlacement(
                    **dataclasses.asdict(placements(operator, sharding))
                )
                for operator in graph.layer_class(layer_plan.layer).operators
            }
            layer_plans[name] = dataclasses.replace(layer_plan, operators=operators)
    return dataclasses.replace(plan, layer_plans=layer_plans)


PLANS: dict[str, Plan] = {
    "gpt-both-by-hidden": with_ends(
        make_plan(SHORT_GPT, tp=2),
        tokens=HIDDEN,
        positions=HIDDEN,
        norm=SEQUENCE,
        lm_head=Split("hidden", "sequence"),
        loss=SEQUENCE,
    ),
    "gpt-whole-tables-over-tokens": with_ends(
        make_plan(SHORT_GPT, tp=2, sp=True),
        tokens=SEQUENCE,
        positions=BATCH,
        norm=BATCH,
        lm_head=BATCH,
        loss=BATCH,
    ),
    "llama-columns-and-a-head-by-tokens": with_ends(
        make_plan(SHORT_LLAMA, tp=2, sp=True),
        tokens=HIDDEN,
        norm=SEQUENCE,
        lm_head=SEQUENCE,
        loss=SEQUENCE,
    ),
    "llama-replicated": with_ends(
        make_plan(SHORT_LLAMA, tp=2), tokens=WHOLE, norm=BATCH, lm_head=WHOLE, loss=WHOLE
    ),
    "gpt-loss-over-tokens-of-a-divided-vocabulary": with_ends(
        make_plan(SHORT_GPT, tp=2), tokens=Split("vocab", "batch"), positions=BATCH, loss=BATCH
    ),
    "gpt-replicated": with_ends(
        make_plan(SHORT_GPT, tp=2, sp=True), tokens=WHOLE, positions=HIDDEN, lm_head=WHOLE
    ),
    "llama-batch-table-and-summed-head": with_ends(
        make_plan(SHORT_LLAMA, tp=2), tokens=BATCH, norm=SEQUENCE, lm_head=HIDDEN, loss=VOCAB
    ),
    "pp2-gpt-tied-by-hidden": with_ends(
        make_plan(SHORT_GPT, pp=2, tp=2),
        tokens=HIDDEN,
        lm_head=Split("hidden", "batch"),
        loss=BATCH,
    ),
    "pp2-gpt-tied-over-tokens": with_ends(
        make_plan(SHORT_GPT, pp=2, tp=2, sp=True), tokens=SEQUENCE, lm_head=SEQUENCE, loss=SEQUENCE
    ),
    **{
        f"dp2-gpt-over-tokens-zero{zero}": with_ends(
            make_plan(SHORT_GPT, dp=2, tp=2, sp=True, zero=(zero,)),
            tokens=SEQUENCE,
            lm_head=SEQUENCE,
            loss=SEQUENCE,
        )
        for zero in range(4)
    },
    **{
        f"dp2-llama-by-hidden-zero{zero}": with_ends(
            make_plan(SHORT_LLAMA, dp=2, tp=2, zero=(zero,)),
            tokens=HIDDEN,
            lm_head=Split("hidden", "sequence"),
            loss=SEQUENCE,
        )
        for zero in range(4)
    },
    "dp2-bf16-gpt-by-hidden": with_ends(
        make_plan(SHORT_GPT, dp=2, tp=2, zero=(2,), precision=Precision.BF16),
        tokens=HIDDEN,
        positions=HIDDEN,
        lm_head=HIDDEN,
        loss=SEQUENCE,
    ),
    "pp2-dp2-llama-interleaved-over-tokens": with_ends(
        make_plan(
            LLAMA,
            pp=2,
            dp=2,
            tp=2,
            sp=True,
            zero=(3,),
            schedule=Schedule.INTERLEAVED,
            virtual_stages=2,
        ),
        tokens=SEQUENCE,
        lm_head=SEQUENCE,
        loss=SEQUENCE,
    ),
}
PLAIN = {
    "gpt-both-by-hidden",
    "llama-columns-and-a-head-by-tokens",
}
WORLDS = Worlds(PLANS, slow=PLANS.keys() - PLAIN)


@pytest.mark.parametrize("name", WORLDS.params())
def test_embedding_and_head_divided_in_any_way_train_like_one_process(name):
    plan = PLANS[name]
    validate(plan)

    outcome = WORLDS.outcome(name)

    whole = dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))
    require_parity(plan, outcome, run_reference(whole))


@pytest.mark.parametrize("name", WORLDS.params())
def test_every_rank_holds_the_bytes_that_the_placements_say(name):
    states = WORLDS.outcome(name).states

    assert len(states) == PLANS[name].mesh.num_ranks
    assert {rank: measured for rank, (_, measured) in states.items()} == {
        rank: predicted for rank, (predicted, _) in states.items()
    }


@pytest.mark.parametrize(
    "splits",
    [
        pytest.param({"tokens": HIDDEN}, id="columns-and-rows"),
        pytest.param({"tokens": WHOLE, "lm_head": SEQUENCE}, id="whole-and-summed"),
        pytest.param({"lm_head": WHOLE}, id="rows-and-whole"),
        pytest.param({"lm_head": HIDDEN}, id="rows-and-columns"),
        pytest.param({"tokens": WHOLE, "lm_head": Split("vocab")}, id="whole-and-rows"),
    ],
)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_table_that_is_divided_in_two_ways_is_refused(splits, pp):
    plan = with_ends(make_plan(GPT, pp=pp, tp=2), **splits)

    with pytest.raises(ConfigError, match="divides the tied table in another way than head"):
        validate(plan)
    nearest = nearest_legal(plan)
    assert nearest is not None
    validate(nearest)


def test_tables_and_losses_have_their_placements():
    plan = make_plan(LLAMA, tp=2)
    for name, operator, placement, message in (
        ("embedding-0", "tokens", {"output": ("Shard(2)@tp",)}, "weight Shard.0. with output"),
        ("embedding-0", "tokens", {"input": ("Shard(1)@tp",)}, "input Shard.1., it must be whole"),
        ("head-0", "loss", {"output": ("Shard(2)@tp",)}, "the loss is one sum"),
        ("head-0", "lm_head", {"output": ()}, "a weight divided by rows reads the whole input"),
    ):
        actual = plan.layer_plans[name]
        changed = dataclasses.replace(actual.operators[operator], **placement)
        layer_plan = dataclasses.replace(actual, operators={**actual.operators, operator: changed})
        broken = dataclasses.replace(plan, layer_plans={**plan.layer_plans, name: layer_plan})
        with pytest.raises(ConfigError, match=message):
            validate(broken)
        assert nearest_legal(broken) is not None
