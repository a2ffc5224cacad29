"""The table of the dry `plan check` of a traced plan: its peaks in the file and as priced today."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.prediction import StageMemory
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.units import counted, gib
from parplan.report.plans.plan_header import header
from parplan.report.text import gib_text, joined, print_table, say, seconds_text

FITS, TOO_LARGE = "fits", "does not fit"
HOST_TOO_SMALL = "the host of a node has too little memory for what the plan keeps there"


def does_fit(stage: StageMemory) -> bool:
    """Returns whether the device holds the stage."""
    return stage.total <= stage.capacity


def fits_host(today: AnyPlan) -> bool:
    """Returns whether the host of the fullest node holds what the plan keeps there."""
    return host_gib(today) <= gib(today.cluster.host_memory_bytes)


def shortage(today: AnyPlan, ranks: Sequence[int]) -> str | None:
    """Returns what does not fit: the first such device of the pipeline ranks, the host, or None."""
    for rank in ranks:
        if not does_fit(today.predicted.memory_gib[rank]):
            return f"stage {rank} {TOO_LARGE} its device"
    return None if fits_host(today) else HOST_TOO_SMALL


def print_traced_check(
    plan: TracedPlan, today: TracedPlan, ranks: Sequence[int], out: Console
) -> None:
    """Print the peaks of the pipeline ranks, the step time, and the verdict.

    plan: the plan of the file; today: the same plan, priced for a new trace of its module
    """
    say(out, header(today, out.width), "bold")
    say(out)
    rows = [
        (
            str(rank),
            gib_text(plan.predicted.memory_gib[rank].total),
            gib_text(today.predicted.memory_gib[rank].total),
            f"{today.predicted.memory_gib[rank].capacity:.1f}",
            FITS if does_fit(today.predicted.memory_gib[rank]) else TOO_LARGE,
        )
        for rank in ranks
    ]
    print_table(out, ("stage", "file GiB", "now GiB", "device GiB", ""), rows, left=("stage", ""))
    say(out)
    filed_s, now_s = (each.predicted.step_time_s.value for each in (plan, today))
    facts = [
        f"a new trace has the {counted(len(plan.shards), 'shard')} of the plan, and the same "
        f"divisions over tp {plan.mesh.tp}",
        f"step {seconds_text(filed_s)} in the file, {seconds_text(now_s)} as priced now",
        "nothing was run: plan check --execute trains the module as planned",
    ]
    if host_gib(today):
        facts.insert(
            2,
            f"the states take {gib_text(host_gib(today))} GiB of host memory a node, which has "
            f"{gib(today.cluster.host_memory_bytes):,.0f}",
        )
    for fact in facts:
        say(out, joined(fact.split(" "), " ", out.width, start="  note      ", indent=12))
    say(out, f"  {verdict(today, ranks)}", "bold")


def verdict(today: TracedPlan, ranks: Sequence[int]) -> str:
    """Returns whether all of the pipeline ranks fit their devices, and the hosts what they keep."""
    return shortage(today, ranks) or "every stage fits its device"
