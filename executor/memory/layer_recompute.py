"""Activation recompute of one layer: nothing, a list of operators, or everything.

`parplan.costmodels.layers.recompute.saved_tensors` gives the tensors that a list frees: the outputs
of the named operators are not saved for their readers. When the backward pass reads one, it is
recomputed from the named operators' inputs, through as many operators as the list names in a row.
torch's selective checkpointing saves the outputs of all other operators instead, views and sums
included: more than no recompute at all. The attention core, whose backward pass needs more than its
input, is recomputed as a whole; its output stays for an output projection that is not recomputed,
as in Korthikanti's selective recompute.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from parplan.executor.memory.early_recompute import checkpointed
from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.attention_modules import SelfAttention
from parplan.executor.models.operators import operator_module
from parplan.executor.tensors import local, memory_of
from parplan.profiles.errors import ConfigError

ATTENTION = "attention"
# the only operator that reads the output of attention: the first of these that a block has
AFTER_ATTENTION = ("attention_gate", "attention_out")


def recomputed(
    layer: nn.Module, operators: tuple[str, ...], where: str, recipes: Recipes | None = None
) -> nn.Module:
    """Returns `layer` with recompute of the named operators in its backward pass.

    `recipes` are those of the layer's gathered inputs; they apply too, except under a full
    recompute. Raises ConfigError where an operator cannot be recomputed.
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
        reader = next(name for name in AFTER_ATTENTION if hasattr(layer, name))
        rerun = partial(
            recipes.rerun, output_too=reader in operators, random=bool(attention.dropout)
        )
        attention.forward = partial(rerun, attention.forward)
    elif attention is not None:
        _follow_copies(attention, recipes)
    if recipes.on_host is not None:
        recipes.on_host.follow(layer)
    return _watched(layer, recipes)


def _checkpointed(layer: nn.Module, recipes: Recipes | None) -> nn.Module:
    """Recomputes `layer` as a whole.

    Recipes of gathered inputs do so without saving them whole; without recipes torch does.
    """
    if recipes is not None and not recipes.in_halves:
        layer.forward = partial(recipes.checkpoint, layer.forward)
        return _watched(layer, recipes)
    layer = checkpointed(layer)
    if recipes is not None and recipes.on_host is not None:
        recipes.watch(layer)  # it saves only its input
    return layer


def _watched(layer: nn.Module, recipes: Recipes) -> nn.Module:
    recipes.watch(layer)
    layer.ahead = recipes.ahead
    return layer


def _check_random(layer: nn.Module, operators: list[str], where: str) -> None:
    """Refuses an operator that draws a dropout mask.

    A recomputed output must be identical, and the operator would draw another mask.
    """
    random = [name for name in operators if getattr(_operator(layer, name), "dropout", 0.0)]
    if random:
        raise ConfigError(
            f"{where}: {random[0]} draws a dropout mask, it cannot be recomputed by itself",
            hint="recompute the whole layer, or not this",
        )


def _operator(layer: nn.Module, name: str) -> nn.Module:
    """Returns the module of an operator. Raises ConfigError for one that has no module of its own.

    Such an operator is a part of a mixture of experts.
    """
    module = operator_module(layer, name)
    if module is None:
        raise ConfigError(
            f"recompute names {name}, which cannot run again by itself",
            hint="recompute the whole layer, or not this",
        )
    return module


def _discard_outputs(layer: nn.Module, operators: list[str], recipes: Recipes) -> None:
    """Saves recipes in place of the outputs of `operators`."""

    def remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recipes.remember((output,), lambda *tensors: (local(module(*tensors)),), *inputs)

    for name in operators:
        _operator(layer, name).register_forward_hook(remember)


def _follow_copies(attention: SelfAttention, recipes: Recipes) -> None:
    """Gives the copies that attention makes of its input the recipe of that input.

    Attention saves queries, keys and values, which are copies where the input does not hold them in
    the layout of the kernel. They are saved only where the input is.
    """
    split = attention.split

    def followed(*read: Tensor) -> tuple[Tensor, ...]:
        parts = split(*read)
        if recipes.active and any(map(recipes.knows, read)):
            given = set(map(memory_of, read))
            copied = [i for i, part in enumerate(parts) if memory_of(part) not in given]

            def some(of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return tuple(of[i] for i in copied)

            recipes.remember(some(parts), lambda *made: some(split(*made)), *read)
        return parts

    attention.split = followed
