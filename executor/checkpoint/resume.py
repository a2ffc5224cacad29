"""Chooses the checkpoint from which a run resumes and lists how the two runs differ."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.executor.checkpoint.folder import (
    Document,
    checkpoint_paths,
    checkpoint_step,
    read_document,
    remove_temporaries,
)
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec

AUTO, NEVER = "auto", "never"
FREE = ("name", "dropout")  # fields of a model that its parameters do not depend on

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The checkpoint folder, the interval in steps, the resume choice and the number to keep.

    `resume` is `auto`, `never` or a path.
    """

    directory: Path | None = None
    every: int = 100
    resume: str = AUTO
    keep: int = 3


Choice = tuple[tuple[Path, Document], ...]  # the checkpoints to try, the newest first


def described_run(plan: Plan | TracedPlan, options: object) -> dict[str, Any]:
    """Describes the run for its checkpoints; a data file is described by its name and size."""
    parts = {name: document(getattr(plan, name)) for name in ("training", "mesh", "pipeline")}
    if isinstance(plan, TracedPlan):
        parts["model"] = {"module": document(plan.module)}
    else:
        parts["model"] = document(plan.model)
        parts["training"]["global_batch_size"] = plan.whole_batch.of
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    return parts | {
        "options": {field.name: _fingerprint(getattr(options, field.name)) for field in fields}
    }


def _fingerprint(value: object) -> Any:
    if isinstance(value, Path):
        return f"{value.name}, {value.stat().st_size} bytes" if value.exists() else value.name
    if value is None or isinstance(value, int | float | str):
        return value
    return str(value)


def choose_checkpoints(options: CheckpointOptions, plan: Plan | TracedPlan, note: Note) -> Choice:
    """Makes the folder ready for writing and chooses the checkpoints to try. Raises ConfigError.

    After a restart by torchrun the newest checkpoint in the folder is used, if there is one.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    present = _prepare(options.directory) if options.directory else []
    if (restarted and present) or options.resume == AUTO:
        return _newest(present, options, plan, note)
    if options.resume == NEVER:
        if present and not restarted:
            raise ConfigError(
                f"--resume never: {options.directory} holds {present[0].name} of another run",
                hint="choose another --checkpoint-dir, or --resume auto to go on",
            )
        return ()
    return _named(Path(options.resume), present, plan)


def _prepare(folder: Path) -> list[Path]:
    """Returns the folder's checkpoints, newest first; raises ConfigError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"--checkpoint-dir: cannot write in {folder}: {error.strerror}",
            hint="choose another folder",
        ) from None
    remove_temporaries(folder)
    return checkpoint_paths(folder)


def _newest(
    present: list[Path], options: CheckpointOptions, plan: Plan | TracedPlan, note: Note
) -> Choice:
    whole = []
    for path in present:
        try:
            whole.append((path, _accepted(path, plan)))
        except ValueError as error:
            note(f"{path.name} is skipped, it is not whole: {error}")
    if present and not whole:
        raise no_whole_checkpoint(options.directory)
    return tuple(whole)


def no_whole_checkpoint(folder: Path | None) -> ConfigError:
    return ConfigError(
        f"no checkpoint in {folder} can be read",
        hint="move them away to start anew, or name another one with --resume PATH",
    )


def _named(path: Path, present: list[Path], plan: Plan | TracedPlan) -> Choice:
    try:
        manifest = _accepted(path, plan)
    except ValueError as error:
        raise refused_checkpoint(path, f"it is not whole: {error}") from None
    if present and checkpoint_step(present[0]) > manifest["step"]:
        raise ConfigError(
            f"--resume {path}: {present[0]} is newer and would be gone on from after a restart",
            hint="choose another --checkpoint-dir",
        )
    return ((path, manifest),)


def refused_checkpoint(path: Path, wrong: str) -> ConfigError:
    """The error for a named checkpoint that cannot be used; its hint names the one before."""
    step = checkpoint_step(path)
    older = (each for each in checkpoint_paths(path.parent) if checkpoint_step(each) < step)
    before = next(filter(_is_whole, older), None)
    hint = "name a folder such as DIR/step-000120, or use --resume auto"
    return ConfigError(
        f"--resume {path}: {wrong}",
        hint=hint if before is None else f"go on from the one before: --resume {before}",
    )


def _is_whole(path: Path) -> bool:
    try:
        read_document(path)
    except ValueError:
        return False
    return True


def _accepted(path: Path, plan: Plan | TracedPlan) -> Document:
    """Returns the manifest of a checkpoint of the plan's model.

    Raises ConfigError for another model, ValueError if the checkpoint is incomplete.
    """
    manifest = read_document(path)
    if isinstance(plan, TracedPlan) or "module" in manifest["model"]:
        _require_module(path, manifest["model"], plan)
        return manifest
    saved = parse(ModelSpec, manifest["model"], f"{path}: model")
    for field in dataclasses.fields(ModelSpec):
        was, now = getattr(saved, field.name), getattr(plan.model, field.name)
        if field.name not in FREE and was != now:
            raise ConfigError(
                f"{path} is of another model: its {field.name} is {was}, the plan's {now}",
                hint="choose another --checkpoint-dir or plan",
            )
    return manifest


def _require_module(path: Path, saved: Mapping[str, Any], plan: Plan | TracedPlan) -> None:
    """Raises ConfigError for a checkpoint of another module.

    The code of the module's function is not compared; the names of its parameters are checked on
    load.
    """
    if not isinstance(plan, TracedPlan) or saved.get("module") != document(plan.module):
        raise ConfigError(
            f"{path} is of another model", hint="choose another --checkpoint-dir or plan"
        )


def run_differences(saved: Document, now: Mapping[str, Any]) -> Iterator[str]:
    """Yields notes on what this run changes against the run it resumes.

    Another mesh or schedule changes only the dropout masks.
    """
    for part in ("training", "options"):
        for name, value in now[part].items():
            was = saved[part].get(name)
            if name != "steps" and not isinstance(value, dict) and value != was:
                yield f"{name} is {value}, until the checkpoint it was {was}"
    if any(
        now["training"][name] != saved["training"].get(name)
        for name in ("global_batch_size", "seq_length")
    ):
        yield "the data goes on at this run's position of that step, which skips or repeats some"
    if now["model"].get("dropout") != saved["model"].get("dropout"):
        was = saved["model"].get("dropout")
        yield f"dropout is {now['model']['dropout']}, until the checkpoint it was {was}"
    if now["model"].get("dropout") and any(
        now[part] != saved.get(part) for part in ("mesh", "pipeline")
    ):
        yield (
            "another mesh or schedule: the dropout masks are others than the run before "
            "would have drawn"
        )
