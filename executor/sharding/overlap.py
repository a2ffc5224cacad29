"""Sub-pipelined tensor parallelism: a block runs as two halves of its micro-batch, and the
all-reduces of one half run under the computation of the other (Merak, arXiv 2206.04959, section
4.3; EQUATIONS P8).

A is attention with its projections, M the feed-forward network, 1 and 2 the halves; each ends in a
sum over the ranks, and so does the gradient of what its first product reads. What is computed
between the start of a sum and the wait for it:

    level  forward pass                                  backward pass
    1      half 2 of the product after half 1; of        the same with the gradients of halves 2 and
           1 half 2 nothing
    2      A1: A2   A2: M1   M1: M2   M2: nothing        M2: M1   M1: A2   A2: A1   A1: nothing
    3      as 2, but M2: A1 of the next block            as 2, but A1: M2 of the block before
           (of a stage's last block nothing)             (of a stage's first block nothing)

In the forward pass that is the order in which it is issued. Autograd goes through a graph from its
last node to its first, wherever it has a choice: it would take the norm of M2, and so the wait
before it, ahead of M1, because the forward pass takes M1 ahead of that norm. The nodes that wait
for gradients therefore have to be the last choice, see `LastChoice`.

Halves that are sent by NCCL go through its own stream: the functional collectives make the stream
of the computation wait only where they are told to.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.transformer_layers import Block, Linear, Residual
from parplan.executor.tensors import local

PER_LINEAR, PER_BLOCK, PER_STAGE = 1, 2, 3
WHOLE = (Replicate(),)

Change = Callable[[Tensor], Tensor]


class _Both(torch.autograd.Function):
    """`ahead` of what passes in the forward pass, `back` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Change, back: Change) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _started(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over `group`, not to be read before `_waited`."""
    return torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name)


def _waited(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class LastChoice:
    """Makes nodes that the backward pass runs when it can run no other, the youngest first.

    Among the nodes that are ready autograd runs that with the highest number, and every thread
    numbers the nodes that it makes (torch/csrc/autograd/function.h, "Sequence Number"). These are
    made by a thread that makes nothing else.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "last-choice")

    def __call__(self, x: Tensor, back: Change) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return self._thread.submit(_Both.apply, x, _same, back).result()


@dataclass(slots=True)
class _Sum:
    """A sum over the ranks that is under way, and the bias that is added to it. Nothing holds it
    once it was taken.
    """

    total: Tensor | None
    bias: Tensor | None

    def taken(self) -> Tensor:
        total, self.total = self.total, None
        return total


class _Sums:
    """The sums of one forward pass. One that ends before its time, as a recomputation does, waits
    for those under way.

    A sum of what `recipes` make again is made again as well.
    """

    def __init__(self, group: dist.ProcessGroup, recipes: Recipes) -> None:
        self._start = partial(_started, group=group)
        self._recipes = recipes
        self._begun: list[_Sum] = []

    def start(self, x: Tensor, bias: Tensor | None = None) -> _Sum:
        total = _Both.apply(x, self._start, _same)
        self._remember(total, lambda again: _waited(self._start(again)), x)
        self._begun.append(_Sum(total, bias))
        return self._begun[-1]

    def end(self, begun: _Sum) -> Tensor:
        """The sum and its bias, once."""
        total, bias = begun.taken(), begun.bias
        whole = ended(total, bias)
        if bias is not None:
            self._remember(whole, lambda again: again + bias, total)
        return whole

    def _remember(self, made: Tensor, make: Change, x: Tensor) -> None:
        if self._recipes.knows(x):
            self._recipes.remember((made,), lambda again: (make(again),), x)

    def __enter__(self) -> _Sums:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for begun in self._begun if kind else ():
            if begun.total is not None:
                _waited(begun.total.detach())


def ended(total: Tensor, bias: Tensor | None) -> Tensor:
    """A sum that was begun, when it is there, and its bias."""
    whole = _Both.apply(total, _waited, _same)
    return whole if bias is None else whole + bias


def linear_in_halves(module: Linear, group: dist.ProcessGroup, *, rows: bool) -> None:
    """Level 1: `module` sums each half of its output, or with `rows` of its input's gradient, under
    the product of the other.
    """
    module.forward = partial(_rows_in_halves if rows else _columns_in_halves, module.forward, group)


