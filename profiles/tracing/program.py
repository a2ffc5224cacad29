"""The result of a recording: the torch calls of one micro-batch as a torch.fx graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from parplan.profiles.tracing.traced_source import TracedWorkload

PARAMETER = "parameter"
BUFFER = "buffer"
CONSTANT = "constant"
ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class Program:
    """The torch calls of `workload` for one micro-batch, in order.

    The placeholders of `graph` are the batch, by key; its get_attr nodes are parameters and buffers
    by full name, and `constants`; its output is the loss. Targets of call_function nodes can be
    called as they are; operator.getitem picks one output of a call that has several.

    Meta of nodes: "val" is the fake output; "origin" of get_attr nodes is PARAMETER, BUFFER or
    CONSTANT. Calls have also

        name, function  the operator's unique name; torch's name of the function
        path, line      the calling module, "" for the outermost; file:line in its code
        grad            True where gradients were on
        autocast        the dtype of torch.autocast, or None
        written         nodes whose memory the call writes, as they were before it; () if none
        aliases         argument nodes whose memory an output shares; () for new memory
        saved           tensors that autograd saves for the backward pass
        random          True if the call draws random numbers
        depends         True if the value depends on a parameter or on random numbers
    """

    workload: TracedWorkload
    micro_batch_size: int
    graph: fx.Graph
    constants: dict[str, Tensor]

    @cached_property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls in order; the i-th is operator i of the TracedModel."""
        return tuple(
            node
            for node in self.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        )

    @cached_property
    def _rewritten(self) -> frozenset[int]:
        """The memory that calls of the passes write into; constants are finished before them."""
        return frozenset(
            memory_of(tensor)
            for node in self.calls
            if not is_constant(node)
            for each in node.meta["written"]
            for tensor in tensors_of(each.meta["val"])
        )

    def is_repeatable(self, node: fx.Node) -> bool:
        """True if a second run of a call in the backward pass gives the same tensor.

        It reads tensors and gives one, and some call writes into the memory of none of them. It is
        no torch.autograd.Function and in no torch.autocast. Only attention may draw random numbers,
        which the executor draws again.
        """
        values = [each.meta["val"] for each in (node, *node.all_input_nodes)]
        if not all(isinstance(value, Tensor) for value in values):
            return False
        if isinstance(node.target, MethodType) or node.meta["autocast"] is not None:
            return False
        if node.meta["random"] and node.meta["function"] != ATTENTION:
            return False
        return not any(memory_of(value) in self._rewritten for value in values)

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """All names of each parameter that has several; the graph uses the first."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.workload.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return tuple(tuple(each) for each in names.values() if len(each) > 1)

    def move(self, device: torch.device) -> None:
        """Moves the program to `device`: constants, and calls that name the recording's device."""
        self.constants.update({name: value.to(device) for name, value in self.constants.items()})
        recorded = torch.device("cpu")

        def moved(leaf: Any) -> Any:
            return device if isinstance(leaf, torch.device) and leaf == recorded else leaf

        for node in self.calls:
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)


def writes_buffer(node: fx.Node) -> bool:
    """True if a call writes into a parameter, a buffer or a constant of the module."""
    return any(each.op == "get_attr" for each in node.meta["written"])


def is_constant(node: fx.Node) -> bool:
    """True for a call that is made once, before the passes."""
    return not node.meta["depends"] and not writes_buffer(node)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in arguments or outputs of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, slice):
        yield from tensors_of((value.start, value.stop, value.step))


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory, valid as long as a tensor in that memory lives."""
    return int(tensor.untyped_storage()._cdata)
