"""Rules on precision and sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.executor.rules.rule import Refusal, rule
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import Positions, Precision


@rule(
    why="the executor has no fp8 products and would run 16-bit ones",
    action="make a plan without --fp8",
)
def fp8(plan: Plan) -> Iterator[Refusal]:
    if plan.training.fp8_matmuls:
        yield Refusal(
            problem="training: fp8_matmuls is set",
            action="set fp8_matmuls to false",
            nearest=replace(plan, training=replace(plan.training, fp8_matmuls=False)),
        )


@rule(
    why="outside of chunks gradients accumulate and are reduced in fp32, which takes twice the "
    "planned bytes",
    action="use fp32 gradients",
)
def gradient_precision(plan: Plan) -> Iterator[Refusal]:
    precision = plan.training.gradient_precision
    if precision is not Precision.FP32 and plan.chunks is None:
        yield Refusal(
            problem=f"training: gradient_precision is {precision}",
            action="set gradient_precision to fp32",
            nearest=replace(
                plan, training=replace(plan.training, gradient_precision=Precision.FP32)
            ),
        )


@rule(why="the table of learned positions ends there", action="use shorter sequences")
def positions_rule(plan: Plan) -> Iterator[Refusal]:
    length, most = plan.training.seq_length, plan.model.max_seq_length
    if plan.model.positions is Positions.LEARNED and length > most:
        yield Refusal(
            problem=f"training: seq_length is {length}, the model's max_seq_length {most}",
            action=f"set seq_length to {most}",
            nearest=replace(plan, training=replace(plan.training, seq_length=most)),
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
    why="the executor trains part of its own dense models, and holds frozen weights as they "
    "compute; peft's adapters of a Hugging Face module are not run",
    action="train all of the model, or leave out what it says",
)
def fine_tuning(plan: Plan) -> Iterator[Refusal]:
    tuning = plan.training.fine_tuning
    if tuning is None:
        return
    if tuning.base_bits == 8:
        sixteen = replace(tuning, base_bits=16)
        yield Refusal(
            problem="training: fine_tuning has base_bits 8",
            action="set base_bits to 16",
            nearest=replace(plan, training=replace(plan.training, fine_tuning=sixteen)),
        )
    if plan.model.num_experts:
        yield Refusal(
            problem="training: fine_tuning of a model with experts",
            action="run it in the framework whose stack it was priced for",
        )
    if plan.module is not None:
        yield Refusal(
            problem="training: fine_tuning of a module that is not the executor's own",
            action="set module to null",
            nearest=replace(plan, module=None),
        )


TRAINING = (fp8, fine_tuning, gradient_precision, positions_rule, rotary_pairs)
