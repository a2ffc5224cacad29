"""A launcher's own file: its arguments, and the plan that they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from parplan.planner.export.exported import training_on
from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.configured import price_settings
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.named_model import named_model
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.fields.understood import not_understood, require_priced
from parplan.planner.export.files.head import stated_options
from parplan.planner.export.files.recipe_file import SEPARATOR
from parplan.planner.export.stated_options import StatedOption, argument_of
from parplan.planner.export.wrappers.wrapped_file import wrapped_file
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.profiles.documents.bounded import Hints, read_text
from parplan.profiles.documents.numbers import whole, whole_of
from parplan.profiles.documents.ranges import DEVICES
from parplan.profiles.documents.texts import name_of_file
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.units import KIB

SUFFIXES = (".sh", ".sbatch", ".bash", ".slurm", ".yaml", ".yml", ".json", ".toml", ".py")
_SCRIPTS = (".sh", ".sbatch", ".bash", ".slurm")
_PROGRAMS = (*_SCRIPTS, ".py")
MAX_CHARACTERS = 512 * KIB  # of a script or a configuration; those of launchers have some thousands
_HINTS = Hints("check its name")
_NODES = ("--nnodes", "--nodes", "trainer.num_nodes")
_PROCESSES = (
    "--nproc-per-node",
    "--nproc_per_node",
    "--ntasks-per-node",
    "--gpus-per-node",
    "trainer.devices",
)
_PLAN = ("plan_version:", "parplan_version:")
_ENOUGH = 2  # arguments of a launcher's table by which its file is known


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFile:
    """A configuration as its launcher reads it.

    given     its arguments, in their order, and the facts that the head states of the program
    options   the machine that the head of an exported file states, by option
    """

    path: Path
    target: Target
    given: tuple[Given, ...]
    options: Mapping[str, str]

    @property
    def num_gpus(self) -> int | None:
        """The processes that the file starts, None where it does not say."""
        if "--gpus" in self.options:
            where = f"{self.path}: the options to read it back with"
            return whole(self.options["--gpus"], "--gpus", where, DEVICES)
        by_name = {each.name: each.words[0] for each in self.given if each.words}
        counts = [
            next(filter(None, (whole_of(by_name.get(name), DEVICES) for name in names)), 0)
            for names in self.target.processes or (_NODES, _PROCESSES)
        ]
        return prod(counts) or None

    @property
    def not_understood(self) -> tuple[str, ...]:
        """The arguments that the reader does not know, which are taken as without effect."""
        return tuple(each.name for each in not_understood(self.target, self.given))

    @property
    def unknown_text(self) -> str:
        """A sentence about these arguments, "" where there are none."""
        names = ", ".join(self.not_understood)
        return (
            f"not understood, taken as without effect on time and memory: {names}" if names else ""
        )

    def with_argument(self, name: str, *words: str) -> LauncherFile:
        """Returns the configuration with a further argument, which the user states."""
        return replace(self, given=(*self.given, Given(name, words, f"{name} of the user")))

    def with_vocabulary(self, num_tokens: int) -> LauncherFile:
        """Returns the configuration with the vocabulary that the user states."""
        names = (row.name for row in self.target.rows if row.facts == ("vocab_size",))
        name = next(names, None)
        return self if name is None else self.with_argument(name, f"{num_tokens}")

    def with_stated(self, options: Mapping[str, object]) -> LauncherFile:
        """Returns the configuration with the options of the user that its files leave open."""
        file = self
        for row in self.target.stated:
            value = options.get(row.name)
            file = file if value is None else file.with_argument(row.name, f"{value}")
        return file

    def with_options(self, options: Iterable[StatedOption]) -> LauncherFile:
        """Returns the configuration with the options that its arguments leave open."""
        file = self
        for option in options:
            argument = argument_of(option, file.target, file.given)
            file = file if argument is None else replace(file, given=(*file.given, argument))
        return file

    def remarks(self, plan: Plan) -> tuple[str, ...]:
        """Returns sentences about arguments that are priced as others."""
        return tuple(self.target.remarks(self.given, plan))

    def settings(self, model: ModelSpec, num_gpus: int) -> Settings:
        """Returns the settings that the arguments say. Raises ConfigError."""
        return self.target.settings(self.given, model, num_gpus)

    def model(self) -> ModelSpec:
        """Returns the model that the arguments say. Raises ConfigError."""
        if self.target.model is None:
            return named_model(self.given, str(self.path))
        return self.target.model(self.given, name_of_file(self.path), str(self.path))


def read_launcher_file(path: Path, targets: Mapping[str, Target]) -> LauncherFile | None:
    """Returns the configuration in a file, None for a file that is none of a launcher's.

    Raises ConfigError where the file is not readable, and for arguments that change time or memory
    without a price.
    """
    source = Path(str(path).partition(SEPARATOR)[0])
    if source.suffix not in SUFFIXES:
        return None
    text = _text_of(source)
    if text.startswith(_PLAN) or len(text) > MAX_CHARACTERS:
        return None
    owners = [target for target in targets.values() if target.owns(text)]
    wrapped = None if owners else wrapped_file(text, source)
    if wrapped is not None:
        return _stated(path, *wrapped, text)
    found = []
    for target in owners or targets.values():
        given = _with_further(target, target.arguments(text, str(path)), path)
        known = {row.name for row in target.rows}
        runs = source.suffix in _SCRIPTS and any(each in text for each in target.programs)
        found.append((sum(each.name in known for each in given), runs, target, given))
    most, runs, target, given = max(found, key=lambda each: each[:2])
    if most < _ENOUGH and not runs:
        return None
    return _stated(path, target, given, text)


def _stated(path: Path, target: Target, given: tuple[Given, ...], text: str) -> LauncherFile:
    """Returns a configuration with what its head states. Raises ConfigError."""
    require_priced(target, given)
    options = stated_options(text)
    file = LauncherFile(path=path, target=target, given=given, options=options)
    return file.with_stated(options)


def _with_further(target: Target, given: tuple[Given, ...], path: Path) -> tuple[Given, ...]:
    """Returns arguments with those of the file beside that they name, where it is there."""
    named = target.further(given) if target.further else None
    if named is None:
        return given
    places = (folder / named for folder in path.resolve().parents)  # the root of a repository too
    found = next((place for place in places if place.is_file()), None)
    return (*given, *target.arguments(_text_of(found), str(found))) if found else given


def _text_of(path: Path) -> str:
    """Returns the text of a file. Raises ConfigError where it is not readable."""
    text = read_text(path, hints=_HINTS, lossy=True)
    if len(text) > MAX_CHARACTERS and path.suffix in _PROGRAMS:
        raise ConfigError(
            f"cannot read {path}: it has {len(text):,} characters, at most {MAX_CHARACTERS:,} are "
            "read as a script",
            hint="give the command of one run alone",
        )
    return text


def plan_of_file(
    file: LauncherFile, model: ModelSpec, cluster: Cluster, training: TrainingSpec
) -> Plan:
    """Returns the plan that a configuration says, with its price.

    training    what the file leaves open
    Raises ConfigError for a configuration that cannot run.
    """
    settings = file.settings(model, cluster.num_gpus)
    one = price_settings(settings, model, cluster, training_on(file.target, training))
    record = SearchRecord.of_estimate(one.price.step_s, one.price.closed_form_s)
    return assemble(one.strategy, one.price, record, one.price_cache)
