"""The result of `plan doctor`: what became of each path that only GPUs have, and its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from parplan.profiles.documents.files import write_result
from parplan.profiles.documents.schema import document
from parplan.profiles.documents.yaml_text import yaml_text
from parplan.profiles.machines.user_profile import ProfileEnvironment

DOCTOR_VERSION = 1


class Outcome(StrEnum):
    """The end that a path may have."""

    PASSED = "passed"
    REFUSED = "refused"
    WRONG = "wrong"
    SLOW = "slow"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFinding:
    """The end of one path.

    says      the numbers that were compared, or why the path was refused, failed or did not run
    seconds   from its beginning to its end on the slowest rank, 0 where it did not run
    """

    path: str
    outcome: Outcome
    says: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All findings on one machine.

    device    cuda, cpu, or the stand-in for a GPU
    backend   of the collectives
    ranks     processes, one on each device
    """

    doctor_version: int
    environment: ProfileEnvironment
    device: str
    backend: str
    ranks: int
    findings: tuple[PathFinding, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of findings of each outcome that occurs."""
        found = Counter(finding.outcome for finding in self.findings)
        return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}

    @property
    def is_healthy(self) -> bool:
        """True if nothing was wrong or slow."""
        bad = (Outcome.WRONG, Outcome.SLOW)
        return not any(finding.outcome in bad for finding in self.findings)


def joined_finding(path: str, of_ranks: Sequence[PathFinding]) -> PathFinding:
    """Returns the finding of all ranks: the worst of them, with its rank.

    `of_ranks` are in the order of the ranks, at least one.
    """
    order = (Outcome.WRONG, Outcome.SLOW, Outcome.REFUSED, Outcome.NOT_RUN, Outcome.PASSED)
    rank = min(range(len(of_ranks)), key=lambda rank: order.index(of_ranks[rank].outcome))
    worst = of_ranks[rank]
    alike = all(each.outcome is worst.outcome for each in of_ranks)
    return PathFinding(
        path=path,
        outcome=worst.outcome,
        says=worst.says if alike else f"rank {rank}: {worst.says}",
        seconds=max(each.seconds for each in of_ranks),
    )


def write_report(report: DoctorReport, path: Path) -> Path | None:
    """Writes the report as YAML, whole or not at all. Raises ConfigError."""
    return write_result(yaml_text(document(report)), path, hint="choose another file with -o")
