"""Compares a plan of a traced module, run by gloo ranks, with the user's module in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.chunks.chunk_operations import RankChunks
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    OPTIONS,
    STEPS,
    Result,
    TrainingOutcome,
    joined,
    observed,
    reference_optimizer,
    run_ranks,
)
from parplan.executor.rules.traced_rules import validate_traced_plan
from parplan.executor.traced.module_batches import module_batches
from parplan.executor.traced.stage_values import OpenedModule
from parplan.executor.traced.traced_trainer import (
    TracedTrainer,
    build_traced_trainer,
    open_plan_module,
)
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import TracedWorkload
from parplan.profiles.tracing.user_code import explained_user_errors

LEAST_TO_FILL = 4  # micro-batches; the shifted critical path needs this many
MOST_RANKS = 8  # gloo processes on one machine


def comparable(plan: TracedPlan) -> TracedPlan:
    """Returns the plan in fp32 with no more micro-batches than fill its schedule.

    Raises ConfigError for a plan that cannot be compared with one process.
    """
    validate_traced_plan(plan)
    if plan.mesh.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"mesh: {plan.mesh} is {plan.mesh.num_ranks} ranks, a traced module is compared on up "
            f"to {MOST_RANKS}",
            hint="make a plan for fewer GPUs",
        )
    pipeline = plan.pipeline
    number = min(pipeline.num_micro_batches, max(LEAST_TO_FILL, 2 * plan.mesh.pp))
    if pipeline.schedule is Schedule.CUSTOM:  # its action lists name the micro-batches
        number = pipeline.num_micro_batches
    training = replace(
        plan.training,
        precision=Precision.FP32,
        gradient_precision=Precision.FP32,
        global_batch_size=plan.mesh.dp * number * pipeline.micro_batch_size,
    )
    small = replace(plan, training=training, pipeline=replace(pipeline, num_micro_batches=number))
    for call in record(
        open_plan_module(small, OPTIONS.seed).workload, small.pipeline.micro_batch_size
    ).calls:
        if call.meta["random"]:
            raise ConfigError(
                f"module: {call.meta['line']} draws random numbers, which every rank draws for "
                "itself",
                hint="set dropout to 0 for the comparison",
            )
    return small


def run_traced_plans(
    plans: Sequence[TracedPlan], schedules: Sequence[RankChunks] = ()
) -> list[TrainingOutcome]:
    """Trains the plans one by one, each in a new world of ranks, and ends all processes.

    `schedules` are those of the chunks of each pipeline rank, for plans with chunks.
    """
    train = partial(train_traced, schedules=schedules)
    return [joined(results) for results in run_ranks(plans, train)]


def train_traced(plan: TracedPlan, schedules: Sequence[RankChunks] = ()) -> Result:
    """Trains the plan on this rank. Raises ConfigError, also for errors in the module's calls."""
    with explained_user_errors("the module, run in stages,"):
        trainer = build_traced_trainer(plan, OPTIONS, torch.device("cpu"), schedules=schedules)
        return observed(trainer, whole_traced_gradients)


def whole_traced_gradients(trainer: TracedTrainer) -> dict[str, Tensor]:
    """Returns the gradients of this rank, gathered over its data and tensor parallel ranks.

    The keys are the names in the user's module, and several matrices in one are in its order.
    """
    chunks, strips = trainer.pipeline.chunks, trainer.strips
    gradients = {
        name: parameter.grad
        for stage in trainer.pipeline.stages
        for name, parameter in stage.named()
        if not trainer.pipeline.in_chunks(parameter)
    }
    whole = {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        for name, gradient in (gradients | (chunks.gradients() if chunks else {})).items()
        if gradient is not None
    }
    return {
        name: strips[name].by_matrix(gradient) if name in strips else gradient
        for name, gradient in whole.items()
    }


def run_traced_reference(plan: TracedPlan, *, by_micro_batch: bool = False) -> TrainingOutcome:
    """Trains the user's module in one process, without a mesh, wrappers or a trace.

    It runs on whole batches, or with `by_micro_batch` on the plan's micro-batches, whose losses are
    averaged. The latter serves modules whose loss depends on which samples are together, for
    example through a batch norm; each data-parallel rank then has separate buffers.
    """
    opened = open_plan_module(plan, OPTIONS.seed)
    workload, module = opened.workload, module_with_values(opened)
    optimizer = reference_optimizer(module, OPTIONS, plan.training.optimizer)
    size = plan.pipeline.micro_batch_size if by_micro_batch else plan.training.global_batch_size
    next_batch = module_batches(_alone(plan), workload, 0, OPTIONS.seed)
    ranks = _Buffers(module, plan.mesh.dp if by_micro_batch else 1)
    losses: list[float] = []
    norms: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with explained_user_errors(f"{workload.name}, run in one process,"):
            shares = ranks.shares(next_batch(step))
            whole = plan.training.global_batch_size
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


def module_with_values(opened: OpenedModule) -> nn.Module:
    """Returns the whole module with the values that the ranks of a plan start from."""
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
    """A module's buffers as each of `count` data-parallel ranks updates them."""

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
        """Yields each rank's part of the batch, with the module's buffers set to that rank's."""
        split = {key: value.chunk(self.count) for key, value in batch.items()}
        for rank, held in enumerate(self.held):
            for part, buffers in zip(self.module.modules(), held, strict=True):
                part._buffers.update(buffers)
            yield {key: parts[rank] for key, parts in split.items()}
            self.held[rank] = [dict(part._buffers) for part in self.module.modules()]


def _backward(
    workload: TracedWorkload, module: nn.Module, batch: dict[str, Tensor], size: int, whole: int
) -> float:
    """Runs `batch`, part of a step of `whole` samples, backward; returns its share of the loss."""
    total = 0.0
    for start in range(0, len(next(iter(batch.values()))), size):
        part = {key: value[start : start + size] for key, value in batch.items()}
        loss = workload.loss_of(module, part) * size / whole
        loss.backward()
        total += loss.item()
    return total


def _alone(plan: TracedPlan) -> TracedPlan:
    """The same plan with all samples on one rank."""
    return replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))
