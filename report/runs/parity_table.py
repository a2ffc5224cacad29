"""The tables of `plan check --execute`: losses and gradients against those of one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.runs.relative_error import relative_error
from parplan.planner.runs.run_file import ChunkMoved
from parplan.report.json_result import JsonResult
from parplan.report.text import joined, print_table, say

WORST = 10  # listed parameters of a module


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """A plan, its shrunk form `small`, and the results of its ranks against one process.

    losses        by step: loss of the ranks, loss of one process
    gradients     relative error by parameter, in the first step
    agree         true when all ranks hold equal losses and gradients
    as_predicted  true when every rank holds the predicted bytes of states
    moved         bytes that chunks moved in a step, for each rank with chunks
    """

    plan: Plan | TracedPlan
    small: Plan | TracedPlan
    losses: tuple[tuple[float, float], ...]
    gradients: Mapping[str, float]
    agree: bool
    as_predicted: bool
    loss_tolerance: float
    gradient_tolerance: float
    moved: tuple[ChunkMoved, ...] = ()

    @property
    def loss_error(self) -> float:
        return max(relative_error(loss, expected) for loss, expected in self.losses)

    @property
    def worst(self) -> tuple[str, float]:
        """Returns the parameter with the largest gradient error, and the error."""
        return max(self.gradients.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        return (
            self.agree
            and self.loss_error <= self.loss_tolerance
            and self.worst[1] <= self.gradient_tolerance
        )

    @property
    def bytes_as_predicted(self) -> bool:
        """True when the bytes of states and of moved chunks are as predicted on every rank."""
        return self.as_predicted and all(rank.as_predicted for rank in self.moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPair:
    """The loss of a step of the ranks and of one process, null where it is not finite."""

    found: float | None
    one_process: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityDocument(JsonResult):
    """A shrunk plan that was trained on ranks and in one process.

    passed                true where losses and gradients agree within the tolerances
    ranks_agree           true where all ranks hold equal losses and gradients
    states_as_predicted   true where every rank holds the predicted bytes of states
    mesh                  of the shrunk plan
    num_layers            its number of layers, null for a traced module
    losses                by step
    moved_as_predicted    true where chunks moved the predicted bytes, null without chunks
    gradient_errors       relative error by parameter in the first step, null where not finite
    """

    passed: bool
    verdict: str
    ranks_agree: bool
    states_as_predicted: bool
    mesh: str
    num_layers: int | None
    losses: tuple[LossPair, ...]
    moved_as_predicted: bool | None
    gradient_errors: Mapping[str, float | None]
    loss_tolerance: float
    gradient_tolerance: float


def print_parity(parity: Parity, out: Console) -> None:
    """Print losses, the error of every parameter, and the verdict as the last line."""
    small = parity.small
    say(out, f"{_name(small)}: {small.mesh} on gloo, fp32, against one process", "bold")
    say(out, joined(_kept(parity), ", ", out.width, start="  shrunk    ", indent=12))
    say(out)
    rows = [
        (f"{step}", f"{a:.7f}", f"{b:.7f}", f"{relative_error(a, b):.1e}")
        for step, (a, b) in enumerate(parity.losses, 1)
    ]
    print_table(out, ("step", "loss", "one process", "error"), rows, left=())
    say(out)
    say(out, "  gradients of the first step: error over the largest entry", "dim")
    print_table(
        out, ("parameter", "worst error", "in"), _gradient_rows(parity), left=("parameter", "in")
    )
    say(out)
    if parity.moved:
        say(out, joined(_moved(parity.moved), ", ", out.width, start="  chunks    ", indent=12))
        say(out)
    say(out, joined(parity_verdict(parity).split(" "), " ", out.width, indent=2), "bold")


def _name(plan: Plan | TracedPlan) -> str:
    return plan.traced.name if isinstance(plan, TracedPlan) else plan.model.name


def _kept(parity: Parity) -> list[str]:
    plan, small = parity.plan, parity.small
    if isinstance(plan, TracedPlan) or isinstance(small, TracedPlan):
        return [*_changed(parity), "the module as it is", f"all {len(plan.stages)} stages kept"]
    parts = [
        f"{plan.mesh} to {small.mesh}",
        f"{plan.model.num_layers} blocks to {small.model.num_layers}",
    ]
    parts += [f"hidden {plan.model.hidden_size} to {small.model.hidden_size}", *_changed(parity)]
    parts += ["no dropout"] if plan.model.dropout else []
    used = {run.plan for stage in small.stages for run in stage.layers}
    return [*parts, f"all {len(used)} layer plans kept"]


def _changed(parity: Parity) -> list[str]:
    before, after = parity.plan.pipeline, parity.small.pipeline
    names = (
        ("virtual_stages", "virtual stages"),
        ("micro_batch_size", "micro-batch"),
        ("num_micro_batches", "micro-batches"),
    )
    pairs = ((text, getattr(before, name), getattr(after, name)) for name, text in names)
    return [f"{text} {old} to {new}" for text, old, new in pairs if old != new]


def _moved(ranks: Sequence[ChunkMoved]) -> list[str]:
    """Returns bytes moved in a step, summed over ranks, beside those of the plan."""
    names = {
        "in_bytes": "to the device",
        "out_bytes": "to the host",
        "gathered_bytes": "gathered",
        "reduced_bytes": "reduced",
    }
    parts = []
    for field, name in names.items():
        figures = [getattr(rank, field) for rank in ranks]
        predicted = sum(figure.predicted or 0 for figure in figures)
        counted = sum(figure.measured or 0 for figure in figures)
        if predicted or counted:
            same = all(figure.predicted == figure.measured for figure in figures)
            parts.append(
                f"{counted:,.0f} bytes {name} {'as' if same else 'NOT as'} predicted"
                + ("" if same else f", {predicted:,.0f}")
            )
    return [*parts, "in a step of all ranks"]


def _gradient_rows(parity: Parity) -> list[tuple[str, str, str]]:
    """Returns one row for each parameter of a layer, with the layer where its error is worst.

    A traced module has rows for its worst parameters only.
    """
    if isinstance(parity.small, TracedPlan):
        worst = sorted(parity.gradients.items(), key=lambda item: -item[1])[:WORST]
        return [(name, f"{error:.1e}", "") for name, error in worst]
    largest: dict[str, tuple[float, str]] = {}
    for name, error in parity.gradients.items():
        layer, parameter = name.split(".", 1)
        key = parameter if layer.startswith("block") else name
        largest[key] = max(largest.get(key, (0.0, layer)), (error, layer))
    return [(name, f"{error:.1e}", layer) for name, (error, layer) in largest.items()]


def parity_verdict(parity: Parity) -> str:
    """Returns one line: if the shrunk plan trains as one process does, with its errors."""
    name, error = parity.worst
    bytes_text = "" if parity.as_predicted else "; bytes of states are NOT as predicted"
    if not all(rank.as_predicted for rank in parity.moved):
        bytes_text += "; what chunks moved is NOT as predicted"
    text = (
        f"gradients within {error:.1e} (tolerance {parity.gradient_tolerance:.0e}, worst {name}), "
        f"losses within {parity.loss_error:.1e} (tolerance {parity.loss_tolerance:.0e}){bytes_text}"
    )
    if not parity.agree:
        return f"differs: the ranks do not hold the same losses and gradients; {text}"
    return f"{'trains as one process does' if parity.passed else 'differs'}: {text}"


def parity_document(parity: Parity) -> ParityDocument:
    """Returns the tables for `--json`."""
    small = parity.small
    return ParityDocument(
        passed=parity.passed,
        verdict=parity_verdict(parity),
        ranks_agree=parity.agree,
        states_as_predicted=parity.as_predicted,
        mesh=str(small.mesh),
        num_layers=None if isinstance(small, TracedPlan) else small.model.num_layers,
        losses=tuple(
            LossPair(found=_number(loss), one_process=_number(expected))
            for loss, expected in parity.losses
        ),
        moved_as_predicted=all(rank.as_predicted for rank in parity.moved)
        if parity.moved
        else None,
        gradient_errors={name: _number(error) for name, error in parity.gradients.items()},
        loss_tolerance=parity.loss_tolerance,
        gradient_tolerance=parity.gradient_tolerance,
    )


def _number(value: float) -> float | None:
    """Returns None for a number that is not finite, since JSON cannot express it."""
    return value if math.isfinite(value) else None
