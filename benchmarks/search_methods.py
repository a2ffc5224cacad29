"""Search methods side by side: the gap of each to the proven optimum against CPU time.

    python -m benchmarks.search_methods                  # a table, eight minutes
    python -m benchmarks.search_methods --write          # also the page and the picture
    python -m benchmarks.search_methods --case gpt-2.5b --budget 2

All methods have one space and one price (planner/search_methods/). Each run is a process of its own
with an empty price cache, and its CPU-seconds include the space, the prices and the solver. A gap
is against the step of `ours`, whose own gap to its proven bound is in the first table. So that it
is the proven optimum, `ours` may take PROOF_LONGER times the budget of the others. `--write`
replaces the tables of docs/design/search-methods.md and draws docs/images/search-methods.png.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.search.speed import ROOT
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.search_methods.ledger import Improvement
from parplan.planner.search_methods.methods import METHODS, run_method
from parplan.report.plots.log_ticks import set_plain_ticks
from parplan.report.plots.scatter_plot import encoded
from parplan.report.text import console, print_table, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from parplan.planner.request import Request

PAGE = ROOT / "docs" / "design" / "search-methods.md"
PICTURE = ROOT / "docs" / "images" / "search-methods.png"
BEGIN, END = "<!-- tables of search_methods.py -->\n", "<!-- end of the tables -->\n"
UNEQUAL = "unequal"  # cases on pools of two GPUs
DRAWN = (
    "mcmc",
    "tree-search",
    "genetic",
    "policy-gradient",
    "random",
)  # methods whose seed changes the answer
REFERENCE = "ours"
PROOF_LONGER = 4.0  # the budget of the reference, in budgets of the others
NO_GAP = 0.01  # percent, the least that the picture shows
PROVEN = ("case", "kind", "GPUs", "step s", "gap to its bound", "CPU s")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of GPUs.

    gpu      the GPU, or the pools of an unequal cluster with their numbers
    longer   the factor of the budget
    """

    model: str
    kind: str
    gpus: int
    gpu: str
    longer: float = 1.0

    @property
    def name(self) -> str:
        """The name of the case in tables and the picture."""
        return f"{self.model}, pools" if self.kind == UNEQUAL else self.model

    @property
    def request(self) -> Request:
        """The request of the case. Raises ConfigError."""
        if self.kind == UNEQUAL:
            return request_of(TargetOptions(model=self.model, gpu=self.gpu), pools=True)
        return request_of(TargetOptions(model=self.model, gpus=self.gpus, gpu=self.gpu))


