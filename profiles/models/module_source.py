"""The source of an external module, and the tensor parallelism that it can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.fine_tuning import FineTuning

_FORBID = {"extra": "forbid"}
_NAME = r"(?!__|\d)\w+"  # not __class__ and other names of Python's internals
_FACTORY = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")
HUGGING_FACE = "huggingface"
# families with a tensor-parallel plan in transformers
TENSOR_PARALLEL_FAMILIES = frozenset({"gpt_neox", "llama", "mistral", "qwen2", "starcoder2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSource:
    """The source of a module that the executor runs instead of its own, exactly one of two.

    huggingface: all of a Hugging Face config.json, of which transformers makes the causal LM
    factory: package.module:function, which is called without arguments and returns the module
    fine_tuning: the trained part of a Hugging Face model, None for all of it
    """

    __pydantic_config__ = _FORBID

    huggingface: Mapping[str, Any] | None = None
    factory: str | None = None
    fine_tuning: FineTuning | None = None

    def __post_init__(self) -> None:
        if (self.huggingface is None) == (self.factory is None):
            raise ConfigError(
                "module: it needs either huggingface or factory", hint="make the plan again"
            )
        if self.factory is not None and not _FACTORY.fullmatch(self.factory):
            raise ConfigError(
                f"module is {self.factory!r}, it must be huggingface or package.module:function",
                hint="for example --module my_package.my_model:build",
            )
        if self.fine_tuning is not None:
            self._check_fine_tuning(self.fine_tuning)

    def _check_fine_tuning(self, tuning: FineTuning) -> None:
        if self.factory is not None:
            raise ConfigError(
                f"module: {self.factory} returns the module that is trained, adapters included",
                hint="let it add them, and set requires_grad of what is frozen to False",
            )
        if tuning.base_bits != 16:
            raise ConfigError(
                "module: frozen weights of a Hugging Face module are held in the precision of "
                f"training, base_bits is {tuning.base_bits}",
                hint="leave out --base-weights",
            )

    @property
    def text(self) -> str:
        """One phrase for a summary."""
        if self.huggingface is not None:
            tuned = f" with {self.fine_tuning.text}" if self.fine_tuning is not None else ""
            return f"Hugging Face {self.huggingface.get('model_type')}{tuned}"
        return str(self.factory)

    @property
    def undivided(self) -> str | None:
        """The reason why tensor-parallel ranks cannot divide the layers, or None."""
        if self.huggingface is None:
            return "nothing says how the layers of a function's module could be divided"
        family = self.huggingface.get("model_type")
        if family in TENSOR_PARALLEL_FAMILIES:
            return None
        return f"no tensor-parallel plan is known for {family}"
