"""AdamW over chunks: each where its master and moments lie, on the device or on the host (PatrickStar's hybrid Adam, arXiv 2108.05818).

torch's fused loop runs over views of the flat states, tensor by tensor, so that every parameter gets the values that it gets outside
of chunks, to the last bit. Gradients of 16 bits are cast chunk by chunk; the parameters in the compute type are written from the master
where that is, and come to the device by the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from costmodels.chunks.home import Home
from costmodels.memory import StateBytes
from executor.chunks.chunk import Chunk, Place
from executor.chunks.manager import ChunkManager
from executor.chunks.memory import Holds
from executor.options import Options

EPSILON = 1e-8  # torch.optim.AdamW's default, which the parameters outside of chunks have


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One parameter that this rank owns: views of its states, and its place in the gradients of the chunk. `step` counts its updates."""

    place: Place
    master: Tensor
    moments: tuple[Tensor, ...]
    step: Tensor

    def within(self, flat: Tensor) -> Tensor:
        """Its part of another state of the chunk."""
        assert self.place.own_offset is not None, "this rank owns it"
        return flat.narrow(0, self.place.own_offset, self.place.shape.numel()).view(self.place.shape)


class ChunkAdam:
    """The optimizer of what the chunks of a rank hold; `decays`: whether weight decay pulls on a parameter."""

    def __init__(self, manager: ChunkManager, options: Options) -> None:
        self.manager = manager
        self._options = options
        self._owned = [(chunk, tuple(_owned(chunk))) for chunk in manager.chunks]

    @torch.no_grad()
    def step(self, learning_rate: float, factor: Tensor | None = None) -> None:
        """Update every chunk for its gradient times `factor`; gradients are not kept."""
        for chunk, owned in self._owned:
            with self._single(chunk) as gradient:
                if factor is not None:
                    gradient.mul_(factor.to(gradient.device))
                for decay in (True, False):
                    self._update([each for each in owned if _decays(each.place) is decay], gradient, learning_rate, decay=decay)
            _write(chunk)

    @torch.no_grad()
    def skip(self) -> None:
        """Leave out an update: what gradients were written over is written anew."""
        for chunk in self.manager.chunks:
            _write(chunk)

    @contextmanager
    def _single(self, chunk: Chunk) -> Iterator[Tensor]:
        """The gradients of a chunk in fp32, where its master is."""
        if chunk.gradient.dtype is torch.float32:
            yield chunk.gradient
            return
        ledger, num_bytes = self.manager.ledger, chunk.elements * torch.float32.itemsize * (chunk.home is Home.DEVICE)
        ledger.take(Holds.GRADIENTS, num_bytes)
        yield chunk.gradient.float()
        ledger.give(Holds.GRADIENTS, num_bytes)

    def _update(self, tensors: list[_Tensor], gradient: Tensor, learning_rate: float, *, decay: bool) -> None:
        if not tensors:
            return
        beta1, beta2 = self._options.betas
        adamw(
            [each.master for each in tensors], [each.within(gradient) for each in tensors], [each.moments[0] for each in tensors],
            [each.moments[1] for each in tensors], [], [each.step for each in tensors], fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=learning_rate, weight_decay=self._options.weight_decay if decay else 0.0, eps=EPSILON, maximize=False)

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """After the backward passes: by parameter that is computed with, the gradient of those that this rank owns."""
        return {each.place.parameter: each.within(chunk.gradient) for chunk, owned in self._owned for each in owned}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has of this rank's chunks, by the names that parameters have outside of them (executor/checkpoint/states.py).

        Call `settle` when something was loaded into them.
        """
        states = [each for _, owned in self._owned for each in owned]
        optimizer: dict[str, Tensor] = {}
        for each in states:
            first, second = (_named(each.place, moment) for moment in each.moments)
            found = {"step": each.step, "exp_avg": first, "exp_avg_sq": second}
            optimizer |= {f"{each.place.name}.{key}": value for key, value in found.items()}
        return {"model": {each.place.name: _named(each.place, each.master) for each in states}, "optimizer": optimizer}

    def settle(self) -> None:
        """After a load: parameters follow their masters."""
        self.manager.built()

    def state_bytes(self) -> StateBytes:
        """What chunks hold for good of device and host, whole chunks by class: no gathered group, nothing that is fetched for a while."""
        return sum((chunk.state_bytes for chunk in self.manager.chunks), StateBytes())


def _owned(chunk: Chunk) -> Iterator[_Tensor]:
    for place in chunk.places:
        if place.own_offset is not None:
            step = torch.zeros((), dtype=torch.float32, device=chunk.master.device)
            master, *moments = (
                flat.narrow(0, place.own_offset, place.shape.numel()).view(place.shape) for flat in (chunk.master, *chunk.moments))
            yield _Tensor(place, master, tuple(moments), step)


def _named(place: Place, part: Tensor) -> Tensor:
    """`part`, this rank's, as the parameter is placed. torch's stager of checkpoints takes a DTensor with an offset for a plain tensor."""
    whole = place.whole(part.as_strided(part.shape, part.stride(), 0))
    if not isinstance(whole, DTensor):
        return part
    whole._local_tensor = part
    return whole


def _decays(place: Place) -> bool:
    """As outside of chunks (executor/optimizer.py): of matrices and tables."""
    return len(place.shape) > 1


def _write(chunk: Chunk) -> None:
    """The parameters in the compute type from the master; in fp32 they are the master."""
    if chunk.parameters is not chunk.master:
        chunk.parameters.copy_(chunk.master)
