"""One forward pass of a module without data: when each part runs, what a block is called with, and
what flows where.

A pipeline cuts between two blocks and hands on one tensor. So that a stage computes what the whole
module would, the blocks must hand on just one tensor, unchanged in between, nothing else that a
later part reads may come from an earlier one, and a parameter must be read by its own module. All
of that is watched here, and refused where it is not so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parplan.executor.external.external_source import logits_of
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.stand_ins import stand_ins

BEFORE, AFTER = 0, 1
_NO_DATA = ("_like.", "new_")  # operators that read the shape of a tensor, not its values


@dataclass(slots=True, kw_only=True)
class Trace:
    """order: the parts beside the blocks as they first ran, BEFORE the blocks or AFTER them.
    shapes: of what each returned. entries: how many a block's tuple has, None where it returns a
    tensor. inputs: of every module right inside the first block, how many positional arguments it
    has, or the name of its first tensor.
    """

    order: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    entries: int | None = None
    inputs: dict[str, int | str] = field(default_factory=dict)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Any]:
    """Where a module gets its first tensor: positional 0, or the name of a keyword; and what it
    is.
    """
    if args:
        return 0, args[0]
    return next(
        ((name, value) for name, value in kwargs.items() if isinstance(value, Tensor)), (0, None)
    )


def hidden_of(output: Any) -> Any:
    """The hidden state in what a block returned: that, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


class _Watch(TorchDispatchMode):
    """Follows what parts gave: `flowed` is all that carries it, but for `hidden`, what the last
    block handed on.
    """

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = blocks
        self.found = Trace()
        self.owners: dict[int, list[str]] = {}  # id of a parameter: the parts that may read it
        self.running: list[str] = []
        self.done = 0  # blocks that ran
        self.hidden: Tensor | None = None
        self.flowed: dict[int, Tensor] = {}  # by id; held, so that no other tensor gets the id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            owners = self.owners.get(id(tensor), ())
            if owners and not set(owners) & set(self.running):
                raise ConfigError(
                    f"module: a parameter of {owners[0]} is read outside of it",
                    hint="call the module that owns it",
                )
        out = func(*args, **(kwargs or {}))
        if not self.running and not any(mark in func.__name__ for mark in _NO_DATA):
            self._between_parts(inputs, out)
        return out

    def _between_parts(self, inputs: list[Tensor], out: object) -> None:
        ended = self.done == len(self.blocks)
        if ended and self._reads(inputs):
            raise _several_tensors("what runs after the blocks")
        if self._reads(inputs) or (not ended and any(tensor is self.hidden for tensor in inputs)):
            self._mark(out)

    def _mark(self, value: object) -> None:
        self.flowed |= {id(tensor): tensor for tensor in _tensors(value)}

    def _reads(self, value: object) -> bool:
        return any(id(tensor) in self.flowed for tensor in _tensors(value))

    def enter_part(self, name: str, args: Any, kwargs: Any) -> None:
        """A part beside the blocks is called."""
        now = BEFORE if self.done == 0 else AFTER
        if 0 < self.done < len(self.blocks) or self.found.order.setdefault(name, now) != now:
            raise ConfigError(
                f"module: {name} runs between blocks, or both before and after them",
                hint="keep what holds parameters before the blocks, in them, or after them",
            )
        if now == AFTER and self._reads((args, kwargs)):
            raise _several_tensors(name)
        self.running.append(name)

    def leave_part(self, name: str, output: Any) -> None:
        self.running.pop()
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"module: {name} returned {type(output).__name__}, a part beside the blocks must return a tensor"
            )
        self.found.shapes[name] = (output.shape, output.dtype)
        if self.done == 0:
            self._mark(output)

    def enter_block(self, name: str, args: Any, kwargs: Any) -> None:
        if name != self.blocks[min(self.done, len(self.blocks) - 1)]:
            raise ConfigError(
                f"module: block {name} ran after {self.done} blocks",
                hint="blocks must run once and in order",
            )
        slot, hidden = first_tensor(args, kwargs)
        others = [*args[1:], *(value for key, value in kwargs.items() if key != slot)]
        if self.done and hidden is not self.hidden:
            raise ConfigError(
                f"module: {name} does not start from what the block before it returned",
                hint="a pipeline cuts between two blocks, nothing may run there",
            )
        if self._reads(others) or any(tensor is self.hidden for tensor in _tensors(others)):
            raise _several_tensors(name)
        self.running.append(name)

    def leave_block(self, name: str, output: Any) -> None:
        self.running.pop()
        self.done += 1
        hidden = hidden_of(output)
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"module: {name} returned {type(output).__name__}, it must return a tensor or a tuple that starts with one"
            )
        self._mark((self.hidden, output))
        self.flowed.pop(id(hidden), None)
        self.hidden = hidden
        self.found.entries = len(output) if isinstance(output, tuple) else None


def _several_tensors(who: str) -> ConfigError:
    return ConfigError(
        f"module: {who} reads more of the layers before it than the last block's output",
        hint="a pipeline hands on one tensor from stage to stage",
    )


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def trace_module(
    model: nn.Module, blocks: tuple[str, ...], others: tuple[str, ...], plan: Plan
) -> Trace:
    """Run `model` on one micro-batch of the plan without data. Raises ConfigError for what a
    pipeline could not cut.
    """
    watch = _Watch(blocks)
    shape = (plan.pipeline.micro_batch_size, plan.training.seq_length)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _watching(model, watch, blocks, others), torch.no_grad(), fake:
        state = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in model.named_parameters()
        }
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = next(part for part in (*blocks, *others) if name.startswith(f"{part}."))
            watch.owners.setdefault(id(state[names[id(parameter)]]), []).append(owner)
        ids = torch.zeros(shape, dtype=torch.int64)
        try:
            with stand_ins(model, state), watch:
                logits = logits_of(model(ids))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"module: what it computes depends on the values of tensors: {error}",
                hint="a stage must do the same for every micro-batch",
            ) from None
    if logits.shape != (*shape, plan.model.padded_vocab_size):
        raise ConfigError(
            f"module: it returned {list(logits.shape)}, it must return logits {[*shape, plan.model.padded_vocab_size]}"
        )
    return watch.found


@contextlib.contextmanager
def _watching(
    model: nn.Module, watch: _Watch, blocks: tuple[str, ...], others: tuple[str, ...]
) -> Iterator[None]:
    """Hooks on the parts, for as long as this lasts."""
    handles = []
    for names, enter, leave in (
        (others, watch.enter_part, watch.leave_part),
        (blocks, watch.enter_block, watch.leave_block),
    ):
        for name in names:
            part = model.get_submodule(name)
            handles.append(
                part.register_forward_pre_hook(
                    lambda _, a, k, name=name, enter=enter: enter(name, a, k), with_kwargs=True
                )
            )
            handles.append(
                part.register_forward_hook(
                    lambda _, a, out, name=name, leave=leave: leave(name, out)
                )
            )
    for key, child in model.get_submodule(blocks[0]).named_children():
        handles.append(
            child.register_forward_pre_hook(
                lambda _, a, k, key=key: _note_input(watch.found, key, a, k), with_kwargs=True
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_input(found: Trace, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    found.inputs[key] = len(args) or first_tensor(args, kwargs)[0]
