"""Blocks priced as two halves, against operator times put through the recursion by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.communication.hiding import CONTENTION
from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.layers.sub_pipeline import HalfTime, block_s, pace_s, row_s
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.costmodels.usage.rank_traffic import rank_traffic
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

TP, B = 4, 4
MODELS = {name: load_model(name).spec for name in ("gpt-20b", "llama3-8b")}
SLOW = with_gpus(load_cluster("a100-40gb-pcie"), 8)


def price_cache(
    model: ModelSpec = MODELS["gpt-20b"],
    stack: str = "parplan",
    contention: float | None = None,
    cluster=SLOW,
) -> PriceCache:
    training = TrainingSpec(global_batch_size=32, seq_length=2048, stack=load_stack(stack))
    machine = machine_for(cluster)
    return PriceCache(
        model, training, replace(machine, profile=replace(machine.profile, contention=contention))
    )


def parts_of(priced: PriceCache, way: str) -> list[HalfTime]:
    """Parts of half a micro-batch through a block, from all-reduce to all-reduce.

    Operators are priced as in undivided blocks of that size.
    """
    operators = priced._operators(LayerKind.BLOCK, (B // 2,), Sharding(TP))
    names = list(operators.compute)
    parts, compute_s = [], 0.0
    for name in names if way == "forward" else reversed(names):
        compute_s += getattr(operators.compute[name], way).value_s
        sent_s = getattr(operators.tensor_parallel[name], way).value_s
        if sent_s:
            parts.append(HalfTime(compute_s, sent_s))
            compute_s = 0.0
    return [*parts, HalfTime(compute_s)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("level", "row"), [(2, block_s), (3, pace_s)])
def test_a_pass_takes_what_its_operators_at_half_the_size_take_in_the_recursion(model, level, row):
    priced = price_cache(MODELS[model], contention=0.0)
    time = priced.layer_time(LayerKind.BLOCK, B, Sharding(TP, overlap=level))

    forward, backward = parts_of(priced, "forward"), parts_of(priced, "backward")
    assert [len(forward), len(backward)] == [
        3,
        3,
    ]  # attention, feed-forward, and what is behind the last all-reduce
    assert time.forward_s == pytest.approx(row(forward), rel=1e-12)
    assert time.backward_s == pytest.approx(row(backward), rel=1e-12)


def test_level_1_divides_the_products_that_are_all_reduced_and_nothing_else():
    priced = price_cache(contention=0.0)
    half = priced._operators(LayerKind.BLOCK, (B // 2,), Sharding(TP))
    whole = priced._operators(LayerKind.BLOCK, (B,), Sharding(TP))
    sent = {
        name: time.forward.value_s
        for name, time in half.tensor_parallel.items()
        if time.forward.value_s
    }
    time = priced.layer_time(LayerKind.BLOCK, B, Sharding(TP, overlap=1))

    assert set(sent) == {"attention_out", "fc2"}
    expected_s = sum(
        whole.compute[name].forward.value_s for name in whole.compute if name not in sent
    )
    for name, c in sent.items():
        x = half.compute[name].forward.value_s
        expected_s += max(2 * x + c, x + 2 * c)
    assert time.forward_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_second_that_is_hidden_costs_what_it_does_everywhere(level):
    sharding = Sharding(TP, overlap=level)
    free = price_cache(contention=0.0).layer_time(LayerKind.BLOCK, B, sharding)
    dear = price_cache(contention=None).layer_time(LayerKind.BLOCK, B, sharding)
    sent_s = 2 * sum(part.sent_s for part in parts_of(price_cache(), "forward"))

    hidden_s = sent_s - free.tp_forward.value_s
    assert hidden_s > 0.1 * sent_s
    assert dear.tp_forward.value_s == pytest.approx(
        free.tp_forward.value_s + CONTENTION * hidden_s, rel=1e-9
    )


@pytest.mark.parametrize("level", [1, 2, 3])
def test_nothing_is_hidden_twice_where_the_stack_hides_all_reduces_by_itself(level):
    stack = load_stack("megatron-core")
    assert stack.async_tensor_parallel
    times = []
    for hides in (True, False):
        priced = price_cache(stack="megatron-core")
        priced.training = replace(
            priced.training, stack=replace(stack, async_tensor_parallel=hides)
        )
        times.append(
            [
                priced.layer_time(LayerKind.BLOCK, B, Sharding(TP, overlap=overlap)).total_s
                for overlap in (0, level)
            ]
        )

    assert times[0][0] < times[1][0]
    assert times[0][1] == times[1][1]


def test_what_runs_again_is_halved_too_and_waits_block_by_block():
    priced = price_cache()
    time = {
        level: priced.layer_time(LayerKind.BLOCK, B, Sharding(TP, overlap=level), Recompute.FULL)
        for level in (2, 3)
    }

    assert time[2].recompute_s == time[3].recompute_s == time[2].forward_s > time[3].forward_s
    assert (
        priced.layer_time(
            LayerKind.BLOCK, B, Sharding(TP, overlap=3), Recompute.SELECTIVE
        ).tp_recompute.value_s
        == 0.0
    )


def test_without_tensor_parallelism_halving_only_costs():
    priced = price_cache()
    whole = priced.layer_time(LayerKind.BLOCK, B, Sharding(overlap=0)).total_s
    halves = priced.layer_time(LayerKind.BLOCK, B, Sharding(overlap=2)).total_s
    half = priced.layer_time(LayerKind.BLOCK, B // 2, Sharding()).total_s

    assert halves == pytest.approx(2 * half, rel=1e-9)
    assert halves > whole
    assert [edge.value_s for edge in priced.row_edges(B, Sharding(overlap=3))] == [0.0, 0.0]


def strategy(
    level: int,
    blocks: int,
    *,
    pp: int = 1,
    virtual_stages: int = 1,
    recompute_level: Recompute = Recompute.NONE,
) -> Strategy:
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=1, tp=TP),
        schedule=Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=virtual_stages,
        micro_batch_size=B,
        num_micro_batches=8,
        sequence_parallel=False,
        tp_overlap=level,
    )
    row = (LayerChoice(LayerKind.BLOCK, recompute_level, 0),) * blocks
    ends = (
        LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, 0),
        LayerChoice(LayerKind.HEAD, Recompute.NONE, 0),
    )
    stages = [row] * layout.num_virtual_stages
    stages[0], stages[-1] = (ends[0], *stages[0]), (*stages[-1], ends[1])
    return Strategy(layout=layout, stages=tuple(stages))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("pp", "virtual_stages"), [(2, 1), (2, 2)])
def test_the_blocks_of_each_chunk_are_one_row_whose_ends_are_paid_once(blocks, pp, virtual_stages):
    priced, made = (
        price_cache(contention=0.0),
        strategy(3, blocks, pp=pp, virtual_stages=virtual_stages),
    )
    bare = step_costs(strategy(0, blocks, pp=pp, virtual_stages=virtual_stages), priced)
    alone = priced.layer_time(LayerKind.BLOCK, B, Sharding(TP))
    rows = step_costs(made, priced)

    for rank in range(pp):
        for chunk in range(virtual_stages):
            rest_s = (
                bare.stages[rank][chunk].forward_s - blocks * alone.forward_s
            )  # embedding, head
            assert rows.stages[rank][chunk].forward_s - rest_s == pytest.approx(
                row_s(parts_of(priced, "forward"), blocks), rel=1e-9
            )
            rest_s = bare.stages[rank][chunk].backward_s - blocks * alone.backward_s
            assert rows.stages[rank][chunk].backward_s - rest_s == pytest.approx(
                row_s(parts_of(priced, "backward"), blocks), rel=1e-9
            )


def test_the_breakdown_of_a_rank_adds_up_to_what_its_stages_take():
    priced, made = price_cache(), strategy(3, 3, pp=2)
    price = price_step(made, priced)

    for rank, (stage,) in zip(price.ranks, step_costs(made, priced).stages, strict=True):
        micro_batch_s = (
            stage.forward_s + stage.backward_s + stage.receive_forward_s + stage.receive_backward_s
        )
        once = rank.compute + rank.recompute + rank.tp_comm + rank.pp_comm
        assert once.value_s == pytest.approx(8 * micro_batch_s, rel=1e-9)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_halves_keep_the_same_bytes_and_all_reduce_twice_as_often_half_as_much(level):
    priced, sent = price_cache(), {}
    for overlap in (0, level):
        sent[overlap] = {
            traffic.kind: traffic
            for traffic in rank_traffic(strategy(overlap, 3), 0, priced)
            if traffic.axis is Axis.TP
        }
        kept = priced.activations(LayerKind.BLOCK, B, Sharding(TP, overlap=overlap))
        assert kept.saved == priced.activations(LayerKind.BLOCK, B, Sharding(TP)).saved

    assert set(sent[0]) == set(sent[level]) == {Collective.ALL_REDUCE}
    before, after = sent[0][Collective.ALL_REDUCE], sent[level][Collective.ALL_REDUCE]
    assert (
        after.calls - before.calls == 8 * 3 * 4
    )  # micro-batches, blocks, forward and backward after attention and feed-forward
    assert after.num_bytes == before.num_bytes


def test_only_one_half_has_temporaries_and_both_have_what_runs_again():
    priced = price_cache()
    whole = Sharding(TP)
    halved = Sharding(TP, overlap=2)
    boundary_bytes = priced.graph(B).block.input.num_bytes
    for level in Recompute:
        size = {
            sharding: priced.activations(LayerKind.BLOCK, B, sharding, level)
            for sharding in (whole, halved)
        }
        assert size[halved].saved == size[whole].saved
        assert size[halved].workspace < size[whole].workspace + boundary_bytes
    recomputed = [
        priced.activations(LayerKind.BLOCK, B, halved, level).workspace
        for level in (Recompute.NONE, Recompute.FULL)
    ]
    kept = [
        priced.activations(LayerKind.BLOCK, B, halved, level).saved
        for level in (Recompute.NONE, Recompute.FULL)
    ]
    assert recomputed[1] - recomputed[0] == kept[0] - kept[1]
