"""An integer program certifies the plan of a launcher, and finds settings that a search misses."""

from __future__ import annotations

import re

import pytest

from parplan.planner.export import best_settings as searches
from parplan.planner.export.best_settings import best_settings
from parplan.planner.export.targets import target_named
from parplan.planner.plan.certificate_record import Certified
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.request import Constraints, SearchOptions
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.planning import request

CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
PINS = {
    "megatron": Constraints(tp=(1,), micro_batch_size=(1, 2)),
    "deepspeed": Constraints(),
    "fsdp2": Constraints(),
}
UNEQUAL = Constraints(pp=(4,), tp=(2,), virtual_stages=(1,), micro_batch_size=(1,))


def planned(name, pins=None, limit_gib=12, **options):
    target = target_named(name)
    training = TrainingSpec(
        global_batch_size=32, seq_length=1024, stack=load_stack(target.stacks[0])
    )
    asked = request(
        load_model("gpt-2.5b").spec,
        CLUSTER,
        training,
        constraints=pins or PINS[name],
        options=SearchOptions(memory_limit_bytes=limit_gib * GIB, **options),
    )
    return best_settings(asked, target)


@pytest.mark.parametrize("name", mostly_slow(PINS, {"megatron"}))
def test_the_program_agrees_with_the_search(name):
    plan = planned(name)

    certificate = plan.search.certificate
    assert certificate.plan.over is Certified.SETTINGS
    assert certificate.plan.gap == 0.0
    assert certificate.plan.optimum_s == plan.search.value
    assert certificate.programs >= 1
    assert certificate.closed < certificate.layouts


def test_it_agrees_over_unequal_stages():
    plan = planned("megatron", UNEQUAL)

    assert plan.search.certificate.plan.gap == 0.0


def test_settings_that_the_search_misses_are_found(monkeypatch):
    made = searches.fastest

    def second(candidates, *rest):
        every = list(candidates)
        best = made(every, *rest)
        if best is None:
            return None
        return made([each for each in every if each != best.strategy], *rest)

    right = planned("megatron", UNEQUAL)
    monkeypatch.setattr(searches, "fastest", second)
    wrong = planned("megatron", UNEQUAL)

    assert wrong.search.value > right.search.value
    assert wrong.search.certificate.plan.optimum_s == right.search.value
    assert wrong.search.certificate.plan.gap == pytest.approx(
        1 - right.search.value / wrong.search.value, rel=1e-3
    )
    assert wrong.search.gap >= wrong.search.certificate.plan.gap - 1e-6


@pytest.mark.slow
def test_settings_without_room_are_in_the_program_and_excluded_by_its_rows():
    kept = []
    planned("fsdp2", on_program=lambda record, problem: kept.append((record, problem)))
    ((record, problem),) = kept

    names = problem.names
    assert record.variables == len(set(names)) > 1
    assert all(re.fullmatch(r"y_[A-Za-z0-9_]{1,98}", name) for name in names)
    assert record.rows > 1


@pytest.mark.slow
def test_the_certificate_of_a_launcher_reads_back():
    plan = planned("fsdp2")

    document = plan_to_document(plan)
    assert any_plan_from_document(document, "plan.yaml").search == plan.search
