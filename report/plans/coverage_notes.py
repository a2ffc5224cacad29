"""What the summary of a plan says of the machine's own profile: how much of the plan it has
measured, and how to measure the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.planner.calibration.profile_coverage import Coverage, coverage
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Case
from parplan.profiles.profiler.communication.comm_cases import TIMED
from parplan.profiles.provenance import Kind


def coverage_of_profile(plan: Plan) -> Coverage | None:
    """What the plan's own profile has of it, None without a profile, or where layers were changed
    by hand to what has no price.
    """
    try:
        return coverage(plan)
    except ConfigError:
        return None


def coverage_text(found: Coverage) -> str:
    """`34 shapes measured, 6 interpolated, 3 analytic`, and the same of what ranks send each other,
    if they do.
    """
    counts = (
        {kind: found.count(kind, of_ranks=of_ranks) for kind in Kind} for of_ranks in (False, True)
    )
    return "; ".join(
        _counts(what, of)
        for what, of in zip(("shape{}", "size{} of messages"), counts, strict=True)
        if any(of.values())
    )


def _counts(what: str, counts: dict[Kind, int]) -> str:
    (kind, count), *others = ((kind, count) for kind, count in counts.items() if count)
    return ", ".join(
        (
            f"{count} {what.format('' if count == 1 else 's')} {kind}",
            *(f"{other} {kind}" for kind, other in others),
        )
    )


def _unmeasured_messages(found: Coverage, plan: Plan) -> list[Case]:
    """Messages between groups that no curve is of; where one is, but of smaller messages, nothing
    larger would be measured again.
    """
    profile = plan.cluster.profile
    curves = (*profile.intra.curves, *profile.inter.crossing) if profile else ()
    measured = {(curve.collective, curve.nodes, curve.ranks) for curve in curves}
    return [
        case
        for case in found.missing
        if case.work in TIMED
        and (case.work, case.size("nodes"), case.size("ranks_per_node")) not in measured
    ]


def coverage_notes(found: Coverage, plan: Plan, profile: str, plan_file: str) -> Iterator[str]:
    """How to measure what is missing, what nothing measures, and under which stack whole blocks
    were measured.
    """
    measure = f"measure what is analytic: plan profile -o {profile or 'PROFILE'}"
    if found.count(Kind.ANALYTIC, of_ranks=False):
        yield f"{measure} --missing {plan_file or 'PLAN'}"
    messages = _unmeasured_messages(found, plan)
    if any(case.size("nodes") == 1 for case in messages):
        yield f"{measure} --comm"
    if any(case.size("nodes") > 1 for case in messages):
        yield (
            f"{measure} --add COMM, of torchrun --nnodes {plan.cluster.nodes} ... -m "
            f"parplan.profiles.profile_comm -o COMM"
        )
    if found.beyond:
        yield f"analytic whatever is measured: {', '.join(found.beyond)}"
    measured = plan.cluster.profile and plan.cluster.profile.in_step
    if measured and measured.stack != plan.training.stack.name:
        yield (
            f"whole blocks were measured as {measured.stack} runs them, what a step adds is "
            f"{plan.training.stack.name}'s"
        )
