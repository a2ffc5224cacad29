"""A communication group of chunks as one rank has it: the whole run where it is used, and of its
own chunk every state.

A parameter is a view of the gathered run. It may cross the border between two ranks' chunks: each
of them then owns a part of its elements, and what is done with states is done with flat parts.

                    device                                         host
    DEVICE          parameters, gradient, master, moments
    OPTIMIZER       parameters, gradient                           gradient, parameters, master,
                    moments
    HOST            parameters and gradient while they are used    gradient, parameters, master,
                    moments

In fp32 the parameters that the optimizer updates are the master itself: the device's of a DEVICE
chunk, else the host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.chunks.chunk_buffers import Buffer, Copies, Holds, Ledger, host_tensor
from parplan.executor.tensors import local, memory_of

# torch 2.13 deprecates the names that 2.9 has
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all chunks of a rank share.

    compute, gradient: their types; in_parameters: gradients are written over the parameters
    group: the data-parallel ranks, None where there is one; rank: this one's number among them
    """

    device: torch.device
    compute: torch.dtype
    gradient: torch.dtype
    in_parameters: bool
    ledger: Ledger
    copies: Copies
    group: dist.ProcessGroup | None = None
    rank: int = 0

    @property
    def ranks(self) -> int:
        return self.group.size() if self.group is not None else 1

    def buffer(self, elements: int, dtype: torch.dtype, holds: Holds) -> Buffer:
        return Buffer(elements, dtype, self.device, self.ledger, holds)


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """Of a parameter's elements, in order, the `count` from `first` on that a rank owns; they lie
    in its chunk from `at` on.
    """

    first: int
    count: int
    at: int

    def of(self, flat: Tensor) -> Tensor:
        """[count], a view of it in `flat`, a state of the own chunk."""
        return flat.narrow(0, self.at, self.count)


