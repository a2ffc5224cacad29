"""Pipeline schedules: the action list of each pipeline rank, and its consequences in closed form.

Most schedules here have one shape (EQUATIONS P1, M4). A rank knows the order of its forwards and
the order of its backwards; it runs `warm-up` forwards, then one forward and one backward in turn
until the forwards are used up, then the remaining backwards. The schedules differ only in the two
orders and in the length of the warm-up:

    GPipe         M                                 Huang et al. 2019, arXiv:1811.06965
    1F1B          min(M, P - rank - 1)              Narayanan et al. 2019 (PipeDream), 2021; with a
                  flush per step
    interleaved   min(M v, 2 (P - rank - 1) + (v - 1) P)
                                                    Narayanan et al. 2021, arXiv:2104.04473, section
                                                    2.2 (Megatron-LM)

P pipeline ranks, M micro-batches per step, v virtual stages (model chunks) per rank. Chunk c of
rank r is virtual stage c P + r of the P v stages that a micro-batch walks through.

Early recompute, last-no-recompute and the shifted critical path are 1F1B with recompute ahead of
the gradient, the last with one forward more on one stage (costmodels/schedules/merak_schedules.py).
Three schedules have another shape: ZBV and DualPipeV split backwards and fold the stages into a V
(costmodels/schedules/zero_bubble.py, costmodels/schedules/dual_pipe.py), and a custom one is the
lists in its plan (costmodels/schedules/actions.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache

from parplan.costmodels.schedules.actions import Action, ActionKind, csv_row
from parplan.costmodels.schedules.dual_pipe import (
    dual_pipe_list,
    fewest_micro_batches,
    stashes,
)
from parplan.costmodels.schedules.merak_schedules import (
    SHIFTED_FEWEST,
    SHIFTED_STASHES,
    early_list,
    last_list,
    shifted_list,
)
from parplan.costmodels.schedules.zero_bubble import most_stashes, stage_of, zbv_lists
from parplan.profiles.errors import ConfigError


class Schedule(StrEnum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    EARLY_RECOMPUTE = "early-recompute"
    LAST_NO_RECOMPUTE = "last-no-recompute"
    SCP = "scp"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"
    CUSTOM = "custom"


MOST_PASSES = 2_000_000  # of a step, which is simulated pass by pass: 10 to 20 s
V_SHAPED = frozenset({Schedule.ZBV, Schedule.DUALPIPEV})  # stages go down the ranks and up again
SPLIT = V_SHAPED  # schedules with split backwards; a custom one may have them
# schedules that recompute ahead of the gradient; a custom one may
AHEAD = frozenset({Schedule.EARLY_RECOMPUTE, Schedule.LAST_NO_RECOMPUTE, Schedule.SCP})
# schedules that forbid recompute on the last stage
LAST_KEEPS_ALL = frozenset({Schedule.LAST_NO_RECOMPUTE, Schedule.SCP})


def rank_of(schedule: Schedule, stage: int, num_ranks: int) -> int:
    """Returns the pipeline rank of a virtual stage; custom schedules are excluded.

    Ranks follow each other round and round, in a V down and up again.
    """
    if schedule in V_SHAPED:
        return min(stage, 2 * num_ranks - 1 - stage)
    return stage % num_ranks


def stages_of(
    schedule: Schedule, rank: int, num_ranks: int, virtual_stages: int
) -> tuple[int, ...]:
    """Returns the virtual stages of a pipeline rank, by chunk; custom schedules are excluded."""
    if schedule in V_SHAPED:
        return tuple(stage_of(chunk, rank, num_ranks) for chunk in range(virtual_stages))
    return tuple(range(rank, num_ranks * virtual_stages, num_ranks))


def csv_rows(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[str, ...]:
    """Returns the action lists of all ranks as compute-only CSV of torch.distributed.pipelining.

    Raises ConfigError when the schedule is not `legal` for these counts.
    """
    return tuple(
        csv_row(
            actions(schedule, rank, num_ranks, num_micro_batches, virtual_stages),
            stages_of(schedule, rank, num_ranks, virtual_stages),
        )
        for rank in range(num_ranks)
    )


def actions(
    schedule: Schedule, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> tuple[Action, ...]:
    """Returns the actions of pipeline rank `rank` in order; a custom schedule has them in its plan.

    Each (chunk, micro-batch) occurs once as a forward and once as a backward, whole or in two
    parts, or after its recompute. Backwards run oldest micro-batch first, in GPipe too, as in
    torch.distributed.pipelining (the GPipe paper draws them newest first; the step is as long).
    Raises ConfigError when the schedule is not `legal` for these counts.
    """
    _require_legal(schedule, num_ranks, num_micro_batches, virtual_stages)
    if schedule is Schedule.ZBV:
        return zbv_lists(num_ranks, num_micro_batches)[rank]
    if schedule is Schedule.DUALPIPEV:
        return dual_pipe_list(rank, num_ranks, num_micro_batches)
    group = num_ranks if schedule is Schedule.INTERLEAVED else num_micro_batches
    forwards, backwards = _orders(num_micro_batches, virtual_stages, group)
    warm_up = _warm_up(schedule, rank, num_ranks, num_micro_batches, virtual_stages)
    steady = len(forwards) - warm_up
    in_turn = (
        action
        for pair in zip(forwards[warm_up:], backwards[:steady], strict=True)
        for action in pair
    )
    order = (*forwards[:warm_up], *in_turn, *backwards[steady:])
    return _AHEAD_LISTS[schedule](order, rank, num_ranks) if schedule in AHEAD else order


_AHEAD_LISTS = {
    Schedule.EARLY_RECOMPUTE: early_list,
    Schedule.LAST_NO_RECOMPUTE: last_list,
    Schedule.SCP: shifted_list,
}


def legal(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> str | None:
    """Returns None when the schedule exists for these counts, else the reason in words.

    Interleaved: P >= 2, v >= 2 and M a multiple of P (Narayanan et al. 2021, section 2.2). GPipe
    and 1F1B: v = 1. ZBV: P >= 2 and v = 2. DualPipeV also M >= 2 P. Early recompute,
    last-no-recompute, SCP: v = 1 and P >= 2, since one rank waits for nobody and is 1F1B. SCP also
    M >= max(4, P), Merak's own rule and that of its closed form (EQUATIONS P4): stage P - 2 has
    three forwards before its first backward, and the pipeline must fill.
    `parplan.costmodels.schedules.actions.check_rows` has the rules of a custom schedule.
    """
    if min(num_ranks, num_micro_batches, virtual_stages) < 1:
        return (
            "a pipeline needs at least one rank, micro-batch and virtual stage, "
            f"found {num_ranks} ranks, {num_micro_batches} micro-batches "
            f"and {virtual_stages} virtual stages"
        )
    passes = 2 * num_ranks * virtual_stages * num_micro_batches
    if passes > MOST_PASSES:
        return (
            f"a step of {num_micro_batches:,} micro-batches on {num_ranks * virtual_stages} stages "
            f"is {passes:,} forward and backward passes, at most {MOST_PASSES:,} are planned"
        )
    if schedule is Schedule.CUSTOM:
        return None
    if schedule in V_SHAPED:
        return _no_v(schedule, num_ranks, num_micro_batches, virtual_stages)
    if schedule is not Schedule.INTERLEAVED:
        if virtual_stages != 1:
            return f"{schedule} has 1 virtual stage per rank, found {virtual_stages}"
        if schedule not in AHEAD:
            return None
        return _no_recompute_ahead(schedule, num_ranks, num_micro_batches)
    if num_ranks < 2:
        return "interleaved needs at least 2 pipeline ranks, found 1"
    if virtual_stages < 2:
        return "interleaved needs at least 2 virtual stages per rank, found 1"
    if num_micro_batches % num_ranks:
        return (
            f"interleaved needs micro-batches in multiples of the {num_ranks} pipeline ranks, "
            f"found {num_micro_batches}"
        )
    return None


def _no_v(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> str | None:
    """The `legal` of schedules whose stages are folded into a V."""
    if num_ranks < 2:
        return f"{schedule} needs at least 2 pipeline ranks, found 1"
    if virtual_stages != 2:
        return f"{schedule} has 2 virtual stages per rank, found {virtual_stages}"
    fewest = fewest_micro_batches(num_ranks) if schedule is Schedule.DUALPIPEV else 1
    if num_micro_batches < fewest:
        return (
            f"{schedule} on {num_ranks} pipeline ranks needs at least {fewest} micro-batches, "
            f"found {num_micro_batches}"
        )
    return None


def _no_recompute_ahead(schedule: Schedule, num_ranks: int, num_micro_batches: int) -> str | None:
    """The `legal` of Merak's schedules with one virtual stage per rank."""
    if num_ranks < 2:
        return f"{schedule} needs at least 2 pipeline ranks, found 1"
    fewest = max(SHIFTED_FEWEST, num_ranks)
    if schedule is Schedule.SCP and num_micro_batches < fewest:
        return (
            f"{schedule} on {num_ranks} pipeline ranks needs at least {fewest} micro-batches, "
            f"found {num_micro_batches}"
        )
    return None


