"""A stand-in for a GPU: a second device that computes on the CPU and refuses mistakes of devices.

Its tensors have a device type of their own (torch's PrivateUse1), so a branch for GPUs is taken and
torch's autograd runs their backward pass in a thread of the device, as for a GPU. An operator that
mixes them with tensors of the host fails, and so does a collective of the device's backend with a
tensor of the host. Copies that a stream other than the default one makes without blocking are put
off until a stream, an event or the host waits for them, and their target holds NaN until then: a
missing wait gives wrong numbers. `stand_in()` installs all of this for a `with` statement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from parplan.executor.doctor.stand_in_runtime import RUNTIME, StandInRuntime

KIND = "standin"
_aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COPIES = (_aten.copy_.default, _aten._foreach_copy_.default, _aten._to_copy.default)
# operators whose result, or its size, the host must wait for on a GPU
_WAITS = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
}


class MixedDevicesError(RuntimeError):
    """Tensors of the device and of the host meet in one operator."""


class StandInTensor(torch.Tensor):
    """A tensor on the stand-in; `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> StandInTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(KIND, 0),
        )
        made.host = host
        RUNTIME.holds(host)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        stream.keeps_memory()

    def tolist(self) -> Any:
        RUNTIME.waited("tolist")
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"StandInTensor({self.host})"


class _Operators(TorchDispatchMode):
    """Sees every operator, those that make tensors too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(each not in _PLAIN and not issubclass(each, StandInTensor) for each in types):
            return NotImplemented  # a DTensor, whose parts come back here
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_device = [each for each in tensors if isinstance(each, StandInTensor)]
    asked = kwargs.get("device")
    to_device = asked is not None and torch.device(asked).type == KIND
    pins = bool(kwargs.get("pin_memory")) or func is _aten._pin_memory.default
    if not on_device and not to_device and not pins and func is not _aten.is_pinned.default:
        _require_host_group(func, args, tensors)
        return func(*args, **kwargs)
    if func is _aten.is_pinned.default:
        return RUNTIME.is_pinned(tensors[0])
    _require_one_device(func, tensors, on_device)
    name = func._schema.name.rpartition("::")[2]
    if on_device and name in _WAITS:
        RUNTIME.waited(name)
    if func in _COPIES:
        return _copied(func, args, kwargs, to_device=to_device)
    plain = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if func is _aten._pin_memory.default:
        return RUNTIME.pinned(args[0].clone())
    if to_device:
        plain["device"] = torch.device("cpu")
    RUNTIME.begin_operator()
    made = func(*_host(args), **_host(plain))
    if pins:
        return RUNTIME.pinned(made)
    leaves_device = asked is not None and not to_device
    return made if leaves_device else _wrapped(made, on_device)


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_device: bool) -> Any:
    """Copies between the devices or within one; a copy without blocking ends when it is due."""
    if func is _aten._to_copy.default:
        source = args[0]
        plain = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        blocks = not kwargs.get("non_blocking", False)
        leaves = kwargs.get("device") is not None and not to_device
        crosses = to_device != isinstance(source, StandInTensor) or leaves
        if crosses:
            host = source if to_device else None
            RUNTIME.crossed(host, to_host=leaves, blocks=blocks)
        RUNTIME.begin_operator()
        made = func(_host(source), **plain)
        if kwargs.get("pin_memory"):
            made = RUNTIME.pinned(made)
        return made if leaves else StandInTensor(made)
    if func is _aten._foreach_copy_.default:
        pairs = list(zip(args[0], args[1], strict=True))
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        pairs = [(args[0], args[1])]
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    for target, source in pairs:
        to_host = not isinstance(target, StandInTensor)
        crosses = to_host or not isinstance(source, StandInTensor)
        if crosses and source.dim():
            RUNTIME.crossed(target if to_host else source, to_host=to_host, blocks=blocks)
        RUNTIME.copy(_host(target), _host(source), blocks=blocks or not crosses)
    return args[0] if func is _aten.copy_.default else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _host(value: Any) -> Any:
    """Returns an argument with the values of its tensors, which lists of tensors keep in order."""
    if isinstance(value, StandInTensor):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)([_host(each) for each in value])
    if isinstance(value, dict):
        return {key: _host(each) for key, each in value.items()}
    return value


def _wrapped(made: Any, inputs: Sequence[StandInTensor]) -> Any:
    """Returns results as tensors of the device; one that is an input is that input."""
    known = {id(each.host): each for each in inputs}

    def wrap(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, StandInTensor):
            return known[id(value)] if id(value) in known else StandInTensor(value)
        if isinstance(value, list | tuple):
            return type(value)([wrap(each) for each in value])
        return value

    return wrap(made)


def _require_one_device(func: Any, tensors: Sequence[Tensor], on_device: Sequence[Tensor]) -> None:
    if not on_device or len(tensors) == len(on_device) or func in _COPIES:
        return
    on_host = [each for each in tensors if not isinstance(each, StandInTensor)]
    in_collective = "c10d" in func._schema.name
    # torch takes a number of the host as an operand of any device
    wrong = [each for each in on_host if each.dim() or in_collective]
    if wrong:
        shapes = ", ".join(str(tuple(each.shape)) for each in wrong)
        raise MixedDevicesError(f"{func}: tensors of shape {shapes} are on the CPU, others are not")


def _require_host_group(func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    """Raises MixedDevicesError for a tensor of the host in a collective of the device."""
    if not func._schema.name.startswith("c10d::") or "barrier" in func._schema.name:
        return
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            group = dist.ProcessGroup.unbox(each)
            if tensors and dist.get_backend(group) == KIND:
                raise MixedDevicesError(f"{func}: a tensor of the CPU in a group of GPUs")


def _tensor_by(before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `torch.tensor`, which asks no dispatch mode, with a copy to the device that does."""

    def tensor(data: Any, *, device: Any = None, **keywords: Any) -> Tensor:
        made = before(data, **keywords)
        return made if device is None else made.to(device)

    return tensor


@functools.cache
def register() -> None:
    """Makes the device and its backend known to torch, before the first backward pass."""
    _setup_privateuseone_for_python_backend(KIND, RUNTIME)
    dist.Backend.register_backend(
        KIND,
        lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
        devices=[KIND, "cpu"],
    )
    dist.Backend.backend_capability["gloo"].append(KIND)  # as of CUDA: a group of gloo has a GPU


@contextmanager
def stand_in() -> Iterator[StandInRuntime]:
    """Installs the stand-in as the only GPU of this process, and yields its runtime.

    A process that has run a backward pass before `register` cannot have it.
    """
    register()
    RUNTIME.reset()
    on_device = torch.device(KIND, 0)
    before = distributed_c10d._get_object_coll_device

    def of_objects(group: Any = None) -> Any:
        backend = dist.get_backend(group)
        return str(on_device) if backend == KIND else before(group)

    with ExitStack() as stack:
        stack.enter_context(patch.object(distributed_c10d, "_get_object_coll_device", of_objects))
        # torch asks the PrivateUse1 backend for these, which a backend of Python lacks
        for name in ("synchronize", "current_stream"):
            stack.enter_context(patch.object(torch.accelerator, name, getattr(RUNTIME, name)))
        stack.enter_context(patch.object(torch, "tensor", _tensor_by(torch.tensor)))
        stack.enter_context(_Operators())
        yield RUNTIME
