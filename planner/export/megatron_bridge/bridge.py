"""The export to Megatron-Bridge: overrides over its plainest recipe, and its recipes read back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.planner.export.fields.arguments import Given, Words, read_arguments, written
from parplan.planner.export.fields.launcher import Sheet, Target
from parplan.planner.export.fields.released_models import released_model
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.fields.spellings import FALSE, NULL
from parplan.planner.export.files.jobs import hosts_of
from parplan.planner.export.files.nested_file import nested_arguments
from parplan.planner.export.files.quoting import shell_word
from parplan.planner.export.files.recipe_file import SEPARATOR, recipe_names, recipe_settings
from parplan.planner.export.files.script import array, script, torchrun_lines
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.megatron.megatron import recomputes
from parplan.planner.export.megatron.megatron_arguments import DEFAULTS, uses_fsdp
from parplan.planner.export.megatron.megatron_model import model_of_facts, unsaid_parts
from parplan.planner.export.megatron.megatron_stages import finished
from parplan.planner.export.megatron.megatron_switches import SWITCHES
from parplan.planner.export.megatron_bridge.bridge_harmless import HARMLESS
from parplan.planner.export.megatron_bridge.bridge_names import MODEL_TABLE, TABLE
from parplan.planner.export.megatron_bridge.nemo_names import EXAMPLES, PREFIX, interpolated
from parplan.planner.export.megatron_bridge.nemo_names import MODEL_TABLE as NEMO_MODEL
from parplan.planner.export.megatron_bridge.nemo_names import TABLE as NEMO_TABLE
from parplan.profiles.documents.bounded import Hints, read_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

PLAIN = "vanilla_gpt_pretrain_config"  # src/megatron/bridge/recipes/gpt/vanilla_gpt.py
# recipes of released models: src/megatron/bridge/recipes; any other model is the plain recipe's
_RELEASED = {
    "llama2-7b": "llama2_7b_pretrain_config",
    "llama3-8b": "llama3_8b_pretrain_config",
    "llama3-70b": "llama3_70b_pretrain_config",
    "llama3-405b": "llama31_405b_pretrain_config",
    "qwen2.5-7b": "qwen25_7b_pretrain_config",
    "qwen2.5-32b": "qwen25_32b_pretrain_config",
    "qwen2.5-72b": "qwen25_72b_pretrain_config",
    "qwen3-8b": "qwen3_8b_pretrain_config",
    "qwen3-14b": "qwen3_14b_pretrain_config",
    "qwen3-32b": "qwen3_32b_pretrain_config",
    "qwen3-30b-a3b": "qwen3_30b_a3b_pretrain_config",
    "qwen3-235b-a22b": "qwen3_235b_a22b_pretrain_config",
    "deepseek-v2": "deepseek_v2_pretrain_config",
    "deepseek-v2-lite": "deepseek_v2_lite_pretrain_config",
    "deepseek-v3": "deepseek_v3_pretrain_config",
    "moonlight-16b-a3b": "moonlight_16b_pretrain_config",
    "kimi-k2": "kimi_k2_pretrain_config",
    "gpt-oss-20b": "gpt_oss_20b_pretrain_config",
    "gpt-oss-120b": "gpt_oss_120b_pretrain_config",
}
_RECIPES = ("src/megatron/bridge/recipes", "src/megatron/bridge/perf_recipes")
_EXAMPLES = "examples/nlp/language_modeling/conf"
_EXAMPLE = re.compile(r"\bmegatron_(\w+?)_pretraining\.py")
_CONFIG_NAME = re.compile(r"--config-name[=\s]+[\"']?([\w.-]+)")
_NEMO = "launcher_scripts/conf/training"
# options of scripts/training/run_recipe.py that are overrides (COMMON_OVERRIDE_FIELDS there)
_OPTIONS = {
    ("-gb", "--global_batch_size"): "train.global_batch_size",
    ("-mb", "--micro_batch_size"): "train.micro_batch_size",
    ("-sl", "--seq_length"): "dataset.seq_length",
    ("-tp", "--tensor_model_parallel_size"): "model.tensor_model_parallel_size",
    ("-pp", "--pipeline_model_parallel_size"): "model.pipeline_model_parallel_size",
    ("-cp", "--context_parallel_size"): "model.context_parallel_size",
    ("-vp", "--virtual_pipeline_model_parallel_size"): "model.virtual_pipeline_model_parallel_size",
    ("-ep", "--expert_model_parallel_size"): "model.expert_model_parallel_size",
    ("-etp", "--expert_tensor_parallel_size"): "model.expert_tensor_parallel_size",
}
_PATHS = {option: path for options, path in _OPTIONS.items() for option in options}
_HINTS = Hints("check its name")
_NUM_GPUS = re.compile(r"_([0-9]{1,7})gpu_")  # in the name of a recipe
_OF_A_RUN = re.compile(r"\btensor_model_parallel_size\s*:")  # plans have `model.` keys too
_TABLE = (*TABLE, *NEMO_TABLE)
_MODEL = (*MODEL_TABLE, *NEMO_MODEL)
_KNOWN = {row.name for row in (*_TABLE, *_MODEL)}


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the settings of a recipe, a YAML file or a script, those of its base before its own.

    The base is the recipe of Megatron-Bridge or the configuration of NeMo that a script names; it
    is looked for in the repository that the script is in. Raises ConfigError where it is not there.
    """
    path, _, recipe = file.partition(SEPARATOR)
    if path.endswith(".py"):
        return _of_recipe(Path(path), recipe) if "ConfigContainer" in text else ()
    if path.endswith((".yaml", ".yml")):
        return interpolated(nested_arguments(text, file)) if _OF_A_RUN.search(text) else ()
    own = tuple(_renamed(each) for each in shell_arguments(text, file))
    if not any(each.name in _KNOWN or each.name == "training" for each in own):
        return ()
    base = _base(own, Path(file)) or _of_example(text, Path(file))
    based = {each.name for each in base}
    return (*base, *(each for each in own if not (_is_open(each) and each.name in based)))


