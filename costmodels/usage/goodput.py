"""The share of time in which a long run advances, with failures and checkpoints (EQUATIONS D1, D2).

A failure stops all GPUs. The run then starts again from its last checkpoint, and the steps behind
that checkpoint are lost. Failures come independently, at a constant rate of every GPU that works.
Each takes a node away until it is repaired; a spare node replaces it, or the run waits for one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from parplan.costmodels.layers.model_states import ideal_states
from parplan.profiles.models.spec import TrainingSpec

_FORBID = {"extra": "forbid"}
MOST_SPARES = 10_000  # nodes; the search for the best number ends there


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a cluster, and what it takes to go on after one.

    mtbf_s               seconds of work of a GPU between two failures that stop the run, of the GPU
                         or of its share of host and network
    restart_s            seconds from a failure to the next step, without reading the checkpoint
    storage_bytes_per_s  rate at which the whole cluster writes or reads a checkpoint
    repair_s             seconds for which a failed node is away
    spare_nodes          nodes that wait to replace a failed one; None for the best number
    """

    __pydantic_config__ = _FORBID

    mtbf_s: float
    restart_s: float
    storage_bytes_per_s: float
    repair_s: float
    spare_nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The part of a cluster's time that remains for a run.

    failure_s      seconds between two failures of the cluster
    checkpoint_s   seconds to write a checkpoint, in which nothing is computed
    interval_s     seconds of steps between two checkpoints
    running_share  share of the time with enough nodes in which the run advances
    spare_nodes    nodes that wait to replace a failed one
    short_share    share of the failures that find no spare node
    wait_s         mean seconds of the wait for a node after such a failure
    ready_share    share of the time in which enough nodes work
    """

    failure_s: float
    checkpoint_s: float
    interval_s: float
    running_share: float
    spare_nodes: int
    short_share: float
    wait_s: float
    ready_share: float

    @property
    def share(self) -> float:
        """Share of the time in which the run advances."""
        return self.running_share * self.ready_share


def checkpoint_bytes(num_trained: int, training: TrainingSpec) -> float:
    """Returns the bytes of a checkpoint: one copy of the trained weights and their moments."""
    parameters, _, optimizer = ideal_states(num_trained, 1, training)
    return parameters + optimizer


def goodput(num_bytes: float, num_gpus: int, gpus_per_host: int, failures: Failures) -> Goodput:
    """Returns the goodput of a run whose checkpoints have a number of bytes.

    gpus_per_host    GPUs that are away together when one fails
    """
    failure_s = failures.mtbf_s / num_gpus
    checkpoint_s = num_bytes / failures.storage_bytes_per_s
    interval_s = best_interval_s(checkpoint_s, failure_s)
    nodes = -(-num_gpus // gpus_per_host)
    away = nodes * gpus_per_host * failures.repair_s / failures.mtbf_s
    spares = failures.spare_nodes
    if spares is None:
        spares = best_spares(nodes, away)
    return Goodput(
        failure_s=failure_s,
        checkpoint_s=checkpoint_s,
        interval_s=interval_s,
        running_share=running_share(
            interval_s, checkpoint_s, failures.restart_s + checkpoint_s, failure_s
        ),
        spare_nodes=spares,
        short_share=short_share(spares, away),
        wait_s=failures.repair_s / (spares + 1),
        ready_share=ready_share(spares, away),
    )


def best_interval_s(checkpoint_s: float, failure_s: float) -> float:
    """Returns the seconds of steps between checkpoints that lose the least time (EQUATIONS D1).

    It is Young's square root with Daly's terms of higher order; a checkpoint that takes longer than
    twice the time between failures leaves the time between failures.
    """
    half = checkpoint_s / (2 * failure_s)
    if half >= 1:
        return failure_s
    root = math.sqrt(2 * checkpoint_s * failure_s)
    return root * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint_s


def running_share(
    interval_s: float, checkpoint_s: float, restart_s: float, failure_s: float
) -> float:
    """Returns the share of time in which a run advances that is never short of nodes.

    A failure may come at any moment, during a checkpoint or a restart too (EQUATIONS D1).
    """
    passes = (interval_s + checkpoint_s) / failure_s
    # the logarithm of exp(passes) - 1, without an overflow
    log_passes = passes + math.log(-math.expm1(-passes))
    return interval_s / failure_s * math.exp(-restart_s / failure_s - log_passes)


def short_shares(away: float) -> Iterator[float]:
    """Yields the share of failures that find no spare node, for 0, 1, 2 .. spares (EQUATIONS D2).

    It is the loss formula of Erlang 1917, in its recursion

        B(0) = 1,   B(s) = a B(s - 1) / (s + a B(s - 1))

    away    mean number of failed nodes, a, where the run never waits
    """
    short = 1.0
    for spares in itertools.count(1):
        yield short
        short = away * short / (spares + away * short)


def short_share(spares: int, away: float) -> float:
    """Returns the share of failures that find none of some spare nodes (EQUATIONS D2)."""
    return next(itertools.islice(short_shares(away), spares, None))


def ready_share(spares: int, away: float) -> float:
    """Returns the share of time in which at most `spares` nodes are away (EQUATIONS D2).

    away    mean number of failed nodes, where the run never waits
    """
    return _ready(spares, away, short_share(spares, away))


def _ready(spares: int, away: float, short: float) -> float:
    return 1 / (1 + away * short / (spares + 1))


def best_spares(nodes: int, away: float) -> int:
    """Returns the number of spare nodes with the most steps for each node of both kinds."""
    best, most = 0, 0.0
    for spares, short in enumerate(itertools.islice(short_shares(away), MOST_SPARES)):
        share = _ready(spares, away, short) * nodes / (nodes + spares)
        if share > most:
            best, most = spares, share
        if nodes / (nodes + spares + 1) <= most:  # more spares cannot gain it back
            break
    return best
