"""The source of an external module, and the tensor parallelism that it can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parplan.profiles.errors import ConfigError

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
    """

    __pydantic_config__ = _FORBID

    huggingface: Mapping[str, Any] | None = None
    factory: str | None = None

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

    @property
    def text(self) -> str:
        """One phrase for a summary."""
        if self.huggingface is not None:
            return f"Hugging Face {self.huggingface.get('model_type')}"
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
