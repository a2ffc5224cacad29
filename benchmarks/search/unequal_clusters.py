"""Plans over unequal pools beside plans that treat all GPUs as the slowest, and attacks on them.

    python -m benchmarks.search.unequal_clusters                  # the table, four CPU-minutes
    python -m benchmarks.search.unequal_clusters --prices 2000    # attacks with 2,000 prices each
    python -m benchmarks.search.unequal_clusters --experts        # an attack on unlike blocks

The plan for the slowest GPU is that of as many GPUs with the least memory, the lowest peak and the
slowest link of all pools: its step is a promise that every pool can hold. An attack lays strategies
out by hand, with other stages, orders of the pools, micro-batches, ZeRO stages and recompute, and
improves the best of them rank by rank. The exit code is 1 where one is faster than a plan's bound.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click

from benchmarks.search.attacks.layouts import laid_out
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout
from parplan.planner.candidates.enumeration import illegal_layout
from parplan.planner.infeasible.shortfall import limit_bytes, price_cache_of
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest, Request
from parplan.planner.search.equal_baselines import SLOWEST, equal_requests
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.pools_divide_data import divide_batch
from parplan.planner.stage_columns.block_counts import with_classes
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.pool_documents import machine_from_document
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.report.text import console, percent, print_table, say, seconds_text

SPINE = {"name": "spine", "gb_per_s_of_node": 100, "latency_us": 8, "source": "assumed"}
LINE = {"name": "line", "gb_per_s_in_total": 12.5, "latency_us": 1000, "source": "assumed"}
# name, model, the GPU of each pool, nodes of each, and the join
CASES = (
    ("A100 + H100", "gpt-20b", ("a100-80gb", "h100-80gb"), 4, SPINE),
    ("H100 + H20", "llama3-70b", ("h100-80gb", "h20-96gb"), 8, SPINE),
    ("two sites of H100", "gpt-20b", ("h100-80gb", "h100-80gb"), 4, LINE),
)
# a model whose blocks are of several classes
EXPERTS = ("deepseek-v3", ("h100-80gb", "h20-96gb"), 64, SPINE)
HEADING = (
    "case",
    "as the slowest",
    "one pool",
    "pipeline",
    "gap",
    "batch",
    "gain",
    "attack",
)
WAYS = tuple((zero, level) for zero in (0, 1, 2, 3) for level in (Recompute.NONE, Recompute.FULL))
Shape = tuple[ParallelLayout, tuple[int, ...], tuple[tuple[int, Recompute], ...]]


def request_of(model: str, gpus: tuple[str, ...], nodes: int, join: dict[str, object]) -> Request:
    """Return the request of a case, at the model's batch on Megatron-Core."""
    entry, stack = load_model(model), load_stack("megatron-core")
    pools = [{"name": f"{'ab'[n]}", "gpu": gpu, "nodes": nodes} for n, gpu in enumerate(gpus)]
    cluster = machine_from_document({"name": "two", "pools": pools, "joins": [join]}, model)
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size,
        seq_length=entry.seq_length,
        attention=stack.attention_on(cluster.device.compute_capability),
        overlap_grad_reduce=stack.overlap_grad_reduce,
        stack=stack,
    )
    return PlanRequest(model=entry.spec, cluster=cluster, training=training)


