"""The export to Megatron-LM: a script that starts pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Facts,
    Given,
    Words,
    read_arguments,
    written,
)
from parplan.planner.export.fields.launcher import RecomputeChoice, Sheet, Target
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.fields.switches import require_legal
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.script import array, script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments, yaml_arguments
from parplan.planner.export.megatron.megatron_arguments import (
    BATCH,
    DEFAULT_MODULES,
    NEEDED,
    OFFLOAD,
    PARALLEL,
    RECOMPUTE,
    REFUSED,
    SHARDING,
    TABLE,
    TRAINING,
    uses_fsdp,
)
from parplan.planner.export.megatron.megatron_harmless import HARMLESS
from parplan.planner.export.megatron.megatron_model import MODEL_TABLE, read_model, unsaid_parts
from parplan.planner.export.megatron.megatron_remarks import remarks
from parplan.planner.export.megatron.megatron_stages import finished
from parplan.planner.export.megatron.megatron_switches import SWITCHES, TENSOR_OVERLAP
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

_MODULES = (
    DEFAULT_MODULES,
    ("layernorm",),
    ("layernorm", "core_attn"),
    ("layernorm", "mlp"),
    ("mlp",),
)
_OF_EXPERTS = (
    ("moe_act",),
    ("layernorm", "moe_act"),
    ("layernorm", "moe_act", "shared_experts"),
    ("moe",),
    ("layernorm", "moe"),
)
_OF_LATENT = (("mla_up_proj",), ("mla_up_proj", "layernorm"))


def recomputes(model: ModelSpec, most_blocks: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute of Megatron-LM: none, modules by name, some blocks, and all blocks."""
    modules = (
        *_MODULES,
        *(_OF_EXPERTS if model.num_experts else ()),
        *(_OF_LATENT if model.latent else ()),
    )
    if model.latent and model.num_experts:
        modules = (*modules, ("mla_up_proj", "layernorm", "moe_act"))
    usual: Facts = {"recompute_modules": DEFAULT_MODULES, "recompute_blocks": None}
    yield usual | {"recompute": Recompute.NONE}
    for chosen in modules:
        yield usual | {"recompute": Recompute.SELECTIVE, "recompute_modules": chosen}
    for count in range(1, most_blocks):
        yield usual | {"recompute": Recompute.FULL, "recompute_blocks": count}
    yield usual | {"recompute": Recompute.FULL}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the arguments of a script, or of a YAML file such as those of its release tests."""
    if file.endswith((".yaml", ".yml")):
        return yaml_arguments(text, file)
    return shell_arguments(text, file)


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that arguments say. Raises ConfigError."""
    facts = read_arguments(TABLE, given)
    said = finished(facts | model_facts(model), num_gpus)
    require_legal(replace(said, tp_overlap=facts.get("tp_overlap", False)), (TENSOR_OVERLAP,))
    return said


def _shape(model: ModelSpec, training: TrainingSpec) -> tuple[tuple[str, Words], ...]:
    """Returns the arguments of a model. Raises ConfigError for one that they cannot say."""
    longest = max(model.max_seq_length, training.seq_length)  # validate_args asks for it
    shape = written(MODEL_TABLE, replace(model, max_seq_length=longest))
    given = tuple(Given(name, words, "") for name, words in shape)
    unsaid = unsaid_parts(model, read_model(given, model.name, "the plan"))
    if unsaid:
        raise ConfigError(
            f"{model.name} has {', '.join(unsaid)}, which the arguments of pretrain_gpt.py do not "
            "say",
            hint="choose another target",
        )
    return shape


def require_model(model: ModelSpec, training: TrainingSpec) -> None:
    """Raises ConfigError for a model that the arguments cannot say."""
    _shape(model, training)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the script. Raises ConfigError for a model that the arguments cannot say."""
    plan, chosen = sheet.plan, sheet.settings
    shape = _shape(plan.model, plan.training)
    groups = {
        "MODEL": shape,
        "PARALLEL": written((*PARALLEL, *SHARDING, *NEEDED), chosen),
        "RECOMPUTE": written((*RECOMPUTE, *OFFLOAD), chosen),
        "TRAINING": written((*BATCH, *TRAINING), chosen),
    }
    groups = {name: group for name, group in groups.items() if group}
    lines = [line for name, group in groups.items() for line in array(f"{name}_ARGS", group)]
    if not uses_fsdp(chosen) and (chosen.tp > 1 or chosen.cp > 1):
        lines.insert(0, "export CUDA_DEVICE_MAX_CONNECTIONS=1  # arguments.py, before Blackwell")
    program = [
        '"${PRETRAIN:-pretrain_gpt.py}"',
        *(f'"${{{name}_ARGS[@]}}"' for name in groups),
        '"$@"',
    ]
    run = torchrun_lines(*hosts_of(plan.cluster), program)
    return {"megatron.sh": script(sheet.head, (*lines, *run))}


MEGATRON = Target(
    name="megatron",
    stacks=("megatron-core", "nemo"),
    rows=(*TABLE, *MODEL_TABLE),
    table=TABLE,
    zeros=(0, 1, 2, 3),
    recomputes=recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=read_model,
    refused=REFUSED,
    harmless=HARMLESS,
    programs=("pretrain_gpt.py",),
    remarks=remarks,
    switches=SWITCHES,
    require_model=require_model,
    source="NVIDIA/Megatron-LM at d98e8a64dd",
)
