"""Train plans of a traced module in a forked world of gloo ranks, and the user's module as it is in
one process; compare both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    OPTIONS,
    STEPS,
    Result,
    TrainingOutcome,
    joined,
    observed,
    run_ranks,
)
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.traced.module_batches import module_batches
from parplan.executor.traced.stage_values import Opened
from parplan.executor.traced.traced_trainer import TracedTrainer, build_traced_trainer, opened_of
from parplan.executor.training.optimizer import decays
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import TracedWorkload
from parplan.profiles.tracing.user_code import users_code

LEAST_TO_FILL = 4  # micro-batches: the shifted critical path needs as many
MOST_RANKS = 8  # of gloo processes on one machine


def comparable(plan: TracedPlan) -> TracedPlan:
    """The plan in fp32, with no more micro-batches than fill its schedule. Raises ConfigError for
    one that cannot be compared with one process.
    """
    validate_traced_plan(plan)
    if plan.mesh.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"mesh: {plan.mesh} is {plan.mesh.num_ranks} ranks, a traced module is compared on up to {MOST_RANKS}",
            hint="make a plan for fewer GPUs",
        )
    pipeline = plan.pipeline
    number = min(pipeline.num_micro_batches, max(LEAST_TO_FILL, 2 * plan.mesh.pp))
    if pipeline.schedule is Schedule.CUSTOM:  # its lists name the micro-batches
        number = pipeline.num_micro_batches
    training = replace(
        plan.training,
        precision=Precision.FP32,
        gradient_precision=Precision.FP32,
        global_batch_size=plan.mesh.dp * number * pipeline.micro_batch_size,
    )
    small = replace(plan, training=training, pipeline=replace(pipeline, num_micro_batches=number))
    for call in record(
        opened_of(small, OPTIONS.seed).workload, small.pipeline.micro_batch_size
    ).calls:
        if call.meta["random"]:
            raise ConfigError(
                f"module: {call.meta['line']} draws random numbers, which every rank draws for itself",
                hint="set dropout to 0 for the comparison",
            )
    return small


def run_traced_plans(plans: Sequence[TracedPlan]) -> list[TrainingOutcome]:
    """Train every plan, one after the other, in a new world of as many ranks as their mesh has; no
    process is left.
    """
    return [joined(results) for results in run_ranks(plans, train_traced)]


def train_traced(plan: TracedPlan) -> Result:
    """What this rank finds. Raises ConfigError, also for what the module's calls raise here."""
    with users_code("the module, run in stages,"):
        return observed(
            build_traced_trainer(plan, OPTIONS, torch.device("cpu")), whole_traced_gradients
        )


def whole_traced_gradients(trainer: TracedTrainer) -> dict[str, Tensor]:
    """The gradient of every parameter on this rank, gathered over its data-parallel ranks, by the
    name in the user's module.
    """
    found = {}
    for stage in trainer.pipeline.stages:
        for name, parameter in stage.named():
            if parameter.grad is not None:
                gradient = parameter.grad
                found[name] = (
                    gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                ).clone()
    return found


def run_traced_reference(plan: TracedPlan, *, by_micro_batch: bool = False) -> TrainingOutcome:
    """The user's module in one process, without a mesh, wrappers or a trace, on whole batches.

    by_micro_batch: or on the plan's micro-batches one after the other, whose losses are averaged:
    for what depends on which
        samples are together, as a batch norm and a loss that weighs samples do. Each data-parallel
        rank has buffers of its own
    """
    opened = opened_of(plan, OPTIONS.seed)
    workload, module = opened.workload, with_values(opened)
    optimizer = _optimizer(module)
    size = plan.pipeline.micro_batch_size if by_micro_batch else plan.training.global_batch_size
    one = module_batches(_alone(plan), workload, 0, OPTIONS.seed)
    ranks = _Buffers(module, plan.mesh.dp if by_micro_batch else 1)
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with users_code(f"{workload.name}, run in one process,"):
            shares, whole = ranks.shares(one(step)), plan.training.global_batch_size
            losses.append(sum(_backward(workload, module, part, size, whole) for part in shares))
        if step == 0:
            first = {
                name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
            }
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), OPTIONS.clip_gradients).item())
        optimizer.step()
    return TrainingOutcome(
        losses=losses, norms=norms, gradients=first, states={}, collectives=Counter()
    )


def with_values(opened: Opened) -> nn.Module:
    """The whole module with the values that the ranks of a plan have."""
    module = opened.workload.module
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    made = [(opened.value(each[0]), each) for each in names.values()]
    for value, each in made:
        for name in each:
            path, _, key = name.rpartition(".")
            module.get_submodule(path).register_parameter(key, value)
    return module


class _Buffers:
    """The buffers of a module as each of `count` data-parallel ranks has them, who count in them by
    themselves.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        self.module, self.count = module, count
        self.held = [self._copies() for _ in range(count)]

    def _copies(self) -> list[dict[str, Tensor | None]]:
        held = (part._buffers for part in self.module.modules())
        return [
            {name: value if value is None else value.clone() for name, value in buffers.items()}
            for buffers in held
        ]

    def shares(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The part of the batch of one rank after the other, with the module's buffers as that rank
        has them.
        """
        split = {key: value.chunk(self.count) for key, value in batch.items()}
        for rank, held in enumerate(self.held):
            for part, buffers in zip(self.module.modules(), held, strict=True):
                part._buffers.update(buffers)
            yield {key: parts[rank] for key, parts in split.items()}
            self.held[rank] = [dict(part._buffers) for part in self.module.modules()]


def _backward(
    workload: TracedWorkload, module: nn.Module, batch: dict[str, Tensor], size: int, whole: int
) -> float:
    """Of the samples of `batch`, which are some of the `whole` number of a step."""
    total = 0.0
    for start in range(0, len(next(iter(batch.values()))), size):
        part = {key: value[start : start + size] for key, value in batch.items()}
        loss = workload.loss_of(module, part) * size / whole
        loss.backward()
        total += loss.item()
    return total


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW in torch's plain loop, without decay of vectors."""
    groups = [
        {
            "params": [p for p in module.parameters() if decays(p) is decay],
            "weight_decay": OPTIONS.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=OPTIONS.learning_rate, betas=OPTIONS.betas, foreach=False)


def _alone(plan: TracedPlan) -> TracedPlan:
    """The same batches, all on one rank."""
    return replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))
