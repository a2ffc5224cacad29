"""A layout by hand: the mesh, the schedule and the chunks that `plan estimate` was given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parplan.commands.options.layout_options import LayoutOptions
from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.divided_weights import illegal_grid
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, ChunkCommunication, Eviction
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import placement_of
from parplan.costmodels.schedules.schedule import V_SHAPED, Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.meshes import illegal_tensor_parallel
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.request import Request, SearchOptions
from parplan.planner.search.estimate import ChunkRequest, UniformChoices
from parplan.planner.stage_recompute import MEMORY, RecomputeRule, parse_stage_recompute
from parplan.profiles.documents.bounded import Hints, lines_of, read_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import ContextForm
from parplan.profiles.units import parse_size


def action_rows(path: Path) -> tuple[str, ...]:
    """Returns the lines of a schedule file, torch's compute-only CSV. Raises ConfigError."""
    hints = Hints("choose another --schedule-file", "choose another --schedule-file")
    lines = lines_of(read_text(path, hints=hints), str(path), hints)
    # torch writes an empty entry where a rank waits
    return tuple(
        ",".join(entry.strip() for entry in line.split(",") if entry.strip())
        for line in lines
        if line.strip()
    )


def _custom(path: Path, by_hand: LayoutOptions) -> tuple[Schedule, int, tuple[str, ...]]:
    """A schedule from a file: virtual stages per rank, and actions of each. Raises ConfigError."""
    if by_hand.schedule is not None or by_hand.virtual_stages > 1:
        raise ConfigError(
            "--schedule-file says the schedule and its virtual stages",
            hint="drop --schedule and --virtual-stages",
        )
    rows = action_rows(path)
    if by_hand.pp < 2 or len(rows) != by_hand.pp:
        raise ConfigError(
            f"{path} is of {len(rows)} pipeline ranks, --pp is {by_hand.pp}",
            hint=f"--pp {max(2, len(rows))}",
        )
    return Schedule.CUSTOM, len(placement_of(rows)[0]), rows


