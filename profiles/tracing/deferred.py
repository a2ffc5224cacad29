"""Deferred initialisation: makes a module without memory and computes any tensor's value later.

Inside `Deferred` every tensor of `at_least_bytes` or more that the code makes has no memory.
Computations with it and writes into it are logged instead of done: constructors, torch.nn.init,
`_init_weights` of Hugging Face and tensor methods alike. `value` replays the part of the log that
one tensor needs. Smaller tensors are made at once, because code reads them (`.tolist()`) and their
memory is negligible. The random numbers of the i-th call are drawn with a seed of (seed, i), so a
value depends neither on which tensors are made nor on the process that makes them; copies of one
draw stay equal, as in the module. torchdistx's deferred_init did the same in C++.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from parplan.profiles.units import KIB

AT_LEAST_BYTES = 64 * KIB
_META = torch.device("meta")
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
# These calls overwrite memory without reading it.
_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"}
)


@dataclass(frozen=True, slots=True)
class _DeferredTensor:
    """A tensor as a view of memory that is not allocated."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Call:
    """A logged call, with `_DeferredTensor`s in place of tensors without memory.

    writes   the memory that it writes into
    makes    for each output, the tensor that it makes in new memory, or None
    """

    number: int
    func: Any
    random: bool
    args: Any
    kwargs: Any
    writes: frozenset[int]
    makes: tuple[_DeferredTensor | None, ...]
    overwrites: int | None


