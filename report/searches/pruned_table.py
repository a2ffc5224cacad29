"""Why candidates were not searched: the pruned ones of a space, grouped by reason, and what no
search looks at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.candidates.enumeration import CandidateSpace, Pruned
from parplan.planner.candidates.never_searched import LeftOut
from parplan.report.text import aligned, joined, say


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedGroup:
    """Candidates pruned for one reason up to its numbers, with the first of them."""

    count: int
    example: Pruned


def grouped(pruned: Sequence[Pruned]) -> list[PrunedGroup]:
    """The groups, largest first: `dp 3 does not divide ...` and `dp 6 does not divide ...` are one
    reason.
    """
    alike: dict[str, list[Pruned]] = {}
    for candidate in pruned:
        alike.setdefault(re.sub(r"\d[\d,]*", "#", candidate.reason), []).append(candidate)
    groups = [PrunedGroup(count=len(members), example=members[0]) for members in alike.values()]
    return sorted(groups, key=lambda group: -group.count)


def print_pruned(space: CandidateSpace, others: Sequence[LeftOut], out: Console) -> None:
    """The groups with counts; the numbers in a reason are those of its example. Then what the
    search leaves out besides.
    """
    total = len(space.layouts) + len(space.pruned)
    say(
        out,
        f"{total:,} candidates: {len(space.layouts):,} legal, {len(space.pruned):,} pruned before "
        f"the search",
        "bold",
    )
    found = [row for group in grouped(space.pruned) for row in _rows(group)]
    for line in aligned(found, out.width, left=(1,)) if found else ():
        say(out, line)
    say(out, "not searched, and no part of the gap:", "bold")
    for other in others:
        say(out, joined(f"{other.what}: {other.reason}".split(" "), " ", out.width, start="  "))
    say(out)


def _rows(group: PrunedGroup) -> tuple[tuple[str, str], tuple[str, str]]:
    return (f"{group.count:,}", group.example.reason), ("", f"such as {group.example.candidate}")
