"""The export to the Trainer of transformers: a file of TrainingArguments and a script.

`HfArgumentParser.parse_yaml_file` reads the file. The script starts the user's own program,
`train.py` unless TRAIN names another, with the file as its first argument, and has the degrees of
accelerate's ParallelismConfig in the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from parplan.planner.export.fields.arguments import Given, read_arguments, written
from parplan.planner.export.fields.harmless import is_harmless
from parplan.planner.export.fields.launcher import Sheet, Target
from parplan.planner.export.fields.program_facts import whole_recomputes
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.nested_file import nested, nested_arguments
from parplan.planner.export.files.quoting import commented, shell_word
from parplan.planner.export.files.script import script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.hugging_face.hf_trainer_arguments import (
    DEGREES,
    FILE_ROWS,
    REFUSED,
    STATED,
    TABLE,
    finished,
)
from parplan.planner.export.hugging_face.trainer_names import TRAINER_NAMES
from parplan.profiles.documents.yaml_text import yaml_text
from parplan.profiles.models.spec import ModelSpec

_YAML = "training_arguments.yaml"
_NESTED = (".yaml", ".yml", ".json")
_KEYS = frozenset(row.name for row in TABLE) | frozenset(REFUSED)
_EXPORTED = re.compile(r"^\s*export\s+(PARALLELISM_CONFIG_\w+)=(\S+)\s*$")
_PREFIX = "fsdp_config.fsdp_"  # older releases have it on every key of the section


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a YAML or JSON file, or of the arguments of a script."""
    if file.endswith(_NESTED):
        return tuple(map(renamed, nested_arguments(text, file)))
    lines = enumerate(text.splitlines(), 1)
    exported = ((number, _EXPORTED.match(line)) for number, line in lines)
    degrees = (
        Given(found[1], (found[2],), f"{file}:{number}") for number, found in exported if found
    )
    return (*map(renamed, trainer_keys(shell_arguments(text, file))), *degrees)


def further(given: Iterable[Given]) -> str | None:
    """Returns the file of TrainingArguments that a script's arguments name."""
    words = (word for each in given for word in each.words)
    return next((word for word in words if word.endswith(_NESTED)), None)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    return finished(read_arguments(TABLE, given) | model_facts(model), num_gpus)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the file of TrainingArguments and the script."""
    document = nested(written(FILE_ROWS, sheet.settings))
    degrees = written(DEGREES, sheet.settings)
    lines = [f"export {name}={shell_word(words[0])}" for name, words in degrees]
    if lines:
        lines.insert(0, "export ACCELERATE_USE_PARALLELISM_CONFIG=true")
    program = ['"${TRAIN:-train.py}"', _YAML, '"$@"']
    run = torchrun_lines(*hosts_of(sheet.plan.cluster), program)
    return {
        _YAML: "\n".join((*commented(sheet.head), yaml_text(document))),
        "huggingface.sh": script(sheet.head, (*lines, *run)),
    }


def trainer_keys(given: Iterable[Given]) -> Iterator[Given]:
    """Yields the arguments of a script; those of TrainingArguments by the names of its keys."""
    for each in given:
        key = each.name.removeprefix("--").replace("-", "_")
        if is_harmless(key, (TRAINER_NAMES,)):
            yield replace(each, name=key)
        elif key not in _KEYS:
            yield each
        elif key == "fsdp_config" and each.words[:1] and each.words[0].startswith("{"):
            inside = nested_arguments(" ".join(each.words), each.where)
            yield from (replace(one, name=f"{key}.{one.name}", where=each.where) for one in inside)
        else:
            yield replace(each, name=key, words=each.words or ("true",))


def renamed(given: Given) -> Given:
    """Returns a key of FSDP's section without the prefix of older releases."""
    if not given.name.startswith(_PREFIX):
        return given
    return replace(given, name=given.name.replace(_PREFIX, "fsdp_config."))


HUGGINGFACE = Target(
    name="huggingface",
    stacks=("huggingface",),
    rows=TABLE,
    table=TABLE,
    zeros=(0, 2, 3),
    recomputes=whole_recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=None,
    harmless=(TRAINER_NAMES,),
    refused=REFUSED,
    source="transformers 5.23.0 with accelerate 1.15.0",
    stated=(*STATED, *DEGREES),
    further=further,
)
