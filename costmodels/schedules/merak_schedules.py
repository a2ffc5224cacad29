"""Merak's schedules: 1F1B with recompute while a stage waits for the gradient (R in the lists).

Lai et al. 2023, Merak, arXiv:2206.04959, section 4; the orders are those of its public code, and
EQUATIONS P4 has the length of their steps. Stage s of P; f' is a forward whose recompute runs ahead
of its gradient; everything else is as in 1F1B:

    early recompute     the cool-down, the last P - 1 - s micro-batches, is R b on every stage
    last-no-recompute   the last stage, which holds one micro-batch, recomputes nothing. Stage P - 2
                        recomputes its first micro-batch while it waits for the first gradient: f'0
                        F1 R0 b0 F2 B1 F3 B2 ..., cool-down B; the others as above
    SCP                 shifted critical path: the last stage recomputes nothing, and
        s = P - 2       one forward more goes before the first backward: f'0 f'1 F2 R0 b0 R1 b1 F3
                        B2 F4 B3 ..., cool-down B
        s = P - 3       f'0 F1 F2 R0 b0 F3 B1 ..., cool-down R b
        s < P - 3       as early recompute

Stage P - 2 of the last two could run R b in its cool-down as well, and would never end later; Merak
does not. [derived]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from parplan.costmodels.schedules.actions import Action, ActionKind

# micro-batches of a step of SCP: three before the first backward of stage P - 2, one after it
SHIFTED_FEWEST = 4
SHIFTED_STASHES = 3  # stashes that stage P - 2 holds


def early_list(order: Sequence[Action], rank: int, num_ranks: int) -> tuple[Action, ...]:
    """Returns the actions of a rank under early recompute; `order` is its list of 1F1B."""
    return tuple(_with_recompute(order, _cool_down(order, rank, num_ranks)))


def last_list(order: Sequence[Action], rank: int, num_ranks: int) -> tuple[Action, ...]:
    """Returns the actions of a rank under last-no-recompute.

    The last stage has no R, and none of its B includes a recompute.
    """
    if rank != num_ranks - 2:
        return early_list(order, rank, num_ranks)
    return tuple(_with_recompute(order, (0,)))


def shifted_list(order: Sequence[Action], rank: int, num_ranks: int) -> tuple[Action, ...]:
    """Returns the actions of a rank under SCP.

    It needs at least SHIFTED_FEWEST micro-batches and as many as ranks.
    """
    if rank == num_ranks - 3:
        return tuple(_with_recompute(order, (0, *_cool_down(order, rank, num_ranks))))
    if rank != num_ranks - 2:
        return early_list(order, rank, num_ranks)
    forward_0, forward_1, backward_0, forward_2, *rest = order
    return tuple(_with_recompute((forward_0, forward_1, forward_2, backward_0, *rest), (0, 1)))


def _cool_down(order: Sequence[Action], rank: int, num_ranks: int) -> range:
    """The micro-batches whose backward comes after the last forward of 1F1B."""
    num_micro_batches = len(order) // 2
    return range(max(0, num_micro_batches - (num_ranks - 1 - rank)), num_micro_batches)


def _with_recompute(order: Iterable[Action], micro_batches: Iterable[int]) -> Iterator[Action]:
    """Yields `order` with the recompute of `micro_batches` ahead of their backward."""
    ahead = frozenset(micro_batches)
    for action in order:
        if action.work is ActionKind.BACKWARD and action.micro_batch in ahead:
            yield Action(ActionKind.RECOMPUTE, action.chunk, action.micro_batch)
        yield action
