"""Run plans in one forked world of gloo ranks, and the same model in one process without any of the machinery."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels.memory import StateBytes
from executor.data import synthetic
from executor.models import build_layer
from executor.options import Options
from executor.train import Trainer, build_trainer
from planner.plan import Plan
from profiles.model import LayerKind
from profiles.spec import ModelSpec, TrainingSpec

# of EXECUTOR.md in fp32: max |g - ref| / max(|ref| max, 1e-4) of first-step gradients, relative error of losses
GRADIENT_TOLERANCE = 1e-6
LOSS_TOLERANCE = 5e-7
NORM_TOLERANCE = 2e-6  # a norm sums the squares of gradients that are equal to GRADIENT_TOLERANCE
# bf16 keeps 8 bits: one rounding is 2^-9 = 0.002, a gradient that sums many is compared with the largest entry
BF16_GRADIENT_TOLERANCE = 0.08
BF16_LOSS_TOLERANCE = 1e-3
BF16_NORM_TOLERANCE = 0.02

STEPS = 3
OPTIONS = Options(steps=STEPS, seed=7, learning_rate=1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses of all steps, norms of their gradients before clipping, first-step gradients by parameter name, per rank the
    predicted and measured bytes, and what rank 0 sent in the first step, by kind; what DTensor's own rules send for the
    embedding is not counted."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    states: dict[tuple[int, int, int], tuple[StateBytes, StateBytes]]
    collectives: Counter[str]


class CountCollectives(TorchDispatchMode):
    """Counts the calls of torch.distributed by the name of their operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_plans(plans: Sequence[Plan]) -> list[Outcome]:
    """Train every plan, one after the other, in a new world of as many ranks as their mesh has."""
    world = plans[0].mesh.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(world, list(plans), folder), nprocs=world, start_method="fork")
        results = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
    return [_joined([result[i] for result in results]) for i in range(len(plans))]


def _rank(rank: int, world: int, plans: list[Plan], folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor() of a gradient sharded twice is slow
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save([_train(plan) for plan in plans], f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _train(plan: Plan) -> tuple[list[tuple[float, float]], dict[str, Tensor], tuple, Counter[str]]:
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    with CountCollectives() as counted:
        trainer.gradients(0)
    gradients = whole_gradients(trainer)
    trainer.optimizer.zero_grad()
    steps = [(result.loss, result.gradient_norm) for result in trainer.run()]
    return steps, gradients, trainer.state_bytes(), counted.calls


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient of every parameter on this rank, gathered over its data and tensor parallel ranks, by its own name."""
    found = {}
    for stage in trainer.pipeline.stages:
        for name, parameter in stage.body.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            found[name.replace(_CHECKPOINT_PREFIX, "")] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return found


def _joined(results: list[tuple]) -> Outcome:
    gradients: dict[str, Tensor] = {}
    for _, found, _, _ in results:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients.setdefault(name, gradient), rtol=0, atol=0)
    assert all(steps == results[0][0] for steps, *_ in results)
    losses, norms = (list(values) for values in zip(*results[0][0], strict=True))
    states = {at: (predicted, measured) for _, _, (at, predicted, measured), _ in results}
    return Outcome(losses=losses, norms=norms, gradients=gradients, states=states, collectives=results[0][3])


def reference_layers(model: ModelSpec, training: TrainingSpec, seed: int) -> torch.nn.ModuleDict:
    """The whole model in one process."""
    kinds = [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * model.num_layers, LayerKind.HEAD]
    names = ["embedding", *(f"block{i}" for i in range(model.num_layers)), "head"]
    layers = torch.nn.ModuleDict({
        name: build_layer(model, training, kind, index, seed, torch.device("cpu"))
        for index, (name, kind) in enumerate(zip(names, kinds, strict=True))})
    if model.tied_embeddings:
        layers["head"].lm_head.weight = layers["embedding"].tokens.weight
    return layers


def forward(layers: torch.nn.ModuleDict, ids: Tensor) -> Tensor:
    x = ids
    for layer in layers.values():
        x = layer(x)
    return x


def reference_optimizer(layers: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW in torch's plain loop, without decay of vectors."""
    decays = {True: [p for p in layers.parameters() if p.ndim > 1], False: [p for p in layers.parameters() if p.ndim == 1]}
    groups = [{"params": decays[True], "weight_decay": options.weight_decay}, {"params": decays[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, foreach=False)


def run_reference(plan: Plan) -> Outcome:
    """The same batches through plain modules, whole batch at once: no mesh, no micro-batches, no wrappers."""
    layers = reference_layers(plan.model, plan.training, OPTIONS.seed)
    optimizer = reference_optimizer(layers, OPTIONS)
    batches = synthetic(plan, 0, OPTIONS.seed)
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        ids, targets = batches(step)
        logits = forward(layers, ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {name: parameter.grad.clone() for name, parameter in layers.named_parameters(remove_duplicate=False)}
        norms.append(torch.nn.utils.clip_grad_norm_(layers.parameters(), OPTIONS.clip_gradients).item())
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses=losses, norms=norms, gradients=first, states={}, collectives=Counter())


def worst_gradient(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest gradient error and its parameter."""
    assert found.gradients.keys() == expected.gradients.keys()
    return max((gradient_error(found.gradients[name], gradient), name) for name, gradient in expected.gradients.items())


def gradient_error(found: Tensor, expected: Tensor) -> float:
    """max |found - expected| over the largest expected entry, at least 1e-4: some gradients are exactly zero."""
    return float((found - expected).abs().max() / max(float(expected.abs().max()), 1e-4))


def attempt(plan: Plan, limit_s: float = 20.0) -> Outcome | str:
    """Run `plan` in a world of its own, whatever comes of it: what it gives, or the traceback of an error, or "hangs"."""
    world = plan.mesh.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(_rank, args=(world, [plan], folder), nprocs=world, start_method="fork", join=False)
        deadline = time.monotonic() + limit_s
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    return "hangs"
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            return str(error)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return _joined([torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)[0] for rank in range(world)])
