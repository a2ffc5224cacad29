"""A module made without memory for its tensors, and the values of any one of them later: deferred
initialisation.

Inside `Deferred` every tensor of `at_least_bytes` or more that the code makes has no memory, and
what is computed with it or written into it is written down instead of done: constructors,
torch.nn.init, `_init_weights` of Hugging Face and tensor methods alike. `value` does for one tensor
what was written down, and nothing of what others need. Smaller tensors are made at once: code reads
them (`.tolist()`), and they weigh nothing. Random numbers of the i-th call are drawn with a seed of
(seed, i), so that a value depends neither on which others are made nor on who makes them; copies of
one draw stay equal, as in the module. As torchdistx's deferred_init; there it is C++ for a torch
that is no more.
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
# what was in the memory before such a call is of no use to anyone
_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_"}
)


@dataclass(frozen=True, slots=True)
class _DeferredTensor:
    """A tensor as a part of a piece of memory that does not exist."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Call:
    """`func` with pieces for the tensors without memory; the memory that it writes into, and, by
    output, that it makes.
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
    """While it is entered, tensors are made without memory. What it wrote down stays readable
    after.
    """

    def __init__(self, at_least_bytes: int = AT_LEAST_BYTES, seed: int = 0) -> None:
        self.at_least_bytes = at_least_bytes
        self.seed = seed  # of what is read while the module is still being made
        self._calls: list[_Call] = []
        self._memory: dict[int, torch.UntypedStorage] = {}  # alive, so that no two have one number
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
        """What a call of torch gives: done, or written down."""
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
        self._write_down(func, args, {**kwargs, "device": torch.device("cpu")}, made)
        return made

    def knows(self, tensor: Tensor) -> bool:
        """Whether `tensor` is one without memory whose value can be made."""
        return tensor.device == _META and tensor.untyped_storage()._cdata in self._memory

    def value(self, tensor: Tensor, seed: int) -> Tensor:
        """The value of `tensor`, which this `knows`, in memory of its own."""
        piece = self._piece(tensor)
        whole = torch.random.fork_rng(devices=[])
        with whole, torch.no_grad():
            memory = self._replay(frozenset({piece.memory}), seed)
            found = _view(piece, memory[piece.memory])
        return found if found.nbytes == memory[piece.memory].nbytes() else found.clone()

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call with a tensor without memory: it is written down, unless it asks for values or
        writes into real memory.
        """
        written = _written(func, args, kwargs)
        if not _gives_tensors(func) or any(not self.knows(tensor) for tensor in written):
            real_args, real_kwargs = tree_map(self._read, (args, kwargs))
            return func(*real_args, **real_kwargs)
        bare_args, bare_kwargs = tree_map(self._bare, (args, kwargs))
        if kwargs.get("device") is not None:
            bare_kwargs, kwargs = (
                {**bare_kwargs, "device": _META},
                {**kwargs, "device": torch.device("cpu")},
            )
        out = func(*bare_args, **bare_kwargs)
        self._write_down(
            func, args, {**kwargs, "generator": None} if "generator" in kwargs else kwargs, out
        )
        return out

    def _read(self, leaf: Any) -> Any:
        return (
            self.value(leaf, self.seed) if isinstance(leaf, Tensor) and self.knows(leaf) else leaf
        )

    def _bare(self, leaf: Any) -> Any:
        """A real tensor without its memory, to reckon shapes with; one that has none as it is."""
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
        """torch.nn.init's, which looks at what it draws until all is inside: written down as one
        call.
        """
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

    def _write_down(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        written = _written(func, args, kwargs)
        kept_args, kept_kwargs = tree_map(self._kept, (args, kwargs))
        makes = tuple(
            self._register(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(out)
        )
        if not written and not any(makes):
            return  # a view: its piece says all
        pieces = [self._piece(tensor) for tensor in written]
        whole = len(pieces) == 1 and _name(func) in _OVERWRITES and self._covers(pieces[0])
        self._calls.append(
            _Call(
                number=len(self._calls),
                func=func,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                args=kept_args,
                kwargs=kept_kwargs,
                writes=frozenset(piece.memory for piece in pieces),
                makes=makes,
                overwrites=pieces[0].memory if whole else None,
            )
        )

    def _register(self, tensor: Tensor) -> _DeferredTensor | None:
        """The piece that `tensor` is of its memory, if that is new."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._memory:
            return None
        self._memory[storage._cdata] = storage
        return self._piece(tensor)

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.knows(leaf):
            return self._piece(leaf)
        return (
            leaf.clone() if leaf.nbytes < self.at_least_bytes else leaf
        )  # a larger one is taken to stay as it is

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

    def _replay(self, wanted: frozenset[int], seed: int) -> dict[int, torch.UntypedStorage]:
        """Do what gives the memory `wanted` its values, and forget on the way what nobody needs any
        more.
        """
        calls, last = self._needed(wanted)
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
                if last.get(number, 0) <= call.number and number not in wanted
            ]:
                del memory[number]
        for number in wanted - memory.keys():  # nothing was ever written into it
            memory[number] = _storage(self._memory[number].nbytes())
        return memory

    def _needed(self, wanted: frozenset[int]) -> tuple[Sequence[_Call], dict[int, int]]:
        """The calls that `wanted` memory depends on, in order; and by memory the number of the last
        that touches it.
        """
        needed, calls = set(wanted), []
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
        """The memory of what was `made`, as it was laid out without memory: a few of torch's calls
        differ there.
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
    """torch.nn.init leaves meta tensors alone: what `deferred` knows is none."""

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
    """Whether it is a call like torch.empty: from nothing, on a device."""
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
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return found
