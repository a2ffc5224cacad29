"""The wait for the rank with the longest documents, where sequences are packed (EQUATIONS K7).

Attention reads only within a document, so that sequences of as many tokens differ in work. Ranks
that meet in a collective wait for the fullest of them:

    replicas    once a step; in every micro-batch with ZeRO 2 and 3 and with weights divided over
                data, whose collectives are those of a micro-batch
    ranks of a  at each attention, unless they exchange tokens for heads, or the stack divides
    sequence    every document over them

The largest of n sums, each over m independent stretches of t tokens, exceeds their mean by the
share

    e(n) sqrt(spread(t) / m) / k        e(n) = inverse normal((n - 3/8) / (n + 1/4))

where a query meets k keys, and `Reading.spread` is their variance over the stretch. The largest
reads at most as much as whole sequences. Leaves out: recompute of attention at the end of a step,
micro-batches of a pipeline that wait for each other, and unlike blocks of a ring.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

from parplan.costmodels.operators.compute import OperatorTime
from parplan.profiles.elementwise import Number, smaller_of, sqrt
from parplan.profiles.models.operator_graph import Operator

# Blom 1958, Statistical Estimates and Transformed Beta-Variables
_BLOM = 0.375


@lru_cache(maxsize=256)
def expected_largest(numbers: int) -> float:
    """Returns about the mean of the largest of so many standard normal numbers."""
    return NormalDist().inv_cdf((numbers - _BLOM) / (numbers + 1 - 2 * _BLOM))


def excess_share(operator: Operator, ranks: int, stretches: Number, tokens: Number) -> Number:
    """Returns the share by which attention on the fullest of `ranks` ranks exceeds the mean.

    stretches   number of stretches of `tokens` tokens that each of them reads
    """
    attention, keys = operator.attention, operator.size("keys")
    read = None if attention is None else attention.in_documents
    if attention is None or read is None or ranks == 1:
        return 0.0
    whole = keys / 2 if attention.causal else keys
    spread = sqrt(read.spread(tokens) / stretches) / read.mean
    return smaller_of(expected_largest(ranks) * spread, whole / read.mean - 1.0)


def wait_of(alone: OperatorTime, share: Number) -> OperatorTime:
    """Returns the seconds that ranks wait for one whose operator takes longer by a share."""
    return OperatorTime(alone.forward.scaled(share), alone.backward.scaled(share))
