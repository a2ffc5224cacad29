"""Activation recompute of one layer: nothing, one operator, a list of operators, or everything."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from profiles.errors import ConfigError


def recomputed(layer: nn.Module, operators: tuple[str, ...], where: str) -> nn.Module:
    """`layer` so that the named operators run again in its backward pass. Raises ConfigError where that cannot be."""
    names = [name for name, _ in layer.named_children()]
    unknown = [name for name in operators if name not in names]
    if unknown:
        raise ConfigError(f"{where}: recompute names {unknown[0]}, the layer has {', '.join(names)}", hint="make the plan again")
    if not operators:
        return layer
    if set(operators) == set(names):
        return checkpoint_wrapper(layer)
    if operators == ("attention",):  # its output stays for the projection that reads it: the module alone is enough
        layer.register_module(operators[0], checkpoint_wrapper(layer.get_submodule(operators[0])))
        return layer
    _check_random(layer, operators, where)
    return _selective(layer, frozenset(operators))


def _check_random(layer: nn.Module, operators: tuple[str, ...], where: str) -> None:
    """What is kept does not advance the random generator in the backward pass: a mask drawn after it would be another."""
    random = [name for name, module in layer.named_children() if getattr(module, "dropout", 0.0)]
    again = [name in operators for name in random]
    if again != sorted(again, reverse=True):
        later = next(name for name in reversed(random) if name in operators)
        raise ConfigError(
            f"{where}: with dropout, {later} can only be recomputed together with what draws masks before it ({', '.join(random)})",
            hint="recompute all of them, or the whole layer")


def _selective(layer: nn.Module, operators: frozenset[str]) -> nn.Module:
    """Keep every output of the operators that are not named; the running operator is known from forward pre-hooks."""
    running = [""]

    def enter(name: str, *_: Any) -> None:
        running[0] = name

    for name, module in layer.named_children():
        module.register_forward_pre_hook(partial(enter, name), prepend=True)

    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if running[0] in operators else CheckpointPolicy.MUST_SAVE

    # an operator that is kept is kept whole, so what it writes in place is only read by functions that do not run again
    contexts = partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)
    return checkpoint_wrapper(layer, context_fn=contexts)
