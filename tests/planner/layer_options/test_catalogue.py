"""The catalogue has exact prices, the front of each weight layout, and only pinned options."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.layer_options.catalogue import (
    Catalogue,
    catalogue_of,
    divided_dims,
    weight_divided,
)
from parplan.planner.layer_options.layer_front import least_times_s
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import TowerDivision

GRID = Sharding(4, axes=(2, 2), rows=2)
SHARDINGS = [Sharding(), Sharding(2), Sharding(4, True), GRID]


def book_of(name, **training):
    spec = TrainingSpec(
        global_batch_size=8, seq_length=2048, stack=load_stack("megatron-core"), **training
    )
    return PriceCache(
        load_model(name).spec, spec, machine_for(with_gpus(load_cluster("a100-80gb"), 8))
    )


BOOKS = {
    "gpt-8.3b": book_of("gpt-8.3b"),
    "llama3-8b": book_of("llama3-8b"),
    "unfused": book_of("gpt-8.3b", attention="unfused"),
}


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("price_cache", BOOKS.values(), ids=BOOKS)
def test_every_option_has_the_price_of_the_book(price_cache, sharding):
    for option in Catalogue(price_cache).options(2, sharding):
        size = price_cache.activations(LayerKind.BLOCK, 2, option.sharding, option.recompute)

        assert option.time_s == pytest.approx(
            price_cache.layer_time(LayerKind.BLOCK, 2, option.sharding, option.recompute).total_s,
            rel=1e-12,
        )
        assert (option.saved_bytes, option.ideal_saved_bytes) == (size.saved, size.ideal_saved)
        assert option.workspace_bytes == pytest.approx(size.workspace, abs=1)


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("price_cache", BOOKS.values(), ids=BOOKS)
def test_the_levels_of_recompute_are_no_better_than_the_catalogue(price_cache, sharding):
    catalogue = Catalogue(price_cache)
    for level in Recompute:
        time_s = price_cache.layer_time(LayerKind.BLOCK, 2, sharding, level).total_s
        size = price_cache.activations(LayerKind.BLOCK, 2, sharding, level)
        assert any(
            option.time_s <= time_s and option.saved_bytes <= size.saved
            for option in catalogue.options(2, sharding)
        )


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_no_option_is_faster_than_the_bound_of_its_layout(sharding):
    catalogue = Catalogue(BOOKS["llama3-8b"])
    least_s = catalogue.fastest_s(2, sharding)
    for option in catalogue.options(2, sharding):
        assert option.time_s >= least_s[option.weight_layout] * (1 - 1e-12)
    fastest = {
        weight_layout: min(
            o.time_s for o in catalogue.options(2, sharding) if o.weight_layout == weight_layout
        )
        for weight_layout in least_s
    }
    assert fastest == pytest.approx(least_s)


def test_lists_of_operators_lie_between_the_levels():
    options = Catalogue(BOOKS["gpt-8.3b"]).options(2, Sharding())

    levels = {BOOKS["gpt-8.3b"].recompute_operators(LayerKind.BLOCK, level) for level in Recompute}
    assert len(options) > 10
    assert any(option.recompute == ("activation",) for option in options)
    assert sum(option.recompute not in levels for option in options) > 8


def test_pins_leave_only_their_levels_and_megatrons_division():
    price_cache = BOOKS["llama3-8b"]
    pinned = Catalogue(price_cache, (Recompute.FULL,), megatron_sharding=True).options(
        2, Sharding(4, True)
    )
    full = Catalogue(price_cache, (Recompute.FULL,)).options(2, Sharding(4, True))

    assert [option.sharding for option in pinned] == [Sharding(4, True)]
    everything = set(price_cache.recompute_operators(LayerKind.BLOCK, Recompute.FULL))
    assert all(set(option.recompute) == everything for option in full)
    assert len(full) > 1


def test_weights_of_at_least_one_part_are_divided_and_what_they_are_is_said():
    price_cache = BOOKS["llama3-8b"]
    assert divided_dims(price_cache) == ("heads", "ffn")
    for option in Catalogue(price_cache).options(2, Sharding(2)):
        assert option.weight_layout
        for operator in price_cache.graph(1).block.operators:
            if operator.parameters and operator.parallel_dim:
                axes = weight_divided(operator, option.sharding.splits(operator), option.sharding)
                assert {(operator.parallel_dim, over_data) for over_data in axes} == {
                    each for each in option.weight_layout if each[0] == operator.parallel_dim
                }


def test_requests_that_differ_in_nodes_and_memory_share_a_catalogue():
    price_cache, pins = BOOKS["llama3-8b"], Constraints(recompute=(Recompute.NONE,))
    larger = PriceCache(
        price_cache.model,
        price_cache.training,
        machine_for(with_gpus(load_cluster("a100-80gb"), 64)),
    )

    assert catalogue_of(price_cache, pins) is catalogue_of(larger, pins)
    assert catalogue_of(price_cache, pins) is not catalogue_of(price_cache, Constraints())
    shared = catalogue_of(larger, pins).options(2, Sharding(2))
    separate = Catalogue(larger, pins.recompute).options(2, Sharding(2))
    assert [option.values for option in shared] == [option.values for option in separate]


def test_ways_to_divide_that_are_not_megatrons_are_found():
    """Under sequence parallelism an MLP can keep its tokens, with a whole weight on every rank."""
    options = Catalogue(BOOKS["llama3-8b"]).options(2, Sharding(2, True))

    heads_only = [option for option in options if option.weight_layout == {("heads", False)}]
    assert any(("fc1", (Split("sequence"),)) in option.sharding.own for option in heads_only)
    assert min(o.time_s for o in heads_only) < min(
        o.time_s for o in options if o.weight_layout == {("heads", False), ("ffn", False)}
    )


@pytest.mark.parametrize("sharding", [Sharding(4), Sharding(4, True), Sharding(2, data=2)])
def test_the_fastest_layers_of_all_sizes_are_those_of_each_size_alone(sharding):
    catalogue = Catalogue(book_of("gpt-1.5b"))

    for size in (1, 2, 4, 8):
        problem = catalogue.problem(size, sharding).only(lambda _, option: not option.recomputed)
        fastest_s = catalogue.fastest_s(size, sharding)
        for weight_layout, least_s in fastest_s.items():
            allowed = catalogue._allowed(weight_layout, None, sharding)
            assert least_times_s(problem, [allowed]) == [least_s]
        assert fastest_s


@pytest.mark.slow
@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("sharding", [*SHARDINGS, Sharding(2, data=2)], ids=str)
@pytest.mark.parametrize("price_cache", BOOKS.values(), ids=BOOKS)
def test_no_option_is_below_the_corners_and_some_option_is_on_their_lines(
    price_cache, sharding, keeps_all
):
    catalogue = Catalogue(price_cache)
    corners = catalogue.corners(2, sharding, keeps_all=keeps_all)
    options = [o for o in catalogue.options(2, sharding) if not (keeps_all and o.recompute)]

    assert {option.weight_layout for option in options} <= set(corners)
    for weight_layout, each in corners.items():
        own = [option for option in options if option.weight_layout == weight_layout]
        for price_s in (0.0, *catalogue._prices_of_bytes(2, sharding), 1e-3):
            least_s = float((each.time_s + price_s * each.saved_bytes).min())
            of_options = [option.time_s + price_s * option.saved_bytes for option in own]

            assert all(seconds >= least_s * (1 - 1e-9) for seconds in of_options)
            if of_options and sharding.data == 1 and not keeps_all and price_s < 1e-3:
                assert min(of_options) <= least_s * 1.12  # a copy that the walk leaves out


def test_a_sub_pipelined_block_has_no_corners():
    assert not Catalogue(BOOKS["gpt-8.3b"]).corners(2, Sharding(4, overlap=2), keeps_all=False)


@pytest.mark.parametrize("way", [TowerDivision.IMAGES, TowerDivision.REPEATED])
def test_layers_of_a_tower_that_ranks_run_whole_are_divided_in_one_way(way):
    gemma = load_model("gemma-3-12b").spec
    training = TrainingSpec(
        global_batch_size=64, seq_length=2048, stack=load_stack("megatron-core")
    )
    prices = PriceCache(gemma, training, machine_for(with_gpus(load_cluster("a100-80gb"), 32)))
    tower = Sharding(2, tower=way)

    options = catalogue_of(prices, Constraints(), prices.key(2, 0)).options(1, tower)

    assert {option.sharding for option in options} == {tower}
    assert len(options) > len(Recompute)
