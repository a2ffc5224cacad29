"""The memory table: GiB of each pipeline stage, with equal consecutive stages in one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console

from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import StageMemory
from parplan.planner.plan.traced_plan import AnyPlan, ShardStage, TracedPlan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.report.text import aligned, gib_text, print_table, say, widest

CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve", "total")
# headings for a terminal of 80 columns
SHORT = ("params", "grads", "optim", "activ", "temps", "reserve", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Pipeline stages `first` to `last`, equal in memory and in number of blocks.

    blocks  first and last block of the row, None when they are not consecutive
    chunks  model chunks of a stage, more than one when interleaved
    ends    embedding and head, as far as the stages hold them
    shards  the shards of each chunk in words, for a traced module
    pool    the pool of an unequal cluster that runs the stages
    """

    first: int
    last: int
    blocks: tuple[int, int] | None
    num_blocks: int
    chunks: int
    ends: tuple[str, ...]
    memory: StageMemory
    shards: str = ""
    pool: str = ""

    @property
    def stages(self) -> str:
        several = "" if self.first == self.last else f"-{self.last}"
        return f"{self.first}{several}" + (f" {self.pool}" if self.pool else "")

    @property
    def numbers(self) -> tuple[str, ...]:
        digits = 1 if self.memory.total >= 10 else 3
        return tuple(f"{getattr(self.memory, name):.{digits}f}" for name in CLASSES)


def fullest(plan: AnyPlan) -> StageMemory:
    """Returns the memory of the stage that needs most of its device."""
    return max(plan.predicted.memory_gib, key=lambda memory: memory.total)


def _row(plan: Plan, memory: StageMemory) -> MemoryRow:
    chunks = [stage for stage in plan.stages if stage.rank == memory.stage]
    runs = [run for chunk in chunks for run in chunk.layers]
    held = [block for run in runs for block in blocks_of(plan, run)]
    kinds = [plan.layer_plans[run.plan].layer for run in runs]
    ends = tuple(str(kind) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD) if kind in kinds)
    blocks = (held[0], held[-1]) if held and len(chunks) == 1 else None
    return MemoryRow(
        first=memory.stage,
        last=memory.stage,
        blocks=blocks,
        num_blocks=len(held),
        chunks=len(chunks),
        ends=ends,
        memory=memory,
        pool=chunks[0].pool,
    )


def _shard_row(plan: TracedPlan, memory: StageMemory) -> MemoryRow:
    chunks = [stage for stage in plan.stages if stage.rank == memory.stage]
    return MemoryRow(
        first=memory.stage,
        last=memory.stage,
        blocks=None,
        num_blocks=0,
        chunks=len(chunks),
        ends=(),
        memory=memory,
        shards="; ".join(_shards_text(plan, stage) for stage in chunks),
    )


def _shards_text(plan: TracedPlan, stage: ShardStage) -> str:
    """`12: h.0 (ln_1, attn) to h.5 (ln_2, mlp)`."""
    first, last = plan.shards[stage.first].name, plan.shards[stage.end - 1].name
    return f"{stage.end - stage.first}: {first}" + (f" to {last}" if last != first else "")


def rows(plan: AnyPlan) -> list[MemoryRow]:
    """Returns one row a pipeline stage; consecutive rows of equal blocks and numbers are merged."""
    if isinstance(plan, TracedPlan):
        return [_shard_row(plan, memory) for memory in plan.predicted.memory_gib]
    single = [_row(plan, memory) for memory in plan.predicted.memory_gib]
    return [
        _merged(list(alike))
        for _, alike in groupby(
            single, key=lambda row: (row.numbers, row.num_blocks, row.chunks, row.ends, row.pool)
        )
    ]


def _merged(alike: list[MemoryRow]) -> MemoryRow:
    first, last = alike[0], alike[-1]
    blocks = (first.blocks[0], last.blocks[1]) if first.blocks and last.blocks else None
    return replace(first, last=last.last, blocks=blocks)


def layers_text(row: MemoryRow, *, short: bool) -> str:
    """`embedding, 0-10`, or `11-43 (11 each)` for a merged row.

    Interleaved chunks are `embedding, 11 x 2 blocks`, or `embedding, 7 blocks in 4` when chunks
    differ in their number of blocks.
    """
    if row.blocks is None:
        each, over = divmod(row.num_blocks, row.chunks)
        text = (
            f"{row.num_blocks} blocks in {row.chunks}" if over else f"{row.chunks} x {each} blocks"
        )
    else:
        first, last = row.blocks
        text = f"{first}-{last}" if first != last else f"{first}"
        if row.first != row.last:
            text += f" ({row.num_blocks} each)"
    names = {"embedding": "embed"} if short else {}
    before = [names.get(end, end) for end in row.ends if end == "embedding"]
    after = [end for end in row.ends if end == "head"]
    return ", ".join((*before, text, *after))


def print_stages(plan: AnyPlan, out: Console) -> None:
    """Print the table in GiB per device."""
    shown = rows(plan)
    worst = fullest(plan).stage
    say(out, f"  GiB per GPU; {_capacity_text(plan)}", "dim")
    heading, cells = _cells(shown, out.width)
    bold = [number for number, row in enumerate(shown) if row.first <= worst <= row.last]
    left = ("stage", "layers", "shards")
    print_table(out, heading, cells, left=left, bold=bold if len(shown) > 1 else ())


def _capacity_text(plan: AnyPlan) -> str:
    """`the device has 79.2`, with the names of the pools where each has its own."""
    of_rank = {memory.stage: gib_text(memory.capacity) for memory in plan.predicted.memory_gib}
    if not plan.pools:
        return f"the device has {of_rank[0]}"
    has = {pool: of_rank[rank] for rank, pool in enumerate(plan.pools)}
    return "a device of " + ", of ".join(f"{pool} has {room}" for pool, room in has.items())


def _cells(shown: list[MemoryRow], width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns heading and rows, with short headings when whole words do not fit."""
    if shown[0].shards:
        rows_of = [(row.stages, *row.numbers, row.shards) for row in shown]
        return ("stage", *SHORT, "shards"), rows_of
    whole = ("stage", "layers", *CLASSES)
    cells = [(row.stages, layers_text(row, short=False), *row.numbers) for row in shown]
    if widest(aligned((whole, *cells), width, left=(0, 1))) <= width:
        return whole, cells
    cells = [(row.stages, layers_text(row, short=True), *row.numbers) for row in shown]
    return ("stage", "layers", *SHORT), cells
