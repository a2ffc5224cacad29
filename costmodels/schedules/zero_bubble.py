"""The zero-bubble schedule ZBV: split backwards, two chunks a rank, folded into a V (EQUATIONS P6).

Rank r of P holds virtual stages r and 2 P - 1 - r, so that the first and the last stage are on rank
0 and a micro-batch comes back to the rank where it entered (Qi et al. 2024, Pipeline Parallelism
with Controllable Memory, arXiv:2405.15362, section 4; the split of the backward: Qi et al. 2023,
Zero Bubble Pipeline Parallelism, arXiv:2401.10241). With forwards, input gradients and weight
gradients of equal length a step of M >= 2 P - 1 micro-batches takes 6 M + P - 1 of them: the useful
6 M, and the first wait of the last rank.

Those papers give the pattern of a rank's list; its making here is [derived]:

- order of forwards (a first chunk, b second) and input gradients (A, B): 2 (P - r) - 1 times a; r
  times b a; P - r times b B; then a A b B in turn. Actions without a micro-batch are left out.
- a weight gradient follows its input gradient at once while the rank has forwards to run, on the
  stage that ends the model (its output is the largest of all), and when one stash more would be
  above the peak; otherwise it fills the rank's waiting time, which is known from running all ranks
  in steps of equal length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from parplan.costmodels.schedules.actions import Action, ActionKind

FIRST, SECOND = 0, 1


def stage_of(chunk: int, rank: int, num_ranks: int) -> int:
    """The virtual stage of a rank's chunk."""
    return rank if chunk == FIRST else 2 * num_ranks - 1 - rank


def most_stashes(rank: int, num_ranks: int, num_micro_batches: int) -> int:
    """The largest number of chunk stashes that the rank holds at once, in closed form.

        min(2 P, M + min(M, r + 1))

    It is the count of `zbv_lists`. A weight gradient that waits holds, besides its stash, the
    gradients of its operators' outputs; stashes and waiting weight gradients together are never
    more than this and one.
    """
    return min(2 * num_ranks, num_micro_batches + min(num_micro_batches, rank + 1))


@lru_cache(maxsize=64)
def zbv_lists(num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns by rank the actions in the order it runs them."""
    ranks = [_Rank(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    over: set[tuple[ActionKind, int, int]] = set()
    running = True
    while running:
        started = [rank.start(over) for rank in ranks]
        over.update(passed for passed in started if passed)
        running = any(started)
    assert not any(rank.todo for rank in ranks), (
        f"zbv on {num_ranks} ranks with {num_micro_batches} micro-batches does not end"
    )
    return tuple(tuple(rank.done) for rank in ranks)


def _order(rank: int, num_ranks: int, num_micro_batches: int) -> Iterator[Action]:
    """Yields the forwards and input gradients of a rank in order.

    There are as many micro-batches as the pattern needs to fill.
    """
    count = max(num_micro_batches, 2 * num_ranks - 1)
    lead, second_alone = 2 * (num_ranks - rank) - 1, num_ranks - rank
    yield from (Action(ActionKind.FORWARD, FIRST, i) for i in range(lead))
    for i in range(rank):
        yield Action(ActionKind.FORWARD, SECOND, i)
        yield Action(ActionKind.FORWARD, FIRST, lead + i)
    for i in range(second_alone):
        yield Action(ActionKind.FORWARD, SECOND, rank + i)
        yield Action(ActionKind.INPUT_GRADIENT, SECOND, i)
    for i in range(count):
        yield Action(ActionKind.FORWARD, FIRST, lead + rank + i)
        yield Action(ActionKind.INPUT_GRADIENT, FIRST, i)
        yield Action(ActionKind.FORWARD, SECOND, num_ranks + i)
        yield Action(ActionKind.INPUT_GRADIENT, SECOND, second_alone + i)


class _Rank:
    """One rank in steps of equal length: its remaining actions and waiting weight gradients."""

    def __init__(self, rank: int, num_ranks: int, num_micro_batches: int) -> None:
        self.todo = deque(
            action
            for action in _order(rank, num_ranks, num_micro_batches)
            if action.micro_batch < num_micro_batches
        )
        self.waiting: deque[Action] = deque()
        self.done: list[Action] = []
        self._stages = stage_of(FIRST, rank, num_ranks), stage_of(SECOND, rank, num_ranks)
        self._last = 2 * num_ranks - 1
        self._most = most_stashes(rank, num_ranks, num_micro_batches)
        self._forwards, self._held = 2 * num_micro_batches, 0

    def start(self, over: set[tuple[ActionKind, int, int]]) -> tuple[ActionKind, int, int] | None:
        """Starts the next action, given the passes that are over; None when the rank waits."""
        action = self._next(over)
        if action is None:
            return None
        if action.work is ActionKind.FORWARD:
            self._forwards -= 1
            self._held += 1
        elif action.work is ActionKind.INPUT_GRADIENT:
            self.waiting.append(
                Action(ActionKind.WEIGHT_GRADIENT, action.chunk, action.micro_batch)
            )
        else:
            self._held -= 1
        self.done.append(action)
        return action.work, self._stages[action.chunk], action.micro_batch

    def _next(self, over: set[tuple[ActionKind, int, int]]) -> Action | None:
        waiting = self.waiting
        if waiting and (
            self._forwards
            or self._stages[waiting[0].chunk] == self._last
            or self._held + len(waiting) > self._most
        ):
            return waiting.popleft()
        if self.todo and self._arrived(self.todo[0], over):
            return self.todo.popleft()
        return waiting.popleft() if waiting else None

    def _arrived(self, action: Action, over: set[tuple[ActionKind, int, int]]) -> bool:
        stage = self._stages[action.chunk]
        if action.work is ActionKind.FORWARD:
            return stage == 0 or (ActionKind.FORWARD, stage - 1, action.micro_batch) in over
        if stage == self._last:
            return (ActionKind.FORWARD, stage, action.micro_batch) in over
        return (ActionKind.INPUT_GRADIENT, stage + 1, action.micro_batch) in over
