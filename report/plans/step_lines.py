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
    step_s = plan.predicted.step_time_s.value
    scale, unit = (1.0, "s") if step_s >= 1 else (1e3, "ms")
    digits = 1 if step_s * scale >= 100 else 2
    breakdown = plan.predicted.breakdown
    times = ((name, getattr(breakdown, field).value) for name, field in STEP_CAUSES)
    inside = (("tensor", plan.mesh.tp), ("context", plan.mesh.cp), ("experts", plan.mesh.ep))
    sent = [name for name, degree in inside if degree > 1]
    names = {"tensor": " + ".join(sent)} if sent else {}
    phrases = [
        f"{names.get(name, name)} {seconds * scale:.{digits}f}"
        for name, seconds in times
        if seconds > NOTHING * step_s
    ]
    return joined((f"{phrases[0]} {unit}", *phrases[1:]), " | ", width, start=labelled("time"))


def redundancy_line(plan: AnyPlan, width: int) -> str:
    """Returns GiB of the cluster beyond one copy of everything, by class."""
    redundancy = plan.predicted.redundancy_gib
    classes = {name: getattr(redundancy, name) for name in REDUNDANT if getattr(redundancy, name)}
    parts = [f"{name} {gib_text(value)}" for name, value in classes.items()]
    if min(classes.values(), default=0.0) < 0:
        parts.append("below zero is of one copy what the host holds")
    return joined(
        (f"{gib_text(redundancy.total)} GiB over all GPUs", *parts),
        " | ",
        width,
        start=labelled("redundant"),
    )
