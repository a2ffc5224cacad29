"""The short summary: few lines at every width, with every warning, and a way to the rest."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.planner.plan.oom_risk import margin_at
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Band, ErrorBand, Quantity, RunnerUp
from parplan.planner.plan.traits import family_of
from parplan.profiles.provenance import Kind
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.notes import warnings
from parplan.report.plans.plan_header import short_assumed
from parplan.report.plans.summary import MOST_LINES, print_summary
from parplan.report.plans.summary_context import SummaryContext
from tests.helpers.synthetic_runs import estimated

ASSUMED = (
    "--gpu a100-80gb",
    "--gpus-per-node 8",
    "--global-batch-size 1024 (the model's)",
    "--precision bf16",
    "--memory-margin 0.04 (the least; 45 measured runs ask for no more)",
)
CLOSING = ("wrote plan.yaml; run it with", "  plan export plan.yaml --to megatron")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with three runners-up, which leaves less free than runs asked for."""
    plan = estimated(pp=4)
    runners_up = tuple(
        RunnerUp(
            mesh=replace(plan.mesh, pp=pp, dp=16 // pp),
            pipeline=plan.pipeline,
            sequence_parallel=True,
            peak_memory_gib=10.0,
            redundancy_gib=5.0,
            step_time_s=Quantity(value=2 * plan.predicted.step_time_s.value, kind=Kind.ANALYTIC),
        )
        for pp in (1, 2, 8)
    )
    band = Band(share=0.06, rows=45, stack="megatron-core", like={"pipeline": 330})
    memory = tuple(replace(each, capacity=each.total * 1.01) for each in plan.predicted.memory_gib)
    predicted = replace(
        plan.predicted, memory_gib=memory, error_band=ErrorBand(time=band, memory=band)
    )
    search = replace(plan.search, runners_up=runners_up, solver_failure="the solver CBC failed")
    return replace(plan, predicted=predicted, search=search)


def printed(plan: Plan, width: int, **context: object) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    print_summary(plan, out, SummaryContext(assumed=ASSUMED, closing=CLOSING, **context))
    return out.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_it_has_few_lines_which_fit_and_every_warning(plan, width):
    text = printed(plan, width)

    assert len(text.splitlines()) <= MOST_LINES == 20 or width < 80
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert len(list(warnings(plan))) == 3
    for warning in warnings(plan):
        assert warning in flat
    for label in ("mesh", "layers", "step", "memory", "proven", "time", "also"):
        assert f"\n  {label} " in text
    assert text.endswith("\n".join(CLOSING) + "\n")


def test_defaults_that_few_change_are_counted_and_listed_with_the_rest(plan):
    assumed = (
        "assumed: --gpu a100-80gb, --gpus-per-node 8, --global-batch-size 1024, 2 more (--verbose)"
    )

    assert assumed in printed(plan, 100)
    assert ASSUMED[-1] in printed(plan, 100, whole=True)


def test_the_host_that_nobody_asked_for_has_its_reason():
    host = "--offload optimizer (nothing fits the devices alone)"

    text = short_assumed(("--stack nemo (of the launcher)", host), 100, listed=True)

    assert text == f"assumed: --stack nemo, {host}"


@pytest.mark.parametrize(("more", "warned"), [(1e-4, False), (-1e-4, True)])
def test_a_plan_that_leaves_less_than_one_run_in_20_asked_for_says_so(plan, more, warned):
    share = margin_at(0.05, family_of(plan.training.stack)).share + more
    memory = tuple(
        replace(each, capacity=each.total / (1 - share)) for each in plan.predicted.memory_gib
    )
    changed = replace(plan, predicted=replace(plan.predicted, memory_gib=memory))

    assert any("--oom-risk 5%" in text for text in warnings(changed)) is warned


def test_one_block_is_no_blocks(monkeypatch):
    plan = estimated()
    name, usual = next(iter(plan.layer_plans.items()))
    other = replace(usual, recompute=("norm1",))
    unlike = replace(plan, layer_plans={**plan.layer_plans, "other": other})
    counts = {"other": 1, name: 53}
    monkeypatch.setattr("parplan.report.plans.block_phrases.blocks_by_plan", lambda _: counts)

    _, recompute = layers_phrases(unlike)

    assert "norm1 on 1 block, none on 53" in recompute
