"""The fastest and leanest layers over the strategies of their operators (EQUATIONS I3).

The front of (time, saved bytes) is found by a walk over the operators in topological order. For
each placement of the open tensors, which some later operator reads, the walk keeps the labels that
no other label beats in both values. A label that is beaten there cannot be part of a layer on the
front. A placement includes whether the first saver of a tensor alone saves it, in its own copy. The
walk is exact; the tests compare it with the integer program of layer_program.py. All labels of an
operator are arrays, also those of several variants of the problem, which differ in the options that
they allow. Layers with many operators may have `FrontLimits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parplan.planner.dominance import Array, Ints, Mask, lower_hull, new_lows
from parplan.planner.layer_options.layer_problem import (
    BEFORE,
    LayerProblem,
    StrategyOption,
    TensorLink,
)

Allowed = Callable[[str, StrategyOption], bool]  # by operator name


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Limits on the front of one layer.

    points   points of the front; if there are more, those on its lower convex hull stay
    labels   partial layers behind an operator; if there are more, evenly spread ones stay
    """

    points: int
    labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """Partial layers, one a row.

    placed           by open maker, the number of its output placement; of makers that several
                     operators save twice that, and 1 more while the first has its own copy alone
    before, option   the label of the operator before, and the option of this one
    """

    variant: Ints
    placed: Ints
    time_s: Array
    saved_bytes: Array
    before: Ints
    option: Ints

    def at(self, rows: Ints) -> _Labels:
        """Returns the labels of these rows."""
        return _Labels(
            variant=self.variant[rows],
            placed=self.placed[rows],
            time_s=self.time_s[rows],
            saved_bytes=self.saved_bytes[rows],
            before=self.before[rows],
            option=self.option[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """One operator by numbers: its options, and the links to the makers of its inputs.

    outputs      by option, the number of the output placement in `_Labels.placed`
    still_open   makers whose output some later operator reads, this one last
    links        its links, and the numbers of the makers
    """

    time_s: Array
    saved_bytes: Array
    outputs: Ints
    still_open: tuple[int, ...]
    links: tuple[_Link, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A link to the reader of a tensor, by the number of the maker's placement and its own option.

    becomes    the number after the reader, None where it stays
    """

    maker: int
    time_s: Array
    saved_bytes: Array
    becomes: Ints | None

    @classmethod
    def of(cls, link: TensorLink, placed: Ints, *, several: bool) -> _Link:
        """Returns a link to its options and the placements `placed` of the maker.

        several    the tensor is saved by several operators, one of which has its own copy
        """
        cells = np.ix_(placed, link.needed)
        time_s, saved_bytes = link.costs.time_s[cells], link.costs.saved_bytes[cells]
        if not several:
            return cls(maker=link.maker, time_s=time_s, saved_bytes=saved_bytes, becomes=None)
        numbers = np.repeat(2 * np.arange(len(placed))[:, None], len(link.needed), 1)
        more_bytes = np.zeros(time_s.shape)
        alone, still = numbers, numbers + 1
        if link.beside is not None:
            more_bytes = link.beside.more_bytes[cells]
            alone, still = numbers + link.beside.own_copy[cells], still - (more_bytes > 0)
        return cls(
            maker=link.maker,
            time_s=np.repeat(time_s, 2, 0),
            saved_bytes=_alternating(saved_bytes, saved_bytes + more_bytes),
            becomes=_alternating(alone, still),
        )


def _alternating(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the rows of two tables in turns."""
    return np.stack([first, second], axis=1).reshape(-1, first.shape[1])


def _saved_beside_copies(problem: LayerProblem) -> set[int]:
    """Returns the makers of tensors that may be saved beside the own copy of their first saver."""
    beside = [(link, link.beside) for link in problem.links if link.beside is not None]
    copied = {link.maker for link, each in beside if each.own_copy[:, link.needed].any()}
    return {
        link.maker
        for link, each in beside
        if link.maker in copied and each.more_bytes[..., link.needed].any()
    }


def _operators(problem: LayerProblem) -> list[_Operator]:
    """Returns the operators, and the boundary that the layer's output moves to as the last one."""
    count = len(problem.options)
    links = [problem.incoming(i) for i in range(count + 1)]
    # by maker, the placements that some option has, and by option the number of its own
    placed = {link.maker: np.unique(link.left, return_inverse=True) for link in problem.links}
    several = _saved_beside_copies(problem)
    operators = []
    for i in range(count + 1):
        later = {link.maker for some in links[i + 1 :] for link in some}
        none = np.zeros(1 if i == count else len(problem.options[i]))
        operators.append(
            _Operator(
                time_s=none if i == count else problem.costs[i].time_s,
                saved_bytes=none if i == count else problem.costs[i].saved_bytes,
                outputs=(1 + (i in several)) * placed[i][1]
                if i in placed
                else none.astype(np.int64),
                still_open=tuple(maker for maker in (BEFORE, *range(i + 1)) if maker in later),
                links=tuple(
                    _Link.of(link, placed[link.maker][0], several=link.maker in several)
                    for link in links[i]
                ),
            )
        )
    return operators


def _always(name: str, option: StrategyOption) -> bool:
    return True


def least_times_s(
    problem: LayerProblem, variants: Sequence[Allowed] = (_always,)
) -> list[float | None]:
    """Returns by variant the seconds of the fastest layer, or None without a solution."""
    every = [np.arange(len(options)) for options in problem.options]
    (times_s,) = least_times_of_sizes_s(problem.with_sizes(), [every], variants)
    return times_s


def least_times_of_sizes_s(
    problem: LayerProblem, kept: Sequence[Sequence[Ints]], variants: Sequence[Allowed]
) -> list[list[float | None]]:
    """Returns by micro-batch size and variant the seconds of the fastest layer.

    problem    its costs have the size as their first axis
    kept       by size and operator, the numbers of the options to choose from
    """
    options = [np.unique(np.concatenate(each)) for each in zip(*kept, strict=True)]
    if not all(map(len, options)):
        return [[None] * len(variants) for _ in kept]
    placed = {
        link.maker: np.unique(
            link.left if link.maker == BEFORE else link.left[options[link.maker]],
            return_inverse=True,
        )
        for link in problem.links
    }
    # by size, variant, and output placement of each open maker
    times_s = np.zeros((len(kept), len(variants), 1))
    open_makers: tuple[int, ...] = (BEFORE,)
    for i in range(len(options) + 1):
        if i < len(options):
            allowed = _allowed(problem, i, variants, options[i])
            own_s = np.full((len(kept), len(options[i])), np.inf)
            for size, each in enumerate(kept):
                rows = np.searchsorted(options[i], each[i])
                own_s[size, rows] = problem.costs[i].time_s[size, each[i]]
            options_s = np.where(allowed, own_s[:, None], np.inf)
        else:
            options_s = np.zeros((1, 1, 1))
        times_s = times_s[..., None] + np.expand_dims(
            options_s, tuple(range(2, 2 + len(open_makers)))
        )
        for link in problem.incoming(i):
            needed = link.needed if i == len(options) else link.needed[options[i]]
            link_s = link.costs.time_s[:, placed[link.maker][0]][:, :, needed]
            axes = set(range(1, times_s.ndim - 1)) - {2 + open_makers.index(link.maker)}
            times_s = times_s + np.expand_dims(link_s, tuple(axes))
        later = {link.maker for link in problem.links if link.reader > i}
        still_open = tuple(maker for maker in (BEFORE, *range(i + 1)) if maker in later)
        closed = [n for n, maker in enumerate(open_makers, 2) if maker not in still_open]
        times_s = times_s.min(axis=tuple(closed))
        if i in still_open:
            outputs = placed[i][1]
            order = np.argsort(outputs, kind="stable")
            begins = np.flatnonzero(np.diff(outputs[order], prepend=-1))
            times_s = np.minimum.reduceat(times_s[..., order], begins, axis=-1)
        else:
            times_s = times_s.min(axis=-1)
        open_makers = still_open
    return [
        [float(time_s) if np.isfinite(time_s) else None for time_s in of_size]
        for of_size in times_s
    ]


def _allowed(
    problem: LayerProblem, i: int, variants: Sequence[Allowed], some: Ints | None = None
) -> Mask:
    """Returns by variant and option of the i-th operator whether it is allowed.

    some    the numbers of the options, all by default
    """
    if i == len(problem.options):
        return np.ones((len(variants), 1), np.bool_)
    name, options = problem.names[i], problem.options[i]
    if some is not None:
        options = tuple(options[k] for k in some.tolist())
    return np.array(
        [[variant(name, option) for option in options] for variant in variants], np.bool_
    )


def layer_fronts(
    problem: LayerProblem,
    variants: Sequence[Allowed] = (_always,),
    limits: FrontLimits | None = None,
) -> list[Ints]:
    """Returns the fronts by variant, with the number of each operator's option.

    A front has a row for each of its points, fastest first.
    """
    *steps, ends = _walk(problem, variants, limits.labels if limits else None)
    if limits:
        ends = _limited(ends, limits.points)
    label = ends.before
    chosen: list[Ints] = []
    for labels in steps[::-1]:
        chosen.append(labels.option[label])
        label = labels.before[label]
    rows = np.column_stack(chosen[::-1])
    return [rows[ends.variant == variant] for variant in range(len(variants))]


def _limited(ends: _Labels, most: int) -> _Labels:
    """Returns the whole layers of each variant, or those on their hull if there are more."""
    kept: list[int] = []
    for variant in np.unique(ends.variant):
        rows = np.flatnonzero(ends.variant == variant).tolist()
        points = ((float(ends.time_s[row]), float(ends.saved_bytes[row]), row) for row in rows)
        kept += rows if len(rows) <= most else lower_hull(points)
    return ends.at(np.array(kept, np.int64))


def _walk(
    problem: LayerProblem, variants: Sequence[Allowed], most: int | None = None
) -> list[_Labels]:
    """Returns the labels after each operator, by variant and time; the last are whole layers."""
    none = np.zeros(len(variants))
    numbers = np.arange(len(variants))
    labels = _Labels(
        variant=numbers,
        placed=np.zeros((len(variants), 1), np.int64),
        time_s=none,
        saved_bytes=none,
        before=numbers,
        option=numbers,
    )
    open_makers: tuple[int, ...] = (BEFORE,)
    history = []
    for i, operator in enumerate(_operators(problem)):
        allowed = _allowed(problem, i, variants)
        labels = _moved_on(labels, open_makers, operator, allowed)
        if most is not None and len(labels.time_s) > most:
            labels = labels.at(np.linspace(0, len(labels.time_s) - 1, most).astype(np.int64))
        open_makers = operator.still_open
        history.append(labels)
    return history


def _moved_on(
    labels: _Labels,
    open_makers: tuple[int, ...],
    operator: _Operator,
    allowed: Mask,
) -> _Labels:
    """Returns the undominated labels after an operator."""
    time_s = labels.time_s[:, None] + operator.time_s
    saved_bytes = labels.saved_bytes[:, None] + operator.saved_bytes
    for link in operator.links:
        left = labels.placed[:, open_makers.index(link.maker)]
        time_s += link.time_s[left]
        saved_bytes += link.saved_bytes[left]
    before, option = np.nonzero(allowed[labels.variant])
    kept_makers = [n for n, maker in enumerate(open_makers) if maker in operator.still_open]
    placed = labels.placed[before]
    for link in operator.links:
        if link.becomes is not None:
            column = open_makers.index(link.maker)
            placed[:, column] = link.becomes[placed[:, column], option]
    placed = placed[:, kept_makers]
    if len(kept_makers) < len(operator.still_open):
        placed = np.column_stack([placed, operator.outputs[option]])
    grown = _Labels(
        variant=labels.variant[before],
        placed=placed,
        time_s=time_s[before, option],
        saved_bytes=saved_bytes[before, option],
        before=before,
        option=option,
    )
    return _undominated(grown)


def _undominated(labels: _Labels) -> _Labels:
    """Returns the labels that none of the same variant and placements equals or beats."""
    group = labels.variant
    for column in labels.placed.T:
        group = group * (column.max(initial=0) + 1) + column
    order = np.lexsort((labels.saved_bytes, labels.time_s, group))
    begins = np.diff(group[order], prepend=-1) > 0
    saved_bytes = labels.saved_bytes[order]
    # every group begins below all groups before it
    below = np.cumsum(begins) * (np.ptp(saved_bytes) + 1.0) if len(order) else 0.0
    return labels.at(order[new_lows(saved_bytes - below)])
