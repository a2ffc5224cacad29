"""The tensors and the torch call of one communication case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from parplan.profiles.machines.measurements import Case
from parplan.profiles.profiler.communication.comm_cases import ALL_REDUCE, POINT_TO_POINT

Run = Callable[[], None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The name since torch 2.13, or the one before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def zeros(n_bytes: int, precision: str, device: torch.device) -> torch.Tensor:
    """A vector of `n_bytes` bytes of zeros, which stay zeros in every sum.

    It is written, because pages that never were all map to one page of the host.
    """
    dtype = DTYPES[precision]
    return torch.empty(n_bytes // dtype.itemsize, dtype=dtype, device=device).fill_(0.0)


def collective_call(
    case: Case, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device
) -> Run:
    """Returns the call that one rank of `group` (of these `ranks`) makes.

    A message goes there and back, so it is two messages. Raises RuntimeError when its tensors do
    not fit the memory.
    """
    n_bytes = case.size("bytes")
    whole = zeros(n_bytes, case.precision, device)
    if case.work == POINT_TO_POINT:
        return _there_and_back(whole, group, ranks)
    if case.work == ALL_REDUCE:
        return lambda: _done(dist.all_reduce(whole, group=group))
    part_bytes = n_bytes if case.work == "all_to_all" else n_bytes // len(ranks)
    part = zeros(part_bytes, case.precision, device)
    if case.work == "all_to_all":
        return lambda: _done(dist.all_to_all_single(part, whole, group=group))
    if case.work == "all_gather":
        return lambda: _done(_GATHER(whole, part, group=group))
    return lambda: _done(_SCATTER(part, whole, group=group))


def _done(_: object) -> None:
    """Drops the result, because calls that are not asynchronous return nothing."""


def _there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> Run:
    first, second = ranks

    def sends() -> None:
        dist.send(tensor, second, group=group)
        dist.recv(tensor, second, group=group)

    def answers() -> None:
        dist.recv(tensor, first, group=group)
        dist.send(tensor, first, group=group)

    return sends if dist.get_rank() == first else answers


class Products:
    """Products of one size, run beside an all-reduce.

    Raises RuntimeError when their tensors do not fit the memory.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device) -> None:
        dtype = DTYPES[case.precision]
        m = case.size("m")
        n = case.size("n")
        k = case.size("k")
        self.left = torch.empty(m, k, dtype=dtype, device=device).fill_(0.0)
        self.right = torch.empty(k, n, dtype=dtype, device=device).fill_(0.0)
        self.result = torch.empty(m, n, dtype=dtype, device=device)
        self.reduced = zeros(case.size("bytes"), case.precision, device)
        self.group = group
        self.count = 1

    def compute(self) -> None:
        """Runs `count` products."""
        for _ in range(self.count):
            torch.mm(self.left, self.right, out=self.result)

    def communicate(self) -> None:
        """Runs one all-reduce."""
        dist.all_reduce(self.reduced, group=self.group)

    def both(self) -> None:
        """Runs the products while the all-reduce is in progress."""
        work = dist.all_reduce(self.reduced, group=self.group, async_op=True)
        self.compute()
        if work is not None:
            work.wait()
