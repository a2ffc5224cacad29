"""The training loop: batches through the pipeline, AdamW on what each rank owns, the loss and the speed of every step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from executor.check import Meter, Row, predicted_state_bytes
from executor.data import Batches, from_file, synthetic
from executor.pipeline import Pipeline, build_pipeline
from executor.stages import Ranks
from planner.plan import Plan

METERED_STEPS = 2  # what is held repeats from then on, and looking at every tensor takes host time


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the plan leaves open. Without `data` the tokens are random."""

    steps: int = 5
    seed: int = 0
    learning_rate: float = 3e-4
    data: Path | None = None
    data_dtype: str = "uint16"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`loss` is the mean over all tokens of the global batch, the same on every rank."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One rank of a training run."""

    plan: Plan
    options: Options
    ranks: Ranks
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    batches: Batches
    meter: Meter

    def gradients(self, step: int) -> Tensor:
        """Forward, backward and reduction of the batch of `step`; returns the mean loss of the global batch."""
        ids, targets = (tensor.to(self.ranks.device) for tensor in self.batches(step))
        loss = self.pipeline.step(ids, targets)
        # every tensor-parallel rank of the last stage has the whole loss of its data-parallel rank
        share = loss if self.ranks.coordinate("tp") == 0 else torch.zeros_like(loss)
        dist.all_reduce(share)
        return share

    def run(self) -> Iterator[StepResult]:
        """Train for `options.steps` steps."""
        for step in range(self.options.steps):
            started = time.perf_counter()
            self.meter.active = step < METERED_STEPS
            loss = self.gradients(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield StepResult(step=step, loss=loss.item(), seconds=time.perf_counter() - started)

    def state_bytes(self) -> Row:
        """This rank's coordinates, and its predicted and measured bytes."""
        pp, dp, tp = (self.ranks.coordinate(axis) for axis in ("pp", "dp", "tp"))
        return (pp, dp, tp), predicted_state_bytes(self.plan, pp, dp), self.meter.measured(self.optimizer)


def build_trainer(plan: Plan, options: Options, device: torch.device) -> Trainer:
    """This rank's trainer; collective, in a process group of `plan.mesh.num_ranks` ranks. Raises ConfigError."""
    return trainer_of(plan, options, ranks_of(plan, device), Meter(plan.training.precision))


def ranks_of(plan: Plan, device: torch.device) -> Ranks:
    """This rank's place in the mesh of the plan; collective."""
    mesh = init_device_mesh(device.type, (plan.mesh.pp, plan.mesh.dp, plan.mesh.tp), mesh_dim_names=("pp", "dp", "tp"))
    return Ranks(device=device, mesh=mesh)


def trainer_of(plan: Plan, options: Options, ranks: Ranks, meter: Meter) -> Trainer:
    """The trainer of the rank at `ranks`; collective. Raises ConfigError."""
    dp_rank = ranks.coordinate("dp")
    # dropout: tensor-parallel ranks share their generator's state, since they hold the same residual stream
    torch.manual_seed(options.seed * 1_000_003 + ranks.coordinate("pp") * plan.mesh.dp + dp_rank)
    pipeline = build_pipeline(plan, ranks, seed=options.seed, after_backward=meter.sample)
    meter.watch(pipeline.stages, pipeline.parameters)
    tokens = options.data
    batches = from_file(plan, dp_rank, tokens, options.data_dtype) if tokens else synthetic(plan, dp_rank, options.seed)
    optimizer = torch.optim.AdamW(_by_mesh(pipeline.parameters), lr=options.learning_rate)
    return Trainer(plan=plan, options=options, ranks=ranks, pipeline=pipeline, optimizer=optimizer, batches=batches, meter=meter)


def _by_mesh(parameters: list[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups of one device mesh each: the optimizer's fused loops cannot mix meshes."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": group} for group in groups.values()]
