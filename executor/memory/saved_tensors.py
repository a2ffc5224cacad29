"""What autograd keeps of a layer: for a tensor that can be made again in the backward pass, a
recipe instead of the tensor.

A recipe keeps of each of its inputs the tensor, or that tensor's own recipe: chains of any length
hold what enters them. What a recipe made stays for everybody who still asks for it and goes with
the last of them: autograd drops what it kept as soon as the backward pass of an operator is over,
so nothing is made twice in a backward pass.
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
from parplan.executor.memory.host_copies import HostTensor, OnHost, flattened
from parplan.executor.tensors import local, memory_of

Make = Callable[..., Iterable[Any]]  # tensors, or what was kept of them


class _Recipe:
    """`make(*inputs)`, run once, when one of its tensors is asked for first, or ahead of that.

    once: each of them is asked for once, and let go then
    """

    def __init__(self, make: Make, inputs: tuple[Kept, ...], *, once: bool = False) -> None:
        self._make = make
        self._inputs = inputs
        self._once = once
        self._made: list[Kept | None] = []

    def tensor(self, index: int) -> Tensor:
        """This rank's part of what `make` gives at `index`."""
        self.run()
        made = self._made[index]
        assert made is not None, "asked for twice"
        if self._once:
            self._made[index] = None
        return local(with_recipes(made))

    def run(self) -> None:
        if not self._made:
            self._made = [
                made if isinstance(made, _Again) else local(made)
                for made in self._make(*map(with_recipes, self._inputs))
            ]
            self._inputs = ()


@dataclass(frozen=True, slots=True)
class _Again:
    """A view of this rank's part of what a recipe makes at `index`, or of what comes back from the
    host, and that view's wrapping.
    """

    recipe: _Recipe | HostTensor
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrapped: Callable[[Tensor], Tensor]


Kept = Tensor | _Again


