"""Memory and redundant memory of our plans beside Megatron-LM's by the year, and what saves it.

    # all parts, the prices of every setting and a run on 8 gloo ranks
    python -m benchmarks.papers.redundancy
    python -m benchmarks.papers.redundancy --part baselines --models gpt-20b --gpus 64 --json
    python -m benchmarks.papers.redundancy --part executed

Shi et al. 2025 (doi:10.1631/FITEE.2300684) report up to 67 % less memory than "the latest
Megatron-LM strategies" at nearly their throughput. The parts are:

baselines   five models on 8 to 64 a100-80gb and Llama 3 70B on few tokens, all without a pipeline:
            Megatron-LM by the year (redundancy_measures.py), each at its least peak and at its
            fastest, beside ours under `memory` (least redundant within 10 % of the fastest) and
            `throughput`. Where neither saves 67 % of a peak in at most 1.1 of its step, the fastest
            plan in a third of that peak is searched, which proves whether there is one
pipelines   the same on 64 GPUs, where every system may have a pipeline
ablation    our least redundant plan in the same seconds with ZeRO, operator splits or recompute
            switched off (redundancy_ablation.py)
executed    bytes of states that 8 gloo ranks really hold, of the winner and of the baselines of one
            tiny model (redundancy_executed.py)

A saving is 1 - ours / theirs. Nothing but the last part is run: other numbers are predicted and
analytic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import click
from rich.console import Console

from benchmarks.papers.redundancy_ablation import CASES as ABLATION_CASES
from benchmarks.papers.redundancy_ablation import SHORT, Row, ablation
from benchmarks.papers.redundancy_measures import (
    CLASSES,
    FASTEST,
    LEAST_PEAK,
    WANTED_RATIO,
    WANTED_SAVING,
    YEARS,
    Case,
    Measure,
    Saving,
    baseline_measures,
    our_measures,
    savings,
    setting_of,
)
from parplan.planner.objective import Objective
from parplan.report.text import print_table, say

MODELS = ("gpt-1.5b", "gpt-2.5b", "gpt-8.3b", "gpt-20b", "llama2-7b")
GPUS = (8, 16, 32, 64)
PARTS = ("baselines", "pipelines", "ablation", "executed")
PICKS = tuple((system, picked) for system in YEARS for picked in (LEAST_PEAK, FASTEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case with all plans and savings in it."""

    case: Case
    measures: list[Measure] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)

    def of(self, system: str, picked: str) -> list[Saving]:
        """Return our savings on one plan of a baseline."""
        return [each for each in self.savings if (each.system, each.against) == (system, picked)]

    def best(self, system: str, picked: str) -> Saving | None:
        """Return the largest saving of the peak in time, or None."""
        in_time = (each for each in self.of(system, picked) if each.in_time)
        return max(in_time, key=lambda each: each.peak_saving, default=None)

    def least_redundant(self, system: str, picked: str) -> Saving | None:
        """Return the saving of our plan of least redundancy if it is in time, or None."""
        return next(
            (
                each
                for each in self.of(system, picked)
                if each.in_time and each.ours == Objective.MEMORY.value
            ),
            None,
        )


def compare(case: Case) -> Compared:
    """Return the plans of all systems in `case`, and what ours save."""
    setting = setting_of(case)
    theirs, ours = list(baseline_measures(setting)), list(our_measures(setting))
    return Compared(case=case, measures=theirs + ours, savings=list(savings(setting, ours, theirs)))


def ablated(case: Case) -> list[Row]:
    """Return the rows of the ablation of `case`."""
    return list(ablation(setting_of(case)))


def cases_of(part: str, models: Iterable[str], gpus: Iterable[int]) -> list[Case]:
    """Return the settings of a comparison; Llama 3 on few tokens comes last."""
    listed = [Case(model=model, gpus=count) for model in models for count in gpus]
    if part == "pipelines":
        largest = max(each.gpus for each in listed)
        listed = [each for each in listed if each.gpus == largest]
    return [replace(each, pipelines=part == "pipelines") for each in (*listed, SHORT)]


