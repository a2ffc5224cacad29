"""The price cache of a model with several classes of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL

MACHINE = machine_for(load_cluster("h100-80gb"))
TRAINING = TrainingSpec(global_batch_size=8, seq_length=4096, stack=NEUTRAL)
WHOLE, MESH = Sharding(), Mesh(pp=1, dp=1, tp=1)


def prices(model: ModelSpec) -> PriceCache:
    return PriceCache(model, TRAINING, MACHINE)


def test_layers_of_one_class_have_the_key_of_their_class():
    cache = prices(load_model("deepseek-v2-lite").spec)

    keys = cache.keys(0, cache.num_layers)

    assert [str(key) for key in keys] == ["embedding", "dense", *["experts"] * 26, "head"]
    assert keys[2] is keys[3]


def test_each_class_has_its_own_price_and_states():
    cache = prices(load_model("deepseek-v2-lite").spec)
    dense, experts = cache.key(1, 0), cache.key(2, 0)

    states = [cache.states(key, MESH, WHOLE, 0).states.total for key in (dense, experts)]

    assert states[1] > 5 * states[0]  # 64 experts of 1,408 against a width of 10,944
    recomputed = cache.recompute_operators(dense, Recompute.FULL)
    assert "router" not in recomputed
    assert "router" in cache.recompute_operators(experts, Recompute.FULL)


def test_a_block_with_a_window_is_faster_by_what_its_attention_leaves_out():
    model = replace(
        load_model("llama3-8b").spec, blocks=(BlockRun(window=1024), BlockRun(), BlockRun())
    )
    cache = prices(model)

    local, full = (cache.layer_time(key, 1, WHOLE) for key in (cache.key(1, 0), cache.key(2, 0)))
    alike = prices(load_model("llama3-8b").spec).layer_time(LayerKind.BLOCK, 1, WHOLE)

    assert local.forward_s < full.forward_s
    assert full.forward_s == alike.forward_s


def test_blocks_of_all_classes_send_the_same_tensor():
    cache = prices(load_model("nemotron-h-8b").spec)

    assert len({cache.cut_class(cut) for cut in range(1, cache.num_layers)}) == 1
    (tensor,) = cache.crossing_tensors(0, 2)
    assert tensor.num_elements == 2 * 4096 * 4096


def test_parameters_of_the_classes_add_up_to_those_of_the_model():
    spec = load_model("llama4-maverick").spec
    cache = prices(spec)

    total = sum(cache.layer(key, 1).num_parameters for key in cache.keys(0, cache.num_layers))

    assert total == cache.num_parameters


@pytest.mark.parametrize("name", ["qwen3-8b", "olmo-2-7b", "falcon-7b", "qwen3-30b-a3b"])
def test_tensor_parallelism_divides_the_work_of_the_new_families(name):
    cache = prices(load_model(name).spec)
    tp = 4 if load_model(name).spec.num_kv_heads % 4 == 0 else 1

    whole, divided = (
        cache.layer_time(LayerKind.BLOCK, 1, sharding)
        for sharding in (WHOLE, Sharding(tp, sequence_parallel=True))
    )

    assert (divided.forward_s < whole.forward_s) == (tp > 1)


def test_inside_a_tower_the_embedding_travels_along():
    cache = prices(load_model("qwen2-vl-7b").spec)
    classes = [cache.cut_class(cut) for cut in range(1, cache.num_layers)]

    # before the patches, 32 blocks and the projector, 28 blocks, the head
    assert classes == [0, *[1] * 33, *[0] * 29]
    tower, embedded = cache.crossing_tensors(1, 2)
    assert tower.num_elements == 2 * 5120 * 1280
    assert embedded.num_elements == 2 * 4096 * 3584
    assert cache.crossing_tensors(0, 2) == (embedded,)


def test_the_output_of_an_encoder_travels_to_all_blocks_and_is_held_once_by_a_stage():
    cache = prices(load_model("whisper-large-v3").spec)
    last = cache.num_layers - 1

    assert [cache.cut_class(cut) for cut in (1, 2, 34, 35, last - 1, last)] == [0, 1, 1, 2, 2, 0]
    _, sound = cache.crossing_tensors(2, 3)
    assert sound.num_elements == 3 * 1500 * 1280
    assert cache.besides_bytes(0, 35, 3) == 0  # the tower alone
    assert cache.besides_bytes(35, last, 3) == cache.besides_bytes(50, 52, 3) == sound.num_bytes


def test_parameters_of_a_tower_that_are_not_trained_have_no_states():
    cache = prices(load_model("whisper-large-v3").spec)

    assert cache.num_parameters - cache.num_trained_parameters == 1500 * 1280
    assert cache.frozen_bytes == 2 * 1500 * 1280
