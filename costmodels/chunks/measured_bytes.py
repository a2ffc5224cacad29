"""Chunk schedules under measured bytes outside of chunks, and the warm-up that measures them.

The bytes outside of chunks are predicted before a run (EQUATIONS M6). A run can measure them
instead, as PatrickStar's memory tracer does (arXiv:2108.05818, section 8). Until it has, chunks may
fill a small share of the budget, however much the rest of a device holds. After that the schedule
of EQUATIONS O7 is made again with the measured bytes of every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from parplan.costmodels.chunks.accesses import layer_passes
from parplan.costmodels.chunks.chunk_budget import NonChunkBytes, non_chunk_bytes
from parplan.costmodels.chunks.chunk_memory import budget_bytes, chunks_of_rank
from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.strategy import Strategy

# Share of the budget for chunks before anything is measured: PatrickStar's default
# (warmup_gpu_chunk_mem_ratio, github.com/Tencent/PatrickStar, patrickstar/core/client.py).
WARM_UP_SHARE = 0.1
_AMPLE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkScheduler:
    """Makes the chunk schedule of one pipeline rank for other bytes outside of its chunks.

    named    gives the tensors of a schedule the names that a run knows
    """

    strategy: Strategy
    rank: int
    price_cache: LayerPriceCache
    named: Callable[[RankChunks], RankChunks] = lambda chunks: chunks

    def planned(self) -> RankChunks:
        """Returns the schedule of the plan. Raises InfeasibleError."""
        return self.named(chunks_of_rank(self.strategy, self.rank, self.price_cache))

    def predicted(self) -> NonChunkBytes:
        """Returns the predicted bytes outside of chunks."""
        return non_chunk_bytes(
            self.strategy, self.rank, layer_passes(self.strategy, self.rank), self.price_cache
        )

    def warm_up(self, share: float = WARM_UP_SHARE) -> RankChunks:
        """Returns the schedule in which chunks fill `share` of the budget, or the least they can.

        It counts no bytes but those of chunks.
        """
        nothing = no_bytes(len(self.planned().moments))
        least = self._schedule(nothing, _AMPLE).smallest_bytes
        return self._schedule(nothing, max(least, int(share * self._budget)))

    def corrected(self, measured: NonChunkBytes) -> RankChunks:
        """Returns the schedule for measured bytes outside of chunks.

        Raises InfeasibleError where the budget is too small for them.
        """
        return self._schedule(measured, self._budget)

    @property
    def _budget(self) -> int:
        return budget_bytes(self.rank, self.strategy.layout.mesh, self.price_cache)

    def _schedule(self, outside: NonChunkBytes, device_bytes: int) -> RankChunks:
        return self.named(
            rank_chunks(
                self.strategy,
                self.rank,
                self.price_cache,
                eviction=self.price_cache.chunking.eviction,
                device_bytes=device_bytes,
                outside=outside,
            )
        )


def by_moment(outside: NonChunkBytes, chunks: RankChunks) -> list[tuple[str, int]]:
    """Returns the name and bytes of every moment, of the gap before it, and of the update."""
    named: list[tuple[str, int]] = []
    for index, moment in enumerate(chunks.moments):
        rest = outside.rests[index] + outside.made[index]
        named.append((f"before the {moment}", outside.gaps[index]))
        named.append((str(moment), max(outside.moments[index], rest)))
    return [*named, ("the update", max(outside.gaps[-1], outside.end))]


def no_bytes(num_moments: int) -> NonChunkBytes:
    """Returns a device with nothing outside of its chunks."""
    none = (0,) * num_moments
    return NonChunkBytes(moments=none, gaps=(0, *none), rests=none, made=none, end=0)


def most_of(measured: Sequence[NonChunkBytes]) -> NonChunkBytes:
    """Returns the most bytes of several steps or devices, moment by moment."""
    rows = {
        field.name: [getattr(each, field.name) for each in measured]
        for field in fields(NonChunkBytes)
    }
    end = max(rows.pop("end"))
    return NonChunkBytes(
        **{name: tuple(map(max, zip(*several, strict=True))) for name, several in rows.items()},
        end=end,
    )
