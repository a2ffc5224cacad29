"""Artificial seconds for the products, the messages and the all-reduces of a real run.

`ArtificialTimes` changes the process that enters it and nothing in the executor, which runs its
instructions, messages, autograd and recompute as always. Inside it

    products      each of the four products of a block takes `product_s` for a whole micro-batch in
                  the forward pass and twice that in the backward pass, half of it for half the
                  sequences. The process sleeps until that time is over since the product or the
                  wait before, so that the rest of the block runs within the time of its products.
    messages      a send of the pipeline is posted `message_s` later, by a thread that posts all
                  sends of the process in their order. A receive is posted at once.
    all-reduces   an all-reduce of tensor parallelism is over no earlier than `sum_s` for each
                  `sum_bytes` after its start and after the end of the one before. The process
                  sleeps at the wait for it, not at its start.

torch's reductions outside of a micro-batch (loss, gradient norm) are as fast as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.executor.models.transformer_layers import Block
from parplan.executor.pipeline import runtime, stages

PRODUCTS = ("qkv", "attention_out", "fc1", "fc2")
BACKWARD = 2  # a backward pass has two products for each of the forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Stated times, in seconds.

    product_s   forward pass of one product of a block with a whole micro-batch
    message_s   from the send of a message to its posting
    sum_s       all-reduce of half a micro-batch's activation
    """

    product_s: float = 0.0
    message_s: float = 0.0
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sequences of a micro-batch, and bytes of half a micro-batch's activation."""

    sequences: int
    half_bytes: int


class Clock:
    """The time at which this process ended its last product or wait."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    def ended(self, at_s: float | None = None) -> None:
        """Notes the end of a wait: now, or `at_s` if nothing ended later."""
        self._since_s = time.perf_counter() if at_s is None else max(self._since_s, at_s)

    def work(self, seconds: float) -> None:
        """Sleeps until `seconds` have passed since the last end; late work delays the next."""
        self._since_s += seconds
        if not sleep_until(self._since_s):
            self._since_s = time.perf_counter()


def sleep_until(at_s: float) -> bool:
    """Sleeps until `at_s` of `time.perf_counter`; returns False if that was over before."""
    left_s = at_s - time.perf_counter()
    if left_s <= 0:
        return False
    time.sleep(left_s)
    return True


class _SleepsInBackward(torch.autograd.Function):
    """The identity, whose backward pass calls `work`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return gradient, None


@dataclass(frozen=True, slots=True)
class _DelayedSend:
    """A send that another thread posts; `wait` waits for both."""

    posted: Future[dist.Work]

    def wait(self) -> None:
        self.posted.result().wait()


@dataclass(frozen=True, slots=True)
class _Receive:
    work: dist.Work
    clock: Clock

    def wait(self) -> None:
        self.work.wait()
        self.clock.ended()


class DelayedMessages:
    """Posts the sends of this process `delay_s` after they were issued, in their order.

    sent    (issued, posted) of every send, in seconds of `time.perf_counter`
    """

    def __init__(self, delay_s: float, clock: Clock) -> None:
        self.delay_s = delay_s
        self.sent: list[tuple[float, float]] = []
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "delayed-sends")

    def __call__(
        self, operations: list[dist.P2POp], desc: str | None = None
    ) -> list[_DelayedSend | _Receive]:
        """Takes the place of torch's `batch_isend_irecv`."""
        return [self._begun(each) for each in operations]

    def _begun(self, each: dist.P2POp) -> _DelayedSend | _Receive:
        if each.op is dist.irecv:
            work = each.op(each.tensor, group=each.group, tag=each.tag, group_src=each.group_peer)
            return _Receive(work, self._clock)
        return _DelayedSend(self._thread.submit(self._post, each, time.perf_counter()))

    def _post(self, each: dist.P2POp, issued_s: float) -> dist.Work:
        sleep_until(issued_s + self.delay_s)
        self.sent.append((issued_s, time.perf_counter()))
        return each.op(each.tensor, group=each.group, tag=each.tag, group_dst=each.group_peer)


class DelayedSums(TorchDispatchMode):
    """Lets the functional all-reduces take their time on one link, one after the other."""

    def __init__(self, s_per_byte: float, clock: Clock) -> None:
        super().__init__()
        self.s_per_byte = s_per_byte
        self._clock = clock
        self._free_s = 0.0
        self._over_s: dict[int, float] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "_c10d_functional" or name not in ("all_reduce", "wait_tensor"):
            return func(*args, **(kwargs or {}))
        if name == "all_reduce":
            self._free_s = max(self._free_s, time.perf_counter()) + args[0].nbytes * self.s_per_byte
            out = func(*args, **(kwargs or {}))
            self._over_s[out.untyped_storage()._cdata] = self._free_s
            return out
        out = func(*args, **(kwargs or {}))
        over_s = self._over_s.pop(args[0].untyped_storage()._cdata, None)
        if over_s is not None:
            sleep_until(over_s)
            self._clock.ended(over_s)
        return out


class ArtificialTimes:
    """Gives the stated times to what is built and run inside this context.

    Stages must be built inside it. `set` changes the times between steps.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.messages = DelayedMessages(0.0, self.clock)
        self.sums = DelayedSums(0.0, self.clock)
        self._sequence_s = 0.0
        self._patches = ExitStack()

    def set(self, seconds: Seconds, sizes: Sizes) -> None:
        """Sets the times of the coming steps and starts the clock."""
        self._sequence_s = seconds.product_s / sizes.sequences
        self.messages.delay_s = seconds.message_s
        self.sums.s_per_byte = seconds.sum_s / sizes.half_bytes
        self.clock.ended()

    def __enter__(self) -> ArtificialTimes:
        for owner, name, changed in (
            (stages, "build_layer", partial(self._slowed, stages.build_layer)),
            (runtime, "_batch_p2p", self.messages),
            (dist, "batch_isend_irecv", self.messages),
        ):
            self._patches.enter_context(patch.object(owner, name, changed))
        self._patches.enter_context(self.sums)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()

    def _slowed(self, build: Callable[..., nn.Module], *args: Any) -> nn.Module:
        layer = build(*args)
        for name in PRODUCTS if isinstance(layer, Block) else ():
            linear = getattr(layer, name)
            linear.forward = partial(self._product, linear.forward)
        return layer

    def _product(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A product of the stated time, also where a recompute ends it early."""
        seconds = x.shape[0] * self._sequence_s
        try:
            return product(_SleepsInBackward.apply(x, partial(self.clock.work, BACKWARD * seconds)))
        finally:
            self.clock.work(seconds)
