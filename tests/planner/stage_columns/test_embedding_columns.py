"""The search's location of the token table equals a full enumeration, and the plan file has it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.host.host_embedding import illegal_host_embedding
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.candidates.branch_and_bound import WORTH_REPLAYING
from parplan.planner.candidates.lower_bounds import may_fit, redundancy_bound_bytes, time_bound
from parplan.planner.launchers.compare_described import compare
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, SearchOptions
from parplan.planner.stage_columns.chunk_columns import rank_columns
from parplan.planner.stage_columns.embedding_columns import AnyEnds
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_family
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import GIB
from tests.helpers.instances import (
    PINS,
    Instance,
    every_strategy,
    peak_bytes,
    random_instance,
    redundant_bytes,
)
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan
from tests.helpers.uniform_strategies import frame_of

LOOKUP = replace(PINS, offload=(Offload.LOOKUP,))
SEEDS = [
    pytest.param(seed, tied, marks=() if seed == 3 else pytest.mark.slow)
    for tied in (False, True)
    for seed in range(4)
]


def with_large_table(seed: int, *, tied: bool = False) -> Instance:
    """Returns an instance whose token table is large beside its blocks."""
    instance = random_instance(seed)
    return replace(
        instance,
        model=replace(instance.model, num_layers=2, vocab_size=8192, tied_embeddings=tied),
    )


def alike_ends(strategy: Strategy) -> bool:
    """True if both copies of a tied table have whole gradients, or both have sharded ones."""
    return (strategy.stages[0][0].zero > 0) == (strategy.stages[-1][-1].zero > 0)


@cache
def prices(seed: int, tied: bool):
    """Prices each strategy with the token table on the device and, where legal, on the host."""
    instance = with_large_table(seed, tied=tied)
    here = instance.price_cache()
    there, priced = here.with_table(on_host=True), []
    for layout in enumerate_candidates(
        instance.model, instance.cluster, instance.training, LOOKUP
    ).layouts:
        books = (
            (here,)
            if illegal_host_embedding(layout.mesh, instance.model.hidden_size, tied)
            else (here, there)
        )
        for strategy, price_cache in itertools.product(
            every_strategy(layout, instance.model.num_layers), books
        ):
            if tied and not alike_ends(strategy):
                continue
            priced.append((strategy, price_step(strategy, price_cache), price_cache is there))
    return priced


@pytest.mark.parametrize(("seed", "tied"), SEEDS)
def test_no_strategy_is_below_the_bounds_of_its_frame_wherever_its_table_is(seed, tied):
    table = MixTable(with_large_table(seed, tied=tied).price_cache(), LOOKUP)
    time_s = cache(lambda layout: time_bound(layout, table).step_s)
    redundant = cache(lambda layout: redundancy_bound_bytes(layout, table))

    assert {there for _, _, there in prices(seed, tied)} == {False, True}
    for strategy, price, _ in prices(seed, tied):
        assert time_s(strategy.layout) <= price.closed_form_s * (1 + 1e-12)
        assert redundant(strategy.layout) <= redundant_bytes(strategy, price) * (1 + 1e-12) + 1
        assert may_fit(strategy.layout, table, peak_bytes(price) * (1 + 1e-9))


@pytest.mark.parametrize(("seed", "tied"), SEEDS)
def test_a_search_equals_the_enumeration_of_both(seed, tied, tmp_path):
    instance = with_large_table(seed, tied=tied)
    peaks = sorted(peak_bytes(price) for _, price, _ in prices(seed, tied))
    limit = int(peaks[len(peaks) // 20])
    fitting = [price for _, price, _ in prices(seed, tied) if peak_bytes(price) <= limit]
    fastest_s = min(price.closed_form_s for price in fitting)

    plan = find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        constraints=LOOKUP,
        options=SearchOptions(memory_limit_bytes=limit),
    )
    write_plan(plan, tmp_path / "plan.yaml")

    assert plan.search.status is Status.OPTIMAL
    assert plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
    assert plan.search.gap < 0.001
    assert plan.search.value <= WORTH_REPLAYING * fastest_s + 1e-6
    assert plan.predicted.step_time_s.value <= 1.05 * min(price.step_s for price in fitting)
    assert reprice(read_plan(tmp_path / "plan.yaml")).plan.predicted == plan.predicted


@pytest.mark.parametrize(("seed", "tied"), SEEDS)
def test_the_least_redundant_plan_is_that_of_both_within_the_peak_of_the_one_without_the_host(
    seed, tied
):
    instance = with_large_table(seed, tied=tied)
    slowest_s = 1.2 * min(
        price.closed_form_s for _, price, there in prices(seed, tied) if not there
    )
    values = [
        (redundant_bytes(strategy, price), peak_bytes(price), there)
        for strategy, price, there in prices(seed, tied)
        if max(price.closed_form_s, price.step_s) <= slowest_s
    ]
    alone = min(redundant for redundant, _, there in values if not there)
    peaks = [
        peak
        for redundant, peak, there in values
        if not there and redundant <= alone * (1 + 1e-6) + 1
    ]  # it is one of these
    most = min((redundant for redundant, peak, _ in values if peak <= min(peaks) + 1)) / GIB

    plan = find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        Objective.MEMORY,
        constraints=LOOKUP,
        options=SearchOptions(max_slowdown=0.2),
    )

    assert plan.predicted.redundancy_gib.total <= most + 1e-4
    assert plan.search.bound <= most + 1e-4


@pytest.mark.slow
def test_a_tied_model_with_a_large_vocabulary_fits_one_gpu_only_with_its_table_on_the_host():
    gpu = replace(with_gpus(load_cluster("rtx3090-24gb"), 1), host_memory_bytes=240 * GIB)
    model = replace(load_family("gpt").of_width(5120, 12).spec, vocab_size=256_000)
    training = TrainingSpec(
        global_batch_size=64, seq_length=1024, stack=load_stack("megatron-core")
    )
    on_device = tuple(each for each in SEARCHED_OFFLOAD if each is not Offload.LOOKUP)

    with pytest.raises(InfeasibleError):
        find_plan(model, gpu, training, constraints=Constraints(offload=on_device))
    plan = find_plan(model, gpu, training, constraints=Constraints(offload=SEARCHED_OFFLOAD))

    assert model.tied_embeddings
    assert Offload.LOOKUP in plan.layer_plans["embedding"].offload
    assert Offload.LOOKUP in plan.layer_plans["head"].offload
    assert plan.predicted.memory_gib[0].total < 24
    assert plan.predicted.memory_gib[0].host > 16 * model.padded_vocab_size * 5120 / GIB


def layouts(instance: Instance, offload: tuple[Offload, ...] = SEARCHED_OFFLOAD):
    pins = replace(PINS, offload=offload)
    return enumerate_candidates(instance.model, instance.cluster, instance.training, pins).layouts


def test_only_the_first_rank_has_both_and_only_where_that_is_legal_and_there_is_room():
    instance = with_large_table(0)
    table = MixTable(instance.price_cache(), replace(PINS, offload=SEARCHED_OFFLOAD))
    small = MixTable(instance.price_cache(), replace(PINS, offload=SEARCHED_OFFLOAD))
    small.host_share_bytes = 1
    for layout in layouts(instance):
        legal = layout.mesh.tp == 1
        for rank in range(layout.mesh.pp):
            assert isinstance(rank_columns(rank, layout, table), AnyEnds) == (legal and rank == 0)
            assert not isinstance(rank_columns(rank, layout, small), AnyEnds)


def test_real_numbers_of_blocks_are_a_bound_of_both_in_chunks_or_not():
    instance = with_large_table(0)
    table = MixTable(instance.price_cache(), replace(PINS, offload=SEARCHED_OFFLOAD))
    checked = set()
    for layout in layouts(instance):
        columns = rank_columns(0, layout, table)
        if not isinstance(columns, AnyEnds) or layout.mesh.pp > 1:
            continue
        limit = columns.smallest(2).memory_bytes * 1.1
        for column in columns.fastest(2, limit):
            assert any(
                c.time_s <= column.time_s * (1 + 1e-9) and c.tail_s <= column.tail_s + 1e-12
                for c in columns.relaxed(2, limit)
            )
            checked.add((layout.chunked, column.looks_up))
    assert (True, True) in checked
    assert (False, True) in checked


def test_baselines_beside_a_plan_that_looks_up_on_the_host_have_their_tables_on_the_device():
    instance = with_large_table(5)
    plan = estimate_plan(
        instance.model,
        instance.cluster,
        instance.training,
        frame_of(dp=2, m=2),
        offload=LOOKUP.offload,
    )

    (row,) = compare(plan, ["megatron-defaults"], SearchOptions()).rows

    assert plan.layer_plans["embedding"].offload == LOOKUP.offload
    assert row.side.plan.layer_plans["embedding"].offload == ()
