"""Sequences that are packed from documents, between which attention reads nothing (EQUATIONS K7).

The lengths of documents say how many keys a query meets, and how unevenly a stretch of tokens
reads. A sequence is full: its documents have all of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from parplan.profiles.errors import ConfigError

_FORBID = {"extra": "forbid"}
MOST_LENGTHS = 256  # in a plan; neighbouring lengths of a longer table are joined
DRAWN = 4096  # lengths that stand for an exponential distribution
HALVINGS = 60  # of the range in which its scale lies
Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The lengths in tokens of the documents that fill the sequences.

    mean      mean of exponentially distributed lengths; 0 where `lengths` has them
    lengths   each length with its number of documents, ascending, a fraction where neighbouring
              lengths were joined
    """

    __pydantic_config__ = _FORBID

    mean: float = 0.0
    lengths: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.mean) == bool(self.lengths):
            raise ConfigError(
                "documents have both a mean and lengths, or neither", hint="give one of them"
            )
        if self.mean < 0 or any(min(pair) <= 0 for pair in self.lengths):
            raise ConfigError(
                "documents have a length or a number that is not positive", hint="correct it"
            )
        ascending = tuple(sorted(self.lengths))
        if len({length for length, _ in ascending}) < len(ascending):
            raise ConfigError("documents have a length twice", hint="add up their numbers")
        object.__setattr__(self, "lengths", ascending)

    @property
    def longest(self) -> float:
        """Tokens of the longest document that is known: the mean where that is all."""
        return self.lengths[-1][0] if self.lengths else self.mean

    @property
    def mean_length(self) -> float:
        if not self.lengths:
            return self.mean
        numbers = sum(number for _, number in self.lengths)
        return sum(length * number for length, number in self.lengths) / numbers

    def __str__(self) -> str:
        return f"documents of {self.mean_length:,.0f} tokens on average"


def documents_of(lengths: Iterable[tuple[int, float]]) -> Documents:
    """Returns the documents of pairs of a length and its number, in any order.

    More than `MOST_LENGTHS` lengths become groups of neighbours with about as many tokens each. A
    group keeps its tokens and has their mean length. Raises ConfigError.
    """
    pairs = sorted(lengths)
    alike = [
        (length, math.fsum(number for _, number in same))
        for length, same in groupby(pairs, key=lambda pair: pair[0])
    ]
    if len(alike) <= MOST_LENGTHS:
        return Documents(lengths=tuple(alike))
    length, number = np.array(alike).T
    tokens = length * number
    group = ((tokens.cumsum() - tokens / 2) / tokens.sum() * MOST_LENGTHS).astype(int)
    joined: dict[int, float] = {}
    for each in np.unique(group):
        there = group == each
        common = max(1, round(float(tokens[there].sum() / number[there].sum())))
        joined[common] = joined.get(common, 0.0) + float(tokens[there].sum()) / common
    return Documents(lengths=tuple(joined.items()))


@dataclass(frozen=True, slots=True)
class KeysMet:
    """The keys that the queries of packed sequences meet.

    mean      of a query
    variance  over the queries
    drift     variance of the keys met by a long stretch of tokens, over its tokens
    longest   tokens of the longest document, 0 where it is not known
    """

    mean: float
    variance: float
    drift: float
    longest: int = 0

    def spread(self, tokens: float) -> float:
        """Returns the variance of the keys met by a stretch of tokens, over its mean squared.

        The variance over a stretch far longer than documents grows with its tokens, and over one
        inside of a document with their square (EQUATIONS K7).
        """
        if not self.drift:
            return 0.0
        variance = self.variance * self.drift / (tokens * self.variance + self.drift)
        return variance / self.mean**2


@lru_cache(maxsize=256)
def reading(
    documents: Documents, sequence: int, *, causal: bool, window: int, chunked: bool
) -> KeysMet:
    """Returns the keys that queries meet inside of their documents, and of their window.

    With l tokens of a document, whose queries meet k keys in turn, over all documents:

        mean      sum of sum(k) / sum of l
        variance  sum of sum(k^2) / sum of l - mean^2
        drift     sum of (sum(k) - mean l)^2 / sum of l

    sequence: tokens of a sequence, which no document exceeds
    window, chunked: those of `Attention`; parts of a window begin anywhere in a document
    """
    length, number = length_histogram(documents, sequence)
    reach = np.minimum(length, window) if window else length
    beyond = length - reach
    if not causal:
        met, squares = length * reach, length * reach**2
    elif chunked:
        met = reach**2 / 2 - reach**3 / (6 * window) + beyond * window / 2
        squares = reach**3 / 3 - reach**4 / (6 * window) + beyond * window**2 / 3
    else:
        met, squares = reach**2 / 2 + beyond * reach, reach**3 / 3 + beyond * reach**2
    tokens = float(number @ length)
    mean = float(number @ met) / tokens
    return KeysMet(
        mean=mean,
        variance=max(0.0, float(number @ squares) / tokens - mean**2),
        drift=float(number @ (met - mean * length) ** 2) / tokens,
        longest=documents.lengths[-1][0] if documents.lengths else 0,
    )


def length_histogram(documents: Documents, sequence: int) -> tuple[Array, Array]:
    """Returns lengths in tokens and their numbers, of documents that no sequence cuts."""
    if documents.lengths:
        length, number = np.array(documents.lengths).T
        return length, number
    quantiles = -np.log(1.0 - (np.arange(DRAWN) + 0.5) / DRAWN)
    return _capped(quantiles, documents.mean, sequence), np.ones(DRAWN)


def _capped(quantiles: Array, mean: float, sequence: int) -> Array:
    """Returns lengths in proportion to quantiles, none longer than a sequence, with that mean."""
    low, high = mean, mean
    while np.minimum(high * quantiles, sequence).mean() < mean and high < mean * 2.0**HALVINGS:
        high *= 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = np.minimum(middle * quantiles, sequence).mean() < mean
        low, high = (middle, high) if below else (low, middle)
    return np.minimum(high * quantiles, sequence)
