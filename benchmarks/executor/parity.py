"""The parity matrix: schedules x divisions x models on 2, 4 and 8 gloo ranks beside one process.

    # the whole matrix, about 20 minutes on two cores
    python benchmarks/executor/parity.py
    # a part of it
    python benchmarks/executor/parity.py --world 4 --model gpt

A cell is the worst error of a first-step gradient, max |g - reference| / max(|reference| max,
1e-4). It ends in `!` if that is above 1e-5, a loss of three AdamW steps differs from the
reference's by more than 1e-6, ranks disagree, or a stage held more or fewer micro-batches than its
action list says. On 8 ranks the ways that divide data also have tp 2, those that divide tensors dp
2, and more rows have pp 4. Early recompute, last-no-recompute and SCP recompute in full for every
way, except on a last stage where the schedule forbids it. Plans that the executor refuses are
listed with the reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import torch
from rich.console import Console
from torch.multiprocessing import ProcessRaisedException

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.actions import ActionKind, parse_row
from parplan.costmodels.schedules.schedule import AHEAD, LAST_KEEPS_ALL, Schedule
from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    TrainingOutcome,
    gradient_errors,
    loss_errors,
    run_plans,
    run_reference,
)
from parplan.executor.placed_layers import action_rows
from parplan.executor.rules.all_rules import nearest_legal, refusals
from parplan.planner.plan.plan import Plan
from parplan.report.text import print_table, say
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.external_modules import family_plan, run_foreign_reference

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": Schedule.GPIPE},
    "1f1b": {"schedule": Schedule.ONE_F_ONE_B},
    "interleaved": {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2},
    "zbv": {"schedule": Schedule.ZBV, "virtual_stages": 2},
    "early-recompute": {"schedule": Schedule.EARLY_RECOMPUTE, "recompute": "full"},
    "last-no-recompute": {"schedule": Schedule.LAST_NO_RECOMPUTE, "recompute": "full"},
    "scp": {"schedule": Schedule.SCP, "recompute": "full"},
}
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "tp+sp": {"tp": 2, "sp": True},
    "ZeRO-2": {"dp": 2, "zero": (2,)},
    "ZeRO-3": {"dp": 2, "zero": (3,)},
    "mixed": {"dp": 2, "zero": (2, 0, 1, 2)},
    "offload": {"dp": 2, "zero": (2,)},
    "recompute": {"dp": 2, "recompute": "full"},
}
MODELS: dict[str, tuple[Callable[..., Plan], Callable[[Plan], TrainingOutcome]]] = {
    "gpt": (lambda **settings: make_plan(GPT, **settings), run_reference),
    "llama": (lambda **settings: make_plan(LLAMA, **settings), run_reference),
    "hf-llama": (lambda **settings: family_plan("llama", **settings), run_foreign_reference),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell; `plan` is None if the world has too few ranks for the way."""

    schedule: str
    way: str
    plan: Plan


def cases(model: str, world: int) -> Iterator[Case]:
    """Yield the plans of one model on `world` ranks."""
    build = MODELS[model][0]
    shared = {"num_micro_batches": 4, "global_batch_size": 8}
    for way, settings in WAYS.items():
        if world == 2:
            yield Case(
                schedule="no pipeline",
                way=way,
                plan=_altered(way, build(**shared, **settings), model),
            )
            continue
        more = {}
        if world != 4:
            more = {"tp": 2} if "dp" in settings else {"dp": 2, "zero": (1,)}
        for schedule, how in SCHEDULES.items():
            yield Case(
                schedule=schedule,
                way=way,
                plan=_altered(way, build(**{"pp": 2, **shared, **settings, **how, **more}), model),
            )
            if world == 8 and how["schedule"] in AHEAD:
                plan = _altered(way, build(**{"pp": 4, **shared, **settings, **how}), model)
                yield Case(schedule=f"{schedule}, pp 4", way=way, plan=plan)
    for schedule, how in SCHEDULES.items() if world == 2 else ():
        yield Case(
            schedule=schedule,
            way="pp alone",
            plan=_altered("", build(pp=2, **shared, **how), model),
        )


def _altered(way: str, plan: Plan, model: str) -> Plan:
    """Return the plan altered for its way.

    `mixed` also has different recompute by layer; `offload` puts states and saved activations of
    the executor's blocks on the host, of other operators in each layer plan. A last stage that must
    not recompute does not.
    """
    external = model.startswith("hf")
    change: dict[str, dict[str, Any]] = {}
    if way == "offload":
        change = {
            name: {"offload": (Offload.STATES,), **_kept_on_host(name, external)}
            for name in plan.layer_plans
        }
    if way == "mixed" and not external:
        change = {
            "block-0": {"recompute": ("norm1", "activation", "norm2")},
            "block-1": {"recompute": ("attention",)},
        }
    layer_plans = {
        name: replace(layer_plan, **change.get(name, {}))
        for name, layer_plan in plan.layer_plans.items()
    }
    altered = replace(plan, layer_plans=layer_plans)
    return (
        nearest_legal(altered) or altered if plan.pipeline.schedule in LAST_KEEPS_ALL else altered
    )


