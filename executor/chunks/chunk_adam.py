"""AdamW over chunks: each where its master and moments lie, on the device or on the host
(PatrickStar's hybrid Adam, arXiv 2108.05818).

torch's fused loop runs over views of the flat states, tensor by tensor, so that every parameter
gets the values that it gets outside of chunks, to the last bit; of one that crosses the border
between two ranks' chunks each updates its own elements. Gradients of 16 bits are cast chunk by
chunk; the parameters in the compute type are written from the master where that is, and come to the
device by the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.chunks.chunk import Chunk, Place
from parplan.executor.chunks.chunk_buffers import Holds
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.run_options import Options
from parplan.executor.sharding.tensor_boxes import Box, Boxes, boxes_of

EPSILON = 1e-8  # torch.optim.AdamW's default, which the parameters outside of chunks have


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What this rank owns of one parameter: flat views of its states, and its place in the chunk's
    gradients. `step` counts updates.
    """

    place: Place
    master: Tensor
    moments: tuple[Tensor, ...]
    step: Tensor

    def within(self, flat: Tensor) -> Tensor:
        """[elements] that this rank owns of another state of the chunk."""
        return self.place.own.of(flat)


class ChunkAdam:
    """The optimizer of what the chunks of a rank hold; `decays`: whether weight decay pulls on a
    parameter.
    """

    def __init__(self, manager: ChunkManager, options: Options) -> None:
        self.manager = manager
        self._options = options
        self._owned = [(chunk, tuple(_owned(chunk))) for chunk in manager.chunks]
        self._cast: Tensor | None = None  # the gradients of one chunk of the host in fp32

    @torch.no_grad()
    def step(self, learning_rate: float, factor: Tensor | None = None) -> None:
        """Update every chunk for its gradient times `factor`; gradients are not kept."""
        for chunk, owned in self._owned:
            with self._single(chunk) as gradient:
                if factor is not None:
                    gradient.mul_(factor.to(gradient.device))
                for decay in (True, False):
                    self._update(
                        [each for each in owned if _decays(each.place) is decay],
                        gradient,
                        learning_rate,
                        decay=decay,
                    )
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
        if chunk.home is not StateLocation.DEVICE:
            yield self._cast_on_host(chunk.gradient)
            return
        ledger, num_bytes = self.manager.ledger, chunk.elements * torch.float32.itemsize
        ledger.take(Holds.GRADIENTS, num_bytes)
        yield chunk.gradient.float()
        ledger.give(Holds.GRADIENTS, num_bytes)

    def _cast_on_host(self, gradient: Tensor) -> Tensor:
        """In memory that is kept, since all chunks have one size: the host takes several times as
        long to find new pages as to cast.
        """
        if self._cast is None:
            self._cast = torch.empty(gradient.numel(), dtype=torch.float32)
        return self._cast.copy_(gradient)

    @property
    def host_bytes(self) -> int:
        """What the host holds of chunks, and for their update."""
        return self.manager.host_bytes + (0 if self._cast is None else self._cast.nbytes)

    def _update(
        self, tensors: list[_Tensor], gradient: Tensor, learning_rate: float, *, decay: bool
    ) -> None:
        if not tensors:
            return
        beta1, beta2 = self._options.betas
        adamw(
            [each.master for each in tensors],
            [each.within(gradient) for each in tensors],
            [each.moments[0] for each in tensors],
            [each.moments[1] for each in tensors],
            [],
            [each.step for each in tensors],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=learning_rate,
            weight_decay=self._options.weight_decay if decay else 0.0,
            eps=EPSILON,
            maximize=False,
        )

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """After the backward passes: by parameter that is computed with, the gradient of those that
        this rank owns.
        """
        return {
            each.place.parameter: each.within(chunk.gradient)
            for chunk, owned in self._owned
            for each in owned
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint has of this rank's chunks, by the names that parameters have outside of
        them (executor/training/training_states.py).

        Call `settle` when something was loaded into them.
        """
        states = [each for _, owned in self._owned for each in owned]
        optimizer: dict[str, Tensor] = {}
        for each in states:
            first, second = (_named(each.place, moment) for moment in each.moments)
            found = {"step": each.step, "exp_avg": first, "exp_avg_sq": second}
            optimizer |= {f"{each.place.name}.{key}": value for key, value in found.items()}
        return {
            "model": {each.place.name: _named(each.place, each.master) for each in states},
            "optimizer": optimizer,
        }

    def settle(self) -> None:
        """After a load: parameters follow their masters."""
        self.manager.built()

    def state_bytes(self) -> StateBytes:
        """What chunks hold for good of device and host, whole chunks by class: no gathered group,
        nothing that is fetched for a while.
        """
        return sum((chunk.state_bytes for chunk in self.manager.chunks), StateBytes())


def _owned(chunk: Chunk) -> Iterator[_Tensor]:
    for place in chunk.owned:
        step = torch.zeros((), dtype=torch.float32, device=chunk.master.device)
        yield _Tensor(
            place, place.own.of(chunk.master), tuple(map(place.own.of, chunk.moments)), step
        )


def _named(place: Place, part: Tensor) -> Tensor:
    """[elements] that this rank owns, as a checkpoint has them: the parameter as it is placed, or
    of a part of it the boxes.
    """
    if place.own.count < place.shape.numel():
        return _in_boxes(place, part)
    part = part.view(place.shape)
    whole = place.whole(
        part.as_strided(part.shape, part.stride(), 0)
    )  # torch's stager takes a DTensor with an offset for a plain tensor
    if not isinstance(whole, DTensor):
        return part
    whole._local_tensor = part
    return whole


def _in_boxes(place: Place, part: Tensor) -> Boxes:
    """`part` of a parameter of which other ranks have the rest, where its elements lie in the
    whole.
    """
    parameter = place.parameter
    begin, shape = (0,) * len(place.shape), place.shape
    if isinstance(parameter, DTensor):
        shape = parameter.shape
        begin = compute_local_shape_and_global_offset(
            shape, parameter.device_mesh, parameter.placements
        )[1]
    found = boxes_of(place.shape, place.own.first, place.own.first + place.own.count)
    boxes = tuple(
        Box(tuple(map(sum, zip(begin, box.offset, strict=True))), box.shape) for box in found
    )
    return Boxes(part, shape, boxes)


def _decays(place: Place) -> bool:
    """As outside of chunks (executor/training/optimizer.py): of matrices and tables."""
    return len(place.shape) > 1


def _write(chunk: Chunk) -> None:
    """The parameters in the compute type from the master; in fp32 they are the master."""
    if chunk.parameters is not chunk.master:
        chunk.parameters.copy_(chunk.master)
