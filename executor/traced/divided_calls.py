"""Runs recorded calls on this rank's parts of tensors.

A call that is divided by an index reads its tensors divided by that index, and a tensor without the
index whole: of the latter the ranks have summands of the gradient. Its outputs are divided by the
index. Where they lack it, because a product sums over it, the ranks have summands, which are added
up at once. Calls that name sizes, or whose result depends on the place of a part in the whole, are
changed; all others are made as they were recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.fx.node import map_aggregate
from torch.nn import functional

from parplan.executor.traced.division import PARTIAL, Division, Part, largest, move
from parplan.profiles.errors import ConfigError
from parplan.profiles.profiler.gpus import forked_random
from parplan.profiles.tracing.divisible import outputs_of
from parplan.profiles.tracing.torch_functions import argument

Again = Callable[..., Any]  # makes a call with its inputs, and again in the backward pass


class DividedCalls:
    """The values of one pass through a shard, each with the factor by which it is divided."""

    def __init__(self, division: Division, values: Mapping[fx.Node, Any]) -> None:
        self.division = division
        self.values: dict[fx.Node, Any] = {}
        self._read_whole: dict[fx.Node, Tensor] = {}
        self.factor: dict[fx.Node, int | None] = {}
        for node, value in values.items():
            part = division.parameters.get(str(node.target)) if _is_placed(value) else None
            self.values[node] = _own(node, value) if _is_placed(value) else value
            self.factor[node] = division.factor_at(node, part)

    def call(
        self,
        node: fx.Node,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        again: Again | None = None,
    ) -> None:
        """Makes a call and keeps its value; `again` makes a call that runs again."""
        if target is operator.getitem and isinstance(self.values[args[0]], list | tuple):
            self.values[node] = self.values[args[0]][args[1]]
            factor = self.factor[args[0]]
        else:
            factor = self._factor_of(node)
            made = self._called if again is None else partial(self._made_again, again)
            self.values[node] = made(node, target, args, kwargs, factor)
        has = node not in self.division.divisible or self.division.part(node, factor) is not None
        self.factor[node] = factor if has else None

    def whole(self, node: fx.Node) -> Any:
        """The whole value of a node."""
        return self._read(node, None)

    def drop(self, node: fx.Node) -> None:
        del self.values[node]
        self._read_whole.pop(node, None)

    def _factor_of(self, node: fx.Node) -> int | None:
        factor = self.division.factors.get(node)
        if factor is None and self.division.divisible.is_view(node):
            given = self.factor[node.meta["aliases"][0]]
            return given if self.division.follows(node, given) else None
        return factor

    def _read(self, node: fx.Node, factor: int | None) -> Any:
        value = self.values[node]
        if not isinstance(value, Tensor):
            return value
        source = self.division.part(node, self.factor[node])
        target = self.division.part(node, factor)
        if not self._adds_gradients(node, factor):
            return move(value, self.division.mesh, source, target, target)
        # one tensor for all readers, so that their summands are added before the ranks add them
        if node not in self._read_whole:
            moved = move(value, self.division.mesh, source, None, PARTIAL)
            self._read_whole[node] = moved
        return self._read_whole[node]

    def _adds_gradients(self, node: fx.Node, factor: int | None) -> bool:
        """True if each rank reads a value whole and has a summand of its gradient."""
        value = self.values[node]
        whole = factor is not None and self.division.part(node, factor) is None
        return whole and value.requires_grad and torch.is_grad_enabled()

    def _called(
        self,
        node: fx.Node,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        factor: int | None,
    ) -> Any:
        def read(leaf: Any) -> Any:
            return self._read(leaf, factor) if isinstance(leaf, fx.Node) else leaf

        if factor is None:
            args, kwargs = map_aggregate((args, kwargs), read)
            return target(*args, **kwargs)
        summed = all(self.division.part(out, factor) is None for out in outputs_of(node))
        changed = (_SUMMED if summed else _SIZED).get(str(node.meta["function"]).strip("_"))
        if changed is not None:
            return changed(self, node, factor)
        args, kwargs = map_aggregate((args, kwargs), read)
        with self._random(node):
            made = target(*args, **kwargs)
        return move(made, self.division.mesh, PARTIAL, None, None) if summed else made

    def _made_again(
        self,
        again: Again,
        node: fx.Node,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        factor: int | None,
    ) -> Any:
        """Makes a call that runs again, without the values of other calls."""
        nodes, division = node.all_input_nodes, self.division
        factors = {each: self.factor[each] for each in nodes}
        summed = [each for each in nodes if self._adds_gradients(each, factor)]

        def make(*values: Tensor) -> Any:
            calls = DividedCalls(division, {})
            calls.values.update(zip(nodes, values, strict=False))
            calls._read_whole.update(zip(summed, values[len(nodes) :], strict=True))
            calls.factor = factors
            return calls._called(node, target, args, kwargs, factor)

        values = [self.values[each] for each in nodes]
        return again(make, *values, *(self._read(each, factor) for each in summed))

    @contextmanager
    def _random(self, node: fx.Node) -> Iterator[None]:
        """Draws other numbers on each rank, and as many from the common generator."""
        if not node.meta["random"]:
            yield
            return
        seed = int(torch.randint(2**62, ()))
        with forked_random(self.division.mesh.device_type):
            torch.manual_seed(seed + self.division.rank)
            yield

    def argument(self, node: fx.Node, place: int, name: str, factor: int | None) -> Any:
        value = argument(node, place, name)
        return self._read(value, factor) if isinstance(value, fx.Node) else value

    def summed(self, made: Tensor) -> Tensor:
        """The sum of the ranks' summands; each summand has the gradient of the sum."""
        return move(made, self.division.mesh, PARTIAL, None, None)


