"""Options of the user beside a launcher's file: facts that it leaves open, and none that it says.

An option is written as the launcher's own argument where the file has none for its fact. At the
end the settings must have the value of every option, so that none is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Facts, Given, Words
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.settings import Settings
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.state_precision import StatePrecision

# the fact of each option, and its value
_FACTS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "--seq-length": ("seq_length", int),
    "--global-batch-size": ("global_batch_size", int),
    "--micro-batch-size": ("micro_batch_size", int),
    "--gradient-precision": ("gradient_precision", Precision),
    "--state-precision": ("state_precision", StatePrecision),
    "--optimizer": ("optimizer", Optimizer),
    "--attention": ("attention", AttentionKernel),
    "--recompute": ("recompute", Recompute),
    "--narrow-weights": ("narrow_weights", bool),
    "--expert-capacity": ("expert_capacity", float),
}
_NARROW = tuple(f"{each}" for each in ProductFormat)


@dataclass(frozen=True, slots=True)
class StatedOption:
    """An option of the user, the field of `Settings` that it is about, and its value."""

    name: str
    text: str
    fact: str
    value: Any


def options_of(stated: Mapping[str, object]) -> tuple[StatedOption, ...]:
    """Returns the options that the user gave, of those that are about settings."""
    return tuple(
        one for name, value in stated.items() if value for one in _options(name, f"{value}")
    )


def _options(name: str, text: str) -> Iterator[StatedOption]:
    if name == "--precision":
        narrow = text in _NARROW
        yield StatedOption(name, text, "precision", Precision.BF16 if narrow else Precision(text))
        yield StatedOption(name, text, "products", ProductFormat(text) if narrow else None)
    elif name in _FACTS:
        fact, value = _FACTS[name]
        yield StatedOption(name, text, fact, value(text))


def argument_of(option: StatedOption, target: Target, given: tuple[Given, ...]) -> Given | None:
    """Returns an option as the launcher's argument, None where the file has one for its fact."""
    if option.value is None or option.fact in facts_said(target, given):
        return None
    rows = (*target.stated, *target.table)
    if any(row.name == option.name for row in rows):
        return Given(option.name, (option.text,), f"{option.name} of the user")
    for row in rows:
        words = _written(row.write, option) if option.fact in row.facts else None
        if words is not None:
            return Given(row.name, words, f"{option.name} of the user")
    return None


def _written(write: Callable[[Any], Words | None], option: StatedOption) -> Words | None:
    """Returns the words of a setting that is else usual, None where they do not say it."""
    usual = Settings(blocks=(1,), precision=Precision.BF16)
    try:
        return write(replace(usual, **{option.fact: option.value}))
    except (ValueError, ArithmeticError):
        return None


def facts_said(target: Target, given: tuple[Given, ...]) -> frozenset[str]:
    """Returns the facts that the arguments of a file say, by the rows that read them."""
    last = {each.name: each for each in given}
    facts: Facts = {}
    said: set[str] = set()
    for row in target.rows:
        if row.name in last:
            try:
                found = row.read(last[row.name].words, facts)
            except (ValueError, IndexError):  # which reading the settings says
                found = {}
            facts |= found
            said |= {*row.facts, *found}
    return frozenset(said)


def require_taken(options: tuple[StatedOption, ...], settings: Settings, file: str) -> None:
    """Raises ConfigError for an option whose value the settings of a file do not have."""
    for option in options:
        value = getattr(settings, option.fact)
        if value != option.value:
            said = "none" if value is None else f"{value}"
            raise ConfigError(
                f"{option.name} {option.text}: {file} decides it, with {option.fact} {said}",
                hint=f"leave {option.name} out, or change the file",
            )
