"""The strategies of operators as tables, with the reason why each illegal strategy is rejected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from parplan.costmodels.operators.sharding import Splits
from parplan.planner.layer_options.operator_strategies import OperatorStrategies, PricedStrategy
from parplan.profiles.units import MIB, US_PER_S
from parplan.report.json_result import JsonResult
from parplan.report.text import print_table, say

HEADING = (
    "split by",
    "compute us",
    "ending us",
    "params MiB",
    "grads MiB",
    "optim MiB",
    "made MiB",
    "temps MiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """A legal strategy of an operator, priced for one micro-batch on one GPU.

    splits   dims that the axes split, outermost first
    """

    splits: tuple[str, ...]
    forward_s: float
    backward_s: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    temporary_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedStrategy:
    """A strategy of an operator that is not legal, and why."""

    splits: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """The strategies of an operator of a layer.

    recomputable   whether its saved tensors may be computed again
    kept_bytes     bytes of saved tensors that the host may hold
    copy_s         seconds to copy them there
    """

    layer: str
    operator: str
    recomputable: bool
    kept_bytes: float
    copy_s: float
    legal: tuple[StrategyRow, ...]
    rejected: tuple[RejectedStrategy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategiesDocument(JsonResult):
    """The strategies of every operator."""

    operators: tuple[OperatorRow, ...]


def print_strategies(
    operators: Iterable[OperatorStrategies], out: Console, axes: str, notes: Iterable[str] = ()
) -> None:
    """Print one table an operator, fastest strategy first, behind the notes.

    Times are forward and backward of one micro-batch on one GPU.
    """
    say(
        out,
        f"strategies over the {axes}; what lies between operators is priced by placement pair",
        "bold",
    )
    for note in notes:
        say(out, note, "dim")
    for operator in operators:
        say(out)
        note = "keep or recompute" if operator.recomputable else "keep only"
        host = (
            f"; {operator.kept_bytes / MIB:,.1f} MiB to the host in "
            f"{operator.copy_s * US_PER_S:,.0f} us"
            if operator.kept_bytes
            else ""
        )
        counts = f"{len(operator.legal)} legal ({note}), {len(operator.rejected)} rejected"
        say(out, f"{operator.layer}.{operator.operator.name}: {counts}{host}")
        rows = sorted(operator.legal, key=lambda s: s.price.forward_s + s.price.backward_s)
        cells = [_cells(strategy.splits, _numbers(strategy)) for strategy in rows]
        print_table(out, HEADING, cells, left=("split by",))
        for rejected in operator.rejected:
            say(out, f"    not {text(rejected.splits)}: {rejected.reason}", "dim")


def text(splits: Splits) -> str:
    """Names the dims that the axes split, outermost first: `heads`, `heads -> sequence`, ...."""
    return ", ".join(map(str, splits))


def _numbers(strategy: PricedStrategy) -> tuple[float, ...]:
    price = strategy.price
    compute_s = price.compute.forward.value_s + price.compute.backward.value_s
    ending_s = price.ending.forward.value_s + price.ending.backward.value_s
    sizes = (
        price.states.parameters,
        price.states.gradients,
        price.states.optimizer,
        price.saved_bytes,
        price.temporary_bytes,
    )
    return compute_s * US_PER_S, ending_s * US_PER_S, *(size / MIB for size in sizes)


def _cells(splits: Splits, numbers: tuple[float, ...]) -> tuple[str, ...]:
    return (text(splits), *(f"{number:,.1f}" for number in numbers))


def strategies_document(operators: Iterable[OperatorStrategies]) -> StrategiesDocument:
    """Returns the tables for `--json`, in seconds and bytes."""
    return StrategiesDocument(operators=tuple(map(_operator_row, operators)))


def _operator_row(operator: OperatorStrategies) -> OperatorRow:
    return OperatorRow(
        layer=str(operator.layer),
        operator=operator.operator.name,
        recomputable=operator.recomputable,
        kept_bytes=operator.kept_bytes,
        copy_s=operator.copy_s,
        legal=tuple(map(_strategy_row, operator.legal)),
        rejected=tuple(
            RejectedStrategy(splits=tuple(map(str, rejected.splits)), reason=rejected.reason)
            for rejected in operator.rejected
        ),
    )


def _strategy_row(strategy: PricedStrategy) -> StrategyRow:
    price = strategy.price
    return StrategyRow(
        splits=tuple(map(str, strategy.splits)),
        forward_s=price.forward_s,
        backward_s=price.backward_s,
        parameter_bytes=price.states.parameters,
        gradient_bytes=price.states.gradients,
        optimizer_bytes=price.states.optimizer,
        saved_bytes=price.saved_bytes,
        temporary_bytes=price.temporary_bytes,
    )
