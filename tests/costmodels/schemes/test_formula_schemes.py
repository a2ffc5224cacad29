"""Formulas of schemes that no search uses, checked against counts of what devices lack."""

from __future__ import annotations

import pytest

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schemes.formula_schemes import (
    SchemeCase,
    parameter_server,
    tensor_3d,
    tensor_25d,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

MODEL = load_model("gpt-2.5b").spec
TRAINING = TrainingSpec(global_batch_size=64, seq_length=1024, stack=NEUTRAL)
PASSES = 3  # one forward, two backward


def case(num_devices, micro_batch_size=8, model=MODEL):
    cluster = with_gpus(load_cluster("a100-80gb"), num_devices)
    prices = PriceCache(model, TRAINING, machine_for(cluster))
    return SchemeCase(prices, num_devices, micro_batch_size)


def products(given):
    return [(each.inputs, each.weight, each.outputs, each.count) for each in given.products(8)]


def test_a_cube_sends_what_a_device_lacks_of_the_tiles_that_it_multiplies():
    """Device (i, j, k) multiplies X[i, k] by W[k, j] for Y[i, j]; l devices share each tile."""
    given, side = case(8), 2
    share = (side - 1) / side / side**2  # of a tile in l parts it lacks l - 1
    expected = sum(count * PASSES * share * (x + w + y) for x, w, y, count in products(given))

    assert tensor_3d(given).sent_bytes == pytest.approx(given.num_micro_batches * expected)


def test_layers_of_squares_divide_the_batch_and_sum_weight_gradients():
    given = case(8)  # 2 x 2 x 2
    m = given.num_micro_batches
    of_passes = sum(c * PASSES * (x / 2 + w) / 4 for x, w, _, c in products(given))
    of_weights = sum(c * w / 4 for _, w, _, c in products(given))

    cost = tensor_25d(given)

    assert cost.sent_bytes == pytest.approx(m * of_passes + of_weights)
    assert cost.states_bytes == pytest.approx(given.states_bytes(1) / 4)
    assert cost.activation_bytes == pytest.approx(given.saved_bytes(8) / 8)


def test_a_server_receives_the_gradients_of_all_workers():
    given = case(4)
    cost = parameter_server(given)
    nic = given.price_cache.machine.cluster.nic

    assert cost.sent_bytes == 4 * given.price_cache.num_parameters
    assert cost.comm_s >= 4 * cost.sent_bytes / nic.bytes_per_s
    assert cost.states_bytes == given.states_bytes(1)


@pytest.mark.parametrize(
    ("formula", "num_devices", "message"),
    [
        (tensor_3d, 4, "3-D tensor parallelism needs q x q x q devices, there are 4"),
        (tensor_25d, 2, "2.5-D tensor parallelism needs q x q x d of 2 devices"),
    ],
)
def test_a_number_of_devices_that_a_scheme_cannot_use_is_an_error(formula, num_devices, message):
    with pytest.raises(ConfigError, match=message):
        formula(case(num_devices))
