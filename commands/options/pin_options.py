"""Options that pin and forbid choices of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from parplan.commands.options.option_values import (
    ACCESS,
    CHUNK_COMMUNICATION,
    CONTEXT_FORMS,
    MESH_ORDERS,
    RECOMPUTE,
    SCHEDULES,
    SEARCHED_OFFLOAD,
    STAGE_RECOMPUTE,
)
from parplan.commands.options.sections import PINS
from parplan.commands.style import List, Whole, option, packs, together


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOptions:
    """Pinned and forbidden choices as the user gave them."""

    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    context_form: tuple[str, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None
    tp_rows: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None
    mesh_order: tuple[str, ...] | None = None
    zero: tuple[int, ...] | None = None
    zero_ranks: int | None = None
    zero_by_operator: bool = False
    recompute: tuple[str, ...] | None = None
    recompute_first_stage: str | None = None
    sequence_parallel: bool | None = None
    tp_overlap: tuple[int, ...] | None = None
    tp_across_nodes: bool = False
    megatron_sharding: bool = False
    weights_over_data: bool | None = None
    offload: tuple[str, ...] | None = None
    chunk_communication: str | None = None
    chunk_access: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()


def pin(name: str, item: click.ParamType[Any], metavar: str, text: str) -> Callable[[Any], Any]:
    """Returns an option for the allowed values of a choice, separated by commas."""
    return option(PINS, name, type=List(item), metavar=metavar, help=text)


pin_options = together(
    pin("--pp", Whole("pp"), "N,..", "Pipeline stages allowed."),
    pin("--dp", Whole("dp"), "N,..", "Data parallel degrees allowed."),
    pin("--tp", Whole("tp"), "N,..", "Tensor parallel degrees allowed."),
    pin(
        "--cp",
        Whole("cp"),
        "N,..",
        "Context parallel degrees allowed: ranks that divide every sequence. [default: 1; others "
        "from 16,384 tokens on, or with fewer sequences than GPUs]",
    ),
    pin(
        "--context-form",
        click.Choice(CONTEXT_FORMS),
        "NAME,..",
        f"Forms of context parallelism allowed: {', '.join(CONTEXT_FORMS)}. [default: those that "
        "the stack runs]",
    ),
    pin(
        "--ep",
        Whole("ep"),
        "N,..",
        "Expert parallel degrees allowed: ranks over which whole experts are divided.",
    ),
    pin(
        "--etp",
        Whole("etp"),
        "N,..",
        "Tensor parallel degrees of every expert allowed: 1 or tp.",
    ),
    pin(
        "--tp-rows",
        Whole("tp_rows"),
        "N,..",
        "Rows of a grid of tensor parallel ranks allowed, which divides products in two dims. "
        "[default: 1]",
    ),
    pin(
        "--micro-batch-size",
        Whole("micro_batch_size"),
        "N,..",
        "Sequences in a micro-batch allowed.",
    ),
    pin(
        "--virtual-stages",
        Whole("virtual_stages"),
        "N,..",
        "Model chunks per pipeline rank allowed.",
    ),
    pin(
        "--schedule",
        click.Choice(SCHEDULES),
        "NAME,..",
        f"Pipeline schedules allowed: {', '.join(SCHEDULES)}.",
    ),
    pin(
        "--mesh-order",
        click.Choice(MESH_ORDERS),
        "NAME,..",
        "Orders of the axes over the ranks allowed, outermost first: "
        f"{', '.join(MESH_ORDERS)}. [default: those that the stack can start in]",
    ),
    pin("--zero", click.IntRange(0, 3), "0..3,..", "ZeRO stages allowed."),
    option(
        PINS,
        "--zero-ranks",
        type=Whole("neighbours"),
        metavar="N",
        help="Neighbouring ranks that hold one copy of sharded states, where N divides dp. "
        "[default: all]",
    ),
    pin(
        "--recompute",
        click.Choice(RECOMPUTE),
        "NAME,..",
        f"Recompute levels allowed: {', '.join(RECOMPUTE)}.",
    ),
    option(
        PINS,
        "--recompute-first-stage",
        metavar="SHARE,..|memory",
        help=STAGE_RECOMPUTE,
    ),
    option(
        PINS,
        "--sequence-parallel/--no-sequence-parallel",
        default=None,
        help="Require or forbid sequence parallelism where tp > 1.",
    ),
    pin(
        "--tp-overlap",
        click.IntRange(0, 3),
        "0..3,..",
        "Levels of sub-pipelined tensor parallelism allowed where tp > 1. [default: the levels "
        "that the stack runs]",
    ),
    option(PINS, "--tp-across-nodes", is_flag=True, help="Let tensor parallelism leave the node."),
    option(
        PINS,
        "--zero-by-operator",
        is_flag=True,
        help="Also try two ZeRO stages for the operators of a block, which takes longer.",
    ),
    option(
        PINS,
        "--megatron-sharding",
        is_flag=True,
        help="Divide every operator over tp as Megatron does.",
    ),
    option(
        PINS,
        "--weights-over-data/--no-weights-over-data",
        default=None,
        help="Require or forbid that operators of a block are divided over dp as well as tp: by "
        "batch or by weight, each by its own. [default: tried where the stack runs it]",
    ),
    pin(
        "--offload",
        click.Choice(SEARCHED_OFFLOAD),
        "WHAT,..",
        "Host contents: of the blocks optimizer (states), parameters (with the optimizer's), "
        "activations; lookup, the token table; of a traced module states; or none. [default, for "
        "every objective: all with --host-memory, else only if nothing fits without]",
    ),
    pin(
        "--chunk-access",
        click.Choice(ACCESS),
        "WHAT,..",
        "Unit of a block in chunks that has to be on the device together: block, operator. "
        "[default: block, and operator if nothing fits by blocks]",
    ),
    option(
        PINS,
        "--chunk-communication",
        type=click.Choice(CHUNK_COMMUNICATION),
        help="Gather and reduce all chunks of a group at once, or a single one after the other. "
        "[default: group]",
    ),
    option(
        PINS,
        "--forbid",
        multiple=True,
        metavar="NAME=VALUE",
        help="Choice that no plan may use, such as tp=8 or recompute=full; may be repeated.",
    ),
    packs("pins", PinOptions),
)
