"""A program around the Trainer of transformers, and the launcher that runs what its files say.

A wrapper has arguments of its own beside TrainingArguments, other defaults, and names for what
accelerate and DeepSpeed are told. Its rows say the facts that these launchers' tables say, so that
its files are priced as theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from parplan.planner.export.deepspeed import deepspeed
from parplan.planner.export.deepspeed.deepspeed_arguments import finished as finish_deepspeed
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    read_arguments,
    reading,
)
from parplan.planner.export.fields.harmless import Harmless
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.nested_file import read_flag
from parplan.planner.export.hugging_face.accelerate_arguments import finished as finish_accelerate
from parplan.planner.export.hugging_face.hf_trainer_arguments import finished as finish_trainer
from parplan.profiles.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A program around the Trainer.

    name       as its users write it
    source     repository and commit that its names and defaults were read in
    rows       its own arguments, which stand in the place of rows of the same name
    defaults   facts that it has where its files say nothing
    harmless   its arguments without effect on a step
    refused    its arguments and sections that change time or memory without a price
    marks      arguments of which a file of it has at least `enough`
    programs   command lines that start it, as regular expressions
    spelled    its names of the launcher's arguments, by theirs; rows of its own under these names
               are for launchers that have none
    completed  its arguments with those that they imply
    derived    its facts with what it derives of them for a number of GPUs
    """

    name: str
    source: str
    rows: tuple[Argument, ...]
    defaults: Facts
    harmless: tuple[Harmless, ...]
    marks: frozenset[str]
    programs: tuple[str, ...]
    refused: tuple[str, ...] = ()
    enough: int = 1
    spelled: Mapping[str, str] = field(default_factory=dict)
    completed: Callable[[tuple[Given, ...]], tuple[Given, ...]] = lambda given: given
    derived: Callable[[Facts, int], Facts] = lambda facts, _: facts

    def has(self, given: tuple[Given, ...]) -> bool:
        """Tells that a file with these arguments is of this program."""
        names = {each.name.partition(".")[0] for each in given} | {each.name for each in given}
        return len(self.marks & names) >= self.enough


TRAINER_BATCH = {"micro_batch_size": 8, "accumulation": 1}  # defaults of TrainingArguments
PLAIN = Wrapper(  # a program without defaults of its own
    name="the Trainer",
    source="",
    rows=(),
    defaults={},
    harmless=(),
    marks=frozenset(),
    programs=(),
)


def run_by(wrapper: Wrapper, launcher: Target) -> Target:
    """Returns the launcher that reads a wrapper's arguments beside its own."""
    spelled = {wrapper.spelled[row.name] for row in launcher.rows if row.name in wrapper.spelled}
    rows_of_own = tuple(row for row in wrapper.rows if row.name not in spelled)
    own = {row.name for row in rows_of_own}
    stated = tuple(row for row in launcher.stated if row.name not in wrapper.spelled)
    first = own.union(row.name for row in stated)
    of_launcher = tuple(
        replace(row, name=wrapper.spelled.get(row.name, row.name))
        for row in launcher.rows
        if row.name not in first
    )
    rows = (*of_launcher, *rows_of_own, *stated)

    def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
        if launcher is deepspeed.DEEPSPEED:
            usual = {} if wrapper is PLAIN else {"usual": ()}
            given = deepspeed.filled(given, model, own | spelled, **usual)
        facts = read_arguments(rows, given, wrapper.defaults)
        facts = wrapper.derived(facts | model_facts(model), num_gpus)
        if launcher is deepspeed.DEEPSPEED:
            return finish_deepspeed(facts, num_gpus)
        finish = finish_accelerate if launcher.name == "accelerate" else finish_trainer
        return finish(facts, num_gpus)

    return replace(
        launcher,
        rows=rows,
        table=rows,
        stated=stated,
        settings=settings,
        refused=(*(name for name in launcher.refused if name not in own), *wrapper.refused),
        harmless=(*launcher.harmless, *wrapper.harmless),
        source=f"{wrapper.source}, {launcher.source}",
        further=None,
        wrapper="" if wrapper is PLAIN else wrapper.name,
    )


def passed(*names: str) -> tuple[Argument, ...]:
    """Returns rows of arguments that change no price in this program, whatever they say."""
    return tuple(reading(name, lambda _, __: {}) for name in names)


def fixed(name: str, why: str) -> Argument:
    """Returns the row of an argument that no value gives a price, but being off.

    why    what it does
    """

    def read(words: Words, _: Facts) -> Facts:
        if all(word.lower() in ("false", "null", "none", "", "0", "0.0") for word in words):
            return {}
        raise ValueError(f"it {why}, which has no price")

    return reading(name, read)


def fact(name: str, **facts: object) -> Argument:
    """Returns the row of a switch that says facts where it is on."""
    return reading(name, lambda words, _: facts if read_flag(words) else {})
