"""Attacks on the plan of any request: its own figures, pinned searches, and layouts by hand.

An attack has a value of the objective, a step and a peak. It beats a plan where its value is lower
by more than the stated gap, within the memory limit and the slowdown that the request allows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from benchmarks.search.attacks.families import Asked
from parplan.commands.options.layout_options import LayoutOptions
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.requests.failures import chooses_spares, failures_of, without_goodput
from parplan.commands.requests.layouts import choices_of, layout_of
from parplan.commands.requests.requests import request_of
from parplan.commands.searching import (
    Question,
    answer,
    choosing_spares,
    described_question,
    with_failures,
)
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.deadline import cpu_deadline, cpu_s
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_goodput import plan_goodput
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Request, searched_offload
from parplan.planner.search.estimate import estimate_plan
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError, InfeasibleError, PlannerError
from parplan.profiles.units import GIB

ROUNDING = 3e-6  # relative: a plan file has six digits of a figure
DIGIT_S = 1e-6  # the last digit of the fastest step


@dataclass(frozen=True, slots=True)
class Attack:
    """A strategy or plan that fits: its value of the objective, its step and what it is."""

    kind: str
    value: float
    step_s: float
    how: str


def question_of(asked: Asked, pins: PinOptions | None = None) -> Question:
    """Return the question of a request, or of the same with other pins."""
    pins = asked.pins if pins is None else pins
    choosing = chooses_spares(asked.flags, asked.failing, described=True)
    flags = without_goodput(asked.flags, asked.failing)
    name = "parplan" if asked.target.stack == "parplan" else "none"
    request = request_of(asked.target, pins, replace(flags, time_limit=None), pools=True)
    if flags.time_limit is not None:  # of the CPU, whatever else the machine does
        request = request.until(cpu_deadline(cpu_s() + flags.time_limit))
    question = with_failures(described_question(request, flags, name), asked.failing)
    return choosing_spares(question) if choosing else question


def plan_of(asked: Asked, pins: PinOptions | None = None) -> Plan:
    """Return the plan of a request. Raises PlannerError."""
    plan, _ = answer(question_of(asked, pins))
    assert isinstance(plan, Plan), "the model is described"
    return plan


def value_of(plan: Plan, asked: Asked) -> float:
    """Return a plan's value of the objective, in seconds or GiB."""
    if asked.objective == "memory":
        return plan.predicted.redundancy_gib.total
    if asked.objective == "peak":
        return max(stage.total for stage in plan.predicted.memory_gib)
    step_s = plan.predicted.step_time_s.value
    if asked.objective == "goodput":
        failures, _ = failures_of(asked.failing, plan.cluster)
        choice = plan.search.spares
        assert choice is not None or failures is not None, "the request states failures"
        stated = choice.failures if choice else failures
        assert stated is not None
        return step_s / plan_goodput(plan, stated).share
    return step_s


def gap_of(plan: Plan) -> float:
    return plan.search.spares.gap if plan.search.spares else plan.search.gap


def faults_of(plan: Plan, asked: Asked, request: Request) -> Iterator[str]:
    """Yield what a plan breaks by its own printed figures."""
    for stage, limit in zip(plan.predicted.memory_gib, limits_gib(plan, request), strict=True):
        if stage.total > limit * (1 + ROUNDING):
            yield f"over limit: stage {stage.stage} {stage.total:.3f} GiB of {limit:.3f}"
    step_s, most_s = plan.predicted.step_time_s.value, slowest_s(plan, asked, request)
    if step_s > most_s * (1 + ROUNDING):
        yield f"over allowance: {step_s:.7g} s of {most_s:.7g}"
    again = reprice(plan).plan.predicted
    if abs(again.step_time_s.value / plan.predicted.step_time_s.value - 1) > ROUNDING:
        yield f"priced again: {again.step_time_s.value} s, not {plan.predicted.step_time_s.value}"


def limits_gib(plan: Plan, request: Request) -> list[float]:
    """Return the GiB that each pipeline rank may fill."""
    device = request.cluster.device.memory_bytes
    share = limit_bytes(request.cluster, request.training.stack, request.options) / device
    return [stage.capacity * share for stage in plan.predicted.memory_gib]


def slowest_s(plan: Plan, asked: Asked, request: Request) -> float:
    """Return the longest step that the request allows, in seconds."""
    if asked.objective not in ("memory", "peak"):
        return float("inf")
    return (plan.search.fastest_step_time_s + DIGIT_S) * (1 + request.options.max_slowdown)


