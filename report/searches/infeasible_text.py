"""The error for a request that does not fit, with changes that make it fit and their step times."""

from __future__ import annotations

from parplan.planner.infeasible.shortfall import (
    EXPLAINED_S,
    no_cluster_text,
    unexplained_error,
)
from parplan.planner.request import Request
from parplan.planner.search.described_shortfall import shortfall
from parplan.planner.search.relaxations import (
    BUDGET_S,
    GPUS,
    Relaxation,
    Relaxations,
    relaxations,
)
from parplan.profiles.errors import InfeasibleError, OutOfTimeError
from parplan.profiles.machines.hardware import Cluster
from parplan.report.text import aligned, seconds_text

_WIDE = 1000  # characters, so that no line of the hint is wrapped
_INDENT = 8


def explained_error(request: Request) -> InfeasibleError:
    """Returns the error with its ways out, for `find_plan(request, explain=explained_error)`.

    It takes up to a quarter of a minute. A Ctrl-C or the deadline ends the search for ways out, not
    the error.
    """
    deadline = request.options.deadline
    try:
        short = shortfall(request.until(deadline.within(EXPLAINED_S)))
    except KeyboardInterrupt:
        return unexplained_error(request, "Ctrl-C came")
    except OutOfTimeError:
        return unexplained_error(request)
    try:
        ways_out = relaxations(request, short.need_bytes, host_bytes=short.host_bytes)
        when = "before the time limit" if deadline.is_over else f"in {BUDGET_S:g} s"
        hint = hint_text(ways_out, request.cluster, when)
    except KeyboardInterrupt:
        hint = "ask for more GPUs or pin less; what would fit was not searched to the end (Ctrl-C)"
    return InfeasibleError(short.text, hint=hint)


def hint_text(found: Relaxations, cluster: Cluster, when: str = f"in {BUDGET_S:g} s") -> str:
    """Returns the changes that fit, one a line, and those that were not tried `when`."""
    untried = f"not tried {when}: {', '.join(found.untried)}" if found.untried else ""
    if not found.found:
        known = "use more GPUs or pin less" if GPUS in found.untried else no_cluster_text(cluster)
        return f"{known}{'; ' if untried else ''}{untried}"
    rows = [
        (_how(relaxed), _cost(relaxed, found.unlimited_s, first=index == 0))
        for index, relaxed in enumerate(found.found)
    ]
    lines = aligned(rows, _WIDE, left=(0, 1), indent=_INDENT)
    return "\n".join(("it fits with", *lines, *((f"      {untried}",) if untried else ())))


def _how(relaxed: Relaxation) -> str:
    without = f"without {' '.join(relaxed.dropped)}" if relaxed.dropped else ""
    return " ".join(part for part in (*relaxed.flags, without) if part)


def _cost(relaxed: Relaxation, unlimited_s: float | None, *, first: bool) -> str:
    """`41.2 s a step (+12 % on the 36.8 s it would take ...)`; later lines lack the words."""
    if relaxed.step_s is None:
        text = "its step was not searched"
    else:
        text = f"{'' if relaxed.proven else 'at most '}{seconds_text(relaxed.step_s)} a step"
    if relaxed.step_s is not None and unlimited_s is not None:
        words = (
            f" on the {seconds_text(unlimited_s)} it would take with unlimited memory"
            if first
            else ""
        )
        text += f" ({100 * (relaxed.step_s / unlimited_s - 1):+.0f} %{words})"
    return f"{text}, {relaxed.note}" if relaxed.note else text
