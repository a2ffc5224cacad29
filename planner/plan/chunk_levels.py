"""What one device holds at every moment of a chunk schedule, by class, replayed from the schedule's ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import chunk_states
from parplan.costmodels.chunks.chunk_operations import Does, Moment, Op, RankChunks
from parplan.costmodels.host.state_location import Home
from parplan.costmodels.price_cache import PriceBook
from parplan.profiles.models.spec import Precision

CLASSES = ("always", "pool", "gathered", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Bytes on the device during a moment, and moved or sent around it.

    always      states of blocks at home on the device, whole or without their optimizer
    pool        parameter chunks of HOST blocks that are there, used now or later
    gathered    whole communication groups
    other       activations, temporaries, gradients on their way, states of embedding and head
    """

    moment: int
    work: str
    stage: int
    micro_batch: int
    block: int
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


def levels(found: RankChunks, book: PriceBook) -> tuple[Level, ...]:
    """Every moment of a schedule. Transfers of the update, after the last moment, are in none of them."""
    always, chunk_bytes = chunk_states(found, book)[0].total, _parameter_bytes(found, book.training.precision)
    pool, gathered, made = set[tuple[int, int]](), dict[tuple[int, int], int](), []
    for number, moment in enumerate(found.moments):
        _apply(moment.before, pool, gathered)
        here = len(pool) * chunk_bytes
        whole = sum(gathered.values())
        made.append(Level(
            moment=number, work=str(moment.work), stage=moment.stage, micro_batch=moment.micro_batch, block=moment.block, always=always,
            pool=here, gathered=whole, other=moment.device_bytes - always - here - whole, in_bytes=_sum(moment, Does.FETCH),
            out_bytes=_sum(moment, Does.SEND), gathered_bytes=_sum(moment, Does.GATHER), reduced_bytes=_sum(moment, Does.REDUCE)))
        _apply(moment.after, pool, gathered)
    return tuple(made)


def _parameter_bytes(found: RankChunks, precision: Precision) -> int:
    on_host = (group for group in found.groups if group.home is Home.HOST)
    return next((precision.num_bytes * group.layout.chunk_elements for group in on_host), 0)


def _apply(ops: Iterable[Op], pool: set[tuple[int, int]], gathered: dict[tuple[int, int], int]) -> None:
    for op in ops:
        which = op.group, op.number
        if op.does is Does.FETCH:
            pool.add(which)
        elif op.does is Does.DROP:
            pool.discard(which)
        elif op.does is Does.GATHER:
            gathered[which] = op.num_bytes
        elif op.does is Does.RELEASE:
            gathered.pop(which, None)


def _sum(moment: Moment, does: Does) -> int:
    return sum(op.num_bytes for op in (*moment.before, *moment.after) if op.does is does)
