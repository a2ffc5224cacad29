"""The integer program of one layer: a strategy for every operator (EQUATIONS I2).

    min  time,  or  min  memory,   with   memory = state + stashes saved + workspace

    (C1) sum_k s_ik = 1                             for each operator i
    (C2) sum_b e_uv(a, b) = sum_{k: out = a} s_uk   for each link (u, v), placement a of its maker
    (C3) sum_a e_uv(a, b) = sum_{k: in = b} s_vk    for each link (u, v), placement b of its reader
    (C4) workspace >= remade + gradients_i - freed_i   for each operator i
    (C5) memory <= budget   or   time <= slowest   or   saved and workspace <= those of a layer

The edges e are continuous: the equalities (C2) and (C3) make them 0 or 1. Workspace is the largest
need of the backward pass of one operator: the recomputed bytes (`remade`, saved without recompute
less saved with it) and its gradients, less the saved bytes that later operators have freed
(costmodels/layers/recompute.py). The program is in microseconds and MiB, because the tolerances of
CBC are absolute.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parplan.planner.dominance import Array, Ints, Mask
from parplan.planner.layer_options.layer_problem import (
    BEFORE,
    LayerProblem,
    StrategyCosts,
    StrategyOption,
    TensorLink,
)
from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, chosen, weighted
from parplan.profiles.units import MIB, US_PER_S

Terms = list[tuple[Any, float]]
ROUNDING = 1e-6  # MiB, as large as the feasibility tolerance of CBC


@dataclass(frozen=True, slots=True)
class PickedStrategies:
    """An option for every operator, their total cost, and whether it is proven to be the least.

    The seconds and bytes are those of StrategyCosts.

    launched_s   time in which no pass is faster than the host launches it
                 (costmodels/layers/layer_price.py), which the program leaves out
    """

    options: tuple[StrategyOption, ...]
    time_s: float
    state_bytes: float
    saved_bytes: float
    workspace_bytes: float
    launched_s: float
    proven: bool = True

    def memory_bytes(self, stashes: float) -> float:
        """Bytes of states, of `stashes` micro-batches of saved tensors, and of workspace."""
        return self.state_bytes + stashes * self.saved_bytes + self.workspace_bytes


def evaluate(problem: LayerProblem, chosen: Ints) -> list[PickedStrategies]:
    """Adds up the prices of layers, given as a row of the number of each operator's option."""
    # by operator: its costs and those of the tensors that it reads
    last = len(problem.options) - 1
    parts = [[costs.at(chosen[:, i])] for i, costs in enumerate(problem.costs)]
    for link in problem.links:
        parts[min(link.reader, last)].append(link.costs.at(link.sides(chosen)))

    def total(name: str) -> Array:
        values: Array = sum(getattr(part, name) for costs in parts for part in costs)
        return values

    whole_bytes = np.array([sum(part.whole_bytes for part in costs) for costs in parts])
    freed_bytes = np.cumsum(whole_bytes[::-1], axis=0)[::-1] - whole_bytes
    widest_bytes = np.max(
        [costs[0].gradient_bytes - freed for costs, freed in zip(parts, freed_bytes, strict=True)],
        axis=0,
    )
    saved_bytes = total("saved_bytes")
    remade_bytes = np.maximum(0.0, whole_bytes.sum(axis=0) - saved_bytes)
    sums = zip(
        total("time_s").tolist(),
        total("state_bytes").tolist(),
        saved_bytes.tolist(),
        (remade_bytes + widest_bytes + problem.workspace_bytes).tolist(),
        _launched_s(problem, chosen, parts).tolist(),
        strict=True,
    )
    return [
        PickedStrategies(
            tuple(options[k] for options, k in zip(problem.options, row, strict=True)), *values
        )
        for row, values in zip(chosen.tolist(), sums, strict=True)
    ]


def _launched_s(
    problem: LayerProblem, chosen: Ints, parts: Sequence[Sequence[StrategyCosts]]
) -> Array:
    """Seconds of the three passes, none faster than the host launches its kernels."""
    # by operator and layer
    forward_s = np.array([sum(part.forward_s for part in costs) for costs in parts])
    forwards = np.array(
        [
            own + _any(part.sent_forward for part in costs)
            for costs, own in zip(parts, problem.launches, strict=True)
        ]
    )
    again = np.array(
        [
            np.array([option.recomputed for option in options])[chosen[:, i]]
            for i, options in enumerate(problem.options)
        ]
    )
    backward_s = sum(part.backward_s for costs in parts for part in costs)
    launches = sum(
        own * (1 + product) + _any(part.sent_backward for part in costs)
        for costs, own, product in zip(parts, problem.launches, problem.products, strict=True)
    )
    ahead_s = np.maximum(forward_s.sum(axis=0), problem.host_forward_s * forwards.sum(axis=0))
    again_s = np.maximum(
        np.where(again, forward_s, 0.0).sum(axis=0),
        problem.host_forward_s * np.where(again, forwards, 0).sum(axis=0),
    )
    all_s: Array = ahead_s + again_s + np.maximum(backward_s, problem.host_backward_s * launches)
    return all_s


def _any(flags: Iterable[Mask]) -> Mask:
    return functools.reduce(np.logical_or, flags)


