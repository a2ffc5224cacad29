"""The instruction list of every pipeline rank as text: `plan show --instructions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.costmodels.schedules.instructions import (
    Exchange,
    Instruction,
    StagePass,
)
from parplan.planner.plan.traced_plan import AnyPlan, model_name
from parplan.profiles.units import counted
from parplan.report.json_result import JsonResult
from parplan.report.names import pipeline_phrases
from parplan.report.text import aligned, joined, say

WIDTH = 80  # characters of a line at the most
_KEY = (
    ("F3", "forward pass of micro-batch 3"),
    ("B3", "its backward pass, with its recompute unless R3 was before"),
    ("R3", "its recompute, while the rank waits for the gradient"),
    ("I3, W3", "its backward pass in two parts: gradient of the input, then of the weights"),
    ("a3>1, a3<1", "activations of micro-batch 3 are sent to pipeline rank 1, received from it"),
    ("g3>1, g3<1", "gradients are sent to rank 1, received from it"),
    ("[a3>1 g0<1]", "a send and a receive as one batched operation"),
)
_VIRTUAL = ("2F3, 2a3>1", "of virtual stage 2, where a rank has several")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInstructions:
    """The instructions of a pipeline rank, in the words of `plan show --instructions`.

    stages      virtual stages of the rank
    exchanges   number of sends and receives that are one batched operation
    """

    rank: int
    stages: tuple[int, ...]
    exchanges: int
    instructions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionsDocument(JsonResult):
    """The instructions of pipeline ranks in a step."""

    ranks: tuple[RankInstructions, ...]


def instruction_text(instruction: Instruction, *, virtual: bool) -> str:
    """Returns one instruction, as `F3`, `a3>1` or `[a3>1 g0<1]`; `virtual` names its stage."""
    if isinstance(instruction, Exchange):
        ends = (instruction.send, instruction.receive)
        return f"[{' '.join(instruction_text(end, virtual=virtual) for end in ends)}]"
    stage = f"{instruction.stage}" if virtual else ""
    if isinstance(instruction, StagePass):
        return f"{stage}{instruction.work}{instruction.micro_batch}"
    kind = "g" if instruction.gradient else "a"
    direction = ">" if instruction.sends else "<"
    return f"{stage}{kind}{instruction.micro_batch}{direction}{instruction.peer}"


def instructions_document(
    plan: AnyPlan, lists: Sequence[Sequence[Instruction]], ranks: Sequence[int]
) -> InstructionsDocument:
    """Returns the instructions of `ranks` for `--json`; `lists` has those of every rank."""
    return InstructionsDocument(
        ranks=tuple(
            RankInstructions(
                rank=rank,
                stages=tuple(_stages(plan, rank)),
                exchanges=_num_exchanges(lists[rank]),
                instructions=tuple(_texts(plan, lists[rank])),
            )
            for rank in ranks
        )
    )


def print_instructions(
    plan: AnyPlan, lists: Sequence[Sequence[Instruction]], ranks: Sequence[int], out: Console
) -> None:
    """Print a key and the instructions of `ranks`, in lines of at most WIDTH characters.

    `lists` has the instructions of every rank.
    """
    phrases = (f"{model_name(plan)}, {plan.mesh}", *pipeline_phrases(plan.pipeline, plan.mesh))
    say(out, joined(phrases, ", ", WIDTH), "bold")
    say(out, "as parplan's executor runs it", "dim")
    say(out)
    key = (*_KEY, _VIRTUAL) if _has_virtual_stages(plan) else _KEY
    for line in aligned(key, WIDTH, left=(0, 1)):
        say(out, line, "dim")
    for rank in ranks:
        say(out)
        name = f"rank {rank}, stage {', '.join(map(str, _stages(plan, rank)))}"
        batched = counted(_num_exchanges(lists[rank]), "batched operation")
        say(out, joined((name, batched), ": ", WIDTH), "bold")
        say(out, joined(list(_texts(plan, lists[rank])), " ", WIDTH, start="  "))
    say(out)
    say(out, "  After its list a rank reduces its gradients and updates its parameters.", "dim")


def _has_virtual_stages(plan: AnyPlan) -> bool:
    return len(plan.stages) > plan.mesh.pp


def _stages(plan: AnyPlan, rank: int) -> list[int]:
    return [index for index, stage in enumerate(plan.stages) if stage.rank == rank]


def _num_exchanges(instructions: Sequence[Instruction]) -> int:
    return sum(isinstance(each, Exchange) for each in instructions)


def _texts(plan: AnyPlan, instructions: Sequence[Instruction]) -> Iterator[str]:
    virtual = _has_virtual_stages(plan)
    return (instruction_text(each, virtual=virtual) for each in instructions)
