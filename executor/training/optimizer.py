"""The optimizer of the parameters that each rank owns: AdamW, or the one that the plan names.

Weight decay applies to matrices only, the learning rate is set for each step, and gradients are
clipped by the global norm. torch's fused loops run on GPUs and CPUs alike (on two CPU cores 4 times
as fast on DTensors as its plain loop, equal to a rounding). The learning rate is a function of the
step, not one of torch's schedulers, which count their own steps: a run that resumes needs the step
number alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.linalg import vector_norm
from torch.nn.utils import get_total_norm

from parplan.executor.models.expert_exchange import EP
from parplan.executor.models.mixture_of_experts import BIASES, Grouped
from parplan.executor.models.tower_modules import PatchTables
from parplan.executor.pipeline.loss_scale import LossScale
from parplan.executor.pipeline.stages import Stage
from parplan.executor.run_options import LearningRateSchedule, Options
from parplan.executor.tensors import local, part
from parplan.executor.training.adafactor import Adafactor
from parplan.executor.training.muon import Muon
from parplan.executor.training.narrow_adam import NarrowAdam
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Optimizer, TrainingSpec

ENDS = ("embedding", "head")  # the layers whose matrices are tables
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds as much to the norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The tensors that an optimizer does not treat as one matrix of a block.

    tables    matrices of embedding and head, and positions of patches
    stacked   number of matrices that lie one under the other in a tensor
    """

    tables: frozenset[nn.Parameter] = frozenset()
    stacked: Mapping[nn.Parameter, int] = field(default_factory=dict)


def layout_of(*bodies: nn.Module) -> Layout:
    """Return the tables and the experts of the layers of a described model.

    bodies    modules whose children are layers by name
    """
    modules = [module for body in bodies for module in body.modules()]
    return Layout(
        tables=frozenset(
            parameter
            for body in bodies
            for name, parameter in body.named_parameters()
            if name.split(".")[0] in ENDS and parameter.ndim > 1
        )
        | {each.weight for each in modules if isinstance(each, PatchTables) and each.has_positions},
        stacked={each.weight: each.num_experts for each in modules if isinstance(each, Grouped)},
    )


