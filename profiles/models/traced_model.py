"""A model that was watched instead of described: every operator that a user's module ran, in order,
from inputs to loss.

`profiles/tracing/` makes it of any module without the memory of its weights; the partitioner
(planner/traced/) cuts it into shards. Sizes are those of one micro-batch; the operators are those
of a built-in description (profiles/models/operator_graph.py), so that prices and search treat both
alike. Tensors that share memory, as a view and what it views, have one name: that of the first; the
first input of a view or of an operator in place is what it views or writes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import Dim, Operator, Tensor

BATCH = (
    "batch"  # the name of every dim whose size is a multiple of the micro-batch, and of no other
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """One call of the module.

    operator    what it computes, reads, gives and keeps; its name is the calling module's with the
                function and a number behind
    path        the module that called it, '' for the outermost
    line        file:line of the call in the user's code
    in_place    whether its output is written into the memory of its first input
    view        whether its output is the memory of an input, and nothing is computed
    constant    whether it depends on the batch alone, on no parameter: any stage that needs its
                output makes it itself
    detached    the names of its outputs that have no gradient: a stage cannot hand them on
    counts      of the buffers that it reads or writes the names of those that some call writes: all
                such calls have one stage
    """

    operator: Operator
    path: str
    line: str
    in_place: bool = False
    view: bool = False
    constant: bool = False
    detached: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def signature(self) -> Hashable:
        """What it is without names: two that are alike cost the same."""
        of = self.operator
        return (
            of.function,
            of.kind,
            of.dims,
            *(_shapes(tensors) for tensors in (of.inputs, of.outputs, of.saved)),
            tuple(parameter.shape for parameter in of.parameters),
            of.flops_forward,
            of.flops_backward,
            of.causal,
            of.dropped,
            of.gradient,
            self.in_place,
            self.view,
            self.constant,
        )


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The operators of `source` for one micro-batch, in the order in which they ran; the last gives
    the loss.

    unit: what the batch counts and `seq_length` multiplies: tokens, or samples
    inputs: the tensors of the batch
    shared: for each parameter that several modules hold, all its names; operators name it by the
    first
    """

    name: str
    source: ModuleSource
    unit: str
    micro_batch_size: int
    inputs: tuple[Tensor, ...]
    operators: tuple[TracedOperator, ...]
    shared: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def graph(self) -> nx.DiGraph:
        """The operators by their place; an edge joins the maker of a tensor with each reader
        (attribute `tensors`).
        """
        graph: nx.DiGraph = nx.DiGraph()
        maker: dict[str, int] = {}
        for place, traced in enumerate(self.operators):
            graph.add_node(place, operator=traced)
            for tensor in traced.operator.inputs:
                if tensor.name in maker:
                    edge = graph.get_edge_data(maker[tensor.name], place, default={"tensors": ()})
                    graph.add_edge(maker[tensor.name], place, tensors=(*edge["tensors"], tensor))
            maker.update({tensor.name: place for tensor in traced.operator.outputs})
        return graph

    @cached_property
    def num_parameters(self) -> int:
        """Each parameter once, however often it is used."""
        return sum(
            {
                p.name: p.num_elements
                for traced in self.operators
                for p in traced.operator.parameters
            }.values()
        )

    @cached_property
    def model_flops(self) -> int:
        """Forward and backward, without recompute."""
        return sum(
            traced.operator.flops_forward + traced.operator.flops_backward
            for traced in self.operators
        )

    def scaled(self, micro_batch_size: int) -> TracedModel:
        """The same for another micro-batch size: every dim called `batch`, and all FLOPs, in
        proportion.
        """
        if micro_batch_size == self.micro_batch_size:
            return self
        share = micro_batch_size, self.micro_batch_size
        operators = tuple(
            replace(traced, operator=_scaled(traced.operator, share)) for traced in self.operators
        )
        inputs = tuple(_scaled_tensor(tensor, share) for tensor in self.inputs)
        return replace(self, micro_batch_size=micro_batch_size, inputs=inputs, operators=operators)


def _shapes(tensors: tuple[Tensor, ...]) -> Hashable:
    return tuple((tensor.dims, tensor.element_bytes) for tensor in tensors)


_Share = tuple[int, int]


def _scaled(operator: Operator, share: _Share) -> Operator:
    inputs, outputs, saved = (
        tuple(_scaled_tensor(tensor, share) for tensor in tensors)
        for tensors in (operator.inputs, operator.outputs, operator.saved)
    )
    flops_forward, flops_backward = (
        flops * share[0] // share[1] for flops in (operator.flops_forward, operator.flops_backward)
    )
    return replace(
        operator,
        dims=_scaled_dims(operator.dims, share),
        inputs=inputs,
        outputs=outputs,
        saved=saved,
        flops_forward=flops_forward,
        flops_backward=flops_backward,
    )


def _scaled_tensor(tensor: Tensor, share: _Share) -> Tensor:
    return replace(tensor, dims=_scaled_dims(tensor.dims, share))


def _scaled_dims(dims: tuple[Dim, ...], share: _Share) -> tuple[Dim, ...]:
    return tuple(
        replace(dim, size=dim.size * share[0] // share[1]) if dim.name == BATCH else dim
        for dim in dims
    )
