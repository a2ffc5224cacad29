"""The export to torchtitan: a script that starts it with options over a named configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Given, free, read_arguments, written
from parplan.planner.export.fields.launcher import RecomputeChoice, Sheet, Target
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.script import array, script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.files.toml_file import toml_arguments
from parplan.planner.export.torchtitan.torchtitan_arguments import (
    REFUSED,
    TABLE,
    finished,
    partitions,
)
from parplan.planner.export.torchtitan.torchtitan_harmless import HARMLESS
from parplan.planner.export.torchtitan.torchtitan_names import (
    CHECKPOINT,
    JOB_DEFAULTS,
    former,
)
from parplan.profiles.documents.bounded import Hints, read_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

# A model of the catalog: torchtitan's module, and the function of its configuration
# (torchtitan/models/<module>/config_registry.py). Llama 3 405B is left out, for its configuration
# runs float8 whatever the options say, and DeepSeek-V3, for its own has no multi-token prediction.
CONFIGS: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
_FILE = "--job.config_file"
_VARIABLE = re.compile(r"CONFIG_FILE=(?:\$\{CONFIG_FILE:-)?[\"']?([^\s\"'}]+\.toml)")
_PROCESSES = re.compile(r"\bNGPU=(?:\$\{NGPU:-)?[\"']?(\d+)")
_OWN_TOML = re.compile(r"^\s*\[(?:training|parallelism|activation_checkpoint)\]", re.MULTILINE)


def recomputes(_: ModelSpec, __: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute of torchtitan, which is the same for all blocks."""
    for level in Recompute:
        yield {"recompute": level, "recompute_modules": None, "full_in_turn": True}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the options of a TOML file, or of a script behind those of the TOML that it names.

    The kind of recompute is a sub-command such as `activation_checkpoint:full`, which stands behind
    the options, and is given as an argument of one word. Raises ConfigError where the TOML is not
    there.
    """
    if file.endswith(".toml"):
        return former(toml_arguments(text, file))
    found = []
    for each in shell_arguments(text, file):
        kinds = [word for word in each.words if word.startswith(f"{CHECKPOINT}:")]
        words = tuple(word for word in each.words if word not in kinds)
        found.append(Given(each.name, words[:1], each.where))
        found += [Given(CHECKPOINT, (kind.partition(":")[2],), each.where) for kind in kinds]
    processes = _PROCESSES.search(text)
    if processes:
        found.insert(0, Given("--nproc_per_node", (processes[1],), file))
    return former((*_of_toml(text, found, Path(file)), *found))


def _of_toml(text: str, own: Iterable[Given], file: Path) -> tuple[Given, ...]:
    """Returns the options of the TOML that a script names. Raises ConfigError without it."""
    named = next((each.words[0] for each in own if each.name == _FILE and each.words), "")
    variable = _VARIABLE.search(text)
    if not named.endswith(".toml") and variable and "train" in text:
        named = variable[1]
    if not named.endswith(".toml"):
        return ()
    places = (folder / named for folder in file.resolve().parents)
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        raise ConfigError(f"{file}: there is no {named} beside the file", hint="put it there")
    return toml_arguments(read_text(place, hints=Hints("check the path"), lossy=True), str(place))


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that options say. Raises ConfigError."""
    facts = read_arguments(TABLE, given) | model_facts(model)
    if any(each.name == "--flavor" for each in given):  # a TOML has the options
        facts = JOB_DEFAULTS | facts
    return finished(facts, num_gpus)


def read_model(given: tuple[Given, ...], _: str, where: str) -> ModelSpec:
    """Returns the model of a named configuration. Raises ConfigError for an unknown one."""
    named = {each.name: each.words[0] for each in given if each.words}
    pair = named.get("--module", ""), named.get("--config", named.get("--flavor", ""))
    model = next((name for name, known in CONFIGS.items() if known == pair), None)
    if model is None:
        raise ConfigError(
            f"{where}: --module {pair[0]} --config {pair[1]} is no configuration that is known",
            hint="name the model: plan read FILE --model NAME",
        )
    return load_model(model).spec


def require_model(model: ModelSpec, _: TrainingSpec) -> None:
    """Raises ConfigError for a model without a configuration."""
    if model.name not in CONFIGS or load_model(model.name).spec != model:
        raise ConfigError(
            f"torchtitan has no configuration of {model.name} that is known",
            hint=f"use one of {', '.join(CONFIGS)}",
        )


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the script. Raises ConfigError for a model without a configuration."""
    plan = sheet.plan
    require_model(plan.model, plan.training)
    known = CONFIGS[plan.model.name]
    named = (("--module", (known[0],)), ("--config", (known[1],)))
    options = written(TABLE, sheet.settings)
    flags = tuple((name, words) for name, words in options if name != CHECKPOINT)
    (kind,) = dict(options)[CHECKPOINT]
    lines = [*array("CONFIG", named), *array("OPTIONS", flags)]
    program = [
        "-m torchtitan.train",
        '"${CONFIG[@]}"',
        '"${OPTIONS[@]}"',
        f'"$@" {CHECKPOINT}:{kind}',
    ]
    run = torchrun_lines(*hosts_of(plan.cluster), program)
    return {"torchtitan.sh": script(sheet.head, (*lines, *run))}


TORCHTITAN = Target(
    name="torchtitan",
    stacks=("torchtitan", "torchtitan-2024"),
    rows=(*TABLE, free("--module"), free("--flavor")),
    table=TABLE,
    zeros=(0, 2, 3),
    recomputes=recomputes,
    partitions=partitions,
    files=files,
    arguments=arguments,
    settings=settings,
    model=read_model,
    refused=REFUSED,
    harmless=HARMLESS,
    programs=("torchtitan.train", "torchtitan/train.py"),
    owns=lambda text: _OWN_TOML.search(text) is not None,
    require_model=require_model,
    source="torchtitan 0.3.0",
)