def _rows_in_halves(product: Change, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    # both nodes that wait come first, so that the backward pass comes to them last
    halves = [_Both.apply(half, _same, _waited) for half in x.chunk(2)]
    return torch.cat(
        [product(_Both.apply(half, _same, partial(_started, group=group))) for half in halves]
    )


def _columns_in_halves(product: Change, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    with _Sums(group, Recipes()) as sums:
        halves = [sums.start(product(half)) for half in x.chunk(2)]
        return torch.cat([sums.end(half) for half in halves])


class Handed(NamedTuple):
    """What a block hands to the next at level 3: its output for half 1, and what that for half 2 is
    the sum of.
    """

    first: Tensor
    middle: Tensor
    total: Tensor
    bias: Tensor | None
    residual: Residual

    def apart(self) -> tuple[Tensor, Later]:
        """The first half, and what gives the second."""
        return self.first, Later(self)


class Later:
    """The second half of a block's input, made when it is asked for first, and then held in place
    of what it was made of.

    FSDP waits with what follows a unit's backward pass for the gradients of all tensors that
    entered the unit: it must not know of this one, for the gradient of the first half is there
    last, with all others.
    """

    def __init__(self, handed: Handed) -> None:
        self._handed: Handed | None = handed
        self._half: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._handed is not None:
            _, middle, total, bias, residual = self._handed
            self._half, self._handed = residual(middle, ended(total, bias)), None
        return self._half


class _Program:
    """Levels 2 and 3: the forward pass of `block`, all of whose tensors but its parameters are this
    rank's own.
    """

    def __init__(self, block: Block, mesh: DeviceMesh, recipes: Recipes, hands_on: bool) -> None:
        self._block, self._mesh, self._recipes, self._hands_on = block, mesh, recipes, hands_on

    def __call__(self, x: Tensor, later: Callable[[], Tensor] | None = None) -> Tensor | Handed:
        with _Sums(self._mesh.get_group(), self._recipes) as sums:
            if later is not None:
                return self._run(sums, x, later)
            first, second = local(x.redistribute(self._mesh, WHOLE)).chunk(2)
            return self._run(sums, first, lambda: second)

    def _run(self, sums: _Sums, first: Tensor, later: Callable[[], Tensor]) -> Tensor | Handed:
        block = self._block
        biases = [_copy(linear.bias) for linear in (block.attention_out, block.fc2)]
        attended = [sums.start(block.attend(first), biases[0])]
        second = later()
        attended.append(sums.start(block.attend(second), biases[0]))
        middles, fed = [], []
        for x, begun in zip((first, second), attended, strict=True):
            middles.append(
                (block.residual2 if block.parallel_residual else block.residual1)(
                    x, sums.end(begun)
                )
            )
            fed.append(
                sums.start(
                    block.feed_forward(x if block.parallel_residual else middles[-1]), biases[1]
                )
            )
        first = block.residual2(middles[0], sums.end(fed[0]))
        if self._hands_on:
            return Handed(first, middles[1], fed[1].taken(), biases[1], block.residual2)
        whole = torch.cat((first, block.residual2(middles[1], sums.end(fed[1]))))
        return DTensor.from_local(whole, self._mesh, WHOLE, run_check=False)


def _copy(bias: Tensor | None) -> Tensor | None:
    """A bias that can be added when ZeRO has let go of the parameter."""
    return None if bias is None else local(bias).clone()


def block_in_halves(
    block: Block, mesh: DeviceMesh, recipes: Recipes, last_choice: LastChoice, *, hands_on: bool
) -> None:
    """Levels 2 and 3: `block`, whose parameters are placed, runs as two halves; with `hands_on` it
    gives a `Handed`.
    """
    start = partial(_started, group=mesh.get_group())

    def summed_gradient(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return _Both.apply(last_choice(args[0], _waited), _same, start)

    for linear in (block.qkv, block.fc1):
        linear.register_forward_pre_hook(summed_gradient)
    recipes.in_halves = True
    block.forward = _Program(block, mesh, recipes, hands_on)
