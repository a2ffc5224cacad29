"""The exchanges of experts, and the collectives over their copies, are those that are predicted."""

from __future__ import annotations

from functools import cache

import pytest

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.usage.rank_traffic import EXPERT_COPIES, EXPERT_PARALLEL, SentBytes
from parplan.costmodels.usage.rank_usage import RankUse, predicted_use
from parplan.executor.checking.dry_run import dry_run
from parplan.executor.checking.parity import run_ranks
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.planner.runs.rank_checks import repriced_today
from parplan.profiles.models.model_catalog import load_model
from tests.helpers.cases import mostly_slow
from tests.helpers.counted_runs import balanced, sent_by_rank
from tests.helpers.executor_plans import MIXTRAL, make_plan

pytestmark = pytest.mark.multiproc

PLANS = {
    "ep2": make_plan(MIXTRAL, dp=2, ep=2),
    "dp4-ep2-zero3": make_plan(MIXTRAL, dp=4, ep=2, zero=(3, 2), recompute="full"),
    "tp2": make_plan(MIXTRAL, tp=2, sp=True),
    "dp2-tp2-zero1": make_plan(MIXTRAL, dp=2, tp=2, sp=True, zero=(1, 3)),
    "dp2-tp2-ep2": make_plan(MIXTRAL, dp=2, tp=2, ep=2, sp=True, zero=(2,)),
    "dp2-tp2-ep2-etp2": make_plan(MIXTRAL, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(1,)),
}
ON_GLOO = {
    "pp2-dp2-ep2": make_plan(MIXTRAL, pp=2, dp=2, ep=2, zero=(1,)),
    "deepseek-pp2-dp2-ep2": make_plan(
        load_model("deepseek-tiny").spec, pp=2, dp=2, ep=2, zero=(1,)
    ),
    "pp2-tp2-ep2": make_plan(MIXTRAL, pp=2, tp=2, ep=2, sp=True),
    "pp2-tp2-etp2": make_plan(MIXTRAL, pp=2, tp=2, etp=2, sp=True, recompute="full"),
}
OF_EXPERTS = (EXPERT_PARALLEL, EXPERT_COPIES)

Sent = dict[tuple[str, str], tuple[int, int]]  # calls and bytes by axis and kind


def by_kind(sent: tuple[SentBytes, ...], axes: tuple[str, ...] = OF_EXPERTS) -> Sent:
    """Returns calls and bytes over `axes`; an all-reduce sums many gradients in one call."""
    return {
        (str(each.axis), str(each.kind)): (
            0 if each.kind == Collective.ALL_REDUCE else each.calls,
            each.num_bytes,
        )
        for each in sent
        if each.axis in axes
    }


@cache
def predicted(plan_name: str, rank: int = 0) -> RankUse:
    today = repriced_today({**PLANS, **ON_GLOO}[plan_name])
    return predicted_use(today.strategy, rank, today.price_cache)


@pytest.mark.parametrize("name", mostly_slow(PLANS, {"dp2-tp2-ep2-etp2"}))
def test_a_dry_run_sends_to_experts_and_their_copies_what_is_predicted(name):
    actual = dry_run(PLANS[name], 0).use

    assert by_kind(actual.sent) == by_kind(predicted(name).sent)
    assert by_kind(actual.sent)
    assert actual.states == predicted(name).states


def test_experts_over_tensor_parallel_ranks_gather_and_scatter_more_than_whole_experts():
    """Gathers before both products of an expert, in both passes, and scatters behind them."""
    sent = [
        {key: calls for key, (calls, _) in by_kind(predicted(name).sent, ("tp",)).items()}
        for name in ("dp2-tp2-ep2", "dp2-tp2-ep2-etp2")
    ]

    more = {key: sent[1][key] - sent[0][key] for key in sent[0]}
    passes = 2 * 2  # blocks, micro-batches
    assert more["tp", Collective.ALL_GATHER] == passes * 3
    assert more["tp", Collective.REDUCE_SCATTER] == passes * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(ON_GLOO, {"pp2-tp2-etp2"}))
def test_balanced_ranks_on_gloo_exchange_the_predicted_bytes_in_as_many_calls(name, monkeypatch):
    monkeypatch.setattr(MixtureOfExperts, "_choose", balanced)
    plan = ON_GLOO[name]

    (results,) = run_ranks([plan], sent_by_rank)

    per_stage = plan.mesh.ranks_per_stage
    for rank, result in enumerate(results):
        sent = tuple(SentBytes(*each) for each in result)
        expected = by_kind(predicted(name, rank // per_stage).sent)
        assert by_kind(sent) == expected
        assert expected or plan.mesh.etp > 1
