"""The action R of a stage: its layers' recompute for one micro-batch ahead of the gradient.

The parameters of a ZeRO 3 layer are gathered for it as for a forward pass, and freed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch.utils.checkpoint import GraphExecGroup

from parplan.executor.memory.early_recompute import EarlyRecompute, Rerun
from parplan.executor.sharding.zero_units import Unit, gathered


class StageRecompute:
    """Recomputes the layers of `units` before the backward pass of each of `micro_batches`."""

    def __init__(self, units: Sequence[Unit], micro_batches: frozenset[int]) -> None:
        self._micro_batches = micro_batches
        self._layers = [
            (_with_experts(unit, units), layer.ahead)
            for unit in units
            for layer in unit.layers
            if _has_recompute(layer)
        ]
        self._waiting: dict[int, list[tuple[Sequence[Unit], list[Rerun]]]] = {}
        self._done: dict[int, GraphExecGroup] = {}

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Surrounds the stage's forward pass."""
        with ExitStack() as stack:
            if micro_batch in self._micro_batches:
                self._waiting[micro_batch] = [
                    (units, stack.enter_context(ahead.collected())) for units, ahead in self._layers
                ]
            yield

    def recompute(self, micro_batch: int) -> None:
        """Runs R: recomputes all tensors for the backward pass."""
        group = self._done[micro_batch] = GraphExecGroup()
        for units, reruns in self._waiting.pop(micro_batch):
            with group, gathered(units if reruns else ()):
                for rerun in reruns:
                    rerun()

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Surrounds the stage's backward pass."""
        group = self._done.pop(micro_batch, None)
        with ExitStack() as stack:
            if group is not None:
                stack.enter_context(group)
            yield


def _has_recompute(layer: object) -> bool:
    return isinstance(getattr(layer, "ahead", None), EarlyRecompute)


def _with_experts(unit: Unit, units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Returns the units that hold the parameters of a layer: its unit, and that of its experts."""
    return unit, *(
        inner
        for inner in units
        if inner is not unit and any(module in unit.apart for module in inner.layers)
    )
