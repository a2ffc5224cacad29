"""All ranks of a job whose pools divide the batch.

Each pool is a world of its own to torch: its ranks count from 0, and its meshes, collectives and
messages stay inside. One further group joins the ranks of all pools, those of the first pool first.
torch's own groups are parts of one world, so this group is made apart from it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parplan.profiles.profiler.gpus import backend_of, own_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """The place of this process in a job of several pools.

    sizes   ranks of each pool
    rank    number among the ranks of all pools
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of ranks up to the end of each pool."""
        return tuple(itertools.accumulate(self.sizes))

    @property
    def pool(self) -> int:
        """The pool of this process."""
        return self.pool_of(self.rank)

    @property
    def first(self) -> int:
        """The ranks of the pools before that of this process."""
        return self.ends[self.pool] - self.sizes[self.pool]

    def pool_of(self, rank: int) -> int:
        """Returns the pool of a rank of the job."""
        return next(pool for pool, end in enumerate(self.ends) if rank < end)


class JoinedRanks:
    """The group of the ranks of all pools. Every method is collective."""

    def __init__(
        self, place: PoolPlace, store: dist.Store, device: torch.device, timeout: timedelta
    ) -> None:
        self.place, self.device = place, device
        world = sum(place.sizes)
        if backend_of(device) == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, place.rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(store, place.rank, world, timeout)

    @property
    def num_ranks(self) -> int:
        """Ranks of all pools."""
        return sum(self.place.sizes)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds a tensor over all ranks, in place."""
        self._group.allreduce([tensor]).wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        everyone = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        self._group.allgather([everyone], [tensor]).wait()
        return everyone

    def all_to_all(self, sent: Tensor, to: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Returns the elements that arrive in the order of their ranks.

        sent       [elements], in the order of the ranks that they go to
        to         number of elements to each rank
        arriving   number of elements from each rank
        """
        received = sent.new_empty(sum(arriving))
        self._group.alltoall_base(received, sent, list(arriving), list(to)).wait()
        return received

    def everyone(self, document: Any) -> list[Any]:
        """Returns a document of plain lists, numbers and strings from every rank."""
        text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        length = torch.tensor([text.numel()], device=self.device)
        lengths = [int(each) for each in self.all_gather(length)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = self.all_gather(padded.to(self.device))
        return [
            json.loads(each[:size].cpu().numpy().tobytes())
            for each, size in zip(texts, lengths, strict=True)
        ]


def join_pool(
    place: PoolPlace, store: dist.Store, device: torch.device, timeout: timedelta
) -> JoinedRanks:
    """Joins the ranks of this rank's pool as the world of torch, and then those of all pools."""
    dist.init_process_group(
        backend_of(device),
        store=dist.PrefixStore(f"pool{place.pool}", store),
        rank=place.rank - place.first,
        world_size=place.sizes[place.pool],
        timeout=timeout,
        device_id=own_gpu(device),
    )
    return JoinedRanks(place, dist.PrefixStore("pools", store), device, timeout)
