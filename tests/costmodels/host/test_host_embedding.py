"""The token table on the host: freed device bytes, traffic over PCIe and ranks, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.host_embedding import illegal_host_embedding, without_table
from parplan.costmodels.host.offload import NUMA_SHARE, Offload
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_memory
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import price_step
from parplan.costmodels.usage.rank_traffic import rank_traffic
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, OperatorKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import estimate_plan
from tests.helpers.uniform_strategies import frame_of, uniform

TRAINING = TrainingSpec(
    global_batch_size=32, seq_length=128, overlap_grad_reduce=False, stack=NEUTRAL
)
LLAMA = replace(load_model("llama2-7b").spec, num_layers=8)  # its tables are apart
TIED = replace(LLAMA, tied_embeddings=True)
V, H = LLAMA.vocab_size, LLAMA.hidden_size
CLUSTER = load_cluster("h100-80gb")
LOOKUP = (Offload.LOOKUP,)


def book_of(offload=(), gpus=4):
    return PriceCache(LLAMA, TRAINING, machine_for(with_gpus(CLUSTER, gpus)), offload=offload)


@pytest.mark.parametrize("dp", [1, 4])
def test_the_device_holds_no_table_and_the_host_its_columns_with_their_states(dp):
    mesh = Mesh(pp=1, dp=dp, tp=1)
    plain = book_of(()).states(LayerKind.EMBEDDING, mesh, Sharding(), 0)
    kept = book_of(LOOKUP).states(LayerKind.EMBEDDING, mesh, Sharding(), 0)

    assert plain.states.total == 18 * V * H
    assert (kept.states.total, kept.zero_buffer, kept.ideal) == (0, 0, plain.ideal)
    assert kept.host == 16 * V * H // dp


def test_nothing_else_changes():
    mesh = Mesh(pp=1, dp=4, tp=1)
    for kind in (LayerKind.BLOCK, LayerKind.HEAD):
        assert book_of(LOOKUP).states(kind, mesh, Sharding(), 3) == book_of().states(
            kind, mesh, Sharding(), 3
        )
        assert book_of(LOOKUP).data_parallel(
            kind, 1, mesh, Sharding(), 3
        ) == book_of().data_parallel(kind, 1, mesh, Sharding(), 3)


def test_the_memory_of_a_step_loses_the_table_and_its_gradient():
    plain = rank_memory(uniform(frame_of(m=4), 8), 0, book_of(()))
    kept = rank_memory(uniform(frame_of(m=4), 8), 0, book_of(LOOKUP))

    assert plain.states.total - kept.states.total == 18 * V * H
    assert kept.temporaries <= plain.temporaries
    assert kept.host == 16 * V * H


def test_a_micro_batch_on_one_gpu_by_hand():
    """A micro-batch is 2 sequences of 128 tokens.

    Rows of fp32 are read and cast, 2 bytes an element cross PCIe each way, and gradients are added.
    """
    elements, rate = 2 * 128 * H, NUMA_SHARE * 614.4e9 / 2
    priced = book_of(LOOKUP, gpus=1).data_parallel(
        LayerKind.EMBEDDING, 2, Mesh(pp=1, dp=1, tp=1), Sharding(), 0
    )

    assert priced.forward.value_s == pytest.approx(
        6 * elements / rate + 2 * elements / 63e9, rel=1e-12
    )
    assert priced.backward.value_s == pytest.approx(
        2 * elements / 63e9 + 10 * elements / rate, rel=1e-12
    )
    assert priced.optimizer.value_s == pytest.approx(28 * V * H / rate, rel=1e-12)
    assert priced.host.value_s == pytest.approx(
        priced.forward.value_s + priced.backward.value_s, rel=1e-12
    )


def test_several_ranks_exchange_what_they_look_up_and_that_is_all_they_send_for_it():
    m, tokens = 8, 128
    layout = frame_of(dp=4, m=m)
    plain, kept = (
        {sent.kind: sent for sent in rank_traffic(uniform(layout, 8, zero=3), 0, book_of(offload))}
        for offload in ((), LOOKUP)
    )

    assert (kept["all_to_all"].calls, kept["all_to_all"].num_bytes) == (
        2 * m,
        2 * m * 2 * tokens * H,
    )
    gathers = kept["all_gather"], plain["all_gather"]
    assert (
        gathers[0].calls - gathers[1].calls == m - 2 * m
    )  # the tokens forward, instead of the table forward and backward
    assert gathers[0].num_bytes - gathers[1].num_bytes == m * 8 * 4 * tokens - 2 * m * 2 * V * H
    assert plain["reduce_scatter"].num_bytes - kept["reduce_scatter"].num_bytes == m * 4 * V * H


def test_its_seconds_are_the_hosts_and_of_data_parallelism():
    plain = price_step(uniform(frame_of(dp=4), 8, zero=3), book_of(()))
    kept = price_step(uniform(frame_of(dp=4), 8, zero=3), book_of(LOOKUP))

    assert plain.ranks[0].host_comm.value_s == 0.0 < kept.ranks[0].host_comm.value_s
    assert kept.ranks[0].dp_comm.value_s < plain.ranks[0].dp_comm.value_s
    assert kept.step_s == pytest.approx(kept.ranks[0].total.value_s, rel=1e-9)


def test_what_is_left_of_the_embedding_has_its_output_and_no_kernel():
    embedding = book_of().graph(2).embedding
    left = without_table(embedding)

    assert [operator.kind for operator in left.operators] == [OperatorKind.VIEW]
    assert left.operators[0].outputs == embedding.operators[0].outputs
    assert left.num_parameters == 0


@pytest.mark.parametrize(
    ("mesh", "hidden", "tied", "reason"),
    [
        (Mesh(pp=2, dp=3, tp=2), 64, True, None),
        (Mesh(pp=1, dp=1, tp=2), 64, False, "tp 2 divides the rows"),
        (Mesh(pp=1, dp=3, tp=1), 64, False, "dp 3 does not divide the 64 columns"),
        (Mesh(pp=2, dp=4, tp=1), 64, False, None),
    ],
)
def test_meshes_and_models_that_have_no_look_up_say_why(mesh, hidden, tied, reason):
    refusal = illegal_host_embedding(mesh, hidden, tied)

    assert (refusal is None) if reason is None else (reason in refusal)


def test_an_estimate_of_it_is_priced_again_from_its_file(tmp_path):
    plan = estimate_plan(
        LLAMA,
        with_gpus(CLUSTER, 4),
        TRAINING,
        frame_of(dp=4),
        offload=LOOKUP,
        recompute=Recompute.SELECTIVE,
        chunks=ChunkRequest(host_blocks=2, optimizer_blocks=1),
    )
    write_plan(plan, tmp_path / "plan.yaml")

    assert plan.layer_plans["embedding"].offload == LOOKUP
    assert plan.layer_plans["head"].offload == ()
    assert {group.home for group in plan.chunks.groups} == set(StateLocation)
    assert reprice(read_plan(tmp_path / "plan.yaml")).plan == plan


def test_a_mesh_without_a_look_up_is_refused():
    with pytest.raises(ConfigError, match="--offload lookup: tp 2 divides the rows"):
        estimate_plan(
            LLAMA, with_gpus(CLUSTER, 4), TRAINING, frame_of(dp=2, tp=2, m=16), offload=LOOKUP
        )


def tied_prices(offload=()):
    return PriceCache(TIED, TRAINING, machine_for(with_gpus(CLUSTER, 4)), offload=offload)


@pytest.mark.parametrize(
    ("dp", "zero", "left"),
    [
        pytest.param(1, 0, 2 + 4, id="one-rank"),
        pytest.param(4, 1, 2 + 4, id="zero-1"),
        pytest.param(4, 2, 2, id="zero-2"),
        pytest.param(4, 3, 0, id="zero-3"),
    ],
)
def test_the_device_holds_a_copy_of_a_tied_table_and_its_gradient_and_the_host_the_rest(
    dp, zero, left
):
    mesh = Mesh(pp=1, dp=dp, tp=1)
    plain, kept = (
        tied_prices(offload).states(LayerKind.EMBEDDING, mesh, Sharding(), zero)
        for offload in ((), LOOKUP)
    )
    on_device = {0: 18, 1: 6 + 12 / dp, 2: 2 + 16 / dp, 3: 16 / dp}

    assert plain.states.total - kept.states.total == (on_device[zero] - left) * V * H
    assert (plain.host, kept.host) == (0, 16 * V * H // dp)
    assert kept.ideal == plain.ideal


def test_tensor_parallel_ranks_hold_their_rows_of_a_tied_table():
    mesh, halves = Mesh(pp=1, dp=2, tp=2), Sharding(tp=2)
    kept = tied_prices(LOOKUP).states(LayerKind.EMBEDDING, mesh, halves, 1)

    assert kept.states.total == 6 * V * H // 2
    assert kept.host == 16 * V * H // 4


def test_a_step_with_a_tied_table_on_the_host_by_hand():
    """The step copies the fp32 table to the device and its gradient back, and runs Adam there."""
    table, rate = V * H, NUMA_SHARE * 614.4e9 / 2
    plain, kept = (
        PriceCache(
            TIED, TRAINING, machine_for(with_gpus(CLUSTER, 1)), offload=offload
        ).data_parallel(LayerKind.EMBEDDING, 2, Mesh(pp=1, dp=1, tp=1), Sharding(), 0)
        for offload in ((), LOOKUP)
    )

    assert kept.per_micro_batch_s == plain.per_micro_batch_s == 0.0
    assert kept.host_step.value_s == pytest.approx(2 * 4 * table / 63e9, rel=1e-12)
    assert kept.optimizer.value_s == pytest.approx(28 * table / rate, rel=1e-12)


def test_two_stages_bring_the_gradients_of_both_copies_to_the_devices_to_sum_them():
    mesh = Mesh(pp=2, dp=1, tp=1)
    plain, kept = (
        prices.shared_reduction(prices.shared_parameters[0], mesh, Sharding()).value_s
        for prices in (tied_prices(), tied_prices(LOOKUP))
    )

    assert kept - plain == pytest.approx(2 * 4 * V * H / 63e9, rel=1e-9)


def test_a_tied_table_on_the_host_is_gathered_and_reduced_apart_from_its_layer():
    plain, kept = (
        {sent.kind: sent for sent in rank_traffic(uniform(frame_of(dp=4), 8, zero=1), 0, prices)}
        for prices in (tied_prices(), tied_prices(LOOKUP))
    )

    for kind in ("all_gather", "reduce_scatter"):
        assert kept[kind].num_bytes == plain[kind].num_bytes


def test_an_estimate_with_a_tied_table_on_the_host_is_priced_again_from_its_file(tmp_path):
    for layout in (frame_of(dp=4), frame_of(pp=2, dp=2, m=16), frame_of(dp=2, tp=2, m=16)):
        plan = estimate_plan(TIED, with_gpus(CLUSTER, 4), TRAINING, layout, offload=LOOKUP)
        write_plan(plan, tmp_path / "plan.yaml")

        assert plan.layer_plans["embedding"].offload == LOOKUP
        assert plan.layer_plans["head"].offload == LOOKUP
        assert reprice(read_plan(tmp_path / "plan.yaml")).plan == plan