def pinned(
    plan: Plan, asked: Asked, chance: random.Random, tries: int
) -> Iterator[tuple[str, Plan | PlannerError]]:
    """Yield plans of searches with one or two more pins, the plan's values among them."""
    layout, mesh = plan.pipeline, plan.mesh
    gpus = plan.cluster.num_gpus
    axes: dict[str, tuple[object, ...]] = {
        "pp": tuple(n for n in divisors(gpus) if n <= 8),
        "tp": tuple(n for n in divisors(gpus) if n <= 8),
        "dp": divisors(gpus),
        "micro_batch_size": (1, 2, 4, layout.micro_batch_size),
        "zero": (0, 1, 2, 3),
        "recompute": ("none", "selective", "full"),
        "schedule": (layout.schedule.value, *plan.training.stack.schedules),
        "sequence_parallel": (True, False),
        "mesh_order": plan.training.stack.mesh_orders,
        "virtual_stages": (1, 2, layout.virtual_stages),
        "megatron_sharding": (True,),
    }
    if plan.model.num_experts:
        axes["ep"] = axes["etp"] = tuple(n for n in divisors(gpus) if n <= 8)
    if mesh.cp > 1:
        axes["cp"] = (1, 2, 4, mesh.cp)
    base = asked.pins
    if base.offload is None and not asked.target.host_memory and not uses_host(plan):
        base = replace(base, offload=("none",))  # the host is tried where nothing fits without
    free = [name for name in axes if getattr(asked.pins, name) in (None, False)]
    for _ in range(tries):
        chosen = {
            name: chance.choice(axes[name])
            for name in chance.sample(free, chance.choice((1, 1, 2)))
        }
        pins = {
            name: value if isinstance(value, bool) else (value,) for name, value in chosen.items()
        }
        text = ", ".join(f"{name} {value}" for name, value in chosen.items())
        try:
            yield text, plan_of(asked, replace(base, **pins))  # type: ignore[arg-type]
        except PlannerError as error:
            yield text, error


def by_hand(
    request: Request, asked: Asked, chance: random.Random, tries: int, offload: bool
) -> Iterator[tuple[str, Plan]]:
    """Yield random layouts that `estimate` prices, within the pins and the memory limit."""
    gpus, stack = request.cluster.num_gpus, request.training.stack
    batch, degrees = request.training.global_batch_size, divisors(gpus)
    cp_free = asked.pins.cp or ((1, 2, 4) if request.training.seq_length >= 16384 else (1,))
    levels = request.constraints.resolved(stack).recompute or tuple(Recompute)
    stages = request.constraints.resolved().zero or (0, 1, 2, 3)
    limit_gib = limit_bytes(request.cluster, stack, request.options) / GIB
    searched = searched_offload(request.model, request.training) if offload else ()
    hosted = [None, *((what.value,) for what in searched if what is not Offload.LOOKUP)]
    for _ in range(tries):
        tp = chance.choice([n for n in degrees if n <= request.cluster.gpus_per_node])
        cp = chance.choice([n for n in cp_free if gpus % (tp * n) == 0] or [1])
        pp = chance.choice(divisors(gpus // tp // cp))
        dp = gpus // tp // cp // pp
        if batch % dp:
            continue
        layout = LayoutOptions(
            pp=pp,
            tp=tp,
            cp=cp,
            ep=chance.choice([1, *divisors(dp * tp)]) if request.model.num_experts else 1,
            micro_batch_size=chance.choice(divisors(batch // dp)),
            schedule=chance.choice(stack.schedules or ("1f1b",)) if pp > 1 else None,
            virtual_stages=1,
            zero=chance.choice(stages) if dp > 1 else 0,
            recompute=chance.choice(levels).value,
            sequence_parallel=tp > 1 and chance.random() < 0.5,
            offload=chance.choice(hosted),
        )
        if not _within(layout, asked.pins):
            continue
        try:
            plan = estimate_plan(request, layout_of(request, layout), choices_of(request, layout))
        except (ConfigError, InfeasibleError):
            continue
        if max(stage.total for stage in plan.predicted.memory_gib) <= limit_gib:
            yield _text(layout), plan


def uses_host(plan: Plan) -> bool:
    return any(stage.host > 0 for stage in plan.predicted.memory_gib)


def _within(layout: LayoutOptions, pins: PinOptions) -> bool:
    names = ("pp", "tp", "cp", "ep", "micro_batch_size", "zero", "schedule", "recompute")
    return all(
        getattr(pins, name) is None or getattr(layout, name) in getattr(pins, name)
        for name in names
    )


def _text(layout: LayoutOptions) -> str:
    changed = ((field.name, getattr(layout, field.name), field.default) for field in fields(layout))
    return ", ".join(f"{name} {value}" for name, value, default in changed if value != default)
