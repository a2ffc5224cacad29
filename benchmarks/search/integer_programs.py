"""Sizes, build and solve times, and gaps of each integer program.

    # gpt-20b on 64 A100: one block, all blocks, all stages; CBC and HiGHS
    python -m benchmarks.search.integer_programs
    python -m benchmarks.search.integer_programs --time-limit 60

One block: strategy pairs against placement pairs at tp 4, under half of the range of its memory.
All blocks of one GPU: every block by itself (flat) against the best mix of the catalogue, under the
same memory. All stages: numbers of blocks as integers (collapsed) against one column a stage. A gap
is relative to the best bound known of the case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np
from rich.console import Console

from benchmarks.search.formulations import Collapsed, Flat, StrategyPairs
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.memory.rank_memory import usable_bytes
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule, in_flight
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.layer_options.layer_front import layer_fronts
from parplan.planner.layer_options.layer_problem import LayerProblem, layer_problem
from parplan.planner.layer_options.layer_program import LayerProgram, evaluate
from parplan.planner.layer_options.mixes import make_mixes
from parplan.planner.master import Master
from parplan.planner.request import Constraints, SolverName
from parplan.planner.solver import Problem, Unsolved
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.report.text import print_table

HEADING = (
    "program",
    "solver",
    "variables",
    "rows",
    "build s",
    "solve s",
    "value ms",
    "over the best known",
)
Answer = tuple[float, bool] | None  # milliseconds, and whether they are proven
Solve = Callable[[SolverName, float], Answer]


@dataclass(frozen=True, slots=True)
class Case:
    """One program with its builder, and a lower bound of its value if another program gives one."""

    name: str
    build: Callable[[], tuple[Problem, Solve]]
    bound_ms: float = 0.0


def timed(case: Case, solver: SolverName, limit_s: float) -> tuple[str, ...]:
    """Return the row of a case in the table."""
    started = time.perf_counter()
    program, solve = case.build()
    built_s = time.perf_counter() - started
    started = time.perf_counter()
    try:
        answer = solve(solver, limit_s)
    except Unsolved:
        answer = None
    solved_s = time.perf_counter() - started
    variables, rows = program.size
    value, gap = "-", "no point in its time"
    if answer:
        value, gap = (
            f"{answer[0]:.3f}",
            "proven" if answer[1] else f"{100 * (answer[0] / case.bound_ms - 1):.2f} %, not proven",
        )
    return (
        case.name,
        solver.value,
        f"{variables:,}",
        f"{rows:,}",
        f"{built_s:.3f}",
        f"{solved_s:.3f}",
        value,
        gap,
    )


def block_cases(problem: LayerProblem) -> Iterator[Case]:
    """Yield cases of one block under half of the memory range on its front."""
    sizes = [picked.memory_bytes(1) for picked in evaluate(problem, layer_fronts(problem)[0])]
    budget = (max(sizes) + min(sizes)) / 2

    def of(
        make: Callable[[LayerProblem], LayerProgram | StrategyPairs],
    ) -> Callable[[], tuple[Problem, Solve]]:
        def build() -> tuple[Problem, Solve]:
            layer = make(problem)

            def solve(solver: SolverName, _: float) -> Answer:
                solution = layer.fastest(budget, solver)
                return solution and (solution.time_s * 1e3, solution.proven)

            return layer.program, solve

        return build

    yield Case("one block, strategy pairs", of(StrategyPairs))
    yield Case("one block, placement pairs", of(LayerProgram))


def flat_cases(table: MixTable, layout: ParallelLayout) -> Iterator[Case]:
    """Yield cases of all blocks on one GPU.

    Saved tensors and workspace have half of their range. The mix is computed without a program.
    """
    price_cache, copies = table.price_cache, table.price_cache.model.num_layers
    problem = layer_problem(
        price_cache.graph(layout.micro_batch_size).block,
        layout.sharding,
        price_cache.machine,
        price_cache.training,
    )
    states = evaluate(problem, layer_fronts(problem)[0][:1])[0].state_bytes
    started = time.perf_counter()
    mixes = make_mixes(table.options(layout), copies, 1)
    memory, times_ms = (
        mixes.saved_bytes + mixes.workspace_bytes,
        mixes.counts @ np.array([o.time_s * 1e3 for o in mixes.options]),
    )
    budget = (memory.max() + memory.min()) / 2
    best_ms = float(times_ms[memory <= budget].min())
    mixed_s = time.perf_counter() - started
    click.echo(
        f"  {copies} blocks, best of {len(times_ms):,} mixes of {len(mixes.options)} "
        f"options: {best_ms:.3f} ms in {mixed_s:.3f} s"
    )

    def build() -> tuple[Problem, Solve]:
        flat = Flat(problem, copies, 1.0)

        def solve(solver: SolverName, limit_s: float) -> Answer:
            solution = flat.fastest(budget + copies * states, solver, limit_s)
            return solution and (solution.objective / 1e3, solution.proven)

        return flat.program, solve

    yield Case(f"{copies} blocks, flat (mix: {best_ms:.3f})", build, best_ms)


def stage_cases(table: MixTable, layout: ParallelLayout, limit_bytes: float) -> Iterator[Case]:
    """Yield cases of all stages of a pipeline under a limit that makes most of them recompute."""
    price_cache = table.price_cache
    num_layers = price_cache.model.num_layers
    pp = layout.mesh.pp
    usable = usable_bytes(limit_bytes, layout.mesh, price_cache)
    stashes = [in_flight(layout.schedule, rank, pp, layout.num_micro_batches) for rank in range(pp)]
    options = table.options(layout)
    state = price_cache.states(LayerKind.BLOCK, layout.mesh, layout.sharding, 1).states.total
    room = [usable - max(option.workspace_bytes for option in options)] * pp

    def collapsed() -> tuple[Problem, Solve]:
        made = Collapsed(layout, options, num_layers, stashes, room, state)

        def solve(solver: SolverName, limit_s: float) -> Answer:
            solution = made.fastest(solver, limit_s)
            return solution and (solution.objective / 1e3, solution.proven)

        return made.program, solve

    def columns() -> tuple[Problem, Solve]:
        by_rank = [
            [
                c
                for count in block_counts(rank, layout, num_layers)
                for c in RankColumns(rank, layout, table).fastest(count, limit_bytes)
            ]
            for rank in range(pp)
        ]
        master = Master(layout, by_rank, num_layers)

        def solve(solver: SolverName, limit_s: float) -> Answer:
            choice = master.fastest(solver, limit_s)
            return choice and (choice.step_s * 1e3, choice.proven)

        return master.problem, solve

    yield Case(f"{pp} stages, collapsed", collapsed, _continuous_ms(layout, options, num_layers))
    yield Case(f"{pp} stages, columns", columns)


def _continuous_ms(layout: ParallelLayout, options: tuple[object, ...], num_layers: int) -> float:
    """Return a lower bound of the collapsed program in milliseconds.

    Every block runs on the fastest option, and stages are equal.
    """
    fastest_s = min(option.time_s for option in options)  # type: ignore[attr-defined]
    return 1e3 * (
        (layout.num_micro_batches - 1) * fastest_s * num_layers / layout.mesh.pp
        + num_layers * fastest_s
    )


@click.command()
@click.option("--model", default="gpt-20b", show_default=True)
@click.option("--gpus", default=64, show_default=True)
@click.option("--time-limit", default=30.0, show_default=True, help="Seconds of one solve.")
def main(model: str, gpus: int, time_limit: float) -> None:
    """Build and solve every formulation with both solvers."""
    problem = request_of(TargetOptions(model=model, gpus=gpus, gpu="a100-80gb"))
    price_cache = PriceCache(problem.model, problem.training, machine_for(problem.cluster))
    table = MixTable(price_cache, Constraints(zero=(1,)))

    def layout(pp: int, tp: int, micro_batch_size: int) -> ParallelLayout:
        dp = gpus // pp // tp
        return ParallelLayout(
            mesh=Mesh(pp=pp, dp=dp, tp=tp),
            schedule=Schedule.ONE_F_ONE_B,
            virtual_stages=1,
            micro_batch_size=micro_batch_size,
            num_micro_batches=problem.training.global_batch_size // dp // micro_batch_size,
            sequence_parallel=False,
        )

    tensor = layout(1, 4, 4)
    block = layer_problem(
        price_cache.graph(4).block, tensor.sharding, price_cache.machine, price_cache.training
    )
    cases = [
        *block_cases(block),
        *flat_cases(table, layout(1, 1, 4)),
        *stage_cases(table, layout(8, 1, 2), 50 * 2**30),
    ]
    rows = [timed(case, solver, time_limit) for case in cases for solver in SolverName]
    print_table(
        Console(width=140), HEADING, rows, left=("program", "solver", "over the best known")
    )


if __name__ == "__main__":
    main()
