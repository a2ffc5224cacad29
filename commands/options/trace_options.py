"""Options of traced modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from parplan.commands.options.option_values import SHARDS
from parplan.commands.options.sections import PINS, WHAT
from parplan.commands.style import option, packs, together


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of traced modules."""

    trace: bool = False
    shards: str | None = None
    stages: str | None = None
    cross_skips: bool = False
    tp_rules: Path | None = None


trace_options = together(
    option(
        WHAT,
        "--trace",
        is_flag=True,
        help="Trace the model of a config.json even if its family is described.",
    ),
    option(
        PINS,
        "--shards",
        type=click.Choice(SHARDS),
        help="Cut of a traced module into the shards that stages consist of: quota, equal "
        "parameters; or merge, the narrowest cuts. [default: quota]",
    ),
    option(
        PINS,
        "--stages",
        metavar="RULE|N,..|NAME,..",
        help="Stages of a traced module: uniform, parameters, ilp, shards by stage, or the "
        "submodules at which all but the first stage begin. [default: ilp]",
    ),
    option(
        PINS,
        "--cross-skips",
        is_flag=True,
        help="Let skip connections of a traced module cross stages.",
    ),
    option(
        PINS,
        "--tp-rules",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="YAML with names of submodules under column, row, vocabulary and replicated, which "
        "override the tensor parallelism that a trace derives.",
    ),
    packs("tracing", TraceOptions),
)
