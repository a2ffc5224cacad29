"""AdamW over chunks: each is updated where its master and moments lie, on device or host.

PatrickStar calls it hybrid Adam (arXiv 2108.05818). torch's fused loop runs over views of the flat
states, tensor by tensor, so that every parameter gets the same values as outside of chunks, to the
last bit. Where a parameter crosses the border between two ranks' chunks, each rank updates its
elements. Gradients of 16 bits are cast chunk by chunk; the parameters in the compute type are
written from the master where that is, and come to the device by the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw

from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.chunks.chunk import Chunk, ChunkedParameter
from parplan.executor.chunks.chunk_buffers import ByteClass
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.run_options import Options
from parplan.executor.sharding.tensor_boxes import Box, Boxes, Strips, boxes_of

EPSILON = 1e-8  # torch.optim.AdamW's default, as for the parameters outside of chunks


@dataclass(frozen=True, slots=True)
class _OwnedStates:
    """Flat views of the states of one parameter's elements on this rank; `step` counts updates."""

    place: ChunkedParameter
    master: Tensor
    moments: tuple[Tensor, ...]
    step: Tensor

    def within(self, flat: Tensor) -> Tensor:
        """Returns these [elements] in another state of the chunk."""
        return self.place.owned.of(flat)


class ChunkAdam:
    """The optimizer of the parameters in a rank's chunks.

    strips   by name, of parameters that are several matrices each
    """

    def __init__(
        self, manager: ChunkManager, options: Options, strips: Mapping[str, Strips]
    ) -> None:
        self.manager = manager
        self._options, self._strips = options, strips
        self._owned = [(chunk, tuple(_owned(chunk))) for chunk in manager.chunks]
        self._cast: Tensor | None = None  # the gradients of one chunk of the host in fp32

    @torch.no_grad()
    def step(self, learning_rate: float, factor: Tensor | None = None) -> None:
        """Updates every chunk with its gradient times `factor`; gradients are overwritten."""
        for chunk, owned in self._owned:
            with self._single(chunk) as gradient:
                if factor is not None:
                    gradient.mul_(factor.to(gradient.device))
                for decay in (True, False):
                    updated = [each for each in owned if _decays(each.place) is decay]
                    self._update(updated, gradient, learning_rate, decay=decay)
            _write(chunk)

    @torch.no_grad()
    def skip(self) -> None:
        """Leaves out an update; rewrites parameters that gradients were written over."""
        for chunk in self.manager.chunks:
            _write(chunk)

    @contextmanager
    def _single(self, chunk: Chunk) -> Iterator[Tensor]:
        """Yields the gradients of a chunk in fp32, on the side of its master."""
        if chunk.gradient.dtype is torch.float32:
            yield chunk.gradient
            return
        if chunk.home is not StateLocation.DEVICE:
            yield self._cast_on_host(chunk.gradient)
            return
        ledger, num_bytes = self.manager.ledger, chunk.elements * torch.float32.itemsize
        ledger.take(ByteClass.GRADIENTS, num_bytes)
        yield chunk.gradient.float()
        ledger.give(ByteClass.GRADIENTS, num_bytes)

    def _cast_on_host(self, gradient: Tensor) -> Tensor:
        """Casts into permanent memory, since all chunks have one size.

        The host takes several times as long to find new pages as to cast.
        """
        if self._cast is None:
            self._cast = torch.empty(gradient.numel(), dtype=torch.float32)
        return self._cast.copy_(gradient)

    @property
    def host_bytes(self) -> int:
        """Returns the host bytes of chunks and of their update."""
        return self.manager.host_bytes + (0 if self._cast is None else self._cast.nbytes)

    def _update(
        self, tensors: list[_OwnedStates], gradient: Tensor, learning_rate: float, *, decay: bool
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
        """Returns the gradients of this rank's elements by parameter, after the backward passes."""
        return {
            each.place.parameter: each.within(chunk.gradient)
            for chunk, owned in self._owned
            for each in owned
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Returns the checkpoint tensors of this rank's chunks.

        Their names are those of parameters outside of chunks
        (executor/training/training_states.py). Call `settle` after loading into them.
        """
        states = [each for _, owned in self._owned for each in owned]
        optimizer: dict[str, Tensor] = {}
        for each in states:
            name, place = each.place.name, each.place
            optimizer[f"{name}.step"] = each.step
            optimizer[f"{name}.exp_avg"] = self._named(place, each.moments[0])
            optimizer[f"{name}.exp_avg_sq"] = self._named(place, each.moments[1])
        return {
            "model": {each.place.name: self._named(each.place, each.master) for each in states},
            "optimizer": optimizer,
        }

    def _named(self, place: ChunkedParameter, part: Tensor) -> Tensor:
        """Returns this rank's [elements] in the form of a checkpoint.

        A whole parameter is placed as such. A part of one is in boxes, as are several matrices.
        """
        strips = self._strips.get(place.name)
        if strips is not None or place.owned.count < place.shape.numel():
            return _in_boxes(place, part, strips)
        part = part.view(place.shape)
        # torch's stager takes a DTensor with an offset for a plain tensor
        whole = place.placed(part.as_strided(part.shape, part.stride(), 0))
        if not isinstance(whole, DTensor):
            return part
        whole._local_tensor = part
        return whole

    def settle(self) -> None:
        """Rewrites the parameters from their masters after a load."""
        self.manager.built()

    def state_bytes(self) -> StateBytes:
        """Returns the permanent bytes of chunks on device and host, whole chunks by class.

        Gathered groups and temporary copies are left out.
        """
        return sum((chunk.state_bytes for chunk in self.manager.chunks), StateBytes())


def _owned(chunk: Chunk) -> Iterator[_OwnedStates]:
    for place in chunk.owned:
        step = torch.zeros((), dtype=torch.float32, device=chunk.master.device)
        view = place.owned.of
        yield _OwnedStates(place, view(chunk.master), tuple(map(view, chunk.moments)), step)


def _in_boxes(place: ChunkedParameter, part: Tensor, strips: Strips | None) -> Boxes:
    """Returns `part` of a parameter, whose rest other ranks have, as boxes of the whole."""
    parameter = place.parameter
    begin, shape = (0,) * len(place.shape), place.shape
    if isinstance(parameter, DTensor):
        shape = parameter.shape
        begin = compute_local_shape_and_global_offset(
            shape, parameter.device_mesh, parameter.placements
        )[1]
    last = place.owned.first + place.owned.count
    boxes = tuple(
        Box(tuple(map(sum, zip(begin, box.offset, strict=True))), box.shape)
        for box in boxes_of(place.shape, place.owned.first, last)
    )
    return Boxes(part, shape, boxes, strips)


def _decays(place: ChunkedParameter) -> bool:
    """Decays matrices and tables, as outside of chunks (executor/training/optimizer.py)."""
    return len(place.shape) > 1 and not place.name.endswith(".bias")


def _write(chunk: Chunk) -> None:
    """Writes the parameters in the compute type from the master; in fp32 both are the same."""
    if chunk.parameters is not chunk.master:
        chunk.parameters.copy_(chunk.master)
