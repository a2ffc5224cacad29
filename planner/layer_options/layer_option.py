"""One way to run a layer, as a search chooses among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parplan.costmodels.layers.model_states import OwnZero
from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.operator_graph import LayerKey, LayerKind

# the weights that are divided, by parallel dim: over tensor-parallel ranks, or data-parallel ones
WeightLayout = frozenset[tuple[str, bool]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerOption:
    """One way to run a layer, mostly a block, priced for one micro-batch without data parallelism.

    kind            the layer class
    weight_layout   the weights that are divided over the tensor-parallel ranks
    zero            ZeRO stage of its states; 0 in the catalogue, until a rank sets it
    own_zero        operators whose states have another stage
    on_host         operators whose saved tensors are offloaded, host_bytes of them
                    (planner/host_options/host_variants.py)
    out_s, back_s   seconds of the copies of these bytes to the host and back
    last_s          extra wait of the last block of a stage that has any
    """

    recompute: RecomputedOperators
    sharding: Sharding
    weight_layout: WeightLayout
    time_s: float
    saved_bytes: float
    ideal_saved_bytes: float
    workspace_bytes: float
    kind: LayerKey = LayerKind.BLOCK
    zero: int = 0
    own_zero: OwnZero = ()
    on_host: tuple[str, ...] = ()
    host_bytes: float = 0.0
    out_s: float = 0.0
    back_s: float = 0.0
    last_s: float = 0.0

    @property
    def highest_zero(self) -> int:
        return max(self.zero, *(zero for _, zero in self.own_zero), 0)

    @property
    def redundant_bytes(self) -> float:
        return self.saved_bytes - self.ideal_saved_bytes

    @property
    def values(self) -> tuple[float, float, float, float]:
        return (
            self.time_s,
            self.saved_bytes,
            self.workspace_bytes,
            self.redundant_bytes,
        )


def unbeaten(options: Iterable[LayerOption]) -> tuple[LayerOption, ...]:
    """Returns the options that no other of the same weight layout equals or beats, by time."""
    kept: list[LayerOption] = []
    for option in sorted(options, key=lambda option: option.values):
        alike = (rival for rival in kept if rival.weight_layout == option.weight_layout)
        if not any(
            all(a <= b for a, b in zip(rival.values, option.values, strict=True)) for rival in alike
        ):
            kept.append(option)
    return tuple(kept)
