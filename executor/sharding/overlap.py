"""Sub-pipelined tensor parallelism: a block runs as two halves of its micro-batch.

The all-reduces of one half run under the computation of the other (Merak, arXiv 2206.04959, section
4.3; EQUATIONS P8). A is attention with its projections, M the feed-forward network, 1 and 2 the
halves; each ends in a sum over the ranks, and so does the input gradient of its first product. The
table shows the computation between the start of a sum and the wait for it:

    level  forward pass                                  backward pass
    1      half 2 of the product after half 1; of        the same with the gradients of halves 2 and
           1 half 2 nothing
    2      A1: A2   A2: M1   M1: M2   M2: nothing        M2: M1   M1: A2   A2: A1   A1: nothing
    3      as 2, but M2: A1 of the next block            as 2, but A1: M2 of the block before
           (of a stage's last block nothing)             (of a stage's first block nothing)

The forward pass is issued in that order. Autograd goes through a graph from its last node to its
first, wherever it has a choice: it would run the norm of M2, and so the wait before it, ahead of
M1, because the forward pass runs M1 ahead of that norm. The nodes that wait for gradients therefore
have to be the last choice, see `LastChoice`.

NCCL sends halves on a stream of its own: the functional collectives make the stream of the
computation wait only at an explicit wait.
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
from parplan.executor.models.operators import Linear, Residual
from parplan.executor.models.transformer_layers import Block
from parplan.executor.tensors import local

PER_LINEAR = 1
PER_BLOCK = 2
PER_STAGE = 3
WHOLE = (Replicate(),)

Change = Callable[[Tensor], Tensor]


class _ForwardBackward(torch.autograd.Function):
    """Applies `ahead` to its input in the forward pass and `back` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Change, back: Change) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _start_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts the sum of `x` over `group`, which must not be read before `_wait`."""
    return torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name)


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class LastChoice:
    """Makes nodes that the backward pass runs when it can run no other, the youngest first.

    Among the ready nodes autograd runs the one with the highest number, and every thread numbers
    the nodes that it makes (torch/csrc/autograd/function.h, "Sequence Number"). These nodes are
    made by a thread that makes nothing else.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "last-choice")

    def __call__(self, x: Tensor, back: Change) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return self._thread.submit(_ForwardBackward.apply, x, _identity, back).result()


@dataclass(slots=True)
class _Sum:
    """A sum over the ranks that is under way, and the bias to add to it.

    `take_total` hands over the total and drops the reference to it.
    """

    total: Tensor | None
    bias: Tensor | None

    def take_total(self) -> Tensor:
        total, self.total = self.total, None
        return total


class _Sums:
    """The sums of one forward pass.

    A forward pass that ends early, as a recompute does, waits for the sums under way. A sum of a
    tensor with a recipe in `recipes` gets a recipe too.
    """

    def __init__(self, group: dist.ProcessGroup, recipes: Recipes) -> None:
        self._start = partial(_start_sum, group=group)
        self._recipes = recipes
        self._begun: list[_Sum] = []

    def start(self, x: Tensor, bias: Tensor | None = None) -> _Sum:
        total = _ForwardBackward.apply(x, self._start, _identity)
        self._remember(total, lambda recomputed: _wait(self._start(recomputed)), x)
        self._begun.append(_Sum(total, bias))
        return self._begun[-1]

    def end(self, begun: _Sum) -> Tensor:
        """Returns the sum with its bias; to be called once for each sum."""
        total, bias = begun.take_total(), begun.bias
        whole = finished_sum(total, bias)
        if bias is not None:
            self._remember(whole, lambda recomputed: recomputed + bias, total)
        return whole

    def _remember(self, made: Tensor, make: Change, x: Tensor) -> None:
        if self._recipes.knows(x):
            self._recipes.remember((made,), lambda recomputed: (make(recomputed),), x)

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
                _wait(begun.total.detach())


def finished_sum(total: Tensor, bias: Tensor | None) -> Tensor:
    """Waits for a sum that was started, and adds its bias."""
    whole = _ForwardBackward.apply(total, _wait, _identity)
    return whole if bias is None else whole + bias


def linear_in_halves(module: Linear, group: dist.ProcessGroup, *, rows: bool) -> None:
    """Runs `module` at level 1, as two halves.

    It sums each half of its output, or with `rows` of its input's gradient, under the product of
    the other half.
    """
    module.forward = partial(_rows_in_halves if rows else _columns_in_halves, module.forward, group)


