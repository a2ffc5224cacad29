"""A plan file -> the strategy it holds and its price today: a comparison needs both sides under the same prices."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.book import PriceBook
from costmodels.recompute import Recompute
from costmodels.step import StepPrice, price_step
from costmodels.strategy import Frame, LayerChoice, Strategy
from planner.assemble import assemble
from planner.plan import LayerPlan, Plan, StagePlan
from profiles.errors import ConfigError
from profiles.measured import machine_for
from profiles.model import LayerKind


@dataclass(frozen=True, slots=True)
class Repriced:
    """A plan with its predictions as they are today, and what they were made of."""

    plan: Plan
    strategy: Strategy
    price: StepPrice
    book: PriceBook


def frame_of(plan: Plan) -> Frame:
    """The outer choices of a plan."""
    pipeline = plan.pipeline
    return Frame(
        mesh=plan.mesh, schedule=pipeline.schedule, virtual_stages=pipeline.virtual_stages, micro_batch_size=pipeline.micro_batch_size,
        num_micro_batches=pipeline.num_micro_batches, sequence_parallel=any(p.sequence_parallel for p in plan.layer_plans.values()))


def _level(name: str, layer_plan: LayerPlan, book: PriceBook) -> Recompute:
    for level in Recompute:
        if book.recompute_operators(layer_plan.layer, level) == tuple(layer_plan.recompute):
            return level
    raise ConfigError(
        f"layer_plans.{name}: recompute of {', '.join(layer_plan.recompute)} has no price: known are none, selective and full",
        hint="make the plan again")


def _layers(stage: StagePlan, choices: dict[str, LayerChoice]) -> tuple[LayerChoice, ...]:
    return tuple(
        choices[run.plan] for run in stage.layers for _ in range(1 if run.blocks is None else run.blocks[1] - run.blocks[0] + 1))


def strategy_of(plan: Plan, book: PriceBook) -> Strategy:
    """The strategy that `planner/assemble.py` made a plan of. Raises ConfigError: layers missing, or a recompute without a price."""
    choices = {name: LayerChoice(p.layer, _level(name, p, book), p.zero) for name, p in plan.layer_plans.items()}
    strategy = Strategy(frame=frame_of(plan), stages=tuple(_layers(stage, choices) for stage in plan.stages))
    num_blocks = sum(choice.kind is LayerKind.BLOCK for stage in strategy.stages for choice in stage)
    if num_blocks != plan.model.num_layers or len(strategy.stages) != strategy.frame.num_virtual_stages:
        raise ConfigError(
            f"the plan has {num_blocks} blocks on {len(strategy.stages)} stages, not {plan.model.num_layers} on "
            f"{strategy.frame.num_virtual_stages}", hint="make the plan again")
    return strategy


def reprice(plan: Plan) -> Repriced:
    """The plan with every prediction made again; its record of the search stays. Raises ConfigError, as `strategy_of` does."""
    book = PriceBook(plan.model, plan.training, machine_for(plan.cluster))
    strategy = strategy_of(plan, book)
    price = price_step(strategy, book)
    return Repriced(assemble(strategy, price, plan.search, book), strategy, price, book)