class _Own(torch.autograd.Function):
    """A parameter whose gradient has memory of its own.

    autograd adds to the gradient of a DTensor in place although other gradients may share its
    memory, as those of two parameters do that are only added.
    """

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.clone()


Changed = Callable[[DividedCalls, fx.Node, int], Any]


def _own(node: fx.Node, placed: DTensor) -> Tensor:
    """Returns this rank's part of a parameter; of a scalar, the one element that holds it."""
    own: Tensor = _Own.apply(placed.to_local())
    return own if node.meta["val"].ndim else own.reshape(())


def _is_placed(value: Any) -> bool:
    return isinstance(value, DTensor)


def _reshape(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    given: Tensor = calls.argument(node, 0, "input", factor)
    return given.reshape(calls.division.shape(node, factor))


def _expand(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    given: Tensor = calls.argument(node, 0, "input", factor)
    return given.expand(calls.division.shape(node, factor))


def _split(calls: DividedCalls, node: fx.Node, factor: int) -> Any:
    given: Tensor = calls.argument(node, 0, "input", factor)
    dim = argument(node, 2, "dim", 0)
    whole = [each.shape[dim] for each in node.meta["val"]]
    extent = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
    return given.split([size * given.shape[dim] // extent for size in whole], dim)


def _get_item(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    """Slices of the divided dim shrink with it."""
    given: Tensor = calls.argument(node, 0, "input", factor)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    part = calls.division.part(node.args[0], factor)  # type: ignore[arg-type]
    assert part is not None
    taken = sum(each is not None and each is not Ellipsis for each in index)
    scaled: list[Any] = []
    dim = 0
    for each in index:
        if each is Ellipsis:
            dim += given.ndim - taken
        elif each is not None:
            if dim == part.dim and isinstance(each, slice):
                extent = node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
                start, stop, step = each.indices(extent)
                ranks = calls.division.mesh.size()
                each = slice(start // ranks, stop // ranks, step)
            dim += 1
        scaled.append(each)
    return given[tuple(scaled)]


def _summed_linear(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    """The bias is added once, to the sum."""
    given = calls.argument(node, 0, "input", factor)
    weight = calls.argument(node, 1, "weight", factor)
    bias = calls.argument(node, 2, "bias", None)
    made = calls.summed(functional.linear(given, weight))
    return made if bias is None else made + bias


def _summed_addition(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    first = calls.argument(node, 1, "mat1", factor)
    second = calls.argument(node, 2, "mat2", factor)
    added = calls.argument(node, 0, "input", None)
    return calls.summed(torch.matmul(first, second)) + added


def _rows(calls: DividedCalls, node: fx.Node, factor: int) -> int:
    """The first of this rank's rows or classes. Raises ConfigError where they are not in a row."""
    part = calls.division.part(node, factor)
    assert isinstance(part, Part)
    if part.outer > 1:
        raise ConfigError(
            f"shardings: a rank has parts of {node.meta.get('name', node.target)} that are apart",
            hint="leave the operator whole",
        )
    extent: int = node.meta["val"].shape[part.dim]
    return calls.division.rank * (extent // calls.division.mesh.size())


def _summed_look_up(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    """Each rank looks up the rows that it has; all others are zero."""
    ids: Tensor = calls.argument(node, 0, "input", factor)
    table: Tensor = calls.argument(node, 1, "weight", factor)
    first = _rows(calls, argument(node, 1, "weight"), factor)
    padding = argument(node, 2, "padding_idx")
    own = ids - first
    elsewhere = (own < 0) | (own >= table.shape[0])
    own_padding = None if padding is None else padding - first
    if own_padding is not None and not 0 <= own_padding < table.shape[0]:
        own_padding = None
    found = functional.embedding(own.masked_fill(elsewhere, 0), table, own_padding)
    return calls.summed(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def _summed_loss(calls: DividedCalls, node: fx.Node, factor: int) -> Tensor:
    """Cross entropy over divided classes: the sum of exponentials and the target's logit are sums.

    Each rank has some of the classes (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """
    given: Tensor = calls.argument(node, 0, "input", factor)
    targets: Tensor = calls.argument(node, 1, "target", factor)
    ignored = targets == argument(node, 4, "ignore_index", -100)
    logits = given.float()
    logits = logits - largest(logits.amax(1), calls.division.mesh).unsqueeze(1)
    own = targets - _rows(calls, argument(node, 0, "input"), factor)
    elsewhere = (own < 0) | (own >= logits.shape[1])
    picked = logits.gather(1, own.masked_fill(elsewhere, 0).unsqueeze(1)).squeeze(1)
    target_logit = calls.summed(picked.masked_fill(elsewhere, 0.0))
    losses = calls.summed(logits.exp().sum(1)).log() - target_logit
    losses = losses.masked_fill(ignored, 0.0).to(given.dtype)
    reduction = argument(node, 6, "reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() / (~ignored).sum() if reduction == "mean" else losses.sum()


_SIZED: dict[str, Changed] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "squeeze"), _reshape),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("split", "chunk", "tensor_split"), _split),
    "getitem": _get_item,
}
_SUMMED: dict[str, Changed] = {
    "linear": _summed_linear,
    **dict.fromkeys(("addmm", "baddbmm"), _summed_addition),
    "embedding": _summed_look_up,
    "cross_entropy": _summed_loss,
}
