"""Saved tensors on the host: copied out as they are made, and back ahead of the backward pass.

torch's save_on_cpu copies in the order of the kernels, so nothing hides it. Here each direction has
a separate stream. As in torchtune's OffloadActivations, a tensor on its way out is held until the
computation has waited for the copy; record_stream would return its memory only when the host looks.
The window is one block: the tensors that a block sends are released when the next block has run
forward, and when a block's backward pass begins, the tensors of the block before it start to come
back. On a CPU the same copies are made at the same places, at once. Pinned memory comes from
torch's caching allocator, which reuses it when the copies under way have ended (in blocks of powers
of two).

A tensor that several operators save goes to the host if the first of them is named
(`recompute.host_bytes_by_operator`). Saved tensors that the graph does not know (statistics of
norms, tables, causal masks, random states) stay on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from parplan.costmodels.layers.recompute import made_inside
from parplan.executor.tensors import local, memory_of
from parplan.profiles.models.operator_graph import LayerClass
from parplan.profiles.profiler.gpus import gpu, is_gpu

_Key = tuple[int, ...]
# batch, sequence or heads, features of an activation; masks and states without a batch have fewer
FEWEST_DIMS = 3
ON_HOST = "parplan.on_host"  # the profiler's event around allocations of the host's memory


class HostCopies:
    """The copies between one rank's device and its host.

    `out_bytes` and `back_bytes` count the bytes in each direction since the start.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_bytes = 0
        self.back_bytes = 0
        self._last: Flight | None = None
        self._unsettled: Flight | None = None
        self._streams = [gpu(device).Stream(device) for _ in range(2)] if is_gpu(device) else []

    def begin_pass(self) -> None:
        """Begins a micro-batch with the first layer of a stage: no layer runs before it."""
        self._last = None

    def flight(self) -> Flight:
        """Opens the flight of the next layer's tensors of a micro-batch."""
        self._last = Flight(self, self._last)
        return self._last

    def ended(self, flight: Flight) -> None:
        """Ends a layer's forward pass: the tensors of the layer before it are released."""
        self.settle()
        self._unsettled = flight

    def settle(self) -> None:
        """Waits for the tensors on their way out, and releases them."""
        if self._unsettled is not None:
            self._unsettled.let_go()
        self._unsettled = None

    def copy(
        self, tensor: Tensor, *, to_host: bool, after: torch.Event | None = None
    ) -> tuple[Tensor, torch.Event | None]:
        """Returns a dense copy of `tensor` and the event of its end.

        It begins after the computation so far, and after `after`.
        """
        if to_host:
            self.out_bytes += tensor.nbytes
        else:
            self.back_bytes += tensor.nbytes
        stream = self._streams[to_host] if self._streams else None
        with record_function(ON_HOST) if to_host else nullcontext():
            copy = torch.empty_like(
                tensor,
                device="cpu" if to_host else self.device,
                pin_memory=to_host and stream is not None,
            )
        if stream is not None:
            stream.wait_stream(gpu(self.device).current_stream(self.device))
            if after is not None:
                stream.wait_event(after)
        with gpu(self.device).stream(stream) if stream is not None else nullcontext():
            copy.copy_(tensor, non_blocking=True)
        event = stream.record_event() if stream is not None else None
        return copy, event


class HostTensor:
    """A tensor on the host until it is read, or until `start` announces that."""

    def __init__(self, copies: HostCopies, tensor: Tensor) -> None:
        self._copies = copies
        self._host: Tensor | None
        self._host, self.gone = copies.copy(tensor, to_host=True)
        self.stride = self._host.stride()
        self._back: Tensor | None = None
        self._there: torch.Event | None = None

    def start(self) -> None:
        if self._host is not None:
            self._back, self._there = self._copies.copy(self._host, to_host=False, after=self.gone)
            self._host = None

    def tensor(self, index: int = 0) -> Tensor:
        """Returns the tensor on the device, as a recipe does (executor/memory/saved_tensors.py)."""
        self.start()
        self._wait()
        assert self._back is not None
        return self._back

    def _wait(self) -> None:
        if self._there is not None:
            gpu(self._copies.device).current_stream(self._copies.device).wait_event(self._there)
            self._there = None

    def __del__(self) -> None:
        self._wait()  # the next computation may reuse its memory


