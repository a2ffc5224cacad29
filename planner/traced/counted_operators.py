"""Parameters, ranks of cuts and names of runs of operators, which the ways of cutting need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from parplan.planner.traced.boundary_values import Values
from parplan.planner.traced.repeated_blocks import OperatorRange
from parplan.profiles.models.operator_graph import OperatorKind
from parplan.profiles.models.traced_model import TracedModel


class CountedOperators:
    """Parameters by range, ranks of cuts, and names, for the ways of cutting a model."""

    def __init__(self, model: TracedModel, values: Values, blocks: Sequence[OperatorRange]) -> None:
        self.model = model
        self.values = values
        self.blocks = blocks
        self.paths = [traced.path.split(".") if traced.path else [] for traced in model.operators]
        self.holds = [
            {p.name: p.num_elements for p in traced.operator.parameters}
            for traced in model.operators
        ]
        self.embeds = [traced.operator.kind is OperatorKind.EMBEDDING for traced in model.operators]

    def parameters(self, first: int, end: int, *, embeddings: bool = True) -> int:
        """Number of parameters of operators [first, end), each counted once."""
        elements: dict[str, int] = {}
        for place in range(first, end):
            if embeddings or not self.embeds[place]:
                elements.update(self.holds[place])
        return sum(elements.values())

    def is_apart(self, first: int, end: int) -> bool:
        """True if operators [first, end) have embeddings and no block begins among them."""
        return any(self.embeds[first:end]) and not any(
            first <= block.first < end for block in self.blocks
        )

    def depth(self, place: int) -> int:
        """Number of modules that enclose both sides of a cut; a better place has fewer."""
        before, behind = self.paths[place - 1], self.paths[place]
        return next(
            (index for index, (a, b) in enumerate(zip(before, behind, strict=False)) if a != b),
            min(len(before), len(behind)),
        )

    def rank(self, place: int) -> tuple[int, int, int]:
        """Returns a key that orders cuts of equal parameters, the best first."""
        return self.values.alive_bytes[place], self.depth(place), place

    def snapped(self, place: int, cuts: Sequence[int]) -> int | None:
        """Returns the legal cut nearest to a place, None if all have parameters between."""
        index = bisect_left(cuts, place)
        near = [
            cut
            for cut in cuts[max(0, index - 1) : index + 1]
            if not any(self.holds[min(cut, place) : max(cut, place)])
        ]
        return min(near, key=lambda cut: abs(cut - place), default=None)

    def name(self, first: int, end: int) -> str:
        """Names the module of the operators [first, end) with parameters, or its parts."""
        paths = [
            self.paths[place] for place in range(first, end) if self.holds[place]
        ] or self.paths[first:end]
        common = _prefix(paths)
        whole = [
            place
            for place in range(len(self.paths))
            if self.holds[place] and self.paths[place][: len(common)] == common
        ]
        if common and all(first <= place < end for place in whole):
            return ".".join(common)
        depth = len(common) + 1 if common else None
        parts = list(
            dict.fromkeys(
                ".".join(path[len(common) : depth]) for path in paths if len(path) > len(common)
            )
        )
        inner = f"{parts[0]} to {parts[-1]}" if len(parts) > 2 else ", ".join(parts)
        if not common:
            return inner or f"operators {first} to {end - 1}"
        return ".".join(common) + (f" ({inner})" if inner else "")


def _prefix(paths: Sequence[Sequence[str]]) -> list[str]:
    """Returns the modules that all paths begin with."""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
