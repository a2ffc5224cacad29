"""The table of worst cases has the plan first, the others by regret, and names the least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.prediction import Corner, Quantity, Robustness, RobustPlan, RunnerUp
from parplan.profiles.provenance import Kind
from parplan.report.plans.robust_table import robust_lines

LESS = Corner(what="memory", factor=0.8, best_step_time_s=2.2, proven=True)
SLOW = Corner(what="across_nodes", factor=0.8, best_step_time_s=2.1, proven=True)


def robust_plan(dp, steps_s, regrets, worst_corner):
    runner_up = RunnerUp(
        mesh=Mesh(pp=1, dp=dp, tp=1),
        pipeline=PipelinePlan(
            schedule=Schedule.ONE_F_ONE_B, virtual_stages=1, micro_batch_size=1, num_micro_batches=8
        ),
        sequence_parallel=False,
        step_time_s=Quantity(value=steps_s[0], kind=Kind.ANALYTIC),
        peak_memory_gib=70.0,
        redundancy_gib=0.0,
    )
    speeds, both = regrets
    longest_s = max(step_s for step_s in steps_s if step_s is not None)
    return RobustPlan(
        plan=runner_up,
        steps_s=steps_s,
        worst_step_s=longest_s,
        speed_regret=speeds,
        regret=both,
        worst_corner=worst_corner,
    )


TABLE = Robustness(
    share=0.2,
    corners=(SLOW, LESS),
    plans=(
        robust_plan(2, (2.0, 2.1, None), (0.0, None), 1),
        robust_plan(4, (2.3, 2.5, 2.3), (0.19, 0.19), 0),
        robust_plan(8, (2.2, 2.2, 2.2), (0.1, 0.1), None),
    ),
    least_regret=2,
)


def lines_of(table, width=100, most=None):
    return "\n".join(robust_lines(table, width, most=most)).splitlines()


def test_the_least_regret_is_named_and_plans_stand_in_its_order():
    text = "\n".join(lines_of(TABLE))

    assert "20 % off, the least regret is 10.0 %: pp 1 x dp 8 x tp 1" in " ".join(text.split())
    assert text.index("this plan") < text.index("as priced") < text.index("links across nodes x")
    assert "not searched" not in text


def test_a_plan_without_finite_regret_does_not_fit():
    (row,) = [line for line in lines_of(TABLE) if "this plan" in line]

    assert row.split()[:7] == ["2.00", "s", "2.10", "s", "70.0", "no", "fit"]
    assert "0.0 %  memory x 0.8" in row


def test_plans_of_one_mesh_are_told_apart_and_the_columns_are_explained():
    first, second, third = TABLE.plans
    alike = replace(third.plan, mesh=first.plan.mesh)
    text = "\n".join(
        lines_of(replace(TABLE, plans=(first, second, replace(third, plan=alike))), most=3)
    )

    assert " ".join(text.split()).count("micro-batch 1 x 8, other layers") == 2  # and the sentence
    assert "regret: how much longer" in text


def test_a_corner_that_was_not_searched_to_the_end_is_named():
    table = replace(TABLE, corners=(SLOW, replace(LESS, proven=False)))

    assert "not searched to the end: memory x 0.8" in " ".join(" ".join(lines_of(table)).split())


def test_without_a_finite_regret_no_plan_is_named():
    table = replace(TABLE, plans=TABLE.plans[:1], least_regret=None)

    assert "every plan fails to fit in some case" in " ".join(" ".join(lines_of(table)).split())


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_its_terminal(width):
    assert max(map(len, lines_of(TABLE, width))) <= width


def test_a_short_form_has_the_plan_and_the_others_of_least_regret():
    text = "\n".join(lines_of(TABLE, most=2))

    assert "this plan" in text
    assert "as priced" in text
    assert "links across nodes x" not in text
    assert "speeds, all:" not in text
