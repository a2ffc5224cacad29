"""Each row of the scheme table, against the survey's closed form of what a device sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.schemes.every_scheme import SCHEMES, priced_schemes
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import request

N, B, M = 4, 2, 8  # devices, sequences of one in a micro-batch, micro-batches of one device
ENTRY = load_model("gpt-2.5b")
MODEL = replace(ENTRY.spec, tied_embeddings=False, num_layers=8, name="gpt-8-layers")
TRAINING = TrainingSpec(global_batch_size=N * B * M, seq_length=1024, stack=NEUTRAL)
REQUEST = request(MODEL, with_gpus(load_cluster("a100-80gb"), N), TRAINING)


@pytest.fixture(scope="module")
def table():
    return {each.scheme.name: each for each in priced_schemes(REQUEST, B)}


@pytest.fixture(scope="module")
def parameters():
    from parplan.planner.infeasible.shortfall import price_cache_of

    return price_cache_of(REQUEST).num_parameters


def test_every_scheme_has_a_row_with_a_price_or_a_reason(table):
    assert list(table) == [scheme.name for scheme in SCHEMES]
    missing = {name for name, each in table.items() if each.cost is None}
    assert missing == {"tensor 3-D", "tensor 2.5-D", "expert parallel"}
    assert all(table[name].reason for name in missing)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("data parallel", 2 * 4),  # fp32 gradients, all-reduced
        ("ZeRO 1", 4 + 2),  # reduced and scattered; 16-bit parameters gathered
        ("ZeRO 2", M * 4 + 2),
        ("ZeRO 3", M * (4 + 2 * 2)),
    ],
)
def test_data_parallel_schemes_send_bytes_per_parameter(table, parameters, name, sent):
    assert table[name].cost.sent_bytes == pytest.approx((N - 1) / N * sent * parameters, rel=0.01)


def test_tensor_parallelism_all_reduces_four_times_a_block(table):
    """Embedding and head have one more all-reduce each."""
    hidden = 2 * TRAINING.seq_length * B * MODEL.hidden_size
    reductions = 4 * MODEL.num_layers + 2
    sent = M * N * reductions * 2 * (N - 1) / N * hidden

    assert table["tensor 1-D"].cost.sent_bytes == pytest.approx(sent, rel=0.02)
    assert table["tensor 1-D, sequence parallel"].cost.sent_bytes == pytest.approx(sent, rel=0.3)


def test_a_stage_receives_an_activation_and_a_gradient_of_each_micro_batch(table):
    hidden = 2 * TRAINING.seq_length * B * MODEL.hidden_size

    for name in ("pipeline, GPipe", "pipeline, 1F1B"):
        assert table[name].cost.sent_bytes == pytest.approx(M * N * 2 * hidden)
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
    assert held["ZeRO 3, states on the host"] == 0.0
    assert held["context, ring"] == held["context, all-to-all"] == held["context, all-gather"]
    assert held["context, ring"] == pytest.approx(held["parameter server"], rel=1e-4)


def test_recompute_trades_seconds_for_activations(table):
    plain, full = table["data parallel"].cost, table["data parallel, full recompute"].cost

    assert full.compute_s > 1.2 * plain.compute_s
    assert full.activation_bytes < 0.5 * plain.activation_bytes
