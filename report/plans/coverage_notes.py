"""Lines of the summary on the machine's profile: how much of the plan it has measured."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.planner.calibration.profile_coverage import Coverage, coverage
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Case
from parplan.profiles.profiler.communication.comm_cases import TIMED
from parplan.profiles.provenance import Kind


def coverage_of_profile(plan: Plan) -> Coverage | None:
    """Returns the coverage of the plan by its profile.

    It is None without a profile, and when layers were edited by hand so that they have no price.
    """
    try:
        return coverage(plan)
    except ConfigError:
        return None


def coverage_text(profiled: Coverage) -> str:
    """`34 shapes measured, 6 interpolated, 3 analytic`, and likewise sizes of messages if any."""
    parts = []
    for what, of_ranks in (("shape{}", False), ("size{} of messages", True)):
        counts = {kind: profiled.count(kind, of_ranks=of_ranks) for kind in Kind}
        if any(counts.values()):
            parts.append(_counts(what, counts))
    return "; ".join(parts)


def _counts(what: str, counts: dict[Kind, int]) -> str:
    phrases: list[str] = []
    for kind, count in counts.items():
        if count and not phrases:
            phrases.append(f"{count} {what.format('' if count == 1 else 's')} {kind}")
        elif count:
            phrases.append(f"{count} {kind}")
    return ", ".join(phrases)


def _unmeasured_messages(profiled: Coverage, plan: Plan) -> list[Case]:
    """Returns messages between groups without a curve.

    A group whose curve ends below a message is left out: measuring again would add no larger size.
    """
    profile = plan.cluster.profile
    curves = (*profile.intra.curves, *profile.inter.crossing) if profile else ()
    measured = {(curve.collective, curve.nodes, curve.ranks) for curve in curves}
    return [
        case
        for case in profiled.missing
        if case.work in TIMED
        and (case.work, case.size("nodes"), case.size("ranks_per_node")) not in measured
    ]


def coverage_notes(profiled: Coverage, plan: Plan, profile: str, plan_file: str) -> Iterator[str]:
    """Yields how to measure missing cases, which have no measurement, and the stack of blocks."""
    measure = f"measure what is analytic: plan profile -o {profile or 'PROFILE'}"
    if profiled.count(Kind.ANALYTIC, of_ranks=False):
        yield f"{measure} --missing {plan_file or 'PLAN'}"
    messages = _unmeasured_messages(profiled, plan)
    if any(case.size("nodes") == 1 for case in messages):
        yield f"{measure} --comm"
    if any(case.size("nodes") > 1 for case in messages):
        hosts = plan.cluster.nodes * plan.cluster.hosts_per_node
        yield (
            f"{measure} --add COMM, of torchrun --nnodes {hosts} ... -m "
            f"parplan.profiles.profile_comm -o COMM"
        )
    if profiled.beyond:
        yield f"analytic whatever is measured: {', '.join(profiled.beyond)}"
    measured = plan.cluster.profile and plan.cluster.profile.in_step
    if measured and measured.stack != plan.training.stack.name:
        yield (
            f"whole blocks were measured as {measured.stack} runs them, what a step adds is "
            f"{plan.training.stack.name}'s"
        )
