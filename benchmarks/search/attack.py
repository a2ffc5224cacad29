"""Attacks on proven plans: single blocks, stages, micro-batches, schedules and whole random
layouts, priced as the plans are.

    python benchmarks/search/attack.py                                     # 60 requests and 12
                                                                           under --objective memory,
                                                                           about 15 minutes
    python benchmarks/search/attack.py --requests 10 --memory-requests 0 --seed 3 --evaluations 500

A plan says that nothing is faster by more than its gap. Each plan is found once and then attacked
within the pins of its request: a hill climb with many starts gives runs of blocks other ZeRO
stages, lists of recomputed operators and divisions, moves blocks between neighbouring stages, and
fills other layouts (micro-batch, schedule, virtual stages, mesh), also those that the search does
not try; random layouts are priced through `estimate`. What counts is a strategy that fits the
memory limit of the search and that the executor's rules accept. What the search leaves out and says
so is one table in benchmarks/search/attacks/allowed.py.

`beats` is by how much the best attack is below the plan, `beyond` by how much more than the stated
gap: the exit code is 1 where any is. `as fast in` is the smallest peak of what was as good as the
plan and needs less than it.
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


def _row(found: Outcome) -> tuple[str, ...]:
    smaller = "" if found.smaller_peak_gib is None else gib_text(found.smaller_peak_gib)
    plan = "none fits" if found.plan is None else f"{found.plan:,.4g}"
    return (
        str(found.request),
        plan,
        f"{100 * found.gap:.3f}",
        f"{found.best:,.4g}",
        f"{100 * found.beats:.3f}",
        f"{100 * found.beyond:.3f}",
        gib_text(found.peak_gib),
        smaller,
        ", ".join(found.kinds),
    )


def summary(found: Sequence[Outcome]) -> str:
    """How many plans were beaten, and how many beyond their gap."""
    beaten = sum(one.beats > 0 for one in found)
    beyond = [one for one in found if one.beyond]
    most = f", by at most {100 * max(one.beyond for one in beyond):.2f} %" if beyond else ""
    ties = sum(one.smaller_peak_gib is not None for one in found)
    priced = sum(one.evaluations for one in found)
    return f"{len(found)} plans, {priced:,} prices: {beaten} beaten, {len(beyond)} beyond the gap{most}; {ties} as good in less memory"


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
    asked, found = (*requests(count, seed), *memory_requests(lean_count, seed)), []
    for number, request in enumerate(asked, 1):
        found.append(attacked(request, evaluations, seed))
        say(errors, f"{number} of {len(asked)}  {_line(found[-1])}")
    if as_json:
        click.echo(json.dumps([_document(one) for one in found], indent=2))
    else:
        _print(found, changes=changes)
    sys.exit(1 if any(one.beyond for one in found) else 0)


def _document(found: Outcome) -> dict[str, object]:
    best = None if found.best == INFINITY else found.best
    return {
        **asdict(found),
        "request": str(found.request),
        "best": best,
        "beats": found.beats,
        "beyond": found.beyond,
    }


def _line(found: Outcome) -> str:
    return f"{found.request}: beyond {100 * found.beyond:.3f} %  ({found.search_s:.1f} s search, {found.attack_s:.1f} s attack)"


def _print(found: Sequence[Outcome], *, changes: bool) -> None:
    out = console(sys.stdout)
    print_table(out, HEADING, map(_row, found), left=("request", "changed"))
    say(out)
    for one in (one for one in found if changes and one.how):
        for line in (str(one.request), f"  plan    {one.plan_how}", f"  attack  {one.how}"):
            say(out, line)
    say(out, summary(found))
    for entry in LEFT_OUT:
        say(out, f"left out: {entry.reason} ({entry.said})")


if __name__ == "__main__":
    main()
