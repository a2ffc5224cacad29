"""Constraints on plans for an external module, which executor/rules/layer_rules.py checks.

Loads no torch: `plan` checks them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.rules.rule import with_layer_plan
from parplan.planner.plan.plan import LayerPlan, OperatorPlacement, Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind, ModelGraph
from parplan.profiles.models.transformer import build_graph

Problem = tuple[str, str, Plan]  # the problem, the remedy, and the plan with the remedy


def module_problems(plan: Plan) -> Iterator[Problem]:
    """Yield problems of running the plan's external module with torch's parallelism.

    Yields nothing if the executor's own modules run.
    """
    if plan.module is None:
        return
    model = plan.model
    if model.padded_vocab_size != model.vocab_size:
        problem = (
            f"model: the vocabulary of {model.vocab_size} is padded to {model.padded_vocab_size}"
        )
        yield (
            problem,
            "set vocab_multiple to 1",
            replace(plan, model=replace(model, vocab_multiple=1)),
        )
    if model.num_experts:
        yield (
            f"model: {model.num_experts} experts",
            "set module to null",
            replace(plan, module=None),
        )
        return
    graph = build_graph(model, plan.training, plan.pipeline.micro_batch_size)
    for name, layer_plan in plan.layer_plans.items():
        yield from _layer_problems(plan, name, layer_plan, graph)
    if plan.mesh.tp > 1:
        yield from _tensor_parallel_problems(plan, graph)


def validate_module(plan: Plan) -> None:
    """Raise ConfigError for the first problem."""
    for problem, action, _ in module_problems(plan):
        raise ConfigError(problem, hint=action)


def _layer_problems(
    plan: Plan, name: str, layer_plan: LayerPlan, graph: ModelGraph
) -> Iterator[Problem]:
    """Yield problems of recompute and offload.

    The operators of a module are not the plan's, so a module is recomputed as a whole or not at
    all, and its saved activations stay on the device.
    """
    names = {operator.name for operator in graph.layer_class(layer_plan.layer).operators}
    whole = layer_plan.layer is LayerKind.BLOCK and set(layer_plan.recompute) == names
    if layer_plan.recompute and not whole:
        problem = (
            f"layer_plans.{name}: recompute names {', '.join(layer_plan.recompute)}, it is all "
            "operators of a block or none"
        )
        yield (
            problem,
            f"set recompute to [] on layer plan {name}",
            with_layer_plan(plan, name, recompute=()),
        )
    if layer_plan.keep_on_host:
        yield (
            f"layer_plans.{name}: keep_on_host names {', '.join(layer_plan.keep_on_host)}",
            f"set keep_on_host to [] on layer plan {name}",
            with_layer_plan(plan, name, keep_on_host=()),
        )


def _tensor_parallel_problems(plan: Plan, graph: ModelGraph) -> Iterator[Problem]:
    mesh = plan.mesh
    reason = plan.module.undivided if plan.module else None
    if reason:
        smaller = replace(mesh, dp=mesh.dp * mesh.tp, tp=1)
        yield (
            f"mesh: tp is {mesh.tp}, and {reason}",
            f"set tp to 1 and dp to {smaller.dp}",
            replace(plan, mesh=smaller),
        )
        return
    sequence = any(layer_plan.sequence_parallel for layer_plan in plan.layer_plans.values())
    for name, layer_plan in plan.layer_plans.items():
        operators = graph.layer_class(layer_plan.layer).operators
        sharding = Sharding(tp=mesh.tp, sequence_parallel=sequence)
        megatron = {
            op.name: OperatorPlacement(**asdict(placements(op, sharding))) for op in operators
        }
        wrong = [
            op for op, placement in megatron.items() if layer_plan.operators.get(op) != placement
        ]
        if wrong or layer_plan.sequence_parallel != sequence:
            uneven = layer_plan.sequence_parallel != sequence
            what = (
                "sequence_parallel differs between layers"
                if uneven
                else f"operator {wrong[0]} is not divided as Megatron does"
            )
            yield (
                f"layer_plans.{name}: {what}",
                f"divide layer plan {name} as Megatron does",
                with_layer_plan(plan, name, sequence_parallel=sequence, operators=megatron),
            )


def has_even_shards(plan: Plan) -> bool:
    """Return True if the planner's bytes are exactly those of the plan's module.

    A module may hold queries, keys, values and gates in several tensors, or transposed. The sum
    over a rank's shards is the same if dp divides all their dims; otherwise it may be a few rows
    more or less.
    """
    model, mesh = plan.model, plan.mesh
    divided = (size // mesh.tp for size in (model.q_size, model.kv_size, model.ffn_hidden_size))
    return plan.module is None or not any(size % mesh.dp for size in (model.hidden_size, *divided))
