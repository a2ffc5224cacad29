"""Rules on the model's parts, on precision, on sequences and on the tokens of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.operators.optimizers import FP32_BYTES, PLAIN_OPTIMIZERS
from parplan.executor.rules.rule import Refusal, rule, those, with_training
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Optimizer, Positions, Precision, rare_parts
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.state_precision import StatePrecision

# fields of few models that the executor's blocks have, or that another rule is about
RUN = {"blocks", "latent", "output_bias", "qk_norm", "sinks", "norm_layout", "functions"} | {
    "attention_soft_cap",
    "logit_soft_cap",
    "shared_experts",
    "expert_latent_size",
    "expert_bias",
    "router_bias",
    "mtp_layers",
    "state_space",
    "delta_rule",
    "attention_gate",
    "tower",
    "key_bias",
    "left_out",
}

ADAMS = (Optimizer.ADAM, Optimizer.ADAM_8BIT)


@rule(
    why="the executor's own blocks do not have it and would train another model",
    action="plan with --module, or choose another model",
)
def model_parts(plan: Plan) -> Iterator[Refusal]:
    model = plan.model
    if plan.module is not None:
        return
    for name, default in rare_parts(model).items():
        if name not in RUN:
            yield Refusal(
                problem=f"model: {model.name} has {name}",
                action=f"set {name} to {str(default).lower()}",
                nearest=replace(plan, model=replace(model, **{name: default})),  # type: ignore[arg-type]
            )


@rule(
    why="modules of multi-token prediction look tokens up on the device; a tied table is behind "
    "itself in their backward pass, which cannot be split then",
    action="leave the modules out",
)
def further_tokens(plan: Plan) -> Iterator[Refusal]:
    model = plan.model
    if not model.mtp_layers or plan.module is not None:
        return
    looks_up = any(Offload.LOOKUP in each.offload for each in plan.layer_plans.values())
    splits = plan.mesh.pp > 1 and layout_of(plan).splits_backward
    obstacles = {
        "a tower": model.tower is not None,
        "a token table on the host": looks_up,
        f"a tied table under {plan.pipeline.schedule}": splits and model.tied_embeddings,
    }
    found = those(obstacles)
    if found:
        yield Refusal(
            problem=f"model: {model.name} has mtp_layers with {', '.join(found)}",
            action="set mtp_layers to 0",
            nearest=replace(plan, model=replace(model, mtp_layers=0)),
        )


@rule(
    why="only torch's kernel of plain causal attention draws a mask",
    action="set dropout to 0.0",
)
def dropped_scores(plan: Plan) -> Iterator[Refusal]:
    model = plan.model
    if not model.dropout or plan.training.attention is not AttentionKernel.FLASH:
        return
    reach = any(kind.window or kind.chunk for kind in model.block_kinds)
    parts = {
        "windows": reach,
        "sinks": model.sinks,
        "a soft cap": model.attention_soft_cap > 0.0,
        "values of another width": model.value_head_dim != model.head_dim,
        "packed documents": plan.training.documents is not None,
    }
    found = those(parts)
    if found and plan.module is None:
        yield Refusal(
            problem=f"model: dropout is {model.dropout} with {', '.join(found)}",
            action=dropped_scores.action,
            nearest=replace(plan, model=replace(model, dropout=0.0)),
        )


@rule(
    why="the executor runs products in the training's precision alone",
    action="make a plan with a --precision of 16 or 32 bits",
)
def product_formats(plan: Plan) -> Iterator[Refusal]:
    if plan.training.products is not None:
        yield Refusal(
            problem=f"training: products is {plan.training.products}",
            action="leave products out",
            nearest=with_training(plan, products=None),
        )


@rule(
    why="outside of chunks gradients accumulate and are reduced in fp32, or in the type of "
    "parameters without masters",
    action="use gradients of that type",
)
def gradient_precision(plan: Plan) -> Iterator[Refusal]:
    training = plan.training
    right = Precision.FP32 if training.has_masters else training.precision
    if training.gradient_precision is not right and plan.chunks is None:
        yield Refusal(
            problem=f"training: gradient_precision is {training.gradient_precision}",
            action=f"set gradient_precision to {right}",
            nearest=with_training(plan, gradient_precision=right),
        )


@rule(
    why="Adam alone rounds its moments beside values in fp32, parameters without masters are in "
    "bf16, and chunks, tables on the host and modules have fp32 states",
    action="make a plan with --state-precision fp32",
)
def state_precision(plan: Plan) -> Iterator[Refusal]:
    training, stack = plan.training, plan.training.stack
    if stack.states is StatePrecision.FP32:
        return
    bare = training.precision is not Precision.FP32 and not training.has_masters
    narrow = stack.moment_bytes < FP32_BYTES and not bare
    looks_up = any(Offload.LOOKUP in each.offload for each in plan.layer_plans.values())
    obstacles = {
        "bytes that no precision has": stack.states is None,
        "moments in fp8": stack.states is StatePrecision.FP8_MOMENTS,
        f"parameters in {training.precision}": bare and training.precision is not Precision.BF16,
        f"the optimizer {training.optimizer}": narrow and training.optimizer not in ADAMS,
        "blocks in chunks": plan.chunks is not None,
        "a token table on the host": bare and looks_up,
        "a module that is not the executor's own": bare and plan.module is not None,
    }
    found = those(obstacles)
    if found:
        yield Refusal(
            problem=f"training.stack: the optimizer keeps {stack.master_bytes} bytes of a copy and "
            f"{stack.moment_bytes} of a moment, with {', '.join(found)}",
            action="set master_bytes and moment_bytes to 4",
            nearest=with_training(plan, stack=stack.keeping(StatePrecision.FP32)),
        )


@rule(why="the table of learned positions ends there", action="use shorter sequences")
def positions_rule(plan: Plan) -> Iterator[Refusal]:
    length, most = plan.training.seq_length, plan.model.max_seq_length
    if plan.model.positions is Positions.LEARNED and length > most:
        yield Refusal(
            problem=f"training: seq_length is {length}, the model's max_seq_length {most}",
            action=f"set seq_length to {most}",
            nearest=with_training(plan, seq_length=most, documents=None),
        )


@rule(why="rotary embedding turns pairs of features", action="turn an even share of a head")
def rotary_pairs(plan: Plan) -> Iterator[Refusal]:
    model = plan.model
    turned = int(model.head_dim * model.rotary_fraction)
    if model.positions is Positions.ROTARY and turned % 2:
        even = turned + 1 if turned < model.head_dim else turned - 1
        share = even / model.head_dim
        yield Refusal(
            problem=f"model: rotary_fraction {model.rotary_fraction} of head_dim {model.head_dim} "
            f"is {turned} features",
            action=f"set rotary_fraction to {share}",
            nearest=replace(plan, model=replace(model, rotary_fraction=share)),
        )


@rule(
    why="the executor adapts its own models, and runs no adapters of peft in a Hugging Face module",
    action="train all of the model, or do what it says",
)
def fine_tuning(plan: Plan) -> Iterator[Refusal]:
    tuning = plan.training.fine_tuning
    if tuning is None:
        return
    if plan.module is not None:
        yield Refusal(
            problem="training: fine_tuning of a module that is not the executor's own",
            action="plan it with --trace, or set module to null",
            nearest=replace(plan, module=None),
        )


@rule(
    why="states on the host are updated there by Adam alone, and a module that is not parplan's "
    "does not say which of its tensors are tables and experts",
    action="use adam",
)
def optimizer_rule(plan: Plan) -> Iterator[Refusal]:
    optimizer = plan.training.optimizer
    hosts = sorted({what for each in plan.layer_plans.values() for what in each.offload})
    if plan.module is not None and optimizer not in PLAIN_OPTIMIZERS:
        where = "the module is not parplan's"
    elif optimizer is not Optimizer.ADAM and (hosts or plan.chunks is not None):
        where = f"the host has {', '.join(hosts)}"
    else:
        return
    yield Refusal(
        problem=f"training: optimizer is {optimizer}, and {where}",
        action=f"set optimizer to {Optimizer.ADAM}",
        nearest=with_training(plan, optimizer=Optimizer.ADAM),
    )


@rule(
    why="only the executor's own blocks tell documents apart, and only where nothing else moves "
    "under their passes",
    action="plan whole sequences, or do what it says",
)
def packed_sequences(plan: Plan) -> Iterator[Refusal]:
    if plan.training.documents is None:
        return
    obstacles = {
        "a module that is not the executor's own": plan.module is not None,
        "blocks in chunks": plan.chunks is not None,
        "a tower": plan.model.tower is not None,
        f"tp_overlap {plan.pipeline.tp_overlap}": plan.pipeline.tp_overlap > 0,
        "blocks that scan a sequence": plan.model.scans,
        "activations on the host": any(each.keep_on_host for each in plan.layer_plans.values()),
    }
    found = those(obstacles)
    if found:
        yield Refusal(
            problem=f"training: sequences are packed from {plan.training.documents}, with "
            + ", ".join(found),
            action="leave out documents",
            nearest=with_training(plan, documents=None),
        )


@rule(why="the executor drops no token, and holds all that arrive", action="plan without capacity")
def dropless(plan: Plan) -> Iterator[Refusal]:
    if plan.model.num_experts and plan.training.expert_capacity:
        yield Refusal(
            problem=f"training: expert_capacity is {plan.training.expert_capacity:g}",
            action="set expert_capacity to 0",
            nearest=with_training(plan, expert_capacity=0.0),
        )


TRAINING = (
    model_parts,
    further_tokens,
    dropped_scores,
    product_formats,
    fine_tuning,
    gradient_precision,
    state_precision,
    positions_rule,
    rotary_pairs,
    optimizer_rule,
    dropless,
    packed_sequences,
)