def _is_open(given: Given) -> bool:
    """True for a tokenizer's file that only the environment knows; its kind is that of the base."""
    return given.name.startswith("model.tokenizer.") and "$" in "".join(given.words)


def _renamed(given: Given) -> Given:
    """Returns an override under its path in the configuration."""
    return replace(given, name=_PATHS.get(given.name, given.name.removeprefix(PREFIX)))


def _of_recipe(path: Path, recipe: str) -> tuple[Given, ...]:
    """Returns the settings of a recipe, with the GPUs that its name says. Raises ConfigError."""
    names = recipe_names(path)
    if not recipe and len(names) != 1:
        raise ConfigError(
            f"{path}: it has {len(names)} recipes, such as {', '.join(names[:3])}",
            hint=f"name one: {path}{SEPARATOR}RECIPE",
        )
    recipe = recipe or names[0]
    gpus = _NUM_GPUS.search(recipe)
    counts = {"--nnodes": "1", "--nproc-per-node": gpus[1]} if gpus else {}
    where = f"the name of {recipe}"
    return (
        *(Given(name, (count,), where) for name, count in counts.items()),
        *recipe_settings(path, recipe),
    )


def _base(own: tuple[Given, ...], file: Path) -> tuple[Given, ...]:
    """Returns the settings of the base that a script names. Raises ConfigError."""
    named = {each.name: each.words[0] for each in own if each.words}
    if "training" in named:
        path = _above(file, f"{_NEMO}/{named['training']}.yaml")
        if path is None:
            raise _missing(file, f"the configuration {named['training']}")
        return interpolated(nested_arguments(read_text(path, hints=_HINTS, lossy=True), str(path)))
    recipe = named.get("--recipe", "")
    if not recipe and "--model" in named:
        recipe = f"{named['--model']}_{named.get('--mode', 'pretrain')}_config"
    if recipe in ("", PLAIN):
        return ()
    for folder in _RECIPES:
        above = _above(file, folder)
        for path in sorted(above.rglob("*.py")) if above else ():
            code = read_text(path, hints=_HINTS, lossy=True)
            if f"\ndef {recipe}(" in f"\n{code}":
                return _of_recipe(path, recipe)
            if re.search(rf" as {re.escape(recipe)}\b", code):
                return recipe_settings(path, recipe)
    return _released_base(own, recipe, file)


def _of_example(text: str, file: Path) -> tuple[Given, ...]:
    """Returns the settings of the configuration that an example of NeMo starts from.

    Raises ConfigError for one that is neither in the repository of the file nor known.
    """
    started = _EXAMPLE.search(text)
    if started is None:
        return ()
    named = _CONFIG_NAME.search(text)
    name = named[1].removesuffix(".yaml") if named else f"megatron_{started[1]}_config"
    path = _above(file, f"{_EXAMPLES}/{name}.yaml")
    if path is not None:
        return interpolated(nested_arguments(read_text(path, hints=_HINTS, lossy=True), str(path)))
    if name not in EXAMPLES:
        raise _missing(file, f"the configuration {name}")
    return tuple(Given(key, (word,), f"{name}.yaml") for key, word in EXAMPLES[name].items())


def _released_base(own: tuple[Given, ...], recipe: str, file: Path) -> tuple[Given, ...]:
    """Returns the model of a known recipe where a script says all other settings of it itself."""
    model = next((name for name, known in _RELEASED.items() if known == recipe), None)
    names = {each.name for each in own}
    left = [name for name, _ in written(TABLE, replace(DEFAULTS, blocks=(1,))) if name not in names]
    if model is None or left:
        raise _missing(file, f"the recipe {recipe}")
    return (Given("model", (f"catalog/{model}",), str(file)),)


