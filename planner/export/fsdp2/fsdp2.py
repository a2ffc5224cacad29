"""The export to PyTorch's own parts: a training program, the YAML of its settings, and a script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Given, written
from parplan.planner.export.fields.launcher import RecomputeChoice, Sheet, Target
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.nested_file import nested, nested_arguments
from parplan.planner.export.files.quoting import commented, python_commented
from parplan.planner.export.files.script import script, torchrun_lines
from parplan.planner.export.fsdp2.fsdp2_arguments import (
    SHAPE,
    STAGES,
    TABLE,
    finished,
    require_said,
    shape_of,
)
from parplan.profiles.documents.packaged_configs import packaged_text
from parplan.profiles.documents.yaml_text import yaml_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

PROGRAM = ("train_fsdp2.py", "fsdp2_model.py", "fsdp2_settings.py")
_YAML = "fsdp2.yaml"
_SUFFIXES = (".yaml", ".yml")
_SHAPE = re.compile(r"^shape:", re.MULTILINE)


def recomputes(_: ModelSpec, __: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute of the program, which is the same for all blocks."""
    for level in Recompute:
        yield {"recompute": level, "recompute_modules": None, "full_in_turn": False}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a YAML file."""
    known = file.endswith(_SUFFIXES) and _SHAPE.search(text)
    return nested_arguments(text, file) if known else ()


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    return finished(given, model, model_facts(model))


def require_model(model: ModelSpec, training: TrainingSpec) -> None:
    """Raises ConfigError for a model that the program does not build, and for packed documents."""
    require_said(model, tuple(Given(name, words, "") for name, words in written(SHAPE, model)))
    if training.documents is not None:
        raise ConfigError(
            "the program reads whole sequences, the plan packs documents",
            hint="choose another target",
        )


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the settings, the program and the script. Raises ConfigError."""
    plan, chosen = sheet.plan, sheet.settings
    require_model(plan.model, plan.training)
    shape = written(SHAPE, plan.model)
    document = nested((*shape, *written(TABLE, chosen)))
    document["pipeline"][STAGES.partition(".")[2]] = list(chosen.blocks)
    head = python_commented(sheet.head[:2])
    program = {name: "\n".join((*head, packaged_text("launchers", name))) for name in PROGRAM}
    run = [f'"$HERE/{PROGRAM[0]}"', f'"$HERE/{_YAML}"', '"$@"']
    lines = ['HERE=$(dirname "$0")', *torchrun_lines(*hosts_of(plan.cluster), run)]
    return {
        _YAML: "\n".join((*commented(sheet.head), yaml_text(document))),
        "fsdp2.sh": script(sheet.head, lines),
        **program,
    }


FSDP2 = Target(
    name="fsdp2",
    stacks=("torchtitan", "torchtitan-2024"),
    rows=(*TABLE, *SHAPE),
    table=TABLE,
    zeros=(0, 2, 3),
    recomputes=recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=shape_of,
    layered=True,
    processes=tuple((each.name,) for each in TABLE if each.name.startswith("mesh.")),
    refused=(),
    require_model=require_model,
    source="torch 2.13.0",
)
