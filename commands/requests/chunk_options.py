"""Options of `plan estimate` that put the states of blocks in chunks -> what to estimate."""

from __future__ import annotations

from parplan.commands.requests.described import Options, Question
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import parse_size

_COUNTS = {"host_blocks": Offload.PARAMETERS, "host_optimizer": Offload.OPTIMIZER}
_OF_CHUNKS = (*_COUNTS, "eviction", "memory_limit")


def chunk_request(
    question: Question, options: Options
) -> tuple[tuple[Offload, ...], ChunkRequest | None]:
    """What the host keeps of whole layers, and the chunks asked for, of all blocks unless a count
    says less. Raises ConfigError.
    """
    named = tuple(map(Offload, options["offload"] or ()))
    whole = tuple(what for what in named if what not in _COUNTS.values())
    if len(whole) == len(named):
        _require_none(options)
        return whole, None
    if question.module:
        raise ConfigError(
            "only the executor's own blocks are held in chunks",
            hint="drop --module, or use --offload states",
        )
    host, optimizer = (
        _count(name, what, named, question.model.num_layers, options)
        for name, what in _COUNTS.items()
    )
    if options["host_blocks"] is None and host and options["host_optimizer"]:
        raise ConfigError(
            "--host-optimizer is of blocks whose parameters stay, with parameters all go",
            hint="add --host-blocks N",
        )
    blocks = question.model.num_layers
    if options["host_blocks"] is not None and host + (options["host_optimizer"] or 0) > blocks:
        raise ConfigError(
            f"--host-blocks {host} and --host-optimizer {optimizer} are {host + optimizer} blocks, the model has {blocks}",
            hint=f"use --host-optimizer {blocks - host}, or leave it out for all the others",
        )
    limit = options["memory_limit"]
    return whole, ChunkRequest(
        host_blocks=host,
        optimizer_blocks=optimizer,
        eviction=Eviction(options["eviction"] or Eviction.OPT),
        limit_bytes=None if limit is None else parse_size("--memory-limit", limit),
    )


def _require_none(options: Options) -> None:
    for name in _OF_CHUNKS:
        if options[name] is not None:
            raise ConfigError(
                f"{_option(name)} is of chunks", hint="add --offload optimizer,parameters"
            )


def _count(
    name: str, what: Offload, named: tuple[Offload, ...], num_layers: int, options: Options
) -> int:
    """Of how many blocks of a rank the host keeps `what`: all where no number is given."""
    count: int | None = options[name]
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
