"""The wait for the rank with the longest documents, where sequences are packed (EQUATIONS K7).

Attention reads only within a document, so that sequences of as many tokens differ in work. Ranks
that meet in a collective wait for the fullest of them:

    replicas    once a step; in every micro-batch with ZeRO 2 and 3 and with weights divided over
                data, whose collectives are those of a micro-batch
    ranks of a  at each attention, unless they exchange tokens for heads, or the stack divides
    sequence    every document over them

With e = inverse normal((n - 3/8) / (n + 1/4)), about the largest of n normal numbers (Blom 1958),
the fullest of n ranks exceeds the mean by the share

    replicas    (1 - c^2 / 9 + e c / 3)^3 - 1        c^2 = spread(S) / m
                the largest of n gamma distributions (Wilson and Hilferty 1931) of m sequences of S
                tokens
    ranks of a  e c        c^2 = (spread(S / 2n) / 2 - spread(S)) / b n / (n - 1)
    sequence    two pieces of each of b sequences, beside what the ranks have in common

where `KeysMet.spread` is the variance of the keys met over a stretch of tokens, over its mean
squared. The fullest reads at most as much as whole sequences. Leaves out: recompute of attention at
the end of a step, micro-batches of a pipeline that wait for each other, unlike blocks of a ring.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

from parplan.costmodels.operators.compute import OperatorTime
from parplan.profiles.elementwise import Number, larger_of, smaller_of, sqrt
from parplan.profiles.models.operator_graph import Operator

_BLOM = 0.375


@lru_cache(maxsize=256)
def _largest_normal(numbers: int) -> float:
    """Returns about the mean of the largest of so many standard normal numbers."""
    return NormalDist().inv_cdf((numbers - _BLOM) / (numbers + 1 - 2 * _BLOM))


def replica_share(operator: Operator, replicas: int, sequences: Number) -> Number:
    """Returns the share by which attention of the fullest replica exceeds the mean.

    sequences   that each replica reads until they meet
    """
    if operator.attention is None or operator.attention.in_documents is None or replicas == 1:
        return 0.0
    squared = operator.attention.in_documents.spread(operator.size("keys")) / sequences
    largest = (1.0 - squared / 9 + _largest_normal(replicas) * sqrt(squared) / 3) ** 3 - 1.0
    return _within_whole(operator, largest)


def context_share(operator: Operator, ranks: int) -> Number:
    """Returns the share by which attention of the fullest rank of a sequence exceeds the mean."""
    if operator.attention is None or operator.attention.in_documents is None or ranks == 1:
        return 0.0
    keys, spread = operator.size("keys"), operator.attention.in_documents.spread
    apart = max(0.0, spread(keys / (2 * ranks)) / 2 - spread(keys)) * ranks / (ranks - 1)
    return _within_whole(operator, _largest_normal(ranks) * sqrt(apart / operator.size("batch")))


def _within_whole(operator: Operator, share: Number) -> Number:
    """Returns the share, at most that of a rank whose sequences are one document each."""
    attention, keys = operator.attention, operator.size("keys")
    assert attention is not None, "it has documents"
    whole = replace(attention, in_documents=None).keys_met(keys) / attention.keys_met(keys)
    return smaller_of(larger_of(share, 0.0), larger_of(whole - 1.0, 0.0))


def wait_of(alone: OperatorTime, share: Number) -> OperatorTime:
    """Returns the seconds that ranks wait for one whose operator takes longer by a share."""
    return OperatorTime(alone.forward.scaled(share), alone.backward.scaled(share))