class Deferred:
    """While entered, makes tensors without memory; its log stays readable afterwards."""

    def __init__(self, at_least_bytes: int = AT_LEAST_BYTES, seed: int = 0) -> None:
        self.at_least_bytes = at_least_bytes
        self.seed = seed  # for tensors read while the module is being made
        self._calls: list[_Call] = []
        self._memory: dict[int, torch.UntypedStorage] = {}  # alive, so that ids are unique
        self._entered = ExitStack()

    def __enter__(self) -> Deferred:
        self._entered.enter_context(
            patch.object(init, "_no_grad_trunc_normal_", self._trunc_normal)
        )
        self._entered.enter_context(_Unnoticed(self))
        self._entered.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Does or logs a call of torch and returns its result."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.knows(tensor) for tensor in tensors):
            return self._follow(func, args, kwargs)
        if (
            tensors
            or kwargs.get("generator") is not None
            or not _makes_tensors(func)
            or _is_meta(kwargs.get("device"))
        ):
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": _META})
        if made.nbytes < self.at_least_bytes:
            return func(*args, **kwargs)
        self._log(func, args, {**kwargs, "device": torch.device("cpu")}, made)
        return made

    def knows(self, tensor: Tensor) -> bool:
        """Tells whether `tensor` has no memory and its value can be made."""
        return tensor.device == _META and tensor.untyped_storage()._cdata in self._memory

    def value(self, tensor: Tensor, seed: int) -> Tensor:
        """Returns the value of `tensor`, which this object knows, in separate memory."""
        piece = self._piece(tensor)
        whole = torch.random.fork_rng(devices=[])
        with whole, torch.no_grad():
            memory = self._replay(frozenset({piece.memory}), seed)
            value = _view(piece, memory[piece.memory])
        return value if value.nbytes == memory[piece.memory].nbytes() else value.clone()

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Logs a call with a tensor without memory, or does it on values.

        It is done if it asks for values or writes into real memory.
        """
        written = _written(func, args, kwargs)
        if not _gives_tensors(func) or any(not self.knows(tensor) for tensor in written):
            real_args, real_kwargs = tree_map(self._read, (args, kwargs))
            return func(*real_args, **real_kwargs)
        bare_args, bare_kwargs = tree_map(self._bare, (args, kwargs))
        if kwargs.get("device") is not None:
            bare_kwargs = {**bare_kwargs, "device": _META}
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = func(*bare_args, **bare_kwargs)
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        self._log(func, args, kwargs, out)
        return out

    def _read(self, leaf: Any) -> Any:
        return (
            self.value(leaf, self.seed) if isinstance(leaf, Tensor) and self.knows(leaf) else leaf
        )

    def _bare(self, leaf: Any) -> Any:
        """Returns a real tensor without its memory, to compute shapes; other leaves unchanged."""
        if not isinstance(leaf, Tensor) or leaf.device == _META:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)

    def _trunc_normal(
        self,
        tensor: Tensor,
        *args: Any,
        _original: Any = init._no_grad_trunc_normal_,
        **kwargs: Any,
    ) -> Any:
        """Logs torch.nn.init's truncated normal as one call, because it inspects its draws."""
        if not self.knows(tensor):
            return _original(tensor, *args, **kwargs)
        piece = self._piece(tensor)
        self._calls.append(
            _Call(
                number=len(self._calls),
                func=_original,
                random=True,
                args=(piece, *args),
                kwargs={**kwargs, "generator": None},
                writes=frozenset({piece.memory}),
                makes=(None,),
                overwrites=piece.memory if self._covers(piece) else None,
            )
        )
        return tensor

    def _log(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        written = _written(func, args, kwargs)
        logged_args, logged_kwargs = tree_map(self._logged, (args, kwargs))
        makes = tuple(
            self._register(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(out)
        )
        if not written and not any(makes):
            return  # a view, which its `_DeferredTensor` describes fully
        pieces = [self._piece(tensor) for tensor in written]
        whole = len(pieces) == 1 and _name(func) in _OVERWRITES and self._covers(pieces[0])
        self._calls.append(
            _Call(
                number=len(self._calls),
                func=func,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                args=logged_args,
                kwargs=logged_kwargs,
                writes=frozenset(piece.memory for piece in pieces),
                makes=makes,
                overwrites=pieces[0].memory if whole else None,
            )
        )

    def _register(self, tensor: Tensor) -> _DeferredTensor | None:
        """Returns the `_DeferredTensor` of `tensor` if its memory is new, else None."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._memory:
            return None
        self._memory[storage._cdata] = storage
        return self._piece(tensor)

    def _logged(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.knows(leaf):
            return self._piece(leaf)
        if leaf.nbytes < self.at_least_bytes:
            return leaf.clone()
        return leaf  # assumed not to change later

    def _piece(self, tensor: Tensor) -> _DeferredTensor:
        return _DeferredTensor(
            int(tensor.untyped_storage()._cdata),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def _covers(self, piece: _DeferredTensor) -> bool:
        elements = torch.Size(piece.size).numel()
        return elements * piece.dtype.itemsize == self._memory[piece.memory].nbytes()

    def _replay(self, targets: frozenset[int], seed: int) -> dict[int, torch.UntypedStorage]:
        """Replays the calls that fill the memory `targets` and frees other memory early."""
        calls, last = self._needed(targets)
        memory: dict[int, torch.UntypedStorage] = {}
        for call in calls:
            args, kwargs = tree_map(lambda leaf: self._real(leaf, memory), (call.args, call.kwargs))
            if call.random:
                torch.manual_seed(zlib.crc32(f"{seed}/{call.number}".encode()))
            out = call.func(*args, **kwargs)
            for piece, leaf in zip(call.makes, tree_leaves(out), strict=True):
                if piece is not None:
                    memory[piece.memory] = self._laid_out(leaf, piece)
            for number in [
                number
                for number in memory
                if last.get(number, 0) <= call.number and number not in targets
            ]:
                del memory[number]
        for number in targets - memory.keys():  # memory that no call writes
            memory[number] = _storage(self._memory[number].nbytes())
        return memory

    def _needed(self, targets: frozenset[int]) -> tuple[Sequence[_Call], dict[int, int]]:
        """Returns the calls that the memory `targets` depends on, in order.

        The second value is the number of the last call that touches each memory.
        """
        needed = set(targets)
        calls: list[_Call] = []
        last: dict[int, int] = {}
        for call in reversed(self._calls):
            touched = call.writes | {piece.memory for piece in call.makes if piece is not None}
            if not touched & needed:
                continue
            calls.append(call)
            if call.overwrites is not None:
                needed.discard(call.overwrites)
            needed |= {
                leaf.memory
                for leaf in tree_leaves((call.args, call.kwargs))
                if isinstance(leaf, _DeferredTensor)
            } - ({call.overwrites} if call.overwrites is not None else set())
            for number in touched | set(_memories(call)):
                last.setdefault(number, call.number)
        return calls[::-1], last

    def _laid_out(self, made: Tensor, piece: _DeferredTensor) -> torch.UntypedStorage:
        """Returns the memory of `made`, laid out as `piece`.

        A few of torch's calls lay their outputs out differently on meta tensors.
        """
        if made.stride() == piece.stride and made.storage_offset() == piece.offset:
            return made.untyped_storage()
        storage = _storage(self._memory[piece.memory].nbytes())
        _view(piece, storage).copy_(made)
        return storage

    def _real(self, leaf: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
        if not isinstance(leaf, _DeferredTensor):
            return leaf
        if leaf.memory not in memory:
            memory[leaf.memory] = _storage(self._memory[leaf.memory].nbytes())
        return _view(leaf, memory[leaf.memory])


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every call of torch to `deferred`."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deferred = deferred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.deferred.call(func, args, kwargs or {})


class _Unnoticed(TorchFunctionMode):
    """Hides from torch.nn.init, which skips meta tensors, that deferred tensors are on meta."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and self.deferred.knows(args[0]):
            return False
        return func(*args, **(kwargs or {}))


def _memories(call: _Call) -> Iterator[int]:
    return (
        leaf.memory
        for leaf in tree_leaves((call.args, call.kwargs))
        if isinstance(leaf, _DeferredTensor)
    )


def _storage(num_bytes: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]


def _view(piece: _DeferredTensor, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=piece.dtype).set_(storage, piece.offset, piece.size, piece.stride)


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _makes_tensors(func: Any) -> bool:
    """Tells whether `func` makes a tensor from nothing on a device, like torch.empty."""
    schema = func._schema
    return (
        any(argument.name == "device" for argument in schema.arguments)
        and len(schema.returns) == 1
        and _gives_tensors(func)
    )


def _gives_tensors(func: Any) -> bool:
    return bool(func._schema.returns) and all(
        "Tensor" in str(result.type) for result in func._schema.returns
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the call writes into."""
    tensors: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return tensors
