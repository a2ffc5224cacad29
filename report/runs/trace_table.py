"""The tables of traced steps: their time by cause, kernels by class, collectives by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from rich.console import Console

from parplan.planner.calibration.step_account import CollectiveSum
from parplan.planner.calibration.trace_measured import MeasuredTraces
from parplan.profiles.traces.trace_record import WorkClass
from parplan.report.text import percent, print_table, say, seconds_text

UNLIKELY = 3.0  # ratio of measured to priced products of which a plan is seldom that of the run
_CAUSES = {
    "forward": "forward passes",
    "backward": "backward passes",
    "passes": "forward and backward passes",
    "optimizer": "optimizer and gradient norm",
    "tensor": "exposed tensor-parallel communication",
    "data": "exposed data-parallel communication",
    "pipeline": "waits for other stages",
    "unknown axis": "exposed communication of an unknown axis",
    "copies": "exposed copies of the host",
    "between steps": "between steps",
}


def print_traces(traced: MeasuredTraces, out: Console) -> None:
    """Print the means over all traced steps and ranks."""
    accounts = traced.accounts
    step_s = fmean(account.step_s for account in accounts)
    ranks = "1 rank" if traced.num_ranks == 1 else f"{traced.num_ranks} ranks"
    steps = "1 traced step" if len(accounts) == 1 else f"{len(accounts)} traced steps"
    say(out, f"{steps} of {ranks}: {seconds_text(step_s)} a step", "bold")
    print_table(
        out,
        ("part of the step", "seconds", "share"),
        [
            (name, seconds_text(mean_s), percent(mean_s / step_s))
            for cause, name in _CAUSES.items()
            if (mean_s := fmean(account.by_cause[cause] for account in accounts)) > 0
        ],
        left=("part of the step",),
    )
    idle_s = fmean(account.host_s for account in accounts)
    say(out, f"  the device waits for the host {seconds_text(idle_s)} ({percent(idle_s / step_s)})")
    say(out)
    kinds = {kind for account in accounts for kind in account.by_class}
    busy = {kind: fmean(account.by_class[kind] for account in accounts) for kind in kinds}
    print_table(
        out,
        ("kernels", "busy", "share", "priced"),
        [
            (
                kind.value,
                seconds_text(seconds),
                percent(seconds / step_s),
                seconds_text(traced.priced_s[kind]) if kind in traced.priced_s else "-",
            )
            for kind, seconds in sorted(busy.items(), key=lambda item: -item[1])
        ],
        left=("kernels",),
    )
    ratio = busy.get(WorkClass.PRODUCTS, 0.0) / traced.priced_s[WorkClass.PRODUCTS]
    if not 1 / UNLIKELY < ratio < UNLIKELY:
        say(
            out,
            f"  note: the products of the trace take {ratio:.2g} times those of the plan: check "
            "that it is the plan of this run",
        )
    say(out)
    _print_collectives(traced, out)


def _print_collectives(traced: MeasuredTraces, out: Console) -> None:
    by_kind: defaultdict[tuple[str, str, int | None], list[CollectiveSum]] = defaultdict(list)
    for account in traced.accounts:
        for key, total in account.collectives.items():
            by_kind[key].append(total)
    if not by_kind:
        return
    num_steps = len(traced.accounts)
    print_table(
        out,
        ("collective", "cause", "ranks", "calls", "MiB", "busy", "exposed"),
        [
            (
                operation,
                cause,
                str(size or "-"),
                f"{sum(total.calls for total in totals) / num_steps:.4g}",
                _mebibytes(totals, num_steps),
                seconds_text(sum(total.busy_s for total in totals) / num_steps),
                seconds_text(sum(total.exposed_s for total in totals) / num_steps),
            )
            for (operation, cause, size), totals in by_kind.items()
        ],
        left=("collective", "cause"),
    )
    say(out)


def _mebibytes(totals: Iterable[CollectiveSum], num_steps: int) -> str:
    whole = [total.num_bytes for total in totals]
    known = [num_bytes for num_bytes in whole if num_bytes is not None]
    return f"{sum(known) / num_steps / 2**20:.4g}" if len(known) == len(whole) else "-"
