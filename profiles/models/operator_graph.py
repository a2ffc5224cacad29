"""The operator graph of a model: operators with their tensors, parameters and divisible dims.

A model is a sequence of layers, stored as runs of (layer class, count): identical layers are one
class, never copies. A class is a networkx DAG of operators. Sizes are those of one micro-batch on
an undivided model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from parplan.profiles.elementwise import Number, smaller_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.documents import KeysMet

if TYPE_CHECKING:
    import networkx as nx


class OperatorKind(StrEnum):
    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    EXPERTS = "experts"  # tokens times the matrix of each expert that they chose
    DISPATCH = "dispatch"  # sends tokens to the ranks of their experts
    COMBINE = "combine"  # sends them back and adds them up by weight
    VIEW = "view"  # its input in another shape, without a kernel


_ON_COPIES = (OperatorKind.DISPATCH, OperatorKind.EXPERTS, OperatorKind.COMBINE)
# products have two gradients, of the input and of the weight
PRODUCTS = (OperatorKind.MATMUL, OperatorKind.EXPERTS)
EXPERTS_DIM = "experts"  # the dim of parameters that expert parallelism divides
ADAPTER_RANK = "rank"  # the dim between the two products of an adapter
ROUTES = "routes"  # the dim of a router's scores
_ROUTED = (ROUTES, "chosen")  # dims that the operators of a mixture have alone
BYTE_PARTS = 64  # an element of every narrow format is a whole number of 64ths of a byte
EXPERT_WIDTH = "expert_width"  # the dim along which ranks may divide each expert


@dataclass(frozen=True, slots=True)
class Dim:
    """One index that an operator runs over: `batch`, `sequence`, `hidden`, `heads`, `ffn`, `vocab`.

    size: its extent
    unit: how many neighbours stay together when the dim is divided, such as the features of one
        group of key-value heads
    """

    name: str
    size: int
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An activation, with the dims that it is laid out over.

    Two tensors of one layer with the same name are the same memory.

    element_parts    64ths of a byte of an element of a cast, with its part of the scales; 0: the
                     tensor has `element_bytes`
    """

    name: str
    dims: tuple[Dim, ...]
    element_bytes: int
    element_parts: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod([dim.size for dim in self.dims])

    @property
    def num_bytes(self) -> int:
        if self.element_parts:
            return -(-self.num_elements * self.element_parts // BYTE_PARTS)
        return self.num_elements * self.element_bytes

    def size(self, dim_name: str) -> int:
        """Returns the extent of the dim of that name, 1 where it has none."""
        return math.prod(dim.size for dim in self.dims if dim.name == dim_name)

    def has(self, dim_name: str | None) -> bool:
        """Returns True if the tensor is laid out over the dim of that name."""
        return dim_name in [dim.name for dim in self.dims]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A tensor of weights.

    tied        it is the copy that shares its values with the token embedding
    trained     False: frozen, it has no gradient and no optimizer states
    quantised   a frozen matrix in 8 bits, with a scale for each block of its elements
    """

    name: str
    dims: tuple[Dim, ...]
    tied: bool = False
    trained: bool = True
    quantised: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def tensor_dim(self, dim_name: str | None) -> int | None:
        """Returns the position of the dim of that name in the shape, or None."""
        return next((i for i, dim in enumerate(self.dims) if dim.name == dim_name), None)

    @property
    def of_experts(self) -> bool:
        """True if the parameter is one for each expert."""
        return self.tensor_dim(EXPERTS_DIM) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The work of an attention operator, whose dims are those of its scores and `head_dim`.

    causal       a token reads those before it: the kernel may skip half of the scores
    dropped      with dropout of the probabilities
    window       tokens that a token reads with itself; 0: all
    chunked      the window is a part of the sequence, which no token reads beyond (Llama 4)
    kv_features  features of keys and values of one token, of all heads
    value_dim    features of a value's head; 0: as many as a key's, `head_dim`
    in_documents keys met in sequences that are packed from documents; None: a sequence is one
    """

    causal: bool
    dropped: bool = False
    window: int = 0
    chunked: bool = False
    kv_features: int = 0
    value_dim: int = 0
    in_documents: KeysMet | None = None

    def keys_met(self, keys: Number) -> Number:
        """The mean number of keys that a query meets in a sequence of `keys` tokens.

        It is keys / 2 under a causal mask, w - w^2 / (2 keys) within a causal window of w tokens,
        and w / 2 in parts of w tokens. Documents lower it (EQUATIONS K7).
        """
        if self.in_documents is not None:
            return self.in_documents.mean
        if not self.causal:
            return 1.0 * keys if not self.window else 1.0 * smaller_of(keys, self.window)
        if not self.window:
            return keys / 2
        window = smaller_of(keys, self.window)
        return window / 2 if self.chunked else window - window * window / (2 * keys)

    @property
    def reach(self) -> int:
        """Tokens that a token reads at most, with itself; 0: all.

        It is the window, or the longest document where its length is known.
        """
        longest = self.in_documents.longest if self.in_documents else 0
        return min(self.window or longest, longest or self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One node of the graph.

    dims          every index that it runs over; a matmul does 2 * prod(dims) FLOPs
    contracted    the dim that a matmul sums over: dividing it leaves partial sums
    parallel_dim  the dim that tensor parallelism divides (heads, ffn, vocab); None: the operator
                  has no such dim and is replicated over the tensor-parallel axis, or divided along
                  the sequence under sequence parallelism
    saved         the activations that its backward pass needs
    undivided     dims that no mesh axis may divide, each with the reason
    flops_*       model FLOPs: causal attention counted in full (EQUATIONS K2, K4), windows as twice
                  the scores within them that the mask leaves
    attention     the work of an attention operator, None for all others
    gradient      True if it has a backward pass
    repeatable    False if it cannot run again by itself in the backward pass, to the same values
    whole_where_uneven   it is not divided by tensor-parallel ranks that do not divide its
                         `parallel_dim`; for other operators they are no legal degree
    """

    name: str
    kind: OperatorKind
    dims: tuple[Dim, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...] = ()
    saved: tuple[Tensor, ...] = ()
    contracted: str | None = None
    parallel_dim: str | None = None
    undivided: tuple[tuple[str, str], ...] = ()
    flops_forward: int = 0
    flops_backward: int = 0
    attention: Attention | None = None
    gradient: bool = True
    repeatable: bool = True
    whole_where_uneven: bool = False

    @property
    def function(self) -> str:
        """The function that a traced operator calls: its name without module and number."""
        return self.name.rpartition(".")[2].rstrip("0123456789").rstrip("_")

    def size(self, dim_name: str) -> int:
        """Returns the extent of the dim of that name. Raises KeyError."""
        for dim in self.dims:
            if dim.name == dim_name:
                return dim.size
        raise KeyError(f"{self.name} has no dim {dim_name}")

    def unit(self, dim_name: str) -> int:
        """Returns how many neighbours of the dim of that name stay together. Raises KeyError."""
        for dim in self.dims:
            if dim.name == dim_name:
                return dim.unit
        raise KeyError(f"{self.name} has no dim {dim_name}")

    @property
    def in_mixture(self) -> bool:
        """True for the operators of a mixture of experts, from its router to the combination."""
        return self.kind is OperatorKind.COMBINE or any(dim.name in _ROUTED for dim in self.dims)

    @property
    def on_copies(self) -> bool:
        """True for what a mixture runs on copies of tokens: the way to the experts, and back."""
        return self.kind in _ON_COPIES or self.parallel_dim == EXPERT_WIDTH

    @property
    def exchanged(self) -> Tensor | None:
        """The copies of tokens that it exchanges with the ranks of their experts, or None."""
        if self.kind is OperatorKind.DISPATCH:
            return self.outputs[0]
        return self.inputs[0] if self.kind is OperatorKind.COMBINE else None

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def trained(self) -> bool:
        """True if it has a trained parameter."""
        return any(parameter.trained for parameter in self.parameters)

    @property
    def is_adapter(self) -> bool:
        """True if it is one of the two products of an adapter."""
        return any(dim.name == ADAPTER_RANK for dim in self.dims)

    @property
    def weight_gradient(self) -> bool:
        """True if it is a product with a gradient of its weight."""
        return self.kind in PRODUCTS and (self.trained or not self.parameters)


class LayerKind(StrEnum):
    """The role of a layer; in a described model also the name of its class."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"

    @property
    def role(self) -> LayerKind:
        return self

    @property
    def in_chunks(self) -> bool:
        return self is LayerKind.BLOCK


@dataclass(frozen=True, slots=True)
class BlockClass:
    """The name of a class of blocks, in a model whose blocks are of several classes."""

    number: int
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def role(self) -> LayerKind:
        return LayerKind.BLOCK

    @property
    def in_chunks(self) -> bool:
        return True


def layer_kind(index: int, num_blocks: int) -> LayerKind:
    """Returns the kind of a layer of a described model: the embedding, the blocks, the head."""
    ends = {0: LayerKind.EMBEDDING, num_blocks + 1: LayerKind.HEAD}
    return ends.get(index, LayerKind.BLOCK)


class ModelPart(StrEnum):
    """The part of a model that a class of blocks belongs to."""

    LANGUAGE = "language"
    PATCHES = "patches"
    TOWER = "tower"
    PROJECTOR = "projector"


class LayerKey(Hashable, Protocol):
    """The name of a layer class in a model.

    role        the role of its layers
    in_chunks   whether the states of its layers lie in chunks, in a layout with chunks
    """

    @property
    def role(self) -> LayerKind: ...

    @property
    def in_chunks(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class LayerClass:
    """The operators that all layers of one class have, in a topological order.

    outside: names of tensors that a stage saves once for all its layers, not at this one
    block: the name of the class where the blocks of a described model have several
    part: the part of the model that it is of
    """

    kind: LayerKind
    operators: tuple[Operator, ...]
    outside: frozenset[str] = frozenset()
    block: BlockClass | None = None
    part: ModelPart = ModelPart.LANGUAGE

    @property
    def key(self) -> LayerKey:
        """The name of the class in a described model."""
        return self.block or self.kind

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The DAG of operator names (attribute `operator`).

        An edge joins the maker of a tensor with each reader. The import of networkx takes as long
        as a small search, so it is made here.
        """
        import networkx as nx

        graph: nx.DiGraph = nx.DiGraph()
        for operator in self.operators:
            graph.add_node(operator.name, operator=operator)
        for maker, reader, tensor in self.edges:
            graph.add_edge(maker, reader, tensor=tensor)
        return graph

    @cached_property
    def edges(self) -> tuple[tuple[str, str, Tensor], ...]:
        """The maker and the reader of each tensor that one operator makes and another reads."""
        edges: list[tuple[str, str, Tensor]] = []
        maker: dict[str, str] = {}
        for operator in self.operators:
            edges += [
                (maker[tensor.name], operator.name, tensor)
                for tensor in operator.inputs
                if tensor.name in maker
            ]
            maker.update({tensor.name: operator.name for tensor in operator.outputs})
        return tuple(edges)

    @cached_property
    def _by_name(self) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}

    def operator(self, name: str) -> Operator:
        """Returns the operator of that name. Raises KeyError."""
        return self._by_name[name]

    def readers(self, name: str) -> frozenset[str]:
        """Returns the names of the operators that read an output of the operator of that name."""
        return frozenset(reader for maker, reader, _ in self.edges if maker == name)

    @cached_property
    def input(self) -> Tensor | None:
        """The tensor that enters from the layer before, or None for the embedding."""
        made = {tensor.name for operator in self.operators for tensor in operator.outputs}
        return next(
            (
                t
                for op in self.operators
                for t in op.inputs
                if t.name not in made and op.kind is not OperatorKind.EMBEDDING
            ),
            None,
        )

    @cached_property
    def of_experts(self) -> frozenset[str]:
        """The operators with the parameters of experts."""
        return frozenset(
            operator.name
            for operator in self.operators
            if any(parameter.of_experts for parameter in operator.parameters)
        )

    @cached_property
    def of_form(self) -> frozenset[str]:
        """The operators whose price depends on the ranks of the experts, or on a context form."""
        return self.of_experts | {
            operator.name
            for operator in self.operators
            if operator.attention is not None or operator.exchanged is not None
        }

    @cached_property
    def has_experts(self) -> bool:
        """True if tokens pass some of its experts."""
        return any(operator.kind is OperatorKind.EXPERTS for operator in self.operators)

    @property
    def gradient_launches(self) -> int:
        """The number of launches of the layer's backward pass by the host.

        Each operator has one launch, a product two, for its two gradients.
        """
        launched = [
            operator
            for operator in self.operators
            if operator.gradient and operator.kind is not OperatorKind.VIEW
        ]
        return len(launched) + sum(operator.weight_gradient for operator in launched)

    @property
    def trained(self) -> bool:
        """True if it has a trained parameter."""
        return any(operator.trained for operator in self.operators)

    @property
    def gradient(self) -> bool:
        """True if it has a backward pass."""
        return any(operator.gradient for operator in self.operators)

    @property
    def num_parameters(self) -> int:
        """Parameters of one such layer, a tied copy included."""
        return sum(operator.num_parameters for operator in self.operators)

    @property
    def flops_forward(self) -> int:
        return sum(operator.flops_forward for operator in self.operators)

    @property
    def flops_backward(self) -> int:
        return sum(operator.flops_backward for operator in self.operators)


@dataclass(frozen=True, slots=True)
class RepeatedLayer:
    """A run of `count` consecutive layers of one class."""

    layer: LayerClass
    count: int


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """The layers of a model as runs, in the order of the forward pass, for one micro-batch.

    A class may have several runs; it is the same object in all of them.
    """

    name: str
    micro_batch_size: int
    layers: tuple[RepeatedLayer, ...]

    def __iter__(self) -> Iterator[LayerClass]:
        """Yields each class once, in the order of its first layer."""
        return iter({id(run.layer): run.layer for run in self.layers}.values())

    @cached_property
    def _keys(self) -> tuple[LayerKey, ...]:
        return tuple(run.layer.key for run in self.layers for _ in range(run.count))

    def key(self, layer: int) -> LayerKey:
        """Returns the class of a layer of a described model by its number; 0 is the embedding."""
        return self._keys[layer]

    @cached_property
    def _classes(self) -> dict[LayerKey, LayerClass]:
        return {layer.key: layer for layer in self}

    def part_behind(self, cut: int) -> ModelPart | None:
        """Returns the part of the block behind a cut, None before the head and at the ends."""
        behind = self._keys[cut : cut + 1]
        return next((self._classes[k].part for k in behind if k.role is LayerKind.BLOCK), None)

    @property
    def blocks(self) -> tuple[LayerKey, ...]:
        """The class of each block of a described model."""
        return tuple(key for key in self._keys if key.role is LayerKind.BLOCK)

    @property
    def keys(self) -> tuple[LayerKey, ...]:
        """The classes of a described model, in the order of their first layers."""
        return tuple(self._classes)

    def layer_class(self, key: LayerKey) -> LayerClass:
        """Returns the layers of a class of a described model.

        Raises ConfigError for the blocks of a model that has them in several classes.
        """
        if key is LayerKind.BLOCK and key not in self._classes:
            several = ", ".join(map(str, self.keys[1:-1]))
            raise ConfigError(
                f"model {self.name}: its blocks are of several classes ({several}), and this is "
                "for models whose blocks are all alike",
                hint="choose a model with one kind of blocks",
            )
        return self._classes[key]

    @cached_property
    def embedding(self) -> LayerClass:
        return self.layer_class(LayerKind.EMBEDDING)

    @cached_property
    def block(self) -> LayerClass:
        """The class of all blocks. Raises ConfigError where they are of several."""
        return self.layer_class(LayerKind.BLOCK)

    @cached_property
    def boundary(self) -> Tensor:
        """The activation between two layers of the language model."""
        return self._input_of(ModelPart.LANGUAGE)

    @cached_property
    def tower_boundary(self) -> Tensor:
        """The activation between two layers of the tower, in a model with one."""
        return self._input_of(ModelPart.TOWER)

    @cached_property
    def attended(self) -> Tensor:
        """The output of a tower that all blocks attend to, in a model with one."""
        last = next(layer for layer in self if layer.part is ModelPart.PROJECTOR)
        return last.operators[-1].outputs[0]

    def _input_of(self, part: ModelPart) -> Tensor:
        blocks = (layer for layer in self if layer.kind is LayerKind.BLOCK)
        first = next(layer for layer in blocks if layer.part is part)
        assert first.input is not None, "a block reads the residual stream"
        return first.input

    @cached_property
    def head(self) -> LayerClass:
        return self.layer_class(LayerKind.HEAD)

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied copy counts once."""
        return sum(
            run.count * parameter.num_elements
            for run in self.layers
            for operator in run.layer.operators
            for parameter in operator.parameters
            if not parameter.tied
        )

    @cached_property
    def num_trained_parameters(self) -> int:
        """Parameters that have gradients; a tied copy counts once."""
        return sum(
            run.count * parameter.num_elements
            for run in self.layers
            for operator in run.layer.operators
            for parameter in operator.parameters
            if parameter.trained and not parameter.tied
        )

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token passes: those of its chosen experts and all others."""
        idle = sum(
            run.count
            * parameter.num_elements
            * (1 - operator.size("chosen") / parameter.dims[0].size)
            for run in self.layers
            for operator in run.layer.operators
            for parameter in operator.parameters
            if parameter.of_experts
        )
        return self.num_parameters - round(idle)

    @cached_property
    def model_flops(self) -> int:
        """Forward and backward model FLOPs of one micro-batch, without recompute (EQUATIONS K4)."""
        return sum(
            run.count * (run.layer.flops_forward + run.layer.flops_backward) for run in self.layers
        )


def layer_class(
    kind: LayerKind,
    operators: tuple[Operator, ...],
    outside: frozenset[str] = frozenset(),
    block: BlockClass | None = None,
    part: ModelPart = ModelPart.LANGUAGE,
) -> LayerClass:
    """Returns a layer class made of operators in topological order."""
    return LayerClass(kind=kind, operators=operators, outside=outside, block=block, part=part)
