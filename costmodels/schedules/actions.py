"""Actions of pipeline ranks, and their text: the compute-only CSV of torch.distributed.pipelining.

    0F3     forward of virtual stage 0 and micro-batch 3
    0B3     its backward (with its recompute, unless 0R3 was before): gradients of the input and of
            the weights
    0R3     its recompute ahead of the gradient, while the rank waits for the gradient
    0I3     the gradient of its input alone, which the stage before waits for
    0W3     the gradients of its weights, some time after 0I3 on the same rank

There is one line per pipeline rank, with actions separated by commas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from parplan.profiles.errors import ConfigError

_TEXT = re.compile(r"(\d{1,9})([FBIWR])(\d{1,9})", re.ASCII)
_CSV = (
    "one line per pipeline rank like 0F0,0F1,0B0,0B1: virtual stage, F, B, I, W or R, micro-batch"
)
_PASSES = "F B, F R B or F I W"
_CORRECT = "correct that line of the schedule"


class ActionKind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through the rank's local model chunk `chunk`.

    A backward includes its recompute unless R was before.
    """

    work: ActionKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.work}{self.chunk}.{self.micro_batch}"


def csv_row(order: Sequence[Action], stages: Sequence[int]) -> str:
    """Returns the CSV line of a rank whose chunk c is virtual stage `stages[c]`."""
    return ",".join(f"{stages[action.chunk]}{action.work}{action.micro_batch}" for action in order)


def parse_row(text: str, rank: int) -> tuple[tuple[int, ActionKind, int], ...]:
    """Returns (virtual stage, work, micro-batch) of every action of a rank. Raises ConfigError."""
    parsed = []
    for place, entry in enumerate(text.split(","), start=1):
        match = _TEXT.fullmatch(entry.strip())
        if match is None:
            raise ConfigError(
                f"pipeline.actions, rank {rank}, entry {place}: {entry.strip()!r} is no action",
                hint=f"write {_CSV}",
            )
        parsed.append((int(match[1]), ActionKind(match[2]), int(match[3])))
    return tuple(parsed)


