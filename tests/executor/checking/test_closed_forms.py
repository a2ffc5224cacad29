"""The survey's closed forms equal the bytes that ranks count in a step on gloo, and the price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.usage.rank_traffic import SentBytes, rank_traffic
from parplan.executor.checking.parity import run_ranks
from parplan.executor.models.mixture_of_experts import MixtureOfExperts
from parplan.executor.rules.all_rules import nearest_legal
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.schemes.every_scheme import SCHEMES
from parplan.planner.schemes.scheme_prices import sent_bytes
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import mostly_slow
from tests.helpers.closed_forms import CLOSED_FORMS, FP32_BYTES, Sizes
from tests.helpers.counted_runs import balanced, sent_by_rank
from tests.helpers.executor_plans import LLAMA, MIXTRAL, make_plan

pytestmark = pytest.mark.multiproc

DEEP = replace(LLAMA, num_layers=8)


def recomputed(schedule):
    """A plan whose blocks all run again, but for those of a last stage that keeps all."""
    plan = make_plan(LLAMA, pp=4, num_micro_batches=4, schedule=schedule, recompute="full")
    nearest = nearest_legal(plan)
    assert nearest is not None
    return nearest


PLANS = {
    "data parallel": make_plan(LLAMA, dp=2),
    **{f"ZeRO {zero}": make_plan(LLAMA, dp=2, zero=(zero,)) for zero in (1, 2, 3)},
    "tensor 1-D": make_plan(LLAMA, tp=2),
    "tensor 1-D, sequence": make_plan(LLAMA, tp=2, sp=True),
    "tensor 2-D": make_plan(LLAMA, tp=4, tp_rows=2),
    **{
        f"context, {form}": make_plan(LLAMA, cp=2, form=form)
        for form in (ContextForm.RING, ContextForm.ALL_GATHER, ContextForm.ALL_TO_ALL)
    },
    "pipeline, GPipe": make_plan(LLAMA, pp=4, num_micro_batches=4, schedule=Schedule.GPIPE),
    "pipeline, 1F1B": make_plan(LLAMA, pp=4, num_micro_batches=4),
    **{
        f"pipeline, {name}": make_plan(
            DEEP, pp=4, num_micro_batches=8, schedule=schedule, virtual_stages=2
        )
        for name, schedule in (("ZB-V", Schedule.ZBV), ("DualPipeV", Schedule.DUALPIPEV))
    },
    **{
        f"pipeline, {name}": recomputed(schedule)
        for name, schedule in (
            ("early R", Schedule.EARLY_RECOMPUTE),
            ("last no R", Schedule.LAST_NO_RECOMPUTE),
            ("SCP", Schedule.SCP),
        )
    },
    "pipeline, interleaved": make_plan(
        DEEP, pp=4, num_micro_batches=4, schedule=Schedule.INTERLEAVED, virtual_stages=2
    ),
    "expert parallel": make_plan(MIXTRAL, dp=2, ep=2),
}
LOSS_BYTES = 2 * FP32_BYTES  # of the sum of the loss, at most, which neither form nor price has
QUICK = {"ZeRO 2", "tensor 1-D, sequence"}


def sizes_of(plan):
    pipeline = plan.pipeline
    return Sizes(
        plan.model,
        plan.training,
        plan.mesh.num_ranks,
        pipeline.micro_batch_size,
        pipeline.num_micro_batches,
    )


def most_sent(plan, each_rank):
    """Bytes that the busiest rank sends."""
    return max(sum(sent_bytes(each, plan.mesh) for each in sent) for sent in each_rank)


def vectors(plan):
    """Bytes of the sums of norms' gradients over tensor-parallel ranks, which a price leaves out.

    The ranks have other tokens under sequence parallelism, and the rows of a grid too.
    """
    mesh, model = plan.mesh, plan.model
    norms = FP32_BYTES * (2 * model.num_layers + 1) * model.hidden_size
    if mesh.tp_rows > 1:
        return 2 * (mesh.tp_rows - 1) / mesh.tp_rows * norms / mesh.tp_columns
    has_own_tokens = any(each.sequence_parallel for each in plan.layer_plans.values())
    return 2 * (mesh.tp - 1) / mesh.tp * norms if has_own_tokens else 0.0


@pytest.mark.parametrize("name", PLANS)
def test_a_closed_form_is_the_traffic_of_the_price(name):
    plan = PLANS[name]
    cache = prices_of_plan(plan)
    strategy = strategy_of(plan, cache)
    priced = [list(rank_traffic(strategy, rank, cache)) for rank in range(plan.mesh.pp)]

    assert most_sent(plan, priced) == pytest.approx(CLOSED_FORMS[name](sizes_of(plan)), rel=1e-12)


@pytest.mark.parametrize("name", mostly_slow(PLANS, QUICK))
def test_a_closed_form_is_the_bytes_that_ranks_count_on_gloo(name, monkeypatch):
    monkeypatch.setattr(MixtureOfExperts, "_choose", balanced)
    plan = PLANS[name]

    (results,) = run_ranks([plan], sent_by_rank)

    sent = most_sent(plan, [[SentBytes(*each) for each in result] for result in results])
    expected = CLOSED_FORMS[name](sizes_of(plan)) + vectors(plan)
    assert sent == pytest.approx(expected, rel=0, abs=LOSS_BYTES)
    assert sent > 100 * LOSS_BYTES


def test_every_form_is_of_a_scheme_and_has_a_plan():
    assert CLOSED_FORMS.keys() == PLANS.keys()
    assert CLOSED_FORMS.keys() <= {scheme.name for scheme in SCHEMES}
