"""Placements of a divided layer's tensors between the operators that make and read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.costmodels.operators.sharding import Place, Sharding, placed_parts
from parplan.profiles.models.operator_graph import LayerClass, Operator, OperatorKind, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlow:
    """A tensor on its way from its maker, at `source`, to one reader, at `target`.

    maker      None: the layer before
    gradient   placement at which the reader leaves the tensor's gradient
    makers_own true when the maker's backward pass needs the tensor too
    """

    tensor: Tensor
    maker: str | None
    reader: Operator
    source: Place
    target: Place
    gradient: Place
    makers_own: bool = False

    def kept_place(self, degrees: tuple[int, ...]) -> Place:
        """The placement at which a reader saves the tensor: the side with fewer bytes on a rank."""
        return self.source if self.gathers(degrees) else self.target

    def keeps_own_copy(self, degrees: tuple[int, ...]) -> bool:
        """Returns true when the reader saves the tensor divided in another way than its maker.

        An axis of one rank divides nothing.
        """
        return differ(self.source, self.target, degrees) and not self.gathers(degrees)

    def kept_twice(self, degrees: tuple[int, ...]) -> bool:
        """Returns true when the reader's copy at `target` is beside the maker's own.

        Fused attention saves its output where it made it.
        """
        return self.makers_own and self.keeps_own_copy(degrees)

    def moves(self, degrees: tuple[int, ...]) -> bool:
        """Returns true when the tensor or its gradient goes between ranks on its way."""
        return any(differ(self.source, place, degrees) for place in (self.target, self.gradient))

    def gathers(self, degrees: tuple[int, ...]) -> bool:
        """Returns true when the reader has more of the tensor than the maker left."""
        return placed_parts(self.source, degrees) > placed_parts(self.target, degrees)


def differ(first: Place, second: Place, degrees: tuple[int, ...]) -> bool:
    """Returns whether two placements differ on an axis of more than one rank."""
    places = zip(first, second, degrees, strict=True)
    return any(one != other for one, other, ranks in places if ranks > 1)


Edges = Mapping[tuple[str, str], TensorFlow]


def tensor_flows_of(layer: LayerClass, sharding: Sharding) -> Edges:
    """The edges of `layer` by (reader, tensor); the layer's input comes from the boundary."""
    makers = {tensor.name: operator for operator in layer.operators for tensor in operator.outputs}
    flows: dict[tuple[str, str], TensorFlow] = {}
    for reader in layer.operators:
        for tensor in reader.inputs:
            maker = makers.get(tensor.name)
            flows[reader.name, tensor.name] = TensorFlow(
                tensor=tensor,
                maker=maker.name if maker else None,
                reader=reader,
                source=sharding.place(maker, tensor) if maker else sharding.arrives(tensor),
                target=sharding.place(reader, tensor),
                gradient=sharding.gradient_place(reader, tensor),
                makers_own=saves_own_output(maker),
            )
    return flows


def shared_beside_a_copy(layer: LayerClass, sharding: Sharding) -> bool:
    """Returns true when the first reader of a tensor saves its own copy, but not all readers do."""
    copies: dict[str, list[bool]] = {}
    for (_, name), edge in tensor_flows_of(layer, sharding).items():
        copies.setdefault(name, []).append(edge.keeps_own_copy(sharding.degrees))
    return any(flags[0] and not all(flags) for flags in copies.values())


def moved_by_several(layer: LayerClass, sharding: Sharding) -> bool:
    """Returns true when several readers move one tensor, which goes to alike readers once."""
    moves: dict[str, int] = {}
    for (_, name), edge in tensor_flows_of(layer, sharding).items():
        moves[name] = moves.get(name, 0) + edge.moves(sharding.degrees)
    return max(moves.values(), default=0) > 1


def saves_own_output(maker: Operator | None) -> bool:
    """Returns true when the operator's backward pass needs its own output: fused attention."""
    return (
        maker is not None
        and maker.kind is OperatorKind.ATTENTION
        and not any(tensor.has("keys") for tensor in maker.saved)
    )


def leaving_tensor(layer: LayerClass, sharding: Sharding) -> tuple[Tensor, Place] | None:
    """The layer's output tensor and the placement at which its last operator leaves it.

    None for the loss.
    """
    last = layer.operators[-1]
    if last.kind is OperatorKind.CROSS_ENTROPY:
        return None
    return last.outputs[0], sharding.place(last, last.outputs[0])