def placement_of(rows: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns by rank the virtual stages that its line names, ascending. Raises ConfigError."""
    return tuple(
        tuple(sorted({stage for stage, _, _ in parse_row(text, rank)}))
        for rank, text in enumerate(rows)
    )


def orders_of(rows: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Returns the action lists of CSV lines, by rank. Raises ConfigError.

    Chunks are numbered as in `placement_of`.
    """
    orders = []
    for rank, text in enumerate(rows):
        parsed = parse_row(text, rank)
        chunk = {
            stage: index for index, stage in enumerate(sorted({stage for stage, _, _ in parsed}))
        }
        orders.append(
            tuple(Action(work, chunk[stage], micro_batch) for stage, work, micro_batch in parsed)
        )
    return tuple(orders)


def check_rows(
    rows: Sequence[str], num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> dict[int, int]:
    """Returns the rank of every virtual stage of a step that every rank can finish.

    Raises ConfigError unless every virtual stage is on one rank, `virtual_stages` are on each,
    every micro-batch passes through every stage once forward and once backward, the backward whole
    (B), after its recompute (R, later B) or in two parts (I, later W), and no rank waits for
    another that waits for it.
    """
    if len(rows) != num_ranks:
        raise ConfigError(
            f"pipeline.actions: {len(rows)} lines for {num_ranks} pipeline ranks",
            hint=f"give {_CSV}",
        )
    parsed = [parse_row(text, rank) for rank, text in enumerate(rows)]
    rank_of_stage = _ranks_of_stages(parsed, virtual_stages)
    for rank, actions in enumerate(parsed):
        _check_rank(actions, rank, num_micro_batches)
    _check_ends(parsed, len(rank_of_stage))
    return rank_of_stage


def _ranks_of_stages(
    parsed: Sequence[Sequence[tuple[int, ActionKind, int]]], virtual_stages: int
) -> dict[int, int]:
    """Returns the rank of every virtual stage."""
    num_stages = len(parsed) * virtual_stages
    rank_of_stage: dict[int, int] = {}
    for rank, actions in enumerate(parsed):
        stages = sorted({stage for stage, _, _ in actions})
        for stage in stages:
            if rank_of_stage.setdefault(stage, rank) != rank:
                raise ConfigError(
                    f"pipeline.actions: virtual stage {stage} is on rank {rank_of_stage[stage]} "
                    f"and on rank {rank}",
                    hint=_CORRECT,
                )
            if stage >= num_stages:
                raise ConfigError(
                    f"pipeline.actions, rank {rank}: virtual stage {stage}, there are {num_stages}",
                    hint=_CORRECT,
                )
        if len(stages) != virtual_stages:
            raise ConfigError(
                f"pipeline.actions, rank {rank}: it has virtual stages {stages}, "
                f"not {virtual_stages} of them",
                hint=_CORRECT,
            )
    return rank_of_stage


def _check_rank(
    actions: Sequence[tuple[int, ActionKind, int]], rank: int, num_micro_batches: int
) -> None:
    """Checks that each pass runs once, and the passes of a stage and micro-batch in order."""
    done: dict[tuple[int, int], str] = {}
    for stage, work, micro_batch in actions:
        where = f"pipeline.actions, rank {rank}: {stage}{work}{micro_batch}"
        if micro_batch >= num_micro_batches:
            raise ConfigError(
                f"{where} is of micro-batch {micro_batch}, there are {num_micro_batches}",
                hint=_CORRECT,
            )
        before = done.get((stage, micro_batch), "")
        if before + work not in ("F", "FB", "FR", "FRB", "FI", "FIW"):
            raise ConfigError(
                f"{where} comes after {before or 'nothing'} of that stage and micro-batch; "
                f"it must be {_PASSES}",
                hint=_CORRECT,
            )
        done[stage, micro_batch] = before + work
    for stage in sorted({stage for stage, _, _ in actions}):
        for micro_batch in range(num_micro_batches):
            had = done.get((stage, micro_batch), "")
            if had not in ("FB", "FRB", "FIW"):
                raise ConfigError(
                    f"pipeline.actions, rank {rank}: stage {stage} and micro-batch {micro_batch} "
                    f"have {had or 'nothing'}, not {_PASSES}",
                    hint=_CORRECT,
                )


def _check_ends(parsed: Sequence[Sequence[tuple[int, ActionKind, int]]], num_stages: int) -> None:
    """Runs the lists without durations; the actions that are left wait forever."""
    over: set[tuple[str, int, int]] = set()
    todo = [list(reversed(actions)) for actions in parsed]
    moved = True
    while moved:
        moved = False
        for rest in todo:
            while rest and _arrived(rest[-1], over, num_stages):
                stage, work, micro_batch = rest.pop()
                over.add((_passed(work), stage, micro_batch))
                moved = True
    stuck = [
        f"rank {rank} at {rest[-1][0]}{rest[-1][1]}{rest[-1][2]}"
        for rank, rest in enumerate(todo)
        if rest
    ]
    if stuck:
        raise ConfigError(
            f"pipeline.actions: the ranks wait for each other for ever: {', '.join(stuck)}",
            hint="change the order there",
        )


def _passed(work: ActionKind) -> str:
    """The pass that neighbours wait for: a forward or the gradient of the input."""
    return {ActionKind.BACKWARD: "I"}.get(work, work.value)


def _arrived(
    action: tuple[int, ActionKind, int], over: set[tuple[str, int, int]], num_stages: int
) -> bool:
    """Returns true when the inputs of the action from other stages have arrived."""
    stage, work, micro_batch = action
    if work is ActionKind.FORWARD:
        return stage == 0 or ("F", stage - 1, micro_batch) in over
    if work in (ActionKind.WEIGHT_GRADIENT, ActionKind.RECOMPUTE):
        return True
    return stage == num_stages - 1 or ("I", stage + 1, micro_batch) in over
