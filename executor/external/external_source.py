"""The unmodified module of a plan: a Hugging Face causal LM, or the result of a user's function.

A Hugging Face model is made from its config without memory for its parameters;
`ExternalSource.fill` then makes those of one part with the family's own initialisation, a function
of the seed and the part's names alone. A function's module comes with its values: every rank has
the whole of it on the host until it takes its parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Positions
from parplan.profiles.profiler.gpus import host_random
from parplan.profiles.tracing.deferred import Deferred
from parplan.profiles.tracing.traced_source import (
    ATTENTION,
    MAKING,
    RUN_ONLY,
    give_values,
    import_factory,
    require_known_type,
    require_names,
)
from parplan.profiles.tracing.user_code import explained_user_errors

Fill = Callable[[str, nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSource:
    """A module and its source of values.

    model   the module
    fill    gives the parameters of the named part their values, on the host
    styles  tensor-parallel styles of transformers for a block's linear layers, by name inside it
    """

    model: nn.Module
    fill: Fill
    styles: Mapping[str, str]


def open_source(plan: Plan, seed: int) -> ExternalSource:
    """Returns the module of `plan`.

    Raises ConfigError: no such function, not a module, transformers is missing or knows no such
    model.
    """
    module = plan.module
    if module is None:
        raise ConfigError("module: the plan names none")
    if module.huggingface is not None:
        return _hugging_face(plan, module.huggingface, seed)
    return ExternalSource(
        model=_call(module.factory or "", seed), fill=lambda name, part: None, styles={}
    )


def _hugging_face(plan: Plan, values: Mapping[str, Any], seed: int) -> ExternalSource:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "module: the plan runs a Hugging Face model, and transformers is not installed "
            f"({error})",
            hint="pip install transformers",
        ) from None
    require_names(values)
    require_known_type(values, CONFIG_MAPPING)
    with explained_user_errors(MAKING[0], hint=MAKING[1]):
        config = AutoConfig.for_model(
            values.get("model_type"), **{key: values[key] for key in values if key not in RUN_ONLY}
        )
        config.use_cache = False
        deferred = Deferred()
        with deferred, parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION[plan.training.attention]
            )
        give_values(model, deferred)
    _check_positions(plan, config)
    styles = getattr(config, "base_model_tp_plan", None) or {}
    inside = {name.split(".*.", 1)[1]: style for name, style in styles.items() if ".*." in name}
    return ExternalSource(model=model.train(), fill=_Initializer(model, seed), styles=inside)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Makes modules without memory for parameters inside this context.

    It covers large and small parameters (as accelerate's init_empty_weights).
    """
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # a parameter that is on meta already is shared, and stays one parameter
        if parameter is not None and parameter.device.type != "meta":
            on_meta = torch.empty_like(parameter, dtype=torch.float32, device="meta")
            parameter = nn.Parameter(on_meta, parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _check_positions(plan: Plan, config: Any) -> None:
    length = plan.training.seq_length
    positions = getattr(config, "max_position_embeddings", None)
    if plan.model.positions is Positions.LEARNED and positions is not None and length > positions:
        raise ConfigError(
            f"module: seq_length is {length}, the model learns {positions} positions",
            hint=f"use --seq-length {positions}",
        )


class _Initializer:
    """Runs the model's own `_init_weights` on one part after the other."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model = model
        self.seed = seed

    def __call__(self, name: str, part: nn.Module) -> None:
        for module in part.modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    memory = torch.empty_like(parameter, device="cpu")
                    filled = nn.Parameter(memory, parameter.requires_grad)
                    module.register_parameter(key, filled)
        with host_random(self.seed), torch.no_grad():
            self._visit(name, part, self.model._init_weights)

    def _visit(self, name: str, module: nn.Module, init: Callable[[nn.Module], None]) -> None:
        """Initialises children first, as transformers does.

        A parent may give a child's weight another scale.
        """
        init = getattr(module, "_init_weights", init)
        for key, child in module.named_children():
            self._visit(f"{name}.{key}", child, init)
        torch.default_generator.manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        init(module)


def _call(factory: str, seed: int) -> nn.Module:
    """Calls the function under `torch.manual_seed(seed)`, so all ranks get the same module."""
    with host_random(seed):
        model = import_factory(factory)()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"module: {factory} returned {type(model).__name__}, it must return a torch.nn.Module"
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32 or parameter.is_meta:
            raise ConfigError(
                f"module: parameter {name} is {parameter.dtype} on {parameter.device}, "
                "it must be fp32 and have values",
                hint=f"let {factory} make fp32; the plan's precision decides what it computes in",
            )
    return model.train()


def logits_of(output: object) -> Tensor:
    """Returns the logits [batch, sequence, vocabulary] in a module's output. Raises ConfigError."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"module: it returned {type(output).__name__}, "
            "it must return logits, or something with .logits"
        )
    return logits
