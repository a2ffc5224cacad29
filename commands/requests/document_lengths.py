"""The value of --document-lengths: a mean, or a file of lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from parplan.profiles.documents.bounded import Hints, lines_of, read_text
from parplan.profiles.documents.numbers import real_of, whole_of
from parplan.profiles.errors import ConfigError, shortened
from parplan.profiles.models.documents import Documents, documents_of

OPTION = "--document-lengths"
_COLUMNS = 2  # a length, and the number of documents that have it
_HINTS = Hints("give a file of lengths, or the mean such as --document-lengths 600")
_LINE = "write a length in tokens on each line, or a length and a count"
_TOO_LONG = "cut longer documents, or raise --seq-length"


def documents_of_option(value: str | None, seq_length: int) -> Documents | None:
    """Returns the documents that the option names, None without it.

    Raises ConfigError for a mean that is not between 1 and the sequence length, a file that cannot
    be read or has no lengths, and a line that is not one or is too long, with its number.
    """
    if value is None:
        return None
    mean = _number(value)
    if mean is None:
        return documents_of(_lengths(Path(value), seq_length))
    if not 1 <= mean <= seq_length:
        raise ConfigError(
            f"{OPTION} is {value}, a mean is from 1 to --seq-length {seq_length}",
            hint=_TOO_LONG if mean > seq_length else "give at least 1",
        )
    return Documents(mean=mean)


def _lengths(path: Path, seq_length: int) -> Iterator[tuple[int, float]]:
    """Yields the length and the number of documents of each line that has any."""
    lines = lines_of(read_text(path, hints=_HINTS), str(path), _HINTS)
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{path}: no lengths", hint=_LINE)
    for place, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        numbers = [_whole(word) for word in words]
        if len(numbers) > _COLUMNS or min(numbers) < 1:
            raise ConfigError(f"{path}:{place}: {shortened(line.strip())!r}", hint=_LINE)
        if numbers[0] > seq_length:
            raise ConfigError(
                f"{path}:{place}: a document has {numbers[0]:,} tokens, --seq-length is "
                f"{seq_length:,}",
                hint=_TOO_LONG,
            )
        yield numbers[0], float(numbers[1] if len(numbers) == _COLUMNS else 1)


def _whole(word: str) -> int:
    """Returns the whole number that a word is, 0 where it is none."""
    return whole_of(word) or 0


def _number(value: str) -> float | None:
    return real_of(value)
