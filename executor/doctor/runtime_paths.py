"""Streams, events, pinned memory, random numbers and the memory counts of a GPU."""

from __future__ import annotations

import time

import torch
from torch import nn

from parplan.executor.chunks.chunk_buffers import (
    Buffer,
    ByteClass,
    ChunkCopies,
    CopyCounts,
    DeviceLedger,
    host_tensor,
)
from parplan.executor.chunks.moment_trace import GpuBytes
from parplan.executor.doctor.path import (
    Checked,
    GpuPath,
    Place,
    WrongError,
    require_close,
    require_on,
)
from parplan.executor.memory.host_copies import HostCopies
from parplan.executor.memory.saved_tensors import _as_before, _random_states
from parplan.executor.tensors import to_device
from parplan.executor.watch.run_recorder import RunRecorder, memory_peaks
from parplan.executor.watch.watch import has_work
from parplan.profiles.profiler.gpus import forked_random, gpu
from parplan.profiles.units import GB, MIB

ROUNDS = 5
ROWS, COLUMNS = 256, 1024
LARGE_BYTES = 256 * MIB
PINNED_SHARE = 0.8  # of the speed of pageable copies, which pinned ones must reach
TIMED_PRODUCT = 2048


def saved_tensors(place: Place) -> Checked:
    """Sends tensors to the host behind a computation and brings them back, several under way."""
    copies, product = HostCopies(place.device), place.normal(COLUMNS, COLUMNS, seed=1)
    weight, x = product.to(place.device) / COLUMNS**0.5, place.normal(ROWS, COLUMNS)
    there, here = x.to(place.device), x
    expected, sent = [], []
    for _ in range(ROUNDS):
        there, here = there @ weight, here @ (product / COLUMNS**0.5)
        flight = copies.flight()
        sent.append(flight.send(there))
        copies.ended(flight)
        expected.append(here)
    copies.settle()
    errors = []
    for each, right in zip(reversed(sent), reversed(expected), strict=True):
        back = each.tensor()
        require_on("a tensor that came back", back, place.device)
        errors.append(require_close("a tensor that came back", back, right, 1e-4))
    return Checked(says=f"{ROUNDS} tensors went and came, largest error {max(errors):.1e}")


def chunk_copies(place: Place) -> Checked:
    """Copies chunks from pinned memory, and adds gradients up there."""
    copies = ChunkCopies(place.device, CopyCounts(), COLUMNS, torch.float32)
    ledger = DeviceLedger(limit_bytes=GB)
    buffer = Buffer(COLUMNS, torch.float32, place.device, ledger, ByteClass.CHUNKS)
    host = host_tensor(COLUMNS, torch.float32, place.device)
    total = host_tensor(COLUMNS, torch.float32, place.device)
    if place.on_gpu and place.real and not host.is_pinned():
        raise WrongError("the host's memory of a chunk is not pinned")
    values = place.normal(COLUMNS)
    host.copy_(values)
    for number in range(ROUNDS):
        buffer.bring()
        copies.fetch(host, buffer)
        buffer.wait()
        buffer.flat.mul_(number + 1)
        with copies.aside():
            buffer.wait()
        copies.send(buffer, total, add=number > 0)
        buffer.free()
    copies.settle()
    factor = sum(range(1, ROUNDS + 1))
    error = require_close("the sum of gradients on the host", total, factor * values, 1e-6)
    return Checked(says=f"{ROUNDS} chunks fetched and added up, error {error:.1e}")


def pinned_batches(place: Place) -> Checked:
    """Copies batches from pinned memory, beside pageable copies of as many bytes."""
    batch = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
    copied = to_device(batch, place.device)
    require_on("a batch", copied, place.device)
    require_close("a batch", copied, batch, 0.0)
    if not (place.on_gpu and place.real):
        return Checked(says="a batch is on the device")
    source = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    pinned, target = source.pin_memory(), torch.empty_like(source, device=place.device)
    speeds = []
    for host in (source, pinned):
        laps = []
        for _ in range(ROUNDS):
            place.synchronize()
            started_s = time.perf_counter()
            target.copy_(host, non_blocking=True)
            place.synchronize()
            laps.append(time.perf_counter() - started_s)
        speeds.append(LARGE_BYTES / min(laps))
    says = f"pinned {speeds[1] / GB:.1f} GB/s, pageable {speeds[0] / GB:.1f} GB/s"
    slow = says if speeds[1] < PINNED_SHARE * speeds[0] else ""
    return Checked(says=says, slow=slow)


