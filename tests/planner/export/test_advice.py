"""The single changes that gain most are named by the launcher's own arguments."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.advice import advice
from parplan.planner.export.exported import export_plan
from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.configured import price_settings
from parplan.planner.export.fields.settings import Settings, settings_of
from parplan.planner.export.neighbours import neighbours
from parplan.planner.export.targets import TARGETS
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import SearchOptions
from parplan.profiles.stack import ContextForm
from tests.helpers.laid_out_plans import laid_out


def of_script(plan, name="megatron", more=""):
    """Returns the advice on a plan's export with further arguments, and these arguments."""
    target = TARGETS[name]
    file, text = next(iter(export_plan(plan, target, "plan.yaml").files.items()))
    given = target.arguments(f"{text.rstrip()} {more}\n", file)
    settings = target.settings(given, plan.model, plan.cluster.num_gpus)
    priced = price_settings(settings, plan.model, plan.cluster, plan.training)
    record = SearchRecord.of_estimate(priced.price.step_s, priced.price.closed_form_s)
    today = assemble(priced.strategy, priced.price, record, priced.price_cache)
    return advice(today, settings, target, given), given


def advised(plan, name="megatron"):
    return of_script(plan, name)[0].single


@pytest.fixture(scope="module")
def recomputed():
    """A plan that recomputes all blocks without need, and the changes that gain most."""
    plan = laid_out("llama3-8b", pp=2, dp=2, tp=2, recompute=Recompute.FULL)
    return plan, advised(plan)


def applied(given, change) -> tuple[Given, ...]:
    """Returns arguments with a change made in them by hand."""
    changed = {name: after for name, _, after in change.arguments}
    kept = [each for each in given if each.name not in changed]
    return (
        *kept,
        *(Given(name, words, "") for name, words in changed.items() if words is not None),
    )


