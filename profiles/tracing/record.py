"""One forward pass of a module as the list of torch calls that it makes, recorded on fake tensors: no memory, no arithmetic.

Every call of torch with a tensor that depends on the batch or on a parameter becomes a node of a torch.fx graph, at the level at which
the module calls torch (functional.linear, Tensor.view, ...), so that calling them again runs with autograd as the module does.
What depends on neither is computed at once, for real: a *constant*. A torch.autograd.Function is one call.
"""

from __future__ import annotations

import operator
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from profiles.errors import ConfigError
from profiles.spec import Precision
from profiles.tracing.lines import Paths, line_of_caller
from profiles.tracing.source import Workload

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
PARAMETER, BUFFER, CONSTANT = "parameter", "buffer", "constant"
_READS_VALUES = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
                 Tensor.__index__, Tensor.__complex__, Tensor.nonzero, torch.nonzero, torch.unique, Tensor.unique, Tensor.__contains__}
_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like", "randint_like",
           "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "dropout", "dropout_", "alpha_dropout", "dropout1d", "dropout2d",
           "dropout3d", "feature_dropout", "feature_alpha_dropout"}
_SHAPES_ONLY = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}


_COMPOSED = {functional.multi_head_attention_forward}  # whole layers: what they are made of is recorded
_APPLY = torch.autograd.Function.__dict__["apply"]


def set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """tensor[index] = value, as a call that gives what it wrote."""
    tensor[index] = value
    return tensor


@dataclass(frozen=True, kw_only=True)
class Program:
    """The torch calls of `workload` for one micro-batch, in order.

    graph: placeholders are the batch, by key; get_attr nodes parameters and buffers by their full name, and `constants`; its output is
        the loss. Targets of call_function nodes are called as they are; operator.getitem picks one output of a call that has several

    Meta of nodes: "val", the fake output; of get_attr "origin": PARAMETER, BUFFER or CONSTANT; of calls as well
        name, function  the operator's name, which no other has; torch's name of the function
        path, line      the module that called, '' for the outermost; file:line in its code
        grad            whether gradients were on
        autocast        the dtype of torch.autocast, or None
        written         nodes whose memory the call writes (before it), () for a call that writes none
        aliases         the nodes of its arguments whose memory an output shares, () for a call that makes new memory
        saved           what autograd keeps for its backward pass: tensors
        random          whether it draws random numbers
        depends         whether it depends on a parameter or on random numbers
    """

    workload: Workload
    micro_batch_size: int
    graph: fx.Graph
    constants: dict[str, Tensor]

    @cached_property
    def calls(self) -> tuple[fx.Node, ...]:
        """The calls in order; the i-th is operator i of the TracedModel."""
        return tuple(node for node in self.graph.nodes if node.op == "call_function" and node.target is not operator.getitem)

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """All names of each parameter that has several; the graph uses the first."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.workload.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return tuple(tuple(each) for each in names.values() if len(each) > 1)


def record(workload: Workload, micro_batch_size: int, precision: Precision = Precision.FP32) -> Program:
    """The calls of one micro-batch with parameters and float inputs in `precision`.

    Raises ConfigError with the line of the user's code: what it does depends on the values of tensors, it uses a tensor that no
    call of torch made, its loss is not a scalar.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    dtype = DTYPES[precision]
    recorder = _Recorder(fake, Paths(workload.module))
    run = _Run(workload)
    batch = {key: fake.from_tensor(_cast(value, dtype)) for key, value in workload.batch(micro_batch_size).items()}
    for key, value in batch.items():
        recorder.enter(value, recorder.graph.placeholder(key))
    state = _fake_parameters(workload.module, fake, dtype)
    recorder.attributes |= {id(value): (name, PARAMETER) for name, value in state.items()}
    recorder.attributes |= {id(value): (name, BUFFER) for name, value in workload.module.named_buffers()}
    recorder.owned = state
    with ExitStack() as stack:
        stack.enter_context(recorder.paths)
        stack.enter_context(saved_tensors_hooks(recorder.keep, lambda _: None))
        stack.enter_context(_functions_as_calls(recorder))
        stack.enter_context(recorder)
        loss = torch.func.functional_call(run, {f"module.{name}": value for name, value in state.items()}, (batch,))
    return _finished(workload, micro_batch_size, recorder, loss)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _fake_parameters(module: nn.Module, fake: FakeTensorMode, dtype: torch.dtype) -> dict[str, Tensor]:
    with fake:
        return {
            name: nn.Parameter(torch.empty(p.shape, dtype=dtype if p.is_floating_point() else p.dtype), p.requires_grad)
            for name, p in module.named_parameters()}


