"""The export to Hetu-Galvatron: its JSON with a strategy for each block, and the script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Given, read_arguments, written
from parplan.planner.export.fields.launcher import RecomputeChoice, Sheet, Target
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.nested_file import json_text, nested_arguments
from parplan.planner.export.files.quoting import shell_word
from parplan.planner.export.files.script import script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.galvatron.galvatron_harmless import HARMLESS
from parplan.planner.export.galvatron.galvatron_layers import (
    FILE_ROWS,
    LISTS,
    OVERRIDES,
    PROGRAM,
    TABLE,
    finished,
)
from parplan.profiles.models.spec import ModelSpec

_JSON = "galvatron.json"  # named as ./galvatron.json, for its reader needs a folder
_NAME = "parallel.galvatron_config_path"
_RUNTIME = "runtime."  # the section of its YAML, which overrides may name
_UNLIKE = "vtp, which the prices take from tp_sizes_enc"


def recomputes(_: ModelSpec, __: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute of all blocks: of none and of whole ones; `layered` says them each."""
    for level in (Recompute.NONE, Recompute.FULL):
        yield {"recompute": level, "recompute_modules": None}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a JSON, or the overrides of a script that names one.

    A vocabulary of another degree than the blocks is said apart.
    """
    if not file.endswith(".json"):
        given = () if file.endswith((".yaml", ".yml", ".py")) else shell_arguments(text, file)
        own = tuple(replace(each, name=each.name.removeprefix(_RUNTIME)) for each in given)
        return own if further(own) else ()
    found = nested_arguments(text, file)
    words = {each.name: each.words[0] for each in found if each.words}
    degree = words.get("tp_sizes_enc", "1").split(",")[0]
    exchanges = words.get("use_sp", "0").startswith("1")
    unlike = words.get("vtp", degree) != ("1" if exchanges else degree)
    return tuple(
        replace(each, name=_UNLIKE) if unlike and each.name == "vtp" else each for each in found
    )


def further(given: Iterable[Given]) -> str | None:
    """Returns the JSON that the overrides of a script name."""
    return next((each.words[0] for each in given if each.name == _NAME and each.words), None)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    return finished(read_arguments(TABLE, given) | model_facts(model), num_gpus)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the JSON and the script."""
    plan, chosen = sheet.plan, sheet.settings
    strategy = {
        name: word if name in LISTS or not word.isdecimal() else int(word)
        for name, (word,) in written(FILE_ROWS, chosen)
    }
    head = {"parplan": list(sheet.head)} if sheet.head else {}
    said = ((_NAME, (f"./{_JSON}",)), *written(OVERRIDES, chosen))
    program = [
        '"${TRAIN:-train_dist.py}" "${CONFIG:-scripts/train_dist.yaml}"',
        *(shell_word(f"{_RUNTIME}{name}={word}") for name, (word,) in said),
        '"$@"',
    ]
    lines = torchrun_lines(*hosts_of(plan.cluster), program)
    return {
        "galvatron.sh": script(sheet.head, lines),
        _JSON: json_text(head | strategy),
    }


GALVATRON = Target(
    name="galvatron",
    stacks=("galvatron",),
    rows=TABLE,
    table=TABLE,
    zeros=(0, 2, 3),
    recomputes=recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=None,
    stated=PROGRAM,
    further=further,
    layered=True,
    refused=(),
    harmless=HARMLESS,
    source="Hetu-Galvatron 2.4.1, PKU-DAIR/Hetu-Galvatron at cea12ff",
)