FILES = [
    pytest.param(lambda: laid_out(pp=2, dp=2, tp=4), "megatron", id="dense"),
    pytest.param(
        lambda: laid_out("mixtral-8x7b", dp=8, tp=2, ep=4, recompute=Recompute.FULL),
        "megatron",
        id="experts",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda: laid_out("llama3-8b", dp=8, zero=3, recompute=Recompute.FULL, stack="torchtitan"),
        "torchtitan",
        id="fsdp",
    ),
    pytest.param(
        lambda: laid_out(
            "llama3-8b",
            dp=1,
            cp=4,
            tp=2,
            seq_length=32768,
            context_form=ContextForm.RING,
            recompute=Recompute.FULL,
        ),
        "megatron",
        id="long-context",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda: laid_out("llama3-8b", pp=4, dp=2, recompute=Recompute.FULL),
        "megatron",
        id="recompute",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("plan", "name"), FILES)
def test_every_change_has_its_price_once_it_is_made_in_the_file(plan, name):
    plan, target = plan(), TARGETS[name]
    found, given = of_script(plan, name)
    changes = (*found.single, *([found.together] if found.together else []))
    own = {row.name for row in target.table}
    limit = limit_bytes(plan.cluster, plan.training.stack, SearchOptions())

    assert changes
    for change in changes:
        made = target.settings(applied(given, change), plan.model, plan.cluster.num_gpus)
        priced = price_settings(made, plan.model, plan.cluster, plan.training)
        assert priced.price.step_s == pytest.approx(change.configured.price.step_s, rel=1e-9)
        assert change.configured.peak_bytes <= limit
        assert {each for each, _, _ in change.arguments} <= own


@pytest.mark.slow
def test_several_changes_gain_more_than_the_best_alone():
    found, _ = of_script(laid_out("llama3-8b", pp=2, dp=2, tp=4, recompute=Recompute.FULL))

    assert found.together is not None
    assert found.together.configured.price.step_s < found.single[0].configured.price.step_s


@pytest.mark.slow
def test_an_argument_that_says_a_setting_in_another_word_goes_with_the_change():
    plan = laid_out("llama3-8b", pp=2, dp=2, tp=2)
    found, given = of_script(plan, more="--num-layers-per-virtual-pipeline-stage 16")
    change = next(
        each for each in found.single if "--num-virtual-stages-per-pipeline-rank" in str(each)
    )

    assert ("--num-layers-per-virtual-pipeline-stage", ("16",), None) in change.arguments
    made = TARGETS["megatron"].settings(applied(given, change), plan.model, 8)
    assert made.virtual_stages > 1


@pytest.mark.slow
def test_an_absent_degree_is_said_as_the_number_that_it_stands_for():
    changes = advised(laid_out("llama3-8b", dp=4, tp=2))
    change = next(each for each in changes if "--tensor-model-parallel-size" in str(each))

    assert change.arguments[0] == ("--tensor-model-parallel-size", ("2",), ("1",))


@pytest.mark.slow
def test_several_changes_make_fit_what_does_not():
    plan = laid_out("llama3-70b", pp=2, dp=8, tp=4, seq_length=8192, num_micro_batches=16)
    found, _ = of_script(plan)

    assert found.together is not None
    assert any(stage.total > stage.capacity for stage in plan.predicted.memory_gib)


@pytest.mark.slow
def test_needless_recompute_is_the_first_thing_to_change(recomputed):
    plan, (first, *others) = recomputed

    assert first.arguments[0] == ("--recompute-granularity", ("full",), None)
    steps = [each.configured.price.step_s for each in (first, *others)]
    assert steps == sorted(steps)
    assert steps[-1] < plan.predicted.step_time_s.value


def test_a_change_has_the_price_of_the_plan_with_it(recomputed):
    _, (first, *_) = recomputed
    without = laid_out("llama3-8b", pp=2, dp=2, tp=2)

    assert first.configured.price.step_s == pytest.approx(
        without.predicted.step_time_s.value, rel=1e-5
    )


@pytest.mark.slow
def test_what_does_not_fit_is_advised_to_fit_even_if_slower():
    plan = laid_out(
        "llama3-8b", dp=4, tp=2, micro_batch_size=8, num_micro_batches=2, seq_length=4096
    )
    changes = advised(plan)

    assert any(stage.total > stage.capacity for stage in plan.predicted.memory_gib)
    assert changes
    capacity = plan.predicted.memory_gib[0].capacity * 2**30
    assert all(each.configured.peak_bytes <= capacity for each in changes)


@pytest.mark.parametrize(
    ("model", "mesh", "switches"),
    [
        pytest.param("llama3-8b", {"dp": 2, "tp": 4}, {"tp_overlap"}, id="tensor-parallelism"),
        pytest.param(
            "deepseek-v2-lite",
            {"dp": 8, "ep": 8},
            {"tokens_once", "overlap_exchanges"},
            id="experts",
        ),
        pytest.param(
            "deepseek-v2-lite",
            {"dp": 8, "ep": 8, "recompute": Recompute.FULL},
            {"tokens_once"},
            id="exchanges-under-full-recompute-are-not-hidden",
        ),
        pytest.param("llama3-8b", {"dp": 8}, set(), id="nothing-to-hide"),
    ],
)
def test_the_switches_that_the_launcher_runs_and_that_have_an_effect_are_tried(
    model, mesh, switches
):
    plan, target = laid_out(model, **mesh), TARGETS["megatron"]
    settings = replace(settings_of(plan), recompute=mesh.get("recompute", Recompute.NONE))

    tried = dict(neighbours(plan, settings, target))

    facts = {switch.fact for switch in target.switches}
    assert facts & tried.keys() == switches
    for fact in switches:
        assert {fact: True} == {
            field.name: getattr(tried[fact], field.name)
            for field in fields(Settings)
            if getattr(tried[fact], field.name) != getattr(settings, field.name)
        }


@pytest.mark.slow
def test_a_switch_that_gains_most_is_said_first():
    plan = laid_out("llama3-8b", dp=1, tp=8, micro_batch_size=8, num_micro_batches=1)

    found, given = of_script(plan)

    assert found.single[0].arguments == (("--tp-comm-overlap", None, ()),)
    hidden, _ = of_script(plan, more="--tp-comm-overlap")
    assert "--tp-comm-overlap" not in str(hidden)
    assert all(each.name != "--tp-comm-overlap" for each in given)