def own_part(offset: int, num_elements: int, chunk_elements: int, rank: int) -> OwnedPart:
    """What data-parallel rank `rank` owns of a parameter that lies `offset` elements from its
    group's beginning; `count` 0: nothing.
    """
    begin, end = (
        max(offset, rank * chunk_elements),
        min(offset + num_elements, (rank + 1) * chunk_elements),
    )
    return (
        OwnedPart(begin - offset, end - begin, begin - rank * chunk_elements)
        if begin < end
        else OwnedPart(0, 0, 0)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A parameter as this rank computes with it.

    name: `block3.qkv.weight`, as in the stage's body; offset: in the gathered group, elements;
    shape: on this tensor-parallel rank
    own: what of it lies in the own chunk, the others' chunks have the rest; over_tp: its gradients
    are this rank's summands
    """

    name: str
    block: int
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    own: OwnedPart
    over_tp: bool

    def whole(self, part: Tensor) -> Tensor:
        """`part`, the tensor-parallel rank's of the parameter or of its gradient, as the parameter
        is placed.
        """
        if not isinstance(self.parameter, DTensor):
            return part
        return DTensor.from_local(
            part,
            self.parameter.device_mesh,
            self.parameter.placements,
            run_check=False,
            shape=self.parameter.shape,
            stride=self.parameter.stride(),
        )


class Chunk:
    """One communication group: what is done with it moves, gathers or reduces all of it.

    own: the own chunk's parameters on the device; used: the group's, which parameters are views of
    (the same for one rank) master, moments, gradient, parameters: flat [elements], where the update
    runs; `parameters` are to be written by it
    """

    def __init__(self, home: StateLocation, elements: int, setting: Setting) -> None:
        self.home = home
        self.elements = elements
        self.places: list[Place] = []
        self._setting = setting
        self.own = setting.buffer(elements, setting.compute, Holds.CHUNKS)
        several = setting.ranks > 1
        self.used = (
            setting.buffer(elements * setting.ranks, setting.compute, Holds.GATHERED)
            if several
            else self.own
        )
        if self.on_device:
            self.own.bring(zero=True)
        self._make_gradients(several)
        self._make_states()

    @property
    def on_device(self) -> bool:
        """Whether the parameters are always on the device."""
        return self.home is not StateLocation.HOST

    def _make_gradients(self, several: bool) -> None:
        """Buffers that are one where they hold the same: `_fresh`, of a backward pass, of all
        ranks' chunks; `_kept`, of the own chunk for the whole step; `_leaving`, of the own chunk on
        its way to the host.
        """
        setting = self._setting
        self._written: set[int] = set()
        self._has_reduced = self._has_sent = self._reduces = self._to_send = False

        def buffer(ranks: int = 1) -> Buffer:
            return setting.buffer(self.elements * ranks, setting.gradient, Holds.GRADIENTS)

        self._kept: Buffer | None = None
        if self.on_device:
            self._kept = self.own if setting.in_parameters else buffer()
        if setting.in_parameters:
            self._fresh = self.used
        else:
            self._fresh = (
                self._kept if self._kept is not None and not several else buffer(setting.ranks)
            )
        self._leaving = buffer() if several else self._fresh
        if self._kept is not None and not setting.in_parameters:
            self._kept.bring(zero=True)

    def _make_states(self) -> None:
        setting, size = self._setting, self.elements
        plain = setting.compute is torch.float32
        if self.home is StateLocation.DEVICE:
            assert self._kept is not None
            setting.ledger.take(Holds.OPTIMIZER, size * 4 * (2 if plain else 3))
            self.parameters, self.gradient = self.own.flat, self._kept.flat
            self.master = self.own.flat if plain else torch.zeros(size, device=setting.device)
            self.moments = tuple(torch.zeros(size, device=setting.device) for _ in range(2))
            return
        self.master = host_tensor(size, torch.float32, setting.device)
        self.moments = tuple(host_tensor(size, torch.float32, setting.device) for _ in range(2))
        self.gradient = host_tensor(size, setting.gradient, setting.device)
        shared = (
            self.on_device or setting.in_parameters
        )  # what is returned, or fetched next, is written over what was sent
        over = (
            self.gradient.view(setting.compute)[:size]
            if shared
            else host_tensor(size, setting.compute, setting.device)
        )
        self.parameters = self.master if plain else over

    @property
    def state_bytes(self) -> StateBytes:
        """What is held for good of device and host, each piece of memory once, in the class that
        has it between steps.
        """
        seen: set[int] = set()

        def new_bytes(*tensors: Tensor) -> int:
            storages = {memory_of(each): each.untyped_storage().nbytes() for each in tensors}
            found = sum(num_bytes for memory, num_bytes in storages.items() if memory not in seen)
            seen.update(storages)
            return found

        kept = (self._kept.flat,) if self._kept is not None else ()
        parameters = new_bytes(self.own.flat if self.on_device else self.parameters)
        return StateBytes(
            parameters, new_bytes(*kept, self.gradient), new_bytes(self.master, *self.moments)
        )

    @property
    def host_bytes(self) -> int:
        """What the host holds of it."""
        if self.home is StateLocation.DEVICE:
            return 0
        storages = {
            memory_of(each): each.untyped_storage()
            for each in (self.master, self.parameters, *self.moments, self.gradient)
        }
        return sum(storage.nbytes() for storage in storages.values())

    def take(self, place: Place, value: Tensor) -> None:
        """The initial `value` of a parameter, of which this rank keeps what it owns."""
        self.places.append(place)
        place.own.of(self.master).copy_(value.flatten().narrow(0, place.own.first, place.own.count))

    @property
    def owned(self) -> list[Place]:
        """The parameters of which this rank owns elements."""
        return [place for place in self.places if place.own.count]

    def cast_master(self) -> None:
        """Write the parameters anew from the master."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)
        if self.home is StateLocation.OPTIMIZER:
            self.own.flat.copy_(self.parameters)

    def joined(self, place: Place, flat: Tensor) -> Tensor:
        """Of a parameter all that the ranks have of it in `flat`, a state of the own chunk; for one
        rank a view of it. Collective.
        """
        part, group = place.own.of(flat), self._setting.group
        if group is None:
            return part.view(place.shape)
        whole = torch.zeros(place.shape.numel(), dtype=flat.dtype, device=self._setting.device)
        whole.narrow(0, place.own.first, place.own.count).copy_(part)
        dist.all_reduce(whole, group=group)
        return whole.view(place.shape)

    def begin_step(self) -> None:
        self._written.clear()
        self._has_reduced = self._has_sent = False

    def fetch(self) -> None:
        self.own.bring()
        self._setting.copies.fetch(self.parameters, self.own)

    def drop(self) -> None:
        self.own.free()

    def gather(self) -> None:
        counts = self._setting.copies.counts
        self.used.bring()
        with self._setting.copies.aside() as aside:
            self.own.wait()
            work = _GATHER(self.used.flat, self.own.flat, group=self._setting.group, async_op=aside)
        for each in (self.own, self.used) if work is not None else ():
            each.is_over(work.wait)
        counts.gathered_bytes += self.used.num_bytes
        counts.gathers += 1

    def release(self) -> None:
        self.used.free()

    def collect(self, block: int) -> None:
        """Take the gradients that a backward pass left at the parameters of `block`: the same sums
        as autograd's own.
        """
        if not self._fresh.there:
            self._fresh.bring(zero=True)
        for place in self.places:
            if place.block == block:
                self._collect(place, add=block in self._written)
        self._written.add(block)

    def _collect(self, place: Place, *, add: bool) -> None:
        gradient = place.parameter.grad
        target = self._fresh.flat.narrow(0, place.offset, place.shape.numel()).view(place.shape)
        if isinstance(gradient, DTensor) and gradient.placements != place.parameter.placements:
            gradient = gradient.redistribute(placements=place.parameter.placements)
        if gradient is not None:
            (target.add_ if add else target.copy_)(local(gradient))
        elif not add:  # nothing depends on it
            target.zero_()
        place.parameter.grad = None

    def reduce(self) -> None:
        """Begin to sum the gradients over the ranks, each of which has those of its own chunk
        then.
        """
        counts = self._setting.copies.counts
        buffer, reduced = self._reduced_to()
        self._reduces = not self._setting.in_parameters
        with self._setting.copies.aside() as aside:
            work = _SCATTER(reduced, self._fresh.flat, group=self._setting.group, async_op=aside)
        for each in (self._fresh, buffer) if work is not None else ():
            each.is_over(work.wait)
        counts.reduced_bytes += self._fresh.num_bytes
        counts.reduces += 1

    def _reduced_to(self) -> tuple[Buffer, Tensor]:
        """The own chunk's gradients on their way to the host have memory of their own, else their
        place among those of all ranks.
        """
        setting = self._setting
        if not self.on_device:
            self._leaving.bring()
            return self._leaving, self._leaving.flat
        if setting.in_parameters:
            return self.own, self.own.flat
        return self._fresh, self._fresh.flat.narrow(0, setting.rank * self.elements, self.elements)

    def reduced(self) -> None:
        """The sums are there, the gradients that they are of can go; the own chunk's of several
        micro-batches are added up.
        """
        if self._setting.in_parameters:
            return
        if self._kept is not None:
            self._fresh.wait()
            (self._kept.flat.add_ if self._has_reduced else self._kept.flat.copy_)(
                self._reduced_to()[1]
            )
            self._has_reduced = True
        self._fresh.free()
        self._written.clear()
        self._reduces = False
        if self._to_send:
            self.send()

    def send(self) -> None:
        """Begin to send the own chunk's gradients to the host, which adds them to those of the
        step's micro-batches before.

        Where the last of them are still to be added up on the device it begins behind that.
        """
        self._to_send = self._reduces and self._kept is not None
        if self._to_send:
            return
        self._setting.copies.send(
            self._kept or self._leaving,
            self.gradient,
            add=self._has_sent,
            dropped=self._leaving is self.own,
        )
        self._has_sent = True

    def sent(self) -> None:
        """They have left the device, if they were not to stay there."""
        if self._kept is None and self._leaving is not self.own:
            self._leaving.free()
            if self._leaving is self._fresh:
                self._written.clear()

    def wait(self) -> None:
        """All that was begun is over for what is computed from now on."""
        for buffer in {self.own, self.used, self._fresh, self._leaving}:
            buffer.wait()

    def bring_back(self) -> None:
        """RETURN: parameters that the host has updated."""
        self._setting.copies.fetch(self.parameters, self.own)
