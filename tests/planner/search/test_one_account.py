"""Columns and options have the bytes and seconds with which an estimate prices a strategy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.memory.rank_memory import occupied_bytes
from parplan.costmodels.step import price_step
from parplan.planner.layer_options.catalogue import catalogue_of
from parplan.planner.request import Constraints
from parplan.planner.search.one_candidate import fastest_choice
from parplan.planner.search.price_factory import described_factory
from parplan.planner.search.search_session import INFINITY, SearchSession
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import model_names
from tests.helpers.cases import mostly_slow

ROOMY_BYTES = 1e15  # every strategy fits, so that no layout is left out
FEW = 4  # blocks, or as few more as a model may have
LAYOUTS = 2
PLAIN = ("olmo-2-7b", "minimax-m2")  # norms of queries and keys over all heads


def session_of(model, stack):
    """Returns a search of a shipped model with few layers, and no limit on memory."""
    request = request_of(
        TargetOptions(model=model, gpus=8, gpu="b200-180gb", stack=stack, global_batch_size=8)
    )
    for num_layers in (FEW, FEW + 2, 2 * FEW, request.model.num_layers):
        try:
            shallow = replace(request.model, num_layers=num_layers)
        except ConfigError:
            continue
        break
    request = replace(request, model=shallow, constraints=Constraints(offload=()))
    prices = described_factory(request, lambda *_: pytest.fail("everything fits")).prices(())
    session = SearchSession(prices, request.options, None)
    session.limit_bytes = ROOMY_BYTES
    return session


@pytest.mark.parametrize("stack", mostly_slow(["megatron-core", "parplan"], ["megatron-core"]))
@pytest.mark.parametrize("model", mostly_slow(model_names(), PLAIN))
def test_ranks_of_a_search_have_the_memory_of_an_estimate(model, stack):
    session, checked = session_of(model, stack), 0
    layouts = list(session.prices.space.layouts)
    random.Random(0).shuffle(layouts)
    for layout in layouts:
        relaxed = session.relaxed(layout, INFINITY)
        choice = relaxed and fastest_choice(layout, relaxed, INFINITY, session)
        if choice:
            strategy = session.prices.strategy(layout, choice.columns)
            prices = session.book_of(layout, choice)
            price = price_step(strategy, prices)
            for column, memory in zip(choice.columns, price.memory, strict=True):
                apart, none = (
                    occupied_bytes(each, layout.mesh, prices) for each in (memory.apart, 0)
                )
                # where the sum of the largest bytes fits, the exact peak is not made
                assert min(
                    abs(column.memory_bytes - each)
                    for each in (memory.total, memory.total + apart - none)
                ) == pytest.approx(0, abs=1e-9 * memory.total), layout
            checked += 1
        if checked == LAYOUTS:
            return
    assert checked


@pytest.mark.parametrize("model", mostly_slow(model_names(), PLAIN))
def test_options_of_blocks_have_the_bytes_and_seconds_of_their_price(model):
    session = session_of(model, None)
    prices, constraints = session.prices.price_cache, Constraints()
    places = {
        (layout.of_blocks, layout.micro_batch_size) for layout in session.prices.space.layouts
    }
    keys = {prices.key(layer, 0) for layer in range(1, prices.model.num_layers + 1)}
    some = random.Random(0).sample(sorted(places, key=str), min(LAYOUTS, len(places)))
    for sharding, size in some:
        for key in keys:
            for option in catalogue_of(prices, constraints, key).options(size, sharding):
                how = key, size, option.sharding, option.recompute
                bytes_of = prices.activations(*how)
                assert option.saved_bytes == bytes_of.saved, how
                assert option.workspace_bytes == pytest.approx(bytes_of.workspace, abs=1), how
                assert option.ideal_saved_bytes == pytest.approx(bytes_of.ideal_saved), how
                assert option.time_s == pytest.approx(prices.layer_time(*how).total_s), how
