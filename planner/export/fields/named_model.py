"""The model that a file of the Trainer names by its release."""

from __future__ import annotations

from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.released_models import released_model
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec

# of transformers' programs and LLaMA-Factory, axolotl, ms-swift
NAMES = ("model_name_or_path", "base_model", "model", "model_id")


def named_model(given: tuple[Given, ...], file: str) -> ModelSpec:
    """Returns the model of the catalog that arguments name. Raises ConfigError."""
    named = [each for each in given if each.name.removeprefix("--") in NAMES and each.words]
    if not named:
        raise ConfigError(
            f"{file}: the file does not say its model", hint=f"plan read {file} --model NAME"
        )
    model = released_model(named[-1].words[0])
    if model is None:
        raise ConfigError(
            f"{named[-1].where}: {named[-1].words[0]} is no model of the catalog",
            hint=f"plan read {file} --model NAME, or its config.json",
        )
    return model
