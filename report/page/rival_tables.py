"""The tables of a page on other plans: runners-up and why they lost, and baselines."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.planner.plan.prediction import RunnerUp
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.page.figures import Form, part_forms
from parplan.report.page.page_tables import Cells, FiguredPlan, PageTable
from parplan.report.plans.memory_table import fullest
from parplan.report.plans.robust_table import UNFIT, corner_text, robust_names, worst_text
from parplan.report.plans.runner_up_lines import is_tie, runner_up_name
from parplan.report.searches.comparison_tables import SAME_GIB, SAME_STEP
from parplan.report.text import gib_text, percent

_OF_SIDE = (
    ("step_time_s", Form.SECONDS),
    ("tokens_per_s_per_gpu", Form.COUNT),
    ("mfu", Form.SHARE),
    ("peak_memory_gib", Form.GIB),
    ("redundancy_gib", Form.GIB),
)


def runners_table(each: FiguredPlan) -> PageTable | None:
    """Returns the runners-up with their price, and why each lost; None without any."""
    plan, figures = each.reported.plan, each.figures
    rows = []
    for index, other in enumerate(plan.search.runners_up):
        key = f"search.runners_up.{index}"
        slower = other.step_time_s.value / plan.predicted.step_time_s.value - 1
        loss = "" if other.worst_loss is None else figures(f"{key}.worst_loss", Form.SHARE)
        rows.append(
            (
                runner_up_name(other),
                figures(f"{key}.step_time_s.value", Form.SECONDS),
                figures.derived(slower, Form.MORE, f"{key}.step_time_s over the plan's - 1"),
                figures(f"{key}.peak_memory_gib", Form.GIB),
                figures(f"{key}.redundancy_gib", Form.GIB),
                loss,
                ", ".join(_reasons(other, plan)),
            )
        )
    if not rows:
        return None
    return PageTable(
        caption="Runners-up, and why they lost",
        heading=("plan", "step", "than this", "peak GiB", "redundant GiB", "worst loss", "why"),
        rows=tuple(rows),
        texts=frozenset({"why"}),
    )


def robust_table(each: FiguredPlan) -> PageTable | None:
    """Returns the worst case of each plan where a figure is off; None where it was not priced."""
    robust = each.reported.plan.search.robust
    if robust is None:
        return None
    names = robust_names(robust)
    rows = []
    for index, plan in enumerate(robust.plans):
        key = f"search.robust.plans.{index}"
        least = " (least regret)" if index == robust.least_regret else ""
        rows.append(
            (
                names[index] + least,
                each.figures(f"{key}.plan.peak_memory_gib", Form.GIB),
                *_steps(each, index),
                _regret(each, f"{key}.speed_regret", plan.speed_regret),
                _regret(each, f"{key}.regret", plan.regret),
                worst_text(robust, plan),
            )
        )
    cases = ("as priced", *map(corner_text, robust.corners))
    return PageTable(
        caption=f"Step where compute, a bandwidth or memory is {100 * robust.share:g} % off",
        heading=("plan", "peak GiB", *cases, "regret, speeds", "regret, all", "worst where"),
        rows=tuple(rows),
        texts=frozenset({"worst where"}),
    )


def _steps(each: FiguredPlan, index: int) -> Iterator[str]:
    robust = each.reported.plan.search.robust
    assert robust is not None, "the worst cases were priced"
    for case, step_s in enumerate(robust.plans[index].steps_s):
        key = f"search.robust.plans.{index}.steps_s.{case}"
        yield UNFIT if step_s is None else each.figures(key, Form.SECONDS)


def _regret(each: FiguredPlan, key: str, regret: float | None) -> str:
    return UNFIT if regret is None else each.figures(key, Form.SHARE)


def _reasons(other: RunnerUp, plan: AnyPlan) -> Iterator[str]:
    """Yields what a runner-up has more of than the plan, and less."""
    slower = other.step_time_s.value / plan.predicted.step_time_s.value - 1
    if is_tie(other, plan):
        yield "a tie in time, inside the error band of the ratio"
    elif abs(slower) >= SAME_STEP:
        yield f"{percent(abs(slower))} {'slower' if slower > 0 else 'faster'}"
    for more_gib, where in (
        (other.peak_memory_gib - fullest(plan).total, "at the peak"),
        (other.redundancy_gib - plan.predicted.redundancy_gib.total, "redundant"),
    ):
        if abs(more_gib) >= SAME_GIB:
            yield f"{gib_text(abs(more_gib))} GiB {'more' if more_gib > 0 else 'less'} {where}"


def baselines_table(each: FiguredPlan) -> PageTable | None:
    """Returns the baselines under the same prices; None where none were compared."""
    comparison = each.reported.document["comparison"]
    if comparison is None:
        return None
    figures = each.figures
    rows: list[Cells] = [
        ("this plan", *(figures(f"comparison.ours.{name}", form) for name, form in _OF_SIDE), "")
    ]
    for index, baseline in enumerate(comparison["baselines"]):
        key = f"comparison.baselines.{index}"
        if not baseline["fits"]:
            rows.append((baseline["name"], "does not fit", *[""] * len(_OF_SIDE)))
            continue
        tie = " (tie)" if baseline["tie"] else ""
        cells = (figures(f"{key}.{name}", form) for name, form in _OF_SIDE)
        rows.append((baseline["name"], *cells, figures(f"{key}.slower", Form.MORE) + tie))
    return PageTable(
        caption="The plan beside other systems' plans, at the same prices and memory limit",
        heading=(
            "plan",
            "step",
            "tokens/s/GPU",
            "MFU",
            "peak GiB",
            "redundant GiB",
            "step against this",
        ),
        rows=tuple(rows),
    )


def differences_table(each: FiguredPlan) -> PageTable | None:
    """Returns the parts of the plan's step, and how much each baseline has more of each.

    It is None where no baseline fits.
    """
    comparison = each.reported.document["comparison"]
    if comparison is None or not any(base["fits"] for base in comparison["baselines"]):
        return None
    part_form, more_form = part_forms(comparison["ours"]["step_time_s"])
    fitting = [(i, base) for i, base in enumerate(comparison["baselines"]) if base["fits"]]
    rows = tuple(
        (
            part,
            each.figures(f"comparison.ours.parts_s.{part}", part_form),
            *(
                each.figures(f"comparison.baselines.{index}.difference.parts_s.{part}", more_form)
                for index, _ in fitting
            ),
        )
        for part in comparison["ours"]["parts_s"]
    )
    return PageTable(
        caption="Where the difference comes from: time of the mean GPU by part",
        heading=("part", "this plan", *(f"{base['name']}, more" for _, base in fitting)),
        rows=rows,
    )
