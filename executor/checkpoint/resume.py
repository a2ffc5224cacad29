"""From which checkpoint a run goes on, and what it says of differences between that run and
itself.
"""

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
FREE = ("name", "dropout")  # of a model: what its parameters do not depend on

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Where checkpoints go, after how many steps, from which one to go on (`auto`, `never`, a
    path), how many to keep.
    """

    directory: Path | None = None
    every: int = 100
    resume: str = AUTO
    keep: int = 3


Choice = tuple[tuple[Path, Document], ...]  # the checkpoints to try, the newest first


def described_run(plan: Plan | TracedPlan, options: object) -> dict[str, Any]:
    """What a checkpoint says of its run; of a file of data its name and size."""
    parts = {name: document(getattr(plan, name)) for name in ("training", "mesh", "pipeline")}
    parts["model"] = (
        {"module": document(plan.module)} if isinstance(plan, TracedPlan) else document(plan.model)
    )
    fields = dataclasses.fields(options)  # type: ignore[arg-type]
    return parts | {
        "options": {field.name: _fingerprint(getattr(options, field.name)) for field in fields}
    }


def _fingerprint(value: object) -> Any:
    if isinstance(value, Path):
        return f"{value.name}, {value.stat().st_size} bytes" if value.exists() else value.name
    return value if isinstance(value, int | float | str) else None if value is None else str(value)


def choose(options: CheckpointOptions, plan: Plan | TracedPlan, note: Note) -> Choice:
    """Make the folder ready for writing and find what to go on from. Raises ConfigError.

    After a restart by torchrun that is always the newest checkpoint of the folder, if it has one.
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
    """Its checkpoints, newest first; raises ConfigError where it cannot be written."""
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
        found = _accepted(path, plan)
    except ValueError as error:
        raise refused(path, f"it is not whole: {error}") from None
    if present and checkpoint_step(present[0]) > found["step"]:
        raise ConfigError(
            f"--resume {path}: {present[0]} is newer and would be gone on from after a restart",
            hint="choose another --checkpoint-dir",
        )
    return ((path, found),)


def refused(path: Path, wrong: str) -> ConfigError:
    """The error for a checkpoint that was named and cannot be gone on from; the hint names the one
    before it.
    """
    older = (
        found
        for found in checkpoint_paths(path.parent)
        if checkpoint_step(found) < checkpoint_step(path)
    )
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
    """The document of a checkpoint of the plan's model. Raises ConfigError for another model,
    ValueError if it is not whole.
    """
    found = read_document(path)
    if isinstance(plan, TracedPlan) or "module" in found["model"]:
        _require_module(path, found["model"], plan)
        return found
    saved = parse(ModelSpec, found["model"], f"{path}: model")
    for field in dataclasses.fields(ModelSpec):
        was, now = getattr(saved, field.name), getattr(plan.model, field.name)
        if field.name not in FREE and was != now:
            raise ConfigError(
                f"{path} is of another model: its {field.name} is {was}, the plan's {now}",
                hint="choose another --checkpoint-dir or plan",
            )
    return found


def _require_module(path: Path, saved: Mapping[str, Any], plan: Plan | TracedPlan) -> None:
    """Raises ConfigError for a checkpoint of another module; what is in the function is not looked
    at, the parameters' names are read.
    """
    if not isinstance(plan, TracedPlan) or saved.get("module") != document(plan.module):
        raise ConfigError(
            f"{path} is of another model", hint="choose another --checkpoint-dir or plan"
        )


def differences(saved: Document, now: Mapping[str, Any]) -> Iterator[str]:
    """What the run changes against the one it goes on from, as notes; another mesh or schedule
    changes nothing but dropout.
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
        yield f"dropout is {now['model']['dropout']}, until the checkpoint it was {saved['model'].get('dropout')}"
    if now["model"].get("dropout") and any(
        now[part] != saved.get(part) for part in ("mesh", "pipeline")
    ):
        yield "another mesh or schedule: the dropout masks are others than the run before would have drawn"
