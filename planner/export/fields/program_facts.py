"""The facts of a run that belong to the user's program, where a launcher starts any program."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Facts, choice, number
from parplan.planner.export.fields.launcher import RecomputeChoice
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.stack import AttentionKernel

# Rows of `Target.stated`, in options of `plan read`.
PROGRAM = (
    number("--seq-length", "seq_length"),
    choice(
        "--attention",
        "attention",
        {AttentionKernel.FLASH: "flash", AttentionKernel.UNFUSED: "unfused"},
        AttentionKernel.FLASH,
    ),
)


def require_length(facts: Facts) -> None:
    """Raises ConfigError for facts without the program's sequence length."""
    if "seq_length" not in facts:
        raise ConfigError(
            "the file does not say the sequence length, which its program chooses",
            hint="state it with plan read FILE --seq-length N",
        )


def whole_recomputes(_: ModelSpec, __: int) -> Iterator[RecomputeChoice]:
    """Yields the recompute of programs with one switch: of no block, and of all."""
    for level in (Recompute.NONE, Recompute.FULL):
        yield {"recompute": level, "recompute_modules": None}
