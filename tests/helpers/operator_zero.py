"""The ZeRO stage of an operator as one more choice of its strategy (EQUATIONS I2).

Every option of an operator is there once for each stage. A stage adds seconds of data parallelism,
which no compute hides here, and decides the bytes of the states. Compute hides communication for
the layer as a whole, so that the search takes stages from `zero_ways` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.data_parallel import data_parallel_moves, exposed_moves
from parplan.costmodels.layers.layer_price import UNHIDING
from parplan.costmodels.layers.model_states import StateSharding, held_states, local_parameters
from parplan.costmodels.layers.operator_price import single_operator_sharding
from parplan.costmodels.operators.sharding import Splits
from parplan.planner.dominance import Ints
from parplan.planner.layer_options.layer_problem import (
    BEFORE,
    LayerProblem,
    StrategyCosts,
    StrategyOption,
)
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import LayerClass, LayerKind, Operator, layer_class
from parplan.profiles.models.spec import TrainingSpec


class OperatorZero:
    """Prices the ZeRO stages of operators of `layer` over the data-parallel axis of `mesh`.

    degrees              of the axes inside a stage
    num_micro_batches    of a step, over which its communication is spread
    """

    def __init__(
        self,
        layer: LayerClass,
        mesh: Mesh,
        degrees: tuple[int, ...],
        num_micro_batches: int,
        machine: Machine,
        training: TrainingSpec,
    ) -> None:
        self.layer = layer
        self.mesh = mesh
        self.degrees = degrees
        self.num_micro_batches = num_micro_batches
        self.machine = machine
        self.training = training

    def price(self, operator: Operator, splits: Splits, zero: int) -> tuple[float, int]:
        """Returns the seconds for each micro-batch and the state bytes of one operator."""
        sharding = single_operator_sharding(operator, splits, self.degrees)
        parameters = local_parameters(layer_class(LayerKind.BLOCK, (operator,)), sharding)
        states = StateSharding(zero, self.mesh.dp)
        moves = data_parallel_moves(parameters, self.mesh, states, self.machine, self.training)
        time = exposed_moves([(zero, moves)], UNHIDING, self.machine, self.training)
        held = held_states(parameters.each, states, self.training)
        return time.per_micro_batch_s + time.per_step_s / self.num_micro_batches, held.total

    def added_to(self, problem: LayerProblem, stages: Sequence[int]) -> LayerProblem:
        """Returns the problem whose operators with parameters have any of `stages`."""
        copies = [
            len(stages) if self.layer.operator(name).parameters else 1 for name in problem.names
        ]

        def repeated(numbers: Ints, operator: int) -> Ints:
            outside = operator in (BEFORE, len(copies))
            return numbers if outside else np.repeat(numbers, copies[operator])

        staged = [self._staged(problem, number, stages) for number in range(len(copies))]
        return replace(
            problem,
            options=tuple(options for options, _ in staged),
            costs=tuple(costs for _, costs in staged),
            links=tuple(
                replace(
                    link,
                    left=repeated(link.left, link.maker),
                    needed=repeated(link.needed, link.reader),
                )
                for link in problem.links
            ),
        )

    def _staged(
        self, problem: LayerProblem, number: int, stages: Sequence[int]
    ) -> tuple[tuple[StrategyOption, ...], StrategyCosts]:
        """Returns the options of one operator at every stage, and their costs."""
        options, costs = problem.options[number], problem.costs[number]
        operator = self.layer.operator(problem.names[number])
        if not operator.parameters:
            return options, costs
        prices = [
            self.price(operator, option.splits, zero) for option in options for zero in stages
        ]
        seconds, held = np.array(prices, np.float64).reshape(-1, 2).T
        costs = costs.at(np.repeat(np.arange(len(options)), len(stages)))
        return (
            tuple(replace(option, zero=zero) for option in options for zero in stages),
            replace(costs, time_s=costs.time_s + seconds, state_bytes=held),
        )


def with_states_held(problem: LayerProblem, stashes: float) -> LayerProblem:
    """Returns the problem whose saved bytes are all that lasts, for a walk over its operators.

    They are those of `stashes` micro-batches and the states.
    """

    def held(costs: StrategyCosts) -> StrategyCosts:
        return replace(costs, saved_bytes=costs.state_bytes + stashes * costs.saved_bytes)

    return replace(
        problem,
        costs=tuple(map(held, problem.costs)),
        links=tuple(replace(link, costs=held(link.costs)) for link in problem.links),
    )
