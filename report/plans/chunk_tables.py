"""The chunks of a plan: locations of states, bytes that a step moves, and the fullest moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.host.state_location import OFFLOAD_OF, Access, StateLocation
from parplan.planner.plan.chunk_levels import CLASSES, ChunkLevel
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import ChunkGroup, ChunkPlan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import format_bytes, gib, spans_text
from parplan.report.json_result import JsonResult
from parplan.report.text import gib_text, percent, print_table, say

MOST_ROWS = 8  # fullest moments that are printed
_LOCATIONS = {
    StateLocation.DEVICE: "device",
    StateLocation.OPTIMIZER: "optimizer on the host",
    StateLocation.HOST: "host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMoment:
    """A moment of a step: bytes on the device, and bytes moved or sent around it.

    work             pass of the moment: F forward, B backward
    stage            virtual stage
    part             part of the block, where it is used an operator at a time
    again            true in a recompute
    always_bytes     states of blocks whose home is the device
    pool_bytes       parameter chunks of the host that are on the device
    group_bytes      whole communication groups
    other_bytes      activations, temporaries, gradients in transfer, states of embedding and head
    in_bytes         to the device
    out_bytes        to the host
    gathered_bytes   gathered from other ranks
    reduced_bytes    reduced over ranks
    """

    moment: int
    work: str
    stage: int
    micro_batch: int
    block: int
    part: int
    again: bool
    always_bytes: int
    pool_bytes: int
    group_bytes: int
    other_bytes: int
    in_bytes: int
    out_bytes: int
    gathered_bytes: int
    reduced_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLevelsDocument(JsonResult):
    """Every moment of a step on one pipeline rank.

    stage          pipeline rank
    device_bytes   bytes that tensors may fill
    """

    stage: int
    device_bytes: int
    moments: tuple[ChunkMoment, ...]


def blocks_by_location(plan: AnyPlan) -> dict[tuple[int, StateLocation], list[int]]:
    """Returns the blocks or shards in chunks by pipeline rank and location, in model order."""
    blocks: dict[tuple[int, StateLocation], list[int]] = {}
    if isinstance(plan, TracedPlan):
        for shards in plan.stages:
            for each in shards.homes:
                blocks.setdefault((shards.rank, each.home), []).extend(each.shards)
        return blocks
    for stage in plan.stages:
        for run in stage.layers:
            layer_plan = plan.layer_plans[run.plan]
            offload = set(layer_plan.offload)
            location = next(loc for loc in reversed(OFFLOAD_OF) if set(OFFLOAD_OF[loc]) <= offload)
            if layer_plan.layer is LayerKind.BLOCK:
                blocks.setdefault((stage.rank, location), []).extend(blocks_of(plan, run))
    return blocks


def _unit(plan: AnyPlan) -> str:
    """The word for the layers in chunks."""
    return "shards" if isinstance(plan, TracedPlan) else "blocks"


def chunks_fact(plan: AnyPlan, chunks: ChunkPlan) -> tuple[str, str, str]:
    """The summary's line: blocks with states on the host, and bytes that the busiest rank moves."""
    counts = Counter[StateLocation]()
    for (_, location), blocks in blocks_by_location(plan).items():
        counts[location] += len(blocks)
    busiest = max(chunks.ranks, key=lambda rank: rank.in_bytes + rank.out_bytes)
    host = counts[StateLocation.HOST]
    optimizer = counts[StateLocation.OPTIMIZER]
    every = f"{counts.total()} {_unit(plan)}"
    if optimizer and not host:
        whose = f"the optimizer of {optimizer} of {every} on the host"
        more = ""
    else:
        whose = f"{host} of {every} on the host"
        more = f"the optimizer of {optimizer} more, " if optimizer else ""
    return (
        "chunks",
        whose,
        f"{more}{format_bytes(busiest.in_bytes)} in and {format_bytes(busiest.out_bytes)} out a "
        f"step and GPU",
    )