class Recipes:
    """The recipes of one layer. A tensor is known by its memory for as long as that lives.

    on_host: what of it the host keeps
    in_halves: whether the layer hands on sums that are still under way, which are no tensors to
    keep
    """

    def __init__(self, *, on_host: OnHost | None = None) -> None:
        self.on_host = on_host
        self.in_halves = False
        self.ahead = EarlyRecompute()
        self._runs_ahead = False
        self._made: dict[int, tuple[StorageWeakRef, _Recipe, int]] = {}
        self._watching = False

    def watch(self, layer: nn.Module) -> None:
        """From now on the forward pass of `layer` keeps recipes where it has them."""
        layer.forward = partial(self._run, layer, layer.forward)

    def _run(self, layer: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        self._watching = True
        flight = self.on_host.begin(layer) if self.on_host is not None else None
        try:
            with saved_tensors_hooks(self._save, with_recipes):
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
        """Whether a recipe that is made now can be of use: inside a watched forward pass, with
        gradients.
        """
        return self._watching and torch.is_grad_enabled()

    def remember(
        self, outputs: tuple[Tensor, ...], make: Make, *inputs: Tensor, ahead: bool = True
    ) -> None:
        """`make(*inputs)`, without gradients, gives `outputs` once more. Of no effect where recipes
        are not `active`.

        ahead: whether a recompute ahead of the gradient makes them
        """
        if self.active:
            recipe = _Recipe(torch.no_grad()(make), tuple(self.keep(tensor) for tensor in inputs))
            if ahead:
                self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))
            for index, output in enumerate(outputs):
                self._enter(output, recipe, index)

    def knows(self, tensor: Tensor) -> bool:
        """Whether `tensor` has a recipe."""
        return self._again(tensor) is not None

    def rerun(
        self, forward: Callable[..., Tensor], *inputs: Tensor, output_too: bool, random: bool
    ) -> Tensor:
        """`forward(*inputs)` that keeps nothing but its inputs: what it saves is made by running it
        again as a whole.

        With `output_too` its output is made so as well; `random` says that it draws random numbers,
        the same ones then.
        """
        if not self.active:
            return forward(*inputs)
        wanted = [tensor.requires_grad for tensor in inputs]
        make = partial(
            _run_again, forward, wanted, _random_states(inputs) if random else None, output_too
        )
        recipe = _Recipe(make, tuple(self.keep(tensor) for tensor in inputs))
        self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))
        indices = count(int(output_too))

        def keep(tensor: Tensor) -> _Again:
            return _view(recipe, next(indices), tensor)

        with saved_tensors_hooks(keep, with_recipes):
            output = forward(*inputs)
        if output_too:
            self._enter(output, recipe, 0)
        return output

    def checkpoint(self, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`forward(*inputs)` of the whole layer, which keeps nothing but its inputs.

        As torch's checkpoint; but run ahead it keeps of a gathered input what a layer without
        recompute does.
        """
        if not self.active:
            return forward(*inputs)
        wanted, states, num_saved = (
            [tensor.requires_grad for tensor in inputs],
            _random_states(inputs),
            0,
        )
        recipe = _Recipe(
            lambda *made: self._all_saved(forward, wanted, states, num_saved, *made),
            tuple(map(self.keep, inputs)),
            once=True,
        )
        self.ahead.add(partial(self._run_ahead, weakref.ref(recipe)))

        def keep(tensor: Tensor) -> _Again:
            nonlocal num_saved
            num_saved += 1
            return _view(recipe, num_saved - 1, tensor)

        self._watching = False
        with saved_tensors_hooks(keep, with_recipes):
            return forward(*inputs)

    def _all_saved(
        self,
        forward: Callable[..., Tensor],
        requires_grad: Sequence[bool],
        states: _States,
        number: int,
        *inputs: Tensor,
    ) -> list[Kept]:
        """The `number` tensors that `forward(*inputs)` saves, in order; it ends with the last of
        them.
        """
        saved: list[Kept] = []

        def keep(tensor: Tensor) -> None:
            saved.append(self._again(tensor) or tensor.detach())
            if len(saved) == number:
                raise _AllSavedError

        self._watching = self._runs_ahead
        try:
            with (
                suppress(_AllSavedError),
                _as_before(inputs, requires_grad, states) as leaves,
                saved_tensors_hooks(keep, lambda _: None),
            ):
                forward(*leaves)
        finally:
            self._watching = False
            self._made.clear()
        return saved

    def _run_ahead(self, reference: weakref.ref[_Recipe]) -> None:
        """Run a recipe, if something still needs it."""
        recipe = reference()
        self._runs_ahead = True
        try:
            if recipe is not None:
                recipe.run()
        finally:
            self._runs_ahead = False

    def keep(self, tensor: Tensor) -> Kept:
        """What to keep of an input: itself, here or on the host, or the recipe of the tensor it is
        a view of.
        """
        return self._again(tensor) or _here_or(
            self.on_host.read(tensor) if self.on_host is not None else None, tensor
        )

    def _save(self, tensor: Tensor) -> Kept:
        """The same of what autograd keeps."""
        return self._again(tensor) or _here_or(
            self.on_host.saved(tensor) if self.on_host is not None else None, tensor
        )

    def _again(self, tensor: Tensor) -> _Again | None:
        reference, recipe, index = self._made.get(memory_of(tensor), (None, None, 0))
        if (
            reference is None or recipe is None or reference.expired()
        ):  # memory that is gone left its address to another tensor
            return None
        return _view(recipe, index, tensor)

    def _enter(self, tensor: Tensor, recipe: _Recipe, index: int) -> None:
        self._made[memory_of(tensor)] = (
            StorageWeakRef(local(tensor.detach()).untyped_storage()),
            recipe,
            index,
        )


def with_recipes(kept: Kept) -> Tensor:
    """The tensor of what was kept."""
    if not isinstance(kept, _Again):
        return kept
    made = kept.recipe.tensor(kept.index)
    return kept.wrapped(made.as_strided(kept.size, kept.stride, kept.offset))


def _view(recipe: _Recipe, index: int, tensor: Tensor) -> _Again:
    part = local(tensor.detach())
    return _Again(
        recipe, index, part.size(), part.stride(), int(part.storage_offset()), _wrapping(tensor)
    )


def _here_or(sent: HostTensor | None, tensor: Tensor) -> Kept:
    """What to keep of a tensor that was sent to the host, or else of one that stays."""
    if sent is None:
        return tensor.detach()
    part = local(tensor.detach())
    stride = (
        part.stride() if flattened(part) is not part else sent.stride
    )  # one with gaps was copied without them
    return _Again(sent, 0, part.size(), stride, 0, _wrapping(tensor))


def _wrapping(tensor: Tensor) -> Callable[[Any], Tensor]:
    """What makes a tensor like `tensor` of this rank's part of it."""
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
    """What is run again has saved all that is needed of it."""


def _run_again(
    forward: Callable[..., Tensor],
    requires_grad: Sequence[bool],
    states: _States | None,
    output_too: bool,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:
    """The output of `forward(*inputs)` if it is wanted, and what its backward pass needs in the
    order in which it is saved.
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
    """Around a forward pass that is run again: with gradients, from leaves, and with the random
    numbers that it had.
    """
    devices = [device for device in states or {} if device.type != "cpu"]
    with torch.random.fork_rng(devices, enabled=states is not None), torch.enable_grad():
        _set_random_states(states or {})
        yield [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(inputs, requires_grad, strict=True)
        ]


def _random_states(inputs: tuple[Tensor, ...]) -> _States:
    """The states of the generators of the CPU and of the devices of `inputs`."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states | {
        x.device: torch.cuda.get_rng_state(x.device) for x in inputs if x.device.type == "cuda"
    }


def _set_random_states(states: _States) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
