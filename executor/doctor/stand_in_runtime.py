"""The runtime of the stand-in for a GPU: its streams, events, memory and counts.

A stream is a list of copies that are not made yet. Waiting for it makes them, in order.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parplan.profiles.units import GIB, MIB

TOTAL_BYTES = 16 * GIB


class StandInStream:
    """A stream: copies that are put off, in their order."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("standin", 0)
        self.due: list[Callable[[], object]] = []
        self.done = 0
        self._eager = False

    def keeps_memory(self) -> None:
        """Memory of the next copy is freed before it ends, which the allocator would put off."""
        self._eager = True

    def put_off(self, copy: Callable[[], object]) -> None:
        if self is RUNTIME.default or self._eager:
            self.run()
            copy()
            self._eager = False
        else:
            self.due.append(copy)

    def run(self, up_to: int | None = None) -> None:
        """Makes the copies up to a number since the beginning, or all."""
        last = self.done + len(self.due) if up_to is None else up_to
        while self.due and self.done < last:
            self.done += 1
            self.due.pop(0)()

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        event = event or StandInEvent()
        event.record(self)
        return event

    def wait_event(self, event: StandInEvent) -> None:
        event.synchronize()

    def wait_stream(self, stream: StandInStream) -> None:
        stream.run()

    def synchronize(self) -> None:
        self.run()

    def query(self) -> bool:
        return not self.due


class StandInEvent:
    """A place in a stream, and the time at which the host recorded it."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._stream: StandInStream | None = None
        self._place = 0
        self.at_s = 0.0

    def record(self, stream: StandInStream | None = None) -> None:
        self._stream = stream or RUNTIME.current_stream()
        self._place = self._stream.done + len(self._stream.due)
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run(self._place)

    def wait(self, stream: StandInStream | None = None) -> None:
        self.synchronize()

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: StandInEvent) -> float:
        return (end.at_s - self.at_s) * 1000


class StandInRuntime:
    """The functions of torch.cuda that the executor and FSDP2 use.

    waits      operators whose result the host waited for, by name
    pageable   copies of pageable memory between host and device
    blocking   copies between host and device that the host waited for
    """

    Stream = StandInStream
    Event = StandInEvent

    def __init__(self) -> None:
        self._pinned: set[int] = set()
        self._held: dict[int, object] = {}
        self._held_bytes = 0
        self._most_bytes = 0
        self.reset()

    def reset(self) -> None:
        """Begins to count anew."""
        self.waits: Counter[str] = Counter()
        self.pageable = self.blocking = 0
        self.default: Any = None

    # what the stand-in's operators tell

    def waited(self, operator: str) -> None:
        """Counts an operator that the host waits for."""
        self.waits[operator] += 1

    def crossed(self, host: Tensor | None, *, to_host: bool, blocks: bool) -> None:
        """Counts a copy between host and device; `host` is its side on the host, if known."""
        if host is not None and not self.is_pinned(host):
            self.pageable += 1
            blocks = blocks or to_host
        if blocks:
            self.blocking += 1
            if to_host:
                self.waited("copy to the host")

    def copy(self, target: Tensor, source: Tensor, *, blocks: bool) -> None:
        stream = self.current_stream()
        if blocks or stream is self.default:
            self.begin_operator()
            target.copy_(source)
            return
        if target.is_floating_point():
            target.fill_(float("nan"))
        stream.put_off(lambda: target.copy_(source))

    def begin_operator(self) -> None:
        """Operators of a stream run after the copies that it has put off."""
        self.current_stream().run()

    def holds(self, host: Tensor) -> None:
        """Counts the memory of a tensor of the device while it lives, once."""
        storage = host.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        num_bytes = storage.nbytes()

        def forget(_: object) -> None:
            del self._held[key]
            self._held_bytes -= num_bytes

        self._held[key] = weakref.ref(storage, forget)
        self._held_bytes += num_bytes
        self._most_bytes = max(self._most_bytes, self._held_bytes)

    def pinned(self, tensor: Tensor) -> Tensor:
        """Marks the memory of a tensor of the host as pinned."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned.add(key)
        weakref.finalize(storage, self._pinned.discard, key)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    # torch.cuda

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Does nothing: a process has one stand-in."""

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def default_stream(self, device: Any = None) -> StandInStream:
        if self.default is None:
            self.default = StandInStream()
        return self.default

    def current_stream(self, device: Any = None) -> StandInStream:
        return _CURRENT[-1] if _CURRENT else self.default_stream()

    @contextmanager
    def stream(self, stream: StandInStream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        _CURRENT.append(stream)
        try:
            yield
        finally:
            _CURRENT.pop()

    def synchronize(self, device: Any = None) -> None:
        self.waited("synchronize")
        self.current_stream().run()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Does nothing: the stand-in draws from the generator of the CPU."""

    manual_seed_all = manual_seed

    def memory_allocated(self, device: Any = None) -> int:
        return self._held_bytes

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._most_bytes

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._most_bytes = self._held_bytes

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL_BYTES, TOTAL_BYTES

    def get_device_name(self, device: Any = None) -> str:
        return "stand-in"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (0, 0)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="stand-in", total_memory=TOTAL_BYTES, L2_cache_size=MIB)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def _sleep(self, cycles: int) -> None:
        """Does nothing: no operator is put off."""

    def clock_rate(self, device: Any = None) -> int:
        raise RuntimeError("the stand-in has no clock")

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=lambda address: 0
        )


_CURRENT: list[StandInStream] = []
RUNTIME = StandInRuntime()
