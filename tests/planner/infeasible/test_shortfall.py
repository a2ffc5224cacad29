"""When nothing fits, the named plan is the leanest and the named cluster is large enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.oom_risk import RiskMargin, default_margin
from parplan.planner.request import Constraints, SearchOptions
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS, every_price, least_peak, peak_bytes, random_instance
from tests.helpers.planning import (
    find_plan,
    infeasible_error,
    least_peak_bytes,
    shortfall,
    smallest_cluster,
)

A100 = load_cluster("a100-80gb")
SEEDS = mostly_slow(range(5), {3})


def question(name, num_gpus, batch, seq_length=2048):
    return (
        load_model(name).spec,
        with_gpus(A100, num_gpus),
        TrainingSpec(global_batch_size=batch, seq_length=seq_length, stack=NEUTRAL),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "limit_gib", "pins"),
    [
        pytest.param("llama3-8b", 32, 10, Constraints(), id="the-next-node"),
        pytest.param("llama3-8b", 32, 6, Constraints(), id="free"),
        pytest.param("gpt-20b", 64, 20, Constraints(), id="larger"),
        pytest.param("llama2-13b", 64, 12, Constraints(tp=(1,), zero=(0,)), id="pipeline-only"),
    ],
)
def test_the_smallest_cluster_fits_and_one_node_fewer_does_not(name, batch, limit_gib, pins):
    model, cluster, training = question(name, 8, batch)
    options = SearchOptions(memory_limit_bytes=limit_gib * GIB)

    with pytest.raises(InfeasibleError) as error:
        find_plan(model, cluster, training, constraints=pins, options=options)
    enough = smallest_cluster(model, cluster, training, pins, limit_gib * GIB)

    assert error.value.hint == f"{enough} GPUs are enough (--gpus {enough})"
    plan = find_plan(model, with_gpus(A100, enough), training, constraints=pins, options=options)
    assert max(stage.total for stage in plan.predicted.memory_gib) <= limit_gib
    with pytest.raises(InfeasibleError):
        find_plan(model, with_gpus(A100, enough - 8), training, constraints=pins, options=options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_missing_is_what_the_leanest_of_all_strategies_needs(seed):
    instance = random_instance(seed)
    least = least_peak(instance)
    question = (instance.model, instance.cluster, instance.training)

    needs = rf"needs {least / GIB:.1f} GiB on stage \d+, 1.0 usable"
    with pytest.raises(InfeasibleError, match=f"{needs}: {least / GIB - 1:.1f} GiB short"):
        raise infeasible_error(*question, PINS, SearchOptions(memory_limit_bytes=GIB))
    find_plan(*question, constraints=PINS, options=SearchOptions(memory_limit_bytes=int(least) + 1))
    with pytest.raises(InfeasibleError):
        find_plan(
            *question, constraints=PINS, options=SearchOptions(memory_limit_bytes=int(least) - 1)
        )


@pytest.mark.parametrize("seed", mostly_slow((0, 1, 5), {5}))
def test_the_least_peak_is_that_of_the_leanest_of_all_strategies_to_1_mib(seed):
    instance = random_instance(seed)

    least_bytes = least_peak_bytes(instance.model, instance.cluster, instance.training, PINS)

    assert least_bytes == pytest.approx(least_peak(instance), abs=MIB)


def test_without_a_legal_candidate_there_is_no_least_peak():
    assert least_peak_bytes(*question("gpt-20b", 8, 64), Constraints(tp=(3,))) is None


def largest_part(price):
    """Returns the largest part of the fullest rank's memory, in the words of the error."""
    memory = max(price.memory, key=lambda rank: rank.total)
    parts = {
        "states": memory.states.total,
        "activations": memory.activations,
        "temporaries": memory.temporaries,
        "reserve": memory.reserve,
    }
    name = max(parts, key=lambda part: parts[part])
    return f"{name} {parts[name] / GIB:.1f}"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_largest_part_that_is_named_is_that_of_a_leanest_strategy(seed):
    instance = random_instance(seed)
    prices = [price for _, price in every_price(instance)]
    least = min(map(peak_bytes, prices))

    text = shortfall(
        instance.model,
        instance.cluster,
        instance.training,
        PINS,
        SearchOptions(memory_limit_bytes=GIB),
    ).text

    named = re.search(r"the largest part is (\w+).*, ([\d.]+) GiB$", text)
    assert " ".join(named.groups()) in {
        largest_part(price) for price in prices if peak_bytes(price) <= least + MIB
    }


