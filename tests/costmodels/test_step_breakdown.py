"""Step parts add up, compute does not depend on the split, and unequal stages are named."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.step_breakdown import NAMES, StepParts, parts_of
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.search.estimate import uniform_strategy
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

ENTRY = load_model("gpt-2.5b")
CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)


def parts(
    blocks: tuple[int, ...],
    *,
    tp: int = 1,
    virtual_stages: int = 1,
    level: Recompute = Recompute.NONE,
    batch: int = 32,
) -> StepParts:
    pp = len(blocks)
    dp = 8 // pp // tp
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=virtual_stages,
        micro_batch_size=1,
        num_micro_batches=batch // dp,
        sequence_parallel=tp > 1,
    )
    price_cache = PriceCache(
        ENTRY.spec,
        TrainingSpec(global_batch_size=batch, seq_length=1024, stack=NEUTRAL),
        machine_for(CLUSTER),
    )
    price = price_step(
        uniform_strategy(layout, blocks, zero=1, recompute=level, price_cache=price_cache),
        price_cache,
    )
    actual = parts_of(layout, price)
    assert actual.step_s == pytest.approx(price.step_s, rel=1e-12)
    return actual


@pytest.mark.parametrize(
    ("blocks", "tp", "virtual_stages", "level"),
    [
        ((54,), 1, 1, Recompute.NONE),
        ((27, 27), 2, 1, Recompute.FULL),
        ((30, 24), 1, 1, Recompute.SELECTIVE),
        ((27, 27), 1, 9, Recompute.NONE),
    ],
)
def test_the_parts_add_up_to_the_step(blocks, tp, virtual_stages, level):
    divided = parts(blocks, tp=tp, virtual_stages=virtual_stages, level=level)

    assert len(divided.values) == len(NAMES)
    assert divided.compute_s > 0
    assert (divided.recompute_s > 0) == (level is not Recompute.NONE)
    assert (divided.tp_comm_s > 0) == (tp > 1)
    assert (divided.pp_comm_s > 0) == (len(blocks) > 1)


def test_without_a_pipeline_nothing_waits():
    divided = parts((54,))

    assert (divided.bubble_s, divided.imbalance_s, divided.pp_comm_s) == (0.0, 0.0, 0.0)


def test_blocks_that_move_to_another_stage_add_imbalance_and_nothing_to_the_compute():
    equal, unequal = parts((27, 27)), parts((37, 17))

    assert unequal.compute_s == pytest.approx(equal.compute_s, rel=1e-12)
    assert unequal.bubble_s == pytest.approx(equal.bubble_s, rel=1e-12)
    assert unequal.imbalance_s - equal.imbalance_s == pytest.approx(
        unequal.step_s - equal.step_s, rel=1e-3
    )
    assert unequal.imbalance_s > 5 * abs(equal.imbalance_s)


def test_the_bubble_falls_with_the_number_of_virtual_stages():
    once, nine = parts((27, 27)), parts((27, 27), virtual_stages=9)

    assert nine.bubble_s == pytest.approx(once.bubble_s / 9, rel=0.2)
