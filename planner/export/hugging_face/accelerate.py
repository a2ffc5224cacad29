"""The export to Hugging Face Accelerate: the YAML of `accelerate launch` and the launch line.

The script starts the user's own program, `train.py` unless TRAIN names another, with the batch by
the names of transformers' TrainingArguments.
"""

from __future__ import annotations

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
from parplan.planner.export.files.script import INDENT, script
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.hugging_face.accelerate_arguments import (
    FILE_ROWS,
    PROGRAM_KEYS,
    STATED,
    TABLE,
    finished,
)
from parplan.planner.export.hugging_face.trainer_names import ACCELERATE_NAMES, TRAINER_NAMES
from parplan.profiles.documents.yaml_text import yaml_text
from parplan.profiles.models.spec import ModelSpec

_YAML = "accelerate.yaml"
_NESTED = (".yaml", ".yml", ".json")
_TYPE = "distributed_type"
_FILE = "config_file"
_LAUNCH = (
    "accelerate launch",
    f"--config_file {_YAML}",
    '--machine_rank "${NODE_RANK:-0}"',
    '--main_process_ip "${MASTER_ADDR:-localhost}"',
    '--main_process_port "${MASTER_PORT:-29500}"',
)
_SECTIONS = {"fsdp_": "fsdp_config.", "parallelism_config_": "parallelism_config."}
_TYPES = {"use_fsdp": (_TYPE, ("FSDP",)), "multi_gpu": (_TYPE, ("MULTI_GPU",))}
# arguments of the program that its script has; the YAML has the type of training
_WRITTEN = tuple(row for row in PROGRAM_KEYS if row.name not in ("bf16", "fp16"))


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a YAML or JSON file, or the arguments of a script by these keys."""
    if file.endswith(_NESTED):
        return nested_arguments(text, file) if _TYPE in text else ()
    if "accelerate" not in text:
        return ()
    return tuple(launch_keys(shell_arguments(text, file)))


def further(given: Iterable[Given]) -> str | None:
    """Returns the YAML that a launch line names."""
    return next((each.words[0] for each in given if each.name == f"--{_FILE}"), None)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    return finished(read_arguments(TABLE, given) | model_facts(model), num_gpus)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the YAML and the script with the launch line."""
    chosen = sheet.settings
    machines, _ = hosts_of(sheet.plan.cluster)
    document = nested((*written(FILE_ROWS, chosen), ("num_machines", (f"{machines}",))))
    said = written(_WRITTEN, chosen)
    options = (" ".join((f"--{name}", *map(shell_word, words))) for name, words in said)
    program = ['"${TRAIN:-train.py}"', *options, '"$@"']
    first, *rest = (*_LAUNCH, *program)
    lines = [first, *(f"{INDENT}{each}" for each in rest)]
    run = [f"{line} \\" for line in lines[:-1]] + lines[-1:]
    return {
        _YAML: "\n".join((*commented(sheet.head), yaml_text(document))),
        "accelerate.sh": script(sheet.head, run),
    }


def launch_keys(given: Iterable[Given]) -> Iterator[Given]:
    """Yields the arguments of a launch line and of its program by the names of the table."""
    known = {row.name for row in (*FILE_ROWS, *PROGRAM_KEYS)}
    for each in given:
        key = each.name.removeprefix("--").replace("-", "_")
        section = next((name for prefix, name in _SECTIONS.items() if key.startswith(prefix)), "")
        name, words = _TYPES.get(key, (f"{section}{key}", each.words[:1] or ("true",)))
        if name in known:
            yield replace(each, name=name, words=words)
        elif key != _FILE and is_harmless(key, (ACCELERATE_NAMES, TRAINER_NAMES)):
            yield replace(each, name=key)
        else:
            yield each


ACCELERATE = Target(
    name="accelerate",
    stacks=("huggingface",),
    rows=TABLE,
    table=TABLE,
    zeros=(0, 2, 3),
    recomputes=whole_recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=None,
    harmless=(ACCELERATE_NAMES, TRAINER_NAMES),
    processes=(("num_processes",),),
    refused=(
        "fp8_config",
        "kt_config",
        "megatron_lm_config.megatron_lm_tp_degree",
        "deepspeed_config",
    ),
    source="accelerate 1.15.0",
    stated=STATED,
    further=further,
)
