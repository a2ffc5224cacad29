"""Activation recompute of one layer: nothing, a list of operators, or everything.

What a list frees is what `parplan.costmodels.layers.recompute.kept_tensors` says: the outputs of
the named operators are not kept for the operators that read them, but made again from the named
operators' own inputs when the backward pass asks for them, through as many operators as the list
names in a row. torch's selective checkpointing keeps the outputs of all other operators instead,
views and sums included: more than no recompute at all. The attention core, whose backward pass
needs more than its input, runs again as a whole; its output stays for an output projection that is
not recomputed, as in Korthikanti's selective recompute.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from parplan.executor.memory.early_recompute import checkpointed
from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.transformer_layers import Attention
from parplan.executor.tensors import local, memory_of
from parplan.profiles.errors import ConfigError

ATTENTION = "attention"
AFTER_ATTENTION = "attention_out"  # the one operator that reads what attention gives


def recomputed(
    layer: nn.Module, operators: tuple[str, ...], where: str, recipes: Recipes | None = None
) -> nn.Module:
    """`layer` so that the named operators run again in its backward pass. Raises ConfigError where
    that cannot be.

    `recipes` are those of the layer's gathered inputs; without a full recompute they are followed
    as well.
    """
    names = [
        name
        for child, module in layer.named_children()
        for name in getattr(module, "operators", (child,))
    ]
    unknown = [name for name in operators if name not in names]
    if unknown:
        raise ConfigError(
            f"{where}: recompute names {unknown[0]}, the layer has {', '.join(names)}",
            hint="make the plan again",
        )
    if operators and set(operators) == set(names):
        return _checkpointed(layer, recipes)
    discarded = [name for name in operators if name != ATTENTION]
    _check_random(layer, discarded, where)
    if not operators and recipes is None:
        return layer
    recipes = recipes or Recipes()
    _discard_outputs(layer, discarded, recipes)
    attention = getattr(layer, ATTENTION, None)
    if ATTENTION in operators:
        again = partial(
            recipes.rerun, output_too=AFTER_ATTENTION in operators, random=bool(attention.dropout)
        )
        attention.forward = partial(again, attention.forward)
    elif attention is not None:
        _follow_copies(attention, recipes)
    if recipes.on_host is not None:
        recipes.on_host.follow(layer)
    return _watched(layer, recipes)


def _checkpointed(layer: nn.Module, recipes: Recipes | None) -> nn.Module:
    """`layer` run again as a whole: by torch, or where inputs are gathered by `recipes`, which then
    need not keep them whole.
    """
    if recipes is not None and not recipes.in_halves:
        layer.forward = partial(recipes.checkpoint, layer.forward)
        return _watched(layer, recipes)
    layer = checkpointed(layer)
    if recipes is not None and recipes.on_host is not None:
        recipes.watch(layer)  # its input is all that it keeps
    return layer


def _watched(layer: nn.Module, recipes: Recipes) -> nn.Module:
    recipes.watch(layer)
    layer.ahead = recipes.ahead
    return layer


def _check_random(layer: nn.Module, operators: list[str], where: str) -> None:
    """An output that is made again must be the same: an operator that draws a dropout mask would
    draw another.
    """
    random = [name for name in operators if getattr(_operator(layer, name), "dropout", 0.0)]
    if random:
        raise ConfigError(
            f"{where}: {random[0]} draws a dropout mask, it cannot be recomputed by itself",
            hint="recompute the whole layer, or not this",
        )


def _operator(layer: nn.Module, name: str) -> nn.Module:
    """The module of an operator: of the layer, or of its experts."""
    return (
        getattr(layer, name) if hasattr(layer, name) else layer.mixture.experts.get_submodule(name)
    )


def _discard_outputs(layer: nn.Module, operators: list[str], recipes: Recipes) -> None:
    """Let the operators of `layer` keep a recipe where they would keep an output of one of
    `operators`.
    """

    def remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recipes.remember((output,), lambda *tensors: (local(module(*tensors)),), *inputs)

    for name in operators:
        _operator(layer, name).register_forward_hook(remember)


def _follow_copies(attention: Attention, recipes: Recipes) -> None:
    """Attention keeps queries, keys and values, copies of its input where they do not lie in it as
    they are needed: when that input is not kept, neither are they.
    """
    split = attention.split

    def followed(qkv: Tensor) -> tuple[Tensor, ...]:
        parts = split(qkv)
        if recipes.active and recipes.knows(qkv):
            own = tuple(part for part in parts if memory_of(part) != memory_of(qkv))
            places = [i for i, part in enumerate(parts) if any(part is copied for copied in own)]
            recipes.remember(own, lambda again: tuple(split(again)[i] for i in places), qkv)
        return parts

    attention.split = followed
