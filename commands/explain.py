"""`plan explain`: the strategies of every operator with their prices."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from parplan.commands.options.layout_options import degree, micro_batch_option, zero_option
from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import LAYOUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import Command, option, print_json

AXIS = "tensor-parallel axis"


@click.command(
    cls=Command,
    epilog="  plan explain --model gpt-20b --gpus 64 --tp 8 --operator fc1\n"
    "  plan explain --model llama3-8b --gpus 8 --tp 2 --micro-batch-size 2 --json | jq "
    "'.[].rejected'",
)
@target_options
@degree("tp", "Tensor parallel degree.", default=8)
@micro_batch_option
@zero_option("ZeRO stage of the states.")
@option(
    LAYOUT,
    "--weights-over-data",
    is_flag=True,
    help="List those of a block over dp and tp, where both may divide weights.",
)
@option(LAYOUT, "--operator", metavar="NAME", help="Operator to list. [default: all]")
@as_json
def explain(
    target: TargetOptions,
    tp: int,
    micro_batch_size: int,
    zero: int,
    weights_over_data: bool,
    operator: str | None,
    as_json: bool,
) -> None:
    """List the strategies of every operator with their prices, and why others are rejected."""
    from parplan.commands.requests.layouts import layout_prices
    from parplan.commands.requests.requests import request_of
    from parplan.planner.layer_options.operator_strategies import operator_strategies
    from parplan.report.plans.format_notes import format_notes
    from parplan.report.plans.strategy_table import print_strategies, strategies_document
    from parplan.report.text import console

    layout, price_cache = layout_prices(request_of(target), tp, micro_batch_size)
    layout = replace(layout, weights_over_data=weights_over_data and layout.mesh.dp > 1)
    strategies = list(operator_strategies(layout, zero, price_cache, operator))
    if as_json:
        print_json(strategies_document(strategies))
    else:
        axes = "data-parallel and the tensor-parallel axis" if layout.weights_over_data else AXIS
        capability = price_cache.machine.cluster.device.compute_capability
        notes = format_notes(price_cache.training, capability)
        print_strategies(strategies, console(sys.stdout), f"{axes} of {layout.mesh}", notes)
