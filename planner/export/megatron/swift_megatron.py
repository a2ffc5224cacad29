"""ms-swift's `megatron sft` and `megatron pt`: Megatron-LM's arguments of a model of the hub.

Names and defaults were read in modelscope/ms-swift at 3602360a56,
docs/source_en/Megatron-SWIFT/Command-line-parameters.md: underscores for dashes, and a word for
each switch. It is read, and never written as an export.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    free,
    read_arguments,
    read_number,
    reading,
)
from parplan.planner.export.fields.harmless import harmless
from parplan.planner.export.fields.released_models import released_model
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.fields.spellings import switched
from parplan.planner.export.files.nested_file import unpriced
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.export.megatron.megatron_arguments import TABLE as MEGATRON_TABLE
from parplan.planner.export.megatron.megatron_stages import finished
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Precision

_COMMAND = re.compile(r"^[^#\n]*\bmegatron\s+(sft|pt|rlhf)\b", re.MULTILINE)
_VARIABLES = {"NPROC_PER_NODE": "--nproc_per_node", "NNODES": "--nnodes"}
_ASSIGNED = re.compile(r"\b(NPROC_PER_NODE|NNODES)=[\"']?(\d+)")
_GRANULARITY = "--recompute_granularity"
# swift's own defaults where Megatron-LM has others; parameters come in the type of the hub's file
_DEFAULTS: Facts = {
    "zero": 1,
    "recompute": Recompute.SELECTIVE,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "fused_loss": True,
    "precision": Precision.BF16,
    "etp": 1,
}
_SWITCHES = (  # arguments of Megatron-LM without a word
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--sequence-parallel",
    "--fine-grained-activation-offloading",
    "--use-tp-pp-dp-mapping",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--use-custom-fsdp",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--moe-grouped-gemm",
    "--overlap-moe-expert-parallel-comm",
    "--tp-comm-overlap",
    "--recompute-activations",
    "--distribute-saved-activations",
    "--bf16",
    "--fp16",
    "--grad-reduce-in-bf16",
    "--fp8-param-gather",
    "--cross-entropy-loss-fusion",
    "--use-precision-aware-optimizer",
)
HARMLESS = (
    *MEGATRON.harmless,
    harmless(
        "docs/source_en/Megatron-SWIFT and Instruction/Command-line-parameters.md",
        """--model-type --model-revision --template --system --dataset --dataset-* --cached-*
        --val-dataset* --split-dataset-ratio --streaming --lazy-tokenize --output-dir
        --num-train-epochs --max-epochs --padding-free --train-dataloader-shuffle
        --dataloader-* --data-sharding --use-hf --hub-token --save-* --no-save-*
        --create-checkpoint-symlink --add-version --report-to --swanlab-* --callbacks
        --check-model --custom-* --external-plugins --model-author --model-name
        --agent-template --truncation-strategy --strict --remove-unused-columns
        --load-from-cache-file --packing-length --packing-num-proc --interleave-prob
        --stopping-strategy --shuffle-buffer-size --columns --loss-scale --enable-thinking
        --add-non-thinking-prefix --ddp-timeout --ddp-backend --ddp-timeout
        --enable-channel-loss --enable-dft-loss --load-args --metric-* --greater-is-better
        --new-special-tokens --rope-scaling --mcore-model --perform-initialization
        --max-shard-size --merge-lora --logging-* --load-safetensors --eval-* --attn-impl
        --use-chat-template --decoder-input-detach --label-names --group-by-length""",
    ),
)


def _of_swift(row: Argument) -> Argument:
    """Returns a row of Megatron-LM under swift's name, a switch with the word `true` or `false`."""
    name = f"--{row.name.removeprefix('--').replace('-', '_')}"
    return switched(row, name) if row.name in _SWITCHES else replace(row, name=name)


def _read_granularity(words: Words, _: Facts) -> Facts:
    levels = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    if words[0] not in levels:
        raise ValueError(f"one of {', '.join(levels)} is known")
    return {"recompute": levels[words[0]]}


def _read_type(words: Words, _: Facts) -> Facts:
    types = {"bfloat16": Precision.BF16, "float16": Precision.FP16, "float32": Precision.FP16}
    if words[0] not in types:
        raise ValueError(f"one of {', '.join(types)} is known")
    return {"precision": types[words[0]]}


def _read_distributed(words: Words, _: Facts) -> Facts:
    return {"zero": 0 if words[0].lower() == "false" else 1}


def _own(row: Argument) -> Argument:
    """Returns a row of Megatron-LM's with what swift reads of it."""
    readings = {
        _GRANULARITY: _read_granularity,
        "--use_distributed_optimizer": _read_distributed,
    }
    return replace(row, read=readings.get(row.name, row.read))


TABLE: tuple[Argument, ...] = (
    reading("--torch_dtype", _read_type),
    *(_own(_of_swift(row)) for row in MEGATRON_TABLE),
    reading("--max_length", lambda words, _: {"seq_length": read_number(words)}),
    reading("--mtp_num_layers", lambda _, __: {}),
    unpriced("--tuner_type", "full"),
    unpriced("--train_type", "full"),
    unpriced("--task_type", "causal_lm"),
    unpriced("--packing", "true", "false"),
    unpriced("--language_model_only", "false"),
)


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the arguments of a script. Raises ConfigError for a command that has no price."""
    command = _COMMAND.search(text)
    if command is None:
        return ()
    if command[1] == "rlhf":
        raise ConfigError(
            f"{file}: megatron rlhf runs further models beside the one that it trains, which has "
            f"no price",
            hint="plan a run of megatron sft or megatron pt",
        )
    counts = dict(_ASSIGNED.findall(text))
    counts = {"NNODES": "1"} | counts if counts else counts
    processes = (Given(_VARIABLES[name], (count,), file) for name, count in counts.items())
    return (*processes, *map(_with_word, shell_arguments(text, file)))


def _with_word(given: Given) -> Given:
    name = f"--{given.name.removeprefix('--').replace('-', '_')}"
    if name not in {row.name for row in TABLE}:
        return given
    return replace(given, name=name, words=given.words or ("true",))


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that arguments say. Raises ConfigError."""
    facts = _DEFAULTS | read_arguments(TABLE, given)
    return finished(facts | model_facts(model), num_gpus)


def read_model(given: tuple[Given, ...], _: str, where: str) -> ModelSpec:
    """Returns the model of the hub that the arguments name. Raises ConfigError."""
    name = next(_models(given), "")
    model = released_model(name) if name else None
    if model is None:
        raise ConfigError(
            f"{where}: the catalog has no {name or 'model of these arguments'}",
            hint="name the model: plan read FILE --model NAME",
        )
    return model


def _models(given: tuple[Given, ...]) -> Iterator[str]:
    """Yields the model of the hub that arguments name; a path of Megatron-LM's says no name."""
    yield from (each.words[0] for each in given if each.name == "--model" and each.words)


SWIFT_MEGATRON = replace(
    MEGATRON,
    name="ms-swift",
    rows=(*TABLE, free("--model")),
    table=TABLE,
    arguments=arguments,
    settings=settings,
    model=read_model,
    refused=tuple(f"--{name.removeprefix('--').replace('-', '_')}" for name in MEGATRON.refused),
    harmless=HARMLESS,
    remarks=lambda _, __: (),
    owns=lambda text: _COMMAND.search(text) is not None,
    source="modelscope/ms-swift at 3602360a56",
)
