"""A tower that tensor-parallel ranks do not divide costs what one rank takes with its images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.model_states import local_parameters, owned_parameters
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKey, ModelPart
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL, TowerDivision

PRICES = PriceCache(
    load_model("gemma-3-4b").spec,
    TrainingSpec(global_batch_size=8, seq_length=1024, stack=NEUTRAL),
    machine_for(load_cluster("h100-80gb")),
)
TP, BATCH = 4, 8
ALONE, TENSOR = Sharding(), Sharding(tp=TP, sequence_parallel=True)


def key_of(part: ModelPart) -> LayerKey:
    keys = (PRICES.key(index, 1) for index in range(1, PRICES.num_layers - 1))
    return next(key for key in keys if PRICES.layer(key, 1).part is part)


def own(part: ModelPart, way: TowerDivision) -> Sharding:
    return PRICES.with_tower(way).own_sharding(key_of(part), TENSOR)


@pytest.mark.parametrize("part", [ModelPart.PATCHES, ModelPart.TOWER])
@pytest.mark.parametrize(
    ("way", "batch"), [(TowerDivision.IMAGES, BATCH // TP), (TowerDivision.REPEATED, BATCH)]
)
def test_a_block_costs_what_it_costs_a_rank_with_its_images_alone(
    part: ModelPart, way: TowerDivision, batch: int
) -> None:
    key, divided = key_of(part), own(part, way)
    alone = PRICES.layer_time(key, batch, ALONE)
    whole = owned_parameters(PRICES.layer(key, 1), ALONE)

    assert PRICES.layer_time(key, BATCH, divided) == alone
    for level in (Recompute.NONE, Recompute.FULL):
        there = PRICES.activations(key, BATCH, divided, level)
        assert there.saved == PRICES.activations(key, batch, ALONE, level).saved
    assert owned_parameters(PRICES.layer(key, 1), divided) == whole
    assert whole > 2 * owned_parameters(PRICES.layer(key, 1), TENSOR) or part is ModelPart.PATCHES


def test_gradients_of_divided_images_are_summed_and_of_repeated_ones_are_not() -> None:
    key = key_of(ModelPart.TOWER)
    sums = {
        way: {each.summed_axes for each in local_parameters(PRICES.layer(key, 1), own_way).each}
        for way in (TowerDivision.IMAGES, TowerDivision.REPEATED)
        for own_way in (own(ModelPart.TOWER, way),)
    }

    assert sums == {TowerDivision.IMAGES: {(0,), ()}, TowerDivision.REPEATED: {()}}


def test_the_projector_is_divided_as_a_block_and_gets_the_images_from_their_ranks() -> None:
    key = key_of(ModelPart.PROJECTOR)
    plain = PRICES.layer_time(key, BATCH, TENSOR)
    images = PRICES.layer_time(key, BATCH, own(ModelPart.PROJECTOR, TowerDivision.IMAGES))
    repeated = PRICES.layer_time(key, BATCH, own(ModelPart.PROJECTOR, TowerDivision.REPEATED))

    assert plain.forward_s < images.forward_s  # an exchange of images for tokens
    assert plain.forward_s == repeated.forward_s  # every rank takes its tokens
    assert plain.backward_s < repeated.backward_s  # and all get the gradients of all


@pytest.mark.parametrize("way", list(TowerDivision))
def test_blocks_of_the_language_model_are_divided_alike(way: TowerDivision) -> None:
    assert own(ModelPart.LANGUAGE, way) == TENSOR
    assert PRICES.with_tower(way).own_sharding(key_of(ModelPart.TOWER), ALONE) == ALONE
    assert replace(own(ModelPart.TOWER, way), tower=TowerDivision.TENSOR).tp == TP
