"""`plan show --instructions` prints every instruction once, in lines of at most 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.placed_layers import action_rows, plan_instructions
from parplan.planner.plan.plan import Plan
from parplan.report.plans.instruction_text import (
    WIDTH,
    instruction_text,
    instructions_document,
    print_instructions,
)
from parplan.report.plans.stage_waits import wait_lines
from tests.helpers.executor_plans import GPT, make_plan
from tests.report.test_report import estimated

AHEAD = make_plan(GPT, pp=4, schedule=Schedule.SCP, num_micro_batches=6, global_batch_size=6)
ZBV = make_plan(GPT, pp=2, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=4)
ALONE = make_plan(GPT, schedule=Schedule.GPIPE, num_micro_batches=3, global_batch_size=3)


def printed(plan: Plan, ranks: tuple[int, ...] | None = None) -> str:
    out = Console(file=io.StringIO(), width=300, highlight=False)
    chosen = range(plan.mesh.pp) if ranks is None else ranks
    print_instructions(plan, plan_instructions(plan), chosen, out)
    return out.file.getvalue()


def test_the_list_of_a_rank_names_passes_recomputes_messages_and_exchanges():
    text = printed(AHEAD, (2,))

    assert "rank 2, stage 2: 6 batched operations" in text
    assert " ".join(text.split("operations", 1)[1].split()).startswith(
        "a0<1 F0 a0>3 a1<1 F1 a1>3 g0<3 a2<1 F2 a2>3 R0 B0 g0>1 g1<3 R1 B1 [g1>1 a3<1] F3 "
        "[a3>3 g2<3] B2"
    )


def test_where_a_rank_has_several_stages_each_instruction_names_its_own():
    text = printed(ZBV, (0,))

    assert "rank 0, stage 0, 3: 0 batched operations" in text
    assert " 0F0 0a0>1 0F1 0a1>1 " in text
    assert " 3I0 3g0>1 3W0 " in text
    assert "of virtual stage 2" in text


@pytest.mark.parametrize("plan", [AHEAD, ZBV, ALONE, estimated(pp=8, dp=1, tp=1)])
def test_no_line_is_wider_than_80_columns(plan):
    assert max(map(len, printed(plan).splitlines())) <= WIDTH == 80


def test_the_passes_are_those_of_the_plans_action_list():
    for virtual, plan in ((False, AHEAD), (True, ZBV)):
        for row, document in zip(
            action_rows(plan),
            instructions_document(plan, plan_instructions(plan), range(plan.mesh.pp)).ranks,
            strict=True,
        ):
            passes = [text for text in document.instructions if not set(text) & set("><[")]
            listed = row.split(",")
            assert passes == (listed if virtual else [text[1:] for text in listed])


def test_without_a_pipeline_one_micro_batch_runs_after_the_other():
    texts = [instruction_text(each, virtual=False) for each in plan_instructions(ALONE)[0]]

    assert texts == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_the_summary_says_the_mean_wait_and_that_of_every_stage():
    plan = estimated(pp=4)
    idle, held = wait_lines(plan, 100)
    waits = plan.predicted.waits

    mean = sum(each.idle_share for each in waits) / 4
    assert idle.startswith(f"  idle      {100 * mean:.1f} % in bubbles and transfers | stage 0: ")
    assert held == "  in flight micro-batches | stage 0: 4 | 1: 3 | 2: 2 | 3: 1"


def test_older_files_and_plans_without_a_pipeline_have_no_waits():
    plan = estimated(pp=8, dp=1, tp=1)
    _, held = wait_lines(plan, 100)
    assert held == (
        "  in flight micro-batches | stage 0: 8 | 1: 7 | 2: 6 | 3: 5 | 4: 4 | 5: 3 | 6: 2 | 7: 1"
    )

    older = replace(plan, predicted=replace(plan.predicted, waits=()))
    assert list(wait_lines(older, 100)) == []
    assert list(wait_lines(estimated(pp=1, dp=8), 100)) == []


def test_the_idle_share_is_the_step_less_the_work_of_a_stage():
    """1F1B of equal stages waits (P - 1) / (M + P - 1) of the step, and for transfers."""
    plan = estimated(pp=4, dp=1, tp=1)
    predicted = plan.predicted
    step_s = predicted.step_time_s.value
    slowest = min(predicted.waits, key=lambda each: each.idle_share)
    waiting_s = predicted.breakdown.pp_bubble_s.value + predicted.breakdown.pp_comm_s.value

    assert slowest.idle_share == pytest.approx(waiting_s / step_s, rel=1e-3)
    assert all(0 < each.idle_share < 1 for each in predicted.waits)
