"""`plan estimate`: prices one layout by hand, without a search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands import user_modules
from parplan.commands.options.layout_options import LayoutOptions, layout_options
from parplan.commands.options.result_options import (
    ResultOptions,
    as_json,
    packed_result,
    verbose_option,
)
from parplan.commands.options.search_options import launcher_option
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.options.trace_options import TraceOptions, trace_options
from parplan.commands.output import deliver, require_output
from parplan.commands.searching import with_module
from parplan.commands.style import Command, option

if TYPE_CHECKING:
    from parplan.planner.plan.plan import Plan


@click.command(
    cls=Command,
    epilog="  plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full\n"
    "  plan estimate --model gpt-175b --gpus 64 --tp 8 --pp 8 --sequence-parallel --output "
    "plan.yaml\n"
    "  plan estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --for parplan "
    "--offload optimizer,parameters --host-blocks 20",
)
@target_options
@trace_options
@layout_options
@launcher_option
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Plan file to write as well; - for stdout.",
)
@verbose_option
@as_json
@packed_result
def estimate(
    target: TargetOptions,
    tracing: TraceOptions,
    by_hand: LayoutOptions,
    launchers: tuple[str, ...] | None,
    result: ResultOptions,
) -> None:
    """Price one layout by hand, with the breakdown and the plan file of a search.

    A traced module is cut at even times, or as --stages says.
    """
    from parplan.commands.requests.launchers import (
        one_launcher,
        require_described,
        with_launcher,
    )
    from parplan.commands.requests.layouts import choices_of, layout_of, with_limit
    from parplan.commands.requests.requests import request_of
    from parplan.planner.export.targets import TARGETS
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.search.estimate import estimate_plan
    from parplan.report.plans.summary_context import SummaryContext

    require_output(result.output)
    launcher = one_launcher(launchers)
    target = with_launcher(target, launcher)
    source = user_modules.source_of(target, tracing)
    plan: AnyPlan
    if source is None:
        request = with_limit(request_of(target), by_hand)
        choices = choices_of(request, by_hand)
        plan = estimate_plan(request, layout_of(request, by_hand), choices)
        plan, assumed = with_module(plan, request), request.assumed
        if launcher in TARGETS:
            _require_said(plan, launcher)
    else:
        require_described(launchers)
        plan, assumed = user_modules.estimate(source, target, tracing, by_hand)
    context = SummaryContext(
        assumed=assumed,
        profile=target.profile or "",
        plan_file=result.plan_file,
        whole=result.verbose,
    )
    deliver(plan, context, result.output, as_json=result.as_json)


def _require_said(plan: Plan, launcher: str) -> None:
    """Raises ConfigError for a layout that a launcher cannot say."""
    from parplan.planner.export.exported import export_plan
    from parplan.planner.export.targets import target_named
    from parplan.profiles.errors import ConfigError

    losses = export_plan(plan, target_named(launcher), "plan.yaml").losses
    if losses:
        raise ConfigError(
            f"{launcher} cannot say {'; '.join(loss.what for loss in losses)}",
            hint="change the layout, or leave out --for",
        )
