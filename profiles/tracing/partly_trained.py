"""A Hugging Face module that is trained in part: peft's adapters, and frozen parameters.

Adapters have the factor of the executor's own (alpha = 2 rank) and no dropout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from parplan.profiles.errors import ConfigError, did_you_mean
from parplan.profiles.models.fine_tuning import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    NORMS,
    FineTuning,
)

_SCALE = 2  # alpha over rank
_CONV1D = "Conv1D"  # transformers' linear layer of GPT-2, whose weight is transposed


def train_in_part(module: nn.Module, tuning: FineTuning, num_blocks: int) -> nn.Module:
    """Adds the adapters of `tuning` to a Hugging Face module, and freezes what it does not train.

    Raises ConfigError for a target or a part that the module does not have, and for peft missing.
    """
    blocks = _blocks(module, num_blocks)
    if tuning.lora_rank:
        _inject(module, tuning, _adapted(tuning, _without_frozen(blocks, tuning)))
    for part in _frozen(module, tuning, blocks):
        part.requires_grad_(False)
    return module


Blocks = dict[str, nn.Module]  # by name, in order


def _blocks(module: nn.Module, num_blocks: int) -> Blocks:
    """Returns the blocks: the modules of the first list as long as the model is deep."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_blocks:
            return {f"{name}.{number}": block for number, block in enumerate(part)}
    raise ConfigError(
        f"module: {type(module).__name__} has no list of its {num_blocks} blocks",
        hint="give a function that returns the module, with requires_grad as it shall be",
    )


def _without_frozen(blocks: Blocks, tuning: FineTuning) -> Blocks:
    return {
        name: block
        for number, (name, block) in enumerate(blocks.items())
        if not tuning.freezes_block(number)
    }


def _adapted(tuning: FineTuning, blocks: Blocks) -> dict[str, nn.Module]:
    """Returns the linear modules that get an adapter, by full names. Raises ConfigError."""
    linear = {
        f"{prefix}.{name}": part
        for prefix, block in blocks.items()
        for name, part in block.named_modules()
        if isinstance(part, nn.Linear) or _is_transposed(part)
    }
    if tuning.lora_targets == (ALL_LINEAR,):
        return linear
    known = dict.fromkeys(map(_last, linear))
    for target in tuning.lora_targets:
        if not any(name in known for name in tuning.modules_of(target)):
            raise ConfigError(
                f"--lora-targets {target} is no linear module of a block",
                hint=did_you_mean(target, known) or f"name {', '.join(known)}",
            )
    wanted = {name for target in tuning.lora_targets for name in tuning.modules_of(target)}
    return {name: part for name, part in linear.items() if _last(name) in wanted}


def _is_transposed(part: nn.Module) -> bool:
    return type(part).__name__ == _CONV1D


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _inject(module: nn.Module, tuning: FineTuning, targets: Mapping[str, nn.Module]) -> None:
    """Puts adapters beside the modules of these names, and freezes all else. Raises ConfigError."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"module: peft makes the adapters, and cannot be imported ({error})",
            hint="pip install 'parplan[peft]'",
        ) from None
    config = peft.LoraConfig(
        r=tuning.lora_rank,
        lora_alpha=_SCALE * tuning.lora_rank,
        target_modules=list(targets),
        lora_dropout=0.0,
        fan_in_fan_out=any(map(_is_transposed, targets.values())),
    )
    module.requires_grad_(False)
    peft.inject_adapter_in_model(config, module)


def _frozen(module: nn.Module, tuning: FineTuning, blocks: Blocks) -> Iterable[nn.Module]:
    """Yields the frozen parts that are named. Raises ConfigError for blocks that do not exist."""
    ends = {EMBEDDING: "get_input_embeddings", HEAD: "get_output_embeddings"}
    for part, getter in ends.items():
        end = getattr(module, getter)() if part in tuning.freeze else None
        if end is not None:
            yield end
    if NORMS in tuning.freeze:
        yield from (part for part in module.modules() if "Norm" in type(part).__name__)
    named = list(blocks.values())
    tuning.require_blocks(len(named), "the model")
    for first, last in tuning.frozen_runs:
        yield from named[first : last + 1]