def random_numbers(place: Place) -> Checked:
    """Draws dropout masks again: in a rerun, and after work that forks the generators."""
    x = torch.ones(COLUMNS, device=place.device)
    states = _random_states((x,))
    first = nn.functional.dropout(x)
    with _as_before((x,), (False,), states) as (again,):
        rerun = nn.functional.dropout(again)
    require_close("the mask of a rerun", rerun, first, 0.0)
    with _as_before((x,), (False,), states), forked_random(place.device):
        nn.functional.dropout(x)
    with _as_before((x,), (False,), states) as (again,):
        require_close("a mask after a fork", nn.functional.dropout(again), first, 0.0)
    return Checked(says="masks are drawn again, bit by bit")


def memory_counts(place: Place) -> Checked:
    """Counts the bytes of an allocation, and knows whether work is left."""
    recorder = RunRecorder(place.device, 2)
    recorder.start()
    counted = GpuBytes(place.device) if place.on_gpu else None
    if counted is None:
        return Checked(says="a CPU's bytes are counted by the profiler")
    with counted.counted():
        held = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=place.device)
        counted.mark()
    peaks = memory_peaks(place.device, recorder.cpu_peak)
    most = counted.spans[0].most
    place.synchronize()
    if place.real and (most < held.nbytes or has_work(place.device)):
        raise WrongError(f"{held.nbytes} bytes were allocated, the allocator counts {most}")
    del held
    return Checked(says=f"{most / MIB:.0f} MiB counted, peak {peaks['allocated_bytes']} bytes")


def busy_gpu(place: Place) -> Checked:
    """Tells from another stream's view whether the GPU has work left, as the watch does."""
    if not place.on_gpu:
        return Checked(says="a CPU has no work apart from its host")
    place.synchronize()
    idle = has_work(place.device)
    gpu(place.device)._sleep(10**8)
    busy = has_work(place.device)
    place.synchronize()
    if idle or (place.real and not busy):
        raise WrongError(f"work is left: {idle} when idle, {busy} when busy")
    return Checked(says="a GPU with work left is told from an idle one")


_COPIES = "executor/memory/host_copies.py"
_CHUNKS = "executor/chunks/chunk_buffers.py"
_SAVED = "executor/memory/saved_tensors.py"
_RECORDER = "executor/watch/run_recorder.py"

PATHS = (
    GpuPath(
        name="saved tensors on the host",
        checks="streams and events of activations that go to the host and come back",
        run=saved_tensors,
        covers=(
            f"{_COPIES}:HostCopies.__init__",
            f"{_COPIES}:HostCopies.copy",
            f"{_COPIES}:HostTensor._wait",
            f"{_COPIES}:Flight.let_go",
        ),
    ),
    GpuPath(
        name="chunk copies",
        checks="pinned memory that CUDA registered, both directions, sums on the host",
        run=chunk_copies,
        covers=(
            f"{_CHUNKS}:host_tensor",
            f"{_CHUNKS}:ChunkCopies.__init__",
            f"{_CHUNKS}:ChunkCopies.aside",
            f"{_CHUNKS}:ChunkCopies.send",
            f"{_CHUNKS}:ChunkCopies._copy",
        ),
    ),
    GpuPath(
        name="pinned batches",
        checks="batches that the host does not wait for, beside pageable copies",
        run=pinned_batches,
        covers=("executor/tensors.py:to_device",),
    ),
    GpuPath(
        name="random numbers",
        checks="dropout masks of a rerun and after a fork of the generators",
        run=random_numbers,
        covers=(
            f"{_SAVED}:_as_before",
            f"{_SAVED}:_random_states",
            f"{_SAVED}:_set_random_states",
            "executor/traced/divided_calls.py:DividedCalls._random",
            "profiles/profiler/gpus.py:forked_random",
        ),
    ),
    GpuPath(
        name="memory counts",
        checks="the caching allocator's bytes of an allocation",
        run=memory_counts,
        covers=(
            "executor/chunks/moment_trace.py:MomentTrace.__init__",
            "executor/chunks/moment_trace.py:GpuBytes.mark",
            "executor/chunks/moment_trace.py:GpuBytes.counted",
            f"{_RECORDER}:RunRecorder.__init__",
            f"{_RECORDER}:RunRecorder.start",
            f"{_RECORDER}:memory_peaks",
        ),
    ),
    GpuPath(
        name="watch",
        checks="whether a GPU has work left, by which a hung rank is named",
        run=busy_gpu,
        covers=("executor/watch/watch.py:has_work",),
    ),
)
