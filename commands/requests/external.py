"""Requests for an external module: the module, and the choices that the executor runs on it.

Its blocks are sharded over tensor parallel ranks by its library's own plan, in Megatron's way, or
not at all. Each block is recomputed as a whole or not at all, so lists of operators are not
searched.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_config
from parplan.profiles.models.module_source import HUGGING_FACE, ModuleSource

LEVELS = (Recompute.NONE, Recompute.FULL)


def load_module(name: str | None, model: str | None) -> ModuleSource | None:
    """Returns the module that --module names, without an import.

    `huggingface` is the module of --model's config.json; any other name is a function. Raises
    ConfigError for another form, or a model that no config.json describes.
    """
    if name is None:
        return None
    if name != HUGGING_FACE:
        return ModuleSource(factory=name)
    return ModuleSource(huggingface=dict(load_config(model or "")))


def narrowed(pins: Constraints, module: ModuleSource | None) -> Constraints:
    """Returns `pins` without the choices that the executor cannot run on `module`.

    Raises ConfigError for a pin that asks for such a choice.
    """
    if module is None:
        return pins
    if pins.recompute and not set(pins.recompute) <= set(LEVELS):
        raise ConfigError(
            "--recompute selective: the blocks of a module run again as a whole, or not",
            hint="use --recompute none,full",
        )
    if module.undivided and pins.tp and max(pins.tp) > 1:
        raise ConfigError(f"--tp {max(pins.tp)}: {module.undivided}", hint="use --tp 1")
    if pins.tp_overlap and max(pins.tp_overlap):
        raise ConfigError(
            f"--tp-overlap {max(pins.tp_overlap)}: only the executor's own blocks run as two "
            f"halves",
            hint="use --tp-overlap 0",
        )
    if pins.zero_by_operator:
        raise ConfigError(
            "--zero-by-operator: only the executor's own blocks have operators with stages",
            hint="leave it out",
        )
    if pins.offload:
        raise ConfigError(
            "only the executor's own blocks leave the device, and a host's memory is for them",
            hint="use --offload none",
        )
    tp = (1,) if module.undivided else pins.tp
    return replace(
        pins,
        tp_overlap=(0,),
        megatron_sharding=True,
        recompute=pins.recompute or LEVELS,
        tp=tp,
        offload=(),
    )
