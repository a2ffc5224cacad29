"""Turns any error of a user's code into one error with its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.tracing.source_lines import line_of

_ALONE = (
    "call it once by itself, on tensors with values: where that works, "
    "it does what cannot be traced"
)
_LONGEST = 300  # characters, because torch's texts can fill pages


@contextmanager
def explained_user_errors(doing: str, *, hint: str = _ALONE) -> Iterator[None]:
    """Turns errors of user code called inside into a ConfigError with the line."""
    try:
        yield
    except PlannerError:
        raise
    except MemoryError as error:
        raise _out_of_memory(doing, error.__traceback__) from error
    except Exception as error:  # user code may raise any kind
        if "can't allocate memory" in str(error):
            raise _out_of_memory(doing, error.__traceback__) from error
        text = " ".join(str(error).split())
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise ConfigError(
            f"module: {doing} raises {type(error).__name__}{_at(error.__traceback__)}: {short}",
            hint=hint,
        ) from error


def _out_of_memory(doing: str, trace: TracebackType | None) -> ConfigError:
    return ConfigError(
        f"module: {doing} needs more memory than there is{_at(trace)}",
        hint="make large tensors with calls of torch, as parameters or buffers: "
        "those have no memory here",
    )


def _at(trace: TracebackType | None) -> str:
    line = line_of(trace)
    return f" at {line}" if line else ""
