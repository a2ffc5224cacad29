"""The price of a step: closed form, simulation, breakdown and published MFU agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule, uniform_step_s
from parplan.costmodels.stage_costs import receive_times, time_between
from parplan.costmodels.step import closed_form_s, model_flops_utilization, price_step
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, weakest_kind
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import every_price, random_instance
from tests.helpers.uniform_strategies import A100, TINY, book_of, frame_of, uniform


@pytest.mark.parametrize(
    ("schedule", "pp", "v", "m"),
    [
        pytest.param(Schedule.ONE_F_ONE_B, 1, 1, 8, id="one-stage"),
        pytest.param(Schedule.ONE_F_ONE_B, 4, 1, 8, id="1f1b"),
        pytest.param(Schedule.GPIPE, 4, 1, 2, id="gpipe"),
        pytest.param(Schedule.INTERLEAVED, 4, 2, 8, id="interleaved"),
    ],
)
@pytest.mark.parametrize("level", list(Recompute))
def test_equal_stages_without_transfers_take_the_closed_form_of_the_papers(
    schedule, pp, v, m, level
):
    free = {"intra_node": replace(A100.intra_node, bytes_per_s=1e30, latency_s=0.0)}
    price_cache = book_of(TINY, pp, **free)
    layout = frame_of(pp=pp, schedule=schedule, v=v, m=m)

    price = price_step(uniform(layout, 8, recompute=level, ends=False), price_cache)

    block = price_cache.layer_time(LayerKind.BLOCK, 1, layout.sharding, level)
    tail_s = (
        8
        // pp
        * price_cache.data_parallel(
            LayerKind.BLOCK, 1, layout.mesh, layout.sharding, 0
        ).optimizer.value_s
    )
    papers_s = uniform_step_s(schedule, pp, m, v, 8 // pp * block.total_s) + tail_s
    assert price.closed_form_s == pytest.approx(papers_s, rel=1e-12)
    assert price.step_s == pytest.approx(papers_s, rel=1e-12)


def test_the_closed_form_by_hand():
    # (4 - 1/2) * 3 + (1 + 2 + 3) / 2 + max tail
    assert closed_form_s([1.0, 2.0, 3.0], [0.5, 0.25, 0.0], 4, 1 / 2) == 3.5 * 3 + 3 + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow((0, 1, 5), {5}))
def test_the_parts_of_every_rank_add_up_to_the_step(seed):
    for strategy, price in every_price(random_instance(seed)):
        for rank, timeline in zip(price.ranks, price.simulated.ranks, strict=True):
            assert rank.total.value_s + timeline.bubble_s == pytest.approx(
                price.step_s, rel=1e-9
            ), strategy
            assert rank.pp_comm.value_s == pytest.approx(timeline.transfer_s, rel=1e-9, abs=1e-15)
            assert rank.total.kind is weakest_kind(
                part.kind
                for part in (
                    rank.compute,
                    rank.recompute,
                    rank.tp_comm,
                    rank.dp_comm,
                    rank.pp_comm,
                    rank.optimizer,
                )
                if part.value_s
            )


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow((0, 1, 5), {5}))
def test_the_stash_that_is_priced_is_never_below_the_simulated_peak(seed):
    """The priced stash is exact for equal chunks without ends, else an upper bound.

    With virtual stages only one chunk holds the ends.
    """
    for strategy, price in every_price(random_instance(seed)):
        for memory, timeline in zip(price.memory, price.simulated.ranks, strict=True):
            assert memory.activations >= timeline.peak_stash_bytes * (1 - 1e-12)
            if strategy.layout.virtual_stages == 1:
                assert memory.activations == pytest.approx(timeline.peak_stash_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "num_gpus", "batch", "step_s", "mfu"),
    [
        # Korthikanti et al. 2022, table 5, sequence parallelism + selective recompute; MFU as in
        # Megatron-LM's README
        pytest.param("gpt-22b", 8, 4, 1.10, 0.415, id="22b"),
        pytest.param("gpt-175b", 64, 64, 13.75, 0.514, id="175b"),
        pytest.param("gpt-530b", 280, 280, 37.83, 0.560, id="530b"),
        pytest.param("gpt-1t", 512, 512, 71.49, 0.563, id="1t"),
    ],
)
def test_mfu_of_published_steps_is_the_published_one(name, num_gpus, batch, step_s, mfu):
    training = TrainingSpec(global_batch_size=batch, seq_length=2048, stack=NEUTRAL)
    price_cache = book_of(load_model(name).spec, num_gpus, training)

    assert model_flops_utilization(step_s, num_gpus, price_cache) == pytest.approx(
        mfu, abs=0.002
    )  # the step is given to 3 or 4 digits


def test_nothing_is_received_at_the_two_ends_of_the_model():
    price_cache, layout = book_of(TINY, 4), frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2)
    strategy = uniform(layout, 8)

    times = [receive_times(strategy, stage, price_cache) for stage in range(8)]

    assert times[0][0] == times[7][1] == ZERO
    assert all(forward.value_s > 0 for forward, _ in times[1:])
    assert all(backward.value_s > 0 for _, backward in times[:7])
    assert receive_times(uniform(frame_of(), 8), 0, price_cache) == (ZERO, ZERO)


def test_the_ranks_of_a_stage_share_the_nics_of_their_node():
    layout = frame_of(pp=2, dp=8, m=4)
    many = time_between(0, 1, layout, book_of(TINY, 16, nic=replace(A100.nic, latency_s=0.0)))
    timed = time_between(
        0, 1, layout, book_of(TINY, 16, nics_per_node=1, nic=replace(A100.nic, latency_s=0.0))
    )

    assert timed.value_s == pytest.approx(8 * many.value_s)


def test_a_boundary_between_nodes_is_slower_than_one_inside():
    price_cache, layout = book_of(TINY, 16), frame_of(pp=4, dp=4)  # two stages to a node

    inside = time_between(0, 1, layout, price_cache).value_s
    between = time_between(1, 2, layout, price_cache).value_s
    back = time_between(3, 0, layout, price_cache).value_s

    assert inside < between
    assert back == between  # the last rank sends to the first one when interleaved
