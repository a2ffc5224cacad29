"""Attacks on the plans of small requests of all families, stacks and objectives.

    python -m benchmarks.search.attack_families                       # 100 requests, an hour
    python -m benchmarks.search.attack_families --first 40 --requests 1 --only pools

Each plan is checked by its own figures (memory limit, slowdown) and attacked by pinned searches,
layouts that `estimate` prices, and changes of single blocks. A row a request and each finding are
printed at once; a finding is a plan over its limit or its allowance, one that is beaten by more
than its gap, a refusal where something fits, or an error without a reason. The exit code is 1 with
any finding.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from benchmarks.search.attacks.families import FAMILIES, Asked, asked_requests
from benchmarks.search.attacks.plan_changes import Changes
from benchmarks.search.attacks.whole_plans import (
    ROUNDING,
    Attack,
    by_hand,
    faults_of,
    gap_of,
    pinned,
    plan_of,
    question_of,
    slowest_s,
    value_of,
)
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Request
from parplan.profiles.errors import InfeasibleError, OutOfTimeError, PlannerError

PINNED = 4  # searches with more pins of one request
BY_HAND = 60  # layouts drawn
CHANGES = 400  # changes tried
MOST_TEXT = 150
NOTHING_FITS = "nothing fits"


@dataclass(slots=True)
class Outcome:
    """The attacks on one request.

    plan      its value of the objective, None without a plan
    beats     share by which the best attack is below the plan
    """

    asked: Asked
    plan: float | None = None
    gap: float = 0.0
    beats: float = 0.0
    priced: int = 0
    searched: int = 0
    findings: list[str] = field(default_factory=list)
    note: str = ""


def attacked(asked: Asked, seed: int) -> Outcome:
    """Search the plan of a request and attack it."""
    outcome, chance = Outcome(asked), random.Random(f"{seed} {asked}")
    try:
        request = question_of(asked).factory.request
    except PlannerError as error:
        outcome.note = f"refused: {error}"[:MOST_TEXT]
        return outcome
    plan: Plan | None = None
    try:
        plan = plan_of(asked)
    except InfeasibleError as error:
        outcome.note = f"{NOTHING_FITS}: {error}"[:MOST_TEXT]
    except OutOfTimeError:
        outcome.note = "no plan in time"
    except PlannerError as error:
        outcome.note = f"refused: {error}"[:MOST_TEXT]
    if plan is not None:
        request = replace(request, cluster=plan.cluster)
        outcome.plan, outcome.gap = value_of(plan, asked), gap_of(plan)
        outcome.findings += faults_of(plan, asked, request)
    for attack in _attacks(plan, asked, request, chance, outcome):
        if plan is not None:
            _judge(attack, plan, request, outcome)
        elif outcome.note.startswith(NOTHING_FITS):
            outcome.findings.append(f"false refusal: {attack.kind} {attack.how} fits")
    return outcome


def _attacks(
    plan: Plan | None, asked: Asked, request: Request, chance: random.Random, outcome: Outcome
) -> Iterator[Attack]:
    offload = plan is None and asked.pins.offload is None
    pooled = asked.family == "pools"  # a layout by hand is of one pool
    for text, other in () if pooled else by_hand(request, asked, chance, BY_HAND, offload):
        outcome.priced += 1
        step_s = other.predicted.step_time_s.value
        yield Attack("by hand", _value(other, plan, asked), step_s, text)
    if plan is None:
        return
    for text, found in pinned(plan, asked, chance, PINNED):
        outcome.searched += 1
        if isinstance(found, PlannerError):
            continue
        alike = replace(request, cluster=found.cluster)
        outcome.findings += (f"pinned {text}: {each}" for each in faults_of(found, asked, alike))
        step_s = found.predicted.step_time_s.value
        yield Attack("pinned", value_of(found, asked), step_s, text)
    changes = Changes(plan, asked, request, chance)
    best = changes.climb(CHANGES)
    outcome.priced += changes.priced
    if best is not None:
        yield replace(best, value=best.value * _per_step(plan, asked))


def _value(other: Plan, plan: Plan | None, asked: Asked) -> float:
    """Return the value of a layout by hand; its nodes and spares are those of the plan."""
    if asked.objective != "goodput":
        return value_of(other, asked)
    return other.predicted.step_time_s.value * (1.0 if plan is None else _per_step(plan, asked))


def _per_step(plan: Plan, asked: Asked) -> float:
    """Return the seconds of the goodput objective for a second of a step, else 1."""
    if asked.objective != "goodput":
        return 1.0
    return value_of(plan, asked) / plan.predicted.step_time_s.value


def _judge(attack: Attack, plan: Plan, request: Request, outcome: Outcome) -> None:
    """Note an attack in time that is better than the plan, a finding where it is beyond the gap."""
    asked, value = outcome.asked, outcome.plan
    assert value is not None, "there is a plan"
    if attack.step_s > slowest_s(plan, asked, request) * (1 + ROUNDING):
        return
    beats = (value - attack.value) / abs(value) if value else -attack.value
    outcome.beats = max(outcome.beats, beats)
    beyond = beats > outcome.gap + ROUNDING
    if asked.objective == "memory":  # its gap is a share of the bytes on the hosts too
        bound = plan.search.bound
        beyond = attack.value < bound - ROUNDING * (abs(bound) + 1)
    if beyond:
        outcome.findings.append(
            f"beyond the gap: {attack.kind} {attack.value:.6g} < {value:.6g} by "
            f"{100 * beats:.3f} %, gap {100 * outcome.gap:.3f} %: {attack.how}"
        )


def _row(number: int, outcome: Outcome, seconds: float) -> str:
    plan = "-" if outcome.plan is None else f"{outcome.plan:.5g}"
    asked = outcome.asked
    return (
        f"{number:4} {asked.family:8} {asked.objective:10} plan {plan:>9} "
        f"gap {100 * outcome.gap:6.3f} % beaten by {100 * outcome.beats:6.3f} % "
        f"priced {outcome.priced:4} searched {outcome.searched} "
        f"findings {len(outcome.findings)} {seconds:5.1f} s {outcome.note}"
    )


@click.command()
@click.option("--requests", "count", type=click.IntRange(1), default=100, show_default=True)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="First number.")
@click.option("--only", multiple=True, type=click.Choice(tuple(FAMILIES)), help="Family; repeat.")
@click.option("--time-limit", type=float, default=20.0, show_default=True, help="Of a search.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the attacks.")
@click.option("--models", type=click.Path(path_type=Path), help="Folder of the cut models.")
def main(
    count: int, first: int, only: tuple[str, ...], time_limit: float, seed: int, models: Path | None
) -> None:
    """Attack the plans of seeded requests of all families."""
    num_findings = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asked_ones = asked_requests(first, count, folder, time_limit, only)
        for number, asked in enumerate(asked_ones, first):
            started_s = time.process_time()
            try:
                outcome = attacked(asked, seed)
            except Exception:  # an error without a reason is a finding
                outcome = Outcome(asked, findings=["error: " + traceback.format_exc()[-1500:]])
            click.echo(_row(number, outcome, time.process_time() - started_s))
            if outcome.findings:
                click.echo(f"     {asked}")
            for finding in outcome.findings:
                click.echo(f"     {finding}")
            sys.stdout.flush()
            num_findings += len(outcome.findings)
    click.echo(f"{count} requests, {num_findings} findings")
    sys.exit(1 if num_findings else 0)


if __name__ == "__main__":
    main()
