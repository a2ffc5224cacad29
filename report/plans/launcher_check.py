"""A launcher's configuration as it is checked: its price, and the stages that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console

from parplan.costmodels.communication.mesh import Axis, place
from parplan.planner.export.advice import Advice, Change
from parplan.planner.export.fields.arguments import Words
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import StageMemory
from parplan.profiles.units import gib
from parplan.report.json_result import JsonResult
from parplan.report.text import say, seconds_text

_LONG = 8  # numbers of a list that is written out
_MUCH = 0.2  # share of a step in bubbles that is said


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTotal:
    """The memory that a pipeline stage needs of its device."""

    stage: int
    total_gib: float
    capacity_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedChange:
    """Arguments to change, and the step and the fullest GPU with them."""

    change: str
    step_s: float
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCheckDocument(JsonResult):
    """The check of a launcher's configuration.

    notes      sentences about arguments that are priced as others
    slow       sentences about what is legal and slow
    better     the single changes that gain most
    together   the changes together, null where they do not help
    """

    step_s: float
    fits: bool
    notes: tuple[str, ...]
    slow: tuple[str, ...]
    stages: tuple[StageTotal, ...]
    better: tuple[AdvisedChange, ...]
    together: AdvisedChange | None


def shortages(plan: Plan) -> tuple[StageMemory, ...]:
    """Returns the stages that need more memory than their device has."""
    return tuple(stage for stage in plan.predicted.memory_gib if stage.total > stage.capacity)


def _warnings(plan: Plan) -> list[str]:
    """Returns what is legal and slow."""
    found = []
    if place(plan.mesh, Axis.TP, plan.cluster.gpus_per_node).crosses_nodes:
        found.append(f"tp {plan.mesh.tp} crosses nodes of {plan.cluster.gpus_per_node} GPUs")
    bubble = plan.predicted.breakdown.pp_bubble_s
    share = bubble.value / plan.predicted.step_time_s.value
    if share > _MUCH:
        count = plan.pipeline.num_micro_batches
        found.append(
            f"{share:.0%} of the step is bubble: {count} micro-batches for pp {plan.mesh.pp}"
        )
    return found


def print_check(
    plan: Plan, advised: Advice, remarks: Sequence[str], name: str, out: Console
) -> None:
    """Print the price of a configuration, what is wrong with it, and what gains most.

    remarks   sentences about arguments that are priced as others
    """
    peak = max(stage.total for stage in plan.predicted.memory_gib)
    step = seconds_text(plan.predicted.step_time_s.value)
    say(out, f"{name}: {step} a step, {peak:.1f} GiB on the fullest GPU")
    for remark in remarks:
        say(out, f"  note: {remark}")
    for warning in _warnings(plan):
        say(out, f"  slow: {warning}")
    for stage in shortages(plan):
        say(
            out,
            f"  does not fit: stage {stage.stage} needs {stage.total:.1f} GiB, "
            f"{stage.total - stage.capacity:.1f} more than the {stage.capacity:.1f} of its device",
        )
    if not shortages(plan):
        say(out, "  it fits")
    for change in advised.single:
        say(out, f"  better: {_change_text(change)}: {_gain_text(plan, change)}")
    if advised.together is not None:
        together = advised.together
        say(out, f"  together: {_change_text(together)}: {_gain_text(plan, together)}")
    if not advised.single and advised.together is None and shortages(plan):
        say(out, "  no change of these arguments makes it fit: plan finds what does")


def _change_text(change: Change) -> str:
    """Returns the arguments to change: `--micro-batch-size 1 -> 2`, `none` for an absent one."""
    return ", ".join(
        f"{name} {_words_text(before)} -> {_words_text(after)}"
        for name, before, after in change.arguments
    )


def _words_text(words: Words | None) -> str:
    return "none" if words is None else " ".join(map(_word_text, words)) or "on"


def _word_text(word: str) -> str:
    """Returns a word; a long list of numbers is written by its runs: `20 x 1, 12 x 0`."""
    parts = word.split(",")
    if len(parts) <= _LONG:
        return word
    return ", ".join(f"{len(tuple(run))} x {value}" for value, run in groupby(parts))


def _gain_text(plan: Plan, change: Change) -> str:
    step_s = change.configured.price.step_s
    share = step_s / plan.predicted.step_time_s.value - 1
    return f"{seconds_text(step_s)} ({share:+.1%}), {gib(change.configured.peak_bytes):.1f} GiB"


def check_document(plan: Plan, advised: Advice, remarks: Sequence[str]) -> LauncherCheckDocument:
    """Returns the check for `--json`: seconds, GiB."""
    return LauncherCheckDocument(
        step_s=plan.predicted.step_time_s.value,
        fits=not shortages(plan),
        notes=tuple(remarks),
        slow=tuple(_warnings(plan)),
        stages=tuple(
            StageTotal(stage=each.stage, total_gib=each.total, capacity_gib=each.capacity)
            for each in plan.predicted.memory_gib
        ),
        better=tuple(map(_advised, advised.single)),
        together=_advised(advised.together) if advised.together else None,
    )


def _advised(change: Change) -> AdvisedChange:
    return AdvisedChange(
        change=_change_text(change),
        step_s=change.configured.price.step_s,
        peak_gib=gib(change.configured.peak_bytes),
    )