class Flight:
    """The tensors that one layer sent of one micro-batch.

    `before` is the flight of the layer before it.
    """

    def __init__(self, copies: HostCopies, before: Flight | None) -> None:
        self._copies = copies
        self._before = before
        self._sent: list[weakref.ref[HostTensor]] = []
        self._on_the_way: list[tuple[Tensor, torch.Event | None]] = []

    def send(self, tensor: Tensor) -> HostTensor:
        sent = HostTensor(self._copies, tensor)
        self._sent.append(weakref.ref(sent))
        self._on_the_way.append((tensor, sent.gone))
        return sent

    def let_go(self) -> None:
        for _, gone in self._on_the_way:
            if gone is not None:
                gpu(self._copies.device).current_stream(self._copies.device).wait_event(gone)
        self._on_the_way.clear()

    def follow(self, output: Any) -> None:
        """Starts the copies back with the gradient of the layer's output, or of a part of it."""
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.begin_backward)

    def begin_backward(self, _: Tensor | None = None) -> None:
        """Begins the layer's backward pass.

        Its copies come back, and so do those of the layer before it.
        """
        self._copies.settle()
        for flight in (self, self._before):
            if flight is not None:
                flight.start()
        self._before = None

    def start(self) -> None:
        for reference in self._sent:
            tensor = reference()
            if tensor is not None:
                tensor.start()
        self._sent.clear()


class HostOffload:
    """Selects the saved tensors of one layer that go to the host: those of the operators `names`.

    The operators are in `layer`; the operators `recomputed` run again in the backward pass.
    """

    def __init__(
        self, names: Iterable[str], layer: LayerClass, recomputed: Iterable[str], copies: HostCopies
    ) -> None:
        self._named = frozenset(names)
        self._copies = copies
        reruns = frozenset(recomputed)
        self._reads = {
            op.name
            for op in layer.operators
            if op.name in reruns or any(tensor in op.inputs for tensor in op.saved)
        }
        self._makes = {
            op.name for op in layer.operators if op.name not in reruns and made_inside(op)
        }
        # a layer that is recomputed whole saves its input for the first of its operators
        self._whole = layer.operators[0].name if len(reruns) == len(layer.operators) else None
        self._operators: Mapping[str, tuple[str, ...]] = {}
        self._flight: Flight | None = None
        self._running: tuple[str, ...] = ()
        self._inputs: set[int] = set()
        self._parameters: set[int] = set()
        self._known: dict[_Key, HostTensor | None] = {}

    def follow(self, layer: nn.Module) -> None:
        """Tracks which operator of `layer` runs.

        It must be called after all other hooks are registered.
        """
        for name, module in layer.named_children():
            operators = tuple(getattr(module, "operators", (name,)))
            module.register_forward_pre_hook(partial(self._begins, operators), prepend=True)
            module.register_forward_pre_hook(self._reads_parts)
            module.register_forward_hook(self._ends)

    def begin(self, layer: nn.Module) -> Flight:
        """Begins a forward pass of `layer`."""
        self._flight = self._copies.flight()
        self._running = (self._whole,) if self._whole else ()
        self._parameters = {memory_of(parameter) for parameter in layer.parameters()}
        return self._flight

    def end(self) -> None:
        flight, self._flight = self._flight, None
        self._known.clear()
        if flight is not None:
            self._copies.ended(flight)

    def _begins(self, operators: tuple[str, ...], _: nn.Module, args: tuple[Any, ...]) -> None:
        self._running, self._inputs = operators, set()
        self._reads_parts(_, args)

    def _reads_parts(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._inputs |= {memory_of(arg) for arg in args if isinstance(arg, Tensor)}

    def _ends(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._running = ()

    def read(self, tensor: Tensor) -> HostTensor | None:
        """Returns the host tensor of an input of the running operator, None where it stays."""
        if self._flight is None or self._reads.isdisjoint(self._running):
            return None
        return self._sent(tensor)

    def saved(self, tensor: Tensor) -> HostTensor | None:
        """Returns the host tensor of a tensor that autograd saves, None where it stays."""
        if self._flight is None or memory_of(tensor) in self._parameters:
            return None
        reads = memory_of(tensor) in self._inputs and not self._reads.isdisjoint(self._running)
        # a mixture of experts, which is several operators, has its tokens in one dimension
        fewest = FEWEST_DIMS if len(self._running) == 1 else FEWEST_DIMS - 1
        makes = not self._makes.isdisjoint(self._running) and tensor.dim() >= fewest
        if reads or makes or self._running == (self._whole,):
            return self._sent(tensor)
        return None

    def _sent(self, tensor: Tensor) -> HostTensor | None:
        flat = flattened(local(tensor.detach()))
        key = memory_of(flat), int(flat.storage_offset()), *flat.size(), *flat.stride()
        if key not in self._known:
            assert self._flight is not None
            stays = self._named.isdisjoint(self._running)
            self._known[key] = None if stays else self._flight.send(flat)
        return self._known[key]


def flattened(tensor: Tensor) -> Tensor:
    """Returns a tensor without gaps as one dimension, in the order of memory.

    A tensor with gaps is returned unchanged.
    """
    ordered = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    expected = 1
    for stride, size in ordered:
        if size != 1:
            if stride != expected:
                return tensor
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))
