"""DualPipeV: whole and split backwards in turn with forwards, on stages folded into a V.

It is DeepSeek's DualPipe (arXiv:2412.19437, section 3.2.1) cut in half: rank r of P holds virtual
stages r and 2 P - 1 - r, as in ZBV. The lists are those of deepseek-ai/DualPipe at 3da1bbe,
dualpipe/dualpipev.py (DualPipeV.step): forwards fill the V, then a forward of one chunk comes with
a backward of the other, so that the exchanges of experts of either can run under the other.
Backwards are split where a rank would wait: while the V fills, and in the second half of its
emptying. Weight gradients follow first in, first out. A step has M >= 2 P micro-batches.

With F, B and W of a chunk's forward, whole backward and weight gradient, a rank idles at most

    (P - 1) (F + 2 B - 3 W)

which the README of the repository has for a forward and a backward that are one pass. Here they are
two, and it idles P - 1 parts where F, W and B - W are equal, as under ZBV, and less where they are
not. It holds 2 P + 1 chunk stashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import count

from parplan.costmodels.schedules.actions import Action, ActionKind
from parplan.costmodels.schedules.zero_bubble import FIRST, SECOND


def fewest_micro_batches(num_ranks: int) -> int:
    """The fewest micro-batches of a step."""
    return 2 * num_ranks


def stashes(num_ranks: int) -> int:
    """The largest number of chunk stashes that every rank holds at once."""
    return 2 * num_ranks + 1


@lru_cache(maxsize=1024)
def dual_pipe_list(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    """Returns the actions of a rank in the order it runs them."""
    return tuple(_numbered(_steps(rank, num_ranks, num_micro_batches)))


def _steps(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[tuple[ActionKind, int]]:
    """Yields the passes of a rank by chunk, in the order and by the numbers of `DualPipeV.step`.

    A weight gradient is that of the oldest input gradient, of whichever chunk.
    """
    forward, whole = ActionKind.FORWARD, ActionKind.BACKWARD
    part, weights = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
    after = num_ranks - rank - 1
    yield from [(forward, FIRST)] * (2 * after)
    yield from [(forward, FIRST), (forward, SECOND)] * (rank + 1)
    yield from [(part, SECOND), (weights, SECOND), (forward, SECOND)] * after
    in_turn = [(forward, FIRST), (whole, SECOND), (forward, SECOND), (whole, FIRST)]
    yield from in_turn * (num_micro_batches - 2 * num_ranks + rank + 1)
    yield from [(whole, SECOND), (forward, SECOND), (whole, FIRST)] * after
    for i in range(rank + 1):
        half = (rank + 1) // 2
        yield part if i > half or (i == half and rank % 2) else whole, SECOND
        yield part if i >= half else whole, FIRST
    yield from [(weights, FIRST), (part, FIRST)] * after
    yield from [(weights, FIRST)] * (rank + 1)


def _numbered(steps: Iterator[tuple[ActionKind, int]]) -> Iterator[Action]:
    """Yields the actions: micro-batches in order, weight gradients as their inputs' came."""
    forwards = (count(), count())
    backwards = (count(), count())
    waiting: deque[Action] = deque()
    for work, chunk in steps:
        if work is ActionKind.WEIGHT_GRADIENT:
            yield waiting.popleft()
            continue
        numbers = forwards if work is ActionKind.FORWARD else backwards
        action = Action(work, chunk, next(numbers[chunk]))
        if work is ActionKind.INPUT_GRADIENT:
            waiting.append(Action(ActionKind.WEIGHT_GRADIENT, action.chunk, action.micro_batch))
        yield action
