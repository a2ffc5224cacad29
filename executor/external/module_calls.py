"""One forward pass of a module without data, which records the calls and the flow of tensors.

A pipeline cuts between two blocks and hands on one tensor. For a stage to compute as the whole
module does, the blocks must hand on just one tensor, unchanged in between, no later part may read
anything else from an earlier one, and a parameter must be read by its own module. This pass refuses
a module that violates one of these.
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
from parplan.profiles.tracing.stand_ins import replaced_parameters

BEFORE, AFTER = 0, 1
_NO_DATA = ("_like.", "new_")  # these read the shape of a tensor, not its values


@dataclass(slots=True, kw_only=True)
class Trace:
    """The record of one forward pass.

    order    the parts outside the blocks as they first ran, BEFORE the blocks or AFTER them
    shapes   shape and type of each part's output
    entries  the length of a block's output tuple, None where it returns a tensor
    inputs   by child of the first block: its number of positional arguments, or the keyword of
             its first tensor
    """

    order: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    entries: int | None = None
    inputs: dict[str, int | str] = field(default_factory=dict)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Any]:
    """Returns the place and the value of a module's first tensor.

    The place is 0, or the name of a keyword.
    """
    if args:
        return 0, args[0]
    return next(
        ((name, value) for name, value in kwargs.items() if isinstance(value, Tensor)), (0, None)
    )


def hidden_of(output: Any) -> Any:
    """Returns the hidden state of a block's output: the output, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


class _Watch(TorchDispatchMode):
    """Follows the tensors that parts return.

    `flowed` are all tensors that depend on them, except `hidden`, the last block's output.
    """

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = blocks
        self.trace = Trace()
        self.owners: dict[int, list[str]] = {}  # id of a parameter -> the parts that may read it
        self.running: list[str] = []
        self.done = 0  # blocks that ran
        self.hidden: Tensor | None = None
        self.flowed: dict[int, Tensor] = {}  # by id; held, so that no new tensor gets the id

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
        """Records the call of a part outside the blocks."""
        now = BEFORE if self.done == 0 else AFTER
        if 0 < self.done < len(self.blocks) or self.trace.order.setdefault(name, now) != now:
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
                f"module: {name} returned {type(output).__name__}, "
                "a part beside the blocks must return a tensor"
            )
        self.trace.shapes[name] = (output.shape, output.dtype)
        if self.done == 0:
            self._mark(output)

    def enter_block(self, name: str, args: Any, kwargs: Any) -> None:
        if name != self.blocks[min(self.done, len(self.blocks) - 1)]:
            raise ConfigError(
                f"module: block {name} ran after {self.done} blocks",
                hint="blocks must run once and in order",
            )
        slot, hidden = first_tensor(args, kwargs)
        rest = [*args[1:], *(value for key, value in kwargs.items() if key != slot)]
        if self.done and hidden is not self.hidden:
            raise ConfigError(
                f"module: {name} does not start from what the block before it returned",
                hint="a pipeline cuts between two blocks, nothing may run there",
            )
        if self._reads(rest) or any(tensor is self.hidden for tensor in _tensors(rest)):
            raise _several_tensors(name)
        self.running.append(name)

    def leave_block(self, name: str, output: Any) -> None:
        self.running.pop()
        self.done += 1
        hidden = hidden_of(output)
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"module: {name} returned {type(output).__name__}, "
                "it must return a tensor or a tuple that starts with one"
            )
        self._mark((self.hidden, output))
        self.flowed.pop(id(hidden), None)
        self.hidden = hidden
        self.trace.entries = len(output) if isinstance(output, tuple) else None


def _several_tensors(who: str) -> ConfigError:
    return ConfigError(
        f"module: {who} reads more of the layers before it than the last block's output",
        hint="a pipeline hands on one tensor from stage to stage",
    )


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def trace_module(
    model: nn.Module, blocks: tuple[str, ...], outside: tuple[str, ...], plan: Plan
) -> Trace:
    """Runs `model` on one micro-batch of the plan without data.

    `outside` are the parts outside the blocks. Raises ConfigError for a module that a pipeline
    cannot cut.
    """
    watch = _Watch(blocks)
    shape = (plan.pipeline.micro_batch_size, plan.training.seq_length)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _watching(model, watch, blocks, outside), torch.no_grad(), fake:
        state = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in model.named_parameters()
        }
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner = next(part for part in (*blocks, *outside) if name.startswith(f"{part}."))
            watch.owners.setdefault(id(state[names[id(parameter)]]), []).append(owner)
        ids = torch.zeros(shape, dtype=torch.int64)
        try:
            with replaced_parameters(model, state), watch:
                logits = logits_of(model(ids))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"module: what it computes depends on the values of tensors: {error}",
                hint="a stage must do the same for every micro-batch",
            ) from None
    if logits.shape != (*shape, plan.model.padded_vocab_size):
        raise ConfigError(
            f"module: it returned {list(logits.shape)}, "
            f"it must return logits {[*shape, plan.model.padded_vocab_size]}"
        )
    return watch.trace


@contextlib.contextmanager
def _watching(
    model: nn.Module, watch: _Watch, blocks: tuple[str, ...], outside: tuple[str, ...]
) -> Iterator[None]:
    """Puts hooks on the parts in this context."""
    handles = []
    for names, enter, leave in (
        (outside, watch.enter_part, watch.leave_part),
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
                lambda _, a, k, key=key: _note_input(watch.trace, key, a, k), with_kwargs=True
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note_input(trace: Trace, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    trace.inputs[key] = len(args) or first_tensor(args, kwargs)[0]