@lru_cache(maxsize=65536)
def in_flight(
    schedule: Schedule, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1
) -> int:
    """The largest number of (chunk, micro-batch) stashes that the rank holds at once.

        min(M v, warm-up + 1)

        GPipe         M
        1F1B          min(M, P - rank)
        interleaved   min(M v, 2 (P - rank - 1) + (v - 1) P + 1)

    A steady-state forward comes before the backward of its turn, hence the + 1 (EQUATIONS M4; the
    count of `actions`). Interleaved counts chunk-stashes, each about 1/v of the rank's layers; so
    do ZBV (`most_stashes`) and DualPipeV (2 P + 1). Early recompute, last-no-recompute and SCP hold
    as many as 1F1B, but stage P - 2 of SCP holds 3. Custom schedules are excluded. Raises
    ConfigError when the schedule is not `legal` for these counts.
    """
    _require_legal(schedule, num_ranks, num_micro_batches, virtual_stages)
    if schedule is Schedule.ZBV:
        return most_stashes(rank, num_ranks, num_micro_batches)
    if schedule is Schedule.DUALPIPEV:
        return stashes(num_ranks)
    if schedule is Schedule.SCP and rank == num_ranks - 2:
        return SHIFTED_STASHES
    warm_up = _warm_up(schedule, rank, num_ranks, num_micro_batches, virtual_stages)
    return min(num_micro_batches * virtual_stages, warm_up + 1)


