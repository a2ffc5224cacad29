"""The dry run of `plan check` as `--json` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parplan.costmodels.usage.rank_usage import RankUse
from parplan.planner.runs.rank_checks import CLOSE, RankCheck, all_match, class_names
from parplan.report.json_result import JsonResult
from parplan.report.runs.check_tables import verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRank:
    """A pipeline rank with the bytes that it was predicted to hold and send, and those found.

    deviation             share of the prediction by class, null where none was predicted
    occupied_bytes        of the device, with what lies outside tensors
    micro_batches         the numbers of micro-batches that were run, of as many as `of`
    node_host_bytes       bytes that the host of the fullest node holds
    """

    rank: int
    predicted_bytes: RankUse
    found_bytes: RankUse
    deviation: Mapping[str, float | None]
    occupied_bytes: int
    capacity_bytes: int
    fits: bool
    micro_batches: tuple[int, ...]
    of: int
    node_host_bytes: int
    node_host_capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunDocument(JsonResult):
    """The dry run of a plan: one rank of each pipeline stage at full size.

    matches   true where all classes are as predicted
    close     share of the prediction that a class may deviate by
    """

    matches: bool
    fits: bool
    close: float
    verdict: str
    ranks: tuple[CheckedRank, ...]


def dry_run_document(checks: Sequence[RankCheck]) -> DryRunDocument:
    """Returns the tables of the dry run for `--json`, in bytes."""
    return DryRunDocument(
        matches=all_match(checks),
        fits=all(check.fits for check in checks),
        close=CLOSE,
        verdict=verdict(checks),
        ranks=tuple(_checked(check, class_names(checks)) for check in checks),
    )


def _checked(check: RankCheck, names: Sequence[str]) -> CheckedRank:
    return CheckedRank(
        rank=check.rank,
        predicted_bytes=check.predicted,
        found_bytes=check.found,
        deviation={name: check.share(name) for name in names},
        occupied_bytes=round(check.occupied),
        capacity_bytes=check.capacity,
        fits=check.fits,
        micro_batches=check.micro_batches,
        of=check.of,
        node_host_bytes=round(check.node_host),
        node_host_capacity_bytes=check.node_host_capacity,
    )