def _rows_in_halves(product: Change, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    # both waiting nodes are made first, so that the backward pass reaches them last
    halves = [_ForwardBackward.apply(half, _identity, _wait) for half in x.chunk(2)]
    start = partial(_start_sum, group=group)
    return torch.cat([product(_ForwardBackward.apply(half, _identity, start)) for half in halves])


def _columns_in_halves(product: Change, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    with _Sums(group, Recipes()) as sums:
        halves = [sums.start(product(half)) for half in x.chunk(2)]
        return torch.cat([sums.end(half) for half in halves])


class HalvedOutput(NamedTuple):
    """A block's output at level 3: half 1, and the terms of half 2, whose sum is still under way.

    Half 2 is `residual` of `middle` and the ended `total` with its `bias`.
    """

    first: Tensor
    middle: Tensor
    total: Tensor
    bias: Tensor | None
    residual: Residual

    def inputs(self) -> tuple[Tensor, SecondHalf]:
        """Returns the inputs of the next block: the first half, and a call for the second."""
        return self.first, SecondHalf(self)


class SecondHalf:
    """Computes the second half of a block's input at the first call, and then holds it.

    At the end of a unit's backward pass FSDP waits for the gradients of all tensors that entered
    the unit. It must not see this tensor, because the gradient of the first half is the last to
    come.
    """

    def __init__(self, handed: HalvedOutput) -> None:
        self._handed: HalvedOutput | None = handed
        self._half: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._handed is not None:
            _, middle, total, bias, residual = self._handed
            self._half = residual(middle, finished_sum(total, bias))
            self._handed = None
        return self._half


class _HalvedBlock:
    """The forward pass of `block` at levels 2 and 3.

    All tensors except its parameters are local to this rank.
    """

    def __init__(self, block: Block, mesh: DeviceMesh, recipes: Recipes, hands_on: bool) -> None:
        self._block = block
        self._mesh = mesh
        self._recipes = recipes
        self._hands_on = hands_on

    def __call__(
        self, x: Tensor, later: Callable[[], Tensor] | None = None
    ) -> Tensor | HalvedOutput:
        with _Sums(self._mesh.get_group(), self._recipes) as sums:
            if later is not None:
                return self._run(sums, x, later)
            first, second = local(x.redistribute(self._mesh, WHOLE)).chunk(2)
            return self._run(sums, first, lambda: second)

    def _run(
        self, sums: _Sums, first: Tensor, later: Callable[[], Tensor]
    ) -> Tensor | HalvedOutput:
        block = self._block
        biases = [_copy(linear.bias) for linear in (block.attention_out, block.fc2)]
        attended = [sums.start(block.attend(first), biases[0])]
        second = later()
        attended.append(sums.start(block.attend(second), biases[0]))
        middles, fed = [], []
        parallel = block.parallel_residual
        residual = block.residual2 if parallel else block.residual1
        for x, begun in zip((first, second), attended, strict=True):
            middles.append(residual(x, sums.end(begun)))
            branch = block.feed_forward(x if parallel else middles[-1])
            fed.append(sums.start(branch, biases[1]))
            del branch  # autograd alone holds it from here on
        first = block.residual2(middles[0], sums.end(fed[0]))
        if self._hands_on:
            return HalvedOutput(first, middles[1], fed[1].take_total(), biases[1], block.residual2)
        whole = torch.cat((first, block.residual2(middles[1], sums.end(fed[1]))))
        return DTensor.from_local(whole, self._mesh, WHOLE, run_check=False)


def _copy(bias: Tensor | None) -> Tensor | None:
    """Copies a bias, so that it can be added after ZeRO has freed the parameter."""
    return None if bias is None else local(bias).clone()


def block_in_halves(
    block: Block, mesh: DeviceMesh, recipes: Recipes, last_choice: LastChoice, *, hands_on: bool
) -> None:
    """Runs `block`, whose parameters are placed, as two halves at levels 2 and 3.

    With `hands_on` it returns a `HalvedOutput`.
    """
    start = partial(_start_sum, group=mesh.get_group())

    def summed_gradient(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return _ForwardBackward.apply(last_choice(args[0], _wait), _identity, start)

    for linear in (block.qkv, block.fc1):
        linear.register_forward_pre_hook(summed_gradient)
    recipes.in_halves = True
    block.forward = _HalvedBlock(block, mesh, recipes, hands_on)
