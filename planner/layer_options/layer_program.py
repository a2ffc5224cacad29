"""The integer program of one layer: a strategy for every operator (EQUATIONS I2).

    min  time,  or  min  memory,   with   memory = state + stashes saved + workspace

    (C1) sum_k s_ik = 1                             for each operator i
    (C2) sum_b e_uv(a, b) = sum_{k: out = a} s_uk   for each link (u, v), placement a of its maker
    (C3) sum_a e_uv(a, b) = sum_{k: in = b} s_vk    for each link (u, v), placement b of its reader
    (C4) workspace >= remade + gradients_i - freed_i   for each operator i
    (C5) memory <= budget   or   time <= slowest

The edges e are continuous: the equalities (C2) and (C3) make them 0 or 1. Workspace is the largest
need of the backward pass of one operator: the recomputed bytes (`remade`, saved without recompute
less saved with it) and its gradients, less the saved bytes that later operators have freed
(costmodels/layers/recompute.py). The program is in microseconds and MiB, because the tolerances of
CBC are absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from parplan.planner.layer_options.layer_problem import (
    BEFORE,
    InputPlacement,
    LayerProblem,
    OutputPlacement,
    StrategyCost,
    StrategyOption,
    TensorLink,
)
from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, chosen, weighted
from parplan.profiles.units import MIB, US_PER_S

Terms = list[tuple[Any, float]]


@dataclass(frozen=True, slots=True)
class PickedStrategies:
    """An option for every operator, their total cost, and whether it is proven to be the least.

    launched_s   time in which no pass is faster than the host launches it
                 (costmodels/layers/layer_price.py), which the program leaves out
    """

    options: tuple[StrategyOption, ...]
    cost: StrategyCost
    workspace_bytes: float
    launched_s: float
    proven: bool = True

    def memory_bytes(self, stashes: float) -> float:
        """Bytes of states, of `stashes` micro-batches of saved tensors, and of workspace."""
        return self.cost.state_bytes + stashes * self.cost.saved_bytes + self.workspace_bytes


def evaluate(
    problem: LayerProblem, options: tuple[StrategyOption, ...], *, proven: bool = True
) -> PickedStrategies:
    """Adds up the price of one option for every operator."""
    # by operator: its cost and those of the tensors that it reads
    parts = [[option.cost] for option in options]
    for link in problem.links:
        parts[min(link.reader, len(options) - 1)].append(link.cells[_sides(problem, link, options)])
    whole = [sum(part.whole_bytes for part in costs) for costs in parts]
    total = StrategyCost(
        *(
            sum(getattr(part, name) for costs in parts for part in costs)
            for name in ("time_s", "state_bytes", "saved_bytes", "whole_bytes")
        )
    )
    widest = max(option.gradient_bytes - sum(whole[i + 1 :]) for i, option in enumerate(options))
    remade = max(0.0, total.whole_bytes - total.saved_bytes)
    return PickedStrategies(
        options,
        total,
        remade + widest + problem.workspace_bytes,
        _launched_s(problem, options, parts),
        proven,
    )


def _launched_s(
    problem: LayerProblem, options: tuple[StrategyOption, ...], parts: list[list[StrategyCost]]
) -> float:
    """Seconds of the three passes, none faster than the host launches its kernels."""
    forward = [
        (sum(part.forward_s for part in costs), 1 + any(part.sent_forward for part in costs))
        for costs in parts
    ]
    recomputes = [pair for pair, option in zip(forward, options, strict=True) if option.recomputed]
    backward_s = sum(part.backward_s for costs in parts for part in costs)
    launches = sum(
        1 + product + any(part.sent_backward for part in costs)
        for costs, product in zip(parts, problem.products, strict=True)
    )
    ahead_s = sum(
        max(sum(s for s, _ in pairs), problem.host_forward_s * sum(n for _, n in pairs))
        for pairs in (forward, recomputes)
    )
    return ahead_s + max(backward_s, problem.host_backward_s * launches)


def _sides(
    problem: LayerProblem, link: TensorLink, options: tuple[StrategyOption, ...]
) -> tuple[OutputPlacement, InputPlacement]:
    left = problem.enters if link.maker == BEFORE else options[link.maker].output
    if link.reader == len(options):
        assert problem.leaves is not None
        return left, problem.leaves
    return left, options[link.reader].inputs[problem.incoming(link.reader).index(link)]


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
            {option: self.program.binary(f"s{label}_{i}_{k}") for k, option in enumerate(options)}
            for i, options in enumerate(problem.options)
        ]
        self.priced: list[tuple[int, Any, StrategyCost]] = [
            (i, variable, option.cost)
            for i, picks in enumerate(self.picks)
            for option, variable in picks.items()
        ]
        for i, picks in enumerate(self.picks):
            self.program.require(
                weighted((s, 1.0) for s in picks.values()) == 1, f"C1_one{label}_{i}"
            )
        for index, link in enumerate(problem.links):
            self._link(index, link)
        self.workspace = self.program.continuous(f"workspace{label}")
        self._bound_workspace()

    def _link(self, index: int, link: TensorLink) -> None:
        """Adds the edge variables of a link and its rows (C2) and (C3)."""
        cells = {
            pair: self.program.continuous(f"e{self.label}_{index}_{c}")
            for c, pair in enumerate(link.cells)
        }
        self.priced += [(link.reader, e, link.cells[pair]) for pair, e in cells.items()]
        for side, label in ((0, "C2"), (1, "C3")):
            for n, placement in enumerate(dict.fromkeys(pair[side] for pair in cells)):
                edges = [(e, 1.0) for pair, e in cells.items() if pair[side] == placement]
                self.program.require(
                    weighted([*edges, *self._side(link, side, placement)])
                    == self._fixed(link, side),
                    f"{label}{self.label}_{index}_{n}",
                )

    def _side(
        self, link: TensorLink, side: int, placement: OutputPlacement | InputPlacement
    ) -> Terms:
        """Returns the strategies of the maker or reader with that placement, as negative terms."""
        operator = (link.maker, link.reader)[side]
        if operator in (BEFORE, len(self.picks)):
            return []
        position = self.problem.incoming(operator).index(link) if side else 0
        placements = (
            (option.inputs[position] if side else option.output, s)
            for option, s in self.picks[operator].items()
        )
        return [(s, -1.0) for option_placement, s in placements if option_placement == placement]

    def _fixed(self, link: TensorLink, side: int) -> float:
        return 1.0 if (link.maker, link.reader)[side] in (BEFORE, len(self.picks)) else 0.0

    def _bound_workspace(self) -> None:
        constant = self.problem.workspace_bytes / MIB
        remade = [(v, (cost.whole_bytes - cost.saved_bytes) / MIB) for _, v, cost in self.priced]
        for i, picks in enumerate(self.picks):
            gradients = [(s, option.gradient_bytes / MIB) for option, s in picks.items()]
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
        return evaluate(self.problem, tuple(chosen(picks) for picks in self.picks))