def uniform_step_s(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, virtual_stages: int, stage_s: float
) -> float:
    """Seconds of one step when all virtual stages cost the same and communication is free.

        t = (M + (P - 1) / v) stage_s

    stage_s = F + B + R of one micro-batch on the whole rank (all its chunks). The bubble is (P - 1)
    / (v M) of the useful time. EQUATIONS P1; Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    Schedules that split the backward or recompute ahead are excluded: their bubble depends on the
    parts (`recomputed_step_s`). Leaves out: transfers, gradient synchronisation, optimizer. Raises
    ConfigError when the schedule is not `legal`.
    """
    _require_legal(schedule, num_ranks, num_micro_batches, virtual_stages)
    return (num_micro_batches + (num_ranks - 1) / virtual_stages) * stage_s


def recomputed_step_s(
    schedule: Schedule,
    num_ranks: int,
    num_micro_batches: int,
    forward_s: float,
    backward_s: float,
    recompute_s: float,
) -> float:
    """Seconds of one step of equal stages under full recompute, where communication is free.

        early-recompute     (M + P - 1) (F + B) + M R
        last-no-recompute   (M + P - 1) (F + B) + (M - 2) R                    for M >= max(3, P)
        scp                 (M + P - 1) (F + B) + (M - 2) R - min(R, B - F)
                            and at P = 2, min(R, B - R) in place of min(R, B - F)

    F, B and R of one micro-batch. Exact for B >= F >= R (EQUATIONS P4, but for the row at P = 2,
    which is derived: no stage before P - 2 delays its fourth forward, and the formula above is
    right there where B >= 2 F or R = F). Other schedules that do not split the backward: as
    `uniform_step_s`. Raises ConfigError when the schedule is not `legal`, or a formula does not
    hold for these values.
    """
    _require_legal(schedule, num_ranks, num_micro_batches, 1)
    if schedule not in AHEAD:
        return uniform_step_s(
            schedule, num_ranks, num_micro_batches, 1, forward_s + backward_s + recompute_s
        )
    if not backward_s >= forward_s >= recompute_s or (
        schedule in LAST_KEEPS_ALL and num_micro_batches < max(3, num_ranks)
    ):
        raise ConfigError(
            f"the step of {schedule} has a closed form for backward >= forward >= recompute "
            f"and enough micro-batches, found {backward_s:g}, {forward_s:g}, {recompute_s:g} "
            f"and {num_micro_batches}",
            hint="simulate its lists",
        )
    through_s = (num_micro_batches + num_ranks - 1) * (forward_s + backward_s)
    if schedule is Schedule.EARLY_RECOMPUTE:
        return through_s + num_micro_batches * recompute_s
    spared_s = 0.0
    if schedule is Schedule.SCP:
        spared_s = min(recompute_s, backward_s - (forward_s if num_ranks > 2 else recompute_s))
    return through_s + (num_micro_batches - 2) * recompute_s - spared_s


def _warm_up(
    schedule: Schedule, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> int:
    """Forwards before the rank's first steady-state pair: the table of the module docstring."""
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    after = num_ranks - rank - 1
    warm_up = {
        Schedule.GPIPE: num_micro_batches,
        Schedule.INTERLEAVED: 2 * after + (virtual_stages - 1) * num_ranks,
    }.get(schedule, after)
    return min(warm_up, num_micro_batches * virtual_stages)


@lru_cache(maxsize=16)
def _orders(
    num_micro_batches: int, virtual_stages: int, group: int
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Forwards and backwards in order, the same on every rank.

    `group` micro-batches go through a chunk, then through the next. Backwards visit the chunks from
    the last to the first.
    """

    def order(work: ActionKind, chunks: range) -> Iterator[Action]:
        for first in range(0, num_micro_batches, group):
            for chunk in chunks:
                for micro_batch in range(first, first + group):
                    yield Action(work, chunk, micro_batch)

    chunks = range(virtual_stages)
    forwards = tuple(order(ActionKind.FORWARD, chunks))
    return forwards, tuple(order(ActionKind.BACKWARD, chunks[::-1]))


def _require_legal(
    schedule: Schedule, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> None:
    reason = legal(schedule, num_ranks, num_micro_batches, virtual_stages)
    if reason is not None:
        raise ConfigError(reason, hint="choose another schedule or other counts")
