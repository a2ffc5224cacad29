"""Options for failures of the cluster, from which the goodput of a run follows."""

from __future__ import annotations

from dataclasses import dataclass

import click

from parplan.commands.options.sections import FAILURES
from parplan.commands.style import option, packs, together


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """Failures and what follows them; None where the user left one open."""

    mtbf: str | None = None
    restart_time: str | None = None
    repair_time: str | None = None
    storage: str | None = None
    spare_nodes: int | None = None


failure_options = together(
    option(
        FAILURES,
        "--mtbf",
        metavar="SPAN",
        help="Mean time between failures of one GPU that stop the run, such as 50000h: prints the "
        "goodput, the share of the time in which the run advances.",
    ),
    option(
        FAILURES,
        "--restart-time",
        metavar="SPAN",
        help="Time from a failure to the next step, without reading the checkpoint. [default: "
        "10min]",
    ),
    option(
        FAILURES,
        "--repair-time",
        metavar="SPAN",
        help="Time for which a failed node is away. [default: 24h]",
    ),
    option(
        FAILURES,
        "--storage",
        metavar="RATE",
        help="Rate at which all nodes together write a checkpoint. [default: 1GB/s a node]",
    ),
    option(
        FAILURES,
        "--spare-nodes",
        type=click.IntRange(0),
        metavar="N",
        help="Nodes beside --gpus that replace failed ones. [default: as many as pay; --objective "
        "goodput takes them from --gpus]",
    ),
    packs("failing", FailureOptions),
)
