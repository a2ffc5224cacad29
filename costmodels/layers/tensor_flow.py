"""Where the tensors of a divided layer are on their way from the operator that makes them to those
that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.costmodels.operators.sharding import Place, Sharding, placed_parts
from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlow:
    """A tensor between its maker, which leaves it at `source`, and one reader, which wants it at
    `target`.

    maker      None: the layer before
    gradient   where the reader leaves the tensor's gradient
    makers_own whether the maker's backward pass needs the tensor too
    """

    tensor: Tensor
    maker: str | None
    reader: Operator
    source: Place
    target: Place
    gradient: Place
    makers_own: bool = False

    def kept_place(self, degrees: tuple[int, ...]) -> Place:
        """Where a reader that needs the tensor in its backward pass keeps it: on whichever side
        less of it is on a rank.
        """
        return self.source if self.gathers(degrees) else self.target

    def keeps_own_copy(self, degrees: tuple[int, ...]) -> bool:
        """Whether what the reader keeps is not what the maker left, but divided in another way."""
        return self.source != self.target and not self.gathers(degrees)

    def kept_twice(self, degrees: tuple[int, ...]) -> bool:
        """Whether a kept copy at `target` is beside the maker's own: fused attention keeps its
        output where it made it.
        """
        return self.makers_own and self.keeps_own_copy(degrees)

    def gathers(self, degrees: tuple[int, ...]) -> bool:
        """Whether the reader has more of the tensor than the maker left."""
        return placed_parts(self.source, degrees) > placed_parts(self.target, degrees)


Edges = Mapping[tuple[str, str], TensorFlow]


def tensor_flows_of(layer: LayerClass, sharding: Sharding) -> Edges:
    """The edges of `layer` by (reader, tensor); the layer's input comes from the boundary."""
    makers = {tensor.name: operator for operator in layer.operators for tensor in operator.outputs}
    found: dict[tuple[str, str], TensorFlow] = {}
    for reader in layer.operators:
        for tensor in reader.inputs:
            maker = makers.get(tensor.name)
            found[reader.name, tensor.name] = TensorFlow(
                tensor=tensor,
                maker=maker.name if maker else None,
                reader=reader,
                source=sharding.place(maker, tensor) if maker else sharding.boundary,
                target=sharding.place(reader, tensor),
                gradient=sharding.gradient_place(reader, tensor),
                makers_own=keeps_output(maker),
            )
    return found


def shared_beside_a_copy(layer: LayerClass, sharding: Sharding) -> bool:
    """Whether the first reader of some tensor keeps a copy of its own while another may keep what
    the maker left.
    """
    copies: dict[str, list[bool]] = {}
    for (_, name), edge in tensor_flows_of(layer, sharding).items():
        copies.setdefault(name, []).append(edge.keeps_own_copy(sharding.degrees))
    return any(own[0] and not all(own) for own in copies.values())


def keeps_output(maker: Operator | None) -> bool:
    """Whether the operator's backward pass needs its own output: that of fused attention does."""
    return (
        maker is not None
        and maker.kind is OperatorKind.ATTENTION
        and not any(tensor.has("keys") for tensor in maker.saved)
    )


def leaves(layer: LayerClass, sharding: Sharding) -> tuple[Tensor, Place] | None:
    """The tensor that the layer hands on and where its last operator leaves it; None for the
    loss.
    """
    last = layer.operators[-1]
    return (
        None
        if last.kind is OperatorKind.CROSS_ENTROPY
        else (last.outputs[0], sharding.place(last, last.outputs[0]))
    )
