"""`plan estimate`: prices one layout by hand, without a search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from parplan.commands import user_modules
from parplan.commands.options import (
    ACCESS,
    CHUNK_COMMUNICATION,
    CONTEXT_FORMS,
    EVICTION,
    LAYOUT,
    MESH_ORDERS,
    OFFLOAD,
    OUTPUT,
    RECOMPUTE,
    SCHEDULES,
    STAGE_RECOMPUTE,
    LayoutOptions,
    ResultOptions,
    TargetOptions,
    TraceOptions,
    as_json,
    micro_batch_option,
    packed_result,
    target_options,
    trace_options,
)
from parplan.commands.output import deliver, require_output
from parplan.commands.searching import with_module
from parplan.commands.style import Command, List, Whole, option, packs


def _degree(name: str, text: str) -> Callable[[Any], Any]:
    """Returns the option for the degree of one axis, 1 by default."""
    return option(
        LAYOUT,
        f"--{name}",
        type=Whole(name),
        default=1,
        show_default=True,
        metavar="N",
        help=text,
    )


@click.command(
    cls=Command,
    epilog="  plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full\n"
    "  plan estimate --model gpt-175b --gpus 64 --tp 8 --pp 8 --sequence-parallel --output "
    "plan.yaml\n"
    "  plan estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --stack parplan "
    "--offload optimizer,parameters --host-blocks 20",
)
@target_options
@trace_options
@_degree("pp", "Pipeline stages.")
@option(
    LAYOUT,
    "--dp",
    type=Whole("dp"),
    metavar="N",
    help="Data parallel degree. [default: GPUs / (pp x cp x tp)]",
)
@_degree("tp", "Tensor parallel degree.")
@_degree("ep", "Expert parallel degree: ranks over which whole experts are divided.")
@_degree("etp", "Tensor parallel degree of every expert: 1 or tp.")
@_degree("cp", "Context parallel degree: ranks that divide every sequence.")
@option(
    LAYOUT,
    "--context-form",
    type=click.Choice(CONTEXT_FORMS),
    help="Form of context parallelism. [default: ring]",
)
@option(
    LAYOUT,
    "--mesh-order",
    type=click.Choice(MESH_ORDERS),
    help="Order of the axes over the ranks, outermost first. [default: pp-dp-tp]",
)
@micro_batch_option
@option(
    LAYOUT,
    "--schedule",
    type=click.Choice(SCHEDULES),
    help="Pipeline schedule. [default: 1f1b, interleaved with --virtual-stages above 1]",
)
@option(
    LAYOUT,
    "--schedule-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Custom schedule instead, one line per rank: 0F0,0F1,0B0,.. (stage, F B I or W, "
    "micro-batch).",
)
@option(
    LAYOUT,
    "--virtual-stages",
    type=Whole("virtual_stages"),
    default=1,
    show_default=True,
    metavar="N",
    help="Model chunks per pipeline rank.",
)
@option(
    LAYOUT,
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    metavar="0..3",
    help="ZeRO stage of every layer.",
)
@option(
    LAYOUT,
    "--zero-ranks",
    type=Whole("neighbours"),
    metavar="N",
    help="Neighbouring ranks that hold one copy of the states. [default: all]",
)
@option(
    LAYOUT,
    "--offload",
    type=List(click.Choice(OFFLOAD)),
    metavar="WHAT,..",
    help="Host contents: states, or by block in chunks optimizer (states) and parameters (with "
    "the optimizer's); activations; lookup, the token table.",
)
@option(
    LAYOUT,
    "--host-blocks",
    type=click.IntRange(0),
    metavar="N",
    help="Last blocks of a rank whose parameters lie on the host. [default: all]",
)
@option(
    LAYOUT,
    "--host-optimizer",
    type=click.IntRange(0),
    metavar="N",
    help="Blocks before these with only the optimizer states on the host. [default: all others]",
)
@option(
    LAYOUT,
    "--eviction",
    type=click.Choice(EVICTION),
    help="Rule that picks the chunk to evict from a full device. [default: opt]",
)
@option(
    LAYOUT,
    "--chunk-access",
    type=click.Choice(ACCESS),
    help="Unit of a block in chunks that has to be on the device together. [default: block]",
)
@option(
    LAYOUT,
    "--chunk-communication",
    type=click.Choice(CHUNK_COMMUNICATION),
    help="Gather and reduce all chunks of a group at once, or a single one after the other: less "
    "memory for gradients, more bytes and smaller messages. [default: group]",
)
@option(
    LAYOUT,
    "--memory-limit",
    metavar="SIZE",
    help="Memory that chunks and all else, or stages with recompute by memory, may fill on a "
    "device. [default: as in a search]",
)
@option(
    LAYOUT,
    "--own-zero",
    type=List(click.STRING),
    default=(),
    metavar="NAME=0..3,..",
    help="Operators of every block with another ZeRO stage than --zero.",
)
@option(
    LAYOUT,
    "--keep-on-host",
    type=List(click.STRING),
    metavar="NAME,..",
    help="Operators of every block whose activations go to the host; all is the same as --offload "
    "activations.",
)
@option(
    LAYOUT,
    "--recompute",
    type=click.Choice(RECOMPUTE),
    default="none",
    show_default=True,
    help="Recompute level of every block.",
)
@option(
    LAYOUT,
    "--recompute-first-stage",
    metavar="SHARE,..|memory",
    help=STAGE_RECOMPUTE,
)
@option(
    LAYOUT,
    "--sequence-parallel",
    is_flag=True,
    help="Split norms and dropouts along the sequence.",
)
@option(
    LAYOUT,
    "--tp-overlap",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="Overlap of the all-reduces of one half of a micro-batch with compute of the other: 1 in "
    "a product, 2 in a block, 3 in a stage.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Plan file to write as well; - for stdout.",
)
@as_json
@packs("by_hand", LayoutOptions)
@packed_result
def estimate(
    target: TargetOptions, tracing: TraceOptions, by_hand: LayoutOptions, result: ResultOptions
) -> None:
    """Price one layout by hand, with the breakdown and the plan file of a search.

    A traced module is cut at even times, or as --stages says.
    """
    from parplan.commands.requests.layouts import choices_of, layout_of, with_limit
    from parplan.commands.requests.requests import request_of
    from parplan.planner.plan.traced_plan import AnyPlan
    from parplan.planner.search.estimate import estimate_plan
    from parplan.report.plans.summary import SummaryContext

    require_output(result.output)
    source = user_modules.source_of(target, tracing)
    plan: AnyPlan
    if source is None:
        request = with_limit(request_of(target), by_hand)
        choices = choices_of(request, by_hand)
        plan = estimate_plan(request, layout_of(request, by_hand), choices)
        plan, assumed = with_module(plan, request), request.assumed
    else:
        plan, assumed = user_modules.estimate(source, target, tracing, by_hand)
    context = SummaryContext(
        assumed=assumed,
        profile=target.profile or "",
        plan_file=result.plan_file,
    )
    deliver(plan, context, result.output, as_json=result.as_json)
