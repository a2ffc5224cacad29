"""The search over traced modules: its prices are those of described models, its choice is that of brute force, its errors say what binds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from costmodels.book import PriceBook
from costmodels.mesh import Mesh
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.step import price_step
from costmodels.strategy import Frame, LayerChoice, Strategy
from planner.partition.book import ShardBook
from planner.partition.plan import find_module_plan
from planner.partition.price import ShardRun, ShardStrategy, price_shards
from planner.partition.search import ModuleSearch, to_strategy
from planner.partition.shards import Shard, Sharded, shard
from planner.partition.stages import StageRule, parse_stages
from planner.partition.tables import Tables
from planner.plan import Status
from planner.request import Constraints, SearchOptions
from profiles.catalog import load_cluster
from profiles.errors import ConfigError, InfeasibleError
from profiles.measured import machine_for
from profiles.model import LayerKind
from profiles.spec import ModelSpec, TrainingSpec
from profiles.units import MIB
from tests.traced_models import join, linear, model_of, traced_spec, value

GPT = ModelSpec(
    name="gpt", num_layers=4, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_hidden_size=4096, vocab_size=32000,
    max_seq_length=512, dropout=0.1)
LLAMA = replace(GPT, name="llama", tied_embeddings=False, gated_ffn=True, linear_bias=False, dropout=0.0)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=512)
CLUSTER = replace(load_cluster("a100-80gb"), nodes=2)
FRAME = Frame(
    mesh=Mesh(pp=4, dp=4, tp=1), schedule=Schedule.ONE_F_ONE_B, virtual_stages=1, micro_batch_size=2, num_micro_batches=4,
    sequence_parallel=False)


def by_block(spec: ModelSpec) -> Sharded:
    """The traced model with the shards of every block in one: the layers of a described model."""
    found = shard(traced_spec(spec, TRAINING))
    first, *halves, last = found.shards
    blocks = tuple(
        Shard(name="block", first=one.first, end=two.end, parameters=one.parameters + two.parameters)
        for one, two in zip(halves[::2], halves[1::2], strict=True))
    return replace(found, shards=(first, *blocks, last))


def tables_of(sharded: Sharded, training: TrainingSpec = TRAINING) -> Tables:
    return Tables(ShardBook(sharded, training, machine_for(CLUSTER)))


@pytest.mark.parametrize("spec", [GPT, LLAMA], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("schedule", "micro_batches"), [(Schedule.ONE_F_ONE_B, 4), (Schedule.GPIPE, 4), (Schedule.ONE_F_ONE_B, 8)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("level", [Recompute.NONE, Recompute.FULL])
def test_a_traced_model_costs_what_its_description_does(spec, schedule, micro_batches, zero, level):
    frame = replace(FRAME, schedule=schedule, num_micro_batches=micro_batches)
    block = LayerChoice(LayerKind.BLOCK, level, zero)
    ends = [LayerChoice(kind, Recompute.NONE, zero) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)]
    described = Strategy(frame=frame, stages=((ends[0], block), (block,), (block,), (block, ends[1])))
    again = (lambda *shards: shards) if level is Recompute.FULL else (lambda *shards: ())
    traced = ShardStrategy(frame=frame, stages=(
        ShardRun(first=0, end=2, zero=zero, again=again(1)), ShardRun(first=2, end=3, zero=zero, again=again(2)),
        ShardRun(first=3, end=4, zero=zero, again=again(3)), ShardRun(first=4, end=6, zero=zero, again=again(4))))

    expected = price_step(described, PriceBook(spec, TRAINING, machine_for(CLUSTER)))
    found = price_shards(traced, tables_of(by_block(spec)))

    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert found.closed_form_s == pytest.approx(expected.closed_form_s, rel=1e-12)
    assert [m.total for m in found.memory] == pytest.approx([m.total for m in expected.memory], rel=1e-12)
    assert [r.total for r in found.redundant] == pytest.approx([r.total for r in expected.redundant], rel=1e-9)
    assert [r.total.value_s for r in found.ranks] == pytest.approx([r.total.value_s for r in expected.ranks], rel=1e-12)


def test_half_blocks_reduce_and_gather_by_half_blocks():
    """Where a shard is half a block, ZeRO's buffers are half as large, and each reduction hides under its own half."""
    stages = tuple(ShardRun(first=first, end=end, zero=3) for first, end in ((0, 3), (3, 5), (5, 7), (7, 10)))
    whole = tuple(ShardRun(first=first, end=end, zero=3) for first, end in ((0, 2), (2, 3), (3, 4), (4, 6)))

    halves = price_shards(ShardStrategy(frame=FRAME, stages=stages), tables_of(shard(traced_spec(GPT, TRAINING))))
    blocks = price_shards(ShardStrategy(frame=FRAME, stages=whole), tables_of(by_block(GPT)))

    assert halves.memory[1].states == blocks.memory[1].states
    assert halves.memory[1].activations == blocks.memory[1].activations
    assert halves.memory[1].temporaries < blocks.memory[1].temporaries
    assert halves.step_s > blocks.step_s


