"""Each relaxation of an infeasible request fits in its stated time; no useful one is missing."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.forbid import Ban, parse_bans
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.oom_risk import default_margin
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.traits import family_of
from parplan.planner.request import Constraints, PlanRequest, Request, SearchOptions
from parplan.planner.search.relaxations import PINS as RELAXED
from parplan.planner.search.relaxations import RULE, Relaxations, relaxations, values_used
from parplan.planner.stage_recompute import RecomputeRule
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.planning import find_plan, shortfall

A100 = load_cluster("a100-80gb")
ENOUGH_S = 300.0  # no search of these is cut off


def request(
    pins: Constraints, limit_bytes_: float | None = None, *, gpus=8, name="llama3-8b", **options
) -> Request:
    limit = None if limit_bytes_ is None else int(limit_bytes_)
    return PlanRequest(
        model=replace(load_model(name).spec, num_layers=16),
        cluster=with_gpus(A100, gpus),
        training=TrainingSpec(global_batch_size=8, seq_length=4096, stack=NEUTRAL),
        constraints=pins,
        options=SearchOptions(memory_limit_bytes=limit, **options),
    )


def needs(tight: Request) -> float:
    return shortfall(
        tight.model, tight.cluster, tight.training, tight.constraints, tight.options
    ).need_bytes


def between(pinned: Constraints, freed: Constraints) -> Request:
    """Returns the pinned request with a limit that fits the unpinned leanest plan alone."""
    need, least = needs(request(pinned, GIB)), needs(request(freed, GIB))
    assert least < 0.99 * need, "the pin costs memory"
    return request(pinned, (need + least) / 2)


def search(tight: Request):
    return find_plan(
        tight.model,
        tight.cluster,
        tight.training,
        constraints=tight.constraints,
        options=tight.options,
    )


def relaxed(tight: Request) -> Relaxations:
    with pytest.raises(InfeasibleError):
        search(tight)
    answer = relaxations(tight, needs(tight), ENOUGH_S)
    assert answer.untried == ()
    return answer


def require_true(tight: Request, answer: Relaxations) -> None:
    """Searches every relaxation again: it fits and takes the stated time."""
    for way in answer.found:
        plan = search(way.request)
        limit = limit_bytes(way.request.cluster, way.request.training.stack, way.request.options)
        assert max(stage.total for stage in plan.predicted.memory_gib) * GIB <= limit + 1e6
        assert plan.predicted.step_time_s.value == way.step_s
        assert way.proven is (plan.search.status is Status.OPTIMAL)
    device = replace(tight.cluster.device, memory_bytes=10**18)
    unlimited = find_plan(
        tight.model,
        replace(tight.cluster, device=device),
        tight.training,
        constraints=tight.constraints,
        options=SearchOptions(memory_margin=0),
    )
    assert unlimited.predicted.step_time_s.value == answer.unlimited_s


PINS = {
    "recompute": ("recompute", Constraints(recompute=(Recompute.NONE,))),
    "zero": ("zero", Constraints(zero=(0,), dp=(2, 4, 8))),
    "zero-of-several": ("zero", Constraints(zero=(0, 1), dp=(4, 8))),
    "micro-batch": (
        "micro_batch_size",
        Constraints(micro_batch_size=(4,), recompute=(Recompute.NONE,)),
    ),
    "tp": ("tp", Constraints(tp=(1,), recompute=(Recompute.SELECTIVE,))),
    "pp": ("pp", Constraints(pp=(1,), tp=(1,), zero=(0, 1))),
    "dp": ("dp", Constraints(dp=(8,), zero=(0,))),
    "sequence-parallel": ("sequence_parallel", Constraints(sequence_parallel=(False,), tp=(8,))),
    "schedule": ("schedule", Constraints(schedule=(Schedule.GPIPE,), pp=(4,))),
    "virtual-stages": (
        "virtual_stages",
        Constraints(virtual_stages=(4,), pp=(4,), tp=(2,), recompute=(Recompute.NONE,)),
    ),
}


PLAIN = ("recompute", "zero-of-several", "schedule")  # degrees: in the test of a whole mesh


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in PLAIN else pytest.mark.slow) for name in PINS],
)
def pinned(request):
    """Returns a pin, all pins, the request that they make infeasible, and its relaxations."""
    name, pins = PINS[request.param]
    tight = between(pins, replace(pins, **{name: None}))
    return name, pins, tight, relaxed(tight)


@pytest.mark.slow
def test_a_pin_that_stands_in_the_way_is_named_with_a_value_that_fits(pinned):
    name, pins, tight, answer = pinned

    require_true(tight, answer)
    flag = f"--{name.replace('_', '-')}"
    (way,) = [
        way
        for way in answer.found
        if len(way.flags) == 1 and way.flags[0].startswith((flag, "--no-sequence"))
    ]
    assert set(getattr(way.request.constraints, name)).isdisjoint(getattr(pins, name)) or name in (
        "recompute",
        "zero",
    )
    assert replace(way.request.constraints, **{name: None}) == replace(pins, **{name: None})


@pytest.mark.slow
def test_no_pin_that_helps_alone_is_left_out_and_none_that_does_not_is_listed(pinned):
    _, pins, tight, answer = pinned
    every = (
        "recompute",
        "zero",
        "micro_batch_size",
        "tp",
        "pp",
        "dp",
        "sequence_parallel",
        "schedule",
        "virtual_stages",
    )
    fields = [field for field in every if getattr(pins, field) is not None]
    helping = set()
    for field in fields:
        try:
            search(replace(tight, constraints=replace(pins, **{field: None})))
        except (InfeasibleError, ConfigError):
            continue
        helping.add(field)

    listed = [way for way in answer.found if not way.flags[0].startswith(("--gpus", "--memory"))]
    changed = [
        {
            field
            for field in fields
            if getattr(way.request.constraints, field) != getattr(pins, field)
        }
        for way in listed
    ]
    assert sorted(map(sorted, changed)) == sorted([field] for field in helping)


@pytest.mark.parametrize(
    ("text", "remaining"),
    [
        pytest.param("zero=3", "dp=1,2", marks=pytest.mark.slow),
        pytest.param("recompute=full", "tp=2,4", marks=pytest.mark.slow),
        pytest.param("tp=8", "schedule=gpipe", marks=pytest.mark.slow),
    ],
)
def test_a_ban_that_stands_in_the_way_is_named(text, remaining):
    bans = parse_bans([remaining])
    pins = Constraints(forbid=(*parse_bans([text]), *bans))
    tight = between(pins, replace(pins, forbid=bans))

    answer = relaxed(tight)

    require_true(tight, answer)
    (way,) = [way for way in answer.found if f"--forbid {text}" in way.dropped]
    assert way.flags == ()
    assert way.request.constraints.forbid == bans


def test_every_pin_has_a_value_in_a_plan_or_none():
    plan = search(request(Constraints(pp=(1,), tp=(8,))))
    names = [name for name in RELAXED if name != RULE]

    values = {name: values_used(plan, name) for name in names}

    assert values["cp"] == values["ep"] == values["etp"] == values["tp_rows"] == (1,)
    assert values["context_form"] is None
    assert values["tp"] == (8,)


@pytest.mark.slow
def test_a_whole_mesh_that_is_pinned_is_relaxed_with_the_dp_that_follows():
    pins = Constraints(tp=(1,), pp=(1,), dp=(8,), zero=(0,))
    tight = between(pins, replace(pins, tp=None, dp=None))

    answer = relaxed(tight)

    require_true(tight, answer)
    assert any(
        way.flags[0].startswith("--tp ") and way.flags[1].startswith("--dp ")
        for way in answer.found
    )


@pytest.mark.slow
def test_the_cheapest_comes_first_and_more_gpus_last():
    tight = between(PINS["micro-batch"][1], Constraints())
    answer = relaxed(tight).found
    here = [way.step_s for way in answer if way.request.cluster == tight.cluster]

    assert len(here) > 1
    assert here == sorted(here)
    assert [way.flags[0].startswith("--gpus") for way in answer] == [False] * len(here) + [True] * (
        len(answer) - len(here)
    )


@pytest.mark.slow
def test_pins_that_only_together_stand_in_the_way_are_dropped_together_and_no_more_of_them():
    pins = Constraints(
        tp=(1,), recompute=(Recompute.NONE,), zero=(0,), micro_batch_size=(1, 2, 4, 8)
    )
    singly = [
        replace(pins, **{name: None}) for name in ("tp", "recompute", "zero", "micro_batch_size")
    ]
    least, single = (
        needs(request(Constraints(), GIB)),
        min(needs(request(way, GIB)) for way in singly),
    )
    tight = request(pins, (least + single) / 2)
    assert least < 0.95 * single

    answer = relaxed(tight)

    require_true(tight, answer)
    (way,) = [way for way in answer.found if not way.flags[0].startswith(("--gpus", "--memory"))]
    assert len(way.flags) > 1
    changed = [
        name
        for name in ("tp", "recompute", "zero", "micro_batch_size")
        if getattr(way.request.constraints, name) != getattr(pins, name)
    ]
    for kept in changed:  # with any one of them back, nothing fits
        fewer = replace(pins, **{name: None for name in changed if name != kept})
        with pytest.raises(InfeasibleError):
            search(replace(tight, constraints=fewer))


@pytest.mark.slow
def test_the_margin_that_is_named_is_the_largest_that_fits():
    pins = Constraints(tp=(1,), pp=(8,), micro_batch_size=(4,), recompute=(Recompute.NONE,))
    need = needs(request(pins, GIB))
    device = replace(A100.device, memory_bytes=int(need / 0.975))  # it fits with 2.5 % free
    tight = request(pins)
    tight = replace(tight, cluster=replace(tight.cluster, device=device))

    answer = relaxed(tight)

    (way,) = [way for way in answer.found if way.flags[0].startswith("--memory-margin")]
    margin = way.request.options.memory_margin
    assert margin == pytest.approx(0.025, abs=0.0011)
    measured = default_margin(family_of(tight.training.stack)).share
    assert way.note == f"below the {measured:g} that measured runs ask for"
    assert search(way.request).predicted.step_time_s.value == way.step_s
    with pytest.raises(InfeasibleError):
        search(replace(tight, options=SearchOptions(memory_margin=margin + 0.002)))


@pytest.mark.slow
def test_a_margin_that_measured_runs_do_not_ask_for_has_no_note():
    tight = request(Constraints(recompute=(Recompute.NONE,), tp=(1,)))
    share = needs(tight) / tight.cluster.device.memory_bytes
    tight = replace(tight, options=SearchOptions(memory_margin=1 - 0.95 * share))
    assert 1 - share > default_margin(family_of(tight.training.stack)).share

    (way,) = [way for way in relaxed(tight).found if way.flags[0].startswith("--memory-margin")]

    assert way.note == ""


@pytest.mark.slow
def test_a_memory_limit_is_raised_by_no_more_than_a_tenth_of_a_gib():
    tight = request(Constraints(recompute=(Recompute.NONE,)), 8 * GIB)
    need = needs(tight)

    (way,) = [way for way in relaxed(tight).found if way.flags[0].startswith("--memory-limit")]

    assert need <= way.request.options.memory_limit_bytes <= need + 0.11 * GIB
    assert search(way.request).predicted.step_time_s.value == way.step_s


@pytest.mark.slow
def test_with_nothing_pinned_more_memory_and_more_gpus_are_left():
    tight = request(Constraints(), 8 * GIB)

    answer = relaxed(tight)

    require_true(tight, answer)
    assert [way.flags[0].split()[0] for way in answer.found] == ["--memory-limit", "--gpus"]


@pytest.mark.slow
def test_pinned_degrees_that_belong_to_the_old_number_of_gpus_change_with_it():
    tight = request(Constraints(pp=(8,), dp=(1,)), 6 * GIB)

    (way,) = [way for way in relaxed(tight).found if way.flags[0].startswith("--gpus")]

    assert [flag.split()[0] for flag in way.flags] == ["--gpus", "--pp", "--dp"]
    assert search(way.request).predicted.step_time_s.value == way.step_s
    with pytest.raises((InfeasibleError, ConfigError)):
        search(replace(way.request, constraints=tight.constraints))


@pytest.mark.slow
def test_nodes_smaller_than_usual_are_asked_for_with_the_gpus():
    tight = replace(request(Constraints(), 30 * GIB, gpus=2))

    (way,) = [way for way in relaxed(tight).found if way.flags[0].startswith("--gpus")]

    assert way.flags[1] == "--gpus-per-node 2"
    assert with_gpus(A100, int(way.flags[0].split()[1]), 2) == way.request.cluster


def test_nothing_helps_below_what_every_device_loses():
    answer = relaxations(request(Constraints(pp=(8,)), GIB // 2), 80 * GIB)

    assert answer.found == ()


@pytest.mark.slow
def test_a_budget_that_is_spent_says_what_was_not_tried():
    pins = Constraints(recompute=(Recompute.NONE,), forbid=(Ban("zero", 3),))
    tight = between(pins, Constraints())

    answer = relaxations(tight, needs(tight), budget_s=0.0)

    assert answer.untried == (
        "less free memory",
        "--recompute",
        "--forbid zero=3",
        "--recompute --forbid zero=3",
    )
    assert [way.step_s for way in answer.found] == [
        None
    ]  # the number of GPUs is known from the memory alone
    assert answer.unlimited_s is None


@pytest.mark.slow
def test_a_rule_for_the_recompute_of_the_stages_is_dropped_where_that_fits():
    rule = RecomputeRule((Fraction(0),))
    pins = Constraints(pp=(2,), tp=(2,), micro_batch_size=(1,))
    tight = between(replace(pins, recompute_first_stage=rule), pins)

    answer = relaxed(tight)

    dropped = [way for way in answer.found if way.dropped == ("--recompute-first-stage",)]
    assert [way.request.constraints for way in dropped] == [pins]
    require_true(tight, answer)
