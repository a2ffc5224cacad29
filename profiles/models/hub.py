"""Hugging Face's libraries: no network unless the user asks, one class for their errors."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from parplan.profiles.errors import ConfigError, PlannerError

_LONGEST_REASON = 400  # characters; transformers lists every model type that it knows
_OFFLINE = "HF_HUB_OFFLINE"  # huggingface_hub reads it when it is imported


def stay_offline() -> None:
    """Keeps libraries from fetching from the hub, in this process and in those that it starts.

    They print nothing beside our own errors.
    """
    os.environ.setdefault(_OFFLINE, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def allow_download() -> None:
    """Undoes `stay_offline`, where the user asked for a download."""
    os.environ[_OFFLINE] = "0"


@contextmanager
def hub_refusals(what: str, hint: str) -> Iterator[None]:
    """Raises a ConfigError of `what` for any error of the libraries in the block.

    The libraries check values late, each model in its own way, and their errors share no class:
    validation has its own, models divide by zero or miss a key, tokenizers raises bare `Exception`.
    Only calls of the libraries belong in the block.
    """
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {_reason(error)}", hint=hint) from None


def _reason(error: Exception) -> str:
    text = textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...")
    # the text of a KeyError is the key alone
    return text if " " in text else f"{type(error).__name__} {text}".rstrip()
