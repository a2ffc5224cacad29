"""Steps of chunked blocks: memory, time and traffic against sums written here, and limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from parplan.costmodels.chunks.chunk_memory import budget_bytes, chunks_of_rank, device_memory
from parplan.costmodels.chunks.chunk_time import chunk_time
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.chunked_layer import STAGED_CHUNKS, Chunking
from parplan.costmodels.memory.rank_memory import rank_layers, usable_bytes
from parplan.costmodels.operators.compute import optimizer_time
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import Strategy
from parplan.costmodels.usage.rank_traffic import rank_traffic
from parplan.costmodels.usage.rank_usage import predicted_use
from parplan.costmodels.usage.redundancy import operator_redundancy, summed_redundancy
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers import chunk_formulas as closed
from tests.helpers.uniform_strategies import TINY, frame_of, uniform

HALF = TrainingSpec(
    global_batch_size=8,
    seq_length=128,
    precision=Precision.FP16,
    gradient_precision=Precision.FP16,
    stack=NEUTRAL,
)
MIXED = replace(HALF, gradient_precision=Precision.FP32)
FULL = replace(MIXED, precision=Precision.FP32)
V100 = replace(load_cluster("v100-32gb"), pcie_node_bytes_per_s=None)
MIX = (StateLocation.DEVICE,) * 3 + (StateLocation.OPTIMIZER,) * 2 + (StateLocation.HOST,) * 3
ON_HOST = (StateLocation.HOST,) * 8
ENDLESS = 1e18  # bytes a second


def book_of(training=HALF, cluster=V100, gpus=4, device_bytes=None):
    return PriceCache(
        TINY,
        training,
        machine_for(with_gpus(cluster, gpus)),
        chunking=Chunking(device_bytes=device_bytes),
    )


def chunked(homes=MIX, **layout):
    """The eight blocks of TINY, at `homes`, in order of the model."""
    made, left = replace(frame_of(**layout), chunked=True), iter(homes)
    plain = uniform(made, len(homes), zero=3 if made.mesh.dp > 1 else 0)
    return Strategy(
        layout=made,
        stages=tuple(
            tuple(
                replace(choice, home=next(left)) if choice.kind is LayerKind.BLOCK else choice
                for choice in stage
            )
            for stage in plain.stages
        ),
    )


def padded(strategy, price_cache, rank=0):
    """By home the elements of a device's own chunks."""
    groups = chunks_of_rank(strategy, rank, price_cache).groups
    return {
        group.home: group.chunk_layout.num_groups * group.chunk_layout.chunk_elements
        for group in groups
    }


@pytest.mark.parametrize("dp", [1, 4])
@pytest.mark.parametrize(
    ("training", "m", "wide"),
    [
        pytest.param(HALF, 1, (14, 2, 14), id="in-parameters"),
        pytest.param(HALF, 8, (16, 4, 14), id="16-bit-gradients"),
        pytest.param(MIXED, 1, (18, 6, 16), id="fp32-gradients"),
        pytest.param(FULL, 2, (16, 8, 16), id="fp32"),
    ],
)
def test_device_and_host_hold_so_many_bytes_a_parameter_by_home(training, m, wide, dp):
    """wide: of DEVICE, and of OPTIMIZER on the device and on the host; of HOST all is there."""
    price_cache, strategy = book_of(training), chunked(dp=dp, m=m)
    padded_bytes, ends = (
        padded(strategy, price_cache),
        [choice for choice in rank_layers(strategy, 0) if choice.kind is not LayerKind.BLOCK],
    )
    outside = sum(
        price_cache.outside.states(
            c.kind, strategy.layout.mesh, strategy.layout.sharding, c.zero
        ).states.total
        for c in ends
    )
    staged = (
        STAGED_CHUNKS
        * training.gradient_precision.num_bytes
        * chunks_of_rank(strategy, 0, price_cache).groups[0].chunk_layout.chunk_elements
    )

    memory = device_memory(strategy, 0, price_cache)

    assert (
        memory.states.total
        == outside
        + wide[0] * padded_bytes[StateLocation.DEVICE]
        + wide[1] * padded_bytes[StateLocation.OPTIMIZER]
    )
    assert (
        memory.host
        == wide[2] * padded_bytes[StateLocation.OPTIMIZER]
        + wide[0] * padded_bytes[StateLocation.HOST]
        + staged
    )


