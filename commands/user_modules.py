"""User modules on the command line: the request for a traced one, and the check of its plan."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.commands.options.layout_options import LayoutOptions
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.options.trace_options import TraceOptions
from parplan.commands.output import require_torch
from parplan.commands.searching import Question
from parplan.commands.style import print_json, tell

if TYPE_CHECKING:
    from parplan.costmodels.chunks.chunk_operations import RankChunks
    from parplan.costmodels.chunks.measured_bytes import ChunkScheduler
    from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
    from parplan.executor.checking.parity import TrainingOutcome
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
    from parplan.planner.traced.plan_traced import TracedFactory
    from parplan.planner.traced.shards import Cutting
    from parplan.profiles.models.module_source import ModuleSource
    from parplan.profiles.models.tp_rules import TpRules
    from parplan.profiles.models.traced_model import TracedModel

NOT_EQUAL = 2  # the plan does not train as one process does
NOT_FITTING = 3  # the exit code of InfeasibleError
NOT_AS_PREDICTED = 3  # training is equal but bytes differ; the code of a stage that does not fit


def source_of(target: TargetOptions, tracing: TraceOptions) -> ModuleSource | None:
    """Returns the module to trace, None for a model that is described. Raises ConfigError."""
    from parplan.commands.requests.traced import traced_source
    from parplan.profiles.errors import ConfigError

    source = traced_source(target.model, trace=tracing.trace)
    for name in ("shards", "stages", "cross_skips", "tp_rules") if source is None else ():
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
    from parplan.commands.requests.requests import FRONT, all_assumed, with_flags
    from parplan.commands.requests.traced import module_request, offload_assumed, with_assumed_of
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
        assumed = all_assumed(with_assumed_of(plan, request), flags)
        return *assumed, *offload_assumed(request.constraints, plan)

    with users_modules():
        traced = traced_request(request, _tp_rules(tracing))
    factory = TracedFactory(traced, rule, _cutting(tracing), front=flags.objective == FRONT)
    return Question(
        factory=factory,
        assumed_of=assumed_of,
        explained=partial(_print_whole, factory),
        started_s=started_s,
    )


def _tp_rules(tracing: TraceOptions) -> TpRules | None:
    from parplan.profiles.models.tp_rules import read_tp_rules

    return None if tracing.tp_rules is None else read_tp_rules(tracing.tp_rules)


def _cutting(tracing: TraceOptions) -> Cutting:
    from parplan.planner.traced.shards import Cutting, CutWay

    return Cutting(way=CutWay(tracing.shards or "quota"), cross_skips=tracing.cross_skips)


def _print_whole(factory: TracedFactory, plan: AnyPlan, to_stderr: bool) -> None:
    """Prints the operators that the tensor parallelism of a plan leaves whole."""
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.planner.traced.estimate_traced import module_prices
    from parplan.planner.traced.whole_operators import whole_operators
    from parplan.report.searches.whole_table import print_whole
    from parplan.report.text import console

    assert isinstance(plan, TracedPlan), "the module is traced"
    if plan.mesh.tp > 1:
        whole = whole_operators(plan, module_prices(factory.prices(factory.offload or ())))
        print_whole(whole, plan.mesh.tp, console(sys.stderr if to_stderr else sys.stdout))


def estimate(
    source: ModuleSource, target: TargetOptions, tracing: TraceOptions, by_hand: LayoutOptions
) -> tuple[TracedPlan, tuple[str, ...]]:
    """Traces the module and returns its plan by hand, with a phrase for every default.

    Raises ConfigError.
    """
    from parplan.commands.requests.traced import estimate_request, with_assumed_of
    from parplan.planner.traced.estimate_traced import estimate_traced_plan
    from parplan.planner.traced.plan_traced import traced_request
    from parplan.planner.traced.stage_rules import StageRule, parse_stages

    request, chunks = estimate_request(source, target, by_hand)
    rule = parse_stages(tracing.stages) if tracing.stages else StageRule()
    require_torch("a module is traced, which needs torch")
    with users_modules():
        traced = traced_request(request, _tp_rules(tracing))
    plan = estimate_traced_plan(traced, rule, _cutting(tracing), chunks)
    return plan, with_assumed_of(plan, request).assumed


def traced_again(plan: TracedPlan) -> TracedModel:
    """Returns a new trace of the module of a plan. Raises ConfigError."""
    from parplan.planner.request import PlanRequest
    from parplan.planner.traced.plan_traced import traced_request

    require_torch("a module is traced, which needs torch")
    request = PlanRequest(model=plan.module, cluster=plan.cluster, training=plan.training)
    with users_modules():
        return traced_request(request, plan.tp_rules).model


def chunk_schedulers_of(plan: AnyPlan, *, traces: bool) -> tuple[ChunkScheduler, ...]:
    """Returns what makes the chunk schedule of each pipeline rank, where a run needs it.

    That is in a traced plan with chunks, and with `traces` in a described one. Raises ConfigError
    where a new trace of its module has other shards or chunks, and with `traces` for a plan without
    chunks.
    """
    from parplan.planner.plan import plan_chunks
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.planner.traced.traced_chunks import chunk_schedulers
    from parplan.planner.traced.traced_strategy import reprice_traced
    from parplan.profiles.errors import ConfigError

    if traces and plan.chunks is None:
        raise ConfigError(
            "--trace-memory: the plan has no chunks, whose schedule it corrects",
            hint="leave it out, or make a plan with --offload optimizer,parameters",
        )
    if isinstance(plan, TracedPlan):
        return (
            chunk_schedulers(reprice_traced(plan, traced_again(plan)))
            if plan.chunks is not None
            else ()
        )
    return plan_chunks.chunk_schedulers_of(plan) if traces else ()


def chunks_of_module(
    plan: TracedPlan, plan_file: Path, rank: int
) -> tuple[RankChunks, LayerPriceCache]:
    """Traces the module of a plan with chunks again, and returns a rank's chunks and the prices.

    Raises ConfigError as `chunk_schedulers_of` does, and where the module is not trusted.
    """
    from parplan.planner.traced.traced_chunks import chunk_schedules
    from parplan.planner.traced.traced_strategy import reprice_traced

    with users_modules():
        say_module(plan, plan_file, trust=False)
        priced = reprice_traced(plan, traced_again(plan))
    return chunk_schedules(priced)[rank], priced.price_cache


def dry_check(plan: TracedPlan, ranks: Sequence[int], *, as_json: bool) -> int:
    """Traces the module again, compares its shards with the plan, and prices the plan today.

    Returns 0, or NOT_FITTING where a pipeline rank does not fit its device, or the plan the memory
    of a host. Raises ConfigError where the trace has other shards.
    """
    from parplan.executor.rules.traced_rules import validate_traced_plan
    from parplan.planner.traced.traced_strategy import reprice_traced
    from parplan.report.runs.chunk_check_table import print_chunks
    from parplan.report.runs.traced_check_document import traced_check_document
    from parplan.report.runs.traced_check_table import print_traced_check, shortage
    from parplan.report.text import console, say

    validate_traced_plan(plan)
    today = reprice_traced(plan, traced_again(plan)).plan
    if as_json:
        print_json(traced_check_document(plan, today, ranks))
        return NOT_FITTING if shortage(today, ranks) else 0
    out = console(sys.stdout)
    print_traced_check(plan, today, ranks, out)
    if plan.chunks is not None:
        say(out)
        print_chunks(plan, today, ranks, out)
    return NOT_FITTING if shortage(today, ranks) else 0


def execute(plan: TracedPlan, *, as_json: bool) -> int:
    """Trains the module as planned on gloo processes and in one process.

    Returns the exit code of `say_parity`.
    """
    import torch

    from parplan.executor.traced.traced_parity import (
        comparable,
        run_traced_plans,
        run_traced_reference,
    )
    from parplan.planner.traced.traced_chunks import chunk_schedules, in_smallest_budget
    from parplan.report.text import console

    torch.set_num_threads(1)  # a fork must not inherit a pool of threads
    with console(sys.stderr).status(f"training {plan.mesh} of {plan.traced.name}, and one process"):
        small = comparable(plan)
        schedules: tuple[RankChunks, ...] = ()
        if small.chunks is not None:
            priced = in_smallest_budget(small, traced_again(small))
            small, schedules = priced.plan, chunk_schedules(priced)
        outcome = run_traced_plans([small], schedules)[0]
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
    from parplan.executor.checking.parity import (
        GRADIENT_TOLERANCE,
        gradient_errors,
        loss_tolerance,
    )
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
        loss_tolerance=loss_tolerance(plan.training.optimizer),
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
        tell(f"note: {note}")


@contextlib.contextmanager
def users_modules() -> Iterator[None]:
    """Lets modules of the current folder be imported, as with python -m."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
