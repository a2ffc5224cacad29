"""torchrun's environment variables of each process, and the store through which ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.errors import ConfigError

_START = "start it with torchrun, or take that variable away"


def rank() -> int:
    """Return this process's number among all. Raises ConfigError."""
    return _number("RANK", 0, world() - 1, default=0)


def world() -> int:
    """Return the number of processes that were started. Raises ConfigError."""
    return _number("WORLD_SIZE", 1, 2**31 - 1, default=1)


def local_rank() -> int:
    """Return this process's number on its node. Raises ConfigError."""
    return _number("LOCAL_RANK", 0, 2**31 - 1, default=0)


def is_rank_0() -> bool:
    """Return True if this process prints for all; every process does if RANK is wrong."""
    try:
        return rank() == 0
    except ConfigError:
        return True


def open_store(timeout: timedelta) -> dist.Store:
    """Return torchrun's store, under a prefix for each restart. Raises ConfigError.

    A restarted rank must not read keys of the last try.
    """
    host = os.environ.get("MASTER_ADDR")
    if host is None:
        return dist.HashStore()
    port = _number("MASTER_PORT", 0, 2**16 - 1)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host, port, world(), timeout=timeout, is_master=rank() == 0 and not is_agents
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"no store at MASTER_ADDR {host}, MASTER_PORT {port}: {reason}", hint=_START
        ) from None
    return dist.PrefixStore(f"try{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _number(name: str, smallest: int, largest: int, default: int | None = None) -> int:
    """Return the whole number in an environment variable. Raises ConfigError."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"MASTER_ADDR is set and {name} is not", hint=_START)
    number = whole_of(text)
    number = -1 if number is None else number
    if not smallest <= number <= largest:
        raise ConfigError(
            f"{name} is {text[:80]!r}, it must be a whole number from {smallest} to {largest}",
            hint=_START,
        )
    return number
