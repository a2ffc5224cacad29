"""Prices of states that some data-parallel ranks hold together, and of host states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Mesh, Placement
from parplan.costmodels.host.offload import HOST_BYTES_PER_S, Offload
from parplan.costmodels.layers.model_states import StateSharding, layer_states, owned_parameters
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import price_step
from parplan.costmodels.usage.redundancy import operator_redundancy, summed_redundancy
from parplan.planner.host_options.activation_options import (
    named_operators,
    with_offloaded_activations,
)
from parplan.planner.plan.plan_file import (
    plan_from_document,
    plan_to_document,
    read_plan,
    write_plan,
)
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import estimate_plan, find_plan
from tests.helpers.uniform_strategies import A100, TINY, frame_of, uniform

A100_16 = replace(
    with_gpus(A100, 16), pcie_node_bytes_per_s=None, host_bytes_per_s=None
)  # as a file without them says it
EXPOSED = TrainingSpec(
    global_batch_size=64, seq_length=128, overlap_grad_reduce=False, stack=NEUTRAL
)
MESH = Mesh(pp=1, dp=16, tp=1)
STATES, ACTIVATIONS = Offload.STATES, Offload.ACTIVATIONS


def book_of(training=EXPOSED, cluster=A100_16, **how):
    return PriceCache(TINY, training, machine_for(cluster), **how)


def block(price_cache, zero, mesh=MESH):
    return price_cache.data_parallel(LayerKind.BLOCK, 1, mesh, Sharding(), zero)


def test_gathers_stay_inside_the_group_and_the_copies_are_reduced_once_across_the_nodes():
    """Two nodes of eight have one copy a node.

    The collectives are priced by hand, on the places that they really span.
    """
    machine, parameters = machine_for(A100_16), book_of().graph(1).block.num_parameters
    node = Placement(nodes=1, ranks_per_node=8, groups_per_node=1)
    across = Placement(nodes=2, ranks_per_node=1, groups_per_node=8)
    gather = collective_time(Collective.ALL_GATHER, 2 * parameters, node, machine).value_s
    scatter = collective_time(Collective.REDUCE_SCATTER, 4 * parameters, node, machine).value_s
    owned = owned_parameters(book_of().graph(1).block, Sharding(), 8)
    reduce = collective_time(Collective.ALL_REDUCE, 4 * owned, across, machine).value_s

    at_zero_1 = block(book_of(zero_ranks=8), 1)
    at_zero_2 = block(book_of(zero_ranks=8), 2)
    at_zero_3 = block(book_of(zero_ranks=8), 3)

    assert at_zero_1.step.value_s == pytest.approx(gather + scatter + reduce, rel=1e-12)
    assert (at_zero_2.backward.value_s, at_zero_2.step.value_s) == pytest.approx(
        (scatter, gather + reduce), rel=1e-12
    )
    assert (at_zero_3.forward.value_s, at_zero_3.backward.value_s) == pytest.approx(
        (gather, gather + scatter), rel=1e-12
    )
    assert at_zero_3.step.value_s == pytest.approx(reduce, rel=1e-12)
    assert at_zero_3.forward.value_s < block(book_of(), 3).forward.value_s


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_group_holds_what_as_many_ranks_hold_alone(zero):
    held = book_of(zero_ranks=8).states(LayerKind.BLOCK, MESH, Sharding(), zero)

    assert held.states == layer_states(
        book_of().graph(1).block, Sharding(), StateSharding(zero, 8), EXPOSED
    )
    assert (
        held.ideal == book_of().states(LayerKind.BLOCK, MESH, Sharding(), zero).ideal
    )  # one copy over all ranks is still the least


@pytest.mark.parametrize("zero_ranks", [16, 3])
def test_all_of_dp_and_numbers_that_do_not_divide_it_change_nothing(zero_ranks):
    for zero in range(4):
        assert block(book_of(zero_ranks=zero_ranks), zero) == block(book_of(), zero)
        assert book_of(zero_ranks=zero_ranks).states(
            LayerKind.BLOCK, MESH, Sharding(), zero
        ) == book_of().states(LayerKind.BLOCK, MESH, Sharding(), zero)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"zero_ranks": 8}, id="groups"),
        pytest.param({"offload": (STATES,)}, id="states"),
    ],
)
@pytest.mark.parametrize("on_host", [(), ("norm1", "attention", "fc2")])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_redundancy_by_operator_adds_up_to_that_of_the_rank(how, zero, on_host):
    price_cache, strategy = (
        book_of(**how),
        with_offloaded_activations(uniform(frame_of(dp=16), 8, zero=zero), on_host),
    )
    redundant = price_step(strategy, price_cache).redundant[0]
    total = summed_redundancy(
        redundancy
        for choice in rank_layers(strategy, 0)
        for redundancy in operator_redundancy(choice, 0, strategy.layout, price_cache).values()
    )

    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(total, name) == pytest.approx(getattr(redundant, name), rel=1e-9, abs=64)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 4])
def test_device_and_host_share_the_bytes_of_the_states_as_fsdp2_does(dp, zero):
    mesh, layer = Mesh(pp=1, dp=dp, tp=1), book_of().graph(1).block
    whole, owned = layer.num_parameters, owned_parameters(layer, Sharding(), dp if zero else 1)

    held = book_of(offload=(STATES,)).states(LayerKind.BLOCK, mesh, Sharding(), zero)

    assert held.host == 16 * owned
    assert (held.states.parameters, held.states.gradients, held.states.optimizer) == (
        2 * whole * (zero < 3),
        4 * whole * (zero < 2),
        0,
    )


@pytest.mark.parametrize(
    ("zero", "to_device", "to_host"), [(0, 1, 1), (1, 1, 1), (2, 1, 8), (3, 16, 8)]
)
def test_the_copies_of_a_step_by_hand(zero, to_device, to_host):
    """Eight micro-batches run on one GPU, where data parallelism costs copies alone.

    Each copy moves 4 bytes a parameter.
    """
    mesh, price_cache = Mesh(pp=1, dp=1, tp=1), book_of(offload=(STATES,))
    parameters = price_cache.graph(1).block.num_parameters
    added_s = (
        8 * 12 * parameters * 8 / HOST_BYTES_PER_S if zero >= 2 else 0.0
    )  # eight ranks of the node at once

    block_price = block(price_cache, zero, mesh)

    copies_s = (to_device + to_host) * 4 * parameters / A100.pcie_bytes_per_s
    assert 8 * block_price.per_micro_batch_s + block_price.step.value_s == pytest.approx(
        copies_s + added_s, rel=1e-12
    )
    assert block_price.optimizer.value_s == pytest.approx(
        28 * parameters * 8 / HOST_BYTES_PER_S, rel=1e-12
    )


def test_offload_trades_device_bytes_for_host_bytes_and_time():
    layout = frame_of(dp=16, m=4)
    strategy, price_cache = uniform(layout, 8, zero=3), book_of(offload=(STATES,))
    plain = price_step(strategy, book_of())
    states = price_step(strategy, price_cache)
    both = price_step(with_offloaded_activations(strategy, ("fc1", "fc2")), price_cache)

    assert plain.memory[0].host == 0 < states.memory[0].host < both.memory[0].host
    assert plain.memory[0].states.total > states.memory[0].states.total == 0
    assert states.memory[0].activations > both.memory[0].activations
    assert plain.step_s < states.step_s < both.step_s


@pytest.mark.parametrize("recompute", list(Recompute))
def test_copies_of_activations_are_hidden_but_for_those_that_the_backward_pass_begins_with(
    recompute,
):
    strategy, price_cache = uniform(frame_of(dp=16, m=4), 8, recompute=recompute), book_of()
    plain, moved = (
        price_step(variant, price_cache)
        for variant in (
            strategy,
            with_offloaded_activations(strategy, named_operators(["all"], recompute, price_cache)),
        )
    )
    kept = price_cache.activations(LayerKind.BLOCK, 1, Sharding(), recompute).saved
    time = price_cache.layer_time(LayerKind.BLOCK, 1, Sharding(), recompute)
    copy_s = kept / A100.pcie_bytes_per_s
    out_s, back_s = (
        max(0.0, copy_s - time.forward_s),
        max(0.0, copy_s - time.backward_s - time.recompute_s),
    )

    assert moved.step_s - plain.step_s == pytest.approx(
        4 * (8 * out_s + 7 * back_s + copy_s), rel=1e-9
    )
    assert moved.memory[0].host == 8 * kept
    assert moved.memory[0].activations == plain.memory[0].activations - 8 * kept


def test_the_estimate_says_where_everything_is_and_its_file_gives_the_same_price_again(tmp_path):
    plan = estimate_plan(
        TINY,
        A100_16,
        EXPOSED,
        frame_of(dp=16, m=4),
        zero=3,
        recompute=Recompute.SELECTIVE,
        zero_ranks=8,
        offload=(STATES, ACTIVATIONS),
    )
    write_plan(plan, tmp_path / "plan.yaml")

    assert {layer_plan.zero_ranks for layer_plan in plan.layer_plans.values()} == {8}
    assert {name: layer_plan.offload for name, layer_plan in plan.layer_plans.items()} == {
        "embedding": (STATES,),
        "A": (STATES,),
        "head": (STATES,),
    }
    assert {name: layer_plan.keep_on_host for name, layer_plan in plan.layer_plans.items()} == {
        "embedding": (),
        "A": ("norm1", "attention", "residual1", "norm2", "activation", "residual2"),
        "head": (),
    }
    assert plan.predicted.memory_gib[0].host > 0
    assert reprice(read_plan(tmp_path / "plan.yaml")).plan == plan


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"zero_ranks": 3, "zero": 1}, "it does not divide the 16 ranks that hold copies"),
        ({"zero_ranks": 8}, "nothing is sharded at --zero 0"),
    ],
)
def test_groups_that_cannot_be_are_refused(how, message):
    with pytest.raises(ConfigError, match=message):
        estimate_plan(TINY, A100_16, EXPOSED, frame_of(dp=16, m=4), **how)


def test_a_host_that_is_too_small_is_refused():
    small = replace(A100_16, host_memory_bytes=2**20)

    with pytest.raises(
        InfeasibleError, match=r"the hosts need .* GiB a node for what is offloaded, they have 0\.0"
    ):
        estimate_plan(TINY, small, EXPOSED, frame_of(dp=16, m=4), offload=(STATES,))


def test_layers_that_differ_in_it_run_but_are_not_priced():
    plan = estimate_plan(TINY, A100_16, EXPOSED, frame_of(dp=16, m=4), zero=3)
    mixed = replace(
        plan,
        layer_plans={**plan.layer_plans, "head": replace(plan.layer_plans["head"], zero_ranks=8)},
    )

    with pytest.raises(ConfigError, match="differ between layers"):
        reprice(mixed)


def test_a_search_keeps_to_the_pinned_groups():
    entry = load_model("gpt-2.5b")
    training = TrainingSpec(global_batch_size=64, seq_length=entry.seq_length, stack=NEUTRAL)

    plan = find_plan(
        entry.spec, A100_16, training, constraints=Constraints(zero_ranks=8, dp=(16,), zero=(3,))
    )

    assert {layer_plan.zero_ranks for layer_plan in plan.layer_plans.values()} == {8}
    assert reprice(plan).plan == plan


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_copies_and_sums_of_the_host_are_a_cause_of_their_own(zero):
    """Host copies and sums make the whole difference.

    Without overlap the collectives equal those of the plan without host states.
    """
    layout = frame_of(dp=16, m=4)
    plain = price_step(uniform(layout, 8, zero=zero), book_of(offload=())).ranks[0]
    states = price_step(uniform(layout, 8, zero=zero), book_of(offload=(STATES,))).ranks[0]

    assert plain.host_comm.value_s == 0.0
    assert states.dp_comm.value_s == pytest.approx(plain.dp_comm.value_s, rel=1e-9)
    assert states.host_comm.value_s > 0
    assert states.total.value_s - plain.total.value_s == pytest.approx(
        states.host_comm.value_s + states.optimizer.value_s - plain.optimizer.value_s, rel=1e-9
    )


def test_a_plan_file_from_before_reads_with_no_copies():
    plan = estimate_plan(TINY, A100_16, EXPOSED, frame_of(dp=16, m=4), zero=3)
    body = plan_to_document(plan)
    del body["predicted"]["breakdown"]["host_comm_s"]

    assert plan_from_document(body, "old").predicted.breakdown.host_comm_s.value == 0.0