def _above(file: Path, name: str) -> Path | None:
    """Returns a file or folder of the repository that a file is in, None if it is not there."""
    places = (folder / name for folder in file.resolve().parents)
    return next((place for place in places if place.exists()), None)


def _missing(file: Path, base: str) -> ConfigError:
    return ConfigError(
        f"{file}: it changes {base}, which is not in the repository that the file is in",
        hint="put the file into its repository",
    )


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that overrides say. Raises ConfigError."""
    facts = {"fused_loss": True} | read_arguments(_TABLE, given)  # models/gpt_provider.py
    said = finished(facts | model_facts(model), num_gpus)
    if uses_fsdp(said) and said.order is MeshOrder.DP_PP_TP:
        raise ConfigError(  # ConfigContainer.validate of src/megatron/bridge/training/config.py
            "dist.use_tp_pp_dp_mapping does not run with Megatron FSDP",
            hint="leave out one of the two",
        )
    return said


def read_model(given: tuple[Given, ...], name: str, where: str) -> ModelSpec:
    """Returns the model of a recipe: a released one, or that of its sizes. Raises ConfigError."""
    facts = read_arguments(_MODEL, given)
    if "released" in facts:
        model = released_model(facts["released"])
        if model is None:
            raise ConfigError(
                f"{where}: the catalog has no {facts['released']}",
                hint="name the model: plan read FILE --model NAME",
            )
        return model
    longest = read_arguments(_TABLE, given).get("seq_length")
    facts = ({} if longest is None else {"max_seq_length": longest}) | facts
    return model_of_facts(facts, name, where)


def files(sheet: Sheet) -> Mapping[str, str]:
    """Returns the script. Raises ConfigError for a model that the overrides cannot say."""
    plan, chosen = sheet.plan, sheet.settings
    recipe, shape = _shape(plan.model, plan.training)
    groups = {"MODEL": shape, "OVERRIDES": written(TABLE, chosen)}
    lines = [line for name, group in groups.items() for line in array(name, _overrides(group))]
    program = [
        f'"${{RUN_RECIPE:-scripts/training/run_recipe.py}}" --recipe {recipe} --mode pretrain',
        *(f'"${{{name}[@]}}"' for name in groups),
        '"$@"',
    ]
    run = torchrun_lines(*hosts_of(plan.cluster), program)
    return {"megatron-bridge.sh": script(sheet.head, (*lines, *run))}


def require_model(model: ModelSpec, training: TrainingSpec) -> None:
    """Raises ConfigError for a model that the overrides cannot say."""
    _shape(model, training)


def _shape(model: ModelSpec, training: TrainingSpec) -> tuple[str, tuple[tuple[str, Words], ...]]:
    """Returns the recipe of a model, and the overrides that make it that model.

    Raises ConfigError for a model that the overrides cannot say.
    """
    if model.name in _RELEASED and load_model(model.name).spec == model:
        own = (
            ("model.mtp_num_layers", (f"{model.mtp_layers}",) if model.mtp_layers else NULL),
            ("tokenizer.use_tokenizer_vocab_size", FALSE),  # it would change the model
            ("comm_overlap", NULL),  # it would set what the other overrides say
        )
        return _RELEASED[model.name], own
    shape = written(MODEL_TABLE, model)
    length = "dataset.seq_length", (f"{training.seq_length}",)
    given = tuple(Given(name, words, "") for name, words in (*shape, length))
    unsaid = unsaid_parts(model, read_model(given, model.name, "the plan"))
    if unsaid:
        raise ConfigError(
            f"{model.name} has {', '.join(unsaid)}, which overrides of {PLAIN} do not say",
            hint="choose another target",
        )
    return PLAIN, shape


def _overrides(group: tuple[tuple[str, Words], ...]) -> Iterator[tuple[str, tuple[()]]]:
    """Yields each setting as one word of the shell; a layout of stages is text to Hydra."""
    for name, (word,) in group:
        yield shell_word(f'{name}="{word}"' if "|" in word else f"{name}={word}"), ()


MEGATRON_BRIDGE = Target(
    name="megatron-bridge",
    stacks=("nemo", "megatron-core"),
    rows=(*_TABLE, *_MODEL),
    table=TABLE,
    zeros=(0, 1, 2, 3),
    recomputes=recomputes,
    files=files,
    arguments=arguments,
    settings=settings,
    model=read_model,
    refused=(),
    harmless=HARMLESS,
    switches=SWITCHES,
    require_model=require_model,
    source="Megatron-Bridge 0.7.0, NVIDIA-NeMo/Megatron-Bridge at 067f987df0",
)
