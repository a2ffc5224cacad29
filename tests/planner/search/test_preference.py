"""The preferred plan is the best of its kind among the ties, and keeps the proof of the fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.step import price_step
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.corners import SPEEDS, USUAL_SHARE, corners
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document, plan_to_yaml
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.plan.ties import UNKNOWN
from parplan.planner.search import corner_steps
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.off_speed import at_speeds

# The fastest plan of this request leans more on the network than the second.
REQUEST = TargetOptions(
    model="llama3-8b", gpus=64, gpu="a100-80gb", gpus_per_node=2, global_batch_size=128
)
PINS = PinOptions(virtual_stages=(1,), schedule=("1f1b",), zero=(1,))


def preferring(prefer, target=REQUEST):
    return find_plan(request_of(target, PINS, SearchFlags(prefer=prefer)))


@pytest.fixture(scope="module")
def plans():
    return {prefer: preferring(prefer) for prefer in Prefer}


def fullest_gib(plan):
    return max(memory.total for memory in plan.predicted.memory_gib)


def ties_of(plan):
    return [runner_up for runner_up in plan.search.runners_up if runner_up.inside_error_band]


def layout_of(entry):
    """Returns what tells a plan or a runner-up from the others."""
    of_step = entry.predicted if isinstance(entry, Plan) else entry
    return entry.mesh, entry.pipeline, of_step.step_time_s.value


def without_choice(plan):
    """Returns the record of a plan without its choice and the programs of its blocks."""
    return replace(plan.search, preference=None, runners_up=(), layers=None, certificate=None)


@pytest.mark.slow
def test_every_preference_has_the_proof_of_the_fastest_and_says_how_much_slower_it_is(plans):
    fastest = plans[Prefer.FASTEST]
    proven = without_choice(fastest)

    for prefer, plan in plans.items():
        choice = plan.search.preference
        step_s = plan.predicted.step_time_s.value
        assert without_choice(plan) == proven
        assert plan.search.certificate.plan == fastest.search.certificate.plan
        assert plan.search.layers.gap == 0.0  # the programs are those of the plan's own layers
        assert choice.prefer is prefer
        assert choice.slowdown == pytest.approx(
            step_s / fastest.predicted.step_time_s.value - 1, abs=2e-6
        )
        share = ratio_share(fastest.predicted.error_band, plan_shape(fastest), plan_shape(plan))
        assert 0 <= choice.slowdown <= share


def test_the_plan_and_its_runners_up_are_the_same_candidates_for_every_preference(plans):
    candidates = [
        {layout_of(plan), *map(layout_of, plan.search.runners_up)} for plan in plans.values()
    ]

    assert candidates[0] == candidates[1] == candidates[2]
    assert len({len(ties_of(plan)) for plan in plans.values()}) == 1
    assert len({layout_of(plan) for plan in plans.values()}) > 1


def test_the_leanest_plan_has_the_least_memory_of_the_ties(plans):
    lean = plans[Prefer.LEANEST]
    share = lean.predicted.error_band.memory.share
    least_gib = min(tie.peak_memory_gib for tie in ties_of(lean))

    assert fullest_gib(lean) * (1 - share) <= least_gib
    assert fullest_gib(lean) < fullest_gib(plans[Prefer.FASTEST]) * (1 - share)


def test_the_robust_plan_has_the_least_worst_loss_of_the_ties(plans):
    robust, fastest = plans[Prefer.ROBUST], plans[Prefer.FASTEST]
    loss = robust.search.preference.worst_loss

    assert all(loss <= tie.worst_loss for tie in ties_of(robust))
    assert loss < fastest.search.preference.worst_loss
    assert all(
        runner_up.worst_loss is None
        for runner_up in robust.search.runners_up
        if not runner_up.inside_error_band
    )


def test_losses_between_two_plans_are_those_of_whole_prices(plans):
    """The fastest and the robust plan, priced in full on every machine, bound each other's loss."""
    pair = (plans[Prefer.FASTEST], plans[Prefer.ROBUST])
    worst = [0.0, 0.0]
    for speeds in corners(USUAL_SHARE, SPEEDS):
        steps_s = []
        for plan in pair:
            prices = prices_of_plan(plan)
            off = prices.on(at_speeds(prices.machine, speeds))
            steps_s.append(price_step(strategy_of(plan, prices), off).step_s)
        worst = [max(w, s / min(steps_s) - 1) for w, s in zip(worst, steps_s, strict=True)]

    # Other ties may be better than both in a scenario, so a recorded loss is no smaller.
    for plan, loss in zip(pair, worst, strict=True):
        assert loss <= plan.search.preference.worst_loss + 0.0005
    assert worst[1] < worst[0]


@pytest.mark.slow
def test_a_scaled_bound_is_the_simulated_step_within_a_twentieth_of_a_percent(plans, monkeypatch):
    monkeypatch.setattr(corner_steps, "CLOSE", 0.0)  # simulates every scenario
    simulated = preferring(Prefer.ROBUST)

    def losses(plan):
        by_layout = {layout_of(tie): tie.worst_loss for tie in ties_of(plan)}
        return by_layout | {layout_of(plan): plan.search.preference.worst_loss}

    exact, scaled = losses(simulated), losses(plans[Prefer.ROBUST])
    assert scaled == {layout: pytest.approx(loss, abs=5e-4) for layout, loss in exact.items()}


def test_a_preferred_plan_reads_again_as_it_was_written(plans):
    lean = plans[Prefer.LEANEST]

    assert plan_from_document(plan_to_document(lean), "plan.yaml") == lean


@pytest.mark.slow
def test_the_same_request_prefers_the_same_bytes_twice(plans):
    assert plan_to_yaml(preferring(Prefer.ROBUST)) == plan_to_yaml(plans[Prefer.ROBUST])


@pytest.mark.slow
def test_without_an_error_band_the_fastest_plan_stays_and_says_why():
    plan = preferring(
        Prefer.LEANEST, TargetOptions(model="gpt-tiny", gpus=4, freeze=("embedding",))
    )

    assert plan.search.preference.reason == UNKNOWN
    assert plan.search.preference.slowdown == 0.0
    assert plan.search.preference.worst_loss is None


def test_ctrl_c_while_ties_are_priced_leaves_the_fastest_plan(plans, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(corner_steps, "step_costs", interrupt)
    plan = preferring(Prefer.ROBUST)

    assert layout_of(plan) == layout_of(plans[Prefer.FASTEST])
    assert plan.search.preference is None


@pytest.mark.parametrize("objective", [Objective.MEMORY, Objective.PEAK])
def test_other_objectives_have_no_preference(objective):
    request = request_of(REQUEST, PINS, SearchFlags(prefer=Prefer.LEANEST))

    with pytest.raises(ConfigError, match=f"--prefer is for .*the objective is {objective}"):
        replace(request, objective=objective)