class LayerProgram:
    """The program of one problem; `stashes` micro-batches are in flight.

    Several layers can be parts of one `program`, each with its own `label` in the names of its
    variables and rows. `priced` has, for each variable with a cost, the operator that saves the
    bytes.
    """

    def __init__(
        self,
        problem: LayerProblem,
        stashes: float = 1.0,
        program: Problem | None = None,
        label: str = "",
    ) -> None:
        self.problem = problem
        self.stashes = stashes
        self.label = label
        self.program = program or Problem("layer")
        self.picks = [
            [self.program.binary(f"s{label}_{i}_{k}") for k in range(len(options))]
            for i, options in enumerate(problem.options)
        ]
        self.costs = [costs.listed() for costs in problem.costs]
        self.priced: list[tuple[int, Any, StrategyCosts]] = [
            (i, variable, cost)
            for i, (picks, costs) in enumerate(zip(self.picks, self.costs, strict=True))
            for variable, cost in zip(picks, costs, strict=True)
        ]
        for i, picks in enumerate(self.picks):
            self.program.require(weighted((s, 1.0) for s in picks) == 1, f"C1_one{label}_{i}")
        for index, link in enumerate(problem.links):
            self._link(index, link)
        self.workspace = self.program.continuous(f"workspace{label}")
        self._bound_workspace()

    def _link(self, index: int, link: TensorLink) -> None:
        """Adds the edge variables of a link and its rows (C2) and (C3)."""
        shape = len(link.lefts), len(link.needs)
        edges = [
            self.program.continuous(f"e{self.label}_{index}_{c}") for c in range(math.prod(shape))
        ]
        self.priced += [
            (link.reader, e, cost) for e, cost in zip(edges, link.costs.listed(), strict=True)
        ]
        numbers = np.arange(len(edges)).reshape(shape)
        sides = (
            ("C2", numbers, link.maker, link.left),
            ("C3", numbers.T, link.reader, link.needed),
        )
        for label, table, operator, placed in sides:
            fixed = operator in (BEFORE, len(self.picks))
            picks = [] if fixed else list(zip(self.picks[operator], placed.tolist(), strict=True))
            for n, row in enumerate(table.tolist()):
                self.program.require(
                    weighted(
                        [
                            *((edges[c], 1.0) for c in row),
                            *((s, -1.0) for s, placement in picks if placement == n),
                        ]
                    )
                    == (1.0 if fixed else 0.0),
                    f"{label}{self.label}_{index}_{n}",
                )

    def _bound_workspace(self) -> None:
        constant = self.problem.workspace_bytes / MIB
        remade = [(v, (cost.whole_bytes - cost.saved_bytes) / MIB) for _, v, cost in self.priced]
        for i, picks in enumerate(self.picks):
            gradients = [
                (s, cost.gradient_bytes / MIB) for s, cost in zip(picks, self.costs[i], strict=True)
            ]
            freed = [
                (v, -cost.whole_bytes / MIB) for operator, v, cost in self.priced if operator > i
            ]
            self.program.require(
                weighted([*gradients, *freed]) + constant <= self.workspace,
                f"C4_workspace{self.label}_{i}",
            )
            self.program.require(
                weighted([*remade, *gradients, *freed]) + constant <= self.workspace,
                f"C4_again{self.label}_{i}",
            )

    @property
    def time_us(self) -> Any:
        return weighted((v, cost.time_s * US_PER_S) for _, v, cost in self.priced)

    @property
    def memory_mib(self) -> Any:
        return weighted([*self.held_mib, (self.workspace, 1.0)])

    @property
    def held_mib(self) -> Terms:
        """Returns the states and saved tensors, without the workspace."""
        return [
            (v, (cost.state_bytes + self.stashes * cost.saved_bytes) / MIB)
            for _, v, cost in self.priced
        ]

    def fastest(
        self, budget_bytes: float, solver: SolverName, time_limit_s: float | None = None
    ) -> PickedStrategies | None:
        """Returns the fastest layer within `budget_bytes`, or None."""
        return self._solve(
            lambda: self.time_us, self.memory_mib <= budget_bytes / MIB, solver, time_limit_s
        )

    def leanest(
        self, slowest_s: float, solver: SolverName, time_limit_s: float | None = None
    ) -> PickedStrategies | None:
        """Returns the layer of least memory that takes at most `slowest_s`, or None."""
        return self._solve(
            lambda: self.memory_mib, self.time_us <= slowest_s * US_PER_S, solver, time_limit_s
        )

    def fastest_beside(
        self,
        saved_bytes: float,
        workspace_bytes: float,
        solver: SolverName,
        time_limit_s: float | None = None,
    ) -> PickedStrategies | None:
        """Returns the fastest layer that neither saves more nor has a larger workspace, or None."""
        saved = [(v, cost.saved_bytes / MIB) for _, v, cost in self.priced]
        rooms = (saved_bytes / MIB + ROUNDING, workspace_bytes / MIB + ROUNDING)
        self.program.require(weighted([(self.workspace, 1.0)]) <= rooms[1], "C5_workspace")
        return self._solve(lambda: self.time_us, weighted(saved) <= rooms[0], solver, time_limit_s)

    def _solve(
        self,
        objective: Callable[[], Any],
        bound: Any,
        solver: SolverName,
        time_limit_s: float | None,
    ) -> PickedStrategies | None:
        if not all(self.picks):
            return None
        self.program.minimize(objective())
        self.program.require(bound, "C5_bound")
        solution = self.program.solve(solver, time_limit_s)
        if solution is None:
            return None
        return replace(self.picked(), proven=solution.proven)

    def picked(self) -> PickedStrategies:
        """Returns the choice of the solved program."""
        row = [chosen(dict(enumerate(picks))) for picks in self.picks]
        (picked,) = evaluate(self.problem, np.array([row]))
        return picked
