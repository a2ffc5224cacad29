"""--forbid excludes the banned candidates alone, and refuses a wrong text with a suggestion."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.forbid import Ban, parse_bans
from parplan.planner.request import Constraints, SearchOptions
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.planning import enumerate_candidates, find_plan

TRAINING = TrainingSpec(global_batch_size=32, seq_length=4096, stack=NEUTRAL)
ASKED = (load_model("llama3-8b").spec, with_gpus(load_cluster("a100-80gb"), 8), TRAINING)


@pytest.mark.parametrize(
    ("text", "bans"),
    [
        pytest.param("tp=8", [("tp", 8)], id="a-degree"),
        pytest.param("pp=2,4", [("pp", 2), ("pp", 4)], id="several-values"),
        pytest.param("micro-batch-size=1", [("micro_batch_size", 1)], id="a-dash"),
        pytest.param("zero=0", [("zero", 0)], id="zero"),
        pytest.param("schedule=gpipe", [("schedule", Schedule.GPIPE)], id="schedule"),
        pytest.param("recompute=full", [("recompute", Recompute.FULL)], id="recompute"),
        pytest.param("sequence-parallel=true", [("sequence_parallel", True)], id="a-switch"),
        pytest.param("virtual-stages=1", [("virtual_stages", 1)], id="virtual-stages"),
    ],
)
def test_a_ban_is_read_and_written_alike(text, bans):
    parsed = parse_bans([text])

    assert parsed == tuple(Ban(*pair) for pair in bans)
    assert parse_bans(map(str, parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        pytest.param("tp", "--forbid is 'tp', it must be NAME=VALUE", "tp=8", id="no-value"),
        pytest.param("tp=", "it must be NAME=VALUE", "tp=8", id="an-empty-value"),
        pytest.param(
            "micro-batch=1",
            "unknown choice 'micro-batch' in --forbid",
            "did you mean 'micro-batch-size'?",
            id="a-name",
        ),
        pytest.param(
            "recompute=ful",
            "unknown recompute 'ful' in --forbid",
            "did you mean 'full'?",
            id="a-level",
        ),
        pytest.param(
            "schedule=1f2b",
            "unknown schedule '1f2b' in --forbid",
            "did you mean '1f1b'?",
            id="a-schedule",
        ),
        pytest.param("zero=4", "--forbid zero=4: it must be 0 to 3", "zero=3", id="a-stage"),
        pytest.param(
            "tp=eight",
            "--forbid tp=eight: it must be a whole number of at least 1",
            "tp=8",
            id="a-word",
        ),
        pytest.param(
            "pp=0", "--forbid pp=0: it must be a whole number of at least 1", "pp=8", id="nothing"
        ),
        pytest.param(
            "sequence-parallel=yes",
            "unknown sequence parallel 'yes' in --forbid",
            "known: false, true",
            id="a-switch",
        ),
    ],
)
def test_what_is_written_wrong_is_refused_with_a_suggestion(text, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        parse_bans([text])

    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("text", "meets"),
    [
        pytest.param("tp=2", lambda f: f.mesh.tp == 2, id="tp"),
        pytest.param("pp=2,4", lambda f: f.mesh.pp in (2, 4), id="pp"),
        pytest.param("dp=8", lambda f: f.mesh.dp == 8, id="dp"),
        pytest.param("micro-batch-size=1", lambda f: f.micro_batch_size == 1, id="micro-batch"),
        pytest.param(
            "schedule=interleaved",
            lambda f: f.mesh.pp > 1 and f.schedule is Schedule.INTERLEAVED,
            id="schedule",
        ),
        pytest.param("virtual-stages=2", lambda f: f.virtual_stages == 2, id="virtual-stages"),
        pytest.param(
            "sequence-parallel=false",
            lambda f: f.mesh.tp > 1 and not f.sequence_parallel,
            id="sequence-parallel",
        ),
    ],
)
def test_a_ban_takes_exactly_the_candidates_that_it_names_and_says_so(text, meets):
    free = enumerate_candidates(*ASKED, Constraints())
    left = enumerate_candidates(*ASKED, Constraints(forbid=parse_bans([text])))

    assert any(map(meets, free.layouts))
    assert list(left.layouts) == [layout for layout in free.layouts if not meets(layout)]
    excluded = [
        pruned for pruned in left.pruned if pruned.reason.startswith("excluded by --forbid ")
    ]
    assert {pruned.reason.split()[-1] for pruned in excluded} == set(map(str, parse_bans([text])))


def test_gpipe_is_tried_where_1f1b_is_forbidden():
    left = enumerate_candidates(*ASKED, Constraints(forbid=parse_bans(["schedule=1f1b"])))
    remaining = (
        Schedule.GPIPE,
        Schedule.INTERLEAVED,
        Schedule.EARLY_RECOMPUTE,
        Schedule.SCP,
        Schedule.ZBV,
    )
    pinned = enumerate_candidates(*ASKED, Constraints(schedule=remaining))

    assert set(left.layouts) == set(pinned.layouts)
    assert any(
        layout.schedule is Schedule.GPIPE and layout.num_micro_batches >= layout.mesh.pp
        for layout in left.layouts
    )


@pytest.mark.parametrize(
    ("forbidden", "pinned"),
    [
        pytest.param(["zero=3"], {"zero": (0, 1, 2)}, id="zero", marks=pytest.mark.slow),
        pytest.param(
            ["recompute=none"],
            {"recompute": (Recompute.SELECTIVE, Recompute.FULL)},
            id="recompute",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["recompute=full,selective", "zero=1,2,3"],
            {"recompute": (Recompute.NONE,), "zero": (0,)},
            id="both",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["tp=1", "pp=1,2"],
            {"tp": (2, 4, 8), "pp": (4, 8)},
            id="degrees",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_forbidding_is_pinning_all_the_others(forbidden, pinned):
    banned = find_plan(*ASKED, constraints=Constraints(forbid=parse_bans(forbidden)))
    pinned_plan = find_plan(*ASKED, constraints=Constraints(**pinned))

    assert (banned.layer_plans, banned.stages, banned.predicted) == (
        pinned_plan.layer_plans,
        pinned_plan.stages,
        pinned_plan.predicted,
    )


@pytest.mark.slow
def test_a_ban_on_what_the_fastest_plan_uses_changes_it():
    options = SearchOptions(memory_limit_bytes=30 * GIB)
    stage = {layer.zero for layer in find_plan(*ASKED, options=options).layer_plans.values()}.pop()

    plan = find_plan(*ASKED, constraints=Constraints(forbid=(Ban("zero", stage),)), options=options)

    assert stage not in {layer.zero for layer in plan.layer_plans.values()}


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param({"forbid": parse_bans(["zero=0,1,2,3"])}, id="every-stage"),
        pytest.param(
            {"forbid": parse_bans(["recompute=full"]), "recompute": (Recompute.FULL,)},
            id="the-pinned-level",
        ),
        pytest.param({"forbid": parse_bans(["tp=8"]), "tp": (8,)}, id="the-pinned-degree"),
    ],
)
def test_bans_that_leave_nothing_are_refused(pins):
    with pytest.raises(ConfigError, match="--forbid leaves nothing of --"):
        Constraints(**pins)


def test_bans_leave_the_pins_as_they_were_asked():
    pins = Constraints(zero=(1, 3), forbid=parse_bans(["zero=3"]))

    assert pins.zero == (1, 3)
    assert pins.resolved().zero == (1,)
