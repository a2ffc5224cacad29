"""The schemes of parallel training as a table, with their formulas or their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.request import Request
from parplan.planner.schemes.every_scheme import SCHEMES, PricedScheme, Scheme
from parplan.profiles.provenance import Kind
from parplan.profiles.units import GIB, gib
from parplan.report.json_result import JsonResult, fields_of
from parplan.report.text import gib_text, joined, print_table, say, seconds_text

HEADING = ("scheme", "GPUs", "step", "comm", "wait", "sent", "states", "activ")
UNSEARCHED, OTHER_STEPS = "*", "!"  # after the name of a scheme
WIDTH = 80  # of the tables and the texts under them
SYMBOLS = (
    "C seconds of a step on one GPU; n GPUs; w parameters, w' those outside experts, w'' those of "
    "experts; p, g bytes of a parameter and a gradient; M micro-batches of b sequences of S "
    "tokens, h hidden, e bytes of an activation; L blocks; X, W, Y a product's input, weight and "
    "output; Q, KV, O of attention; A saved activations; F, B, R forward, backward and recompute "
    "of a micro-batch on a stage; early R recomputes early, last no R does not on the last stage; "
    "v virtual stages; k experts of a token; H local steps; AR, AG, RS, A2A, P2P seconds of a "
    "collective (C1 to C4), or B bytes a second. Copies of the n GPUs add AR(g w/n)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeStep:
    """The price of one scheme in a step, for one GPU.

    step_s              seconds of a step: the three below
    kind                kind of the seconds
    compute_s           seconds of compute
    comm_s              seconds of communication that compute does not hide
    wait_s              seconds in which a pipeline stage waits
    sent_bytes          bytes that a GPU sends
    states_bytes        parameters, gradients and optimizer states
    activation_bytes    saved activations and temporaries at the peak
    """

    step_s: float
    kind: Kind
    compute_s: float
    comm_s: float
    wait_s: float
    sent_bytes: float
    states_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeFormulas:
    """The formulas of a scheme: seconds of a step, bytes that a GPU sends and holds, their source.

    `plan schemes --formulas` prints the meaning of the symbols.
    """

    time: str
    sends: str
    holds: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRow:
    """A scheme by itself at its greatest legal degree.

    searched              false where no search uses the scheme
    changes_convergence   true where its steps are other ones than those of one process
    gpus                  over which the scheme divides, null without a price
    copies                number of such groups, null without a price; GPUs beyond both are idle
    cost                  null where the request cannot have the scheme; then `reason` says why
    """

    scheme: str
    searched: bool
    changes_convergence: bool
    formulas: SchemeFormulas
    gpus: int | None
    copies: int | None
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
        f"{request.model.name} on {cluster.num_gpus} x {cluster.device.name} of "
        f"{gib_text(gib(cluster.device.memory_bytes))} GiB, each scheme by itself; GiB of one GPU"
    )
    say(out, joined(title.split(" "), " ", out.width), "bold")
    rows = [(_name(each.scheme), *_cells(each)) for each in priced if each.cost]
    print_table(out, HEADING, rows, left=("scheme",))
    for each in priced:
        if each.cost is None:
            text = f"not {each.scheme.name}: {each.reason}"
            say(out, joined(text.split(" "), " ", out.width, start="  ", indent=4), "dim")
    kinds = sorted({str(each.cost.kind) for each in priced if each.cost and each.scheme.searched})
    notes = (
        f"Steps are predicted ({', '.join(kinds)}), not measured, and bytes are computed. A scheme "
        "has a price also where it needs more memory than a GPU has.",
        "32 x 2: 32 GPUs run the scheme, as many as can, with data parallelism over 2 such groups; "
        "GPUs beyond both are idle. comm: communication that compute does not hide; wait: of a "
        "pipeline stage; sent: in a step. --formulas explains.",
        f"{UNSEARCHED} no search uses it: compute divided evenly, communication not hidden "
        "(analytic).",
        f"{OTHER_STEPS} changes convergence: its steps are not those of one GPU with the batch, so "
        "equal seconds do not mean equal progress (analytic). No search uses it.",
    )
    for note in notes:
        say(out, joined(note.split(" "), " ", min(out.width, WIDTH), start="  "), "dim")


def print_formulas(out: Console) -> None:
    """Print the seconds of each scheme, what it sends and what it holds, and the source."""
    for scheme in SCHEMES:
        say(out, f"{_name(scheme)}   {scheme.source}", "bold")
        for what in ("time", "sends", "holds"):
            say(out, f"  {what:<6} {getattr(scheme, what)}")
    say(out, joined(SYMBOLS.split(" "), " ", min(out.width, WIDTH)), "dim")


def schemes_document(priced: Sequence[PricedScheme]) -> SchemesDocument:
    """Returns the table for --json; seconds and bytes of one GPU in a step."""
    return SchemesDocument(schemes=tuple(map(_scheme_row, priced)))


def _scheme_row(each: PricedScheme) -> SchemeRow:
    scheme, cost = each.scheme, each.cost
    return SchemeRow(
        scheme=scheme.name,
        searched=scheme.searched,
        changes_convergence=scheme.changes_convergence,
        formulas=SchemeFormulas(
            time=scheme.time, sends=scheme.sends, holds=scheme.holds, source=scheme.source
        ),
        gpus=each.degree if cost else None,
        copies=each.copies if cost else None,
        cost=SchemeStep(**fields_of(cost), step_s=cost.step_s) if cost else None,
        reason=each.reason or None,
    )


def _name(scheme: Scheme) -> str:
    if scheme.changes_convergence:
        return f"{scheme.name} {OTHER_STEPS}"
    return scheme.name if scheme.searched else f"{scheme.name} {UNSEARCHED}"


def _cells(each: PricedScheme) -> tuple[str, ...]:
    cost = each.cost
    assert cost is not None, "the row has a price"
    sizes = (cost.sent_bytes, cost.states_bytes, cost.activation_bytes)
    return (
        f"{each.degree} x {each.copies}" if each.copies > 1 else str(each.degree),
        seconds_text(cost.step_s),
        *(seconds_text(part_s) if part_s else "-" for part_s in (cost.comm_s, cost.wait_s)),
        *(f"{size / GIB:,.{0 if size >= 1000 * GIB else 1}f}" for size in sizes),
    )
