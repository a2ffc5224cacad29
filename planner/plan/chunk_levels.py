"""Bytes on one device at every moment of a chunk schedule, by class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import chunk_states
from parplan.costmodels.chunks.chunk_operations import BlockPass, ChunkAction, ChunkOp, RankChunks
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.profiles.models.spec import Precision

CLASSES = ("always", "pool", "gathered", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLevel:
    """Bytes on the device during a moment, and bytes moved or sent around it.

    always     states of blocks whose location is the device, whole or without their optimizer
               states
    pool       parameter chunks of HOST blocks that are on the device, for now or for later
    gathered   whole communication groups
    other      activations, temporaries, gradients in transfer, states of embedding and head
    """

    moment: int
    work: str
    stage: int
    micro_batch: int
    block: int
    part: int
    again: bool
    always: int
    pool: int
    gathered: int
    other: int
    in_bytes: int
    out_bytes: int
    gathered_bytes: int
    reduced_bytes: int

    @property
    def total(self) -> int:
        return self.always + self.pool + self.gathered + self.other


def levels(schedule: RankChunks, price_cache: LayerPriceCache) -> tuple[ChunkLevel, ...]:
    """Returns every moment of a schedule; transfers of the update come after the last one."""
    always = chunk_states(schedule, price_cache)[0].total
    chunk_bytes = _parameter_bytes(schedule, price_cache.training.precision)
    pool: set[tuple[int, int]] = set()
    gathered: dict[tuple[int, int], int] = {}
    chunk_levels: list[ChunkLevel] = []
    for number, moment in enumerate(schedule.moments):
        _apply(moment.before, pool, gathered)
        here = len(pool) * chunk_bytes
        whole = sum(gathered.values())
        chunk_levels.append(
            ChunkLevel(
                moment=number,
                work=str(moment.work),
                stage=moment.stage,
                micro_batch=moment.micro_batch,
                block=moment.block,
                part=moment.access.part,
                again=moment.access.rerun,
                always=always,
                pool=here,
                gathered=whole,
                other=moment.device_bytes - always - here - whole,
                in_bytes=_sum(moment, ChunkAction.FETCH),
                out_bytes=_sum(moment, ChunkAction.SEND),
                gathered_bytes=_sum(moment, ChunkAction.GATHER),
                reduced_bytes=_sum(moment, ChunkAction.REDUCE),
            )
        )
        _apply(moment.after, pool, gathered)
    return tuple(chunk_levels)


def _parameter_bytes(schedule: RankChunks, precision: Precision) -> int:
    on_host = (group for group in schedule.groups if group.home is StateLocation.HOST)
    return next((precision.num_bytes * group.chunk_layout.chunk_elements for group in on_host), 0)


def _apply(
    ops: Iterable[ChunkOp], pool: set[tuple[int, int]], gathered: dict[tuple[int, int], int]
) -> None:
    for op in ops:
        which = op.group, op.number
        if op.does is ChunkAction.FETCH:
            pool.add(which)
        elif op.does is ChunkAction.DROP:
            pool.discard(which)
        elif op.does is ChunkAction.GATHER:
            gathered[which] = op.num_bytes
        elif op.does is ChunkAction.RELEASE:
            gathered.pop(which, None)


def _sum(moment: BlockPass, does: ChunkAction) -> int:
    return sum(op.num_bytes for op in (*moment.before, *moment.after) if op.does is does)
