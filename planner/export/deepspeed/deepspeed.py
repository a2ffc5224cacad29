"""The export to DeepSpeed: its JSON, the script that starts it, and the stages of a pipeline.

The JSON has no model. The script starts the user's own program, `train.py` unless TRAIN names
another, with the argument `--deepspeed_config`, which `deepspeed.add_config_arguments` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template

from parplan.planner.export.deepspeed.deepspeed_arguments import (
    FILE_ROWS,
    REFUSED,
    STATED,
    TABLE,
    finished,
)
from parplan.planner.export.fields.arguments import Given, read_arguments, reading, written
from parplan.planner.export.fields.launcher import Sheet, Target
from parplan.planner.export.fields.program_facts import whole_recomputes
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.nested_file import json_text, nested, nested_arguments
from parplan.planner.export.files.quoting import commented, python_commented
from parplan.planner.export.files.script import script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.hugging_face.hf_trainer import trainer_keys
from parplan.planner.export.hugging_face.hf_trainer_arguments import ARGUMENTS as TRAINER
from parplan.planner.export.hugging_face.hf_trainer_arguments import BESIDE, SOME_VALUES
from parplan.planner.export.hugging_face.trainer_names import (
    ACCELERATE_NAMES,
    DEEPSPEED_NAMES,
    TRAINER_NAMES,
)
from parplan.profiles.documents.yaml_text import yaml_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec

_JSON = "deepspeed.json"
_NAMED = ("--deepspeed_config", "deepspeed")  # arguments that name the JSON
_YAMLS = (".yaml", ".yml")
_STEPS = "gradient_accumulation_steps"
_INLINE = "deepspeed."  # the JSON as a section of TrainingArguments
# TrainingArguments, which fill in the values `auto`; FSDP is none beside DeepSpeed
_OF_TRAINER = tuple(row for row in TRAINER if not row.name.startswith("fsdp"))
_BESIDE = tuple(row for row in (*BESIDE, *SOME_VALUES) if not row.name.startswith("fsdp"))
_TRAINER = tuple(reading(row.name, row.read) for row in (*_OF_TRAINER, *_BESIDE))
_USUAL = (  # of TrainingArguments
    Given("per_device_train_batch_size", ("8",), "transformers"),
    Given("gradient_accumulation_steps", ("1",), "transformers"),
)
_NAMING = tuple(reading(name, lambda _, __: {}) for name in (*_NAMED, "--deepspeed"))
_READ = (*_TRAINER, *_NAMING, *TABLE)
_PIPELINE = Template('''\
"""The pipeline stages of the plan, for deepspeed.initialize(model=PlannedPipeline(..))."""

from itertools import accumulate

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

BLOCKS_OF_STAGES = $blocks


def topology():
    return PipeModelDataParallelTopology(num_pp=$pp, num_mp=$tp, num_dp=$dp)


class PlannedPipeline(PipelineModule):
    """A PipelineModule whose stages have these numbers of blocks.

    block    a regular expression of the class name of blocks
    """

    def __init__(self, layers, block, **options):
        self.block = block
        super().__init__(layers=layers, topology=topology(), **options)

    def _partition_layers(self, method="uniform"):
        super()._partition_layers(method)
        blocks = self._find_layer_type(self.block)
        assert len(blocks) == sum(BLOCKS_OF_STAGES), f"{len(blocks)} blocks match {self.block}"
        firsts = [blocks[count] for count in accumulate(BLOCKS_OF_STAGES[:-1])]
        self.parts = [0, *firsts, len(self._layer_specs)]
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])
''')


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a JSON, or those of a script or of TrainingArguments that name one."""
    if file.endswith(".json"):
        return without_disabled(nested_arguments(text, file))
    if file.endswith(_YAMLS):
        given = nested_arguments(text, file)
    else:
        given = tuple(trainer_keys(shell_arguments(text, file)))
    inline = any(each.name.startswith(_INLINE) for each in given)
    if not inline and further(given) is None:
        return ()
    keys = tuple(replace(each, name=each.name.removeprefix(_INLINE)) for each in given)
    return without_disabled(keys)


