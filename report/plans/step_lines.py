"""The lines of a summary about the seconds and the redundant bytes of a step, by cause."""

from __future__ import annotations

from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.text import gib_text, joined, labelled

NOTHING = 1e-9  # share of the step below which a time is rounding
STEP_CAUSES = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("bubble", "pp_bubble_s"),
    ("data", "dp_comm_s"),
    ("tensor", "tp_comm_s"),
    ("p2p", "pp_comm_s"),
    ("host", "host_comm_s"),
    ("optimizer", "optimizer_s"),
)
REDUNDANT = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def time_line(plan: AnyPlan, width: int) -> str:
    """Returns the step time by cause; causes that cost nothing are left out."""
    phrases = [f"{name} {text}" for name, _, text in step_parts(plan)]
    unit = "s" if plan.predicted.step_time_s.value >= 1 else "ms"
    return joined((f"{phrases[0]} {unit}", *phrases[1:]), " | ", width, start=labelled("time"))


def step_parts(plan: AnyPlan) -> list[tuple[str, float, str]]:
    """Returns the name, the seconds and the text of each cause of the step that costs anything.

    The texts are in milliseconds for a step below a second.
    """
    step_s = plan.predicted.step_time_s.value
    scale = 1.0 if step_s >= 1 else 1e3
    digits = 1 if step_s * scale >= 100 else 2
    breakdown = plan.predicted.breakdown
    times = ((name, getattr(breakdown, field).value) for name, field in STEP_CAUSES)
    inside = (("tensor", plan.mesh.tp), ("context", plan.mesh.cp), ("experts", plan.mesh.ep))
    sent = [name for name, degree in inside if degree > 1]
    names = {"tensor": " + ".join(sent)} if sent else {}
    return [
        (names.get(name, name), seconds, f"{seconds * scale:.{digits}f}")
        for name, seconds in times
        if seconds > NOTHING * step_s
    ]


def redundancy_line(plan: AnyPlan, width: int) -> str:
    """Returns GiB of the cluster beyond one copy of everything, by class."""
    redundancy = plan.predicted.redundancy_gib
    classes = redundant_parts(plan)
    parts = [f"{name} {gib_text(value)}" for name, value in classes]
    if any(value < 0 for _, value in classes):
        parts.append("below zero is of one copy what the host holds")
    return joined(
        (f"{gib_text(redundancy.total)} GiB over all GPUs", *parts),
        " | ",
        width,
        start=labelled("redundant"),
    )


def redundant_parts(plan: AnyPlan) -> list[tuple[str, float]]:
    """Returns the classes of redundant memory that are not zero, with their GiB."""
    redundancy = plan.predicted.redundancy_gib
    sizes = ((name, getattr(redundancy, name)) for name in REDUNDANT)
    return [(name, size) for name, size in sizes if size]
