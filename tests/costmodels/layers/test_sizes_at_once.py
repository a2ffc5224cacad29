"""The layers of all micro-batch sizes of a search are priced at once, each as alone."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.request import sizes_of
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import ContextForm

SHARDINGS = {
    "whole": Sharding(),
    "tp 8": Sharding(8),
    "tp 8, sequence parallel": Sharding(8, True),
    "tp 2, ep 4": Sharding(2, True, ep=4),
    "tp 4, ep 2, etp 4": Sharding(4, True, ep=2, etp=4),
    "cp 4 in a ring": Sharding(2, True, cp=4, context_form=ContextForm.RING),
}
SLOW = {"mixtral-8x22b", "gpt-oss-120b", "qwen3-235b-a22b"}
MODELS = ("deepseek-v3", "gpt-20b", *sorted(SLOW))


@pytest.mark.parametrize("ways", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS],
)
def test_a_size_has_the_same_price_at_once_and_alone(name, ways):
    model = load_model(name).spec
    if not model.num_experts and ways.ep * ways.etp > 1:
        ways = Sharding(ways.tp, ways.sequence_parallel)
    stack = load_stack("megatron-core")
    training = TrainingSpec(global_batch_size=192, seq_length=2048, stack=stack)
    machine = machine_for(load_cluster("h100-80gb"))
    alone = PriceCache(model, training, machine)
    at_once = PriceCache(model, training, machine, sizes=sizes_of(training))
    keys = dict.fromkeys(alone.key(layer, layer) for layer in range(alone.num_layers))

    for key in keys:
        for size in (1, 2, 3, 8, 64):
            for level in Recompute:
                which = key, size, ways, level
                assert at_once.layer_time(*which) == alone.layer_time(*which), which
            assert at_once.weight_s(key, size, ways) == alone.weight_s(key, size, ways)
            saved = alone.activations(key, size, ways, Recompute.SELECTIVE).saved
            assert at_once.saved_bytes(key, size, ways, Recompute.SELECTIVE) == saved
    assert sizes_of(training) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
