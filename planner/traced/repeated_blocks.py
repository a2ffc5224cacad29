"""The repeated blocks of a traced model, by the signatures of operators, and units of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.profiles.models.operator_graph import PRODUCTS
from parplan.profiles.models.traced_model import TracedModel

# products with parameters in a block: the linears of one attention are alike too, but no blocks
LEAST_PRODUCTS = 2


@dataclass(frozen=True, slots=True, order=True)
class OperatorRange:
    """Operators [first, end)."""

    first: int
    end: int


def repeated_blocks(model: TracedModel) -> tuple[OperatorRange, ...]:
    """Returns the blocks in the order in which they ran, none if nothing repeats.

    Blocks are the outermost sibling modules of which at least two are alike. If there are none,
    for example for one module that is called several times, blocks are the repeats of the run of
    operators that covers most when repeated at once.
    """
    blocks = _of_siblings(model, _marks(model, paths=False), "", list(range(len(model.operators))))
    blocks = blocks or _in_a_row(model, _marks(model, paths=True))
    return tuple(sorted(blocks))


def units(model: TracedModel, blocks: Sequence[OperatorRange]) -> tuple[object, ...]:
    """Returns by place the number of its block, else the first module of its path.

    The name of a module in a list has its number.
    """
    of: list[object] = [_named(traced.path) for traced in model.operators]
    for number, block in enumerate(blocks):
        of[block.first : block.end] = [number] * (block.end - block.first)
    return tuple(of)


def _named(path: str) -> str:
    parts = path.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


def _marks(model: TracedModel, *, paths: bool) -> npt.NDArray[np.int64]:
    """Numbers operators by their signature and, with `paths`, by their module."""
    known: dict[Hashable, int] = {}
    looks = ((traced.signature, traced.path if paths else "") for traced in model.operators)
    return np.array([known.setdefault(look, len(known)) for look in looks], dtype=np.int64)


def _is_block(model: TracedModel, places: Sequence[int]) -> bool:
    """True if the operators at `places` have the products with parameters that a block needs."""
    operators = (model.operators[place].operator for place in places)
    return (
        sum(operator.kind in PRODUCTS and bool(operator.parameters) for operator in operators)
        >= LEAST_PRODUCTS
    )


def _of_siblings(
    model: TracedModel, marks: npt.NDArray[np.int64], prefix: str, places: list[int]
) -> list[OperatorRange]:
    """Returns blocks among the modules below `prefix`, whose operators are at `places`."""
    children: dict[str, list[int]] = {}
    for place in places:
        below = (
            model.operators[place].path[len(prefix) :].lstrip(".")
            if model.operators[place].path != prefix
            else ""
        )
        if below:
            children.setdefault(below.split(".")[0], []).append(place)
    looks = {
        name: tuple(int(mark) for mark in marks[members])
        for name, members in children.items()
        if _is_block(model, members)
    }
    alike = Counter(looks.values())
    if any(count > 1 for count in alike.values()):
        # a list counts whole: its first module may have more operators, as in T5
        numbered = all(name.isdigit() for name in children)
        chosen = [children[name] for name, look in looks.items() if alike[look] > 1 or numbered]
        return [
            OperatorRange(members[0], members[-1] + 1)
            for members in chosen
            if _is_alone(model, members)
        ]
    inner = (
        _of_siblings(model, marks, f"{prefix}.{name}" if prefix else name, members)
        for name, members in children.items()
    )
    return [block for blocks in inner for block in blocks]


def _is_alone(model: TracedModel, places: Sequence[int]) -> bool:
    """True if only constants of other modules run between the operators at `places`."""
    between = set(range(places[0], places[-1] + 1)).difference(places)
    return all(model.operators[place].constant for place in between)


def _in_a_row(model: TracedModel, marks: npt.NDArray[np.int64]) -> list[OperatorRange]:
    """Returns the repeats of the run of operators that covers most places, the shortest such."""
    best: tuple[int, int, int] | None = None  # places covered, -length, first
    for length in range(2, len(marks) // 2 + 1):
        same = np.concatenate(([False], marks[:-length] == marks[length:], [False]))
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            times = (int(stop - start) + length) // length
            covers = times * length, -length, int(start)
            if (
                times > 1
                and (best is None or covers > best)
                and _is_block(model, range(int(start), int(start) + length))
            ):
                best = covers
    if best is None:
        return []
    covered, negative_length, first = best
    length = -negative_length
    return [OperatorRange(place, place + length) for place in range(first, first + covered, length)]
