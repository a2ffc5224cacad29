"""A launcher's arguments as a table: each row names an argument and the facts that it says.

The same row writes the argument of a configuration and reads it back. A launcher is a table and a
form of file; nothing else knows its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parplan.profiles.errors import ConfigError

Words = tuple[str, ...]
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A row of a launcher's table.

    name     the launcher's own argument
    facts    fields of the record that the row writes and reads
    write    words after the name, () for a switch, None where the argument is left out
    read     the facts of its words, given the facts of the rows before it; raises ValueError for
             words that it does not know
    source   the file of the launcher's repository that defines it, where it is not the table's
    """

    name: str
    facts: tuple[str, ...]
    write: Callable[[Any], Words | None]
    read: Callable[[Words, Facts], Facts]
    source: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """An argument as a file has it, with its place such as `train.sh:12`."""

    name: str
    words: Words
    where: str


def number(name: str, fact: str, default: float | None = None, *, source: str = "") -> Argument:
    """Returns the row of a number, which is left out where it has the launcher's default."""

    def write(record: Any) -> Words | None:
        value = getattr(record, fact)
        return None if value is None or value == default else (f"{value:.12g}",)

    return Argument(
        name=name,
        facts=(fact,),
        write=write,
        read=lambda words, _: {fact: read_number(words)},
        source=source,
    )


def read_number(words: Words) -> float:
    """Returns the one number of these words. Raises ValueError."""
    if len(words) != 1:
        raise ValueError("one number is needed")
    (word,) = words
    try:
        return int(word)
    except ValueError:
        return float(word)


def switch(
    name: str, fact: str, value: object = True, *, when: Callable[[Any], bool] = lambda _: True
) -> Argument:
    """Returns the row of a switch that stands where a fact has a value.

    when    whether the switch may be written of a record at all
    """
    return Argument(
        name=name,
        facts=(fact,),
        write=lambda record: () if getattr(record, fact) == value and when(record) else None,
        read=lambda _, __: {fact: value},
    )


def choice(
    name: str,
    fact: str,
    words_of: Mapping[Any, str],
    default: object = None,
    *,
    when: Callable[[Any], bool] = lambda _: True,
) -> Argument:
    """Returns the row of a closed choice; a value without a word is left out.

    default    the value that the launcher takes without the argument
    """
    value_of = {word: value for value, word in words_of.items()}

    def write(record: Any) -> Words | None:
        value = getattr(record, fact)
        known = value in words_of and value != default and when(record)
        return (words_of[value],) if known else None

    def read(words: Words, _: Facts) -> Facts:
        (word,) = words
        if word not in value_of:
            raise ValueError(f"{word} is none of {', '.join(value_of)}")
        return {fact: value_of[word]}

    return Argument(name=name, facts=(fact,), write=write, read=read)


def constant(name: str, *words: str, when: Callable[[Any], bool] = lambda _: True) -> Argument:
    """Returns the row of an argument that prices take for granted, and that has no other value."""

    def read(found: Words, _: Facts) -> Facts:
        if found != words:
            raise ValueError(f"{' '.join(words)} alone is priced")
        return {}

    return Argument(
        name=name, facts=(), write=lambda record: words if when(record) else None, read=read
    )


def free(name: str, *words: str, when: Callable[[Any], bool] = lambda _: True) -> Argument:
    """Returns the row of an argument that is needed and that costs nothing, whatever it says."""
    return Argument(
        name=name,
        facts=(),
        write=lambda record: words if when(record) else None,
        read=lambda _, __: {},
    )


def reading(name: str, read: Callable[[Words, Facts], Facts]) -> Argument:
    """Returns the row of an argument that other rows write in its place."""
    return Argument(name=name, facts=(), write=lambda _: None, read=read)


def written(table: Iterable[Argument], record: object) -> tuple[tuple[str, Words], ...]:
    """Returns the arguments of a record, each with its words, in the order of the table."""
    found = ((row.name, row.write(record)) for row in table)
    return tuple((name, words) for name, words in found if words is not None)


# facts that are whole numbers of at least 1, also those that launchers derive others from
_COUNTS = frozenset(
    (
        *("tp", "pp", "cp", "ep", "etp", "virtual_stages", "layers_per_virtual_stage", "instances"),
        *("micro_batch_size", "global_batch_size", "seq_length", "accumulation", "chunks"),
        *("per_stage", "micro", "local", "passes", "tokens_of_pass", "copies", "degree", "near"),
        *("first", "last", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"),
        *("head_dim", "max_seq_length", "vocab_multiple", "bucket_elements", "full_every", "data"),
    )
)
_MOST = 1_000_000_000
_REST = -1  # of shards: the ranks that are left


def _require_counts(facts: Facts) -> None:
    """Raises ValueError for a count that is no whole number of at least 1."""
    for fact, value in facts.items():
        least = value if fact == "shards" and value == _REST else 1
        counts = fact in _COUNTS or fact == "shards"
        if counts and not (float(value).is_integer() and least <= value <= _MOST):
            raise ValueError(f"a whole number from 1 to {_MOST:,} is needed")


def read_arguments(
    table: Sequence[Argument], given: Sequence[Given], defaults: Facts | None = None
) -> Facts:
    """Returns the facts that arguments say, in the order of the table.

    defaults    facts that count where no argument says them
    Arguments that the table does not have are passed over. Raises ConfigError with the place of an
    argument whose words have no meaning or no price.
    """
    last = {each.name: each for each in given}  # as argparse: the last one counts
    facts = dict(defaults or {})
    for row in table:
        if row.name not in last:
            continue
        found = last[row.name]
        try:
            read = row.read(found.words, facts)
            _require_counts(read)
            facts |= read
        except (ValueError, IndexError) as error:
            error = error if found.words else ValueError("it needs a value")
            raise ConfigError(
                f"{found.where}: {found.name} {' '.join(found.words)}: {error}",
                hint="change that argument",
            ) from None
    return facts
