"""Recipes in place of saved tensors: the backward pass recomputes a tensor with its recipe.

A recipe holds each of its inputs as a tensor or as that tensor's recipe, so a chain of any length
holds only its first inputs. A recomputed tensor lives until its last reader drops it: autograd
drops saved tensors at the end of an operator's backward pass, so no tensor is recomputed twice in a
backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from parplan.executor.memory.early_recompute import EarlyRecompute
from parplan.executor.memory.host_copies import HostOffload, HostTensor, flattened
from parplan.executor.tensors import local, memory_of
from parplan.profiles.profiler.gpus import forked_random, gpu, is_gpu

Make = Callable[..., Iterable[Any]]  # returns tensors, or packed ones


class _Recipe:
    """Runs `make(*inputs)` once, at the first read of one of its tensors or ahead of that.

    With `once` each tensor is read once and released then.
    """

    def __init__(self, make: Make, inputs: tuple[Packed, ...], *, once: bool = False) -> None:
        self._make = make
        self._inputs = inputs
        self._once = once
        self._made: list[Packed | None] = []

    def tensor(self, index: int) -> Tensor:
        """Returns this rank's part of output `index` of `make`."""
        self.run()
        made = self._made[index]
        assert made is not None, "asked for twice"
        if self._once:
            self._made[index] = None
        return local(unpack(made))

    def run(self) -> None:
        if not self._made:
            self._made = [
                made if isinstance(made, _Recomputed) else local(made)
                for made in self._make(*map(unpack, self._inputs))
            ]
            self._inputs = ()


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """A view of this rank's part of output `index` of a recipe, or of a tensor on the host.

    `wrapped` turns that view into the tensor that was saved.
    """

    recipe: _Recipe | HostTensor
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: Callable[[Tensor], Tensor]


Packed = Tensor | _Recomputed


