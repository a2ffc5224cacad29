"""DeepSpeed as accelerate's YAML says it: the keys of `deepspeed_config` by DeepSpeed's names.

Names were read in accelerate 1.15.0: commands/config/cluster.py and utils/dataclasses.py
(DeepSpeedPlugin), which writes what the section says into a configuration of its own, with values
`auto` for the rest. `deepspeed_config_file` names a JSON in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parplan.planner.export.fields.arguments import Given
from parplan.profiles.errors import ConfigError

_SECTION = "deepspeed_config."
_TYPE = "distributed_type"
_SWITCH = "use_deepspeed"
_STEPS = "gradient_accumulation_steps"
_ZERO = "zero_optimization."
_KEYS = {
    "zero_stage": f"{_ZERO}stage",
    "offload_optimizer_device": f"{_ZERO}offload_optimizer.device",
    "offload_param_device": f"{_ZERO}offload_param.device",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "deepspeed_config_file": "deepspeed",
}
_HARMLESS = (
    *("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"),
    *("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
)
_PRECISIONS = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}


def is_deepspeed(given: Iterable[Given]) -> bool:
    """Tells that keys have accelerate's section of DeepSpeed, which its type turns on."""
    said = {each.name: each.words for each in given}
    section = any(name.startswith(_SECTION) for name in said)
    return section and said.get(_TYPE) == ("DEEPSPEED",)


def of_launch_line(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the arguments of `accelerate launch --use_deepspeed` as the keys of its YAML."""
    if not any(each.name == _SWITCH for each in given):
        return given
    return tuple(map(_as_key, given))


def _as_key(given: Given) -> Given:
    """Returns an argument of the launch line as the key of the YAML that it stands for."""
    if given.name == _SWITCH:
        return replace(given, name=_TYPE, words=("DEEPSPEED",))
    if given.name != _STEPS and given.name in (*_KEYS, *_HARMLESS):
        return replace(given, name=f"{_SECTION}{given.name}")
    return given


def as_deepspeed(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the keys by DeepSpeed's names.

    Raises ConfigError for an accumulation that is not the program's, as transformers does.
    """
    steps = {each.name: each for each in given}
    one, other = steps.get(f"{_SECTION}{_STEPS}"), steps.get(_STEPS)
    if one and other and one.words not in (other.words, ("auto",)):
        raise ConfigError(
            f"{one.where}: {one.name} {one.words[0]} is not the {other.words[0]} of {other.where}",
            hint="leave it out of deepspeed_config",
        )
    return tuple(_renamed(given))


def _renamed(given: Iterable[Given]) -> Iterator[Given]:
    for each in given:
        name = each.name.removeprefix(_SECTION)
        if each.name == "mixed_precision" and each.words[0] in _PRECISIONS:
            yield replace(each, name=_PRECISIONS[each.words[0]], words=("true",))
        elif each.name == "mixed_precision" and each.words[0] == "no":
            continue
        elif each.name != name and name in _KEYS:
            words = ("none",) if each.words == ("null",) else each.words
            yield replace(each, name=_KEYS[name], words=words)
        elif each.name != name and name in _HARMLESS:
            continue
        elif each.name != _TYPE:
            yield each