def _kept_on_host(name: str, external: bool) -> dict[str, tuple[str, ...]]:
    if external or not name.startswith("block"):
        return {}
    return {
        "keep_on_host": ("norm1", "attention", "fc2")
        if name == "block-1"
        else ("qkv", "attention_out", "fc1", "activation")
    }


def refused(plan: Plan) -> str | None:
    """Return the reason why the executor refuses the plan, or None."""
    return next((f"{refusal.problem}: {rule.why}" for rule, refusal in refusals(plan)), None)


def judged(plan: Plan, outcome: TrainingOutcome, expected: TrainingOutcome) -> tuple[float, bool]:
    """Return the worst gradient error, and whether the cell is good."""
    worst = max(gradient_errors(outcome, expected).values())
    trained = worst <= GRADIENT_TOLERANCE and max(loss_errors(outcome, expected)) <= LOSS_TOLERANCE
    return worst, trained and outcome.agree and outcome.in_flight == listed_in_flight(plan)


def listed_in_flight(plan: Plan) -> dict[int, int]:
    """Return by stage the most micro-batches in flight that the action lists say.

    A micro-batch is in flight from its forward pass to the end of its backward pass.
    """
    changes, most = (
        {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1},
        dict[int, int](),
    )
    for rank, row in enumerate(action_rows(plan) if plan.mesh.pp > 1 else ()):
        held = Counter[int]()
        for stage, work, _ in parse_row(row, rank):
            held[stage] += changes.get(work, 0)
            most[stage] = max(most.get(stage, 0), held[stage])
    return most


def run(batch: Sequence[Case], expected: TrainingOutcome) -> tuple[dict[tuple[str, str], str], int]:
    """Run the cases in turn in one world; return their cells and the number of bad ones."""
    cells, bad = {}, 0
    try:
        outcomes: list[TrainingOutcome | None] = (
            list(run_plans([case.plan for case in batch])) if batch else []
        )
    except ProcessRaisedException:  # each is run alone to tell which one failed
        outcomes = [_alone(case) for case in batch]
    for case, outcome in zip(batch, outcomes, strict=True):
        worst, good = (
            judged(case.plan, outcome, expected) if outcome is not None else (float("nan"), False)
        )
        cells[case.schedule, case.way] = (
            "failed!" if outcome is None else f"{worst:.0e}{'' if good else '!'}"
        )
        bad += not good
    return cells, bad


def _alone(case: Case) -> TrainingOutcome | None:
    try:
        return run_plans([case.plan])[0]
    except ProcessRaisedException as error:
        click.echo(f"{case.schedule}, {case.way}: {str(error).strip().splitlines()[-1]}", err=True)
        return None


@click.command()
@click.option(
    "--world",
    "worlds",
    type=click.Choice(["2", "4", "8"]),
    multiple=True,
    help="Ranks; may be repeated. [default: all]",
)
@click.option(
    "--model",
    "models",
    type=click.Choice(list(MODELS)),
    multiple=True,
    help="May be repeated. [default: all]",
)
def main(worlds: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Print the parity matrix; the exit code is 1 where a cell is bad."""
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    out = Console(width=140, highlight=False)
    total, bad = 0, 0
    reasons: dict[str, int] = {}
    for model in models or MODELS:
        for world in map(int, worlds or ("2", "4", "8")):
            every = list(cases(model, world))
            why = {(case.schedule, case.way): refused(case.plan) for case in every}
            legal = [case for case in every if why[case.schedule, case.way] is None]
            cells, wrong = run(legal, MODELS[model][1](legal[0].plan))
            total, bad = total + len(legal), bad + wrong
            for reason in filter(None, why.values()):
                reasons[reason] = reasons.get(reason, 0) + 1
            ways = list(dict.fromkeys(case.way for case in every))
            say(out, f"{model} on {world} ranks")
            print_table(
                out,
                ("schedule", *ways),
                (
                    (
                        schedule,
                        *(
                            cells.get((schedule, way), "refused" if (schedule, way) in why else "-")
                            for way in ways
                        ),
                    )
                    for schedule in dict.fromkeys(case.schedule for case in every)
                ),
                left=("schedule",),
            )
    for reason, count in reasons.items():
        say(out, f"refused {count} times: {reason}")
    say(out, f"{total} plans run, {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