def layout_of(request: Request, by_hand: LayoutOptions) -> ParallelLayout:
    """Returns the layout of the options.

    Degrees that do not divide are left to the planner's check, which gives the reason.
    """
    pp, tp = by_hand.pp, by_hand.tp
    micro_batch_size = by_hand.micro_batch_size
    cp, form = by_hand.cp, by_hand.context_form
    dp = by_hand.dp or max(1, request.cluster.num_gpus // (pp * cp * tp))
    virtual_stages = by_hand.virtual_stages
    schedule = Schedule(
        by_hand.schedule or (Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B)
    )
    actions: tuple[str, ...] = ()
    if schedule in V_SHAPED and virtual_stages == 1:  # a V always has two
        virtual_stages = 2
    if by_hand.schedule_file:
        schedule, virtual_stages, actions = _custom(by_hand.schedule_file, by_hand)
    return ParallelLayout(
        mesh=Mesh(
            pp=pp,
            dp=dp,
            tp=tp,
            cp=cp,
            context_form=ContextForm(form or ContextForm.RING) if cp > 1 or form else None,
            ep=by_hand.ep,
            etp=by_hand.etp,
            tp_rows=by_hand.tp_rows,
            order=MeshOrder(by_hand.mesh_order or MeshOrder.PP_DP_TP),
        ),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=max(1, request.training.global_batch_size // (micro_batch_size * dp)),
        sequence_parallel=by_hand.sequence_parallel,
        actions=actions,
        tp_overlap=by_hand.tp_overlap,
    )


def layout_prices(
    request: Request, tp: int, micro_batch_size: int, tp_rows: int = 1
) -> tuple[ParallelLayout, PriceCache]:
    """Returns a layout of one pipeline stage with tensor parallelism, and its prices.

    Raises ConfigError for an illegal degree.
    """
    gpus, model = request.cluster.num_gpus, request.model
    made = ParallelLayout(
        mesh=Mesh(pp=1, dp=max(1, gpus // tp), tp=tp, tp_rows=tp_rows),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=micro_batch_size,
        num_micro_batches=1,
        sequence_parallel=False,
    )
    reason = illegal_tensor_parallel(tp, model, request.cluster, across_nodes=True, rows=tp_rows)
    reason = reason or illegal_grid(made, model, request.training)
    if reason or gpus % tp:
        raise ConfigError(
            reason or f"tp {tp} does not divide the {gpus} GPUs",
            hint="choose another --tp, or --tp-rows" if tp_rows > 1 else "choose another --tp",
        )
    return made, price_cache_of(request)


_COUNTS = {"host_blocks": Offload.PARAMETERS, "host_optimizer": Offload.OPTIMIZER}
_OF_CHUNKS = (*_COUNTS, "eviction", "chunk_access", "chunk_communication", "memory_limit")


def choices_of(request: Request, by_hand: LayoutOptions) -> UniformChoices:
    """Returns the choices of every block of a layout by hand. Raises ConfigError."""
    offload, chunks = chunk_request(request, by_hand)
    return UniformChoices(
        zero=by_hand.zero,
        own_zero=tuple(map(_own_zero, by_hand.own_zero)),
        recompute=Recompute(by_hand.recompute),
        recompute_first_stage=_rule(by_hand),
        zero_ranks=by_hand.zero_ranks,
        offload=offload,
        keep_on_host=by_hand.keep_on_host or (),
        chunks=chunks,
    )


def _own_zero(text: str) -> tuple[str, int]:
    """Returns the operator and the stage of `fc1=3`. Raises ConfigError."""
    name, _, stage = text.partition("=")
    if stage not in ("0", "1", "2", "3"):
        raise ConfigError(
            f"--own-zero is {text}, it must be an operator and its ZeRO stage",
            hint="for example --own-zero fc1=3,fc2=3",
        )
    return name.strip(), int(stage)


def _rule(by_hand: LayoutOptions) -> RecomputeRule | None:
    text = by_hand.recompute_first_stage
    return None if text is None else parse_stage_recompute(text)


def with_limit(request: Request, by_hand: LayoutOptions) -> Request:
    """Returns the request with the memory limit of a layout by hand. Raises ConfigError."""
    if by_hand.memory_limit is None:
        return request
    limit_bytes = parse_size("--memory-limit", by_hand.memory_limit)
    return replace(request, options=SearchOptions(memory_limit_bytes=limit_bytes))


def chunk_request(
    request: Request, by_hand: LayoutOptions
) -> tuple[tuple[Offload, ...], ChunkRequest | None]:
    """Returns the host contents of whole layers, and the blocks in chunks. Raises ConfigError."""
    whole, chunks = offload_by_hand(by_hand, request.model.num_layers)
    if chunks is not None and request.module:
        raise ConfigError(
            "only the executor's own blocks are held in chunks",
            hint="drop --module, or use --offload states",
        )
    return whole, chunks


def offload_by_hand(
    by_hand: LayoutOptions, num_layers: int
) -> tuple[tuple[Offload, ...], ChunkRequest | None]:
    """Returns the host contents of whole layers, and those in chunks, of `num_layers` layers.

    All of them are meant unless a count says less. Raises ConfigError.
    """
    named = tuple(map(Offload, by_hand.offload or ()))
    whole = tuple(what for what in named if what not in _COUNTS.values())
    if len(whole) == len(named):
        _require_none(by_hand)
        return whole, None
    host = _count("host_blocks", Offload.PARAMETERS, named, num_layers, by_hand)
    optimizer = _count("host_optimizer", Offload.OPTIMIZER, named, num_layers, by_hand)
    if by_hand.host_blocks is None and host and by_hand.host_optimizer:
        raise ConfigError(
            "--host-optimizer is of blocks whose parameters stay, with parameters all go",
            hint="add --host-blocks N",
        )
    if by_hand.host_blocks is not None and host + (by_hand.host_optimizer or 0) > num_layers:
        raise ConfigError(
            f"--host-blocks {host} and --host-optimizer {optimizer} are {host + optimizer} "
            f"blocks, the model has {num_layers}",
            hint=f"use --host-optimizer {num_layers - host}, or leave it out for all the others",
        )
    limit = by_hand.memory_limit
    return whole, ChunkRequest(
        host_blocks=host,
        optimizer_blocks=optimizer,
        eviction=Eviction(by_hand.eviction or Eviction.OPT),
        communication=ChunkCommunication(by_hand.chunk_communication or ChunkCommunication.GROUP),
        access=Access(by_hand.chunk_access or Access.BLOCK),
        limit_bytes=None if limit is None else parse_size("--memory-limit", limit),
    )


def _require_none(by_hand: LayoutOptions) -> None:
    for name in _OF_CHUNKS:
        if name == "memory_limit" and by_hand.recompute_first_stage == MEMORY:
            continue
        if getattr(by_hand, name) is not None:
            raise ConfigError(
                f"{_option(name)} is of chunks", hint="add --offload optimizer,parameters"
            )


def _count(
    name: str, what: Offload, named: tuple[Offload, ...], num_layers: int, by_hand: LayoutOptions
) -> int:
    count: int | None = getattr(by_hand, name)
    if count is None:
        return num_layers if what in named else 0
    if what not in named:
        raise ConfigError(
            f"{_option(name)} {count}: --offload has no {what}", hint=f"add {what} to --offload"
        )
    if count > num_layers:
        raise ConfigError(
            f"{_option(name)} is {count}, the model has {num_layers} blocks",
            hint=f"use at most {num_layers}",
        )
    return count


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
