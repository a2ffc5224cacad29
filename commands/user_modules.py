"""User modules on the command line: the search for a traced one, and the check of its plan."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options import PinOptions, SearchFlags, TargetOptions, TraceOptions
from parplan.commands.output import require_torch
from parplan.commands.searching import Question
from parplan.commands.style import print_json

if TYPE_CHECKING:
    from parplan.executor.checking.parity import TrainingOutcome
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
    from parplan.profiles.models.module_source import ModuleSource

NOT_EQUAL = 2  # the plan does not train as one process does
NOT_AS_PREDICTED = 3  # training is equal but bytes differ; the code of a stage that does not fit


def source_of(target: TargetOptions, tracing: TraceOptions) -> ModuleSource | None:
    """Returns the module to trace, None for a model that is described. Raises ConfigError."""
    from parplan.commands.requests.traced import traced_source
    from parplan.profiles.errors import ConfigError

    source = traced_source(target.model, trace=tracing.trace)
    for name in ("stages", "cross_skips") if source is None else ():
        if getattr(tracing, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for traced modules, --model is {target.model}",
                hint="leave it out",
            )
    return source


def traced_question(
    source: ModuleSource,
    target: TargetOptions,
    tracing: TraceOptions,
    pins: PinOptions,
    flags: SearchFlags,
) -> Question:
    """Traces the module and returns the question about it. Raises ConfigError."""
    from parplan.commands.requests.requests import all_assumed, with_flags
    from parplan.commands.requests.traced import module_request, with_assumed_of
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.planner.traced.plan_traced import TracedFactory, traced_request
    from parplan.planner.traced.stage_rules import StageRule, parse_stages

    request = module_request(source, target, pins, flags)
    rule = parse_stages(tracing.stages) if tracing.stages else StageRule()
    require_torch("a module is traced, which needs torch")
    # The import takes seconds, which belong to the start and not to the time limit.
    importlib.import_module("torch")
    request = with_flags(request, flags)
    started_s = time.monotonic()

    def assumed_of(plan: AnyPlan) -> tuple[str, ...]:
        assert isinstance(plan, TracedPlan), "the module is traced"
        return all_assumed(with_assumed_of(plan, request), flags)

    with users_modules():
        traced = traced_request(request)
    return Question(
        factory=TracedFactory(traced, rule, cross_skips=tracing.cross_skips),
        assumed_of=assumed_of,
        started_s=started_s,
    )


def require_executed(*, execute: bool) -> None:
    """Raises ConfigError for a check of a traced module's plan without --execute."""
    from parplan.profiles.errors import ConfigError

    if not execute:
        raise ConfigError(
            "a plan of a traced module has no dry run",
            hint="add --execute: it is trained as planned on gloo processes",
        )


def check(plan: TracedPlan, *, as_json: bool) -> int:
    """Trains the module as planned on gloo processes and in one process.

    Returns the exit code of `say_parity`.
    """
    import torch

    from parplan.executor.traced.traced_parity import (
        comparable,
        run_traced_plans,
        run_traced_reference,
    )
    from parplan.report.text import console

    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    with console(sys.stderr).status(f"training {plan.mesh} of {plan.traced.name}, and one process"):
        small = comparable(plan)
        outcome = run_traced_plans([small])[0]
        expected = run_traced_reference(small, by_micro_batch=True)
    return say_parity(plan, small, outcome, expected, as_json=as_json)


def say_parity(
    plan: Plan | TracedPlan,
    small: Plan | TracedPlan,
    outcome: TrainingOutcome,
    expected: TrainingOutcome,
    *,
    as_json: bool,
) -> int:
    """Prints how far the ranks are from one process; returns the code of `plan check --execute`."""
    from parplan.executor.checking.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE, gradient_errors
    from parplan.report.runs.parity_table import Parity, parity_document, print_parity
    from parplan.report.text import console

    result = Parity(
        plan=plan,
        small=small,
        losses=tuple(zip(outcome.losses, expected.losses, strict=True)),
        gradients=gradient_errors(outcome, expected),
        agree=outcome.agree,
        as_predicted=all(predicted == measured for predicted, measured in outcome.states.values()),
        moved=tuple(outcome.moved.values()),
        loss_tolerance=LOSS_TOLERANCE,
        gradient_tolerance=GRADIENT_TOLERANCE,
    )
    if as_json:
        print_json(parity_document(result))
    else:
        print_parity(result, console(sys.stdout))
    if not result.passed:
        return NOT_EQUAL
    return 0 if result.bytes_as_predicted else NOT_AS_PREDICTED


def say_module(plan: Plan | TracedPlan, plan_file: Path, *, trust: bool) -> None:
    """Prints on stderr which module the plan imports from where.

    Raises ConfigError for a module that needs --trust-module.
    """
    from parplan.profiles.models.module_trust import trusted_module_note

    note = trusted_module_note(plan.module, str(plan_file), trust=trust)
    if note is not None:
        click.echo(f"note: {note}", err=True)


@contextlib.contextmanager
def users_modules() -> Iterator[None]:
    """Lets modules of the current folder be imported, as with python -m."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
