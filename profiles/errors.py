"""Every error that a user can cause or meet, with its exit code; checks of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum

# least ratio of two alike names: twice the characters that they share over those of both
_CLOSE = 0.65
_LONGEST_NAME = 200  # characters of a name that may be a misspelling; comparing takes its square
SHOWN = 80  # most characters of a text in a message
_LONGEST_MESSAGE = 4000


def shortened(text: str) -> str:
    """Returns the beginning of a text of any length, for a message."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class PlannerError(Exception):
    """An error for the user: what was found, what was needed and where.

    hint: one action that helps
    exit_code: the exit code of the command
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        if len(message) > _LONGEST_MESSAGE:
            # the place is at the beginning, and what is wrong at the end
            message = f"{message[: _LONGEST_MESSAGE // 2]} ... {message[-_LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PlannerError):
    """The request, a file or an option is wrong."""

    exit_code = 2


class InfeasibleError(PlannerError):
    """The request is well-formed and no plan satisfies it."""

    exit_code = 3


class SolverError(PlannerError):
    """The MILP solver is missing, crashed, or ended without an answer."""

    exit_code = 4


class OutOfTimeError(PlannerError):
    """The time limit came before an answer."""

    exit_code = 4


class RunError(PlannerError):
    """A training run cannot go on as it was asked to."""

    exit_code = 5


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Returns a one-line suggestion for an unknown name, or None when no known name is close."""
    if len(name) > _LONGEST_NAME:
        return None
    names = [each for each in known if _alike(_family(name), _family(each))]
    longer = [each for each in names if name and each.startswith(name)]
    close = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE) or longer[:1]
    return f"did you mean {close[0]!r}?" if close else None


def _family(name: str) -> str:
    """Returns the letters that a name begins with: h800-80gb is no misspelling of a800-80gb."""
    return name[
        : next((i for i, character in enumerate(name) if not character.isalpha()), len(name))
    ].lower()


def _alike(first: str, second: str) -> bool:
    return first == second or difflib.SequenceMatcher(None, first, second).ratio() >= _CLOSE


def unknown_name_error(
    kind: str, name: str, known: Iterable[str], *, where: str = ""
) -> ConfigError:
    """Returns the error for a name outside a closed set.

    Its hint is the nearest name of the set, or the whole set when none is near.
    """
    names = sorted(known)
    place = f" in {where}" if where else ""
    hint = did_you_mean(name, names) or f"known: {', '.join(names)}"
    return ConfigError(f"unknown {kind} {shortened(name)!r}{place}", hint=hint)


def coerce_choice(instance: object, field: str, choices: type[StrEnum], *, where: str = "") -> None:
    """Makes the field of a frozen dataclass, which may be a plain string, a member of `choices`.

    Raises ConfigError.
    """
    value = getattr(instance, field)
    if isinstance(value, choices):
        return
    names = [choice.value for choice in choices]
    if value not in names:
        raise unknown_name_error(field, str(value), names, where=where)
    object.__setattr__(instance, field, choices(value))
