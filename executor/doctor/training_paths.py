"""Small plans trained on GPUs, each beside the same model on one CPU, and their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch

from parplan.executor.checking.parity import OPTIONS, run_reference, whole_gradients
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.doctor.path import (
    Checked,
    GpuPath,
    Place,
    RefusedError,
    WrongError,
    require_close,
    require_on,
)
from parplan.executor.run_options import Options
from parplan.executor.tensors import part
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Precision
from parplan.profiles.profiler.gpus import gpu
from parplan.profiles.units import MIB

TOLERANCES = {Precision.FP32: 2e-3, Precision.BF16: 0.15, Precision.FP16: 0.15}
LOSS_TOLERANCE = 5e-3
RESUMED_TOLERANCE = 1e-6
TIMEOUT = timedelta(seconds=60)


def _plan(place: Place, name: str) -> Plan:
    if name not in place.plans:
        raise RefusedError(f"no plan of {place.world} ranks has it")
    return place.plans[name]


def trained(name: str, place: Place) -> Checked:
    """Trains a plan for three steps and compares losses and gradients with one CPU."""
    plan = _plan(place, name)
    expected = run_reference(plan)
    trainer = build_trainer(plan, OPTIONS, place.device)
    _require_device(trainer, place.device)
    losses = [trainer.gradients(0).item()]
    tolerance = TOLERANCES[plan.training.precision]
    errors = [
        require_close(f"the gradient of {key}", gradient, expected.gradients[key], tolerance)
        for key, gradient in whole_gradients(trainer).items()
    ]
    trainer.update(0)
    losses += [result.loss for result in trainer.run(first=1)]
    for step, (loss, right) in enumerate(zip(losses, expected.losses, strict=True)):
        if abs(loss / right - 1) > LOSS_TOLERANCE:
            raise WrongError(f"the loss of step {step + 1} is {loss:g}, one CPU has {right:g}")
    most = max(errors, default=0.0)
    return Checked(says=f"loss {losses[-1]:.4f}, largest error of a gradient {most:.1e}")


def _require_device(trainer: Trainer, device: torch.device) -> None:
    """Raises WrongError for a batch on the host, or a parameter that its plan has on the device."""
    if trainer.pipeline.reads:
        for tensor in trainer.batch(0):
            require_on("a batch", tensor, device)
    on_host = set(trainer._on_host())
    for stage in trainer.pipeline.stages:
        for name, parameter in stage.body.named_parameters():
            host = torch.device("cpu") if parameter in on_host else device
            require_on(name, part(parameter), host)


def checkpointed(name: str, place: Place) -> Checked:
    """Saves a run after two steps, goes on from there, and compares it with one that went on."""
    plan, folder = _plan(place, name), place.folder / name.replace(" ", "-")
    options = replace(OPTIONS, steps=2)
    first = _trainer(plan, options, place)
    _run(first, CheckpointOptions(directory=folder, every=2), place)
    _require_in_place(first, place)
    resumed = _run(_trainer(plan, OPTIONS, place), CheckpointOptions(directory=folder), place)
    whole = [result.loss for result in _trainer(plan, OPTIONS, place).run()]
    if len(resumed) != 1 or abs(resumed[0] / whole[-1] - 1) > RESUMED_TOLERANCE:
        raise WrongError(f"a resumed run has the losses {resumed}, one that went on {whole}")
    return Checked(says=f"loss {resumed[0]:.4f} after two saved steps and one more")


def _trainer(plan: Plan, options: Options, place: Place) -> Trainer:
    return build_trainer(plan, options, place.device)


def _run(trainer: Trainer, options: CheckpointOptions, place: Place) -> list[float]:
    checkpoints = Checkpoints(trainer, options, timeout=TIMEOUT, note=lambda _: None)
    losses = []
    for result in trainer.run(checkpoints.resume()):
        losses.append(result.loss)
        checkpoints.after_step(result.step + 1)
    checkpoints.finish(trainer.options.steps)
    return losses


def _require_in_place(trainer: Trainer, place: Place) -> None:
    """Raises WrongError where naming a checkpoint's tensors copies host states to the device."""
    if trainer.adam is None or not place.on_gpu:
        return
    runtime = gpu(place.device)
    runtime.reset_peak_memory_stats(place.device)
    before = runtime.memory_allocated(place.device)
    held = trainer.adam.tensors()
    more = runtime.max_memory_allocated(place.device) - before
    states = sum(part(each).nbytes for each in held["optimizer"].values())
    if more >= states / 2:
        raise WrongError(
            f"states of {states / MIB:.2f} MiB take {more / MIB:.2f} MiB of the device"
        )


_TRAIN = "executor/training/train.py"
_CHECKPOINT = (
    "executor/checkpoint/checkpoints.py:Checkpoints.__init__",
    "executor/training/training_states.py:random_states",
    "executor/training/training_states.py:set_random_states",
)
_LOOKUP = ("executor/memory/host_table.py:HostTable.copy_across",)
_PIPELINE = ("executor/pipeline/runtime.py:_open_communicator",)


def _trains(name: str, checks: str, covers: tuple[str, ...] = (), ranks: int = 1) -> GpuPath:
    return GpuPath(name=name, checks=checks, run=partial(trained, name), covers=covers, ranks=ranks)


def _resumes(name: str, checks: str, covers: tuple[str, ...] = (), ranks: int = 1) -> GpuPath:
    run: Callable[[Place], Checked] = partial(checkpointed, name)
    return GpuPath(name=name, checks=checks, run=run, covers=covers, ranks=ranks)


PATHS = (
    _trains(
        "data parallel",
        "ZeRO 3 with recompute, batches and gradients",
        (
            f"{_TRAIN}:Trainer.batch",
            f"{_TRAIN}:Trainer.inputs",
            "executor/sharding/zero_units.py:shard_unit",
        ),
    ),
    _trains("bf16", "ZeRO 2 with masters in fp32"),
    _trains("experts", "routing, grouped products and the exchange of tokens"),
    _trains("activations on the host", "activations that go to the host and come back"),
    _trains("states on the host", "parameters and optimizer states on the host, FSDP's copies"),
    _trains("lookup", "the token table on the host", _LOOKUP),
    _trains("chunks", "states in chunks that move between device and host"),
    _trains("tensor parallel", "tensor and sequence parallelism", ranks=2),
    _trains("pipeline", "messages of an interleaved pipeline", _PIPELINE, ranks=2),
    _trains("zero bubble", "split backward passes under ZeRO 2", ranks=2),
    _trains("context", "a ring of sequence parts", ranks=2),
    _resumes("checkpoint", "a run that is saved and goes on", _CHECKPOINT),
    _resumes("checkpoint of chunks", "chunks on the host, saved under tensor parallelism", ranks=2),
)
