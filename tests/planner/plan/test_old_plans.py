"""Plan files of version 1 are read as plans of today; tests/golden has one of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.plan import LayerRun
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document, read_any_plan
from parplan.profiles.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden"
DESCRIBED, TRACED = GOLDEN / "plan-1-described.yaml", GOLDEN / "plan-1-traced.yaml"


def test_blocks_of_an_old_described_plan_are_layers_after_the_embedding():
    plan = read_any_plan(DESCRIBED)

    assert [stage.layers for stage in plan.stages] == [
        (LayerRun(plan="embedding", first=0, last=0), LayerRun(plan="A", first=1, last=9)),
        (LayerRun(plan="A", first=10, last=18),),
        (LayerRun(plan="A", first=19, last=27),),
        (LayerRun(plan="A", first=28, last=36),),
        (LayerRun(plan="A", first=37, last=45),),
        (LayerRun(plan="A", first=46, last=54), LayerRun(plan="head", first=55, last=55)),
    ]
    assert [stage.rank for stage in plan.stages] == [0, 1, 0, 1, 0, 1]


def test_shards_of_an_old_traced_plan_are_its_layers():
    plan = read_any_plan(TRACED)

    assert [stage.layers for stage in plan.stages] == [
        (LayerRange(first=0, last=2),),
        (LayerRange(first=3, last=4),),
        (LayerRange(first=5, last=6),),
        (LayerRange(first=7, last=9),),
    ]
    assert [stage.recompute for stage in plan.stages] == [(), (3,), (), ()]
    assert [stage.zero for stage in plan.stages] == [1, 1, 1, 1]


@pytest.mark.parametrize("path", [DESCRIBED, TRACED], ids=["described", "traced"])
def test_the_rest_of_an_old_plan_is_kept_and_written_in_todays_version(path):
    old = yaml.safe_load(path.read_text())
    plan = read_any_plan(path)
    new = plan_to_document(plan)

    assert (old.pop("plan_version"), new.pop("plan_version")) == (1, 2)
    assert old.pop("stages") != new.pop("stages")
    assert old["training"].pop("fp8_matmuls") is False
    assert new["training"]["products"] is None
    assert known_keys(new, old) == old  # a newer file may have further keys
    assert any_plan_from_document(plan_to_document(plan), "plan") == plan


def known_keys(new, old):
    """Returns the part of a newer document whose keys the old one has too."""
    if isinstance(old, dict):
        return {key: known_keys(new[key], value) for key, value in old.items()}
    return new


@pytest.mark.parametrize(
    ("path", "stage", "message"),
    [
        (DESCRIBED, {"rank": 0, "layers": [{"plan": "A", "bloks": [0, 8]}]}, "bloks"),
        (DESCRIBED, {"rank": 0, "layers": [{"first": 0, "last": 9, "plan": "A"}]}, "first"),
        (TRACED, {"rank": 0, "first": 0, "zero": 1}, "stages.0.end is missing"),
        (TRACED, {"rank": 0, "first": 1, "end": 3, "zero": 1}, "it has layers 1 to 2"),
        (TRACED, 5, "stages.0"),
    ],
)
def test_an_old_stage_that_is_wrong_is_an_error_with_its_place(path, stage, message):
    body = yaml.safe_load(path.read_text())
    body["stages"][0] = stage

    with pytest.raises(ConfigError, match=rf"^f: .*{message}"):
        any_plan_from_document(body, "f")