CASES = (
    Case("gpt-2.5b", "dense", 8, "a100-80gb"),
    Case("gpt-20b", "dense", 64, "a100-80gb"),
    Case("gpt-175b", "dense", 512, "a100-80gb"),
    Case("mixtral-8x7b", "experts", 32, "h100-80gb"),
    Case("mixtral-8x22b", "experts", 128, "h100-80gb"),
    Case("qwen3-235b-a22b", "experts", 512, "h100-80gb"),
    Case("gpt-2.5b", UNEQUAL, 8, "a100-80gb:4+h100-80gb:4", 2.0),
    Case("gpt-7.5b", UNEQUAL, 32, "a100-80gb:16+h100-80gb:16", 2.0),
    Case("gpt-20b", UNEQUAL, 64, "a100-80gb:32+h100-80gb:32", 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """The outcome of one method on one case with one seed."""

    case: Case
    method: str
    step_s: float
    bound_s: float | None
    cpu_s: float
    ended: bool
    trace: tuple[Improvement, ...]


def result_of_run(case: Case, method: str, budget_s: float, seed: int) -> MethodResult:
    """Returns the outcome of one run, in the process that calls it."""
    longer = case.longer * (PROOF_LONGER if method == REFERENCE else 1.0)
    run = run_method(method, case.request, longer * budget_s, seed)
    return MethodResult(
        case=case,
        method=method,
        step_s=run.step_s,
        bound_s=run.bound_s,
        cpu_s=run.cpu_s,
        ended=run.ended,
        trace=run.trace,
    )


def all_results(cases: Sequence[Case], budget_s: float, seeds: int) -> Iterator[MethodResult]:
    """Yields the results of every method on every case, two processes at a time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        futures = [
            pool.submit(result_of_run, case, method, budget_s, seed)
            for case in cases
            for method in METHODS
            for seed in range(seeds if method in DRAWN else 1)
        ]
        for future in futures:
            yield future.result()


def results_of(results: Sequence[MethodResult], case: Case, method: str) -> list[MethodResult]:
    """Returns the results of a method on a case, one for each seed."""
    return [each for each in results if each.case == case and each.method == method]


def reference(results: Sequence[MethodResult], case: Case) -> MethodResult:
    """Returns the result of the planner's search on a case."""
    return results_of(results, case, REFERENCE)[0]


def gap_text(results: Sequence[MethodResult], case: Case, method: str) -> str:
    """Returns the median gap of a method in percent, with the median CPU-seconds of its best."""
    own = results_of(results, case, method)
    step_s = statistics.median(each.step_s for each in own)
    if step_s == inf:
        return "none"
    gap = step_s / reference(results, case).step_s - 1
    found_s = statistics.median(each.trace[-1].cpu_s if each.trace else inf for each in own)
    ended = ", ends" if all(each.ended for each in own) else ""
    return f"{100 * gap:.2f} % ({found_s:.1f} s{ended})"


def proven_row(results: Sequence[MethodResult], case: Case) -> tuple[str, ...]:
    """Returns the line of the reference of one case."""
    own = reference(results, case)
    proven = "none" if own.bound_s is None else f"{100 * (1 - own.bound_s / own.step_s):.2f} %"
    return (
        case.name,
        case.kind,
        case.gpu if case.kind == UNEQUAL else f"{case.gpus} x {case.gpu}",
        f"{own.step_s:.3f}",
        proven,
        f"{own.cpu_s:.1f}",
    )


def gap_rows(results: Sequence[MethodResult], cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """Returns a line for each method, with its gaps on all cases."""
    return [(method, *(gap_text(results, case, method) for case in cases)) for method in METHODS]


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of a page."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page(results: Sequence[MethodResult], cases: Sequence[Case], page: Path) -> None:
    """Replaces the tables of the page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    proven = markdown(PROVEN, [proven_row(results, case) for case in cases])
    gaps = markdown(("method", *(case.name for case in cases)), gap_rows(results, cases))
    page.write_text(f"{before}{BEGIN}{proven}\n\n{gaps}\n{END}{after}", encoding="utf-8")


def draw(
    results: Sequence[MethodResult], cases: Sequence[Case], budget_s: float, path: Path
) -> None:
    """Draws the gap of the best so far against CPU-seconds, a panel for each case."""
    from matplotlib.figure import Figure

    columns = min(3, len(cases))
    figure = Figure(figsize=(4.2 * columns, 3.6 * -(-len(cases) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(cases) // columns), columns, squeeze=False).flat
    for axes, case in zip(panels, cases, strict=False):
        for number, method in enumerate(METHODS):
            _draw_method(axes, number, results, case, method, case.longer * budget_s)
        ends_s = max(case.longer * budget_s, 1.2 * reference(results, case).cpu_s)
        axes.set(xscale="log", yscale="log", xlim=(0.05, ends_s), ylim=(0.008, 200))
        axes.set_title(f"{case.name}, {case.gpus} GPUs", fontsize=9)
        axes.set_xlabel("CPU-seconds")
        axes.set_ylabel("gap, % (0.01 is no gap)")
        set_plain_ticks(axes.xaxis)
        set_plain_ticks(axes.yaxis)
        axes.grid(visible=True, color="0.92")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8)
    path.write_bytes(encoded(figure, path.suffix))


def _draw_method(
    axes: Axes,
    number: int,
    results: Sequence[MethodResult],
    case: Case,
    method: str,
    budget_s: float,
) -> None:
    """Draws the median run of a method."""
    from matplotlib import colormaps

    own = sorted(results_of(results, case, method), key=lambda each: each.step_s)
    trace = own[len(own) // 2].trace
    best_s = reference(results, case).step_s
    times = [each.cpu_s for each in trace]
    gaps = [max(NO_GAP, 100 * (each.step_s / best_s - 1)) for each in trace]
    ends_s = max([budget_s, *times[-1:]])
    axes.step(
        [*times, ends_s],
        [*gaps, *gaps[-1:]] if gaps else [float("nan")],
        where="post",
        color=colormaps["tab20"](number),
        linewidth=2.4 if method == REFERENCE else 1.2,
        marker="o",
        markevery=[0],
        markersize=3,
        label=method,
    )


@click.command()
@click.option("--case", "name", type=click.Choice([case.name for case in CASES]))
@click.option("--budget", "budget_s", default=4.0, show_default=True, help="CPU-seconds of a run.")
@click.option("--seeds", default=1, show_default=True, help="Runs of methods that draw points.")
@click.option("--write", is_flag=True, help="Replace the tables of the page, draw the picture.")
def main(name: str | None, budget_s: float, seeds: int, write: bool) -> None:
    """Run every search method on the same space and prices, and print its gaps."""
    errors, out = console(sys.stderr), console(sys.stdout)
    cases = [case for case in CASES if name in (None, case.name)]
    results: list[MethodResult] = []
    for result in all_results(cases, budget_s, seeds):
        results.append(result)
        say(errors, f"{result.case.name}  {result.method}  {result.step_s:.4f} s")
    print_table(out, PROVEN, [proven_row(results, case) for case in cases], left=("case", "kind"))
    heading = ("method", *(case.name for case in cases))
    print_table(out, heading, gap_rows(results, cases), left=("method",))
    if write:
        write_page(results, cases, PAGE)
        draw(results, cases, budget_s, PICTURE)
        say(errors, f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