class Recipes:
    """The recipes of one layer; a tensor is identified by its memory while that lives.

    on_host    selects the saved tensors that go to the host
    in_halves  whether the layer hands on sums under way, which cannot be saved as tensors
    """

    def __init__(self, *, on_host: HostOffload | None = None) -> None:
        self.on_host = on_host
        self.in_halves = False
        self.ahead = EarlyRecompute()
        self._runs_ahead = False
        self._made: dict[int, tuple[StorageWeakRef, _Recipe, int]] = {}
        self._watching = False

    def watch(self, layer: nn.Module) -> None:
        """Makes the forward pass of `layer` save recipes where it has them."""
        layer.forward = partial(self._run, layer, layer.forward)

    def _run(self, layer: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self._watching = True
        flight = self.on_host.begin(layer) if self.on_host is not None else None
        try:
            with saved_tensors_hooks(self._pack_saved, unpack):
                output = forward(*inputs)
        finally:
            self._watching = False
            self._made.clear()
            if self.on_host is not None:
                self.on_host.end()
        if flight is not None:
            flight.follow(output)
        return output

    @property
    def active(self) -> bool:
        """True inside a watched forward pass with gradients, where recipes are used."""
        return self._watching and torch.is_grad_enabled()

    def remember(
        self, outputs: tuple[Tensor, ...], make: Make, *inputs: Tensor, ahead: bool = True
    ) -> None:
        """Records that `make(*inputs)`, without gradients, recomputes `outputs`.

        It has no effect where recipes are not `active`. With `ahead` a recompute ahead of the
        gradient includes them.
        """
        if self.active:
            recipe = _Recipe(
                torch.no_grad()(make), tuple(self.pack_input(tensor) for tensor in inputs)
            )
            if ahead:
                self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))
            for index, output in enumerate(outputs):
                self._enter(output, recipe, index)

    def knows(self, tensor: Tensor) -> bool:
        """Returns True for a tensor that has a recipe."""
        return self._recomputed(tensor) is not None

    def rerun(
        self, forward: Callable[..., Tensor], *inputs: Tensor, output_too: bool, random: bool
    ) -> Tensor:
        """Runs `forward(*inputs)` and saves only its inputs.

        The other tensors that it would save are recomputed by one run of all of it. With
        `output_too` its output is recomputed as well; with `random` the rerun draws the same random
        numbers.
        """
        if not self.active:
            return forward(*inputs)
        requires_grad = [tensor.requires_grad for tensor in inputs]
        states = _random_states(inputs) if random else None
        make = partial(_rerun_saved, forward, requires_grad, states, output_too)
        recipe = _Recipe(make, tuple(self.pack_input(tensor) for tensor in inputs))
        self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))
        indices = count(int(output_too))
        given = set[int]() if self.on_host is not None else set(map(memory_of, inputs))

        def pack(tensor: Tensor) -> Packed:
            index = next(indices)
            return (
                self.pack_input(tensor)
                if memory_of(tensor) in given
                else _view(recipe, index, tensor)
            )

        with saved_tensors_hooks(pack, unpack):
            output = forward(*inputs)
        if output_too:
            self._enter(output, recipe, 0)
        return output

    def checkpoint(self, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Runs the whole layer, `forward(*inputs)`, and saves only its inputs.

        It works like torch's checkpoint, but a rerun ahead of the gradient saves gathered inputs in
        parts, like a layer without recompute.
        """
        if not self.active:
            return forward(*inputs)
        requires_grad = [tensor.requires_grad for tensor in inputs]
        states = _random_states(inputs)
        num_saved = 0

        def make(*made: Tensor) -> list[Packed]:
            return self._all_saved(forward, requires_grad, states, num_saved, *made)

        recipe = _Recipe(make, tuple(map(self.pack_input, inputs)), once=True)
        self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))

        def pack(tensor: Tensor) -> _Recomputed:
            nonlocal num_saved
            num_saved += 1
            return _view(recipe, num_saved - 1, tensor)

        self._watching = False
        with saved_tensors_hooks(pack, unpack):
            return forward(*inputs)

    def _all_saved(
        self,
        forward: Callable[..., Tensor],
        requires_grad: Sequence[bool],
        states: _States,
        number: int,
        *inputs: Tensor,
    ) -> list[Packed]:
        """Returns the `number` tensors that `forward(*inputs)` saves, in order.

        The run stops at the last of them.
        """
        saved: list[Packed] = []

        def pack(tensor: Tensor) -> None:
            saved.append(self._recomputed(tensor) or tensor.detach())
            if len(saved) == number:
                raise _AllSavedError

        self._watching = self._runs_ahead
        try:
            with (
                suppress(_AllSavedError),
                _as_before(inputs, requires_grad, states) as leaves,
                saved_tensors_hooks(pack, lambda _: None),
            ):
                forward(*leaves)
        finally:
            self._watching = False
            self._made.clear()
        return saved

    def _run_ahead(self, reference: weakref.ref[_Recipe]) -> None:
        """Runs a recipe, if it is still needed."""
        recipe = reference()
        self._runs_ahead = True
        try:
            if recipe is not None:
                recipe.run()
        finally:
            self._runs_ahead = False

    def pack_input(self, tensor: Tensor) -> Packed:
        """Packs an input: a recipe, a copy on the host, or the tensor itself."""
        sent = self.on_host.read if self.on_host is not None else _not_sent
        return self._recomputed(tensor) or _here_or(sent(tensor), tensor)

    def _pack_saved(self, tensor: Tensor) -> Packed:
        """Packs a tensor that autograd saves, like `pack_input`."""
        sent = self.on_host.saved if self.on_host is not None else _not_sent
        return self._recomputed(tensor) or _here_or(sent(tensor), tensor)

    def _recomputed(self, tensor: Tensor) -> _Recomputed | None:
        reference, recipe, index = self._made.get(memory_of(tensor), (None, None, 0))
        # the address of freed memory may be that of another tensor
        if reference is None or recipe is None or reference.expired():
            return None
        return _view(recipe, index, tensor)

    def _enter(self, tensor: Tensor, recipe: _Recipe, index: int) -> None:
        storage = StorageWeakRef(local(tensor.detach()).untyped_storage())
        self._made[memory_of(tensor)] = (storage, recipe, index)


def _not_sent(tensor: Tensor) -> None:
    return None


def unpack(packed: Packed) -> Tensor:
    """Returns the tensor of a packed one."""
    if not isinstance(packed, _Recomputed):
        return packed
    made = packed.recipe.tensor(packed.index)
    return packed.wrapped(made.as_strided(packed.size, packed.stride, packed.offset))


def _view(recipe: _Recipe, index: int, tensor: Tensor) -> _Recomputed:
    part = local(tensor.detach())
    offset = int(part.storage_offset())
    return _Recomputed(recipe, index, part.size(), part.stride(), offset, _wrapping(tensor))


def _here_or(sent: HostTensor | None, tensor: Tensor) -> Packed:
    """Packs a tensor that was sent to the host, or else the tensor itself."""
    if sent is None:
        return tensor.detach()
    part = local(tensor.detach())
    # a tensor with gaps was copied without them
    stride = part.stride() if flattened(part) is not part else sent.stride
    return _Recomputed(sent, 0, part.size(), stride, 0, _wrapping(tensor))


def _wrapping(tensor: Tensor) -> Callable[[Any], Tensor]:
    """Returns the call that wraps this rank's part like `tensor`."""
    if not isinstance(tensor, DTensor):
        return lambda part: part
    return partial(
        DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


_States = dict[torch.device, Tensor]


class _AllSavedError(Exception):
    """Ends a rerun that has saved all needed tensors."""


def _rerun_saved(
    forward: Callable[..., Tensor],
    requires_grad: Sequence[bool],
    states: _States | None,
    output_too: bool,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the tensors that `forward(*inputs)` saves, in order.

    With `output_too` its output comes first.
    """
    saved: list[Tensor] = []
    hooks = saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda _: None)
    with _as_before(inputs, requires_grad, states) as leaves, hooks:
        output = forward(*leaves)
    return (output.detach(), *saved) if output_too else tuple(saved)


@contextmanager
def _as_before(
    inputs: Sequence[Tensor], requires_grad: Sequence[bool], states: _States | None
) -> Iterator[list[Tensor]]:
    """Surrounds a rerun of a forward pass and yields its inputs as leaves.

    It runs with gradients and draws the random numbers of the first run.
    """
    with forked_random(*states or (), enabled=states is not None), torch.enable_grad():
        _set_random_states(states or {})
        yield [
            tensor.detach().requires_grad_(required)
            for tensor, required in zip(inputs, requires_grad, strict=True)
        ]


def _random_states(inputs: tuple[Tensor, ...]) -> _States:
    """Returns the states of the generators of the CPU and of the devices of `inputs`."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states | {
        x.device: gpu(x.device).get_rng_state(x.device) for x in inputs if is_gpu(x.device)
    }


def _set_random_states(states: _States) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            gpu(device).set_rng_state(state, device)
