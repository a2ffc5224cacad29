"""The terms on which Hugging Face's libraries are used: no network unless it is asked for, and one
error for what they refuse.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from parplan.profiles.errors import ConfigError, PlannerError

_LONGEST_REASON = 400  # characters; transformers lists every model type that it knows
_OFFLINE = "HF_HUB_OFFLINE"  # read when huggingface_hub is imported


def stay_offline() -> None:
    """Let no library fetch from the hub, in this process and those that it starts, and print
    nothing beside our own errors.
    """
    os.environ.setdefault(_OFFLINE, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def allow_download() -> None:
    """Undo `stay_offline`, where the user asked for a download."""
    os.environ[_OFFLINE] = "0"


@contextmanager
def hub_refusals(what: str, hint: str) -> Iterator[None]:
    """A ConfigError of `what` for anything that the libraries raise: they check values late, each
    model in its own way.

    Their errors share no class: validation has its own, models divide by zero or miss a key,
    tokenizers raises bare `Exception`. Only calls of the libraries belong into the block.
    """
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {_reason(error)}", hint=hint) from None


def _reason(error: Exception) -> str:
    text = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")
    return (
        text if " " in text else f"{type(error).__name__} {text}".rstrip()
    )  # a KeyError says no more than the key
