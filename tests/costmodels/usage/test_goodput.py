"""Goodput against a simulated run, and the choices that it makes against their neighbours."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.usage.goodput import (
    Failures,
    best_interval_s,
    best_spares,
    checkpoint_bytes,
    goodput,
    ready_share,
    running_share,
    short_share,
)
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

HOUR = 3600.0


def simulated_share(
    interval_s: float, checkpoint_s: float, restart_s: float, failure_s: float, rounds: int
) -> float:
    """Returns the share of a run of some checkpoints in which it advances, failure by failure."""
    dice = random.Random(0)
    clock = 0.0
    until = dice.expovariate(1 / failure_s)
    for _ in range(rounds):
        needed = interval_s + checkpoint_s
        while until < needed:
            clock += until
            needed = restart_s + interval_s + checkpoint_s
            until = dice.expovariate(1 / failure_s)
        clock += needed
        until -= needed
    return rounds * interval_s / clock


@pytest.mark.parametrize(
    ("interval_s", "checkpoint_s", "restart_s", "failure_s"),
    [(600, 30, 300, 3 * HOUR), (200, 50, 400, 1000), (4000, 20, 60, 2000)],
)
def test_the_closed_form_is_the_mean_of_simulated_runs(
    interval_s: float, checkpoint_s: float, restart_s: float, failure_s: float
) -> None:
    simulated = simulated_share(interval_s, checkpoint_s, restart_s, failure_s, 40_000)
    closed = running_share(interval_s, checkpoint_s, restart_s, failure_s)
    assert closed == pytest.approx(simulated, rel=0.03)


@given(
    checkpoint_s=st.floats(0.1, 1000),
    failure_s=st.floats(2000, 1e7),
    factor=st.sampled_from([0.5, 0.8, 1.25, 2.0]),
)
def test_no_other_interval_loses_clearly_less(
    checkpoint_s: float, failure_s: float, factor: float
) -> None:
    best_s = best_interval_s(checkpoint_s, failure_s)
    best = running_share(best_s, checkpoint_s, 60, failure_s)
    assert running_share(best_s * factor, checkpoint_s, 60, failure_s) <= best * 1.001


def test_a_checkpoint_longer_than_two_failures_is_written_at_every_failure() -> None:
    assert best_interval_s(300, 100) == 100


def test_spare_nodes_are_as_many_as_pay() -> None:
    away = 4.0
    best = best_spares(500, away)
    gains = {spares: ready_share(spares, away) * 500 / (500 + spares) for spares in range(60)}
    assert gains[best] == max(gains.values())
    assert best_spares(2, 0.01) == 0


def simulated_cluster(nodes: int, failures: Failures, checkpoint_s: float, rounds: int) -> float:
    """Returns the share of a run of some checkpoints in which it advances, with every repair.

    Nodes of one GPU fail while the run works, and come back one by one.
    """
    dice = random.Random(1)
    failure_s = failures.mtbf_s / nodes
    interval_s = best_interval_s(checkpoint_s, failure_s)
    clock, away, spares = 0.0, [], failures.spare_nodes or 0
    until = dice.expovariate(1 / failure_s)
    for _ in range(rounds):
        needed = interval_s + checkpoint_s
        while until < needed:
            clock += until
            away = [back for back in away if back > clock]
            away.append(clock + dice.expovariate(1 / failures.repair_s))
            if len(away) > spares:
                clock = min(away)
            needed = failures.restart_s + checkpoint_s + interval_s + checkpoint_s
            until = dice.expovariate(1 / failure_s)
        clock += needed
        until -= needed
    return rounds * interval_s / clock


@pytest.mark.parametrize(("spares", "repair_s"), [(0, 500.0), (1, 3000.0), (3, 9000.0)])
def test_the_goodput_is_the_mean_of_a_simulated_cluster(spares: int, repair_s: float) -> None:
    failures = Failures(
        mtbf_s=40_000, restart_s=60, storage_bytes_per_s=1.0, repair_s=repair_s, spare_nodes=spares
    )
    closed = goodput(20, 16, 1, failures)
    assert closed.ready_share < 0.95
    assert closed.share == pytest.approx(simulated_cluster(16, failures, 20, 40_000), rel=0.02)


def test_the_shares_of_nodes_away_are_those_of_the_birth_death_process() -> None:
    away, spares = 3.0, 4
    weights = [away**count / math.factorial(count) for count in range(spares + 2)]
    assert ready_share(spares, away) == pytest.approx(sum(weights[:-1]) / sum(weights))
    assert short_share(spares, away) == pytest.approx(weights[-2] / sum(weights[:-1]))
    assert ready_share(0, away) == 1 / (1 + away)


def test_a_cluster_that_fails_all_the_time_never_advances() -> None:
    assert running_share(10, 10, 3600, 1.0) == 0.0


def test_bloom_kept_about_as_many_spare_nodes_as_pay() -> None:
    """48 nodes with four spare ones, and one or two failures a week (arXiv 2211.05100)."""
    day_s = 24 * HOUR
    week_s = 7 * day_s
    assert best_spares(48, 1.5 * day_s / week_s) == 1
    assert best_spares(48, 1.5 * week_s / week_s) == 4


def test_nodes_that_never_fail_are_always_ready() -> None:
    assert ready_share(0, 0.0) == 1.0


def test_a_checkpoint_has_the_master_weights_and_two_moments() -> None:
    training = TrainingSpec(global_batch_size=1, seq_length=1, stack=NEUTRAL)
    assert checkpoint_bytes(1000, training) == 12_000


def test_llama_3_405b_advanced_more_than_nine_tenths_of_its_time() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
    mtbf_s = 54 * 24 * HOUR * 16_384 / 419
    failures = Failures(
        mtbf_s=mtbf_s, restart_s=600, storage_bytes_per_s=2e12, repair_s=24 * HOUR, spare_nodes=64
    )
    result = goodput(12 * 405e9, 16_384, 8, failures)
    assert result.failure_s == pytest.approx(3.1 * HOUR, rel=0.01)
    assert 0.90 < result.share < 0.95