def without_disabled(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the keys outside of sections that say `"enabled": false`."""
    named = (each.name for each in given if each.words == ("false",))
    disabled = tuple(name.removesuffix("enabled") for name in named if name.endswith(".enabled"))
    return tuple(each for each in given if not each.name.startswith(disabled))


def further(given: Iterable[Given]) -> str | None:
    """Returns the JSON that arguments name."""
    named = (each.words[0] for each in given if each.name in _NAMED and each.words)
    return next((word for word in named if word.endswith(".json")), None)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    _require_further(given)
    facts = read_arguments(_READ, filled(given, model)) | model_facts(model)
    return finished(facts, num_gpus)


def _require_further(given: tuple[Given, ...]) -> None:
    """Raises ConfigError where the JSON that arguments name was not found."""
    named = further(given)
    files = {Path(each.where.rpartition(":")[0]).name for each in given}
    if named is not None and Path(named).name not in files:
        raise ConfigError(f"there is no {named} beside the file", hint="put it there")


def _require_alike(given: Iterable[Given], wrapped: Iterable[str]) -> None:
    """Raises ConfigError where a JSON and TrainingArguments say two batches, as transformers does.

    HfTrainerDeepSpeedConfig.trainer_config_finalize
    """
    of_json = {each.name: each for each in given if ".json:" in each.where}
    of_trainer = {each.name: each for each in given if ".json:" not in each.where}
    sizes = ("per_device_train_batch_size", *(set(wrapped) & {"micro_batch_size"}))
    pairs = [("train_micro_batch_size_per_gpu", name) for name in sizes]
    for key, name in (*pairs, (_STEPS, _STEPS)):
        one, other = of_json.get(key), of_trainer.get(name)
        if one and other and "auto" not in one.words and one.words != other.words:
            raise ConfigError(
                f"{one.where}: {key} {one.words[0]} is not the {other.words[0]} of {name} "
                f"({other.where}), which transformers refuses",
                hint=f"write auto for {key}",
            )


def filled(
    given: tuple[Given, ...],
    model: ModelSpec,
    wrapped: Iterable[str] = (),
    usual: tuple[Given, ...] = _USUAL,
) -> tuple[Given, ...]:
    """Returns keys without the value `auto`, which transformers fills in from its arguments.

    wrapped    further arguments that say them
    usual      arguments that count where the others do not say them
    HfTrainerDeepSpeedConfig of transformers/integrations/deepspeed.py. Raises ConfigError for such
    a value without TrainingArguments.
    """
    _require_alike(given, wrapped)
    autos = [each for each in given if each.words == ("auto",)]
    known = {row.name for row in TABLE}
    trainer = {row.name for row in _TRAINER} - known | set(wrapped)
    if not any(each.name in trainer for each in given):
        wrong = next((each for each in autos if each.name in known), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong.where}: {wrong.name} is auto, which transformers fills in from its "
                f"arguments",
                hint="read the file of TrainingArguments that names it, or write the value",
            )
        return given
    bucket = f"{model.hidden_size**2}"
    kept = (
        replace(each, words=(bucket,)) if each.name.endswith("reduce_bucket_size") else each
        for each in given
    )
    return (*usual, *(each for each in kept if each.words != ("auto",)))


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the JSON, the script, and the module of a pipeline or else TrainingArguments."""
    chosen = sheet.settings
    head = {"parplan": list(sheet.head)} if sheet.head else {}
    program = ['"${TRAIN:-train.py}"', f"--deepspeed --deepspeed_config {_JSON}", '"$@"']
    lines = torchrun_lines(*hosts_of(sheet.plan.cluster), program)
    found = {
        _JSON: json_text(head | nested(written(FILE_ROWS, chosen))),
        "deepspeed.sh": script(sheet.head, lines),
    }
    if chosen.pp == 1:
        unsharded = replace(chosen, zero=0, states_on_host=False)  # the JSON says it
        keys = (("deepspeed", (_JSON,)), *written(_OF_TRAINER, unsharded))
        found["training_arguments.yaml"] = "\n".join(
            (*commented(sheet.head), yaml_text(nested(keys)))
        )
    else:
        body = _PIPELINE.substitute(blocks=chosen.blocks, pp=chosen.pp, tp=chosen.tp, dp=chosen.dp)
        found["deepspeed_pipeline.py"] = "\n".join((*python_commented(sheet.head), body))
    return found


DEEPSPEED = Target(
    name="deepspeed",
    stacks=("deepspeed", "megatron-deepspeed"),
    rows=_READ,
    table=TABLE,
    zeros=(0, 1, 2, 3),
    recomputes=whole_recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=None,
    harmless=(DEEPSPEED_NAMES, TRAINER_NAMES, ACCELERATE_NAMES),
    refused=REFUSED,
    source="deepspeed 0.19.8",
    stated=STATED,
    further=further,
)
