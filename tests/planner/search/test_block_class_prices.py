"""A search over blocks of several classes finds what an enumeration of all plans finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.block_class_prices import BlockClassPrices, given_cuts
from parplan.planner.search.find_plan import search
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.enumerations import OBJECTIVES, Point, check_memory_first, check_objectives
from tests.helpers.planning import request

TRAINING = TrainingSpec(global_batch_size=16, seq_length=512, stack=NEUTRAL)
CLUSTER = replace(load_cluster("a100-80gb"), nodes=1)
ALTERNATING = ModelSpec(
    name="alternating",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2048,
    vocab_size=8192,
    max_seq_length=512,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    blocks=(BlockRun(window=64), BlockRun()),
)
# the first block is dense, as in DeepSeek's models
PREFIX = replace(
    ALTERNATING,
    name="prefix",
    tied_embeddings=False,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=1024,
    blocks=(BlockRun(experts=False), BlockRun(num_blocks=3)),
)
LEVELS = (Recompute.NONE, Recompute.FULL)
TWO = Constraints(
    pp=(2,),
    tp=(1,),
    ep=(1,),
    schedule=(Schedule.ONE_F_ONE_B,),
    micro_batch_size=(2,),
    zero=(0, 2),
    recompute=LEVELS,
)
SPACES = {
    "alternating": (ALTERNATING, TWO),
    "prefix": (PREFIX, replace(TWO, ep=(2,))),
    "one-rank": (PREFIX, replace(TWO, pp=(1,), zero=(0, 1, 3))),
    "selective": (ALTERNATING, replace(TWO, pp=(1,), recompute=tuple(Recompute))),
    "three-ranks": (PREFIX, replace(TWO, pp=(3,), zero=(0, 1))),
    "interleaved": (
        ALTERNATING,
        replace(TWO, schedule=(Schedule.INTERLEAVED,), virtual_stages=(2,)),
    ),
    "zero-bubble-v": (
        ALTERNATING,
        replace(TWO, schedule=(Schedule.ZBV,), virtual_stages=(2,), recompute=(Recompute.NONE,)),
    ),
    "early-recompute": (PREFIX, replace(TWO, schedule=(Schedule.EARLY_RECOMPUTE,))),
    "tensor-parallel": (
        ALTERNATING,
        replace(TWO, tp=(2,), megatron_sharding=True, sequence_parallel=(True,)),
    ),
    "six-blocks": (
        replace(ALTERNATING, num_layers=6, blocks=(BlockRun(num_blocks=2, window=64), BlockRun())),
        replace(TWO, zero=(1,)),
    ),
}


# blocks that are frozen below the first trained one, and between trained ones
TUNINGS = {
    "frozen-first": FineTuning(freeze=("embedding", "blocks 0-1")),
    "lora-behind-frozen": FineTuning(
        lora_rank=8, lora_targets=("qkv", "fc1"), freeze=("blocks 0-0",)
    ),
    "frozen-between": FineTuning(freeze=("blocks 1-2",)),
}
ALIKE = replace(ALTERNATING, name="alike", blocks=())
SPACES |= {
    "frozen-first": (ALIKE, TWO),
    "lora-behind-frozen": (ALIKE, replace(TWO, zero=(0, 3))),
    "frozen-between": (ALIKE, replace(TWO, zero=(1, 2))),
}


def prices_of(
    space: str, model: ModelSpec, pins: Constraints, limit: int | None = None
) -> BlockClassPrices:
    gpus = {3: 6}.get(pins.pp[0], 4) * pins.tp[0]
    cluster = replace(CLUSTER, gpus_per_node=gpus)
    options = SearchOptions(memory_limit_bytes=limit, max_slowdown=0.2)
    training = replace(TRAINING, fine_tuning=TUNINGS.get(space))
    return BlockClassPrices(request(model, cluster, training, constraints=pins, options=options))


def every_cut(layout: ParallelLayout, num_layers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    given = given_cuts(layout, num_layers - 2)
    if given is not None:
        yield given
        return
    for inner in combinations(range(1, num_layers), layout.num_virtual_stages - 1):
        yield tuple(pairwise((0, *inner, num_layers)))


def every_strategy(prices: BlockClassPrices, pins: Constraints) -> Iterator[Strategy]:
    """Yields all cuts, ZeRO stages of the ranks and recompute levels of the blocks."""
    cache, num_layers = prices.price_cache, prices.price_cache.num_layers
    for layout in prices.space.layouts:
        for cuts, zeros, levels in product(
            every_cut(layout, num_layers),
            product(prices._table(layout).zero_stages(layout), repeat=layout.mesh.pp),
            product(pins.recompute, repeat=num_layers - 2),
        ):
            yield Strategy(
                layout=layout,
                stages=tuple(
                    tuple(
                        LayerChoice(
                            key := cache.key(layer, first),
                            levels[layer - 1] if key.role is LayerKind.BLOCK else Recompute.NONE,
                            zeros[layout.rank_of(stage)],
                        )
                        for layer in range(first, end)
                    )
                    for stage, (first, end) in enumerate(cuts)
                ),
            )


def tied_alike(strategy: Strategy, *, tied: bool) -> bool:
    """Whether both copies of a tied table are sharded, or neither."""
    return not tied or (strategy.stages[0][0].zero > 0) == (strategy.stages[-1][-1].zero > 0)


def every_point(prices: BlockClassPrices, pins: Constraints) -> list[Point]:
    points = []
    for strategy in every_strategy(prices, pins):
        if not tied_alike(strategy, tied=prices.price_cache.tied):
            continue
        price = price_step(strategy, prices.price_cache)
        redundant = strategy.layout.mesh.ranks_per_stage * sum(
            rank.total for rank in price.redundant
        )
        peak = max(memory.total for memory in price.memory)
        points.append(Point(price.closed_form_s, redundant, peak, 0.0))
    return points


@pytest.mark.parametrize(
    "space", mostly_slow([*SPACES], {"alternating", "one-rank", "frozen-first"})
)
def test_every_objective_finds_what_enumeration_finds(space):
    model, pins = SPACES[space]
    points = every_point(prices_of(space, model, pins), pins)
    peaks = sorted({point.peak for point in points})

    for share in (0.0, 0.1, 0.4, 1.0):
        limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
        options = SearchOptions(memory_limit_bytes=limit, max_slowdown=0.2)
        found = {
            objective: search(prices_of(space, model, pins, limit), objective, options)
            for objective in OBJECTIVES
        }
        fitting = [point for point in points if point.peak <= limit]
        check_objectives(found, fitting, options)
        first = replace(options, memory_slack=0.1)
        check_memory_first(
            search(prices_of(space, model, pins, limit), Objective.MEMORY, first), fitting, first
        )
