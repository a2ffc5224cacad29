"""One pipeline stage of a module: its own forward pass, with stand-ins for the parts that other
stages own.

A part of the embedding that is elsewhere gives zeros of the shape it would give. A block that is
elsewhere hands on its input; the one right before this stage's first block gives what was received
instead, and the one right after its last ends the forward pass there. So positions, masks and
rotary tables are made on every stage as the module makes them.
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
    """Carries a stage's output out of the module's forward pass; not an Exception, which the module
    might catch.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _StandIn(nn.Module):
    """In the place of a part that another stage owns; whatever else the module asks of it, the part
    says (on meta).
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        object.__setattr__(
            self, "part", part
        )  # not a submodule: its parameters are not this stage's
        for module in part.modules():
            for key, parameter in module.named_parameters(recurse=False):
                module._parameters[key] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "part"), name)


class _AbsentEmbedding(_StandIn):
    def __init__(self, part: nn.Module, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__(part)
        self.shape, self.dtype = shape, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(
            (), dtype=self.dtype, device=first_tensor(args, kwargs)[1].device
        ).expand(self.shape)


class _AbsentHead(_StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a stage ran the head that another stage owns")


class _AbsentBlock(_StandIn):
    """Hands on its input, or what `hidden` makes of it, in the form in which the block returns
    it.
    """

    def __init__(self, part: nn.Module, entries: int | None, hidden: Hidden) -> None:
        super().__init__(part)
        self.entries, self.hidden = entries, hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.hidden(first_tensor(args, kwargs)[1])
        return hidden if self.entries is None else (hidden, *[None] * (self.entries - 1))


def _end(hidden: Tensor) -> Tensor:
    raise _StageEnds(hidden)


class Ending(nn.Module):
    """The loss of the logits; what it is called on is made by the module's own head."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Loss()


class ExternalBody(nn.Module):
    """A stage of `model`, whose parameters keep the module's own names behind `model.`"""

    def __init__(
        self, model: nn.Module, tied: tuple[nn.Module, str] | None, ends_model: bool
    ) -> None:
        super().__init__()
        self.model = model
        self._tied = (tied,)  # in a tuple: not a submodule a second time
        self.received: Tensor | None = None
        if ends_model:
            self.head = Ending()

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """`x` are token ids on the first stage, else what the stage before handed on; `ids` those
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
        """What this stage received, in the place of `x`."""
        return x if self.received is None else self.received

    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of a tied embedding, if it holds one."""
        owner = self._tied[0]
        return None if owner is None else getattr(*owner)


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule of that name."""
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


def cut(
    body: ExternalBody,
    structure: Structure,
    own: set[str],
    dtype: torch.dtype,
    split: Hidden | None,
) -> None:
    """Replace the parts that are not among the names `own`. `dtype` is that of activations; `split`
    is done to the output of the embedding, of which the module makes positions and masks, before it
    enters a block or leaves the stage.
    """
    _cut_ends(body.model, structure, own, dtype)
    model, blocks = body.model, structure.blocks
    has_embedding, has_head = (
        bool(set(names) & own) for names in (structure.embedding, structure.head)
    )
    held = [name in own for name in blocks]
    starts = held.index(True) if any(held) else len(blocks) if has_head and not has_embedding else 0
    ends = starts + sum(held)
    for index, name in enumerate(blocks):
        if not held[index]:
            hidden = _hidden(body, index, starts, ends, split)
            put(
                model,
                name,
                _AbsentBlock(model.get_submodule(name), structure.trace.entries, hidden),
            )
    if held[0] and (split or not has_embedding):
        # before FSDP's own hook, which must see what the block really reads
        enter = partial(_change_first, split if has_embedding and split else body.receive)
        model.get_submodule(blocks[0]).register_forward_pre_hook(
            enter, with_kwargs=True, prepend=True
        )
    if held[-1] and not has_head:
        model.get_submodule(blocks[-1]).register_forward_hook(
            lambda module, args, out: _end(hidden_of(out))
        )


def _cut_ends(model: nn.Module, structure: Structure, own: set[str], dtype: torch.dtype) -> None:
    for name in structure.embedding:
        if name not in own:
            shape, made = structure.trace.shapes[name]
            put(
                model,
                name,
                _AbsentEmbedding(
                    model.get_submodule(name), shape, dtype if made.is_floating_point else made
                ),
            )
    for name in structure.head:
        if name not in own:
            put(model, name, _AbsentHead(model.get_submodule(name)))


def _hidden(body: ExternalBody, index: int, starts: int, ends: int, split: Hidden | None) -> Hidden:
    """What the absent block `index` makes of its input."""
    if index >= ends:
        return (lambda x: _end(split(x))) if index == 0 and split else _end
    return body.receive if index == starts - 1 else lambda x: x


def _change_first(
    change: Hidden, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    where, hidden = first_tensor(args, kwargs)
    return (
        ((change(hidden), *args[1:]), kwargs)
        if isinstance(where, int)
        else (args, kwargs | {where: change(hidden)})
    )
