"""Model names and files -> model specs: packaged models and families, YAML files, Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from parplan.profiles.documents.packaged_configs import (
    config_source,
    label_of,
    packaged_file,
    packaged_names,
    path_or_unknown,
    read_config,
)
from parplan.profiles.documents.plain import Limits
from parplan.profiles.documents.reader import read_json
from parplan.profiles.documents.schema import kind_text, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelEntry, ModelSpec

if TYPE_CHECKING:
    from parplan.profiles.models.families import ModelFamily

_Count = Annotated[int, Limits(ge=1)]
_FORBID = {"extra": "forbid"}
_MODEL_PREFIXES = {
    "gpt3-": "gpt-",
    "llama-2-": "llama2-",
    "llama-3-": "llama3-",
    "llama-3.1-": "llama3-",
    "llama3.1-": "llama3-",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingDefaults:
    __pydantic_config__ = _FORBID

    global_batch_size: _Count
    seq_length: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFile:
    __pydantic_config__ = _FORBID

    model: ModelSpec
    training: _TrainingDefaults
    source: str


def model_names() -> tuple[str, ...]:
    """Returns the names of the packaged models, sorted."""
    return packaged_names("models")


def family_names() -> tuple[str, ...]:
    """Returns the names of the packaged families of models, sorted."""
    return packaged_names("families")


def load_family(name_or_path: str) -> ModelFamily:
    """Returns a packaged family or that of a YAML. Raises ConfigError, as `load_model` does."""
    name = name_or_path.lower()
    from parplan.profiles.models.families import parse_family

    source = config_source("families", name, "family", name_or_path)
    return parse_family(read_config(source), label_of(source))


def family_members() -> tuple[ModelEntry, ...]:
    """Returns the members of the packaged families, except those that a packaged model hides."""
    hidden = model_names()
    return tuple(
        entry
        for name in family_names()
        for entry in load_family(name).members
        if entry.spec.name not in hidden
    )


def load_model(name_or_path: str) -> ModelEntry:
    """Returns the model of a name or a path.

    The name is that of a packaged model or of a member of a family; the path is that of a YAML, of
    a Hugging Face config.json or of the folder that holds one.
    Raises ConfigError: unknown name, unreadable or broken file (file:line), unknown keys or wrong
    types (key path).
    """
    named = _named_model(name_or_path)
    if named is not None:
        return named
    path = _model_path(name_or_path)
    if path.suffix == ".json":
        from parplan.profiles.models.huggingface import entry_from_config

        return entry_from_config(_config(path), str(path))
    return _model_from_file(path)


def find_config(name_or_path: str) -> Mapping[str, Any] | None:
    """Returns all of a Hugging Face config.json, None for a model that is described otherwise.

    Raises ConfigError, as `load_model` does.
    """
    path = None if _named_model(name_or_path) else _model_path(name_or_path)
    return _config(path) if path is not None and path.suffix == ".json" else None


def load_config(name_or_path: str) -> Mapping[str, Any]:
    """Returns all of a Hugging Face config.json.

    Raises ConfigError, as `load_model` does, and for a model that is described otherwise.
    """
    config = find_config(name_or_path)
    if config is None:
        raise ConfigError(
            f"--module huggingface needs a Hugging Face config.json, --model is {name_or_path}",
            hint="give --model PATH/config.json, or leave out --module",
        )
    return config


def _named_model(text: str) -> ModelEntry | None:
    """Returns the model of that name; a packaged model comes before a member of a family."""
    name = _model_name(text)
    if name in model_names():
        return _model_from_file(packaged_file("models", name))
    if not any(name.startswith(f"{family}-") for family in family_names()):
        return None
    return next((entry for entry in family_members() if entry.spec.name == name), None)


def _model_path(name_or_path: str) -> Path:
    known = (*model_names(), *(entry.spec.name for entry in family_members()))
    path = path_or_unknown("model", name_or_path, known)
    return path / "config.json" if os.path.isdir(path) else path


def _config(path: Path) -> Mapping[str, Any]:
    return _mapping(read_json(path), str(path))


def _model_name(name: str) -> str:
    """Returns the spelling of this catalogue: gpt-20b for `gpt3_20b` (NeMo)."""
    name = name.lower().replace("_", "-")
    for alias, prefix in _MODEL_PREFIXES.items():
        if name.startswith(alias):
            return prefix + name.removeprefix(alias)
    return name


def _mapping(body: object, where: str) -> Mapping[str, Any]:
    if not isinstance(body, Mapping):
        raise ConfigError(
            f"{where}: a model is a mapping, found {kind_text(body)}", hint="correct that file"
        )
    return body


def _model_from_file(source: Traversable) -> ModelEntry:
    body = parse(_ModelFile, read_config(source), label_of(source))
    training = body.training
    return ModelEntry(
        spec=body.model,
        global_batch_size=training.global_batch_size,
        seq_length=training.seq_length,
        source=body.source,
    )
