"""Other integer programs of the same choices, for comparison with the planner's.

strategy pairs   one layer, an edge variable for every pair of strategies of two neighbours (Alpa,
                 arXiv 2201.12023, 4.2)
flat             every layer by itself, all of them under one memory limit
collapsed        the number of layers of each stage on each option, as integers (EQUATIONS I4
                 rejects this form)
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.layer_problem import BEFORE, LayerProblem
from parplan.planner.layer_options.layer_program import LayerProgram, PickedStrategies
from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, Solution, weighted
from parplan.profiles.units import MIB, US_PER_S


class StrategyPairs:
    """One layer with a variable for every pair of strategies of neighbours.

    The variables are s_ik as in planner/layer_options/layer_program.py, and e_uv(k, l) for every
    two strategies, with the same marginals.
    """

    def __init__(self, problem: LayerProblem, stashes: float = 1.0) -> None:
        self.program = Problem("pairs")
        self.layer = _WithoutLinks(problem, stashes, self.program)
        for index, link in enumerate(problem.links):
            self._link(problem, index, link)
        self.layer.bound_workspace()

    def _link(self, problem, index, link) -> None:
        one = [None]
        makers = self.layer.picks[link.maker] if link.maker != BEFORE else one
        readers = self.layer.picks[link.reader] if link.reader < len(problem.options) else one
        costs = link.costs.listed()
        edges = {}
        for k, left in enumerate(link.left.tolist()):
            for n, needed in enumerate(link.needed.tolist()):
                edges[k, n] = self.program.continuous(f"e_{index}_{k}_{n}")
                cost = costs[left * len(link.needs) + needed]
                self.layer.priced.append((link.reader, edges[k, n], cost))
        for k, s in enumerate(makers):
            total = weighted((edges[k, n], 1.0) for n in range(len(readers)))
            self.program.require(total == (1.0 if s is None else s), f"out_{index}_{k}")
        for n, s in enumerate(readers):
            total = weighted((edges[k, n], 1.0) for k in range(len(makers)))
            self.program.require(total == (1.0 if s is None else s), f"in_{index}_{n}")

    def fastest(self, budget_bytes: float, solver: SolverName) -> PickedStrategies | None:
        return self.layer.fastest(budget_bytes, solver)

    def leanest(self, slowest_s: float, solver: SolverName) -> PickedStrategies | None:
        return self.layer.leanest(slowest_s, solver)


class _WithoutLinks(LayerProgram):
    """The strategies alone; links and workspace are added from outside."""

    def _link(self, index, link) -> None:
        pass

    def _bound_workspace(self) -> None:
        pass

    def bound_workspace(self) -> None:
        super()._bound_workspace()


class Flat:
    """`copies` layers, each with its own variables, under one memory limit.

    The workspace is that of the widest layer.
    """

    def __init__(self, problem: LayerProblem, copies: int, stashes: float) -> None:
        self.program = Problem("flat")
        self.layers = [
            LayerProgram(problem, stashes, self.program, f"_{copy}") for copy in range(copies)
        ]

    def fastest(
        self, budget_bytes: float, solver: SolverName, time_limit_s: float
    ) -> Solution | None:
        """Return the fastest solution in microseconds of all layers."""
        self.program.minimize(
            weighted((v, c.time_s * US_PER_S) for layer in self.layers for _, v, c in layer.priced)
        )
        widest = self.program.continuous("widest")
        held = [term for layer in self.layers for term in layer.held_mib]
        for index, layer in enumerate(self.layers):
            self.program.require(widest >= layer.workspace, f"widest_{index}")
        self.program.require(weighted([*held, (widest, 1.0)]) <= budget_bytes / MIB, "memory")
        return self.program.solve(solver, time_limit_s)


class Collapsed:
    """Integer variables n_sc: layers of stage s on option c.

    room_bytes  by stage, bytes for saved tensors and states beside workspaces
    """

    def __init__(
        self,
        layout: ParallelLayout,
        options: Sequence[LayerOption],
        num_layers: int,
        stashes: Sequence[int],
        room_bytes: Sequence[float],
        block_bytes: float,
    ) -> None:
        self.layout, self.program = layout, Problem("collapsed")
        self.counts = [
            [self.program.integer(f"n_{s}_{c}", num_layers) for c in range(len(options))]
            for s in range(layout.mesh.pp)
        ]
        self.pace, self.total = self.program.continuous("Z"), []
        for s, row in enumerate(self.counts):
            times = [(n, option.time_s * US_PER_S) for n, option in zip(row, options, strict=True)]
            self.total += times
            self.program.require(weighted(times) <= self.pace, f"pace_{s}")
            held = [
                (n, (block_bytes + stashes[s] * o.saved_bytes) / MIB)
                for n, o in zip(row, options, strict=True)
            ]
            self.program.require(weighted(held) <= room_bytes[s] / MIB, f"memory_{s}")
        self.program.require(
            weighted((n, 1.0) for row in self.counts for n in row) == num_layers, "blocks"
        )

    def fastest(self, solver: SolverName, time_limit_s: float) -> Solution | None:
        self.program.minimize(
            weighted([(self.pace, self.layout.num_micro_batches - 1.0), *self.total])
        )
        return self.program.solve(solver, time_limit_s)
