"""Every argument of a file is priced, known to be harmless, refused, or named in the answer."""

from __future__ import annotations

from collections.abc import Iterable

from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.harmless import STARTING, is_harmless
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.subjects import Subject, is_off, subject_of
from parplan.profiles.errors import ConfigError

_MOST = 5  # further names in one error
_SENTENCE = (
    " "  # in a name that the reader made: an assignment under a condition, a key that others say
)


def require_priced(target: Target, given: Iterable[Given]) -> None:
    """Raises ConfigError for arguments that change time or memory, or may do so, without a price.

    These are the ones that a launcher's table refuses, and unknown ones whose names touch a subject
    of `subjects.py`, unless their words turn them off.
    """
    given = tuple(given)
    refused = [each for each in given if _is_one_of(each.name, target.refused)]
    if refused:
        first, more = refused[0], _and_more(refused)
        raise ConfigError(
            f"{first.where}: {first.name} changes the step and has no price{more}",
            hint="take it out to price the rest" if not more else "take them out to price the rest",
        )
    unknown = [(each, subject_of(each.name)) for each in not_understood(target, given)]
    touching = [(each, subject) for each, subject in unknown if _may_change(each, subject)]
    if touching:
        raise _unknown(target, touching)


def not_understood(target: Target, given: Iterable[Given]) -> tuple[Given, ...]:
    """Returns the arguments that a launcher's tables do not have, each name once."""
    known = {row.name for row in target.rows}
    tables = (*target.harmless, *STARTING)
    unknown = {
        each.name: each
        for each in given
        if each.name not in known and not is_harmless(each.name, tables)
    }
    return tuple(unknown.values())


def _may_change(given: Given, subject: Subject | None) -> bool:
    listed = _SENTENCE in given.name
    return subject is not None and not listed and not is_off(given.name, given.words)


def _unknown(target: Target, touching: list[tuple[Given, Subject | None]]) -> ConfigError:
    (first, subject), others = touching[0], [each for each, _ in touching]
    known = {_letters(row.name): row.name for row in target.rows}
    alike = known.get(_letters(first.name))
    more = _and_more(others)
    words = " ".join((first.name, *first.words[:1]))
    reader = target.wrapper or target.name
    text = f"{first.where}: {words}: {reader}'s reader does not know it, and by its name it is"
    if alike is not None:
        hint = f"write {alike}"
    else:
        hint = "take it out to price the rest" if not more else "take them out to price the rest"
    return ConfigError(f"{text} about {subject}, which changes the step{more}", hint=hint)


def _and_more(given: list[Given]) -> str:
    """Returns the names of all but the first, with their lines."""
    later = {each.name: each for each in given if each.name != given[0].name}
    named = [f"{name} ({each.where})" for name, each in later.items()]
    if not named:
        return ""
    rest = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return f"; so it is with {', '.join(named[:_MOST])}{rest}"


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _is_one_of(name: str, refused: Iterable[str]) -> bool:
    """Tells that an argument, or the section that it is in, is refused."""
    return any(name == each or name.startswith(f"{each}.") for each in refused)
