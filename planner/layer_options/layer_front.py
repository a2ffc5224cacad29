"""The fastest and leanest layers over the strategies of their operators (EQUATIONS I3).

The front of (time, saved bytes) is found by a walk over the operators in topological order. For
each placement of the open tensors, which some later operator reads, the walk keeps the labels that
no other label beats in both values. A label that is beaten there cannot be part of a layer on the
front. The walk is exact; the tests compare it with the integer program of layer_program.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from parplan.planner.dominance import Array, Ints, undominated_rows
from parplan.planner.layer_options.layer_problem import (
    BEFORE,
    InputPlacement,
    LayerProblem,
    OutputPlacement,
    StrategyOption,
    TensorLink,
)

Frontier = tuple[int, ...]  # by maker of an open tensor, the number of its output placement


@dataclass(frozen=True, slots=True)
class _Labels:
    """Points by increasing time, each with its predecessor (frontier, point) and its option."""

    time_s: Array
    saved_bytes: Array
    frontier: Ints
    point: Ints
    option: Ints


Layers = dict[Frontier, _Labels]


class _Table:
    """A layer problem by numbers, with the tensor that leaves the layer as a last operator.

    outputs   by operator and option, the number of the output placement
    cells     by reader, link, placement of the maker and option of the reader, seconds and saved
              bytes
    """

    def __init__(self, problem: LayerProblem) -> None:
        lefts = {BEFORE: [problem.enters]}
        lefts |= {
            i: list(dict.fromkeys(option.output for option in options))
            for i, options in enumerate(problem.options)
        }
        self.outputs = [
            [lefts[i].index(option.output) for option in options]
            for i, options in enumerate(problem.options)
        ] + [[0]]
        self.makers = [
            [link.maker for link in problem.incoming(i)] for i in range(len(problem.options) + 1)
        ]
        self.costs = [
            [(o.cost.time_s, o.cost.saved_bytes) for o in options] for options in problem.options
        ] + [[(0.0, 0.0)]]
        self.cells: list[list[list[list[tuple[float, float]]]]] = []
        for i in range(len(problem.options) + 1):
            links = problem.incoming(i)
            inputs = (
                [option.inputs for option in problem.options[i]]
                if i < len(problem.options)
                else [(problem.leaves,)]
            )
            self.cells.append(
                [
                    [
                        [_time_and_saved(link, left, tensors[position]) for tensors in inputs]
                        for left in lefts[link.maker]
                    ]
                    for position, link in enumerate(links)
                ]
            )

    def still_open(self, i: int, open_makers: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the makers whose output some operator after the i-th reads."""
        needed = {maker for makers in self.makers[i + 1 :] for maker in makers}
        return tuple(maker for maker in (*open_makers, i) if maker in needed)


def _time_and_saved(
    link: TensorLink, left: OutputPlacement, input_tensor: InputPlacement | None
) -> tuple[float, float]:
    assert input_tensor is not None, "a link has a reader"
    cell = link.cells[left, input_tensor]
    return cell.time_s, cell.saved_bytes


def least_time_s(problem: LayerProblem) -> float | None:
    """Returns the seconds of the fastest layer, whatever it saves, or None without a solution."""
    table = _Table(problem)
    times: dict[Frontier, float] = {(0,): 0.0}
    open_makers: tuple[int, ...] = (BEFORE,)
    for i in range(len(problem.options) + 1):
        still = table.still_open(i, open_makers)
        grown: dict[Frontier, float] = {}
        for frontier, time_s in times.items():
            where = dict(zip(open_makers, frontier, strict=True))
            rows = [
                cells[where[maker]]
                for cells, maker in zip(table.cells[i], table.makers[i], strict=True)
            ]
            for k, output in enumerate(table.outputs[i]):
                where[i] = output
                after = tuple(where[maker] for maker in still)
                sum_s = time_s + table.costs[i][k][0] + sum(row[k][0] for row in rows)
                if sum_s < grown.get(after, math.inf):
                    grown[after] = sum_s
        times, open_makers = grown, still
    return min(times.values(), default=None)


def layer_front(problem: LayerProblem) -> list[tuple[StrategyOption, ...]]:
    """Returns the options of each point of the front, fastest first; empty without a solution."""
    table = _Table(problem)
    zero = np.zeros(1)
    none = np.zeros(1, np.int64)
    labels: Layers = {(0,): _Labels(zero, zero, none, none, none)}
    open_makers: tuple[int, ...] = (BEFORE,)
    history: list[Layers] = []
    for i in range(len(problem.options)):
        still = table.still_open(i, open_makers)
        labels = _step(table, i, labels, open_makers, still)
        history.append(labels)
        open_makers = still
    ends = _ended(table, labels, open_makers)
    if ends is None:
        return []
    return [
        _traced(problem, history, int(frontier), int(point))
        for frontier, point in zip(ends.frontier, ends.point, strict=True)
    ]


def _step(
    table: _Table, i: int, labels: Layers, open_makers: tuple[int, ...], still: tuple[int, ...]
) -> Layers:
    """Returns the labels after operator i, by the outputs of `still`, which are read later."""
    grown: dict[Frontier, list[_Labels]] = {}
    for number, (frontier, points) in enumerate(labels.items()):
        where = dict(zip(open_makers, frontier, strict=True))
        rows = [
            cells[where[maker]]
            for cells, maker in zip(table.cells[i], table.makers[i], strict=True)
        ]
        for k, (time_s, saved) in enumerate(table.costs[i]):
            for row in rows:
                time_s, saved = time_s + row[k][0], saved + row[k][1]
            where[i] = table.outputs[i][k]
            after = tuple(where[maker] for maker in still)
            grown.setdefault(after, []).append(_moved_on(points, time_s, saved, number, k))
    return {after: _undominated(parts) for after, parts in grown.items()}


def _moved_on(points: _Labels, time_s: float, saved: float, frontier: int, option: int) -> _Labels:
    count = len(points.time_s)
    return _Labels(
        points.time_s + time_s,
        points.saved_bytes + saved,
        np.full(count, frontier),
        np.arange(count),
        np.full(count, option),
    )


def _undominated(parts: list[_Labels]) -> _Labels:
    columns = [
        np.concatenate([getattr(part, name) for part in parts]) for name in _Labels.__slots__
    ]
    kept = undominated_rows(*columns[:2])
    return _Labels(*(column[kept] for column in columns))


def _ended(table: _Table, labels: Layers, open_makers: tuple[int, ...]) -> _Labels | None:
    """Returns the labels of all last frontiers, with the moves to the layer boundary."""
    parts = []
    for number, (frontier, points) in enumerate(labels.items()):
        where = dict(zip(open_makers, frontier, strict=True))
        cells = [
            cell[where[maker]][0]
            for cell, maker in zip(table.cells[-1], table.makers[-1], strict=True)
        ]
        parts.append(
            _moved_on(points, sum(c[0] for c in cells), sum(c[1] for c in cells), number, 0)
        )
    return _undominated(parts) if parts else None


def _traced(
    problem: LayerProblem, history: list[Layers], frontier: int, point: int
) -> tuple[StrategyOption, ...]:
    """Returns the options of one end, followed back through the labels."""
    options: list[StrategyOption] = []
    for i in reversed(range(len(history))):
        labels = list(history[i].values())[frontier]
        options.append(problem.options[i][labels.option[point]])
        frontier, point = int(labels.frontier[point]), int(labels.point[point])
    return tuple(reversed(options))