def print_chunks(plan: AnyPlan, out: Console) -> None:
    """Print groups of chunks and the bytes they move by pipeline rank; nothing without chunks."""
    chunks = plan.chunks
    if chunks is None:
        return
    blocks = blocks_by_location(plan)
    width = plan.training.precision.num_bytes
    heading = ("stage", "home", _unit(plan), "chunks", "elements", "of parameters", "used")
    rows = [_group_row(group, blocks[group.stage, group.home], width) for group in chunks.groups]
    say(out)
    gathered = (
        f"; {plan.mesh.dp} in a row, one of each rank, are gathered together"
        if plan.mesh.dp > 1
        else ""
    )
    say(out, f"  states in chunks, whose parameters lie as their states do{gathered}", "dim")
    print_table(out, heading, rows, left=("home", _unit(plan)))
    say(out)
    say(
        out,
        f"  what a step moves of one GPU, evicting by {chunks.eviction}{_finer(chunks)}; tensors "
        f"may fill the budget",
        "dim",
    )
    print_table(
        out,
        ("stage", "in", "out", "smallest budget", "budget"),
        (
            (
                f"{rank.stage}",
                *map(
                    format_bytes,
                    (rank.in_bytes, rank.out_bytes, rank.smallest_bytes, rank.device_bytes),
                ),
            )
            for rank in chunks.ranks
        ),
        left=(),
    )


def _finer(chunks: ChunkPlan) -> str:
    by_block = chunks.access is Access.BLOCK
    return "" if by_block else ", blocks used an operator at a time"


def _group_row(group: ChunkGroup, blocks: Sequence[int], width: int) -> tuple[str, ...]:
    return (
        f"{group.stage}",
        _LOCATIONS[group.home],
        spans_text(blocks),
        f"{group.num_chunks}",
        f"{group.chunk_elements:,}",
        format_bytes(width * group.chunk_elements),
        percent(group.utilisation),
    )


def fullest_levels(levels: Sequence[ChunkLevel]) -> list[ChunkLevel]:
    """Returns the fullest moments in the order of the step, one for each access of a block."""
    fullest: dict[tuple[str, int, int, bool], ChunkLevel] = {}
    for level in sorted(levels, key=lambda level: (-level.total, level.moment)):
        fullest.setdefault((level.work, level.block, level.part, level.again), level)
    return sorted(list(fullest.values())[:MOST_ROWS], key=lambda level: level.moment)


def print_levels(levels: Sequence[ChunkLevel], rank: int, chunks: RankChunks, out: Console) -> None:
    """Print the fullest moments of a pipeline rank's device, and the bytes moved in all of them.

    The blocks of a traced module are its shards.
    """
    shown = fullest_levels(levels)
    budget = gib_text(gib(chunks.device_bytes))
    say(
        out,
        f"  fullest of {len(levels):,} moments of stage {rank}, GiB of one GPU; the budget is "
        f"{budget}",
        "dim",
    )
    by_part = any(level.part for level in levels)
    block = ("block", "part") if by_part else ("block",)
    heading = ("moment", "pass", "micro-batch", *block, *CLASSES, "total", "in", "out")
    rows = (_level_row(level, by_part=by_part) for level in shown)
    print_table(out, heading, rows, left=("pass",))
    sums = {
        name: sum(getattr(level, f"{name}_bytes") for level in levels)
        for name in ("in", "out", "gathered", "reduced")
    }
    after = chunks.in_bytes - sums["in"]
    text = ", ".join(f"{format_bytes(size)} {name}" for name, size in sums.items())
    say(
        out,
        f"  in all {text} around the moments of a "
        f"step{f'; {format_bytes(after)} in after the update' if after else ''}",
        "dim",
    )


def _level_row(level: ChunkLevel, *, by_part: bool) -> tuple[str, ...]:
    sizes = (
        *(getattr(level, name) for name in CLASSES),
        level.total,
        level.in_bytes,
        level.out_bytes,
    )
    return (
        f"{level.moment}",
        f"{level.work} again" if level.again else level.work,
        f"{level.micro_batch}",
        f"{level.block}",
        *((f"{level.part}",) if by_part else ()),
        *(gib_text(gib(size)) if size else "-" for size in sizes),
    )


def levels_document(
    levels: Sequence[ChunkLevel], rank: int, budget_bytes: int
) -> ChunkLevelsDocument:
    """Returns every moment for `--json`, in bytes."""
    return ChunkLevelsDocument(
        stage=rank, device_bytes=budget_bytes, moments=tuple(map(_chunk_moment, levels))
    )


def _chunk_moment(level: ChunkLevel) -> ChunkMoment:
    return ChunkMoment(
        moment=level.moment,
        work=level.work,
        stage=level.stage,
        micro_batch=level.micro_batch,
        block=level.block,
        part=level.part,
        again=level.again,
        always_bytes=level.always,
        pool_bytes=level.pool,
        group_bytes=level.gathered,
        other_bytes=level.other,
        in_bytes=level.in_bytes,
        out_bytes=level.out_bytes,
        gathered_bytes=level.gathered_bytes,
        reduced_bytes=level.reduced_bytes,
    )
