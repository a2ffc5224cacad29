"""AdamW on what each rank owns: weight decay of matrices only, the learning rate of each step,
clipping by the global norm.

torch's fused loops run on GPUs and CPUs alike (on two CPU cores 4 times as fast on DTensors as its
plain loop, equal to a rounding). The learning rate is a function of the step and not one of torch's
schedulers, which count their own steps: a run that goes on needs to know no more than where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor.pipeline.loss_scale import LossScale
from parplan.executor.pipeline.stages import Stage
from parplan.executor.run_options import LearningRateSchedule, Options
from parplan.executor.tensors import local
from parplan.planner.plan.plan import Plan

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds it to the norm


def build_optimizer(parameters: Sequence[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    """Fused AdamW; vectors (biases, weights of norms) do not decay."""
    groups: dict[tuple[object, torch.device, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        # one device mesh and one device a group: the fused loops cannot mix them
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, local(parameter.detach()).device, decays(parameter)), []).append(
            parameter
        )
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": options.weight_decay if decay else 0.0}
            for (_, _, decay), group in groups.items()
        ]
        or [{"params": []}],  # of a stage whose parameters are all in chunks
        lr=options.learning_rate,
        betas=options.betas,
        fused=True,
    )


def decays(parameter: Tensor) -> bool:
    """Whether weight decay pulls on a parameter: on matrices and tables, as GPT-2 and Llama are
    trained.
    """
    return parameter.ndim > 1


def learning_rate(options: Options, step: int) -> float:
    """Of step 0, 1, ...: a straight line up over the warm-up, then the schedule from the full rate
    towards the least one.

        cosine: least + (full - least) (1 + cos(pi x)) / 2        linear: full - (full - least) x

    with x the share of the steps after the warm-up that are done (cosine: Loshchilov and Hutter
    2017, arXiv 1608.03983).
    """
    full, least = options.learning_rate, options.min_learning_rate
    if step < options.warmup_steps:
        return full * (step + 1) / options.warmup_steps
    done = min(1.0, (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps))
    if options.lr_schedule is LearningRateSchedule.COSINE:
        return least + (full - least) * (1 + math.cos(math.pi * done)) / 2
    return (
        full - (full - least) * done if options.lr_schedule is LearningRateSchedule.LINEAR else full
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, options: Options, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(options, step)


@torch.no_grad()
def own_squared_norm(
    plan: Plan,
    stages: Sequence[Stage],
    device: torch.device,
    in_chunks: Mapping[nn.Parameter, Tensor] | None = None,
    scale: LossScale | None = None,
) -> Tensor:
    """This rank's part of the squared 2-norm of the gradients of the whole model, of which each
    parameter counts once.

    A rank has the square of its parts over the number of ranks that hold the same part; `stages`
    are this rank's. `in_chunks` has the gradients that lie in its chunks, of which no other
    data-parallel rank has any; they are still multiplied by `scale`.
    """
    by_copies: dict[int, list[Tensor]] = {}
    owned = in_chunks or {}
    for parameter in _counted(
        plan, stages
    ):  # in the order that a plan without chunks has, for the same sum
        if parameter in owned:
            by_copies.setdefault(num_copies(replace(plan.mesh, dp=1), parameter), []).append(
                _unscaled(owned[parameter], scale)
            )
        elif parameter.grad is not None:
            by_copies.setdefault(num_copies(plan.mesh, parameter), []).append(local(parameter.grad))
    return squared_norm(by_copies, device)


def squared_norm(parts: Mapping[int, list[Tensor]], device: torch.device) -> Tensor:
    """The sum of the squares of this rank's gradients, by number of ranks that hold the same, each
    over that number; in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in parts.items():
        total += get_total_norm(gradients).to(total).square() / copies
    return total


def _unscaled(gradient: Tensor, scale: LossScale | None) -> Tensor:
    """What has the norm of a gradient in chunks: itself, or that norm in fp32 where it is scaled or
    of 16 bits.
    """
    if scale is None and gradient.dtype is torch.float32:
        return gradient
    return vector_norm(gradient, dtype=torch.float32) / (scale.value if scale is not None else 1.0)


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float, norm: Tensor) -> None:
    """Scale all gradients down so that their norm is `largest`, if `norm` is above it; 0 is no
    limit.
    """
    if largest:
        for group in optimizer.param_groups:
            clip_grads_with_norm_(group["params"], largest, norm)


def clip_factor(largest: float, norm: Tensor, scale: LossScale | None = None) -> Tensor | None:
    """What gradients in chunks are multiplied by before their update: as `clip_gradients`, and out
    of the loss scale. None for nothing.
    """
    factor = (largest / (norm + CLIP_EPSILON)).clamp(max=1.0) if largest else None
    if scale is None:
        return factor
    return (torch.ones_like(norm) if factor is None else factor) / scale.value


def _counted(plan: Plan, stages: Sequence[Stage]) -> Iterator[nn.Parameter]:
    """This rank's parameters without the head's copy of a tied embedding: the first stage's copy
    has the same gradient.
    """
    parameters = dict.fromkeys(parameter for stage in stages for parameter in stage.parameters())
    copies = [
        stage.tied_weight()
        for stage in stages
        if plan.model.tied_embeddings and plan.mesh.pp > 1 and stage.ends_model
    ]
    return (parameter for parameter in parameters if not any(parameter is copy for copy in copies))


def num_copies(mesh: Mesh, parameter: nn.Parameter) -> int:
    """How many of the data and tensor parallel ranks of a stage hold the same part of
    `parameter`.
    """
    parts = 1
    if isinstance(parameter, DTensor):
        placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        parts = math.prod(size for placement, size in placed if not placement.is_replicate())
    return mesh.dp * mesh.tp // parts