def searched(sharded, pins=None, options=None, how=None, training=TRAINING, cluster=CLUSTER) -> ModuleSearch:
    return ModuleSearch(sharded, cluster, training, pins or Constraints(), options or SearchOptions(), how or StageRule())


def brute_force(search: ModuleSearch, frame: Frame, zeros: tuple[int, ...]) -> float:
    """The least closed form over all cuts, ZeRO stages and recomputed shards that fit, priced one by one."""
    size, pp = len(search.sharded.shards), frame.mesh.pp
    best = float("inf")
    for inner in combinations(range(1, size), pp - 1):
        bounds = list(zip((0, *inner), (*inner, size), strict=True))
        for chosen in product(zeros, repeat=pp):
            for bits in product((False, True), repeat=size):
                again = [k for k in range(size) if bits[k]]
                strategy = ShardStrategy(frame=frame, stages=tuple(
                    ShardRun(first=a, end=b, zero=zero, again=tuple(k for k in again if a <= k < b))
                    for (a, b), zero in zip(bounds, chosen, strict=True)))
                price = price_shards(strategy, search.tables)
                if max(memory.total for memory in price.memory) <= search.limit_bytes:
                    best = min(best, price.closed_form_s)
    return best


def uneven() -> Sharded:
    """Four shards, none like another, with a value that two later ones read."""
    operators = [linear("a", value("batch_x", 512), "a", 768), linear("b", value("a", 768), "b", 1024), linear("c", value("b", 1024), "c", 512),
                 join("d", (value("c", 512),), "d"), linear("d", value("d", 512), "loss", 256)]
    return shard(model_of(*operators, inputs=(value("batch_x", 512),)))


@pytest.mark.parametrize("limit_mib", [10000, 420, 412, 410.9])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_the_search_finds_what_brute_force_finds(limit_mib, schedule):
    sharded = uneven()
    assert len(sharded.shards) == 4
    pins = Constraints(pp=(2,), schedule=(schedule,), micro_batch_size=(64,), zero=(0, 3))
    options = SearchOptions(memory_limit_bytes=int(limit_mib * MIB) + 430 * MIB)
    training, cluster = TrainingSpec(global_batch_size=512, seq_length=1), replace(CLUSTER, nodes=1, gpus_per_node=4)
    search = searched(sharded, pins, options, training=training, cluster=cluster)
    (frame,) = search.space.frames

    found = search.run(None)
    expected = brute_force(search, frame, (0, 3))

    if not found.solved:
        assert expected == float("inf")
        return
    assert found.solved[0].value == pytest.approx(expected, rel=1e-9)
    assert found.solved[0].choice.proven
    assert found.bound <= expected
    price = price_shards(to_strategy(found.solved[0]), search.tables)
    assert price.closed_form_s == pytest.approx(found.solved[0].value, rel=1e-9)
    assert max(memory.total for memory in price.memory) <= search.limit_bytes
