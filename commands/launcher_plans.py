"""Plans of launchers' own files, for every command that reads a plan.

All imports but click's are made where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.commands.options.target_options import TargetOptions
from parplan.profiles.documents.numbers import whole
from parplan.profiles.documents.ranges import DEVICES
from parplan.profiles.errors import ConfigError

if TYPE_CHECKING:
    from parplan.planner.export.launcher_file import LauncherFile
    from parplan.planner.export.stated_options import StatedOption
    from parplan.planner.plan.plan import Plan
    from parplan.planner.plan.traced_plan import TracedPlan
    from parplan.profiles.models.spec import ModelSpec

_LOG_SUFFIXES = (".log", ".out", ".txt")
_PROGRAM_SUFFIXES = (".sh", ".sbatch", ".bash", ".slurm", ".py")  # never those of plans


def launcher_file(path: Path) -> LauncherFile | None:
    """Returns the configuration in a file, None where it is a plan. Raises ConfigError.

    A log of a launcher that prints its arguments is such a file.
    """
    from parplan.planner.export.launcher_file import read_launcher_file
    from parplan.planner.export.targets import READERS
    from parplan.planner.logs.log_configuration import configuration_of_log

    if path.suffix in _LOG_SUFFIXES:
        found = configuration_of_log(path)
    else:
        found = read_launcher_file(path, READERS)
    if found is None and path.suffix in (*_LOG_SUFFIXES, *_PROGRAM_SUFFIXES):
        raise ConfigError(
            f"{path}: it has no arguments of a launcher that is known",
            hint=f"give a script or a configuration of {', '.join(READERS)}, or a plan",
        )
    return found


def read_plans(paths: Sequence[Path], stated: TargetOptions) -> list[Plan | TracedPlan]:
    """Returns the plans of files, of which what the user says is for launchers' files alone.

    Raises ConfigError, also for words of the user where all files are plans.
    """
    from parplan.planner.plan.plan_file import read_any_plan

    files = [launcher_file(path) for path in paths]
    if not any(files):
        require_nothing_stated(paths[0], stated)
    return [
        read_any_plan(path) if file is None else launcher_plan(file, stated)[0]
        for path, file in zip(paths, files, strict=True)
    ]


def described_plan(plan: Plan | TracedPlan, path: Path, *, hint: str) -> Plan:
    """Returns a plan whose request its file says. Raises ConfigError for a traced module's."""
    from parplan.planner.plan.plan import Plan

    if not isinstance(plan, Plan):
        raise ConfigError(
            f"{path} is of a traced module, whose request the file does not have", hint=hint
        )
    return plan


def require_nothing_stated(path: Path, stated: TargetOptions) -> None:
    """Raises ConfigError for options of a launcher's file beside a plan, which says them."""
    usual = TargetOptions()
    names = (field.name for field in fields(TargetOptions))
    wrong = next((name for name in names if getattr(stated, name) != getattr(usual, name)), None)
    if wrong:
        option = f"--{wrong.replace('_', '-')}"
        raise ConfigError(
            f"{option} and a plan file exclude each other: {path} has decided it",
            hint=f"leave {option} out",
        )


def completed_file(
    file: LauncherFile, target: TargetOptions, program: Mapping[str, object] | None = None
) -> LauncherFile:
    """Returns a configuration with the options of the user for facts that it leaves open."""
    if target.vocab_size is not None:
        file = file.with_vocabulary(target.vocab_size)
    return file.with_options(_options_of(target, program))


def _options_of(
    target: TargetOptions, program: Mapping[str, object] | None
) -> tuple[StatedOption, ...]:
    """Returns the options that are about settings, by their names."""
    from parplan.planner.export.stated_options import options_of

    names = (
        "seq_length",
        "global_batch_size",
        "precision",
        "gradient_precision",
        "state_precision",
        "optimizer",
        "attention",
        "narrow_weights",
        "expert_capacity",
    )
    stated = {f"--{name.replace('_', '-')}": getattr(target, name) for name in names}
    return options_of(stated | dict(program or {}))


def launcher_plan(
    file: LauncherFile, target: TargetOptions, program: Mapping[str, object] | None = None
) -> tuple[Plan, Sequence[str]]:
    """Returns the plan of a configuration, and a phrase for every default that was taken.

    target    options of the user; what they leave open is taken from the file
    program   further options, which are about the program of the file alone
    Raises ConfigError.
    """
    from parplan.commands.requests.requests import request_about
    from parplan.planner.export.launcher_file import plan_of_file
    from parplan.planner.export.stated_options import require_taken
    from parplan.profiles.models.model_catalog import load_model
    from parplan.profiles.models.spec import ModelEntry

    options = _options_of(target, program)
    file = completed_file(file, target, program)
    target = _with_options(file, target)
    if target.cluster is None and (target.gpu is None or target.gpus is None):
        missing = "--gpus" if target.gpus is None else "--gpu"
        raise ConfigError(
            f"{file.path}: the file does not say its machine, {missing} is missing",
            hint=f"say it, such as {'--gpus 64' if target.gpus is None else '--gpu h100-80gb'}",
        )
    if target.model is None:
        spec = file.model()
        entry = ModelEntry(spec=spec, global_batch_size=1, seq_length=1, source=str(file.path))
    else:
        entry = load_model(target.model)
    _require_of_file(file, target, entry.spec)
    request = request_about(entry, replace(target, global_batch_size=1, seq_length=1))
    plan = plan_of_file(file, entry.spec, request.cluster, request.training)
    settings = file.settings(entry.spec, request.cluster.num_gpus)
    require_taken(options, settings, str(file.path))
    machine = ("--gpus-per-node", "--gpu ")  # the file says the rest
    return plan, tuple(each for each in request.assumed if each.startswith(machine))


def _require_of_file(file: LauncherFile, target: TargetOptions, model: ModelSpec) -> None:
    """Raises ConfigError for options that a launcher's file leaves no place for."""
    if target.vocab_size is not None and model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"--vocab-size {target.vocab_size}: {model.name} has {model.vocab_size} tokens",
            hint="leave --vocab-size out",
        )
    if target.fp8:
        raise ConfigError(
            f"--fp8: {file.path} decides the format of products",
            hint="leave --fp8 out, or change the file",
        )
    if target.module is not None:
        raise ConfigError(
            f"--module {target.module}: {file.path} has a program of its own",
            hint="leave --module out",
        )


def _with_options(file: LauncherFile, target: TargetOptions) -> TargetOptions:
    """Returns the options with the model and the machine that the file states."""
    stated = file.options
    target = replace(
        target,
        model=target.model or stated.get("--model"),
        stack=target.stack or file.target.stacks[0],
    )
    if target.cluster is not None:
        return target
    where = f"{file.path}: the options to read it back with"
    per_node = stated.get("--gpus-per-node")
    stated_per_node = whole(per_node, "--gpus-per-node", where, DEVICES) if per_node else None
    return replace(
        target,
        gpu=target.gpu or stated.get("--gpu"),
        gpus=target.gpus or file.num_gpus,
        gpus_per_node=target.gpus_per_node or stated_per_node,
    )
