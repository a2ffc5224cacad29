"""The gain of each option of the own executor's space: the best step with it and without it.

    python -m benchmarks.search.option_wins                       # a table, 15 minutes
    python -m benchmarks.search.option_wins --only gpt-20b --option zero-bubble --time-limit 60

The first search of a request has the whole space of `--for parplan`. Each further one closes an
option, or opens one that is searched by name alone. A gain is the share by which the step without
the option is longer than the step with it:

    gain = t_without / t_with - 1

A gain is of the plans that the searches find. The gap of the whole space, which the table has
beside its step, says how much faster a plan may be that none of them finds, so that a gain may be
negative where the narrower search finds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from parplan.commands.launcher_searches import launcher_questions
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.searching import answer
from parplan.planner.launchers.known_launchers import EXECUTOR
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import PlannerError

LEAST = 5e-4  # share of a step; a smaller gain counts as none
REQUESTS: Mapping[str, TargetOptions] = {
    "gpt-20b, 64 a100-80gb": TargetOptions(model="gpt-20b", gpus=64, gpu="a100-80gb"),
    "llama3-70b, 128 h100-80gb": TargetOptions(model="llama3-70b", gpus=128, gpu="h100-80gb"),
    "llama3-8b, 16 a100-80gb": TargetOptions(model="llama3-8b", gpus=16, gpu="a100-80gb"),
    "llama3-8b, 32 h100-80gb, 16 x 131,072 tokens": TargetOptions(
        model="llama3-8b", gpus=32, gpu="h100-80gb", seq_length=131072, global_batch_size=16
    ),
    "mixtral-8x7b, 64 h100-80gb": TargetOptions(model="mixtral-8x7b", gpus=64, gpu="h100-80gb"),
    "gpt-8.3b, 32 a100-80gb": TargetOptions(model="gpt-8.3b", gpus=32, gpu="a100-80gb"),
}


@dataclass(frozen=True, slots=True)
class SearchedOption:
    """An option of the space.

    pins     the pins of the second search
    opens    the pins open the option; otherwise they close it
    """

    what: str
    pins: PinOptions
    opens: bool = False


OPTIONS: Mapping[str, SearchedOption] = {
    "overlap": SearchedOption("half-batch overlap", PinOptions(tp_overlap=(0,))),
    "over-data": SearchedOption("weights over data", PinOptions(weights_over_data=False)),
    "rows": SearchedOption("tensor grid", PinOptions(tp_rows=(1, 2, 4)), opens=True),
    "lists": SearchedOption(
        "lists of recomputed operators", PinOptions(recompute=("none", "selective", "full"))
    ),
    "sharding": SearchedOption("free division of operators", PinOptions(megatron_sharding=True)),
    "order": SearchedOption("order dp-pp-tp", PinOptions(mesh_order=("pp-dp-tp",))),
    "zero-bubble": SearchedOption("zero-bubble V", PinOptions(forbid=("schedule=zbv",))),
    "ahead": SearchedOption(
        "early recompute and the shifted critical path",
        PinOptions(forbid=("schedule=early-recompute", "schedule=scp")),
    ),
}


def best_plan(target: TargetOptions, pins: PinOptions, time_limit_s: float) -> Plan | PlannerError:
    """Returns the own executor's best plan, or the error of a search that has none."""
    flags = SearchFlags(launchers=(EXECUTOR,), time_limit=time_limit_s)
    (asked,) = launcher_questions((EXECUTOR,), target, pins, flags)
    try:
        if asked.question is None:
            assert asked.error is not None, "a launcher without a question has a reason"
            raise asked.error
        plan, _ = answer(asked.question)
    except PlannerError as error:
        return error
    assert isinstance(plan, Plan), "the model is described"
    return plan


def gain_text(option: SearchedOption, base: Plan | PlannerError, other: Plan | PlannerError) -> str:
    """Returns the gain of an option in percent of the step with it."""
    if isinstance(base, PlannerError) or isinstance(other, PlannerError):
        return "no plan in time"
    with_s, without_s = _step_s(base), _step_s(other)
    if option.opens:
        with_s, without_s = without_s, with_s
    gain = without_s / with_s - 1
    return f"{100 * gain:+.1f} %" if abs(gain) >= LEAST else "0"


def _step_s(plan: Plan) -> float:
    return plan.predicted.step_time_s.value


def _text(plan: Plan | PlannerError) -> str:
    """Returns the step of a plan with its gap."""
    if isinstance(plan, PlannerError):
        return "no plan in time"
    return f"{_step_s(plan):.2f} s, gap {100 * plan.search.gap:.1f} %"


def _print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


@click.command()
@click.option("--only", default="", help="Requests whose names begin so.")
@click.option("--option", "names", help="Names of options, with commas.")
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Of a search.")
def main(only: str, names: str | None, time_limit: float) -> None:
    """Print the gain of each option of the own executor's space."""
    options = [OPTIONS[name] for name in names.split(",")] if names else list(OPTIONS.values())
    requests = {name: asked for name, asked in REQUESTS.items() if name.startswith(only)}
    _print_row("option", *requests)
    print("|---" * (len(requests) + 1) + "|")
    bases = [best_plan(asked, PinOptions(), time_limit) for asked in requests.values()]
    _print_row("the whole space", *map(_text, bases))
    for option in options:
        others = [best_plan(asked, option.pins, time_limit) for asked in requests.values()]
        gains = (gain_text(option, *plans) for plans in zip(bases, others, strict=True))
        _print_row(option.what, *gains)


if __name__ == "__main__":
    main()
