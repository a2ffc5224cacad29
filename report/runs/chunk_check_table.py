"""The table of `plan check` of a plan with chunks: its bytes in the file and as priced today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan import ChunkRank, Plan
from parplan.planner.plan.prediction import StageMemory
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.units import format_bytes, gib
from parplan.report.json_result import JsonResult
from parplan.report.plans.plan_header import header
from parplan.report.runs.traced_check_table import (
    FITS,
    TOO_LARGE,
    does_fit,
    shortage,
)
from parplan.report.text import gib_text, joined, print_table, say

_CLASSES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "reserve",
    "total",
    "host",
)
_COUNTED = ("device_bytes", "smallest_bytes", "in_bytes", "out_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FiledChunks:
    """The memory and the chunks of a pipeline rank.

    gib      GiB of one GPU by class
    chunks   bytes by what they are: the budget, the smallest budget, and what a step moves
    """

    gib: Mapping[str, float]
    chunks: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStage:
    """A pipeline rank in the plan file and as priced now.

    as_filed   true where the two are equal
    """

    stage: int
    as_filed: bool
    file: FiledChunks
    now: FiledChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCheckDocument(JsonResult):
    """The check of a plan with chunks, which is priced again.

    host_gib   held by the host of the fullest node
    """

    verdict: str
    fits: bool
    host_gib: float
    host_capacity_gib: float
    stages: tuple[ChunkStage, ...]


def print_chunk_check(plan: Plan, today: Plan, ranks: Sequence[int], out: Console) -> None:
    """Print the bytes of the fullest of the pipeline ranks, the chunks of all, and the verdict.

    plan: the plan of the file; today: the same plan, priced again
    """
    say(out, header(today, out.width), "bold")
    say(out)
    full = max(ranks, key=lambda rank: _memory(today, rank).total)
    say(out, f"  GiB of one GPU of stage {full}, the fullest", "dim")
    rows = [
        (name, *(gib_text(getattr(_memory(of, full), name)) for of in (plan, today)))
        for name in _CLASSES
    ]
    print_table(out, ("", "file", "now"), rows, left=("",))
    say(out)
    print_chunks(plan, today, ranks, out)
    for fact in (
        f"the host of the fullest node holds {gib_text(host_gib(today))} GiB of "
        f"{gib(today.cluster.host_memory_bytes):,.0f}",
        "nothing was run: plan check --execute trains a small model of the same structure",
    ):
        say(out, joined(fact.split(" "), " ", out.width, start="  note      ", indent=12))
    say(out, joined(verdict(plan, today, ranks).split(" "), " ", out.width, indent=2), "bold")


def print_chunks(plan: AnyPlan, today: AnyPlan, ranks: Sequence[int], out: Console) -> None:
    """Print the bytes of the chunks of each pipeline rank as scheduled now."""
    say(out, "  chunks of one GPU as scheduled now: bytes that tensors may fill, that move", "dim")
    print_table(
        out,
        ("stage", "GiB", "budget", "smallest", "to the device", "from it", ""),
        [_chunk_row(plan, today, rank) for rank in ranks],
        left=("stage", ""),
    )
    say(out)


def verdict(plan: Plan, today: Plan, ranks: Sequence[int]) -> str:
    """Returns one line: whether all fits, and whether the file is as priced now."""
    short = shortage(today, ranks)
    if short:
        return short
    changed = [rank for rank in ranks if not _as_filed(plan, today, rank)]
    if changed:
        return f"every stage fits, but stage {changed[0]} of the file is not as priced now"
    return "every stage fits its device and its host, with the bytes of the file"


def chunk_check_document(plan: Plan, today: Plan, ranks: Sequence[int]) -> ChunkCheckDocument:
    """Returns the same for `--json`, in GiB and bytes."""
    return ChunkCheckDocument(
        verdict=verdict(plan, today, ranks),
        fits=shortage(today, ranks) is None,
        host_gib=host_gib(today),
        host_capacity_gib=gib(today.cluster.host_memory_bytes),
        stages=chunk_stages(plan, today, ranks),
    )


def chunk_stages(plan: AnyPlan, today: AnyPlan, ranks: Sequence[int]) -> tuple[ChunkStage, ...]:
    """Returns the bytes of each pipeline rank and its chunks, in the file and as priced now."""
    return tuple(
        ChunkStage(
            stage=rank,
            as_filed=_as_filed(plan, today, rank),
            file=_chunk_bytes(plan, rank),
            now=_chunk_bytes(today, rank),
        )
        for rank in ranks
    )


def _chunk_bytes(plan: AnyPlan, rank: int) -> FiledChunks:
    return FiledChunks(
        gib={each: getattr(_memory(plan, rank), each) for each in _CLASSES},
        chunks={each: getattr(_chunks(plan, rank), each) for each in _COUNTED},
    )


def _chunk_row(plan: AnyPlan, today: AnyPlan, rank: int) -> tuple[str, ...]:
    now = _chunks(today, rank)
    result = FITS if does_fit(_memory(today, rank)) else TOO_LARGE
    if not _as_filed(plan, today, rank):
        result += ", not as in the file"
    total = gib_text(_memory(today, rank).total)
    return str(rank), total, *(format_bytes(getattr(now, name)) for name in _COUNTED), result


def _as_filed(plan: AnyPlan, today: AnyPlan, rank: int) -> bool:
    """Returns whether classes and chunks of a rank are those of the file."""
    return _memory(plan, rank) == _memory(today, rank) and _chunks(plan, rank) == _chunks(
        today, rank
    )


def _memory(plan: AnyPlan, rank: int) -> StageMemory:
    return plan.predicted.memory_gib[rank]


def _chunks(plan: AnyPlan, rank: int) -> ChunkRank:
    assert plan.chunks is not None, "it is a plan with chunks"
    return plan.chunks.ranks[rank]
