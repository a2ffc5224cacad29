"""Attacks on proven plans with other strategies, priced as the plans are.

    # 60 requests, and 12 under --objective memory: about 15 minutes
    python -m benchmarks.search.attack
    python -m benchmarks.search.attack --requests 10 --memory-requests 0 --seed 3 --evaluations 500

A plan claims that no strategy is faster by more than its gap. Each plan is searched once and then
attacked within the pins of its request. A hill climb with many starts gives runs of blocks other
ZeRO stages, recompute lists and divisions, moves blocks between neighbouring stages, and fills
other layouts (micro-batch, schedule, virtual stages, mesh), including layouts that the search does
not try; random layouts are priced through `estimate`. A strategy counts if it fits the memory limit
of the search and the executor's rules accept it. The documented exclusions of the search are one
table in benchmarks/search/attacks/allowed.py.

`beats` is the margin of the best attack over the plan, `beyond` the part of it above the stated
gap; the exit code is 1 if any `beyond` is positive. `as fast in` is the smallest peak of a strategy
as good as the plan that needs less memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from benchmarks.search.attacks.allowed import LEFT_OUT
from benchmarks.search.attacks.prices import INFINITY
from benchmarks.search.attacks.requests import memory_requests, requests
from benchmarks.search.attacks.rounds import Outcome, attacked
from parplan.report.text import console, gib_text, print_table, say

HEADING = (
    "request",
    "plan",
    "gap %",
    "best",
    "beats %",
    "beyond %",
    "peak",
    "as fast in",
    "changed",
)


def _row(outcome: Outcome) -> tuple[str, ...]:
    smaller = "" if outcome.smaller_peak_gib is None else gib_text(outcome.smaller_peak_gib)
    plan = "none fits" if outcome.plan is None else f"{outcome.plan:,.4g}"
    return (
        str(outcome.request),
        plan,
        f"{100 * outcome.gap:.3f}",
        f"{outcome.best:,.4g}",
        f"{100 * outcome.beats:.3f}",
        f"{100 * outcome.beyond:.3f}",
        gib_text(outcome.peak_gib),
        smaller,
        ", ".join(outcome.kinds),
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return how many plans were beaten, and how many beyond their gap."""
    beaten = sum(outcome.beats > 0 for outcome in outcomes)
    beyond = [outcome for outcome in outcomes if outcome.beyond]
    most = f", by at most {100 * max(outcome.beyond for outcome in beyond):.2f} %" if beyond else ""
    ties = sum(outcome.smaller_peak_gib is not None for outcome in outcomes)
    priced = sum(outcome.evaluations for outcome in outcomes)
    return (
        f"{len(outcomes)} plans, {priced:,} prices: {beaten} beaten, {len(beyond)} beyond "
        f"the gap{most}; {ties} as good in less memory"
    )


@click.command()
@click.option(
    "--requests",
    "count",
    type=click.IntRange(min=0),
    default=60,
    show_default=True,
    help="Requests for the fastest step.",
)
@click.option(
    "--memory-requests",
    "lean_count",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Requests for the least redundancy.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the requests that are drawn and of the attacks.",
)
@click.option(
    "--evaluations",
    type=click.IntRange(min=10),
    default=1500,
    show_default=True,
    help="Prices of steps and of ranks' memory a request.",
)
@click.option(
    "--changes",
    is_flag=True,
    help="Also print each plan that is beaten and what beats it, block by block.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on stdout.")
def main(
    count: int, lean_count: int, seed: int, evaluations: int, changes: bool, as_json: bool
) -> None:
    """Attack the plans of fixed requests."""
    errors = console(sys.stderr)
    attacks = (*requests(count, seed), *memory_requests(lean_count, seed))
    outcomes: list[Outcome] = []
    for number, request in enumerate(attacks, 1):
        outcomes.append(attacked(request, evaluations, seed))
        say(errors, f"{number} of {len(attacks)}  {_line(outcomes[-1])}")
    if as_json:
        click.echo(json.dumps([_document(outcome) for outcome in outcomes], indent=2))
    else:
        _print(outcomes, changes=changes)
    sys.exit(1 if any(outcome.beyond for outcome in outcomes) else 0)


def _document(outcome: Outcome) -> dict[str, object]:
    best = None if outcome.best == INFINITY else outcome.best
    return {
        **asdict(outcome),
        "request": str(outcome.request),
        "best": best,
        "beats": outcome.beats,
        "beyond": outcome.beyond,
    }


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.request}: beyond {100 * outcome.beyond:.3f} %  ({outcome.search_s:.1f} s "
        f"search, {outcome.attack_s:.1f} s attack)"
    )


def _print(outcomes: Sequence[Outcome], *, changes: bool) -> None:
    out = console(sys.stdout)
    print_table(out, HEADING, map(_row, outcomes), left=("request", "changed"))
    say(out)
    for outcome in (outcome for outcome in outcomes if changes and outcome.how):
        for line in (
            str(outcome.request),
            f"  plan    {outcome.plan_how}",
            f"  attack  {outcome.how}",
        ):
            say(out, line)
    say(out, summary(outcomes))
    for entry in LEFT_OUT:
        say(out, f"left out: {entry.reason} ({entry.said})")


if __name__ == "__main__":
    main()