def build_optimizer(
    parameters: Sequence[nn.Parameter],
    options: Options,
    optimizer: Optimizer = Optimizer.ADAM,
    layout: Layout | None = None,
    moments: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer; vectors (biases, weights of norms) do not decay.

    SGD has the first beta as its momentum. `moments` is the type of Adam's moments, None for that
    of their parameters, which other optimizers have.
    """
    layout = layout or Layout()
    rate, betas = options.learning_rate, options.betas
    if optimizer is Optimizer.MUON:
        matrices = [p for p in parameters if p.ndim > 1 and p not in layout.tables]
        adam = _adam([p for p in parameters if p not in set(matrices)], options)
        return Muon(_groups(matrices, options), adam, lr=rate, stacked=layout.stacked)
    groups = _groups(parameters, options)
    in_8_bits = optimizer is Optimizer.ADAM_8BIT
    if in_8_bits or (moments and any(each.dtype is not moments for each in parameters)):
        return NarrowAdam(groups, lr=rate, betas=betas, moments=moments, in_8_bits=in_8_bits)
    if optimizer is Optimizer.ADAFACTOR:
        return Adafactor(groups, lr=rate)
    if optimizer in (Optimizer.SGD, Optimizer.SGD_MOMENTUM):
        momentum = betas[0] if optimizer is Optimizer.SGD_MOMENTUM else 0.0
        return torch.optim.SGD(groups, lr=rate, momentum=momentum)
    return _adam(parameters, options)


def moment_type(training: TrainingSpec) -> torch.dtype:
    """Return the type of a moment that has no 8 bits."""
    return torch.bfloat16 if training.stack.moment_bytes == 2 else torch.float32


def _adam(parameters: Sequence[nn.Parameter], options: Options) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        _groups(parameters, options), lr=options.learning_rate, betas=options.betas, fused=True
    )


def _groups(parameters: Sequence[nn.Parameter], options: Options) -> list[dict[str, Any]]:
    groups: dict[tuple[object, torch.device, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        # A group has one device mesh and one device: the fused loops cannot mix them.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, local(parameter.detach()).device, decays(parameter)), []).append(
            parameter
        )
    param_groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": options.weight_decay if decay else 0.0}
        for (_, _, decay), group in groups.items()
    ]
    return param_groups or [{"params": []}]  # no group if all parameters of the stage are in chunks


def decays(parameter: Tensor) -> bool:
    """Return True if weight decay applies to a parameter.

    It applies to matrices and tables, as GPT-2 and Llama are trained. The biases of several experts
    lie side by side in one tensor, which is no matrix.
    """
    return parameter.ndim > 1 and not getattr(parameter, BIASES, False)


def learning_rate(options: Options, step: int) -> float:
    """Return the learning rate of step 0, 1, ...

    The rate rises linearly over the warm-up and then follows the schedule to the least rate:

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
    if options.lr_schedule is LearningRateSchedule.LINEAR:
        return full - (full - least) * done
    return full


def set_learning_rate(optimizer: torch.optim.Optimizer, options: Options, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(options, step)


def _is_divided(parameter: nn.Parameter) -> bool:
    """Return True for experts that ranks divide, each element of which has one owner in chunks."""
    return isinstance(parameter, DTensor) and EP in (parameter.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def own_squared_norm(
    plan: Plan,
    stages: Sequence[Stage],
    device: torch.device,
    in_chunks: Mapping[nn.Parameter, Tensor] | None = None,
    scale: LossScale | None = None,
) -> Tensor:
    """Return this rank's part of the squared 2-norm of all gradients of the model.

    Each parameter of the model counts once: a rank divides the square of its part by the number of
    ranks that hold the same part. `stages` are this rank's. `in_chunks` has the gradients in this
    rank's chunks, which no other data-parallel rank has; they are still multiplied by `scale`.
    """
    by_copies: dict[int, list[Tensor]] = {}
    owned, ranks = in_chunks or {}, plan.mesh.ranks_per_stage
    # The order is that of a plan without chunks, so that the sum is the same.
    for parameter in _counted(plan, stages):
        if parameter in owned:
            of_replica = ranks // plan.mesh.dp
            copies = 1 if _is_divided(parameter) else num_copies(of_replica, parameter)
            by_copies.setdefault(copies, []).append(_unscaled(owned[parameter], scale))
        elif parameter.grad is not None:
            by_copies.setdefault(num_copies(ranks, parameter), []).append(local(parameter.grad))
    return squared_norm(by_copies, device)


def squared_norm(parts: Mapping[int, list[Tensor]], device: torch.device) -> Tensor:
    """Return the sum of the squares of this rank's gradients in fp64.

    parts  gradients by the number of ranks that hold the same part; each square is divided by it
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in parts.items():
        # the norm of a 16-bit gradient would have 16 bits
        norms = (
            g if g.dtype is torch.float32 else vector_norm(g, dtype=torch.float32)
            for g in gradients
        )
        total += get_total_norm(norms).to(total).square() / copies
    return total


def _unscaled(gradient: Tensor, scale: LossScale | None) -> Tensor:
    """Return a tensor that has the norm of a gradient in chunks.

    It is the gradient itself, or its norm in fp32 if it is scaled or of 16 bits.
    """
    if scale is None and gradient.dtype is torch.float32:
        return gradient
    return vector_norm(gradient, dtype=torch.float32) / (scale.value if scale is not None else 1.0)


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float, norm: Tensor) -> None:
    """Scale all gradients down to a norm of `largest` if `norm` is above it; 0 is no limit.

    A rank scales the part that it holds, which takes no decision of DTensor's.
    """
    factor = clip_factor(largest, norm)
    if factor is None:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(part(parameter.grad))
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def clip_factor(largest: float, norm: Tensor, scale: LossScale | None = None) -> Tensor | None:
    """Return the factor for gradients in chunks before their update, or None for no change.

    It clips as `clip_gradients` does and removes the loss scale.
    """
    factor = (largest / (norm + CLIP_EPSILON)).clamp(max=1.0) if largest else None
    if scale is None:
        return factor
    return (torch.ones_like(norm) if factor is None else factor) / scale.value


def _counted(plan: Plan, stages: Sequence[Stage]) -> Iterator[nn.Parameter]:
    """Return this rank's parameters without the head's copy of a tied embedding.

    The first stage's copy has the same gradient.
    """
    parameters = dict.fromkeys(parameter for stage in stages for parameter in stage.parameters())
    copies = [
        stage.tied_weight()
        for stage in stages
        if plan.model.shares_table and plan.mesh.pp > 1 and stage.ends_model
    ]
    return (parameter for parameter in parameters if not any(parameter is copy for copy in copies))


def num_copies(ranks: int, parameter: nn.Parameter) -> int:
    """Return how many of the `ranks` of a stage hold the same part of `parameter`."""
    parts = 1
    if isinstance(parameter, DTensor):
        placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        parts = math.prod(size for placement, size in placed if not placement.is_replicate())
    return ranks // parts
