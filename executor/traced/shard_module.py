"""A shard as a module: it repeats the plan's part of the recorded calls on its parameters.

The parameters keep their full names behind `of.`, as submodules. FSDP gathers the shard, and
recompute repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.traced.divided_calls import DividedCalls
from parplan.executor.traced.division import Division
from parplan.executor.traced.program_cut import ShardCut, written_buffers
from parplan.profiles.tracing.program import CONSTANT, PARAMETER

OF = "of"  # the submodule that holds parameters and buffers


class Holder(nn.Module):
    """Holds parameters and buffers under their full names."""

    def put(self, name: str, tensor: Tensor) -> None:
        path, _, key = name.rpartition(".")
        owner = self._owner(path)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(key, tensor)
        else:
            owner.register_buffer(key, tensor)

    def place(self, name: str) -> tuple[nn.Module, str]:
        """Returns the submodule that holds `name`, and its key there; FSDP replaces the tensor."""
        path, _, key = name.rpartition(".")
        return self.get_submodule(path), key

    def _owner(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner


@dataclass(frozen=True, slots=True)
class _Step:
    """One call, with nodes in place of tensors, and the values that no later call reads."""

    node: fx.Node
    target: Any
    args: Any
    kwargs: Any
    drops: tuple[fx.Node, ...]
    context: Any

    def made(self, known: Mapping[fx.Node, Any]) -> Any:
        """Makes the call with the values of its nodes."""
        args, kwargs = map_aggregate(
            (self.args, self.kwargs),
            lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else leaf,
        )
        with self.context():
            return self.target(*args, **kwargs)


class ShardModule(nn.Module):
    """A shard; `forward` takes the values of `cut.reads` and returns those of `cut.gives`.

    With a `division` the ranks of its mesh make the calls together; all have the whole values that
    it takes and returns. The calls in `again` save their inputs alone and run again in the backward
    pass.
    """

    def __init__(
        self,
        cut: ShardCut,
        attributes: Mapping[str, Tensor],
        device: torch.device,
        division: Division | None = None,
        again: frozenset[fx.Node] = frozenset(),
    ) -> None:
        super().__init__()
        self.cut = cut
        self._division = division
        self._again = again
        self._recipes = Recipes()
        self.add_module(OF, Holder())
        self._constants: dict[fx.Node, Tensor] = {}
        for node in cut.attributes:
            if node.meta["origin"] == CONSTANT:
                self._constants[node] = attributes[node.target].to(device)
            else:
                self.holder.put(node.target, attributes[node.target])
        self._places = {
            node: self.holder.place(node.target)
            for node in cut.attributes
            if node not in self._constants
        }
        self._scalars = tuple(
            node
            for node in self._places
            if node.meta["origin"] == PARAMETER and not node.meta["val"].ndim
        )
        self._steps = tuple(_steps(cut, device))
        if self._again:
            self._recipes.watch(self)
            self.ahead = self._recipes.ahead

    @property
    def holder(self) -> Holder:
        holder = getattr(self, OF)
        assert isinstance(holder, Holder)
        return holder

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by their names in the user's module."""
        for node, (owner, key) in self._places.items():
            if node.meta["origin"] == PARAMETER:
                yield node.target, getattr(owner, key)

    def counted(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers that its calls write into, for example in batch norms."""
        for node in written_buffers(self.cut):
            owner, key = self._places[node]
            yield node.target, getattr(owner, key)

    def once(self, layer: nn.Module) -> Callable[..., Any]:
        """Wraps `layer`, which is this shard, for one forward pass and its recompute.

        The second call starts from the buffers of the first and updates copies of them.
        """
        if not written_buffers(self.cut):
            return layer
        places = [self._places[node] for node in written_buffers(self.cut)]
        before = [getattr(owner, key).clone() for owner, key in places]
        calls = count()

        def called(*values: Tensor) -> Any:
            if next(calls) == 0:
                return layer(*values)
            now = [getattr(owner, key) for owner, key in places]
            try:
                for (owner, key), value in zip(places, before, strict=True):
                    owner._buffers[key] = value.clone()
                return layer(*values)
            finally:
                for (owner, key), value in zip(places, now, strict=True):
                    owner._buffers[key] = value

        return called

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        known: dict[fx.Node, Any] = dict(zip(self.cut.reads, values, strict=True))
        known.update(self._constants)
        known.update({node: getattr(owner, key) for node, (owner, key) in self._places.items()})
        del values
        if self._division is not None:
            return self._divided(DividedCalls(self._division, known))
        for node in self._scalars:
            known[node] = known[node].reshape(())
        for step in self._steps:
            if step.node in self._again:
                known[step.node] = self._made_again(step, known)
            else:
                known[step.node] = step.made(known)
            for node in step.drops:
                del known[node]
        return tuple(known[node] for node in self.cut.gives)

    def _made_again(self, step: _Step, known: Mapping[fx.Node, Any]) -> Tensor:
        nodes = step.node.all_input_nodes

        def make(*inputs: Tensor) -> Any:
            return step.made(dict(zip(nodes, inputs, strict=True)))

        return self._rerun(step, make, *(known[node] for node in nodes))

    def _rerun(self, step: _Step, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        def called(*values: Tensor) -> Any:
            with step.context():
                return make(*values)

        return self._recipes.rerun(
            called, *inputs, output_too=True, random=step.node.meta["random"]
        )

    def _divided(self, calls: DividedCalls) -> tuple[Tensor, ...]:
        for step in self._steps:
            again = partial(self._rerun, step) if step.node in self._again else None
            with step.context():
                calls.call(step.node, step.target, step.args, step.kwargs, again)
            for node in step.drops:
                calls.drop(node)
        return tuple(calls.whole(node) for node in self.cut.gives)


def _steps(cut: ShardCut, device: torch.device) -> Iterator[_Step]:
    last = {node: call for call in cut.calls for node in (*call.all_input_nodes, call)}
    drops: dict[fx.Node, list[fx.Node]] = {}
    kept = set(cut.gives)
    for node, call in last.items():
        if node not in kept:
            drops.setdefault(call, []).append(node)
    for call in cut.calls:
        args, kwargs = map_aggregate(
            (call.args, call.kwargs),
            lambda leaf: device if isinstance(leaf, torch.device) else leaf,
        )
        yield _Step(
            call, call.target, args, kwargs, tuple(drops.get(call, ())), _context(call, device)
        )


def _context(call: fx.Node, device: torch.device) -> Any:
    """The context of the recorded call: no gradients, torch.autocast, both or neither."""
    grad, autocast = call.meta.get("grad", True), call.meta.get("autocast")
    if grad and autocast is None:
        return nullcontext

    def entered() -> AbstractContextManager[Any]:
        stack = ExitStack()
        if not grad:
            stack.enter_context(torch.no_grad())
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, dtype=autocast))
        return stack

    return entered
