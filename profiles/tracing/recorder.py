"""Records the torch calls of a running module on fake tensors as nodes of a graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import BUFFER, CONSTANT, PARAMETER, memory_of, tensors_of
from parplan.profiles.tracing.source_lines import Paths, line_of_caller

APPLY = torch.autograd.Function.__dict__["apply"]
_READS_VALUES = {
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__contains__",
    "nonzero",
    "unique",
    "unique_consecutive",
    "masked_select",
    "equal",
    "allclose",
}
_RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "dropout",
    "dropout_",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
    "rrelu",
    "gumbel_softmax",
}
_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_COMPOSED = {functional.multi_head_attention_forward}  # whole layers, recorded as their parts
_GROUPED: tuple[Any, ...] = (functional.grouped_mm, torch._grouped_mm)
_BELOW = {torch.lt, Tensor.lt, Tensor.__lt__}


def _never(saved: Any) -> Tensor:
    raise RuntimeError("a recording has no backward pass")


def set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Does tensor[index] = value as a call that returns the tensor."""
    tensor[index] = value
    return tensor


class CallRecorder(TorchFunctionMode):
    """Records torch calls on fake tensors while it is entered.

    nodes           by id, the node of every tensor that a call made or may read; `held` keeps each
                    tensor alive, so that no other gets its id
    attributes      name and origin of parameters and buffers, which become nodes at their first use
    fakes, reals    by id of a real tensor (buffer or constant) its fake tensor, and the reverse
    changed         by memory, the real tensors that recorded calls write
    read, written   names of buffers that calls read as constants, and that recorded calls write
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        paths: Paths,
        *,
        on_cpu: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.check = check
        self.fake = fake
        self.paths = paths
        self.on_cpu = on_cpu
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.attributes: dict[int, tuple[str, str]] = {}
        self.constants: dict[str, Tensor] = {}
        self.fakes: dict[int, Tensor] = {}
        self.reals: dict[int, Tensor] = {}
        self.changed: dict[int, Tensor] = {}
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.held: list[Tensor] = []
        self.counts: Counter[str] = Counter()
        self.given: set[int] | None = None  # argument ids inside an autograd.Function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.check()
        kwargs = kwargs or {}
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        name = getattr(func, "__name__", str(func))
        tensors = list(tensors_of((args, kwargs)))
        if self.given is not None:
            self._check_given(name, tensors)
            return func(*args, **kwargs)
        # Every tensor is checked, because one that no call may read is an error beside live ones.
        live = [self._is_live(tensor) for tensor in tensors]
        if not any(live) and name not in _RANDOM and not self._writes_buffer(name, tensors):
            return self._constant(func, name, args, kwargs, tensors)
        if name in _READS_VALUES:
            raise self._depends_on_values(name)
        if func in _COMPOSED:
            return self._inside(func, args, kwargs)
        if func in _BELOW and self._never_below(*args):
            return torch.tensor(False)
        if func is Tensor.__setitem__:
            func = set_item
            args = (args[0], _without_masks(args[1]), *args[2:])
        elif func is Tensor.__getitem__:
            args = (args[0], _without_masks(args[1]), *args[2:])
        return self._call(func, name, args, kwargs)

    def function(self, kind: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """Records a torch.autograd.Function as one call; inside it may read only its arguments."""
        apply = MethodType(APPLY.__func__, kind)
        with torch._C.DisableTorchFunction():
            if self.given is None and any(
                self._is_live(tensor) for tensor in tensors_of((args, kwargs))
            ):
                return self._call(apply, kind.__name__, args, kwargs)
        return apply(*args, **kwargs)

    def _apply(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.given = {id(tensor) for tensor in tensors_of((args, kwargs))}
        try:
            with torch._C._EnableTorchFunction():
                return apply(*args, **kwargs)
        finally:
            self.given = None

    def _check_given(self, name: str, tensors: list[Tensor]) -> None:
        """Checks a call inside a torch.autograd.Function. Raises ConfigError."""
        if name in _READS_VALUES and any(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise self._depends_on_values(name)
        given = self.given or set()
        for tensor in tensors:
            if id(tensor) not in given and (
                id(tensor) in self.nodes or id(tensor) in self.attributes
            ):
                raise ConfigError(
                    f"module: {line_of_caller()}, in a torch.autograd.Function, reads a tensor "
                    "that it was not given",
                    hint="hand the tensor to its apply (of torch.utils.checkpoint use "
                    "the kind without reentry)",
                )

    def _is_live(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is no constant. Raises ConfigError for one that no call made."""
        if isinstance(tensor, FakeTensor):
            if id(tensor) in self.nodes or id(tensor) in self.attributes:
                return True
            raise ConfigError(
                f"module: {line_of_caller()} uses a tensor {list(tensor.shape)} that no call of "
                "torch made",
                hint="make it with calls of torch in the forward pass",
            )
        changed = (
            self.changed.get(memory_of(tensor)) if self.changed and not tensor.is_sparse else None
        )
        if changed is not None and changed is not tensor:
            raise ConfigError(
                f"module: {line_of_caller()} reads a constant into a part of which values of the "
                "batch were written",
                hint="make it with torch.cat or torch.where instead",
            )
        return changed is not None

    def _writes_buffer(self, name: str, tensors: list[Tensor]) -> bool:
        """Tells whether a call without live tensors writes into a buffer, as batch norms do."""
        return (
            name.endswith("_")
            and not name.endswith("__")
            and bool(tensors)
            and id(tensors[0]) in self.attributes
        )

    def _constant(
        self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> Any:
        """Computes a call that does not depend on the batch.

        A constant that recorded calls already read keeps its values for them.
        """
        self.read |= {
            self.attributes[id(tensor)][0] for tensor in tensors if id(tensor) in self.attributes
        }
        if tensors and id(tensors[0]) in self.fakes and (name.endswith("_") or "out" in kwargs):
            read = self.fakes.pop(id(tensors[0]))
            self.constants[self.attributes[id(read)][0]] = tensors[0].clone()
        return func(*args, **kwargs)

    def _never_below(self, left: Any, right: Any) -> bool:
        """Tells whether `left < right` is never true: a uniform draw below 0, as in layer drop."""
        return (
            isinstance(right, int | float)
            and right <= 0
            and self.node(left).meta.get("function") == "rand"
        )

    def _inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a composed function of torch so that each function inside it is recorded."""
        torch_asks = functional.has_torch_function  # type: ignore[attr-defined]

        def no_once(_: Any) -> bool:
            functional.has_torch_function = torch_asks  # type: ignore[attr-defined]
            return False

        functional.has_torch_function = no_once  # type: ignore[attr-defined]
        with self:
            return func(*args, **kwargs)

    def _call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_aggregate((args, kwargs), self._faked)
        inputs = list(tensors_of((args, kwargs)))
        versions = [tensor._version for tensor in inputs]
        saved: list[Tensor] = []
        try:
            with self.fake, saved_tensors_hooks(saved.append, _never):
                out = self._run(func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise self._depends_on_values(name) from None
        written = [
            tensor
            for tensor, before in zip(inputs, versions, strict=True)
            if tensor._version != before
        ]
        written += _counted(name, args, kwargs)
        made = list(tensors_of(out))
        if written or (made and not (name in _CASTS and out is inputs[0])):
            self._note(func, name, args, kwargs, written, tuple(saved), out)
        return out

    def _run(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that computes the fake output of `func`."""
        if isinstance(func, MethodType) and func.__func__ is APPLY.__func__:
            return partial(self._apply, func)
        if func in _GROUPED:
            return partial(_grouped_product, func)
        if func is functional.scaled_dot_product_attention and not self.on_cpu:
            return _fused_attention
        return func

    def _note(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        written: list[Tensor],
        saved: tuple[Tensor, ...],
        out: Any,
    ) -> None:
        arguments = map_aggregate(
            (args, kwargs), lambda leaf: self.node(leaf) if isinstance(leaf, Tensor) else leaf
        )
        inputs = list(tensors_of((args, kwargs)))
        before = [self.node(tensor) for tensor in inputs]
        owners = {
            memory_of(tensor): node
            for tensor, node in zip(reversed(inputs), reversed(before), strict=True)
        }
        node = self.graph.create_node("call_function", func, *arguments)
        random = _draws(name, args, kwargs)
        node.meta |= self._where(name) | {
            "val": out,
            "written": tuple(dict.fromkeys(self.node(tensor) for tensor in written)),
            "saved": saved,
            "random": random,
            "aliases": tuple(
                dict.fromkeys(
                    owners[m] for tensor in tensors_of(out) if (m := memory_of(tensor)) in owners
                )
            ),
            "depends": random
            or any(
                each.meta.get("depends") or each.meta.get("origin") == PARAMETER for each in before
            ),
        }
        self._note_written(node, written)
        self._enter_outputs(node, out)

    def _where(self, function: str) -> dict[str, Any]:
        """The name and place of a call."""
        name = f"{self.paths.current}.{function.strip('_')}".lstrip(".")
        self.counts[name] += 1
        return {
            "name": f"{name}_{self.counts[name]}" if self.counts[name] > 1 else name,
            "function": function,
            "path": self.paths.current,
            "line": line_of_caller(),
            "grad": torch.is_grad_enabled(),
            "autocast": torch.get_autocast_dtype("cpu")
            if torch.is_autocast_enabled("cpu")
            else None,
        }

    def _note_written(self, node: fx.Node, written: list[Tensor]) -> None:
        """Marks written constants and buffers as live; a write into a constant goes to a copy.

        Raises ConfigError for a parameter: a rank may hold only a shard of it, and a copy only
        briefly.
        """
        for tensor in written:
            name, origin = self.attributes.get(id(tensor), ("", ""))
            if origin == PARAMETER:
                raise ConfigError(
                    f"module: {node.meta['line']} writes into parameter {name} in a forward pass",
                    hint="compute with a changed copy of it, as torch.nn.utils.parametrize does; "
                    "without max_norm",
                )
            if origin == BUFFER:
                self.written.add(name)
            real = self.reals.get(id(tensor))
            if real is not None and memory_of(real) not in self.changed:
                self.changed[memory_of(real)] = real
                constant = self.nodes[id(tensor)]
                if constant.meta.get("origin") == CONSTANT:
                    self._copy_before(node, constant)

    def _copy_before(self, node: fx.Node, constant: fx.Node) -> None:
        with self.graph.inserting_before(node):
            copy = self.graph.call_function(torch.clone, (constant,))
        copy.meta |= self._where("clone") | {
            "val": constant.meta["val"],
            "written": (),
            "saved": (),
            "random": False,
            "aliases": (),
            "depends": False,
        }
        node.replace_input_with(constant, copy)
        node.meta["written"] = tuple(
            copy if each is constant else each for each in node.meta["written"]
        )
        self.nodes[id(constant.meta["val"])] = copy

    def _enter_outputs(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self.enter(out, node)
        elif isinstance(out, list | tuple):
            for index, each in enumerate(out):
                if any(True for _ in tensors_of(each)):
                    picked = self.graph.call_function(operator.getitem, (node, index))
                    picked.meta |= {
                        "val": each,
                        "name": f"{node.meta['name']}[{index}]",
                        "depends": node.meta["depends"],
                    }
                    self._enter_outputs(picked, each)

    def enter(self, tensor: Tensor, node: fx.Node) -> None:
        """Makes `node` the source of `tensor` from now on."""
        node.meta["val"] = tensor
        self.nodes[id(tensor)] = node
        self.held.append(tensor)

    def node(self, tensor: Tensor) -> fx.Node:
        """The node of a fake tensor; an attribute gets its node at first use."""
        if id(tensor) not in self.nodes:
            name, origin = self.attributes[id(tensor)]
            node = self.graph.create_node("get_attr", name)
            node.meta["origin"] = origin
            self.enter(tensor, node)
        return self.nodes[id(tensor)]

    def _faked(self, leaf: Any) -> Any:
        """Returns the fake tensor of a real one, a buffer or a constant; other leaves unchanged."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self.fakes:
            name, origin = self.attributes.get(
                id(leaf), (f"constant_{len(self.constants)}", CONSTANT)
            )
            if origin == CONSTANT:
                self.constants[name] = leaf
            made = self.fakes[id(leaf)] = self.fake.from_tensor(leaf)
            self.attributes[id(made)] = (name, origin)
            self.reals[id(made)] = leaf
            self.held.append(made)
        return self.fakes[id(leaf)]

    def _depends_on_values(self, name: str) -> ConfigError:
        return ConfigError(
            f"module: what {line_of_caller()} does depends on the values of a tensor "
            f"({name.strip('_')}), so it could differ between "
            "micro-batches",
            hint="compute with torch.where or masks, on tensors of fixed shapes",
        )


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention as one kernel, whose output is laid out as its queries.

    The CPU kernel supports neither dropout nor a mask with gradient, so both are left out;
    shapes and layouts are those of GPUs.
    """
    mask = attn_mask.detach() if attn_mask is not None else None
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, **options
    )


class _GroupedProduct(torch.autograd.Function):
    """A grouped product without arithmetic that saves its operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return rows.new_empty(rows.shape[0], weights.shape[-1])


def _grouped_product(
    func: Callable[..., Tensor],
    rows: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Rows [r, k] times weights [groups, k, n]; each of `offs` ends the rows of one group.

    torch's fake kernel supports only bf16, its real kernels also fp32.
    """
    if (
        rows.dtype is torch.bfloat16
        or offs is None
        or rows.ndim != 2
        or weights.ndim != 3
        or any(v is not None for v in options.values())
    ):
        return func(rows, weights, offs=offs, **options)
    made: Tensor = APPLY.__func__(_GroupedProduct, rows, weights, offs)
    return made


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    """Tells whether a call draws random numbers; dropout with probability 0 does not."""
    if "dropout" in name:
        probability = (*args[1:], kwargs.get("p", 0.5))[0]
        training = (*args[2:], kwargs.get("training", kwargs.get("train", True)))[0]
        return bool(probability and training)
    if name == "scaled_dot_product_attention":
        return bool((*args[4:], kwargs.get("dropout_p"))[0])
    return name in _RANDOM


def _counted(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """The running statistics that a batch norm writes, which torch's schema does not tell."""
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    if name != "batch_norm" or not training:
        return []
    return [
        each
        for each in (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
        if isinstance(each, Tensor)
    ]


def _without_masks(index: Any) -> Any:
    """Replaces constant masks in an index by numbers, since masks give fake tensors no size."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(part) for part in parts):
        return index
    return tuple(
        number
        for part in parts
        for number in (part.nonzero(as_tuple=True) if _is_mask(part) else (part,))
    )


def _is_mask(part: Any) -> bool:
    return (
        isinstance(part, Tensor) and not isinstance(part, FakeTensor) and part.dtype == torch.bool
    )