@pytest.mark.slow
def test_states_or_activations_fill_what_they_fill():
    """The cases are many parameters on few GPUs, and long sequences without recompute."""
    states = shortfall(*question("gpt-175b", 8, 8), Constraints(), SearchOptions()).text
    long = shortfall(
        *question("gpt-2.5b", 8, 64, 65536),
        Constraints(recompute=(Recompute.NONE,), tp=(1,)),
        SearchOptions(),
    ).text

    assert "the largest part is states (parameters, gradients, optimizer), " in states
    assert "the largest part is activations, " in long


@pytest.mark.slow
def test_the_leanest_plan_of_long_sequences_gives_many_blocks_to_the_last_stages():
    """The first stage stashes eight micro-batches and the last one.

    Without recompute an even split is far from the leanest.
    """
    model, cluster, training = question("gpt-2.5b", 8, 64, seq_length=16384)
    pins = Constraints(tp=(1,), pp=(8,), recompute=(Recompute.NONE,))

    with pytest.raises(InfeasibleError) as error:
        raise infeasible_error(
            model, cluster, training, pins, SearchOptions(memory_limit_bytes=20 * GIB)
        )
    needed_gib = float(error.value.message.split("needs ")[1].split()[0])

    with pytest.raises(InfeasibleError):
        find_plan(
            model,
            cluster,
            training,
            constraints=pins,
            options=SearchOptions(memory_limit_bytes=int(0.96 * needed_gib * GIB)),
        )


@pytest.mark.slow
def test_no_cluster_in_reach_says_so():
    """The limit is below context and communication buffers, so no number of GPUs helps."""
    model, cluster, training = question("llama3-8b", 8, 32)

    error = infeasible_error(
        model,
        replace(cluster, nodes=1),
        training,
        Constraints(pp=(8,)),
        SearchOptions(memory_limit_bytes=GIB // 2),
    )

    assert error.hint == "no cluster up to 512 GPUs fits; use a larger device"
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            SearchOptions(),
            (1 - default_margin("neutral").share) * A100.device.memory_bytes,
            id="the-margin-of-measured-runs",
        ),
        pytest.param(SearchOptions(memory_margin=0.0), A100.device.memory_bytes, id="no-margin"),
        pytest.param(
            SearchOptions(memory_margin=0.5), 0.5 * A100.device.memory_bytes, id="a-margin"
        ),
        pytest.param(
            SearchOptions(memory_limit_bytes=70 * GIB), 70 * GIB, id="a-limit-replaces-the-margin"
        ),
        pytest.param(
            SearchOptions(memory_limit_bytes=700 * GIB),
            A100.device.memory_bytes,
            id="never-more-than-there-is",
        ),
    ],
)
def test_what_a_plan_may_fill(options, expected):
    assert limit_bytes(A100, NEUTRAL, options) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "usable"),
    [
        pytest.param(
            SearchOptions(), "71.2 usable with --memory-margin 0.1: ", id="the-stacks-margin"
        ),
        pytest.param(
            SearchOptions(memory_margin=0.5),
            "39.6 usable with --memory-margin 0.5: ",
            id="a-margin",
        ),
        pytest.param(
            SearchOptions(memory_margin=0.0), "79.2 usable with --memory-margin 0: ", id="no-margin"
        ),
        pytest.param(SearchOptions(memory_limit_bytes=10 * GIB), "10.0 usable: ", id="a-limit"),
    ],
)
def test_the_error_says_what_the_usable_memory_was_limited_by(options, usable, monkeypatch):
    margin = RiskMargin(share=0.1, rows=50, stack="neutral")
    monkeypatch.setattr("parplan.planner.plan.error_band.default_margin", lambda _: margin)

    error = infeasible_error(*question("gpt-175b", 8, 8), Constraints(tp=(8,)), options)

    assert usable in error.message
