"""Memory and traffic of a rank on fake tensors: the life of every storage, and every collective.

A storage is noted when an operator first returns a tensor in it, changes when FSDP empties or fills
it, and ends with its last tensor. Memory that a kernel uses internally is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.usage.rank_traffic import MESSAGE, SentBytes, Tally
from parplan.executor.tensors import memory_of, part

OTHER = "other"  # memory that is no state: activations and temporaries
HOST = "host"  # memory that a GPU's rank has on its host

# The kind, and the index of the argument whose bytes `collective_time` counts (None: the result):
# the output of a gather, the input of any other collective.
_CALLS = {
    "allreduce_": (Collective.ALL_REDUCE, 0),
    "all_reduce": (Collective.ALL_REDUCE, 0),
    "all_reduce_": (Collective.ALL_REDUCE, 0),
    "_allgather_base_": (Collective.ALL_GATHER, 0),
    "allgather_": (Collective.ALL_GATHER, 0),
    "all_gather_into_tensor": (Collective.ALL_GATHER, None),
    "_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, 0),
    "alltoall_base_": (Collective.ALL_TO_ALL, 1),
    "all_to_all_single": (Collective.ALL_TO_ALL, 0),
    "shard_dim_alltoall": (Collective.ALL_TO_ALL, 0),
    "recv_": (MESSAGE, 0),
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# A message counts on the rank that receives it.
_SILENT = ("send", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class _Storage:
    """One storage: its bytes now, and its kind."""

    __slots__ = ("alive", "kind", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.kind = OTHER
        self.alive: weakref.ref[torch.UntypedStorage] | None = None


class Observed(TorchDispatchMode):
    """Follows all memory of fake tensors and counts collectives.

    `axes` names the mesh axis of every process group. An operator on real tensors alone runs for
    real: the device mesh is made of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes: Mapping[str, str] = {}
        self.now = 0
        self._pieces: dict[int, _Storage] = {}
        self._log: list[tuple[_Storage, int]] = []
        self._before: dict[_Storage, int] = {}
        self._tally = Tally()
        self._resize = torch.UntypedStorage.resize_
        self._patch = patch.object(
            torch.UntypedStorage, "resize_", lambda storage, size: self._resized(storage, size)
        )

    def __enter__(self) -> Observed:
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            not types
            and func is not torch.ops.aten.lift_fresh.default
            and any(isinstance(a, Tensor) for a in tree_leaves(args))
        ):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func.overloadpacket.__name__, args, out)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if type(tensor) is FakeTensor:
                self._meet(tensor)
        return out

    def start(self) -> None:
        """Begin to count collectives and to look for the peak."""
        self._tally, self._log = Tally(), []
        self._before = {piece: piece.num_bytes for piece in self._pieces.values()}

    def mark(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the kind of the tensors' memory, now, before and later; skip empty storages."""
        for tensor in tensors:
            piece = None if tensor is None else self._pieces.get(memory_of(tensor))
            if piece is not None and piece.num_bytes:
                piece.kind = kind

    def held(self) -> Counter[str]:
        """Return the bytes that are alive, by kind."""
        return _by_kind({piece: piece.num_bytes for piece in self._pieces.values()})

    def fullest(self) -> int:
        """Return the most bytes of the device since `start`."""
        return self._most(on_host=False)

    def fullest_host(self) -> int:
        """Return the most bytes of the host since `start`."""
        return self._most(on_host=True)

    def _most(self, *, on_host: bool) -> int:
        """Return the most bytes of one of the two since `start`, by the kinds of today."""
        total = most = sum(
            size for piece, size in self._before.items() if (piece.kind == HOST) is on_host
        )
        for piece, change in self._log:
            if (piece.kind == HOST) is on_host:
                total += change
                most = max(most, total)
        return most

    def sent(self) -> tuple[SentBytes, ...]:
        """Return the collectives since `start`."""
        return self._tally.total()

    def _meet(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._pieces:
            piece = self._pieces[storage._cdata] = _Storage(0)
            piece.alive = weakref.ref(storage, partial(self._end, storage._cdata))
            self._change(piece, storage.size())

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        out = self._resize(storage, size)
        piece = self._pieces.get(storage._cdata)
        if piece is not None:
            self._change(piece, size)
        return out

    def _end(self, key: int, _: object) -> None:
        self._change(self._pieces.pop(key), 0)

    def _change(self, piece: _Storage, num_bytes: int) -> None:
        change, piece.num_bytes = num_bytes - piece.num_bytes, num_bytes
        self.now += change
        self._log.append((piece, change))

    def _count(self, name: str, args: Any, out: Any) -> None:
        group = _group_name(args)
        if name in _SILENT or (
            group and dist.distributed_c10d._resolve_process_group(group).size() == 1
        ):
            return
        kind, which = _CALLS.get(name, (name, 0))
        counted = out if which is None else args[which]
        num_bytes = sum(
            part(tensor).nbytes for tensor in tree_leaves(counted) if isinstance(tensor, Tensor)
        )
        self._tally.add(self.axes.get(group, "other"), kind, num_bytes)


def _by_kind(sizes: Mapping[_Storage, int]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for piece, num_bytes in sizes.items():
        totals[piece.kind] += num_bytes
    return totals


def _group_name(args: Any) -> str:
    """Return the name of the process group of a collective, given by name or boxed."""
    unbox: Callable[[Any], dist.ProcessGroup] = dist.ProcessGroup.unbox
    name = ""
    for arg in args:
        if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
            return arg
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            name = unbox(arg).group_name
    return name
