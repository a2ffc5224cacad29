"""The optimizer's part of a step over parameters in tensors as a GPT has them: the update, and the gradients' norm with clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from executor.operations.operands import GRADIENT_STD, Maker
from executor.operations.products import Sizes
from executor.operations.trials import Once, Part, Trial, once
from executor.optimizer import build_optimizer, clip_gradients, squared_norm
from executor.options import Options

HIDDEN_PER_BLOCK = 64  # GPT-2: 12 blocks of 768; larger models are wider, and their tensors large either way


def parameter_shapes(count: int) -> Iterator[tuple[int, ...]]:
    """Shapes with `count` elements together: blocks of GPT 64 times as wide as there are of them, and a table of what is left."""
    blocks = max(1, round((count / (12 * HIDDEN_PER_BLOCK**2)) ** (1 / 3)))
    hidden = max(1, int((count / (12 * blocks)) ** 0.5))
    vectors = (hidden, hidden, 3 * hidden, hidden, hidden, hidden, 4 * hidden, hidden)
    block = [*((n,) for n in vectors), (3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    block_elements = 12 * hidden**2 + sum(vectors)
    whole = min(blocks, count // block_elements)
    yield from block * whole
    rows, rest = divmod(count - whole * block_elements, hidden)
    if rows:
        yield rows, hidden
    if rest:
        yield (rest,)


def _parameters(maker: Maker, count: int) -> list[nn.Parameter]:
    """fp32 whatever the precision: the master copy."""
    parameters = [nn.Parameter(maker.normal(*shape, std=0.02, dtype=torch.float32)) for shape in parameter_shapes(count)]
    for parameter in parameters:
        parameter.grad = maker.normal(*parameter.shape, std=GRADIENT_STD, dtype=torch.float32)
    return parameters


def adamw(sizes: Sizes) -> tuple[Part, ...]:
    """The update of fp32 masters by fp32 gradients, which it lets go; in 16 bits with the copies for the next step's passes."""

    def trial(maker: Maker) -> Trial:
        parameters = _parameters(maker, sizes["parameters"])
        optimizer = build_optimizer(parameters, Options())
        templates = [parameter.grad for parameter in parameters]
        copies = [maker.zeros_like(p, maker.dtype) for p in parameters] if maker.dtype is not torch.float32 else []
        return Once(lambda: _update(optimizer, parameters, copies), ready=_regrow(parameters, templates))

    return once(trial)


def _update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], copies: list[Tensor]) -> tuple[Tensor, ...]:
    optimizer.step()
    optimizer.zero_grad()
    if copies:
        with torch.no_grad():
            torch._foreach_copy_(copies, list[Tensor](parameters))
    return ()


def _regrow(parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> Callable[[], None]:
    def ready() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    return ready


def gradient_norm(sizes: Sizes) -> tuple[Part, ...]:
    """Norm and clipping, without the reduction over the ranks."""

    def trial(maker: Maker) -> Trial:
        parameters = _parameters(maker, sizes["parameters"])
        optimizer, options = build_optimizer(parameters, Options()), Options()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

        def clip() -> Tensor:
            norm = squared_norm({1: gradients}, maker.device).sqrt().float()
            clip_gradients(optimizer, options.clip_gradients, norm)
            return norm

        return Once(torch.no_grad()(clip))

    return once(trial)
