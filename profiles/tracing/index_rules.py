"""The indices of every torch call of a program, and those that no axis of ranks may divide.

A call is *divided* by an index when each rank holds an equal part of it and makes the same call on
its parts of the tensors. A rule for each function says which indices of inputs and outputs are the
same, and which the call needs whole, with the reason. The outputs of a function without a rule have
new indices, and it needs all of its inputs whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, fx

from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.tracing.factors import Axes, Axis, Factors
from parplan.profiles.tracing.program import Program
from parplan.profiles.tracing.torch_functions import argument

_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "detach"}
_FILLED = {"zeros_like", "ones_like", "full_like", "empty_like"}
_UNARY = {*_CASTS, *_FILLED, "dropout", "clone", "softplus", "gelu", "relu", "silu"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "norm", "logsumexp", "prod"}
_ALONG = {"softmax", "log_softmax", "cumsum", "flip", "roll", "normalize"}


class ProgramIndices:
    """The axes of the values of `program`, and the indices that each call needs whole.

    axes    by node, its tensor's axes
    whole   by call, pairs of an axis and the reason why the call cannot divide its indices
    unruled by call without a rule, the reason why it divides nothing
    pointwise   the user's patterns of calls without a rule that are divided all the same
    """

    def __init__(self, program: Program, rules: TpRules | None = None) -> None:
        self.factors = Factors()
        self._rules, self.pointwise = rules, set[str]()
        self.axes: dict[fx.Node, Axes] = {}
        self.items: dict[fx.Node, Sequence[Axes]] = {}  # of calls that return several tensors
        self.whole: dict[fx.Node, list[tuple[Axis, str]]] = {}
        self.unruled: dict[fx.Node, str] = {}
        for node in program.graph.nodes:
            if node.target is operator.getitem and node.args[0] in self.items:
                self.axes[node] = self.items[node.args[0]][node.args[1]]
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._follow(node)
            elif isinstance(node.meta.get("val"), Tensor):
                self.axes[node] = tuple(map(self.factors.new, node.meta["val"].shape))

    def _follow(self, node: fx.Node) -> None:
        call, rule = Call(self, node), _rule(node)
        pattern = self._rules.pointwise_pattern(node.meta["path"]) if self._rules else None
        if rule is _unknown and pattern is not None:
            self.pointwise.add(pattern)
            rule = _pointwise
        made = rule(call)
        if made is None:
            made = _unknown(call)
        if isinstance(node.meta["val"], Tensor):
            self.axes[node] = made  # type: ignore[assignment]
        else:
            self.items[node] = made  # type: ignore[assignment]
        call.keep_written()


class Call:
    """One call, for its rule: the axes of its arguments, and what it needs whole."""

    def __init__(self, indices: ProgramIndices, node: fx.Node) -> None:
        self.node = node
        self.function = str(node.meta["function"]).strip("_")
        self.indices = indices
        self.factors = indices.factors

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        return argument(self.node, place, name, default)

    def axes(self, value: Any) -> Axes:
        """The axes of an argument; a number has none."""
        return self.indices.axes.get(value, ()) if isinstance(value, fx.Node) else ()

    @property
    def tensors(self) -> tuple[fx.Node, ...]:
        return tuple(each for each in self.node.all_input_nodes if each in self.indices.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.meta["val"].shape)

    def whole(self, axes: Axes, reason: str) -> None:
        """Notes that the call needs the indices of `axes` whole."""
        noted = self.indices.whole.setdefault(self.node, [])
        noted.extend((axis, reason) for axis in axes if axis)

    def join(self, first: Axis, second: Axis) -> None:
        """Notes that the call reads two axes as one index; an axis of size 1 is repeated."""
        if first and second and not self.factors.join(first, second):
            self.whole((first, second), "it reads one index in two ways")

    def new(self, shape: Sequence[int]) -> Axes:
        return tuple(map(self.factors.new, shape))

    def broadcast(self, given: Sequence[Axes], rank: int) -> Axes:
        """The axes of a result of `rank` dims, joined with those of its operands from the right."""
        result: list[Axis] = []
        for place in range(-rank, 0):
            operands = [axes[place] for axes in given if len(axes) >= -place and axes[place]]
            for axis in operands[1:]:
                self.join(operands[0], axis)
            result.append(operands[0] if operands else ())
        return tuple(result)

    def keep_written(self) -> None:
        """Notes that a call in place is whole where someone else could read what it writes."""
        if any(not _is_last_reader(self.node, each) for each in self.node.meta["written"]):
            _unknown(self, "it writes into memory that another call reads")


def _is_last_reader(node: fx.Node, written: fx.Node) -> bool:
    if written.op != "call_function" or written.meta.get("aliases"):
        return False
    return all(user <= node for user in written.users) and not any(
        written in user.meta.get("aliases", ()) for user in written.users if user is not node
    )


Rule = Callable[[Call], Axes | Sequence[Axes] | None]  # None where the call has a form without rule


def _unknown(call: Call, reason: str | None = None) -> Axes | Sequence[Axes]:
    """A call that needs everything whole."""
    reason = reason or f"{call.function} is not divided"
    call.indices.unruled[call.node] = reason
    for each in call.tensors:
        call.whole(call.axes(each), reason)
    value = call.node.meta["val"]
    if isinstance(value, Tensor):
        made = call.indices.axes.get(call.node) or call.new(value.shape)
        call.whole(made, reason)
        return made
    return [call.new(each.shape) if isinstance(each, Tensor) else () for each in value]


def _rule(node: fx.Node) -> Rule:
    name = str(node.meta["function"]).strip("_")
    if isinstance(node.target, MethodType):  # a torch.autograd.Function of the user, of any name
        return _unknown
    if not node.args and name != "scaled_dot_product_attention":  # all arguments by name
        return _unknown
    if name in _RULES:
        return _RULES[name]
    if name in _UNARY:
        return lambda call: call.axes(call.node.args[0])
    if name in _REDUCTIONS:
        return _reduction
    if name in _ALONG:
        return _along
    return _pointwise if _is_pointwise(name) else _unknown


@cache
def _is_pointwise(name: str) -> bool:
    """Tells whether torch marks the function, or the operator like `__radd__`, as pointwise."""
    for each in (name, name[1:]) if name[0] in "ri" else (name,):
        packet = getattr(torch.ops.aten, {"truediv": "div"}.get(each, each), None)
        if packet is not None:
            overloads = (getattr(packet, overload) for overload in packet.overloads())
            return any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return name in ("masked_fill", "where")


def _pointwise(call: Call) -> Axes | None:
    if not isinstance(call.node.meta["val"], Tensor):
        return None
    given = [call.axes(each) for each in call.tensors]
    return call.broadcast(given, len(call.shape))


def _dims(value: Any, rank: int) -> tuple[int, ...]:
    """The dims that an argument names; all of them if there is none."""
    if value is None:
        return tuple(range(rank))
    return tuple(each % rank for each in (value if isinstance(value, list | tuple) else (value,)))


def _reduction(call: Call) -> Axes | None:
    axes, place = call.axes(call.node.args[0]), 2 if call.function == "norm" else 1
    if not isinstance(call.node.meta["val"], Tensor):
        return None
    reduced = _dims(call.argument(place, "dim"), len(axes))
    if call.function in ("var", "std") and isinstance(call.argument(1, "dim"), bool):
        return None
    call.whole(tuple(axes[dim] for dim in reduced), f"the {call.function} is over the whole of it")
    if len(call.shape) == len(axes):
        return tuple(() if dim in reduced else axis for dim, axis in enumerate(axes))
    return tuple(axis for dim, axis in enumerate(axes) if dim not in reduced)


def _along(call: Call) -> Axes:
    axes = call.axes(call.node.args[0])
    place, default = {"roll": (2, None), "normalize": (2, 1)}.get(call.function, (1, None))
    name = "dims" if call.function in ("roll", "flip") else "dim"
    dims = _dims(call.argument(place, name, default), len(axes))
    call.whole(tuple(axes[dim] for dim in dims), f"the {call.function} is over the whole of it")
    return axes


def _norm(call: Call) -> Axes:
    """layer_norm and rms_norm: over the last dims."""
    axes = call.axes(call.node.args[0])
    normalized = axes[-len(call.argument(1, "normalized_shape")) :]
    call.whole(normalized, "a norm is over the whole of it")
    for each in call.tensors[1:]:
        for weight, axis in zip(call.axes(each), normalized, strict=True):
            call.join(axis, weight)
    return axes


def _linear(call: Call) -> Axes:
    x, weight = call.axes(call.argument(0, "input")), call.axes(call.argument(1, "weight"))
    call.join(x[-1], weight[1])
    for bias in call.axes(call.argument(2, "bias")):
        call.join(weight[0], bias)
    return (*x[:-1], weight[0])


def _added_product(call: Call) -> Axes | None:
    """A product to which the first argument is added: addmm and baddbmm."""
    if {"beta", "alpha"} & set(call.node.kwargs):
        return None
    first, second = (call.axes(call.argument(place, f"mat{place}")) for place in (1, 2))
    if not first or not second:
        return None
    return call.broadcast(
        [_multiplied(call, first, second), call.axes(call.node.args[0])], len(call.shape)
    )


def _product(call: Call) -> Axes | None:
    name = "other" if "matmul" in call.function else "mat2"
    first, second = call.axes(call.node.args[0]), call.axes(call.argument(1, name))
    if call.function == "rmatmul":
        first, second = second, first
    return _multiplied(call, first, second) if min(len(first), len(second)) > 1 else None


def _multiplied(call: Call, first: Axes, second: Axes) -> Axes:
    rank = max(len(first), len(second)) - 2
    outer = call.broadcast([first[:-2], second[:-2]], rank)
    call.join(first[-1], second[-2])
    columns = second[-1]
    if set(call.factors.leaves(columns)) & set(call.factors.leaves(first[-2])):
        call.whole((columns,), "rows and columns are the same index")
        (columns,) = call.new([call.factors.extent(columns)])
        call.whole((columns,), "rows and columns are the same index")
    return (*outer, first[-2], columns)


def _attention(call: Call) -> Axes:
    query, key, value, mask = (
        call.axes(call.argument(place, name))
        for place, name in enumerate(("query", "key", "value", "attn_mask"))
    )
    heads = key[:-2]
    if call.node.kwargs.get("enable_gqa"):
        groups = call.factors.extent(query[-3]) // call.factors.extent(key[-3])
        heads = (*key[:-3], (*key[-3], *call.factors.new(groups)))
    outer = call.broadcast([query[:-2], heads], len(query) - 2)
    call.broadcast([key[:-2], value[:-2]], len(key) - 2)
    call.join(key[-2], value[-2])
    call.join(query[-1], key[-1])
    call.broadcast([(*outer, query[-2], key[-2]), mask], len(query))
    call.whole((query[-2],), "attention reads every token of a sequence")
    call.whole((key[-2],), "the softmax is over all of them")
    call.whole((query[-1], value[-1]), "the scores sum over it")
    return (*outer, query[-2], value[-1])


def _embedding(call: Call) -> Axes:
    ids, table = call.axes(call.argument(0, "input")), call.axes(call.argument(1, "weight"))
    call.whole(ids, "the table is looked up for all of them")
    if call.argument(5, "scale_grad_by_freq", False):
        call.whole((table[0],), "a gradient is divided by how often its row is read")
    return (*ids, table[1])


def _cross_entropy(call: Call) -> Axes | None:
    """The classes can be divided where the targets are class numbers without weights."""
    logits, targets = call.axes(call.node.args[0]), call.axes(call.argument(1, "target"))
    plain = call.argument(2, "weight") is None and not call.argument(7, "label_smoothing", 0.0)
    rank = len(call.node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    if not plain or rank != 2 or len(targets) != 1:
        return None
    call.join(logits[0], targets[0])
    call.whole((logits[0],), "the loss is a sum over it")
    return (logits[0],) if call.shape else ()


def _view(call: Call) -> Axes | None:
    axes = call.axes(call.node.args[0])
    whole = [factor for axis in axes for factor in axis]
    typed = any(isinstance(each, torch.dtype) for each in call.node.args)
    if typed or call.factors.extent(whole) != math.prod(call.shape):
        return None
    return call.factors.cut(whole, call.shape)


def _expand(call: Call) -> Axes:
    axes = call.axes(call.node.args[0])
    added = len(call.shape) - len(axes)
    return tuple(
        axes[dim - added] if dim >= added and axes[dim - added] else call.factors.new(size)
        for dim, size in enumerate(call.shape)
    )


def _permute(call: Call) -> Axes:
    axes = call.axes(call.node.args[0])
    order = call.argument(1, "dims")
    order = order if isinstance(order, list | tuple) else call.node.args[1:]
    return tuple(axes[cast(int, dim)] for dim in order)


def _transpose(call: Call) -> Axes:
    axes = list(call.axes(call.node.args[0]))
    first, second = (call.argument(1 + i, f"dim{i}", i) for i in range(2))
    axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


def _property(call: Call) -> Axes | None:
    """Properties of tensors, such as `x.T`."""
    name = getattr(getattr(call.node.target, "__self__", None), "__name__", "")
    axes = call.axes(call.node.args[0])
    if name == "T":
        return axes[::-1]
    return (*axes[:-2], axes[-1], axes[-2]) if name == "mT" else None


def _pieces(call: Call) -> Sequence[Axes]:
    """split, chunk and tensor_split: equal pieces are parts of one index."""
    axes = call.axes(call.node.args[0])
    dim = call.argument(2, "dim", 0) % len(axes)
    pieces = call.node.meta["val"]
    sizes = {each.shape[dim] for each in pieces}
    cut = call.factors.cut(axes[dim], (len(pieces), *sizes)) if len(sizes) == 1 else None
    call.whole((cut[0] if cut else axes[dim],), f"the {call.function} takes parts of it")
    if cut is None:
        return [(*axes[:dim], *call.new([each.shape[dim]]), *axes[dim + 1 :]) for each in pieces]
    return [(*axes[:dim], cut[1], *axes[dim + 1 :])] * len(pieces)


def _unbind(call: Call) -> Sequence[Axes]:
    axes = call.axes(call.node.args[0])
    dim = call.argument(1, "dim", 0) % len(axes)
    call.whole((axes[dim],), "the unbind takes parts of it")
    return [(*axes[:dim], *axes[dim + 1 :])] * len(call.node.meta["val"])


def _select(call: Call) -> Axes:
    axes = call.axes(call.node.args[0])
    dim = call.argument(1, "dim") % len(axes)
    call.whole((axes[dim],), "it takes a part of it")
    return (*axes[:dim], *axes[dim + 1 :])


def _get_item(call: Call) -> Axes | None:
    """An index of numbers, slices, None and one ellipsis."""
    axes, index = call.axes(call.node.args[0]), call.node.args[1]
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or _is_simple(part) for part in parts):
        return None
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (len(axes) - taken)
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    made: list[Axis] = []
    pending = list(axes)
    for part in (*parts[:at], *rest, *parts[at + 1 :]):
        if part is None:
            made.append(())
            continue
        axis = pending.pop(0)
        if isinstance(part, int):
            call.whole((axis,), "it takes a part of it")
        else:
            made.append(_sliced(call, axis, cast(slice, part), call.shape[len(made)]))
    return tuple(made)


def _is_simple(part: Any) -> bool:
    if isinstance(part, slice):
        return all(n is None or isinstance(n, int) for n in (part.start, part.stop, part.step))
    return isinstance(part, int) and not isinstance(part, bool)


def _sliced(call: Call, axis: Axis, part: slice, size: int) -> Axis:
    """A slice: all of an axis, one of equal parts of it, or a new index."""
    extent = call.factors.extent(axis)
    start, _, step = part.indices(extent)
    if step == 1 and size == extent:
        return axis
    if step == 1 and size and extent % size == 0 and start % size == 0:
        cut = call.factors.cut(axis, (extent // size, size))
        if cut is not None:
            call.whole((cut[0],), "it takes a part of it")
            return cut[1]
    call.whole((axis,), "it takes a part of it")
    (made,) = call.new([size])
    call.whole((made,), "it is a part of another index")
    return made


def _joined(call: Call) -> Axes | None:
    """cat: equal pieces along one dim are parts of a new index."""
    pieces = call.argument(0, "tensors")
    given = [call.axes(each) for each in pieces]
    rank = len(given[0])
    dim = call.argument(1, "dim", 0) % rank
    if any(len(axes) != rank for axes in given):
        return None
    made = []
    for place in range(rank):
        columns = [axes[place] for axes in given]
        equal = len({call.factors.extent(axis) for axis in columns}) == 1
        if place == dim and not equal:
            for axis in (*columns, *(new := call.new([call.shape[dim]]))):
                call.whole((axis,), "the cat joins unequal parts of it")
            made.append(new[0])
            continue
        for axis in columns[1:]:
            call.join(columns[0], axis)
        parts = call.factors.new(len(given)) if place == dim else ()
        call.whole((parts,), "the cat joins parts of it")
        made.append((*parts, *columns[0]))
    return tuple(made)


def _stacked(call: Call) -> Axes:
    pieces = call.argument(0, "tensors")
    given = [call.axes(each) for each in pieces]
    axes = call.broadcast(given, len(given[0]))
    dim = call.argument(1, "dim", 0) % len(call.shape)
    parts = call.factors.new(len(given))
    call.whole((parts,), "the stack joins parts of it")
    return (*axes[:dim], parts, *axes[dim:])


def _repeated(call: Call) -> Axes | None:
    """repeat_interleave by a number along a dim."""
    repeats, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    axes = list(call.axes(call.node.args[0]))
    axes[dim] = (*axes[dim], *call.factors.new(repeats))
    return tuple(axes)


_RULES: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    **dict.fromkeys(("matmul", "rmatmul", "bmm", "mm"), _product),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"), _view
    ),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "permute": _permute,
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    "get": _property,
    **dict.fromkeys(("split", "chunk", "tensor_split"), _pieces),
    "unbind": _unbind,
    "select": _select,
    "getitem": _get_item,
    **dict.fromkeys(("cat", "concat"), _joined),
    "stack": _stacked,
    "repeat_interleave": _repeated,
}
