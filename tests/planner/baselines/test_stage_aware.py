"""Merak's rule equals a hand calculation, and the search's recompute is never slower."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, product

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_memory, usable_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import AHEAD, Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.baselines.stage_aware import (
    StageAwareRoom,
    every_knob,
    stage_aware,
)
from parplan.planner.baselines.uniform_strategies import counted_ends, equal_blocks
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.stage_recompute import one_knob, recomputed
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.planning import find_plan

TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, stack=NEUTRAL)
FRAME = ParallelLayout(
    mesh=Mesh(pp=4, dp=2, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=2,
    num_micro_batches=8,
    sequence_parallel=False,
)
SHIFTED = replace(FRAME, schedule=Schedule.SCP)
EARLY = replace(FRAME, schedule=Schedule.EARLY_RECOMPUTE)
BLOCKS = (12, 12, 12, 12)


def book_of(model="gpt-1.5b", gpu="a10g-24gb", gpus=8):
    return PriceCache(
        load_model(model).spec, TRAINING, machine_for(with_gpus(load_cluster(gpu), gpus))
    )


@pytest.mark.parametrize("layout", [FRAME, SHIFTED])
def test_every_knob_is_all_that_any_share_of_the_first_stage_asks_for(layout):
    blocks = (5, 6, 4, 3)
    fine = {recomputed(blocks, one_knob(Fraction(j, 2520), layout)) for j in range(2521)}

    assert set(every_knob(blocks, layout)) == fine
    assert list(every_knob(blocks, layout)) == sorted(fine)


CHANGE = Counter({ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1})


def most_in_flight(layout):
    """Returns the most in-flight micro-batches by rank, counted in the action lists."""
    return tuple(
        max(accumulate(CHANGE[action.work] for action in order)) for order in layout.orders()
    )


@pytest.mark.parametrize(
    ("layout", "most"), [(FRAME, (4, 3, 2, 1)), (SHIFTED, (4, 3, 3, 1)), (EARLY, (4, 3, 2, 1))]
)
def test_micro_batches_in_flight_are_counted_in_the_action_lists(layout, most):
    assert most_in_flight(layout) == most


@pytest.mark.parametrize(
    "layout", [FRAME, SHIFTED, EARLY], ids=lambda layout: layout.schedule.value
)
@pytest.mark.parametrize("limit_gib", [7.5, 9.0, 11.0])
def test_the_least_knob_is_the_first_that_fits_and_the_fastest(layout, limit_gib):
    price_cache = book_of()
    room = StageAwareRoom(layout, BLOCKS, 1, price_cache, limit_gib * GIB)

    prices = {
        counts: price_step(stage_aware(layout, BLOCKS, counts, 1), price_cache)
        for counts in every_knob(BLOCKS, layout)
    }
    fitting = {
        counts: price
        for counts, price in prices.items()
        if max(memory.total for memory in price.memory) <= limit_gib * GIB
    }

    assert {counts for counts in prices if room.holds(counts)} == set(fitting)
    assert room.least_knob() == min(fitting, default=None)
    if fitting:
        assert prices[room.least_knob()].step_s == min(price.step_s for price in fitting.values())


@pytest.mark.parametrize("limit_gib", [9.0, 10.0])
def test_the_list_form_recomputes_what_memory_by_its_formula_says(limit_gib):
    price_cache, zero = book_of(), 1
    room = StageAwareRoom(FRAME, BLOCKS, zero, price_cache, limit_gib * GIB)
    counts = list(room.least_counts()[:-1])
    recomputed = []
    whole = price_cache.activations(LayerKind.BLOCK, 2, FRAME.sharding, Recompute.NONE)
    checkpoint = price_cache.activations(LayerKind.BLOCK, 2, FRAME.sharding, Recompute.FULL)
    for stage, count in enumerate(BLOCKS[:-1]):
        all_again = rank_memory(stage_aware(FRAME, BLOCKS, BLOCKS, zero), stage, price_cache)
        in_flight = most_in_flight(FRAME)[stage]
        static = (
            all_again.states.total
            + all_again.activations
            + all_again.temporaries
            - in_flight * count * checkpoint.saved
        )
        reserved = (
            all_again.allocator_reserve
            - price_cache.training.stack.allocator_share * all_again.allocated
        )
        left = usable_bytes(limit_gib * GIB - reserved, FRAME.mesh, price_cache) - static
        held = in_flight * count
        share = min(
            1.0, (left - held * checkpoint.saved) / (held * (whole.saved - checkpoint.saved))
        )
        recomputed.append(count - int(share * count))

    assert counts == recomputed
    assert room.holds((*counts, 0))
    assert any(counts)
    knob = room.least_knob()
    assert knob is None or sum(knob) >= sum(counts)


FEW, ALL = (Schedule.ONE_F_ONE_B, Schedule.SCP), (Schedule.ONE_F_ONE_B, *sorted(AHEAD))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "pp", "tp", "b", "schedules", "limits_gib"),
    [
        pytest.param("gpt-1.5b", "a10g-24gb", 8, 4, 1, 2, FEW, (9.5, 11), id="gpt-1.5b"),
        pytest.param(
            "gpt-2.5b",
            "rtx3090",
            8,
            2,
            2,
            2,
            FEW,
            (12.5, 16),
            id="gpt-2.5b-tensor-parallel",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                *case,
                ALL,
                (8, 11, 16),
                marks=pytest.mark.slow,
                id="-".join(map(str, case)),
            )
            for case in (
                ("gpt-1.5b", "a10g-24gb", 8, 4, 1, 2),
                ("gpt-1.5b", "a10g-24gb", 8, 2, 1, 1),
                ("gpt-2.5b", "rtx3090", 8, 4, 1, 1),
                ("gpt-2.5b", "rtx3090", 8, 2, 2, 2),
                ("gpt-2.5b", "rtx3090", 16, 8, 1, 1),
                ("gpt-2.5b", "rtx3090", 16, 4, 2, 2),
                ("llama2-7b", "a100-40gb", 16, 8, 1, 2),
                ("llama2-7b", "a100-40gb", 16, 4, 2, 2),
            )
        ),
    ],
)
def test_our_own_choice_is_never_slower_than_the_rule(
    model, gpu, gpus, pp, tp, b, schedules, limits_gib
):
    price_cache, seen = book_of(model, gpu, gpus), 0
    for schedule, limit_gib in product(schedules, limits_gib):
        dp = gpus // pp // tp
        layout = replace(
            FRAME,
            mesh=Mesh(pp=pp, dp=dp, tp=tp),
            schedule=schedule,
            micro_batch_size=b,
            num_micro_batches=32 // dp // b,
        )
        blocks = equal_blocks(
            layout, price_cache.model.num_layers, counted_ends(price_cache.model.num_layers, pp)[0]
        )
        counts = StageAwareRoom(layout, blocks, 1, price_cache, limit_gib * GIB).least_knob()
        if counts is None:
            continue
        rule = price_step(stage_aware(layout, blocks, counts, 1), price_cache)
        pins = Constraints(
            pp=(pp,),
            dp=(dp,),
            tp=(tp,),
            micro_batch_size=(b,),
            schedule=(schedule,),
            sequence_parallel=(False,),
            zero=(1,),
        )
        ours = find_plan(
            price_cache.model,
            price_cache.machine.cluster,
            TRAINING,
            constraints=pins,
            options=SearchOptions(memory_limit_bytes=round(limit_gib * GIB)),
        )
        assert ours.predicted.step_time_s.value <= rule.step_s * (
            1 + 1e-5
        )  # six digits in the plan
        seen += 1
    assert seen >= min(3, len(limits_gib) * len(schedules))
