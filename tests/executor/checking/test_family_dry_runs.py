"""Dry runs of published families hold and send what is predicted.

Bytes of states and of the exchanges of experts are equal, and kept activations are within 3 %: the
prediction leaves out statistics of norms, rotary tables and the order of copies of tokens.
"""

from __future__ import annotations

import dataclasses

import pytest

from parplan.costmodels.usage.rank_usage import RankUse, predicted_use
from parplan.executor.checking.dry_run_workers import dry_runs
from parplan.executor.rules.all_rules import validate
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.rank_checks import repriced_today
from parplan.profiles.models.model_catalog import load_model
from tests.executor.checking.test_dry_run import on_cpus
from tests.executor.checking.test_expert_traffic import by_kind
from tests.executor.models.test_delta_rule_modules import WIDE
from tests.helpers.executor_plans import make_plan

pytestmark = pytest.mark.multiproc


def family(name: str, **layout: object) -> Plan:
    """A plan of a small model of the catalog, with sequences of 128 tokens."""
    model = WIDE if name == WIDE.name else load_model(name).spec
    plan = make_plan(model, global_batch_size=16, **layout)
    return on_cpus(
        dataclasses.replace(plan, training=dataclasses.replace(plan.training, seq_length=128))
    )


UP = ("q_up", "kv_up", "rotary", "attention")
PLANS = {
    "deepseek-pp2-dp2-ep2": family("deepseek-tiny", pp=2, dp=2, ep=2, zero=(1,)),
    "deepseek-tp2-etp2": family("deepseek-tiny", tp=2, etp=2, sp=True),
    "deepseek-tp2-ep2-recompute": family("deepseek-tiny", tp=2, ep=2, sp=True, recompute=UP),
    "gpt-oss-pp2-dp2-ep2": family("gpt-oss-tiny", pp=2, dp=2, ep=2, zero=(1,)),
    "gpt-oss-tp2-ep2-recompute": family(
        "gpt-oss-tiny", tp=2, ep=2, sp=True, recompute=("norm1", "rotary")
    ),
    "gemma-tp2-sp": family("gemma-tiny", tp=2, sp=True),
    "gemma-tp2-recompute": family("gemma-tiny", tp=2, recompute=("attention", "post_norm1")),
    "gemma-pp2-dp2-zero3": family("gemma-tiny", pp=2, dp=2, zero=(3,)),
    "next-tp2-ep2": family(WIDE.name, tp=2, ep=2, sp=True),
    "next-pp2-dp2": family(WIDE.name, pp=2, dp=2, zero=(1,)),
    "qwen3-moe-tp2-etp2": family("qwen3-moe-tiny", tp=2, etp=2, sp=True),
    "qwen3-moe-tp2-etp2-recompute": family(
        "qwen3-moe-tiny", tp=2, etp=2, sp=True, recompute=("qkv", "qk_norm")
    ),
}
QUICK = ("deepseek-tp2-etp2",)


def uses(plan: Plan) -> list[tuple[RankUse, RankUse]]:
    """Returns the use of the first rank of each stage in a dry run, and the predicted one."""
    today = repriced_today(plan)
    found = dry_runs(plan, tuple(range(plan.mesh.pp)))
    return [
        (each.use, predicted_use(today.strategy, each.pipeline_rank, today.price_cache))
        for each in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANS],
)
def test_a_dry_run_of_a_family_holds_and_sends_what_is_predicted(name):
    validate(PLANS[name])

    both = uses(PLANS[name])

    assert [found.states for found, _ in both] == [predicted.states for _, predicted in both]
    assert [by_kind(found.sent) for found, _ in both] == [
        by_kind(predicted.sent) for _, predicted in both
    ]
    # of all stages: a dry run counts the tensor between two at the one that sends it
    assert sum(found.saved for found, _ in both) == pytest.approx(
        sum(predicted.saved for _, predicted in both), rel=0.03
    )
