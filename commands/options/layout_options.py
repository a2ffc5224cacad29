"""The options of a layout by hand, which `plan estimate` and `plan calibrate` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parplan.commands.options.option_values import (
    ACCESS,
    CHUNK_COMMUNICATION,
    CONTEXT_FORMS,
    EVICTION,
    MESH_ORDERS,
    OFFLOAD,
    RECOMPUTE,
    SCHEDULES,
    STAGE_RECOMPUTE,
)
from parplan.commands.options.sections import LAYOUT
from parplan.commands.style import List, Whole, option, packs, together


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """A layout by hand, the input of `plan estimate`."""

    pp: int = 1
    dp: int | None = None
    tp: int = 1
    cp: int = 1
    context_form: str | None = None
    ep: int = 1
    etp: int = 1
    tp_rows: int = 1
    mesh_order: str | None = None
    micro_batch_size: int = 1
    schedule: str | None = None
    schedule_file: Path | None = None
    virtual_stages: int = 1
    zero: int = 0
    own_zero: tuple[str, ...] = ()
    zero_ranks: int | None = None
    offload: tuple[str, ...] | None = None
    host_blocks: int | None = None
    host_optimizer: int | None = None
    eviction: str | None = None
    chunk_communication: str | None = None
    chunk_access: str | None = None
    memory_limit: str | None = None
    keep_on_host: tuple[str, ...] | None = None
    recompute: str = "none"
    recompute_first_stage: str | None = None
    sequence_parallel: bool = False
    tp_overlap: int = 0


def degree(name: str, text: str, default: int = 1) -> Callable[[Any], Any]:
    """Returns the option for the degree of one axis."""
    return option(
        LAYOUT,
        f"--{name}",
        type=Whole(name.replace("-", "_")),
        default=default,
        show_default=True,
        metavar="N",
        help=text,
    )


def zero_option(text: str) -> Callable[[Any], Any]:
    """Returns the option for the ZeRO stage of all layers."""
    return option(
        LAYOUT,
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        show_default=True,
        metavar="0..3",
        help=text,
    )


micro_batch_option = option(
    LAYOUT,
    "--micro-batch-size",
    type=Whole("micro_batch_size"),
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences in a micro-batch.",
)
layout_options = together(
    degree("pp", "Pipeline stages."),
    option(
        LAYOUT,
        "--dp",
        type=Whole("dp"),
        metavar="N",
        help="Data parallel degree. [default: GPUs / (pp x cp x tp)]",
    ),
    degree("tp", "Tensor parallel degree."),
    degree("ep", "Expert parallel degree: ranks over which whole experts are divided."),
    degree("etp", "Tensor parallel degree of every expert: 1 or tp."),
    degree("tp-rows", "Rows of the grid of tensor parallel ranks: above 1 products lie in 2-D."),
    degree("cp", "Context parallel degree: ranks that divide every sequence."),
    option(
        LAYOUT,
        "--context-form",
        type=click.Choice(CONTEXT_FORMS),
        help="Form of context parallelism. [default: ring]",
    ),
    option(
        LAYOUT,
        "--mesh-order",
        type=click.Choice(MESH_ORDERS),
        help="Order of the axes over the ranks, outermost first. [default: pp-dp-tp]",
    ),
    micro_batch_option,
    option(
        LAYOUT,
        "--schedule",
        type=click.Choice(SCHEDULES),
        help="Pipeline schedule. [default: 1f1b, interleaved with --virtual-stages above 1]",
    ),
    option(
        LAYOUT,
        "--schedule-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Custom schedule instead, one line per rank: 0F0,0F1,0B0,.. (stage, F B I or W, "
        "micro-batch).",
    ),
    option(
        LAYOUT,
        "--virtual-stages",
        type=Whole("virtual_stages"),
        default=1,
        show_default=True,
        metavar="N",
        help="Model chunks per pipeline rank.",
    ),
    zero_option("ZeRO stage of every layer."),
    option(
        LAYOUT,
        "--zero-ranks",
        type=Whole("neighbours"),
        metavar="N",
        help="Neighbouring ranks that hold one copy of the states. [default: all]",
    ),
    option(
        LAYOUT,
        "--offload",
        type=List(click.Choice(OFFLOAD)),
        metavar="WHAT,..",
        help="Host contents: states, or by block in chunks optimizer (states) and parameters (with "
        "the optimizer's); activations; lookup, the token table.",
    ),
    option(
        LAYOUT,
        "--host-blocks",
        type=click.IntRange(0),
        metavar="N",
        help="Last blocks of a rank whose parameters lie on the host. [default: all]",
    ),
    option(
        LAYOUT,
        "--host-optimizer",
        type=click.IntRange(0),
        metavar="N",
        help="Blocks before these with only the optimizer states on the host. [default: all "
        "others]",
    ),
    option(
        LAYOUT,
        "--eviction",
        type=click.Choice(EVICTION),
        help="Rule that picks the chunk to evict from a full device. [default: opt]",
    ),
    option(
        LAYOUT,
        "--chunk-access",
        type=click.Choice(ACCESS),
        help="Unit of a block in chunks that has to be on the device together. [default: block]",
    ),
    option(
        LAYOUT,
        "--chunk-communication",
        type=click.Choice(CHUNK_COMMUNICATION),
        help="Gather and reduce all chunks of a group at once, or a single one after the other: "
        "less memory for gradients, more bytes and smaller messages. [default: group]",
    ),
    option(
        LAYOUT,
        "--memory-limit",
        metavar="SIZE",
        help="Memory that chunks and all else, or stages with recompute by memory, may fill on a "
        "device. [default: as in a search]",
    ),
    option(
        LAYOUT,
        "--own-zero",
        type=List(click.STRING),
        default=(),
        metavar="NAME=0..3,..",
        help="Operators of every block with another ZeRO stage than --zero.",
    ),
    option(
        LAYOUT,
        "--keep-on-host",
        type=List(click.STRING),
        metavar="NAME,..",
        help="Operators of every block whose activations go to the host; all is the same as "
        "--offload activations.",
    ),
    option(
        LAYOUT,
        "--recompute",
        type=click.Choice(RECOMPUTE),
        default="none",
        show_default=True,
        help="Recompute level of every block.",
    ),
    option(
        LAYOUT,
        "--recompute-first-stage",
        metavar="SHARE,..|memory",
        help=STAGE_RECOMPUTE,
    ),
    option(
        LAYOUT,
        "--sequence-parallel",
        is_flag=True,
        help="Split norms and dropouts along the sequence.",
    ),
    option(
        LAYOUT,
        "--tp-overlap",
        type=click.IntRange(0, 3),
        default=0,
        show_default=True,
        help="Overlap of the all-reduces of one half of a micro-batch with compute of the other: "
        "1 in a product, 2 in a block, 3 in a stage.",
    ),
    packs("by_hand", LayoutOptions),
)
