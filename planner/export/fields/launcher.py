"""A launcher as the exporter knows it: a table, the files that it reads, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from parplan.planner.export.fields.arguments import Argument, Facts, Given, Words, written
from parplan.planner.export.fields.harmless import Harmless
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.fields.switches import Switch
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

RecomputeChoice = Facts  # the fields of `Settings` that say it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The settings, the plan and the head of an export's files.

    head    lines about the plan and its predictions, without comment signs
    """

    settings: Settings
    plan: Plan
    head: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A launcher.

    stacks       the stacks that describe it; a plan of another one is priced as the first
    rows         its arguments of a run and of a model
    table        those of a run
    zeros        the ZeRO stages that it has
    recomputes   the kinds of recompute that it has, for a model and the most blocks of a stage
    partitions   the blocks of stages that it says, for a number of stages and of blocks; None
                 where it says any
    files        the files of a sheet by name; the first has the arguments
    arguments    the arguments in such a file
    settings     the settings that arguments say of a model on a number of GPUs
    model        the model that the arguments of a file say; None where they name none
    stated       facts of the program, which its files do not say: options of `plan read`, which the
                 head of an exported file states; `table` has them too
    processes    groups of arguments that say one number: the product is that of processes; () for
                 those of torchrun
    further      the file beside that the arguments of a script name, whose arguments follow them
    switches     facts that are on wherever the launcher runs them
    require_model  raises ConfigError for a model, or its training, that no file says
    layered      the ZeRO stage and the recompute of each block are said by themselves
    refused      arguments that change time or memory without a price
    harmless     arguments that leave time and memory as they are; a name that neither the rows nor
                 these tables have is an error where it touches a subject of `subjects.py`
    owns         whether a text is surely a file of this launcher, and of no other
    programs     names of its programs, by which a script with few arguments is known
    wrapper      the program around it that the file is of, "" for its own file
    remarks      sentences about arguments that are priced as others, of a plan with its price
    source       repository and commit or release that the table was read in
    """

    name: str
    stacks: tuple[str, ...]
    rows: tuple[Argument, ...]
    table: tuple[Argument, ...]
    zeros: tuple[int, ...]
    recomputes: Callable[[ModelSpec, int], Iterator[RecomputeChoice]]
    files: Callable[[Sheet], Mapping[str, str]]
    arguments: Callable[[str, str], tuple[Given, ...]]
    settings: Callable[[tuple[Given, ...], ModelSpec, int], Settings]
    model: Callable[[tuple[Given, ...], str, str], ModelSpec] | None
    refused: tuple[str, ...]
    source: str
    partitions: Callable[[int, int], Iterator[tuple[int, ...]]] | None = None
    remarks: Callable[[tuple[Given, ...], Plan], Iterable[str]] = lambda _, __: ()
    stated: tuple[Argument, ...] = ()
    processes: tuple[tuple[str, ...], ...] = ()
    further: Callable[[Iterable[Given]], str | None] | None = None
    switches: tuple[Switch, ...] = ()
    require_model: Callable[[ModelSpec, TrainingSpec], None] = lambda _, __: None
    layered: bool = False
    harmless: tuple[Harmless, ...] = ()
    owns: Callable[[str], bool] = lambda _: False
    programs: tuple[str, ...] = ()
    wrapper: str = ""


def require_plain(model: ModelSpec, training: TrainingSpec, target: Target) -> None:
    """Raises ConfigError for a model that a launcher does not train.

    No settings have a tower or frozen layers, and the files of a launcher say some shapes.
    """
    if training.fine_tuning is not None:
        raise ConfigError(
            f"the plan trains a part of {model.name}, and no file of {target.name} says which",
            hint="export a plan without --lora-rank and --freeze",
        )
    if model.num_blocks != model.num_layers:
        raise ConfigError(
            f"{model.name} has a tower, which settings of {target.name} do not have",
            hint="plan the text model alone: --images-per-sequence 0",
        )
    target.require_model(model, training)


def given_of(arguments: Iterable[tuple[str, Words]], target: Target) -> tuple[Given, ...]:
    """Returns written arguments as they are read from a file."""
    return tuple(Given(name, words, target.name) for name, words in arguments)


def read_back(target: Target, settings: Settings, model: ModelSpec, cluster: Cluster) -> Settings:
    """Returns the settings that the arguments of settings say, on the same pools.

    Raises ConfigError, also for a degree that no argument says.
    """
    said = {fact for row in target.table for fact in row.facts}
    unsaid = [f"{axis} {degree}" for axis, degree in _degrees(settings) if axis not in said]
    if unsaid:
        raise ConfigError(
            f"{target.name} does not say {', '.join(unsaid)}", hint="choose another target"
        )
    given = given_of(written(target.table, settings), target)
    return replace(target.settings(given, model, cluster.num_gpus), pools=settings.pools)


def _degrees(settings: Settings) -> Iterator[tuple[str, int]]:
    """Yields the axes that divide a model, with their degrees."""
    degrees = ((axis, getattr(settings, axis)) for axis in ("pp", "cp", "tp", "ep"))
    yield from (each for each in degrees if each[1] > 1)
