"""DeepSpeed as accelerate's YAML says it: the keys of `deepspeed_config` by DeepSpeed's names.

Names were read in accelerate 1.15.0: commands/config/cluster.py and utils/dataclasses.py
(DeepSpeedPlugin), which writes what the section says into a configuration of its own, with values
`auto` for the rest. `deepspeed_config_file` names a JSON in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parplan.planner.export.fields.arguments import Given

_SECTION = "deepspeed_config."
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
    return section and said.get("distributed_type") == ("DEEPSPEED",)


def as_deepspeed(given: Iterable[Given]) -> tuple[Given, ...]:
    """Returns the keys by DeepSpeed's names."""
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
        elif each.name != "distributed_type":
            yield each