def _print_measures(rows: list[Measure], out: Console) -> None:
    heading = (
        "system",
        "picked by",
        "step s",
        "peak",
        "params",
        "grads",
        "optim",
        "activ",
        "temps",
        "reserve",
        "redundant",
        "plan",
    )
    cells = [
        (
            row.system,
            row.picked,
            f"{row.step_s:.2f}",
            f"{row.peak_gib:.1f}{'' if row.fits else ' no fit'}",
            *(f"{row.memory_gib[name]:.1f}" for name in CLASSES),
            f"{row.redundant_gib:,.0f}",
            row.plan,
        )
        for row in rows
    ]
    print_table(out, heading, cells, left=("system", "picked by", "plan"))


def _print_savings(rows: list[Saving], out: Console) -> None:
    heading = ("against", "at its", "our objective", "peak", "redundant", "step ratio", "")
    cells = [
        (
            row.system,
            row.against,
            row.ours,
            f"{100 * row.peak_saving:+.0f} %",
            f"{100 * row.redundant_saving:+.0f} %",
            f"{row.step_ratio:.2f}",
            "reached" if row.reaches else "",
        )
        for row in rows
    ]
    say(out)
    print_table(out, heading, cells, left=("against", "at its", "our objective", ""))


def _print_compared(compared: Compared, out: Console) -> None:
    say(
        out,
        f"{compared.case}; GiB of the fullest device, redundant over all",
        "bold",
    )
    _print_measures(compared.measures, out)
    _print_savings(compared.savings, out)
    say(out)


def _cell(saving: Saving | None, value: float) -> str:
    return "-" if saving is None else f"{100 * value:+.0f} %"


def _print_grids(listed: list[Compared], out: Console) -> None:
    """Print by setting and baseline the largest saving of the peak, and that of redundancy."""
    heading = ("setting", *(f"{system[9:]}, {picked}" for system, picked in PICKS))
    say(
        out,
        f"the most of a peak that a plan of ours saves in {WANTED_RATIO:g} of its step "
        "(- no plan is in time or theirs does not fit)",
        "bold",
    )
    cells = [
        (
            str(each.case),
            *(_cell(saving, saving.peak_saving if saving else 0.0) for saving in _bests(each)),
        )
        for each in listed
    ]
    print_table(out, heading, cells, left=("setting",))
    say(out, "redundant bytes that our plan of the memory objective saves in the same", "bold")
    cells = [
        (
            str(each.case),
            *(_cell(saving, saving.redundant_saving if saving else 0.0) for saving in _leans(each)),
        )
        for each in listed
    ]
    print_table(out, heading, cells, left=("setting",))


def _bests(compared: Compared) -> Iterator[Saving | None]:
    return (compared.best(*pick) for pick in PICKS)


def _leans(compared: Compared) -> Iterator[Saving | None]:
    return (compared.least_redundant(*pick) for pick in PICKS)


def _print_counts(listed: list[Compared], out: Console) -> None:
    """Print in how many settings the saving is reached, and the classes that it comes from."""
    heading = ("against", "at its", "settings", "peak", "by memory", "redundant", *CLASSES)
    cells = []
    for system, picked in PICKS:
        fitting = [each for each in listed if each.of(system, picked)]
        bests = [each.best(system, picked) for each in fitting]
        reached = [best for best in bests if best and best.reaches]
        leans = [lean for each in fitting if (lean := each.least_redundant(system, picked))]
        saved = {name: sum(each.by_class[name] for each in reached) for name in CLASSES}
        whole = sum(saved.values())
        cells.append(
            (
                system,
                picked,
                str(len(fitting)),
                str(len(reached)),
                str(sum(lean.reaches for lean in leans)),
                str(sum(lean.redundant_saving >= WANTED_SAVING for lean in leans)),
                *(f"{100 * saved[name] / whole:.0f} %" if whole else "" for name in CLASSES),
            )
        )
    say(
        out,
        f"settings with {100 * WANTED_SAVING:.0f} % less in {WANTED_RATIO:g} of the step: of the "
        "peak by any plan of ours and by the memory objective, of redundant bytes by the latter; "
        "and the classes that the peaks were reduced by",
        "bold",
    )
    print_table(out, heading, cells, left=("against", "at its"))