def test_the_closed_forms_of_the_states_hold_for_the_padded_parameters():
    price_cache, strategy = book_of(), chunked(dp=4, m=1)
    padded_bytes = padded(strategy, price_cache)
    shares = closed.OwnedShares(
        parameters=sum(padded_bytes.values()),
        delta=padded_bytes[StateLocation.HOST] / sum(padded_bytes.values()),
        gamma=(padded_bytes[StateLocation.HOST] + padded_bytes[StateLocation.OPTIMIZER])
        / sum(padded_bytes.values()),
    )
    plain = device_memory(
        chunked((StateLocation.HOST,) * 8, dp=4, m=1), 0, price_cache
    ).states.total  # of embedding and head alone

    assert device_memory(strategy, 0, price_cache).states.total - plain == pytest.approx(
        closed.device_bytes(shares)
    )


def test_the_peak_is_the_schedules_and_within_the_budget():
    price_cache, strategy = book_of(), chunked(dp=4, m=8)
    budget = budget_bytes(0, strategy.layout.mesh, price_cache)
    chunks, memory = (
        chunks_of_rank(strategy, 0, price_cache),
        device_memory(strategy, 0, price_cache),
    )

    assert budget == int(usable_bytes(V100.device.memory_bytes, strategy.layout.mesh, price_cache))
    assert (
        max(chunks.smallest_bytes, *(moment.device_bytes for moment in chunks.moments))
        <= memory.allocated
        <= budget
    )
    assert predicted_use(strategy, 0, price_cache).held == pytest.approx(memory.allocated, abs=1)


def test_a_stated_budget_is_kept_and_one_that_is_too_small_says_what_would_do():
    strategy = chunked(ON_HOST, dp=1, m=2)
    least = chunks_of_rank(strategy, 0, book_of(gpus=1)).smallest_bytes

    assert device_memory(strategy, 0, book_of(gpus=1, device_bytes=least)).allocated == least
    with pytest.raises(InfeasibleError, match=f"{least:,}"):
        device_memory(strategy, 0, book_of(gpus=1, device_bytes=least - 1))


def test_all_on_the_device_waits_for_no_copies_and_is_updated_chunk_by_chunk():
    price_cache = book_of()
    chunks = chunked((StateLocation.DEVICE,) * 8, dp=4)
    units = uniform(frame_of(dp=4), 8, zero=3)
    (group,) = chunks_of_rank(chunks, 0, price_cache).groups
    outside = sum(
        price_cache.outside.data_parallel(
            kind, 1, chunks.layout.mesh, Sharding(), 3
        ).optimizer.value_s
        for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)
    )
    chunk_s = optimizer_time(group.chunk_layout.chunk_elements, price_cache.machine, HALF).value_s
    price, plain = price_step(chunks, price_cache), price_step(units, price_cache)

    assert price.ranks[0].host_comm.value_s == 0.0
    assert price.memory[0].host == 0
    assert price.ranks[0].compute == plain.ranks[0].compute
    assert price.ranks[0].optimizer.value_s == pytest.approx(
        outside + group.chunk_layout.num_groups * chunk_s, rel=1e-9
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 4}, id="dp"),
        pytest.param({"dp": 2, "tp": 2, "m": 2}, id="tp"),
        pytest.param({"m": 1}, id="one-rank"),
    ],
)
def test_the_causes_of_one_stage_add_up_to_the_step(layout):
    price = price_step(chunked(**layout), book_of())

    assert price.step_s == pytest.approx(price.ranks[0].total.value_s, rel=1e-9)
    assert price.closed_form_s == pytest.approx(price.step_s, rel=1e-9)


def test_every_stage_of_a_pipeline_waits_for_its_own_chunks():
    price = price_step(
        chunked((StateLocation.DEVICE,) * 4 + (StateLocation.HOST,) * 4, pp=2, dp=2), book_of()
    )

    assert price.ranks[0].host_comm.value_s == 0.0 < price.ranks[1].host_comm.value_s
    assert price.memory[0].host == 0 < price.memory[1].host


def moved(chunks):
    """Bytes to the device and from it inside the step's passes."""
    return [
        sum(
            op.num_bytes
            for moment in chunks.moments
            for op in (*moment.before, *moment.after)
            if op.does.value == does
        )
        for does in ("fetch", "send")
    ]


