"""Seeded requests of small models, and what must hold among the plans that answer them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from parplan.commands.launcher_searches import launcher_questions, search_of
from parplan.commands.next_command import runs_on_executor
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.export.exported import as_priced, nearest
from parplan.planner.export.fields.configured import Priced
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fields.losses import losses
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.launchers.best_of_each import search_each
from parplan.planner.launchers.known_launchers import EXECUTOR, LAUNCHERS
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SearchOptions
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.transformer import build_graph

MODELS = (
    "ernie-4.5-0.3b",
    "gpt-1.5b",
    "gpt-2.5b",
    "smollm3-3b",
    "phi-4-mini",
    "gpt-7.5b",
    "llama3-8b",
    "qwen3-8b",
    "granite-3-3b-a800m",
    "mixtral-tiny",
)
KINDS = ("a100-40gb", "a100-80gb", "h100-80gb", "v100-32gb")
STATE_BYTES = 18  # of one parameter in mixed precision
FILLED = 0.6  # the share of memory that states may fill, so that most launchers have a plan
PINS: Mapping[str, PinOptions] = {
    "--zero 1": PinOptions(zero=(1,)),
    "--recompute full": PinOptions(recompute=("full",)),
    "--tp 2": PinOptions(tp=(2,)),
    "--micro-batch-size 1": PinOptions(micro_batch_size=(1,)),
}
ROUNDING = 1e-5  # a plan says its step with six digits


def drawn_request(seed: int) -> TargetOptions:
    """Returns a request whose states have room on its GPUs, equal for equal seeds."""
    chance = random.Random(f"launchers {seed}")
    while True:
        target = TargetOptions(
            model=chance.choice(MODELS),
            gpus=chance.choice((8, 8, 16, 32)),
            gpu=chance.choice(KINDS),
            global_batch_size=chance.choice((32, 64, 128)),
            seq_length=chance.choice((1024, None)),
        )
        if _has_room(target):
            return target


def _has_room(target: TargetOptions) -> bool:
    request = request_of(target)
    needed = STATE_BYTES * build_graph(request.model, request.training, 1).num_parameters
    return needed <= FILLED * request.cluster.num_gpus * request.cluster.device.memory_bytes


def words_of(target: TargetOptions) -> str:
    """Returns a request as it is typed."""
    length = "" if target.seq_length is None else f" --seq-length {target.seq_length}"
    return (
        f"plan --model {target.model} --gpus {target.gpus} --gpu {target.gpu} "
        f"--global-batch-size {target.global_batch_size}{length}"
    )


def best_of_each(
    target: TargetOptions, names: tuple[str, ...], pins: PinOptions | None = None
) -> dict[str, Plan]:
    """Returns the best plan of each launcher that has one, as one command searches them."""
    questions = launcher_questions(names, target, pins or PinOptions(), SearchFlags())
    searches = {each.launcher: search_of(each, None) for each in questions}
    entries, unsearched = search_each(searches, lambda: False)
    assert not unsearched
    return {each.launcher: each.plan for each in entries if each.plan}


def beaten_by_exports(plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yields the exports that lose nothing of a plan and beat the plan of their launcher."""
    for source, plan in plans.items():
        own = as_priced(plan)
        for name, launcher in LAUNCHERS.items():
            if name == source:
                continue
            if launcher.target is None:
                there = _on_executor(plan)
            else:
                there = _without_losses(plan, own, launcher.target)
            if there is not None and _fits(there) and _trains_alike(there, plans.get(name)):
                yield from _beats(f"{source}'s at {name}", there.price.step_s, plans.get(name))


def beaten_by(others: Mapping[str, Plan], plans: Mapping[str, Plan], what: str) -> Iterator[str]:
    """Yields the plans of others that are faster than that of the same launcher by its gap."""
    for name, other in others.items():
        yield from _beats(f"{name} {what}", step_s(other), plans.get(name))


def step_s(plan: Plan) -> float:
    return plan.predicted.step_time_s.value


def _beats(what: str, other_s: float, plan: Plan | None) -> Iterator[str]:
    if plan is None:
        yield f"{what} takes {other_s:.6g} s, and the table has no plan"
    elif other_s < step_s(plan) * (1 - plan.search.gap - ROUNDING):
        yield f"{what} takes {other_s:.6g} s, the table {step_s(plan):.6g} s, {plan.search.gap:.2%}"


def _without_losses(plan: Plan, own: Priced, target: Target) -> Priced | None:
    """Returns the price of a plan at a launcher that says all of it, None at any other."""
    try:
        _, there = nearest(plan, own, target)
    except ConfigError:
        return None
    return None if losses(own, there) else there


def _on_executor(plan: Plan) -> Priced | None:
    """Returns the price of a plan's file on the own executor, None where it does not run it."""
    stack = load_stack(EXECUTOR)
    training = replace(plan.training, stack=stack, overlap_grad_reduce=stack.overlap_grad_reduce)
    there = replace(plan, training=training)
    return as_priced(there) if runs_on_executor(there) else None


def _trains_alike(there: Priced, plan: Plan | None) -> bool:
    """Returns whether an export trains in the formats that its launcher's plan has.

    A launcher has formats of its own where the request leaves them open, which an export keeps.
    """
    if plan is None:
        return True
    ours, theirs = there.price_cache.training, plan.training
    return ours.gradient_precision == theirs.gradient_precision and ours.products == theirs.products


def _fits(there: Priced) -> bool:
    """Returns whether a launcher leaves free what its searches leave free."""
    machine, training = there.price_cache.machine, there.price_cache.training
    return there.peak_bytes <= limit_bytes(machine.cluster, training.stack, SearchOptions())
