"""Sub-pipelined tensor parallelism of the two halves of a micro-batch (EQUATIONS P8).

All-reduces of one half run under the compute of the other. A pass through a block is a row of
*parts*, each computed for the first half and then for the second, and each but the last ended by an
all-reduce that its half waits for: attention A, feed-forward M, and the rest (a residual sum). One
stream computes, one sends, both in order. With x the seconds of half a part and c those of its
all-reduce,

    comp(j) = max(comp(j-1), ar of the same half, one part before) + x_j   j over A1, A2, M1, M2
    ar(j)   = max(ar(j-1), comp(j)) + c_j

Level 1 divides only the product whose result is all-reduced, level 2 a block, level 3 the blocks of
a stage without waiting between them. With X = sum of 2 x, and c at most half an attention or
feed-forward: X + 4c undivided, X + 2c, X + c and X; where communication bounds level 3, 4c (Lai et
al. 2022, "Merak", arXiv 2206.04959, section 4.3). Numbers in, seconds out. Left out: hidden
communication slows the compute down (costmodels/layers/halved_layer.py adds it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

HALVES = 2
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class HalfTime:
    """Seconds of one half: its compute, and the all-reduce that ends it (0 for none)."""

    compute_s: float
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _State:
    """Times at which compute and link are free, and at which each half may go on."""

    compute_s: float = 0.0
    link_s: float = 0.0
    ready_s: tuple[float, float] = (0.0, 0.0)

    @property
    def end_s(self) -> float:
        return max(self.compute_s, *self.ready_s)


def _after(parts: Iterable[HalfTime], state: _State) -> _State:
    """The state after `parts` have run from `state`: the recursion."""
    for part in parts:
        ready_s = []
        for before_s in state.ready_s:
            done_s = max(state.compute_s, before_s) + part.compute_s
            sent_s = max(state.link_s, done_s) + part.sent_s if part.sent_s else done_s
            ready_s.append(sent_s)
            state = replace(state, compute_s=done_s, link_s=sent_s if part.sent_s else state.link_s)
        state = replace(state, ready_s=(ready_s[0], ready_s[1]))
    return state


def block_s(parts: Sequence[HalfTime]) -> float:
    """Seconds of one pass through a block that begins and ends with both halves (level 2)."""
    return _after(parts, _State()).end_s


def row_s(parts: Sequence[HalfTime], blocks: int) -> float:
    """Seconds of one pass through so many equal blocks without waiting between them (level 3).

    The recursion runs over all of them. The operators of a half between the last all-reduce of a
    block and the first of the next are one part. It takes block_s + (blocks - 1) pace_s, exactly.
    """
    last = _last_sent(parts)
    return _after(
        [*parts[: last + 1], *_sending_last(parts) * (blocks - 1), *parts[last + 1 :]], _State()
    ).end_s


def pace_s(parts: Sequence[HalfTime]) -> float:
    """Seconds that one more block takes in a row of blocks (level 3).

    The state between blocks is linear in the algebra of max and +; its eigenvalue, the greatest
    mean over the cycles of its three times, is the pace (Baccelli et al. 1992, "Synchronization and
    Linearity", theorem 3.23). For A and M with one c: the most of X, 4c, 4 x_A / 2 + 2c, 4 x_M / 2
    + 2c.
    """
    grown = [_row_of(parts, begin) for begin in range(3)]
    cycles = (cycle for length in (1, 2, 3) for cycle in permutations(range(3), length))
    return max(
        sum(grown[a][b] for a, b in zip(c, (*c[1:], c[0]), strict=True)) / len(c) for c in cycles
    )


def _row_of(parts: Sequence[HalfTime], begin: int) -> tuple[float, float, float]:
    """Times at which compute is free and the halves may go on after a block.

    Before the block the time with index `begin` is 0, the other two never come. Between blocks the
    link is free once the second half may go on, or before: it has no time of its own.
    """
    times = [0.0 if index == begin else _NEVER for index in range(3)]
    after = _after(_sending_last(parts), _State(times[0], times[2], (times[1], times[2])))
    return after.compute_s, *after.ready_s


def _last_sent(parts: Sequence[HalfTime]) -> int:
    return max((index for index, part in enumerate(parts) if part.sent_s), default=len(parts) - 1)


def _sending_last(parts: Sequence[HalfTime]) -> list[HalfTime]:
    """The block from all-reduce to all-reduce: its end joins the beginning of the next."""
    last = _last_sent(parts)
    first = parts[0]
    after_s = sum(part.compute_s for part in parts[last + 1 :])
    return [replace(first, compute_s=first.compute_s + after_s), *parts[1 : last + 1]]


def linear_s(product_s: float, sent_s: float) -> float:
    """Seconds of one all-reduced product whose halves are sent as they come (level 1).

    2 x + c + max(0, c - x)       x = `product_s` and c = `sent_s` of one half
    """
    return HALVES * product_s + sent_s + max(0.0, sent_s - product_s)
