"""Memory of chunks: flat buffers on the device that come and go, flat tensors on the host, and the
copies between them.

A GPU has a stream for each direction; the host's tensors are pinned there, and events say when a
copy is over. On a CPU the "device" is memory of its own as well: copies are real copies, so that a
wrong schedule gives wrong numbers. The streams were written against torch's documentation and have
not been run.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from parplan.costmodels.layers.chunked_layer import STAGED_CHUNKS
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.units import format_bytes

PORTABLE = 1  # cudaHostRegisterPortable


class Holds(StrEnum):
    """Classes of the device's bytes: chunks of parameters, groups of them that are gathered,
    gradients, master and moments.
    """

    CHUNKS = "chunks"
    GATHERED = "gathered"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


class BudgetError(PlannerError):
    """Chunks were to hold more of the device than their schedule says that there is."""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The device's bytes that chunks hold, by class, under a limit: in a pass what the schedule
    counts for it, else the budget.

    most_bytes: at the fullest moment
    """

    limit_bytes: int
    held: Counter[Holds] = field(default_factory=Counter)
    most_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.held.total()

    def take(self, holds: Holds, num_bytes: int) -> None:
        """Raises BudgetError above the limit, before anything is allocated."""
        if self.total_bytes + num_bytes > self.limit_bytes:
            held = ", ".join(f"{each} {found}" for each, found in self.held.items() if found)
            raise BudgetError(
                f"{holds} of {format_bytes(num_bytes)} ({num_bytes} bytes) are needed on the device beside {self.total_bytes} bytes "
                f"({held or 'nothing'}), the budget is {self.limit_bytes} bytes",
                hint="make the plan again, or give it more device memory",
            )
        self.held[holds] += num_bytes
        self.most_bytes = max(self.most_bytes, self.total_bytes)

    def give(self, holds: Holds, num_bytes: int) -> None:
        self.held[holds] -= num_bytes


@dataclass(slots=True, kw_only=True)
class Counts:
    """What was moved since the beginning of a step: bytes and calls to the device (`in`), from it,
    gathered and reduced.
    """

    in_bytes: int = 0
    in_calls: int = 0
    out_bytes: int = 0
    out_calls: int = 0
    gathered_bytes: int = 0
    gathers: int = 0
    reduced_bytes: int = 0
    reduces: int = 0


class Buffer:
    """[elements] on the device without memory until `bring`, and again after `free`; views of it
    stay valid.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, ledger: Ledger, holds: Holds
    ) -> None:
        self.flat = torch.empty(elements, dtype=dtype, device=device)
        self.num_bytes = elements * dtype.itemsize
        self._ledger, self._holds = ledger, holds
        self._ready: Callable[[], object] | None = None
        self.there = False
        self.flat.untyped_storage().resize_(0)

    def bring(self, *, zero: bool = False) -> None:
        """Give it memory. Raises BudgetError."""
        assert not self.there, "it is there"
        self._ledger.take(self._holds, self.num_bytes)
        self.flat.untyped_storage().resize_(self.num_bytes)
        self.there = True
        if zero:
            self.flat.zero_()

    def free(self) -> None:
        assert self.there, "it is not there"
        self.wait()
        self._ready = None
        self.flat.untyped_storage().resize_(0)
        self._ledger.give(self._holds, self.num_bytes)
        self.there = False

    def is_over(self, wait: Callable[[], object]) -> None:
        """What is done with its memory is over when `wait`, which lets the current stream wait for
        that, is through.
        """
        self._ready = wait

    def wait(self) -> None:
        """Let what is computed from now on, on the current stream, wait until what is done with it
        elsewhere is over.
        """
        if self._ready is not None:
            self._ready()

    @contextmanager
    def viewed(self, offset: int, shape: torch.Size) -> Iterator[Tensor]:
        """A tensor in its memory with a version of its own: what is copied here is no change to
        autograd, which kept the view.

        Views of views can be made inside only: there the memory has its size, though nobody may
        count on what it holds.
        """
        storage = self.flat.untyped_storage()
        storage.resize_(self.num_bytes)
        yield self.flat.narrow(0, offset, shape.numel()).view(shape).data
        if not self.there:
            storage.resize_(0)


def host_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [elements] of the host, pinned where `device` is a GPU. Raises ConfigError where the
    host does not let so much be pinned.
    """
    tensor = torch.zeros(elements, dtype=dtype)
    if device.type == "cuda" and tensor.nbytes:
        _pin(tensor)
    return tensor


def _pin(tensor: Tensor) -> None:
    """Not by torch's allocator of pinned memory, which takes the next power of two: up to twice
    what a plan says of the host.
    """
    address, runtime = tensor.data_ptr(), torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, tensor.nbytes, PORTABLE))
    if error:
        raise ConfigError(
            f"the host does not pin {format_bytes(tensor.nbytes)} for chunks (error {error} of CUDA)",
            hint="raise the limit of locked memory (ulimit -l), or keep less on the host",
        )
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False


@dataclass(slots=True)
class _Staged:
    """A gradient on its way to the host, where it is added to `target` when it has come."""

    staging: Tensor
    target: Tensor
    event: torch.cuda.Event | None

    def add(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        self.target.add_(self.staging[: self.target.numel()])


class Copies:
    """Copies of whole chunks between host and device, counted. `staging_elements`: of the largest
    gradient chunk that is added up.
    """

    def __init__(
        self, device: torch.device, counts: Counts, staging_elements: int, dtype: torch.dtype
    ) -> None:
        self.counts = counts
        on_gpu = device.type == "cuda"
        self._in = torch.cuda.Stream(device) if on_gpu else None
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._aside = torch.cuda.Stream(device) if on_gpu else None
        self._stagings = deque(
            host_tensor(staging_elements, dtype, device)
            for _ in range(STAGED_CHUNKS if staging_elements else 0)
        )
        self._staged: deque[_Staged] = deque()

    @property
    def host_bytes(self) -> int:
        return sum(
            each.nbytes for each in (*self._stagings, *(staged.staging for staged in self._staged))
        )

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Around a collective that compute need not wait for, where there are streams: its work is
        to be waited for then.
        """
        if self._aside is None:
            yield False
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield True

    def fetch(self, host: Tensor, buffer: Buffer) -> None:
        """To the device: `buffer` has memory, and may be used after its `wait`."""
        self.counts.in_bytes += host.nbytes
        self.counts.in_calls += 1
        self._copy(buffer.flat, host, buffer, self._in)

    def send(self, buffer: Buffer, host: Tensor, *, add: bool, dropped: bool = False) -> None:
        """Gradients in `buffer` to the host, written there or added to what is there; there after
        `settle`.

        dropped: `buffer` is freed at once, and compute does not wait: its memory is not given to
        anything else before that
        """
        self.counts.out_bytes += buffer.num_bytes
        self.counts.out_calls += 1
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
        stream: torch.cuda.Stream | None,
        *,
        dropped: bool = False,
    ) -> torch.cuda.Event | None:
        """`buffer`: the one on the device, whose memory is the copy's until it is over."""
        if stream is None:
            to.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            buffer.wait()
            to.copy_(source, non_blocking=True)
            event = stream.record_event()
        if not dropped:
            buffer.is_over(lambda: torch.cuda.current_stream().wait_event(event))
        return event

    def _add_first(self) -> None:
        staged = self._staged.popleft()
        staged.add()
        self._stagings.append(staged.staging)

    def settle(self) -> None:
        """All that was sent is on the host, and added up."""
        if self._out is not None:
            self._out.synchronize()
        while self._staged:
            self._add_first()
