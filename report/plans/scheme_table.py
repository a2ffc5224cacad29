"""The schemes of parallel training as a table, with their formulas or their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.costmodels.schemes.formula_schemes import SchemeCost
from parplan.planner.request import Request
from parplan.planner.schemes.every_scheme import SCHEMES, PricedScheme
from parplan.profiles.units import GIB
from parplan.report.json_result import JsonResult, fields_of
from parplan.report.text import joined, print_table, say, seconds_text

HEADING = ("scheme", "step", "comm", "wait", "sent GiB", "states GiB", "activ GiB")
FORMULAS = ("scheme", "a GPU sends in a step, or in a micro-batch", "and holds")
UNSEARCHED = " *"  # after the name of a scheme that no search uses


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeStep:
    """The price of one scheme in a step, for one GPU.

    step_s              seconds of a step: the three below
    compute_s, comm_s   seconds of compute, and of communication that it does not hide
    wait_s              seconds in which a pipeline stage waits
    sent_bytes          bytes that a GPU sends
    states_bytes        parameters, gradients and optimizer states
    activation_bytes    saved activations and temporaries at the peak
    """

    step_s: float
    compute_s: float
    comm_s: float
    wait_s: float
    sent_bytes: float
    states_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRow:
    """A scheme by itself on all GPUs.

    searched   false where no search uses the scheme
    sends      formula of the bytes that a GPU sends
    holds      formula of the bytes that it holds
    cost       null where the request cannot have the scheme; then `reason` says why
    """

    scheme: str
    searched: bool
    sends: str
    holds: str
    cost: SchemeStep | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemesDocument(JsonResult):
    """Every scheme of parallel training with its price."""

    schemes: tuple[SchemeRow, ...]


def print_schemes(priced: Sequence[PricedScheme], request: Request, out: Console) -> None:
    """Print the price of every scheme, then the reasons of those that the request cannot have."""
    cluster = request.cluster
    title = (
        f"{request.model.name} on {cluster.num_gpus} x {cluster.device.name}, each scheme by "
        "itself on all of them; of one GPU"
    )
    say(out, joined(title.split(" "), " ", out.width), "bold")
    rows = [(_name(each), *_cells(each)) for each in priced if each.cost]
    print_table(out, HEADING, rows, left=("scheme",))
    for each in priced:
        if each.cost is None:
            text = f"not {each.scheme.name}: {each.reason}"
            say(out, joined(text.split(" "), " ", out.width, start="  ", indent=4), "dim")
    notes = (
        "comm is what compute does not hide; wait is that of a pipeline.",
        "* no search uses it: compute divided evenly, communication not hidden (analytic).",
    )
    for note in notes:
        say(out, joined(note.split(" "), " ", out.width, start="  "), "dim")


def print_formulas(out: Console) -> None:
    """Print what each scheme sends and holds; the symbols are those of docs/equations.md."""
    rows = [(scheme.name, scheme.sends, scheme.holds) for scheme in SCHEMES]
    print_table(out, FORMULAS, rows, left=FORMULAS)


def schemes_document(priced: Sequence[PricedScheme]) -> SchemesDocument:
    """Returns the table for --json; seconds and bytes of one GPU in a step."""
    return SchemesDocument(
        schemes=tuple(
            SchemeRow(
                scheme=each.scheme.name,
                searched=each.scheme.searched,
                sends=each.scheme.sends,
                holds=each.scheme.holds,
                cost=_with_step(each.cost) if each.cost else None,
                reason=each.reason or None,
            )
            for each in priced
        )
    )


def _with_step(cost: SchemeCost) -> SchemeStep:
    return SchemeStep(**fields_of(cost), step_s=cost.step_s)


def _name(each: PricedScheme) -> str:
    return each.scheme.name + ("" if each.scheme.searched else UNSEARCHED)


def _cells(each: PricedScheme) -> tuple[str, ...]:
    cost = each.cost
    assert cost is not None, "the row has a price"
    sizes = (cost.sent_bytes, cost.states_bytes, cost.activation_bytes)
    return (
        seconds_text(cost.step_s),
        seconds_text(cost.comm_s),
        seconds_text(cost.wait_s) if cost.wait_s else "-",
        *(f"{size / GIB:,.2f}" for size in sizes),
    )
