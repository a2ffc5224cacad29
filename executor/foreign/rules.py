"""What the executor cannot run of a plan for a foreign module. Loads no torch: `plan` asks it too."""

from __future__ import annotations

from collections.abc import Iterator

from costmodels.sharding import Sharding, placements
from planner.plan import LayerPlan, Plan
from profiles.errors import ConfigError
from profiles.model import LayerKind, ModelGraph
from profiles.transformer import build_graph


def validate_foreign(plan: Plan) -> None:
    """Raises ConfigError for a plan with a module that torch's parts cannot run on it; a plan without one passes."""
    if plan.module is None:
        return
    if plan.model.padded_vocab_size != plan.model.vocab_size:
        raise ConfigError(
            f"module: the plan pads the vocabulary of {plan.model.vocab_size} to {plan.model.padded_vocab_size}, a module's is what it is",
            hint="plan with --module, which does not pad")
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    for name, layer_plan in plan.layer_plans.items():
        for problem in _recompute_problems(layer_plan, graph):
            raise ConfigError(f"layer_plans.{name}: {problem}", hint="plan with --module and --recompute none,full")
    if plan.mesh.tp > 1:
        _validate_tensor_parallel(plan, graph)


def _recompute_problems(layer_plan: LayerPlan, graph: ModelGraph) -> Iterator[str]:
    """A module runs again as a whole or not at all: its operators are not the plan's."""
    names = {operator.name for operator in graph.layer_class(layer_plan.layer).operators}
    if layer_plan.recompute and layer_plan.layer is not LayerKind.BLOCK:
        yield f"recompute names {layer_plan.recompute[0]}, only the blocks of a foreign module can run again"
    elif layer_plan.recompute and set(layer_plan.recompute) != names:
        yield f"recompute names {', '.join(layer_plan.recompute)}: of a foreign module all operators of a block run again, or none"


def _validate_tensor_parallel(plan: Plan, graph: ModelGraph) -> None:
    mesh, reason = plan.mesh, plan.module.undivided if plan.module else None
    if reason:
        raise ConfigError(f"mesh: tp is {mesh.tp}, and {reason}", hint=f"plan with --tp 1, as pp {mesh.pp} x dp {mesh.dp * mesh.tp} x tp 1")
    if len({layer_plan.sequence_parallel for layer_plan in plan.layer_plans.values()}) > 1:
        raise ConfigError("layer_plans: sequence_parallel differs, a foreign module has it in all layers or in none",
                          hint="plan with --module")
    for name, layer_plan in plan.layer_plans.items():
        sharding = Sharding(tp=mesh.tp, sequence_parallel=layer_plan.sequence_parallel)
        for operator in graph.layer_class(layer_plan.layer).operators:
            wanted, found = placements(operator, sharding), layer_plan.operators.get(operator.name)
            if found is None or (found.parameters, found.input, found.output) != (wanted.parameters, wanted.input, wanted.output):
                raise ConfigError(f"layer_plans.{name}: operator {operator.name} is not divided as Megatron does, a foreign module must be",
                                  hint="plan with --module, or --megatron-sharding")


def has_even_shards(plan: Plan) -> bool:
    """Whether the planner's bytes are exactly those of the plan's module.

    A module may hold queries, keys, values and gates in several tensors, or transposed: the sum over a rank's shards is the
    same where dp divides all their dims, and may be a few rows more or less where it does not.
    """
    model, mesh = plan.model, plan.mesh
    divided = (size // mesh.tp for size in (model.q_size, model.kv_size, model.ffn_hidden_size))
    return plan.module is None or not any(size % mesh.dp for size in (model.hidden_size, *divided))