class Attack:
    """Strategies laid out by hand over the pools of a request."""

    def __init__(self, request: Request, seed: int) -> None:
        assert isinstance(request.cluster, UnequalCluster)
        self.request, self.cluster, self.chance = request, request.cluster, random.Random(seed)
        self.prices: PriceCache = price_cache_of(request)
        self.stages = (8, 16, 32) if request.model.num_experts else (2, 4, 8, 16)

    def layouts(self) -> Iterator[ParallelLayout]:
        """Yield random legal layouts, with the pools in either order."""
        batch, gpus = self.request.training.global_batch_size, self.cluster.num_gpus
        while True:
            tp, pp = self.chance.choice((1, 2, 4, 8)), self.chance.choice(self.stages)
            size = self.chance.choice((1, 2, 4))
            if gpus % (tp * pp):
                continue
            ep = self.chance.choice((1, 8, 16)) if self.request.model.num_experts else 1
            mesh = Mesh(pp=pp, dp=gpus // (tp * pp), tp=tp, ep=ep)
            pools = list(self.cluster.by_name)
            self.chance.shuffle(pools)
            layout = ParallelLayout(
                mesh=mesh,
                schedule=Schedule.ONE_F_ONE_B,
                virtual_stages=1,
                micro_batch_size=size,
                num_micro_batches=batch // (mesh.dp * size),
                sequence_parallel=tp > 1,
                pools=tuple(pool for pool in pools for _ in range(pp // 2)),
            )
            if illegal_layout(layout, self.request.model, self.request.training) is None:
                yield layout

    def shape(self, layout: ParallelLayout) -> Shape:
        """Return blocks of each stage near the pools' peaks, and one way of each stage."""
        peaks = {
            name: pool.cluster.device.peak("bf16") for name, pool in self.cluster.by_name.items()
        }
        weights = [peaks[pool] * self.chance.uniform(0.6, 1.4) for pool in layout.pools]
        num_layers, left = self.request.model.num_layers, sum(weights)
        blocks: list[int] = []
        for rank, weight in enumerate(weights):
            room = num_layers - sum(blocks) - (layout.mesh.pp - rank - 1)
            blocks.append(max(1, min(room, round((num_layers - sum(blocks)) * weight / left))))
            left -= weight
        blocks[-1] += num_layers - sum(blocks)
        ways = self.chance.choices(WAYS, k=layout.mesh.pp)
        if self.request.model.num_experts:  # unlike ways seldom fit so large a model
            ways = [ways[0]] * layout.mesh.pp
        return layout, tuple(blocks), tuple(ways)

    def step_s(self, shape: Shape) -> float:
        """Return the simulated step, infinite where a stage does not fit its pool."""
        layout, blocks, ways = shape
        if min(blocks) < 1:
            return float("inf")
        ranks = [
            [LayerChoice(LayerKind.BLOCK, level, zero)] * count
            for count, (zero, level) in zip(blocks, ways, strict=True)
        ]
        strategy = with_classes(laid_out(layout, blocks, ranks, ways[0][0]), self.prices)
        price = price_step(strategy, self.prices)
        for rank, memory in enumerate(price.memory):
            own = prices_at(layout, rank, self.prices)
            stack = own.training.stack
            if memory.total > limit_bytes(own.machine.cluster, stack, self.request.options):
                return float("inf")
        return price.step_s

    def neighbours(self, shape: Shape) -> Iterator[Shape]:
        """Yield the shape with a block moved, or with another way of one stage, in random order."""
        layout, blocks, ways = shape
        changes: list[Shape] = []
        for rank in range(layout.mesh.pp):
            changes += [
                (layout, blocks, (*ways[:rank], way, *ways[rank + 1 :]))
                for way in WAYS
                if way != ways[rank]
            ]
            for other in range(layout.mesh.pp):
                if other != rank and blocks[rank] > 1:
                    moved = list(blocks)
                    moved[rank] -= 1
                    moved[other] += 1
                    changes.append((layout, tuple(moved), ways))
        self.chance.shuffle(changes)
        yield from changes

    def best_s(self, prices: int) -> float:
        """Return the fastest step of a third of the prices at random, and of climbs from there."""
        drawn = [self.shape(layout) for layout in itertools.islice(self.layouts(), prices // 3)]
        ranked = sorted(((self.step_s(shape), n) for n, shape in enumerate(drawn)))
        best_s, left = ranked[0][0], prices - len(drawn)
        for start_s, number in ranked[:5]:
            here_s, shape, room = start_s, drawn[number], left // 5
            climbing = True
            while climbing and room > 0:
                climbing = False
                for changed in self.neighbours(shape):
                    room -= 1
                    changed_s = self.step_s(changed)
                    if changed_s < here_s:
                        here_s, shape, climbing = changed_s, changed, True
                        break
                    if room <= 0:
                        break
            best_s = min(best_s, here_s)
        return best_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The steps of a case in seconds, and whether the attack was below the bound."""

    name: str
    slowest_s: float
    alone_s: float
    pipeline: Plan
    batch_s: float
    attack_s: float | None

    @property
    def broken(self) -> bool:
        """True if a strategy by hand is faster than the bound of the plan."""
        return self.attack_s is not None and self.attack_s < self.pipeline.search.bound * (1 - 1e-6)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        pipeline_s = self.pipeline.predicted.step_time_s.value
        return (
            self.name,
            seconds_text(self.slowest_s),
            seconds_text(self.alone_s),
            seconds_text(pipeline_s),
            percent(self.pipeline.search.gap),
            seconds_text(self.batch_s),
            f"{self.slowest_s / min(pipeline_s, self.batch_s):.2f} x",
            "" if self.attack_s is None else f"+{percent(self.attack_s / pipeline_s - 1)}",
        )


def compared(name: str, request: Request, prices: int) -> Compared:
    """Return the steps of one case."""
    equal_s = {
        beside: find_plan(each).predicted.step_time_s.value
        for beside, each in equal_requests(request).items()
    }
    return Compared(
        name=name,
        slowest_s=equal_s.pop(SLOWEST),
        alone_s=min(equal_s.values()),
        pipeline=find_plan(request),
        batch_s=divide_batch(request).step_s,
        attack_s=Attack(request, seed=0).best_s(prices) if prices else None,
    )


def attack_experts(prices: int) -> bool:
    """Attack a plan of dense blocks and blocks with experts, and return whether it holds."""
    request = request_of(*EXPERTS)
    plan = find_plan(request)
    best_s = Attack(request, seed=0).best_s(prices)
    step_s, bound_s = plan.predicted.step_time_s.value, plan.search.bound
    text = f"{EXPERTS[0]}: {seconds_text(step_s)}, gap {percent(plan.search.gap)}"
    say(console(sys.stdout), f"{text}, best attack {percent(best_s / step_s - 1)} slower")
    return best_s >= bound_s * (1 - 1e-6)


@click.command()
@click.option("--prices", type=int, default=0, show_default=True, help="Prices of each attack.")
@click.option("--experts", is_flag=True, help="Attack a plan of unlike blocks alone, 240 prices.")
def main(prices: int, experts: bool) -> None:
    """Print the table."""
    if experts:
        sys.exit(0 if attack_experts(prices or 240) else 1)
    out, rows = console(sys.stdout), []
    for name, *case in CASES:
        rows.append(compared(name, request_of(*case), prices))
        say(console(sys.stderr), "  ".join(rows[-1].cells))
    print_table(out, HEADING, [row.cells for row in rows], left=("case",))
    sys.exit(1 if any(row.broken for row in rows) else 0)


if __name__ == "__main__":
    main()
