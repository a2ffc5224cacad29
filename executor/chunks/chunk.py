"""A communication group of chunks as one rank has it: all of them where they are used, and of its own chunk every state.

                    device                                         host
    DEVICE          parameters, gradient, master, moments
    OPTIMIZER       parameters, gradient                           gradient, parameters, master, moments
    HOST            parameters and gradient while they are used    gradient, parameters, master, moments

In fp32 the parameters that the optimizer updates are the master itself: the device's of a DEVICE chunk, else the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from costmodels.chunks.home import Home
from executor.chunks.memory import Buffer, Copies, Holds, Ledger, host_tensor
from executor.tensors import local, memory_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A parameter as this rank computes with it.

    name: `block3.qkv.weight`, as in the stage's body; offset: in the gathered group, elements; shape: of this rank's part
    own_offset: in the own chunk, None where another data-parallel rank owns it; over_tp: its gradients are this rank's summands
    """

    name: str
    block: int
    parameter: nn.Parameter
    offset: int
    shape: torch.Size
    own_offset: int | None
    over_tp: bool

    def whole(self, part: Tensor) -> Tensor:
        """`part`, this rank's of the parameter or of its gradient, as the parameter is placed."""
        if not isinstance(self.parameter, DTensor):
            return part
        return DTensor.from_local(
            part, self.parameter.device_mesh, self.parameter.placements, run_check=False, shape=self.parameter.shape,
            stride=self.parameter.stride())


class Chunk:
    """One communication group: what is done with it moves, gathers or reduces all of it.

    own: the own chunk's parameters on the device; used: the group's, which parameters are views of (the same for one rank)
    master, moments, gradient, parameters: flat [elements], where the update runs; `parameters` are to be written by it
    """

    def __init__(self, home: Home, elements: int, setting: Setting) -> None:
        self.home = home
        self.elements = elements
        self.places: list[Place] = []
        self._setting = setting
        self.own = setting.buffer(elements, setting.compute, Holds.CHUNKS)
        several = setting.ranks > 1
        self.used = setting.buffer(elements * setting.ranks, setting.compute, Holds.GATHERED) if several else self.own
        self._make_gradients(several)
        if self.on_device:
            self.own.bring(zero=True)
        self._make_states()

    @property
    def on_device(self) -> bool:
        """Whether the parameters are always on the device."""
        return self.home is not Home.HOST

    def _make_gradients(self, several: bool) -> None:
        """`_fresh` are those of a block and micro-batch, of all ranks' chunks; `_kept` those of the own chunk for the whole step."""
        setting = self._setting
        self._written: set[int] = set()
        self._reduced = self._sent = False
        if setting.in_parameters:
            self._fresh = self.used
            self._kept: Buffer | None = self.own if self.on_device else None
            return
        self._kept = setting.buffer(self.elements, setting.gradient, Holds.GRADIENTS) if self.on_device else None
        if self._kept is not None:
            self._kept.bring(zero=True)
        shared = self._kept if not several else None
        self._fresh = shared or setting.buffer(self.elements * setting.ranks, setting.gradient, Holds.GRADIENTS)

    def _make_states(self) -> None:
        setting, size = self._setting, self.elements
        plain = setting.compute is torch.float32
        if self.home is Home.DEVICE:
            assert self._kept is not None
            setting.ledger.take(Holds.OPTIMIZER, size * 4 * (2 if plain else 3))
            self.parameters, self.gradient = self.own.flat, self._kept.flat
            self.master = self.own.flat if plain else torch.zeros(size, device=setting.device)
            self.moments = tuple(torch.zeros(size, device=setting.device) for _ in range(2))
            return
        self.master = host_tensor(size, torch.float32, setting.device)
        self.moments = tuple(host_tensor(size, torch.float32, setting.device) for _ in range(2))
        self.gradient = host_tensor(size, setting.gradient, setting.device)
        shared = self.on_device or setting.in_parameters  # what is returned, or fetched next, is written over what was sent
        over = self.gradient.view(setting.compute)[:size] if shared else host_tensor(size, setting.compute, setting.device)
        self.parameters = self.master if plain else over

    @property
    def host_bytes(self) -> int:
        """What the host holds of it."""
        if self.home is Home.DEVICE:
            return 0
        storages = {memory_of(each): each.untyped_storage() for each in (self.master, self.parameters, *self.moments, self.gradient)}
        return sum(storage.nbytes() for storage in storages.values())

    def take(self, place: Place, value: Tensor) -> None:
        """The initial `value` of a parameter, if this rank owns it."""
        self.places.append(place)
        if place.own_offset is not None:
            self.master.narrow(0, place.own_offset, value.numel()).copy_(value.flatten())

    def cast_master(self) -> None:
        """Write the parameters anew from the master."""
        if self.parameters is not self.master:
            self.parameters.copy_(self.master)
        if self.home is Home.OPTIMIZER:
            self.own.flat.copy_(self.parameters)

    def own_parts(self, flat: Tensor, wanted: Callable[[Place], bool] = lambda place: True) -> dict[str, Tensor]:
        """By name the own tensors in `flat`, a state of the own chunk; views of it."""
        own = ((place, place.own_offset) for place in self.places if wanted(place))
        return {
            place.name: flat.narrow(0, offset, place.shape.numel()).view(place.shape) for place, offset in own if offset is not None}

    def begin_step(self) -> None:
        self._written.clear()
        self._reduced = self._sent = False

    def fetch(self) -> None:
        self.own.bring()
        self._setting.copies.fetch(self.parameters, self.own)

    def drop(self) -> None:
        self.own.free()

    def gather(self) -> None:
        setting = self._setting
        self.own.wait()
        self.used.bring()
        dist.all_gather_into_tensor(self.used.flat, self.own.flat, group=setting.group)
        setting.copies.counts.gathered_bytes += self.used.num_bytes
        setting.copies.counts.gathers += 1

    def release(self) -> None:
        self.used.free()

    def collect(self, block: int) -> None:
        """Take the gradients that a backward pass left at the parameters of `block`: the same sums as autograd's own."""
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
        """Sum the gradients over the ranks, each of which has those of its own chunk then."""
        setting = self._setting
        mine = self.own.flat if setting.in_parameters else self._fresh.flat.narrow(0, setting.rank * self.elements, self.elements)
        dist.reduce_scatter_tensor(mine, self._fresh.flat, group=setting.group)
        setting.copies.counts.reduced_bytes += self._fresh.num_bytes
        setting.copies.counts.reduces += 1
        if self.on_device and not setting.in_parameters:
            assert self._kept is not None
            (self._kept.flat.add_ if self._reduced else self._kept.flat.copy_)(mine)
            self._reduced = True
            self._let_go()

    def send(self) -> None:
        """The own chunk's gradients to the host, which adds them to those of the step's micro-batches before."""
        setting = self._setting
        if self.on_device:
            assert self._kept is not None
            source = self._kept.flat
        elif setting.in_parameters:
            source = self.own.flat
        else:
            source = self._fresh.flat.narrow(0, setting.rank * self.elements, self.elements)
        setting.copies.send(source, self.gradient, add=self._sent)
        self._sent = True
        if not self.on_device and not setting.in_parameters:
            self._let_go()

    def _let_go(self) -> None:
        self._fresh.free()
        self._written.clear()

    def bring_back(self) -> None:
        """RETURN: parameters that the host has updated."""
        self._setting.copies.fetch(self.parameters, self.own)
