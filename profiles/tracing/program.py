"""What a recording gives: the torch calls of one micro-batch as a torch.fx graph that can be called
again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from parplan.profiles.tracing.traced_source import TracedWorkload

PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"


@dataclass(frozen=True, kw_only=True)
class Program:
    """The torch calls of `workload` for one micro-batch, in order.

    graph: placeholders are the batch, by key; get_attr nodes parameters and buffers by their full
    name, and `constants`; its output is
        the loss. Targets of call_function nodes are called as they are; operator.getitem picks one
        output of a call that has several

    Meta of nodes: "val", the fake output; of get_attr "origin": PARAMETER, BUFFER or CONSTANT; of
    calls as well
        name, function  the operator's name, which no other has; torch's name of the function
        path, line      the module that called, '' for the outermost; file:line in its code
        grad            whether gradients were on
        autocast        the dtype of torch.autocast, or None
        written         nodes whose memory the call writes (before it), () for a call that writes
                        none
        aliases         the nodes of its arguments whose memory an output shares, () for a call that
                        makes new memory
        saved           what autograd keeps for its backward pass: tensors
        random          whether it draws random numbers
        depends         whether it depends on a parameter or on random numbers
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
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """All names of each parameter that has several; the graph uses the first."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.workload.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return tuple(tuple(each) for each in names.values() if len(each) > 1)

    def move(self, device: torch.device) -> None:
        """Make it a program for `device`: the constants go there, and a call that names the
        recording's device names that one.
        """
        self.constants.update({name: value.to(device) for name, value in self.constants.items()})
        recorded = torch.device("cpu")

        def moved(leaf: Any) -> Any:
            return device if isinstance(leaf, torch.device) and leaf == recorded else leaf

        for node in self.calls:
            node.args, node.kwargs = (
                map_aggregate(node.args, moved),
                map_aggregate(node.kwargs, moved),
            )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in arguments or outputs of a call."""
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
    """What says that two tensors share memory, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)
