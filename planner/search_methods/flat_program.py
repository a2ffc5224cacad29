"""The flat integer program: all ranks and ways of a layout in one program.

    min (1 - a / M) T + (a / M) sum_r C_r                    a = 1 / virtual stages

    (C1) C_r = e_r + sum_w c_w n_rw <= T                     for each rank r
    (C2) sum_w m_rw n_rw + b_r <= limit                      b_r >= beside_rw u_rw
    (C3) n_rw <= L u_rw                                      u_rw is 1 where a way is in use
    (C4) sum_rw n_rw = L, and 1 <= sum_w n_rw, or the blocks of equal ranks

n_rw is the number of blocks of rank r that run in way w. Seconds count in microseconds and bytes in
MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from parplan.planner.deadline import cpu_s
from parplan.planner.request import SolverName
from parplan.planner.search_methods.costs_by_way import LayoutCosts, promising
from parplan.planner.search_methods.ledger import BudgetSpent, Ledger
from parplan.planner.search_methods.method_space import Point
from parplan.planner.solver import Problem, Unsolved, weighted
from parplan.planner.stage_columns.block_counts import block_counts
from parplan.profiles.units import MIB, US_PER_S

LEAST_S = 0.05  # of a solve


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """A program with its variables n_rw, by rank and way."""

    program: Problem
    numbers: list[list[Any]]


def flat_program(ledger: Ledger, draw: Random) -> None:
    """Solves the program of every promising layout, with each ZeRO stage for both ends."""
    for costs in promising(ledger):
        for zero in ledger.space.zeros(costs.layout):
            ledger.check()
            flat = build(costs, (zero, zero))
            left_s = max(LEAST_S, ledger.ends_s - cpu_s())
            try:
                solution = flat.program.solve(SolverName.CBC, left_s)
            except Unsolved:
                raise BudgetSpent from None
            if solution is not None:
                ranks = tuple(tuple(round(n.value()) for n in row) for row in flat.numbers)
                ledger.point_s(Point(costs.layout, (zero, zero), ranks))


def build(costs: LayoutCosts, ends: tuple[int, int]) -> FlatProgram:
    """Returns the program of one layout with the ZeRO stages of its ends."""
    layout, num_blocks = costs.layout, costs.space.num_blocks
    flat = FlatProgram(Problem("flat"), [])
    program, slowest = flat.program, flat.program.continuous("T")
    total = []
    for rank in range(layout.mesh.pp):
        row = [program.integer(f"n_{rank}_{way}", num_blocks) for way in range(len(costs.ways))]
        flat.numbers.append(row)
        priced = [(n, c * US_PER_S) for n, c in zip(row, costs.block_s(rank), strict=True)]
        total += priced
        ends_us = costs.ends_s(rank, ends) * US_PER_S
        program.require(weighted(priced) + ends_us <= slowest, f"C1_{rank}")
        _within_memory(flat, rank, costs, ends)
        blocks = weighted((n, 1.0) for n in row)
        if layout.equal_ranks or layout.mesh.pp == 1:
            program.require(blocks == next(block_counts(rank, layout, num_blocks)), f"C4_{rank}")
        else:
            program.require(blocks >= 1.0, f"C4_{rank}")
    every = weighted((n, 1.0) for row in flat.numbers for n in row)
    program.require(every == num_blocks, "C4_all")
    ramp = 1 / (layout.virtual_stages * layout.num_micro_batches)
    ramps = [(n, ramp * cost) for n, cost in total]
    program.minimize(weighted([(slowest, 1 - ramp), *ramps]))
    return flat


def _within_memory(flat: FlatProgram, rank: int, costs: LayoutCosts, ends: tuple[int, int]) -> None:
    program, held = flat.program, costs.rank_bytes(rank, ends)
    beside = program.continuous(f"b_{rank}")
    for way, number in enumerate(flat.numbers[rank]):
        used = program.binary(f"u_{rank}_{way}")
        program.require(number <= costs.space.num_blocks * used, f"C3_{rank}_{way}")
        program.require(beside >= float(held.beside[way]) / MIB * used, f"C2_{rank}_{way}")
    blocks = zip(flat.numbers[rank], held.block / MIB, strict=True)
    limit = costs.limit_bytes(rank) / MIB
    program.require(weighted([*blocks, (beside, 1.0)]) <= limit, f"C2_{rank}")
