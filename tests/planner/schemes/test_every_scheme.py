"""Each row of the scheme table, against the survey's closed form of what a device sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.schemes.every_scheme import SCHEMES, priced_scheme, priced_schemes
from parplan.planner.schemes.scheme_prices import SchemeInput
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.closed_forms import CLOSED_FORMS, Sizes
from tests.helpers.planning import request

N, B, M = 4, 2, 8  # devices, sequences of one in a micro-batch, micro-batches of one device
STEPS = 4  # of local SGD between two sums
ENTRY = load_model("gpt-2.5b")
MODEL = replace(ENTRY.spec, tied_embeddings=False, num_layers=8, name="gpt-8-layers")
TRAINING = TrainingSpec(global_batch_size=N * B * M, seq_length=1024, stack=NEUTRAL)
REQUEST = request(MODEL, with_gpus(load_cluster("a100-80gb"), N), TRAINING)


@pytest.fixture(scope="module")
def table():
    return {each.scheme.name: each for each in priced_schemes(REQUEST, B, STEPS)}


@pytest.fixture(scope="module")
def parameters():
    return price_cache_of(REQUEST).num_parameters


def test_every_scheme_has_a_price_over_as_many_devices_as_can_run_it(table):
    assert list(table) == [scheme.name for scheme in SCHEMES]
    assert all(each.cost and each.degree * each.copies == N for each in table.values())
    fewer = {name: each.degree for name, each in table.items() if each.degree < N}
    assert fewer == {"tensor 3-D": 1, "expert parallel": 1}
    assert all(table[name].reason for name in fewer)
    assert table["expert parallel"].cost == table["data parallel"].cost


def test_more_devices_than_layers_run_the_deepest_pipeline_and_copies_of_it():
    deep = replace(REQUEST, cluster=with_gpus(load_cluster("a100-80gb"), 32))
    given = SchemeInput(
        request=deep, micro_batch_size=1, price_cache=price_cache_of(deep), local_steps=1
    )
    (pipeline,) = [scheme for scheme in SCHEMES if scheme.name == "pipeline, 1F1B"]

    priced = priced_scheme(pipeline, given)

    assert (priced.degree, priced.copies) == (8, 4)
    assert priced.cost is not None
    assert priced.reason == "pp 32 is more than the 8 layers"


def test_devices_are_idle_where_no_degree_is_legal_on_all():
    three = replace(REQUEST, cluster=with_gpus(load_cluster("a100-80gb"), 3))
    given = SchemeInput(request=three, micro_batch_size=B, price_cache=price_cache_of(three))
    by_name = {scheme.name: scheme for scheme in SCHEMES}

    alone = priced_scheme(by_name["data parallel"], given)

    assert (alone.degree, alone.copies) == (1, 1)  # 3 replicas do not divide the batch
    assert "dp 3 x a whole number" in alone.reason
    assert priced_scheme(by_name["pipeline, 1F1B"], given).degree == 3


def test_schemes_that_change_convergence_are_marked_and_no_search_uses_them():
    marked = {scheme.name for scheme in SCHEMES if scheme.changes_convergence}
    assert marked == {
        "asynchronous server",
        "local SGD",
        "PipeDream, stashing",
        "PipeDream-2BW",
    }
    assert not any(scheme.searched for scheme in SCHEMES if scheme.changes_convergence)
    assert all(
        text for each in SCHEMES for text in (each.time, each.sends, each.holds, each.source)
    )


def test_schemes_that_no_plan_can_state_are_those_with_formulas_of_their_own():
    """Neither a search nor the executor has them."""
    assert {scheme.name for scheme in SCHEMES if not scheme.searched} == {
        "parameter server",
        "asynchronous server",
        "local SGD",
        "tensor 2.5-D",
        "tensor 3-D",
        "PipeDream, stashing",
        "PipeDream-2BW",
    }


def test_local_steps_divide_what_is_sent_and_what_is_waited(table, parameters):
    assert table["local SGD"].cost.sent_bytes == pytest.approx(
        2 * (N - 1) / N * 4 * parameters / STEPS
    )
    sums = next(
        each.cost for each in priced_schemes(REQUEST, B, 1) if each.scheme.name == "local SGD"
    )
    assert table["local SGD"].cost.comm_s == pytest.approx(sums.comm_s / STEPS)


def test_pipelines_without_a_flush_never_wait_and_keep_versions_of_the_weights(table):
    flushed = table["pipeline, 1F1B"].cost
    stashing, buffered = (table[f"PipeDream{name}"].cost for name in (", stashing", "-2BW"))

    assert stashing.wait_s == buffered.wait_s == 0 < flushed.wait_s
    assert buffered.compute_s == flushed.compute_s < stashing.compute_s
    whole = flushed.states_bytes * 2 / 18  # 16-bit weights of the fullest stage, the first
    assert buffered.states_bytes == pytest.approx(flushed.states_bytes + whole, rel=0.01)
    assert stashing.states_bytes == pytest.approx(flushed.states_bytes + (N - 1) * whole, rel=0.01)
    assert buffered.activation_bytes == stashing.activation_bytes == flushed.activation_bytes


def test_workers_that_wait_for_nobody_take_the_longer_of_server_and_compute(table):
    waiting, free = (table[f"{name} server"].cost for name in ("parameter", "asynchronous"))

    assert free.step_s == pytest.approx(max(waiting.compute_s, waiting.comm_s))


@pytest.mark.parametrize("name", [name for name in CLOSED_FORMS if name != "expert parallel"])
def test_a_device_sends_the_bytes_of_the_closed_form(table, name):
    own = name.startswith(("data", "ZeRO"))
    sizes = Sizes(MODEL, TRAINING, N, B, M if own else M * N)

    assert table[name].cost.sent_bytes == pytest.approx(CLOSED_FORMS[name](sizes), rel=1e-9)


def test_a_pipeline_waits_and_gpipe_holds_all_micro_batches(table):
    for name in ("pipeline, GPipe", "pipeline, 1F1B"):
        assert table[name].cost.wait_s > 0
    assert table["pipeline, interleaved"].cost.wait_s < table["pipeline, 1F1B"].cost.wait_s
    gpipe, one_f_one_b = (table[f"pipeline, {name}"].cost for name in ("GPipe", "1F1B"))
    assert gpipe.activation_bytes > 5 * one_f_one_b.activation_bytes


def test_states_are_whole_or_divided(table, parameters):
    held = {name: each.cost.states_bytes for name, each in table.items() if each.cost}

    assert held["data parallel"] == pytest.approx(18 * parameters, rel=0.01)
    assert held["ZeRO 1"] == pytest.approx((2 + 4 + 12 / N) * parameters, rel=0.01)
    assert held["ZeRO 3"] == pytest.approx(16 / N * parameters, rel=0.01)  # gathered from fp32
    assert held["tensor 2-D"] == pytest.approx(18 / N * parameters, rel=0.01)
    assert held["ZeRO 3 on the host"] == 0.0
    assert held["context, ring"] == held["context, all-to-all"] == held["context, all-gather"]
    assert held["context, ring"] == pytest.approx(held["parameter server"], rel=1e-4)


def test_recompute_trades_seconds_for_activations(table):
    plain, full = table["data parallel"].cost, table["full recompute"].cost

    assert full.compute_s > 1.2 * plain.compute_s
    assert full.activation_bytes < 0.5 * plain.activation_bytes
