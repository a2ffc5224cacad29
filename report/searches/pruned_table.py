"""The pruned candidates of a space, grouped by reason, and the choices that no search covers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.candidates.meshes import Pruned
from parplan.planner.candidates.never_searched import UnsearchedPart
from parplan.report.text import aligned, joined, say


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedGroup:
    """Candidates pruned for reasons that differ only in numbers, with the first of them."""

    count: int
    example: Pruned


def grouped(pruned: Sequence[Pruned]) -> list[PrunedGroup]:
    """Returns the groups, largest first; reasons that differ only in numbers make one group."""
    alike: dict[str, list[Pruned]] = {}
    for candidate in pruned:
        alike.setdefault(re.sub(r"\d[\d,]*", "#", candidate.reason), []).append(candidate)
    groups = [
        PrunedGroup(count=sum(each.count for each in members), example=members[0])
        for members in alike.values()
    ]
    return sorted(groups, key=lambda group: -group.count)


def print_pruned(space: CandidateSpace, left_out: Sequence[UnsearchedPart], out: Console) -> None:
    """Print the groups with counts, then the choices that the search never covers.

    The numbers in a reason are those of the group's example.
    """
    say(
        out,
        f"{space.considered:,} candidates: {len(space.layouts):,} legal, "
        f"{space.num_pruned:,} pruned before the search",
        "bold",
    )
    rows = [row for group in grouped(space.pruned) for row in _rows(group)]
    for line in aligned(rows, out.width, left=(1,)) if rows else ():
        say(out, line)
    say(out, "not searched, and no part of the gap:", "bold")
    for choice in left_out:
        say(out, joined(f"{choice.what}: {choice.reason}".split(" "), " ", out.width, start="  "))
    say(out)


def _rows(group: PrunedGroup) -> tuple[tuple[str, str], tuple[str, str]]:
    return (f"{group.count:,}", group.example.reason), ("", f"such as {group.example.candidate}")
