"""The export to DeepSpeed: its JSON, the script that starts it, and the stages of a pipeline.

The JSON has no model. The script starts the user's own program, `train.py` unless TRAIN names
another, with the argument `--deepspeed_config`, which `deepspeed.add_config_arguments` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from string import Template

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.arguments import Given, read_arguments, written
from parplan.planner.export.deepspeed_arguments import (
    FILE_ROWS,
    PROGRAM,
    REFUSED,
    TABLE,
    finished,
)
from parplan.planner.export.jobs import hosts_of
from parplan.planner.export.launcher import RecomputeChoice, Sheet, Target
from parplan.planner.export.nested_file import json_text, nested, nested_arguments
from parplan.planner.export.script import commented, script, torchrun_lines
from parplan.planner.export.settings import Settings, model_facts
from parplan.planner.export.shell_words import shell_arguments
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec

_JSON = "deepspeed.json"
_NAMED = ("--deepspeed_config", "--deepspeed")  # arguments that name the JSON
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


def recomputes(_: ModelSpec, __: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute that the JSON says: of no block, and of all."""
    for level in (Recompute.NONE, Recompute.FULL):
        yield {"recompute": level, "recompute_modules": None}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a JSON, or the arguments of a script that names one."""
    if file.endswith(".json"):
        return nested_arguments(text, file)
    if file.endswith((".yaml", ".yml")):
        return ()
    given = shell_arguments(text, file)
    return given if further(given) else ()


def further(given: Iterable[Given]) -> str | None:
    """Returns the JSON that the arguments of a script name."""
    named = (each.words[0] for each in given if each.name in _NAMED and each.words)
    return next((word for word in named if word.endswith(".json")), None)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    known = {row.name for row in TABLE}
    auto = next((each for each in given if each.words == ("auto",) and each.name in known), None)
    if auto is not None:
        raise ConfigError(
            f"{auto.where}: {auto.name} is auto, which transformers fills in from its arguments",
            hint="read the file of TrainingArguments, or write the value",
        )
    return finished(read_arguments(TABLE, given) | model_facts(model), num_gpus)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the JSON, the script and, for a pipeline, its module."""
    chosen = sheet.settings
    head = {"parplan": list(sheet.head)} if sheet.head else {}
    program = ['"${TRAIN:-train.py}"', f"--deepspeed --deepspeed_config {_JSON}", '"$@"']
    lines = torchrun_lines(*hosts_of(sheet.plan.cluster), program)
    found = {
        _JSON: json_text(head | nested(written(FILE_ROWS, chosen))),
        "deepspeed.sh": script(sheet.head, lines),
    }
    if chosen.pp > 1:
        body = _PIPELINE.substitute(blocks=chosen.blocks, pp=chosen.pp, tp=chosen.tp, dp=chosen.dp)
        found["deepspeed_pipeline.py"] = "\n".join((*commented(sheet.head), body))
    return found


DEEPSPEED = Target(
    name="deepspeed",
    stacks=("deepspeed", "megatron-deepspeed"),
    rows=TABLE,
    table=TABLE,
    zeros=(0, 1, 2, 3),
    recomputes=recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=None,
    refused=REFUSED,
    source="deepspeed 0.19.8",
    stated=PROGRAM,
    further=further,
)
