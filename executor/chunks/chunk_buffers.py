"""Memory of chunks: flat buffers on the device, flat tensors on the host, and copies between them.

A GPU has a stream for each direction; the host's tensors are pinned, and events mark the end of a
copy. On a CPU the "device" has separate memory as well: copies are real copies, so that a wrong
schedule gives wrong numbers. The streams follow torch's documentation and have not been run.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from parplan.costmodels.layers.chunked_layer import STAGED_CHUNKS
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import format_bytes

PORTABLE = 1  # cudaHostRegisterPortable


class ByteClass(StrEnum):
    """Classes of the device bytes of chunks; `GATHERED` is groups of chunks of parameters."""

    CHUNKS = "chunks"
    GATHERED = "gathered"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


class BudgetError(PlannerError):
    """Chunks need more device bytes than their schedule counts."""


@dataclass(slots=True, kw_only=True)
class DeviceLedger:
    """The device bytes of chunks, by class, under a limit.

    The limit is the schedule's count for the current pass, else the budget. most_bytes is the
    highest total so far.
    """

    limit_bytes: int
    held: Counter[ByteClass] = field(default_factory=Counter)
    most_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.held.total()

    def take(self, byte_class: ByteClass, num_bytes: int) -> None:
        """Counts bytes before they are allocated. Raises BudgetError above the limit."""
        if self.total_bytes + num_bytes > self.limit_bytes:
            held = ", ".join(f"{each} {count}" for each, count in self.held.items() if count)
            raise BudgetError(
                f"{byte_class} of {format_bytes(num_bytes)} ({num_bytes} bytes) are needed on the "
                f"device beside {self.total_bytes} bytes "
                f"({held or 'nothing'}), the budget is {self.limit_bytes} bytes",
                hint="make the plan again, or give it more device memory",
            )
        self.held[byte_class] += num_bytes
        self.most_bytes = max(self.most_bytes, self.total_bytes)

    def give(self, byte_class: ByteClass, num_bytes: int) -> None:
        self.held[byte_class] -= num_bytes


@dataclass(slots=True, kw_only=True)
class CopyCounts:
    """Bytes since the beginning of a step to the device (`in`), from it (`out`), and of groups.

    `in_calls`, `gathers` and `reduces` count the operations.
    """

    in_bytes: int = 0
    in_calls: int = 0
    out_bytes: int = 0
    gathered_bytes: int = 0
    gathers: int = 0
    reduced_bytes: int = 0
    reduces: int = 0


class Buffer:
    """[elements] on the device, with memory between `bring` and `free` only.

    Views of it stay valid.
    """

    def __init__(
        self,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: DeviceLedger,
        byte_class: ByteClass,
    ) -> None:
        self.flat = torch.empty(elements, dtype=dtype, device=device)
        self.num_bytes = elements * dtype.itemsize
        self._ledger, self._byte_class = ledger, byte_class
        self._ready: Callable[[], object] | None = None
        self.there = False
        self.flat.untyped_storage().resize_(0)

    def bring(self, *, zero: bool = False) -> None:
        """Allocates the memory. Raises BudgetError."""
        assert not self.there, "it is there"
        self._ledger.take(self._byte_class, self.num_bytes)
        self.flat.untyped_storage().resize_(self.num_bytes)
        self.there = True
        if zero:
            self.flat.zero_()

    def free(self) -> None:
        assert self.there, "it is not there"
        self.wait()
        self._ready = None
        self.flat.untyped_storage().resize_(0)
        self._ledger.give(self._byte_class, self.num_bytes)
        self.there = False

    def is_over(self, wait: Callable[[], object]) -> None:
        """Sets the wait for an operation on the memory.

        `wait` makes the current stream wait for the operation, which runs elsewhere.
        """
        self._ready = wait

    def wait(self) -> None:
        """Makes later work on the current stream wait for operations on the memory elsewhere."""
        if self._ready is not None:
            self._ready()

    @contextmanager
    def viewed(self, offset: int, shape: torch.Size) -> Iterator[Tensor]:
        """Yields a tensor in the memory with a version counter of its own.

        Autograd does not see copies into the buffer as a change of the saved view. Views of views
        can be made only inside: there the memory has its size, but its contents are undefined.
        """
        storage = self.flat.untyped_storage()
        storage.resize_(self.num_bytes)
        yield self.flat.narrow(0, offset, shape.numel()).view(shape).data
        if not self.there:
            storage.resize_(0)


def host_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros [elements] on the host, pinned where `device` is a GPU.

    Raises ConfigError where the host refuses to pin that much.
    """
    tensor = torch.zeros(elements, dtype=dtype)
    if is_gpu(device) and tensor.nbytes:
        _pin(tensor, gpu(device).cudart())
    return tensor


