"""Small seeded search instances, and an independent enumeration of every strategy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.request import Constraints
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import enumerate_candidates

# what the enumeration below tries: levels of recompute, and Megatron's division of every operator
PINS = Constraints(
    schedule=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    recompute=tuple(Recompute),
    megatron_sharding=True,
)


@dataclass(frozen=True)
class Instance:
    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec

    def price_cache(self) -> PriceCache:
        return PriceCache(self.model, self.training, machine_for(self.cluster))


def random_instance(seed: int) -> Instance:
    """2 or 4 GPUs on one or two nodes with a random network, 2 or 3 blocks of random width."""
    draw = random.Random(seed)
    heads = draw.choice((2, 4))
    hidden = heads * draw.choice((64, 128))
    model = ModelSpec(
        name=f"tiny-{seed}",
        num_layers=draw.choice((2, 3, 4)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=draw.choice((128, 1024, 8192)),
        max_seq_length=512,
        dropout=draw.choice((0.0, 0.1)),
        tied_embeddings=draw.random() < 0.5,
    )
    cluster = with_gpus(load_cluster("a100-80gb"), draw.choice((2, 4)), 2)
    slow = draw.choice((1.0, 0.1, 0.02))
    cluster = replace(cluster, nic=replace(cluster.nic, bytes_per_s=cluster.nic.bytes_per_s * slow))
    training = TrainingSpec(
        global_batch_size=4,
        seq_length=draw.choice((128, 512)),
        attention=draw.choice(("flash", "unfused")),
        overlap_grad_reduce=draw.random() < 0.5,
        stack=NEUTRAL,
    )
    return Instance(model, cluster, training)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def _mixes(count: int) -> list[tuple[Recompute, ...]]:
    return list(itertools.combinations_with_replacement(tuple(Recompute), count))


def _rank_options(count: int, layout: ParallelLayout) -> list[tuple[int, tuple[Recompute, ...]]]:
    zeros = range(4) if layout.mesh.dp > 1 else (0,)
    return list(itertools.product(zeros, _mixes(count // layout.virtual_stages)))


def every_strategy(layout: ParallelLayout, num_layers: int) -> Iterator[Strategy]:
    """All strategies of a layout with one ZeRO stage for each rank.

    They are splits of the blocks, and a recompute mix for every rank.
    """
    pp, v = layout.mesh.pp, layout.virtual_stages
    short = (
        v > 1 and num_layers % (pp * v) > 0
    )  # the first and the last virtual stage hold one block less
    for split in [(-(-(num_layers + 2 * short) // pp),) * pp] if v > 1 else _splits(num_layers, pp):
        for ranks in itertools.product(*(_rank_options(count, layout) for count in split)):
            stages = []
            for stage in range(pp * v):
                zero, mix = ranks[stage % pp]
                fewer = short and stage in (0, pp * v - 1)
                blocks = tuple(
                    LayerChoice(LayerKind.BLOCK, level, zero) for level in mix[: len(mix) - fewer]
                )
                first = (
                    (LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zero),) if stage == 0 else ()
                )
                last = (
                    (LayerChoice(LayerKind.HEAD, Recompute.NONE, zero),)
                    if stage == pp * v - 1
                    else ()
                )
                stages.append(first + blocks + last)
            yield Strategy(layout=layout, stages=tuple(stages))


def mixed_strategies(
    layout: ParallelLayout, num_layers: int, count: int, seed: int = 0
) -> Iterator[Strategy]:
    """Strategies with a random level and ZeRO stage for every block.

    Embedding and head have random ones too.
    """
    draw = random.Random(f"{seed} {layout}")
    zeros = range(4) if layout.mesh.dp > 1 else (0,)
    for strategy in draw.choices(
        list(itertools.islice(every_strategy(layout, num_layers), 4000)), k=count
    ):
        yield replace(
            strategy,
            stages=tuple(
                tuple(_redrawn(choice, zeros, draw) for choice in stage)
                for stage in strategy.stages
            ),
        )


def with_other_ends(strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    """The strategies, and each with every other ZeRO stage of embedding and head.

    Both have the same stage on one rank.
    """
    for strategy in strategies:
        (first, *rest), zeros = strategy.stages, range(4) if strategy.layout.mesh.dp > 1 else (0,)
        for embedding, head in (
            (e, h)
            for e, h in itertools.product(zeros, zeros)
            if e == h or strategy.layout.mesh.pp > 1
        ):
            stages = [(replace(first[0], zero=embedding), *first[1:]), *rest]
            stages[-1] = (*stages[-1][:-1], replace(stages[-1][-1], zero=head))
            yield replace(strategy, stages=tuple(stages))


def least_peak(instance: Instance) -> float:
    """The peak of the leanest strategy, with embedding and head at any ZeRO stage.

    The leanest ten strategies of each layout get other ends.
    """
    price_cache = instance.price_cache()
    layers = instance.model.num_layers
    actual = []
    for layout in enumerate_candidates(
        instance.model, instance.cluster, instance.training, PINS
    ).layouts:
        leanest = sorted(
            every_strategy(layout, layers),
            key=lambda strategy: peak_bytes(price_step(strategy, price_cache)),
        )[:10]
        actual += [
            peak_bytes(price_step(strategy, price_cache))
            for strategy in with_other_ends(leanest)
            if not price_cache.tied or same_sharding(strategy)
        ]
    return min(actual)


def _redrawn(choice: LayerChoice, zeros: Sequence[int], draw: random.Random) -> LayerChoice:
    levels = tuple(Recompute) if choice.kind is LayerKind.BLOCK else (choice.recompute,)
    return replace(choice, zero=draw.choice(zeros), recompute=draw.choice(levels))


def every_price(
    instance: Instance, mixed: int = 0, pins: Constraints = PINS
) -> list[tuple[Strategy, StepPrice]]:
    """Every strategy of every layout with one ZeRO stage for a rank, priced in whole.

    `mixed` more strategies of each layout are added.
    """
    price_cache, layers = instance.price_cache(), instance.model.num_layers
    layouts = enumerate_candidates(
        instance.model, instance.cluster, instance.training, pins
    ).layouts
    every = (
        strategy
        for layout in layouts
        for strategy in (*every_strategy(layout, layers), *mixed_strategies(layout, layers, mixed))
    )
    return [
        (strategy, price_step(strategy, price_cache))
        for strategy in every
        if not price_cache.tied or same_sharding(strategy)
    ]


def same_sharding(strategy: Strategy) -> bool:
    """Tells whether a tied embedding is whole on both its stages or sharded on both.

    The executor adds the two gradients.
    """
    return (strategy.stages[0][0].zero == 0) == (strategy.stages[-1][-1].zero == 0)


def same_zero_of_ends(strategy: Strategy) -> bool:
    """Embedding and head have one ZeRO stage, as a search gives them on one rank."""
    return strategy.stages[0][0].zero == strategy.stages[-1][-1].zero


def redundant_bytes(strategy: Strategy, price: StepPrice) -> float:
    """Redundant bytes of the cluster."""
    return (
        strategy.layout.mesh.dp
        * strategy.layout.mesh.tp
        * sum(rank.total for rank in price.redundant)
    )


def peak_bytes(price: StepPrice) -> float:
    """Peak bytes of the fullest device."""
    return max(memory.total for memory in price.memory)
