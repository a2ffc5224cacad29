"""A plan file -> the strategy it holds and its price today: a comparison needs both sides under the same prices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.book import PriceBook
from costmodels.sharding import Placements, Splits, placed_splits
from costmodels.step import StepPrice, price_step
from costmodels.strategy import LayerChoice, Strategy
from planner.assemble import assemble
from planner.plan import LayerPlan, Plan, StagePlan, frame_of
from profiles.errors import ConfigError
from profiles.measured import machine_for
from profiles.model import LayerKind, Operator


@dataclass(frozen=True, slots=True)
class Repriced:
    """A plan with its predictions as they are today, and what they were made of."""

    plan: Plan
    strategy: Strategy
    price: StepPrice
    book: PriceBook


def book_of(plan: Plan) -> PriceBook:
    """The prices for a plan. Raises ConfigError where its layers differ in what the prices know only of all of them."""
    sharded = {layer_plan.zero_ranks for layer_plan in plan.layer_plans.values() if layer_plan.zero}
    offload = {layer_plan.offload for layer_plan in plan.layer_plans.values() if layer_plan.layer is LayerKind.BLOCK}
    if len(sharded) > 1 or len(offload) > 1:
        raise ConfigError(
            f"layer_plans: zero_ranks {sorted(map(str, sharded))} and offload {sorted(map(list, offload))} differ between layers, "
            "they can be run so but are priced alike for all", hint="give all layers one zero_ranks and one offload")
    return PriceBook(
        plan.model, plan.training, machine_for(plan.cluster), zero_ranks=next(iter(sharded), None), offload=next(iter(offload), ()))


def _choice(name: str, layer_plan: LayerPlan, plan: Plan, book: PriceBook) -> LayerChoice:
    """The choice that a layer plan was made of; its sharding where that is not the frame's."""
    frame = frame_of(plan)
    operators = book.graph(plan.pipeline.micro_batch_size).layer_class(layer_plan.layer).operators
    known = [operator.name for operator in operators]
    for field, names in (("recompute", layer_plan.recompute), ("keep_on_host", layer_plan.keep_on_host)):
        unknown = next((each for each in names if each not in known), None)
        if unknown:
            raise ConfigError(f"layer_plans.{name}: {field} names {unknown}, the layer has {', '.join(known)}", hint="make the plan again")
    own = tuple(
        (operator.name, split) for operator in operators
        if (split := _splits(operator, name, layer_plan, plan.mesh.tp)) not in (None, frame.sharding.splits(operator)))
    if own and frame.tp_overlap:
        raise ConfigError(
            f"layer_plans.{name}: {own[0][0]} is not divided as Megatron does, sub-pipelined tensor parallelism is priced for nothing else",
            hint="set pipeline.tp_overlap to 0")
    sharding = replace(frame.sharding, own=own) if own else None
    return LayerChoice(
        layer_plan.layer, tuple(layer_plan.recompute), layer_plan.zero, sharding, on_host=tuple(layer_plan.keep_on_host))


def _splits(operator: Operator, name: str, layer_plan: LayerPlan, tp: int) -> Splits | None:
    """How the tensor-parallel axis divides one operator of a layer plan, None where there is no such axis."""
    if tp == 1:
        return None
    where, placed = f"layer_plans.{name}.operators.{operator.name}", layer_plan.operators.get(operator.name)
    found = None if placed is None else placed_splits(
        operator, tp, Placements(parameters=dict(placed.parameters), input=placed.input, output=placed.output))
    if found is None:
        raise ConfigError(f"{where}: its placements are none that tp {tp} can give it", hint="make the plan again, or see plan explain")
    return found


def _layers(stage: StagePlan, choices: dict[str, LayerChoice]) -> tuple[LayerChoice, ...]:
    return tuple(
        choices[run.plan] for run in stage.layers for _ in range(1 if run.blocks is None else run.blocks[1] - run.blocks[0] + 1))


def strategy_of(plan: Plan, book: PriceBook) -> Strategy:
    """The strategy that `planner/assemble.py` made a plan of. Raises ConfigError: layers missing, or placements that are not legal."""
    choices = {name: _choice(name, p, plan, book) for name, p in plan.layer_plans.items()}
    strategy = Strategy(frame=frame_of(plan), stages=tuple(_layers(stage, choices) for stage in plan.stages))
    num_blocks = sum(choice.kind is LayerKind.BLOCK for stage in strategy.stages for choice in stage)
    if num_blocks != plan.model.num_layers or len(strategy.stages) != strategy.frame.num_virtual_stages:
        raise ConfigError(
            f"the plan has {num_blocks} blocks on {len(strategy.stages)} stages, not {plan.model.num_layers} on "
            f"{strategy.frame.num_virtual_stages}", hint="make the plan again")
    return strategy


def reprice(plan: Plan) -> Repriced:
    """The plan with every prediction made again; its record of the search stays. Raises ConfigError, as `strategy_of` does."""
    book = book_of(plan)
    strategy = strategy_of(plan, book)
    price = price_step(strategy, book)
    return Repriced(assemble(strategy, price, plan.search, book), strategy, price, book)
