"""A first cut, and an optimum without a program, change how long a search takes and no answer."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import find_plan

FASTEST = "parplan.planner.search.fastest_layouts"
ONE = "parplan.planner.search.one_candidate"


def find_pipeline():
    entry = load_model("gpt-1.5b")
    training = TrainingSpec(global_batch_size=64, seq_length=1024, stack=NEUTRAL)
    pins = Constraints(
        pp=(3,),
        tp=(1,),
        zero=(1,),
        micro_batch_size=(1,),
        recompute=(Recompute.NONE, Recompute.FULL),
        schedule=(Schedule.ONE_F_ONE_B,),
    )
    return find_plan(
        entry.spec, with_gpus(load_cluster("a100-80gb"), 6), training, "throughput", pins
    )


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({f"{FASTEST}.MOST_CONTENTS": 0}, id="a-first-cut-for-all"),
        pytest.param({f"{FASTEST}.LOOSE": 1.0}, id="every-cut-is-loose"),
        pytest.param({f"{ONE}.MOST_IN_REACH": 0}, id="no-program"),
    ],
)
def test_shortcuts_find_the_same_step_within_the_same_bound(settings, monkeypatch):
    whole = find_pipeline()
    for name, value in settings.items():
        monkeypatch.setattr(name, value)

    plan = find_pipeline()

    assert plan.search.status == whole.search.status
    assert plan.search.value == pytest.approx(whole.search.value, rel=1e-5)
    assert plan.search.gap == pytest.approx(whole.search.gap, abs=1e-3)