def test_copies_cost_nothing_over_an_endless_link_and_are_the_step_over_a_slow_one():
    """The step is max(compute, copies).

    Copies take the longer of the two directions where they do not wait for each other.
    """
    strategy = chunked(ON_HOST, m=8)
    endless, slow = (
        book_of(gpus=1, cluster=replace(V100, pcie_bytes_per_s=rate, host_bytes_per_s=ENDLESS))
        for rate in (ENDLESS, 1e6)
    )
    least = chunks_of_rank(strategy, 0, endless).smallest_bytes
    endless.chunking = slow.chunking = Chunking(device_bytes=least + 10**6)
    longest_s = max(moved(chunks_of_rank(strategy, 0, slow))) / 1e6

    fast, bound = price_step(strategy, endless), price_step(strategy, slow)

    assert fast.ranks[0].host_comm.value_s < 1e-6 * fast.step_s
    assert longest_s <= bound.step_s
    assert bound.step_s <= sum(moved(chunks_of_rank(strategy, 0, slow))) / 1e6 + fast.step_s


def test_gpus_that_share_an_uplink_wait_longer():
    strategy = chunked(ON_HOST, dp=4, m=2)
    alone, shared = (
        price_step(strategy, book_of(cluster=replace(V100, pcie_node_bytes_per_s=rate)))
        .ranks[0]
        .host_comm.value_s
        for rate in (None, 4 * V100.pcie_bytes_per_s / 10)
    )

    assert alone < shared


def test_a_slower_host_is_paid_after_the_last_pass():
    strategy = chunked(ON_HOST, dp=4, m=1)
    fast = price_step(strategy, book_of(cluster=replace(V100, host_bytes_per_s=1e12)))
    slow = price_step(strategy, book_of(cluster=replace(V100, host_bytes_per_s=1e11)))
    host_parameters = padded(strategy, book_of())[StateLocation.HOST]

    difference_s = (
        28 * host_parameters * 4 / (0.73 / 2) * (1 / 1e11 - 1 / 1e12)
    )  # the four GPUs of one of two NUMA domains
    assert slow.step_s - fast.step_s == pytest.approx(difference_s, rel=1e-9)
    assert slow.ranks[0].optimizer.value_s - fast.ranks[0].optimizer.value_s == pytest.approx(
        difference_s, rel=1e-9
    )


def test_where_the_device_is_the_host_every_copy_is_waited_for():
    cluster = replace(with_gpus(load_cluster("cpu"), 1), pcie_bytes_per_s=1e9)
    price_cache = PriceCache(
        TINY, FULL, machine_for(cluster), chunking=Chunking(device_bytes=10**9)
    )
    strategy = chunked(ON_HOST, m=1)

    timed = chunk_time(strategy, 0, price_cache)

    assert sum(seconds.value_s for seconds in timed.host.values()) == pytest.approx(
        sum(moved(chunks_of_rank(strategy, 0, price_cache))) / 1e9
    )
    assert timed.of_pass(ActionKind.FORWARD, 0) == timed.host[ActionKind.FORWARD, 0]


def groups_of_blocks(strategy, price_cache):
    """Communication groups of the chunks that hold each block's tensors.

    Tensor names are walked one by one.
    """
    groups = {}
    for index, group in enumerate(chunks_of_rank(strategy, 0, price_cache).groups):
        for tensor, number in zip(
            group.chunk_layout.tensors, group.chunk_layout.group_of, strict=True
        ):
            block = int(tensor.name.split(".")[0].removeprefix("block"))
            groups.setdefault(block, set()).add((index, number))
    return groups


def test_traffic_gathers_groups_once_for_neighbouring_passes_and_reduces_once_a_micro_batch():
    price_cache, m = book_of(MIXED), 2
    strategy = chunked(dp=4, m=m)
    groups, chunk_layout = (
        groups_of_blocks(strategy, price_cache),
        chunks_of_rank(strategy, 0, price_cache).groups[0].chunk_layout,
    )
    sweep = [*range(8), *reversed(range(8))] * m
    first = len(groups[0])
    gathers = first + sum(len(groups[there] - groups[here]) for here, there in pairwise(sweep))
    reductions = m * len(set().union(*groups.values()))
    size = 4 * chunk_layout.chunk_elements

    ends = uniform(strategy.layout, 0, zero=3)
    outside = {
        sent.kind: sent
        for sent in rank_traffic(
            replace(ends, layout=replace(ends.layout, chunked=False)), 0, price_cache
        )
    }
    sent = {sent.kind: sent for sent in rank_traffic(strategy, 0, price_cache)}

    calls = {kind: sent[kind].calls - outside[kind].calls for kind in sent}
    num_bytes = {kind: sent[kind].num_bytes - outside[kind].num_bytes for kind in sent}
    assert calls == {"all_gather": gathers, "reduce_scatter": reductions}
    assert num_bytes == {"all_gather": gathers * 2 * size, "reduce_scatter": reductions * 4 * size}


