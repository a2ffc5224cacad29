"""Trials: the timed steps of one case on one copy of its operands.

Memory is allocated and freed as in training. A forward pass's results live until the same copy runs
again, so that the written memory was not touched lately. Gradients are freed at once, and the next
copy's take their place. Neither is in the timed span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parplan.executor.measuring.operands import Maker


class Trial(Protocol):
    """Steps by name, in the order in which they can run."""

    @property
    def steps(self) -> tuple[str, ...]: ...

    def before(self, step: str) -> None:
        """Prepare a step; not timed.

        Frees the last results, and touches the tensors that the previous operator has just written.
        """

    def run(self, step: str) -> None: ...

    def release(self, step: str) -> None:
        """Free the results of the step that a training step would free soon."""

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The results of the last step."""


@dataclass(slots=True)
class Graph:
    """An operator with its backward pass.

    Its output and its output's gradient were written just before, all other tensors long ago.

    compute   the forward pass; records the graph
    inputs    tensors that the previous operator writes
    leaves    tensors that require gradients
    gradient  the output's gradient
    after     the use of the gradients in the backward pass
    """

    compute: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    gradient: Tensor
    after: Callable[[tuple[Tensor, ...]], None] | None = None
    out: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        return ("forward", "backward")

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.gradients or (() if self.out is None else (self.out,))

    def before(self, step: str) -> None:
        if step == "forward":
            self.out = None
            _touch(self.inputs)
        else:
            _touch((self.gradient,))

    def run(self, step: str) -> None:
        if step == "forward":
            self.out = self.compute()
        else:
            self.backward()

    def release(self, step: str) -> None:
        self.gradients = ()

    def backward(self) -> None:
        assert self.out is not None
        self.gradients = torch.autograd.grad(self.out, self.leaves, self.gradient)
        if self.after is not None:
            self.after(self.gradients)


@dataclass(slots=True)
class TrialStep:
    """Work of one step."""

    compute: Callable[[], Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...] = ()
    ready: Callable[[], None] | None = None
    name: str = "time"
    made: tuple[Tensor, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def results(self) -> tuple[Tensor, ...]:
        return self.made

    def before(self, step: str) -> None:
        self.made = ()
        if self.ready is not None:
            self.ready()
        _touch(self.inputs)

    def run(self, step: str) -> None:
        made = self.compute()
        self.made = made if isinstance(made, tuple) else (made,)

    def release(self, step: str) -> None:
        """Keep the result until the copy runs again."""


def _touch(tensors: tuple[Tensor, ...]) -> None:
    """Write the values of tensors once more.

    Bypasses autograd, which would count it as a change of a saved tensor.
    """
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.mul_(1.0)


@dataclass(frozen=True, slots=True)
class TimedPasses:
    """A trial of a case.

    passes  the case's passes by the trial's steps
    times   how many of the case's operations one step does
    """

    make: Callable[[Maker], Trial]
    passes: Mapping[str, str]
    times: int = 1


def both(make: Callable[[Maker], Trial]) -> tuple[TimedPasses, ...]:
    return (TimedPasses(make, {"forward": "forward", "backward": "backward"}),)


def once(make: Callable[[Maker], Trial], times: int = 1) -> tuple[TimedPasses, ...]:
    return (TimedPasses(make, {"time": "time"}, times),)
