"""One pipeline stage of a module: its forward pass, with stand-ins for the parts of other stages.

An absent part of the embedding returns zeros of its output shape. An absent block returns its
input; the block right before this stage's first block returns the received tensor instead, and the
one right after the last ends the forward pass. Every stage therefore computes positions, masks and
rotary tables as the module does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parplan.executor.external.external_source import logits_of
from parplan.executor.external.module_calls import first_tensor, hidden_of
from parplan.executor.external.structure import Structure
from parplan.executor.models.loss import Loss

Hidden = Callable[[Tensor], Tensor]


class _StageEnds(BaseException):
    """Carries a stage's output out of the module's forward pass.

    It is not an Exception, which the module might catch.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """Replaces a part that another stage owns.

    All other attributes come from the part, whose parameters are moved to meta.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        # not a submodule: its parameters are not this stage's
        object.__setattr__(self, "part", part)
        for module in part.modules():
            for key, parameter in module.named_parameters(recurse=False):
                on_meta = torch.empty_like(parameter, device="meta")
                module._parameters[key] = nn.Parameter(on_meta, parameter.requires_grad)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "part"), name)


class _AbsentEmbedding(_StandIn):
    def __init__(self, part: nn.Module, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(part)
        self.shape, self.dtype = shape, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        device = first_tensor(args, kwargs)[1].device
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


class _AbsentHead(_StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a stage ran the head that another stage owns")


class _AbsentBlock(_StandIn):
    """Returns `hidden` of its input, in the form in which the block returns its output."""

    def __init__(self, part: nn.Module, entries: int | None, hidden: Hidden) -> None:
        super().__init__(part)
        self.entries, self.hidden = entries, hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden(first_tensor(args, kwargs)[1])
        return hidden if self.entries is None else (hidden, *[None] * (self.entries - 1))


def _end(hidden: Tensor) -> Tensor:
    raise _StageEnds(hidden)


class Ending(nn.Module):
    """The loss of the logits, which the module's head computes."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()


class ExternalBody(nn.Module):
    """A stage of `model`; its parameters have the module's names after the prefix `model.`."""

    def __init__(
        self, model: nn.Module, tied: tuple[nn.Module, str] | None, ends_model: bool
    ) -> None:
        super().__init__()
        self.model = model
        self._tied = (tied,)  # a tuple, so that it is not registered as a submodule again
        self.received: Tensor | None = None
        if ends_model:
            self.head = Ending()

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Runs the module's forward pass as far as this stage goes.

        `x` are token ids on the first stage, else the output of the stage before; `ids` are those
        of the micro-batch.
        """
        self.received = x
        try:
            return logits_of(self.model(x if ids is None else ids))
        except _StageEnds as end:
            return end.hidden
        finally:
            self.received = None

    def receive(self, x: Tensor) -> Tensor:
        """Replaces `x` with the tensor that this stage received, if there is one."""
        return x if self.received is None else self.received

    def tied_weight(self) -> nn.Parameter | None:
        """Returns this stage's copy of a tied embedding, if it holds one."""
        owner = self._tied[0]
        return None if owner is None else getattr(*owner)


def replace_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule of that name with `module`."""
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


def cut_model(
    body: ExternalBody,
    structure: Structure,
    held: set[str],
    dtype: torch.dtype,
    split: Hidden | None,
) -> None:
    """Replaces all parts except those named in `held`.

    `dtype` is that of activations. `split` is applied to the embedding's output before it enters a
    block or leaves the stage; the module makes positions and masks of the whole output.
    """
    _cut_ends(body.model, structure, held, dtype)
    model, blocks = body.model, structure.blocks
    has_embedding = not held.isdisjoint(structure.embedding)
    has_head = not held.isdisjoint(structure.head)
    is_here = [name in held for name in blocks]
    if any(is_here):
        starts = is_here.index(True)
    else:
        starts = len(blocks) if has_head and not has_embedding else 0
    ends = starts + sum(is_here)
    for index, name in enumerate(blocks):
        if not is_here[index]:
            hidden = _hidden(body, index, starts, ends, split)
            block = model.get_submodule(name)
            replace_submodule(model, name, _AbsentBlock(block, structure.trace.entries, hidden))
    if is_here[0] and (split or not has_embedding):
        # before FSDP's hook, which must see the actual input of the block
        enter = partial(_change_first, split if has_embedding and split else body.receive)
        first = model.get_submodule(blocks[0])
        first.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    if is_here[-1] and not has_head:
        last = model.get_submodule(blocks[-1])
        last.register_forward_hook(lambda module, args, out: _end(hidden_of(out)))


def _cut_ends(model: nn.Module, structure: Structure, held: set[str], dtype: torch.dtype) -> None:
    for name in structure.embedding:
        if name not in held:
            shape, traced = structure.trace.shapes[name]
            part_dtype = dtype if traced.is_floating_point else traced
            part = model.get_submodule(name)
            replace_submodule(model, name, _AbsentEmbedding(part, shape, part_dtype))
    for name in structure.head:
        if name not in held:
            replace_submodule(model, name, _AbsentHead(model.get_submodule(name)))


def _hidden(body: ExternalBody, index: int, starts: int, ends: int, split: Hidden | None) -> Hidden:
    """Returns the function that the absent block `index` applies to its input."""
    if index >= ends:
        return (lambda x: _end(split(x))) if index == 0 and split else _end
    return body.receive if index == starts - 1 else lambda x: x


def _change_first(
    change: Hidden, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    where, hidden = first_tensor(args, kwargs)
    if isinstance(where, int):
        return (change(hidden), *args[1:]), kwargs
    return args, kwargs | {where: change(hidden)}