@pytest.mark.parametrize(("training", "m"), [(HALF, 1), (HALF, 2), (FULL, 2)])
def test_redundancy_of_chunks_is_their_padding_and_the_copies_of_parameters(training, m):
    """In 16 bits the master is the one copy.

    The master of OPTIMIZER blocks is on the host, and the device's parameters are beyond it.
    """
    price_cache, strategy = book_of(training), chunked(dp=4, m=m)
    block = price_cache.graph(1).block.num_parameters / 4
    padded_bytes, over = padded(strategy, price_cache), m == 1 and training is HALF
    padding = {
        home: padded_bytes[home] - count * block
        for home, count in ((StateLocation.DEVICE, 3), (StateLocation.OPTIMIZER, 2))
    }
    master = training is FULL

    redundant, memory = (
        price_step(strategy, price_cache).redundant[0],
        device_memory(strategy, 0, price_cache),
    )
    by_operator = summed_redundancy(
        redundancy
        for choice in rank_layers(strategy, 0)
        for redundancy in operator_redundancy(choice, 0, strategy.layout, price_cache).values()
    )

    g, o = training.gradient_precision.num_bytes, 8 if master else 12
    width = training.precision.num_bytes
    assert redundant.optimizer - by_operator.optimizer == pytest.approx(
        o * padding[StateLocation.DEVICE], abs=64
    )
    assert redundant.gradients - by_operator.gradients == pytest.approx(
        0 if over else g * sum(padding.values()), abs=64
    )
    assert redundant.parameters - by_operator.parameters == pytest.approx(
        width * sum(padding.values()), abs=64
    )
    assert memory.host > 0


def test_plans_without_chunks_do_not_know_of_the_budget():
    strategy = uniform(frame_of(dp=4), 8, zero=3)

    assert (
        price_step(strategy, book_of(device_bytes=1)).step_s
        == price_step(strategy, book_of()).step_s
    )


def test_gradients_of_embedding_and_head_are_of_fp32_shards_whatever_those_of_chunks_are():
    strategy = chunked(dp=4, m=2)
    half, mixed = (
        {sent.kind: sent.num_bytes for sent in rank_traffic(strategy, 0, book_of(training))}[
            "reduce_scatter"
        ]
        for training in (HALF, MIXED)
    )
    moments = chunks_of_rank(strategy, 0, book_of(MIXED)).moments
    reduced = sum(
        op.num_bytes for moment in moments for op in moment.after if op.does.value == "reduce"
    )

    assert mixed - half == reduced // 2
    assert book_of(MIXED).outside.training == MIXED


def test_activations_and_chunks_come_to_the_device_one_after_the_other():
    """Each hides under compute that is as long as it; both together do not."""
    price_cache, m = book_of(gpus=1), 2
    plain = chunked(ON_HOST, m=m)
    names = tuple(operator.name for operator in price_cache.layer(LayerKind.BLOCK, 1).operators)
    both = Strategy(
        layout=plain.layout,
        stages=tuple(
            tuple(
                replace(choice, on_host=names) if choice.kind is LayerKind.BLOCK else choice
                for choice in stage
            )
            for stage in plain.stages
        ),
    )
    least = chunks_of_rank(both, 0, price_cache).smallest_bytes
    slow = book_of(
        gpus=1,
        cluster=replace(V100, pcie_bytes_per_s=1e7, host_bytes_per_s=ENDLESS),
        device_bytes=least + 10**5,
    )
    fetched = sum(
        op.num_bytes
        for moment in chunks_of_rank(both, 0, slow).moments
        for op in moment.before
        if op.does.value == "fetch" and moment.work is ActionKind.BACKWARD
    )
    kept = 8 * price_cache.activations(LayerKind.BLOCK, 1, Sharding(), on_host=names).host

    backward_s = price_step(both, slow).simulated.ranks[0].busy_s

    assert backward_s >= (fetched + m * kept) / 1e7
