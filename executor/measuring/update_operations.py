"""The optimizer's part of a step: the update, and the gradients' norm with clipping.

Parameters lie in tensors of a GPT's shapes, masters and gradients in fp32. In 16 bits they are the
DTensors that FSDP makes of a layer's parameters, whose operators cost the host more. A whole step
lies between two updates and leaves neither data nor code of the update in a CPU's caches; the
measurement does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from parplan.executor.measuring.operands import GRADIENT_STD, Maker, cache_bytes
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.trials import TimedPasses, Trial, TrialStep, once
from parplan.executor.run_options import Options
from parplan.executor.tensors import forget_meshes, local
from parplan.executor.training.optimizer import build_optimizer, clip_gradients, squared_norm
from parplan.profiles.profiler.gpus import backend_of, own_gpu
from parplan.profiles.units import GIB

SWEPT_CACHES = 2
TENSORS_STD = 0.02
LAYERS = 8
STATE_BYTES = 16  # of one parameter: master, two moments, gradient
MOST_BYTES = GIB


def layers_of(count: int) -> int:
    """Return how many layers of `count` parameters are updated together, as in a model.

    Several layers keep the start of an update from counting as part of one layer. There are fewer
    if they take more than 1 GiB.
    """
    return max(1, min(LAYERS, MOST_BYTES // (STATE_BYTES * count)))


def parameter_shapes(count: int) -> Iterator[tuple[int, ...]]:
    """Yield shapes of a layer with `count` elements.

    They are those of a GPT's block, and rows of a table for the rest.
    """
    hidden = max(1, int(((169 + 48 * count) ** 0.5 - 13) / 24))  # 12 hidden^2 + 13 hidden = count
    vectors = (hidden, hidden, 3 * hidden, hidden, hidden, hidden, 4 * hidden, hidden)
    block = [
        *((n,) for n in vectors),
        (3 * hidden, hidden),
        (hidden, hidden),
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
    ]
    rest = count - 12 * hidden**2 - sum(vectors)
    if rest >= 0:
        yield from block
    rows, rest = divmod(rest if rest >= 0 else count, hidden)
    if rows:
        yield rows, hidden
    if rest:
        yield (rest,)


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """Enter a process group of this process alone, which DTensors need, unless it is in one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(
        backend_of(device),
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=own_gpu(device),
    )
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()


def _parameters(maker: Maker, count: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return masters and gradients."""
    shapes = list(parameter_shapes(count)) * layers_of(count)
    masters = [maker.normal(*shape, std=TENSORS_STD, dtype=torch.float32) for shape in shapes]
    gradients = [maker.normal(*shape, std=GRADIENT_STD, dtype=torch.float32) for shape in shapes]
    return [nn.Parameter(tensor) for tensor in _held(maker, masters)], _held(maker, gradients)


def _held(maker: Maker, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in the form of the executor."""
    if maker.dtype is torch.float32:
        return tensors
    mesh = init_device_mesh(maker.device.type, (1,))
    return [DTensor.from_local(tensor, mesh, (Replicate(),), run_check=False) for tensor in tensors]


def adamw(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the pass of the update, which then drops the gradients.

    In 16 bits it also makes the copies for the next step's passes.
    """

    def trial(maker: Maker) -> Trial:
        parameters, gradients = _parameters(maker, sizes["parameters"])
        optimizer = build_optimizer(parameters, Options())
        sweep = _sweep(maker)
        masters = []
        if maker.dtype is not torch.float32:
            masters = [local(parameter.detach()) for parameter in parameters]
        copies = [maker.zeros_like(master, maker.dtype) for master in masters]

        def ready() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            sweep()

        def update() -> tuple[Tensor, ...]:
            optimizer.step()
            optimizer.zero_grad()
            if copies:
                torch._foreach_copy_(copies, masters)
            return ()

        return TrialStep(update, ready=ready)

    return once(trial, layers_of(sizes["parameters"]))


def gradient_norm(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the pass of norm and clipping, without the reduction over the ranks."""

    def trial(maker: Maker) -> Trial:
        parameters, gradients = _parameters(maker, sizes["parameters"])
        optimizer = build_optimizer(parameters, Options())
        largest = Options().clip_gradients
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

        def clip() -> Tensor:
            parts = {1: [local(gradient) for gradient in gradients]}
            norm = squared_norm(parts, maker.device).sqrt().float()
            clip_gradients(optimizer, largest, norm)
            return norm

        return TrialStep(torch.no_grad()(clip), ready=_sweep(maker))

    return once(trial, layers_of(sizes["parameters"]))


def accumulation(sizes: Sizes) -> tuple[TimedPasses, ...]:
    """Return the pass that adds a weight gradient to the fp32 one of earlier micro-batches."""

    def trial(maker: Maker) -> Trial:
        gradient = maker.normal(sizes["elements"], std=GRADIENT_STD)
        total = maker.normal(sizes["elements"], std=GRADIENT_STD, dtype=torch.float32)
        return TrialStep(lambda: (total.add_(gradient), ())[1], (gradient,))

    return once(trial)


def _sweep(maker: Maker) -> Callable[[], None]:
    """Return a function that fills the caches of a CPU with other data."""
    if maker.device.type != "cpu":
        return lambda: None

    def sweep() -> None:
        _swept().add_(1)

    return sweep


@functools.cache
def _swept() -> Tensor:
    """Return a tensor larger than the last-level cache."""
    return torch.zeros(SWEPT_CACHES * cache_bytes(torch.device("cpu")), dtype=torch.uint8)
