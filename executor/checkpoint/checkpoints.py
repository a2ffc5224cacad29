"""Saves and loads the checkpoints of a run, on any mesh or plan of the model.

Every N steps the states are copied, and training waits only for that; torch.distributed.checkpoint
writes the copy in a thread. A save waits for the one before it, and a checkpoint is complete or
absent. A batch is a function of the step, so the step is the position in the data. A failed save
costs a warning and that checkpoint; at the end of a run it sets the exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.stateful import Stateful

from parplan.executor.checkpoint.folder import (
    AtomicWriter,
    CheckedReader,
    Document,
    SafeLoadPlanner,
    checkpoint_name,
    find_damage,
    remove_temporaries,
)
from parplan.executor.checkpoint.resume import (
    CheckpointOptions,
    Choice,
    Note,
    choose_checkpoints,
    described_run,
    no_whole_checkpoint,
    refused_checkpoint,
    run_differences,
)
from parplan.executor.run_options import LARGEST_SEED
from parplan.executor.training.train import Trainer
from parplan.executor.training.training_states import (
    Tensors,
    make_optimizer_states,
    random_states,
    set_random_states,
    training_tensors,
)
from parplan.profiles.errors import PlannerError, RunError
from parplan.profiles.models.spec import Precision
from parplan.profiles.profiler.gpus import is_gpu


class Checkpoints:
    """The checkpoints of one run. Every method is collective; only rank 0 gives notes.

    extra    further objects with state, by name, the same on every rank
    writes   False for a pool that divides the batch with others: the first one writes, as all have
             the same states, and all read
    """

    def __init__(
        self,
        trainer: Trainer,
        options: CheckpointOptions,
        *,
        timeout: timedelta,
        note: Note,
        extra: Mapping[str, Stateful] | None = None,
        writes: bool = True,
    ) -> None:
        self.trainer = trainer
        self.options = options
        self.writes = writes
        self.note = note if writes and dist.get_rank() == 0 else _silent
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.held = trainer.held()
        self.extra = dict(extra or {})
        device = trainer.ranks.device.type
        self.document = {**described_run(trainer.plan, trainer.options), "device": device}
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=is_gpu(device),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=is_gpu(device),
            )
        )
        self._seed = torch.initial_seed()
        self._saved = -1
        self._pending: tuple[int, Future[None]] | None = None

    def resume(self) -> int:
        """Loads a checkpoint, if any, and returns the number of steps done. Raises ConfigError."""
        choice: Choice = self._on_rank_0(
            lambda: choose_checkpoints(self.options, self.trainer.plan, self.note)
        )
        for path, document in choice:
            if wrong := self._damage(path, document) or self._load(path, document):
                if str(path) == str(Path(self.options.resume)):
                    raise refused_checkpoint(path, wrong)
                self.note(f"{path.name} is skipped, {wrong}")
                continue
            for line in (
                *run_differences(document, self.document),
                f"goes on from {path}, after step {document['step']}",
            ):
                self.note(line)
            self._saved = document["step"] if path.parent == self.options.directory else -1
            return int(document["step"])
        if choice:
            raise no_whole_checkpoint(choice[0][0].parent)
        return 0

    def after_step(self, step: int) -> None:
        """Starts a save if `step`, the number of steps done, is due."""
        if step % self.options.every:
            return
        if self._folder is not None:
            self._save(step, self._folder)
        elif not self.writes:
            self._reseed(step)  # a run that goes on from this step draws the same dropout masks

    def finish(self, step: int) -> None:
        """Saves the state after the last step and waits for it. Raises RunError on failure."""
        if self._folder is not None and self._saved != step:
            self._save(step, self._folder)
        failure = self._settled()
        self._stager.close()
        if failure:
            raise RunError(
                failure,
                hint="make room and start the run again, it goes on from the checkpoint before",
            )

    @property
    def _folder(self) -> Path | None:
        """The folder that this run writes to, None where it writes nothing."""
        return self.options.directory if self.writes else None

    def settle(self) -> None:
        """Waits for a running save when the run ends with an error."""
        if failure := self._settled():
            self.note(failure)

    def _save(self, step: int, folder: Path) -> None:
        if failure := self._settled():
            self.note(f"{failure}; the training goes on without it")
        self.trainer.progress.at(f"copies the states of step {step}")
        states = {
            **self._own(),
            **self._scale(),
            **random_states(self.trainer.ranks.device),
            **self.extra,
        }
        writer = AtomicWriter(
            folder / checkpoint_name(step), {"step": step, **self.document}, self.options.keep
        )
        future = dcp.async_save(
            states, storage_writer=writer, process_group=self.group, async_stager=self._stager
        )
        self._pending = step, future
        self._saved = step

    def _settled(self) -> str:
        """Waits for a running save and returns why it failed, or ""."""
        if self._pending is None:
            return ""
        step, future = self._pending
        self._pending = None
        self.trainer.progress.at(f"waits for the save of step {step}")
        try:
            future.result()
        except CheckpointException as error:
            if dist.get_rank() == 0 and self.options.directory:
                remove_temporaries(self.options.directory)
            return f"the checkpoint of step {step} was not written: {_reason(error)}"
        return ""

    def _damage(self, path: Path, document: Document) -> str:
        """Compares the files with the manifest, a share on each rank; "" if equal. Collective."""
        progress = self.trainer.progress
        progress.at(f"reads the checksums of {path.name}")
        damage_here = find_damage(
            path, document, dist.get_rank(), dist.get_world_size(), progress.moved
        )
        progress.at(f"waits for the checksums of {path.name}")
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, damage_here, group=self.group)
        return next((f"it is not whole: {wrong}" for wrong in everyone if wrong), "")

    def _load(self, path: Path, document: Document) -> str:
        """Loads everything in place; returns on every rank why that failed, or ""."""
        try:
            self._load_all(path, document)
        except CheckpointException as error:
            return f"it cannot be read: {_reason(error)}"
        return ""

    def _load_all(self, path: Path, document: Document) -> None:
        """Loads everything in place. Raises CheckpointException on every rank."""
        device = self.trainer.ranks.device
        self.trainer.progress.at(f"reads {path.name}")
        make_optimizer_states(self.trainer.optimizer)
        same = self.writes and all(
            document.get(key) == self.document[key] for key in ("mesh", "device")
        )
        random = random_states(device) if same else {}
        scale = self._scale() if document["training"].get("precision") == Precision.FP16 else {}
        reader = CheckedReader(path, document)
        self._read(reader, {**self._own(), **scale, **random, **self.extra})
        if self.trainer.adam is not None:
            self.trainer.adam.settle()
        if self.trainer.has_copies:  # the same on every rank, because reading is collective
            self._read(reader, self._tensors(self.held.copies))
            self.trainer.settle_copies()
        if same:
            set_random_states(random, device)
        else:
            self._reseed(document["step"])

    def _reseed(self, step: int) -> None:
        """Seeds the generators of a rank whose random states no checkpoint has."""
        torch.manual_seed((self._seed + 1_000_000_007 * step) % (LARGEST_SEED + 1))

    def _read(self, reader: CheckedReader, states: dict[str, Any]) -> None:
        dcp.load(states, storage_reader=reader, planner=SafeLoadPlanner(), process_group=self.group)

    def _own(self) -> dict[str, Any]:
        buffers = self.trainer.buffers()
        adam = self.trainer.adam
        outside = self._tensors(self.held.own)
        inside = adam.tensors() if adam is not None else {}
        states = {part: tensors | inside.get(part, {}) for part, tensors in outside.items()}
        return {**states, **({"buffers": buffers} if buffers else {})}

    def _scale(self) -> Tensors:
        """The loss scale of an fp16 run; one resumed from another precision starts anew."""
        return {"loss_scale": self.trainer.scale.states} if self.trainer.scale is not None else {}

    def _tensors(self, parameters: Mapping[str, nn.Parameter]) -> Tensors:
        return training_tensors(parameters, self.trainer.optimizer, self.trainer.strips)

    def _on_rank_0(self, find: Callable[[], Any]) -> Any:
        """Calls `find` on rank 0; returns its result or raises its PlannerError on every rank."""
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [find()]
            except PlannerError as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0, group=self.group)
        if isinstance(answer[0], PlannerError):
            raise answer[0]
        return answer[0]


def _silent(text: str) -> None:
    """Drops a note, because rank 0 gives it."""


def _reason(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    text = (
        failure.strerror
        if isinstance(failure, OSError) and failure.strerror
        else " ".join(str(failure).split())
    )
    return f"{text} (rank {rank})"