def _pin(tensor: Tensor, runtime: Any) -> None:
    """Pins a tensor without torch's allocator of pinned memory.

    That allocator takes the next power of two: up to twice the host bytes of the plan.
    """
    address = tensor.data_ptr()
    error = int(runtime.cudaHostRegister(address, tensor.nbytes, PORTABLE))
    if error:
        raise ConfigError(
            f"the host does not pin {format_bytes(tensor.nbytes)} for chunks "
            f"(error {error} of CUDA)",
            hint="raise the limit of locked memory (ulimit -l), or keep less on the host",
        )
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False


@dataclass(slots=True)
class _Staged:
    """A gradient on its way to the host, which is added to `target` on arrival."""

    staging: Tensor
    target: Tensor
    event: torch.Event | None

    def add(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        self.target.add_(self.staging[: self.target.numel()])


class ChunkCopies:
    """Copies of whole chunks between host and device, counted.

    `staging_elements` are those of the largest gradient chunk that is added up.
    """

    def __init__(
        self, device: torch.device, counts: CopyCounts, staging_elements: int, dtype: torch.dtype
    ) -> None:
        self.counts, self.device = counts, device
        on_gpu = is_gpu(device)
        self._in = gpu(device).Stream(device) if on_gpu else None
        self._out = gpu(device).Stream(device) if on_gpu else None
        self._aside = gpu(device).Stream(device) if on_gpu else None
        self._stagings = deque(
            host_tensor(staging_elements, dtype, device)
            for _ in range(STAGED_CHUNKS if staging_elements else 0)
        )
        self._staged: deque[_Staged] = deque()

    @property
    def host_bytes(self) -> int:
        in_use = (staged.staging for staged in self._staged)
        return sum(staging.nbytes for staging in (*self._stagings, *in_use))

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Surrounds a collective that runs beside the computation.

        Yields whether there are streams: its work must then be waited for.
        """
        if self._aside is None:
            yield False
            return
        self._aside.wait_stream(gpu(self.device).current_stream(self.device))
        with gpu(self.device).stream(self._aside):
            yield True

    def fetch(self, host: Tensor, buffer: Buffer) -> None:
        """Copies to the device; `buffer` has memory and may be used after its `wait`."""
        self.counts.in_bytes += host.nbytes
        self.counts.in_calls += 1
        self._copy(buffer.flat, host, buffer, self._in)

    def send(self, buffer: Buffer, host: Tensor, *, add: bool, dropped: bool = False) -> None:
        """Copies gradients in `buffer` to the host or adds them there, until `settle`.

        With `dropped` the caller frees `buffer` at once, and the computation does not wait: its
        memory is not reused before the copy ends.
        """
        self.counts.out_bytes += buffer.num_bytes
        if dropped and self._out is not None:
            buffer.flat.record_stream(self._out)
        if not add:
            self._copy(host, buffer.flat, buffer, self._out, dropped=dropped)
            return
        if not self._stagings:
            self._add_first()
        staging = self._stagings.popleft()
        event = self._copy(staging[: host.numel()], buffer.flat, buffer, self._out)
        self._staged.append(_Staged(staging, host, event))

    def _copy(
        self,
        to: Tensor,
        source: Tensor,
        buffer: Buffer,
        stream: torch.Stream | None,
        *,
        dropped: bool = False,
    ) -> torch.Event | None:
        """Copies on `stream`; `buffer` is the side on the device, which waits for its end."""
        if stream is None:
            to.copy_(source)
            return None
        stream.wait_stream(gpu(self.device).current_stream(self.device))
        with gpu(self.device).stream(stream):
            buffer.wait()
            to.copy_(source, non_blocking=True)
            event = stream.record_event()
        if not dropped:
            buffer.is_over(lambda: gpu(self.device).current_stream(self.device).wait_event(event))
        return event

    def _add_first(self) -> None:
        staged = self._staged.popleft()
        staged.add()
        self._stagings.append(staged.staging)

    def settle(self) -> None:
        """Waits until all sent gradients are on the host and added up."""
        if self._out is not None:
            self._out.synchronize()
        while self._staged:
            self._add_first()