def _print_ablation(rows: list[Row], out: Console) -> None:
    if not rows:
        return
    whole = rows[0]
    say(
        out,
        f"{whole.setting}: least redundant in {whole.limit_s:.3f} s, {WANTED_RATIO:g} of the "
        "fastest step; GiB",
        "bold",
    )
    heading = ("choices", "fastest s", "step s", "peak", "redundant", "more redundant", "plan")
    cells = []
    for row in rows:
        if row.fastest_s is None:
            cells.append((row.name, "does not fit", "", "", "", "", ""))
            continue
        late = "" if row.in_time else ", the fastest: too slow"
        cells.append(
            (
                row.name,
                f"{row.fastest_s:.3f}",
                f"{row.step_s:.3f}",
                f"{row.peak_gib:.1f}",
                f"{row.redundant_gib:,.0f}",
                f"{row.redundant_gib - whole.redundant_gib:+,.0f}",
                row.plan + late,
            )
        )
    print_table(out, heading, cells, left=("choices", "plan"))
    say(out)


def _executed_part(out: Console | None) -> list[dict[str, Any]]:
    # torch is only needed here
    from benchmarks.papers.redundancy_executed import executed, mib_text, plans

    rows = executed(plans())
    if out:
        say(
            out,
            "gpt-tiny on 8 gloo ranks: MiB of states over all ranks, held and redundant; with work "
            "are predicted redundant states, activations and temporaries",
            "bold",
        )
        heading = (
            "plan",
            "held",
            "predicted",
            "redundant",
            "predicted",
            "with work",
            "loss error",
            "",
        )
        cells = [
            (
                f"{row.name}: {row.mesh}",
                mib_text(sum(row.held.values())),
                mib_text(sum(row.predicted.values())),
                mib_text(row.redundant_held),
                mib_text(row.redundant_predicted),
                mib_text(row.with_work),
                f"{row.loss_error:.1e}",
                f"{row.ranks_as_predicted} of 8 ranks "
                + ("as predicted" if row.as_predicted else "NOT AS PREDICTED"),
            )
            for row in rows
        ]
        print_table(out, heading, cells, left=("plan", ""))
    return [{**asdict(row), "as_predicted": row.as_predicted} for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """Runs the settings of a part in `processes` of their own, in order."""

    models: tuple[str, ...]
    gpus: tuple[int, ...]
    processes: int
    out: Console | None

    def part(self, part: str) -> Any:
        if part == "executed":
            return _executed_part(self.out)
        if part == "ablation":
            return self._ablation()
        return self._compared(part)

    def _map(self, work: Any, cases: list[Case]) -> Iterator[Any]:
        if self.processes == 1:
            yield from map(work, cases)
            return
        with ProcessPoolExecutor(self.processes, get_context("spawn")) as pool:
            yield from pool.map(work, cases)

    def _compared(self, part: str) -> dict[str, Any]:
        listed = []
        for compared in self._map(compare, cases_of(part, self.models, self.gpus)):
            listed.append(compared)
            if self.out:
                _print_compared(compared, self.out)
        if self.out:
            _print_grids(listed, self.out)
            _print_counts(listed, self.out)
        return {
            "rows": [asdict(row) for each in listed for row in each.measures],
            "savings": [
                {**asdict(row), "reaches": row.reaches} for each in listed for row in each.savings
            ],
        }

    def _ablation(self) -> list[dict[str, Any]]:
        found = []
        for rows in self._map(ablated, list(ABLATION_CASES)):
            found.extend(rows)
            if self.out:
                _print_ablation(rows, self.out)
        return [{**asdict(row), "name": row.name, "in_time": row.in_time} for row in found]


@click.command()
@click.option("--part", type=click.Choice(PARTS), multiple=True, help="The parts; default: all.")
@click.option(
    "--models",
    default=",".join(MODELS),
    show_default=True,
    help="Comma-separated names of `plan models`, of the parts baselines and pipelines.",
)
@click.option(
    "--gpus",
    default=",".join(map(str, GPUS)),
    show_default=True,
    help="Comma-separated numbers of GPUs, of which pipelines takes the largest.",
)
@click.option("--processes", default=2, show_default=True, help="Settings priced at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON and nothing else.")
def main(part: tuple[str, ...], models: str, gpus: str, processes: int, as_json: bool) -> None:
    """Price every system in every setting, and run one tiny model."""
    out = None if as_json else Console(width=230, highlight=False, markup=False)
    runner = _Runner(
        models=tuple(models.split(",")),
        gpus=tuple(map(int, gpus.split(","))),
        processes=processes,
        out=out,
    )
    found = {}
    for name in part or PARTS:
        started = time.monotonic()
        found[name] = runner.part(name)
        if out:
            say(out, f"{name}: {time.monotonic() - started:.0f} s", "dim")
            say(out)
    if as_json:
        click.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