def _finished(workload: Workload, micro_batch_size: int, recorder: _Recorder, loss: Any) -> Program:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or id(loss) not in recorder.nodes:
        found = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"module: the loss of {workload.name} is {found}, it must be a scalar tensor that depends on the batch",
                          hint="let the function return (module, batch, loss)")
    recorder.graph.output(recorder.nodes[id(loss)])
    return Program(workload=workload, micro_batch_size=micro_batch_size, graph=recorder.graph, constants=recorder.constants)


@contextmanager
def _functions_as_calls(recorder: _Recorder) -> Iterator[None]:
    """torch.autograd.Function.apply goes past __torch_function__: here it is handed to the recorder."""
    torch.autograd.Function.apply = classmethod(lambda kind, *args, **kwargs: recorder.function(kind, args, kwargs))
    try:
        yield
    finally:
        torch.autograd.Function.apply = _APPLY


class _Run(nn.Module):
    """The module with its loss, so that both have the recorded parameters."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.module = workload.module
        self.loss_of = workload.loss_of

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.loss_of(self.module, batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in arguments or outputs of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchFunctionMode):
    """nodes: by id, of every tensor that a call made or may read; each is held by its node, so that no other gets its id.
    attributes: name and origin of parameters and buffers, which become nodes when they are used first."""

    def __init__(self, fake: FakeTensorMode, paths: Paths) -> None:
        super().__init__()
        self.fake, self.paths = fake, paths
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.attributes: dict[int, tuple[str, str]] = {}
        self.owned: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.fakes: dict[int, Tensor] = {}  # by id of a real tensor
        self.held: list[Tensor] = []
        self.saved: list[Tensor] = []
        self.changed: set[int] = set()  # ids of real tensors that a recorded call writes
        self.closed = False
        self.counts: Counter[str] = Counter()

    def keep(self, tensor: Tensor) -> None:
        self.saved.append(tensor)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        name = getattr(func, "__name__", str(func))
        found = list(_tensors((args, kwargs)))
        live = [tensor for tensor in found if self._is_live(tensor)]
        if not live and name not in _RANDOM and not self._writes_buffer(name, found):
            return func(*args, **kwargs)
        if func in _READS_VALUES:
            raise self._depends_on_values(name)
        if func in _COMPOSED:
            return self._inside(func, args, kwargs)
        if func is Tensor.__setitem__:
            func = set_item
        return self._call(func, name, args, kwargs)

    def _is_live(self, tensor: Tensor) -> bool:
        """Whether it is no constant. Raises ConfigError for a tensor that no call made."""
        known = id(tensor) in self.nodes or id(tensor) in self.changed or self.attributes.get(id(tensor), ("", ""))[1] == PARAMETER
        if isinstance(tensor, FakeTensor) and not known:
            raise ConfigError(f"module: {line_of_caller()} uses a tensor of shape {list(tensor.shape)} that no call of torch made",
                              hint="make tensors with calls of torch, not in autograd hooks or other libraries")
        return known

    def _writes_buffer(self, name: str, found: list[Tensor]) -> bool:
        """Whether a call without live tensors counts in a buffer, as batch norms do."""
        return name.endswith("_") and not name.endswith("__") and bool(found) and id(found[0]) in self.attributes

    def function(self, kind: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """A torch.autograd.Function as one call; what it does inside is its own, but it may read only what it is given."""
        apply = types.MethodType(_APPLY.__func__, kind)
        if self.closed:
            return apply(*args, **kwargs)
        self.closed = True
        try:
            with torch._C.DisableTorchFunction():
                if not any(self._is_live(tensor) for tensor in _tensors((args, kwargs))):
                    return apply(*args, **kwargs)
                return self._call(apply, kind.__name__, args, kwargs)
        finally:
            self.closed = False

    def _inside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of torch that is made of others so that each of those is recorded."""
        original = functional.has_torch_function

        def once(_: Any) -> bool:
            functional.has_torch_function = original
            return False

        functional.has_torch_function = once
        with self:
            return func(*args, **kwargs)

    def _call(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_aggregate((args, kwargs), self._faked)  # type: ignore[misc]
        inputs = list(_tensors((args, kwargs)))
        versions = [tensor._version for tensor in inputs]
        self.saved = []
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise self._depends_on_values(name) from None
        written = [tensor for tensor, before in zip(inputs, versions, strict=True) if tensor._version != before]
        made = list(_tensors(out))
        if not written and all(any(tensor is each for each in inputs) for tensor in made):
            return out  # nothing was done, as by Tensor.to with its own dtype
        self._note(func, name, args, kwargs, inputs, written, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, inputs: Any, written: Any, out: Any) -> None:
        arguments = map_aggregate((args, kwargs), lambda leaf: self.node(leaf) if isinstance(leaf, Tensor) else leaf)
        before = [self.node(tensor) for tensor in inputs]
        node = self.graph.create_node("call_function", func, *arguments)  # type: ignore[misc]
        owners = {_memory(tensor): self.node(tensor) for tensor in reversed(inputs)}
        random = name in _RANDOM or bool(kwargs.get("dropout_p")) and kwargs.get("training", True)
        node.meta |= {
            "val": out, "name": self._name(name), "function": name, "path": self.paths.current, "line": line_of_caller(), "grad": torch.is_grad_enabled(),
            "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            "written": tuple(dict.fromkeys(self.node(tensor) for tensor in written)),
            "aliases": tuple(dict.fromkeys(owners[m] for tensor in _tensors(out) if (m := _memory(tensor)) in owners)),
            "saved": tuple(self.saved), "random": random,
            "depends": random or any(each.meta.get("depends") or each.meta.get("origin") == PARAMETER for each in before)}
        self._enter_outputs(node, out)
        if func is set_item:
            self.enter(written[0], node)
        written_ids = {id(tensor) for tensor in written}
        self.changed |= {real for real, stand_in in self.fakes.items() if id(stand_in) in written_ids}

    def _enter_outputs(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self.enter(out, node, val=False)
        elif isinstance(out, list | tuple):
            for index, each in enumerate(out):
                if any(True for _ in _tensors(each)):
                    picked = self.graph.call_function(operator.getitem, (node, index))
                    picked.meta |= {"val": each, "name": f"{node.meta['name']}[{index}]", "depends": node.meta["depends"]}
                    self._enter_outputs(picked, each)

    def enter(self, tensor: Tensor, node: fx.Node, *, val: bool = True) -> None:
        """From now on `tensor` is what `node` gives."""
        self.nodes[id(tensor)] = node
        self.held.append(tensor)
        if val:
            node.meta["val"] = tensor

    def node(self, tensor: Tensor) -> fx.Node:
        """The node of a fake tensor; of parameters, buffers and constants it is made where it is used first."""
        if id(tensor) not in self.nodes:
            name, origin = self.attributes[id(tensor)]
            node = self.graph.create_node("get_attr", name)
            node.meta["origin"] = origin
            self.enter(tensor, node)
        return self.nodes[id(tensor)]

    def _faked(self, leaf: Any) -> Any:
        """A real tensor, a buffer or a constant, as the fake one that stands for it."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self.fakes:
            name, origin = self.attributes.get(id(leaf), (f"constant_{len(self.constants)}", CONSTANT))
            if origin == CONSTANT:
                self.constants[name] = leaf
            made = self.fakes[id(leaf)] = self.fake.from_tensor(leaf)
            self.attributes[id(made)] = (name, origin)
            self.held += [leaf, made]
        return self.fakes[id(leaf)]

    def _name(self, function: str) -> str:
        """The calling module's name with the function's, and a number behind where the module calls it again."""
        name = f"{self.paths.current}.{function.strip('_')}".lstrip(".")
        self.counts[name] += 1
        return f"{name}_{self.counts[name]}" if self.counts[name] > 1 else name

    def _depends_on_values(self, name: str) -> ConfigError:
        return ConfigError(
            f"module: what {line_of_caller()} does depends on the values of a tensor ({name.strip('_')}), so it can differ between "
            "micro-batches", hint="compute with torch.where or masks, on tensors of fixed shapes")
