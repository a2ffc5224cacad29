"""Every error a user can cause or meet, with the exit code of the command line and one action that
helps; checks of names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum

_CLOSE = 0.65  # of two names: twice the characters that they share over those of both


class PlannerError(Exception):
    """What was found, what was needed and where; `hint` is one action. The exit code is that of the
    command.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
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


def did_you_mean(found: str, known: Iterable[str]) -> str | None:
    """One-line suggestion for a name that is not among `known`, or None when nothing is close."""
    names = [name for name in known if _alike(_family(found), _family(name))]
    longer = [name for name in names if found and name.startswith(found)]
    close = difflib.get_close_matches(found, names, n=1, cutoff=_CLOSE) or longer[:1]
    return f"did you mean {close[0]!r}?" if close else None


def _family(name: str) -> str:
    """The letters that a name begins with: h800-80gb is no misspelling of a800-80gb."""
    return name[
        : next((i for i, character in enumerate(name) if not character.isalpha()), len(name))
    ].lower()


def _alike(first: str, second: str) -> bool:
    return first == second or difflib.SequenceMatcher(None, first, second).ratio() >= _CLOSE


def unknown_name_error(
    what: str, found: str, known: Iterable[str], *, where: str = ""
) -> ConfigError:
    """The error for a name outside a closed set: says the set's nearest member, or the whole set
    when none is near.
    """
    names = sorted(known)
    place = f" in {where}" if where else ""
    hint = did_you_mean(found, names) or f"known: {', '.join(names)}"
    return ConfigError(f"unknown {what} {found!r}{place}", hint=hint)


def choose(instance: object, field: str, choices: type[StrEnum], *, where: str = "") -> None:
    """Make the field of a frozen dataclass a member of `choices`, which a plain string may name.
    Raises ConfigError.
    """
    found = getattr(instance, field)
    names = [choice.value for choice in choices]
    if found not in names:
        raise unknown_name_error(field, str(found), names, where=where)
    object.__setattr__(instance, field, choices(found))
