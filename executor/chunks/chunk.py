"""One rank's part of a communication group of chunks: the gathered run and all states of its chunk.

A parameter is a view of the gathered run. It may cross the border between two ranks' chunks: each
of them then owns a part of its elements, and states are handled as flat parts.

                    device                                         host
    DEVICE          parameters, gradient, master, moments
    OPTIMIZER       parameters, gradient                           gradient, parameters, master,
                    moments
    HOST            parameters and gradient while they are used    gradient, parameters, master,
                    moments

In fp32 the optimizer updates the master, which is the parameters: on the device for a DEVICE chunk,
else on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.chunks.chunk_buffers import (
    Buffer,
    ByteClass,
    ChunkCopies,
    DeviceLedger,
    host_tensor,
)
from parplan.executor.chunks.regions import OwnedPart, Region, own_part
from parplan.executor.tensors import local, memory_of, placed


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSetting:
    """The properties that all chunks of a rank share.

    compute        type of parameters
    gradient       type of gradients
    in_parameters  whether gradients are written over the parameters
    group          the data-parallel ranks, None where there is one
    rank           this rank's number in the group
    single         whether chunks are gathered and reduced one after the other
    """

    device: torch.device
    compute: torch.dtype
    gradient: torch.dtype
    in_parameters: bool
    ledger: DeviceLedger
    copies: ChunkCopies
    group: dist.ProcessGroup | None = None
    rank: int = 0
    single: bool = False

    @property
    def ranks(self) -> int:
        return self.group.size() if self.group is not None else 1

    def buffer(self, elements: int, dtype: torch.dtype, byte_class: ByteClass) -> Buffer:
        return Buffer(elements, dtype, self.device, self.ledger, byte_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedParameter:
    """A parameter with its place in a chunk.

    name     `block3.qkv.weight`, as in the stage's body
    part     the part of the block (costmodels/layers/block_parts.py)
    offset   elements from the beginning of the gathered group
    shape    on this tensor-parallel rank
    owned    its elements in this rank's chunk; the other ranks' chunks have the rest
    over_tp  whether its gradients are this rank's summands over the tensor-parallel axis
    """

    name: str
    block: int
    part: int
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    owned: OwnedPart
    over_tp: bool

    def placed(self, part: Tensor) -> Tensor:
        """Places this tensor-parallel rank's `part` of the parameter or of its states.

        A part on the host stays there.
        """
        if not isinstance(self.parameter, DTensor):
            return part
        whole = self.parameter
        return placed(part, whole.device_mesh, whole.placements, whole.shape, whole.stride())


class Chunk:
    """One communication group, which is moved, gathered and reduced as a whole.

    chunk_buffer  parameters of this rank's chunk on the device
    group_buffer  parameters of the group on the device; for one rank the same buffer
    master, moments, gradient, parameters  flat [elements], where the update runs

    The update writes `parameters`.
    """

    def __init__(
        self, home: StateLocation, regions: Sequence[Region], setting: ChunkSetting
    ) -> None:
        self.home = home
        self.regions = regions
        self.elements = elements = sum(region.own for region in regions)
        self._gathered = sum(region.elements for region in regions)
        self.places: list[ChunkedParameter] = []
        self._setting = setting
        self.chunk_buffer = setting.buffer(elements, setting.compute, ByteClass.CHUNKS)
        several = setting.ranks > 1
        self.group_buffer = self.chunk_buffer
        if several:
            self.group_buffer = setting.buffer(self._gathered, setting.compute, ByteClass.GATHERED)
        if self.on_device:
            self.chunk_buffer.bring(zero=True)
        self._make_gradients(several)
        self._make_states()

    @property
    def on_device(self) -> bool:
        """True where the parameters are always on the device."""
        return self.home is not StateLocation.HOST

    def _make_gradients(self, several: bool) -> None:
        """Makes the gradients' buffers, which are the same buffer where they hold the same.

        `_fresh` has the gradients of a backward pass, of all ranks' chunks or of a single one;
        `_summed` those of this rank's chunk for the whole step; `_leaving` those of this rank's
        chunk on their way to the host.
        """
        setting = self._setting
        self._written: set[tuple[int, int]] = set()
        self._has_reduced = self._has_sent = False
        self._reduces = self._to_send = False
        # one chunk after the other, the blocks whose gradients wait in their parameters
        self._one_by_one = setting.single and several and not setting.in_parameters
        self._waiting: list[int] = []

        def buffer(elements: int = self.elements) -> Buffer:
            return setting.buffer(elements, setting.gradient, ByteClass.GRADIENTS)

        self._summed: Buffer | None = None
        if self.on_device:
            self._summed = self.chunk_buffer if setting.in_parameters else buffer()
        if setting.in_parameters:
            self._fresh = self.group_buffer
        elif self._summed is not None and not several:
            self._fresh = self._summed
        else:
            self._fresh = buffer(self.elements if self._one_by_one else self._gathered)
        self._leaving = buffer() if several else self._fresh
        if self._summed is not None and not setting.in_parameters:
            self._summed.bring(zero=True)

    def _make_states(self) -> None:
        setting, size = self._setting, self.elements
        plain = setting.compute is torch.float32
        if self.home is StateLocation.DEVICE:
            assert self._summed is not None
            setting.ledger.take(ByteClass.OPTIMIZER, size * 4 * (2 if plain else 3))
            self.parameters, self.gradient = self.chunk_buffer.flat, self._summed.flat
            self.master = self.parameters
            if not plain:
                self.master = torch.zeros(size, device=setting.device)
            self.moments = tuple(torch.zeros(size, device=setting.device) for _ in range(2))
            return
        self.master = host_tensor(size, torch.float32, setting.device)
        self.moments = tuple(host_tensor(size, torch.float32, setting.device) for _ in range(2))
        self.gradient = host_tensor(size, setting.gradient, setting.device)
        if self.on_device or setting.in_parameters:  # they overwrite the gradients that were sent
            parameters = self.gradient.view(setting.compute)[:size]
        else:
            parameters = host_tensor(size, setting.compute, setting.device)
        self.parameters = self.master if plain else parameters

    @property
    def state_bytes(self) -> StateBytes:
        """Returns the permanent bytes on device and host, each piece of memory once.

        Memory that several states share counts for the state that has it between steps.
        """
        seen: set[int] = set()

        def new_bytes(*tensors: Tensor) -> int:
            storages = {memory_of(each): each.untyped_storage().nbytes() for each in tensors}
            unseen = sum(num_bytes for memory, num_bytes in storages.items() if memory not in seen)
            seen.update(storages)
            return unseen

        kept = (self._summed.flat,) if self._summed is not None else ()
        parameters = new_bytes(self.chunk_buffer.flat if self.on_device else self.parameters)
        gradients = new_bytes(*kept, self.gradient)
        return StateBytes(parameters, gradients, new_bytes(self.master, *self.moments))

    @property
    def host_bytes(self) -> int:
        """Returns the bytes on the host."""
        if self.home is StateLocation.DEVICE:
            return 0
        storages = {
            memory_of(each): each.untyped_storage()
            for each in (self.master, self.parameters, *self.moments, self.gradient)
        }
        return sum(storage.nbytes() for storage in storages.values())

    def take(self, place: ChunkedParameter, value: Tensor) -> None:
        """Adds a parameter with its initial `value`; the rank stores its elements."""
        self.places.append(place)
        owned = value.flatten().narrow(0, place.owned.first, place.owned.count)
        place.owned.of(self.master).copy_(owned)

    @property
    def owned(self) -> list[ChunkedParameter]:
        """Returns the parameters of which this rank owns elements."""
        return [place for place in self.places if place.owned.count]

    def cast_master(self) -> None:
        """Rewrites the parameters from the master."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)
        if self.home is StateLocation.OPTIMIZER:
            self.chunk_buffer.flat.copy_(self.parameters)

    def region_of(self, offset: int) -> Region:
        """Returns the region of an element of the gathered group."""
        return next(each for each in self.regions if offset < each.first + each.elements)

    def join(self, place: ChunkedParameter, flat: Tensor) -> Tensor:
        """Joins all ranks' elements of a parameter in `flat`, a state of the chunk. Collective.

        With one rank this is a view of `flat`.
        """
        part, group = place.owned.of(flat), self.region_of(place.offset).group
        if group is None:
            return part.view(place.shape)
        whole = torch.zeros(place.shape.numel(), dtype=flat.dtype, device=self._setting.device)
        whole.narrow(0, place.owned.first, place.owned.count).copy_(part)
        dist.all_reduce(whole, group=group)
        return whole.view(place.shape)

    def begin_step(self) -> None:
        self._written.clear()
        self._has_reduced = self._has_sent = False

    def fetch(self) -> None:
        self.chunk_buffer.bring()
        self._setting.copies.fetch(self.parameters, self.chunk_buffer)

    def drop(self) -> None:
        self.chunk_buffer.free()

    def gather(self) -> None:
        counts = self._setting.copies.counts
        self.group_buffer.bring()
        if self._setting.single:
            self._broadcast()
            return
        with self._setting.copies.aside() as aside:
            self.chunk_buffer.wait()
            works = [
                region.gather(self.chunk_buffer.flat, self.group_buffer.flat, aside=aside)
                for region in self.regions
            ]
        _wait_for(works, self.chunk_buffer, self.group_buffer)
        counts.gathered_bytes += self.group_buffer.num_bytes
        counts.gathers += 1

    def _broadcast(self) -> None:
        """Gathers the chunks one after the other, each from its owner."""
        setting, counts = self._setting, self._setting.copies.counts
        self.chunk_buffer.wait()
        for owner in range(setting.ranks):
            part = self._part(self.group_buffer.flat, owner)
            if owner == setting.rank:
                part.copy_(self.chunk_buffer.flat)
            dist.broadcast(part, group=setting.group, group_src=owner)
            counts.gathered_bytes += part.nbytes
            counts.gathers += 1

    def _part(self, flat: Tensor, owner: int) -> Tensor:
        """Returns the chunk of a rank in a gathered group, as a view."""
        return flat.narrow(0, owner * self.elements, self.elements)

    def release(self) -> None:
        self.group_buffer.free()

    def collect(self, block: int, parts: tuple[int, ...]) -> None:
        """Takes the gradients of a backward pass from the parameters of some parts of `block`.

        They are summed as autograd sums them. One chunk after the other, they stay where they are
        until they are reduced.
        """
        if self._one_by_one:
            self._waiting.append(block)
            return
        if not self._fresh.there:
            self._fresh.bring(zero=True)
        made = {(block, part) for part in parts}
        for place in self.places:
            if (place.block, place.part) in made:
                self._collect(place, add=(place.block, place.part) in self._written)
        self._written |= made

    def _collect(self, place: ChunkedParameter, *, add: bool) -> None:
        gradient = _gradient(place)
        target = self._fresh.flat.narrow(0, place.offset, place.shape.numel()).view(place.shape)
        if gradient is not None:
            write = target.add_ if add else target.copy_
            write(gradient)
        elif not add:  # no loss depends on the parameter
            target.zero_()
        place.parameter.grad = None

    def reduce(self) -> None:
        """Starts the sum of the gradients over the ranks.

        Each rank gets the sum of its chunk.
        """
        if self._setting.single:
            self._reduce_one_by_one()
            return
        counts = self._setting.copies.counts
        buffer, targets = self._reduced_to()
        self._reduces = not self._setting.in_parameters
        with self._setting.copies.aside() as aside:
            works = [
                region.reduce(self._fresh.flat, target, aside=aside)
                for region, target in zip(self.regions, targets, strict=True)
            ]
        _wait_for(works, self._fresh, buffer)
        counts.reduced_bytes += self._fresh.num_bytes
        counts.reduces += 1

    def _reduce_one_by_one(self) -> None:
        """Sums the gradients of one chunk after the other, for its owner.

        They pass through one buffer, or lie where the parameters were.
        """
        setting, counts = self._setting, self._setting.copies.counts
        waiting = [place for place in self.places if place.block in self._waiting]
        for owner in range(setting.ranks):
            if self._one_by_one:
                self._fresh.bring(zero=True)
                part = self._fresh.flat
                self._fill(part, waiting, owner)
            else:
                part = self._part(self._fresh.flat, owner)
            dist.reduce(part, group=setting.group, group_dst=owner)
            counts.reduced_bytes += part.nbytes
            counts.reduces += 1
            if owner == setting.rank:
                self._keep(part)
            if self._one_by_one:
                self._fresh.free()
        for place in waiting:
            place.parameter.grad = None
        self._waiting.clear()

    def _fill(self, part: Tensor, waiting: list[ChunkedParameter], owner: int) -> None:
        """Copies into `part` the gradients of the chunk that a rank owns."""
        for place in waiting:
            region = self.region_of(place.offset)
            owned = own_part(place.offset, place.shape.numel(), region, owner)
            gradient = _gradient(place) if owned.count else None
            if gradient is not None:
                owned.of(part).copy_(gradient.flatten().narrow(0, owned.first, owned.count))

    def _keep(self, reduced: Tensor) -> None:
        """Keeps the sum of the own chunk's gradients, for the host or for the update."""
        if not self.on_device:
            self._leaving.bring()
            self._leaving.flat.copy_(reduced)
        elif self._setting.in_parameters:
            self.chunk_buffer.flat.copy_(reduced)
        else:
            assert self._summed is not None, "the device has its gradients"
            write = self._summed.flat.add_ if self._has_reduced else self._summed.flat.copy_
            write(reduced)
            self._has_reduced = True

    def _reduced_to(self) -> tuple[Buffer, list[Tensor]]:
        """Returns the target of the reduction, and the part of each region there.

        Gradients that go to the host have separate memory; else the target is their place in the
        gradients of all ranks.
        """
        setting = self._setting
        if not self.on_device:
            self._leaving.bring()
            return self._leaving, [each.mine(self._leaving.flat) for each in self.regions]
        if setting.in_parameters:
            return self.chunk_buffer, [each.mine(self.chunk_buffer.flat) for each in self.regions]
        return self._fresh, [each.part(self._fresh.flat) for each in self.regions]

    def reduced(self) -> None:
        """Ends the reduction.

        It frees the summands and adds up the chunk's gradients over micro-batches.
        """
        if self._setting.in_parameters or self._one_by_one:
            return
        if self._summed is not None:
            self._fresh.wait()
            for region, reduced in zip(self.regions, self._reduced_to()[1], strict=True):
                summed = region.mine(self._summed.flat)
                (summed.add_ if self._has_reduced else summed.copy_)(reduced)
            self._has_reduced = True
        self._fresh.free()
        self._written.clear()
        self._reduces = False
        if self._to_send:
            self.send()

    def send(self) -> None:
        """Starts to send the chunk's gradients to the host, which adds them up.

        If the last of a step's micro-batches must still be added up on the device, sending begins
        after that.
        """
        self._to_send = self._reduces and self._summed is not None
        if self._to_send:
            return
        self._setting.copies.send(
            self._summed or self._leaving,
            self.gradient,
            add=self._has_sent,
            dropped=self._leaving is self.chunk_buffer,
        )
        self._has_sent = True

    def sent(self) -> None:
        """Frees gradients that have left the device, if they were not to stay there."""
        if self._summed is None and self._leaving is not self.chunk_buffer:
            self._leaving.free()
            if self._leaving is self._fresh:
                self._written.clear()

    def wait(self) -> None:
        """Makes later computation wait for all operations that were started."""
        for buffer in {self.chunk_buffer, self.group_buffer, self._fresh, self._leaving}:
            buffer.wait()

    def bring_back(self) -> None:
        """Runs RETURN: fetches parameters that the host has updated."""
        self._setting.copies.fetch(self.parameters, self.chunk_buffer)


def _wait_for(works: Sequence[dist.Work | None], *buffers: Buffer) -> None:
    """Makes later work on the buffers wait for collectives that run aside."""
    aside = [work for work in works if work is not None]
    if aside:
        for buffer in buffers:
            buffer.is_over(lambda: [work.wait() for work in aside])


def _gradient(place: ChunkedParameter) -> Tensor | None:
    """Returns this tensor-parallel rank's part of a parameter's gradient, None without one."""
    gradient = place.parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != place.parameter.placements:
        gradient = gradient.redistribute(placements=place.parameter.placements)
    return None if gradient is None else local(gradient)
