"""Memory of one device and redundant memory of a cluster, by strategies of several systems.

    # five models on 8 to 64 a100-80gb
    python benchmarks/papers/redundancy.py
    python benchmarks/papers/redundancy.py --models gpt-20b --gpus 64 --json

The systems are Megatron-LM, ZeRO, FSDP, an Alpa-like plan and ours. Megatron-LM here has no
pipeline: tensor parallelism inside the node x data parallelism, with a replicated optimizer, then
also with sequence parallelism, then also with the distributed optimizer, each at every recompute
setting. Degrees and micro-batch are once those of least peak memory, once the fastest that fit. The
Alpa-like plan is the fastest without a pipeline of any tp x dp (tp may leave the node), ZeRO stage,
and recompute of whole blocks or none, alike for all layers. Ours is searched under `memory` (least
redundant within 10 % of the fastest) and `throughput`.

The second table of a setting compares our plans, pinned to one recompute setting, with Megatron-LM
without distributed optimizer and sequence parallelism at the same recompute, GPUs and batch. Ours
are the plans under both objectives, and the fastest that needs at most 33 % of their peak
(`--memory-limit`), which proves whether a saving of 67 % within 10 % of their step exists. A saving
is 1 - ours / theirs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain

import click
from rich.console import Console

from parplan.commands.options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import fastest, leanest
from parplan.planner.baselines.uniform_strategies import (
    data_parallel_layouts,
    megatron_layouts,
    megatron_meshes,
    strategies,
)
from parplan.planner.candidates.enumeration import illegal_tensor_parallel
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.units import GIB, gib
from parplan.report.text import print_table, say

MODELS = ("gpt-1.5b", "gpt-2.5b", "gpt-8.3b", "gpt-20b", "llama2-7b")
GPUS = (8, 16, 32, 64)
LEVELS = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
WHOLE_BLOCKS = (Recompute.NONE, Recompute.FULL)
WANTED_SAVING, WANTED_RATIO = 0.67, 1.10
CLASSES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model on a number of GPUs, with its prices and the bytes that a plan may fill."""

    model: str
    gpus: int
    price_cache: PriceCache
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One system's strategy, how it was picked, its step, and memory in GiB.

    Memory is that of its fullest device and of the cluster.

    tensors_gib  the peak without context, communicators and the allocator's reserve
    """

    model: str
    gpus: int
    system: str
    recompute: str
    picked: str
    layout: str
    fits: bool
    step_s: float
    peak_gib: float
    tensors_gib: float
    redundant_gib: float
    memory_gib: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Ours against Megatron-LM at one recompute setting.

    It holds shares of memory saved, and our step over theirs.
    """

    model: str
    gpus: int
    recompute: str
    against: str
    ours: str
    peak_saving: float
    tensors_saving: float
    redundant_saving: float
    step_ratio: float

    @property
    def setting(self) -> tuple[str, int, str]:
        return self.model, self.gpus, self.recompute

    @property
    def reaches(self) -> bool:
        """Return True if both the saving and the step time reach their goals."""
        return self.peak_saving >= WANTED_SAVING and self.step_ratio <= WANTED_RATIO


def setting_of(model: str, gpus: int) -> Setting:
    """Return the setting with the model's own batch and sequence, on a100-80gb."""
    problem = request_of(TargetOptions(model=model, gpus=gpus))
    price_cache = PriceCache(problem.model, problem.training, machine_for(problem.cluster))
    limit = limit_bytes(problem.cluster, problem.training.stack, SearchOptions())
    return Setting(model=model, gpus=gpus, price_cache=price_cache, limit_bytes=limit)


def _classes(held: RankMemory) -> dict[str, float]:
    states = held.states
    sizes = (
        states.parameters,
        states.gradients,
        states.optimizer,
        held.activations,
        held.temporaries,
        held.reserve,
    )
    return {name: round(gib(size), 4) for name, size in zip(CLASSES, sizes, strict=True)}


def _layout(layout: ParallelLayout) -> str:
    return f"{layout.mesh}, b {layout.micro_batch_size}" + (
        ", sp" if layout.sequence_parallel else ""
    )


def _measure(
    setting: Setting,
    layout: ParallelLayout,
    price: StepPrice,
    system: str,
    recompute: str,
    picked: str,
) -> Measure:
    held = max(price.memory, key=lambda memory: memory.total)
    redundant_bytes = layout.mesh.ranks_per_stage * sum(rank.total for rank in price.redundant)
    return Measure(
        model=setting.model,
        gpus=setting.gpus,
        system=system,
        recompute=recompute,
        picked=picked,
        layout=_layout(layout),
        fits=held.total <= setting.limit_bytes,
        step_s=price.step_s,
        peak_gib=gib(held.total),
        tensors_gib=gib(held.allocated),
        redundant_gib=gib(redundant_bytes),
        memory_gib=_classes(held),
    )


def _picked(
    setting: Setting, strategies: tuple[Strategy, ...], system: str, recompute: str
) -> Iterator[Measure]:
    """Yield the strategy with the least peak, and the fastest of those that fit."""
    if not strategies:
        return
    lean = leanest(strategies, setting.price_cache).strategy
    yield _measure(
        setting, lean.layout, price_step(lean, setting.price_cache), system, recompute, "memory"
    )
    best = fastest(strategies, setting.price_cache, setting.limit_bytes)
    if best:
        yield _measure(setting, best.strategy.layout, best.price, system, recompute, "time")


def megatron_measures(setting: Setting) -> Iterator[Measure]:
    """Yield Megatron-LM without a pipeline.

    It has a replicated optimizer, + sequence parallelism, + distributed optimizer.
    """
    price_cache = setting.price_cache
    meshes = [
        mesh
        for mesh in megatron_meshes(
            price_cache.model, price_cache.machine.cluster, price_cache.training
        )
        if mesh.pp == 1
    ]
    for system, sequence_parallel, zero in (
        ("megatron", False, 0),
        ("megatron +sp", True, 0),
        ("megatron +sp +do", True, 1),
    ):
        layouts = [
            layout
            for layout in chain.from_iterable(
                megatron_layouts(mesh, price_cache.model, price_cache.training) for mesh in meshes
            )
            if layout.sequence_parallel == (sequence_parallel and layout.mesh.tp > 1)
        ]
        for level in LEVELS:
            yield from _picked(
                setting,
                strategies(layouts, price_cache.model.num_layers, (zero,), (level,)),
                system,
                level.value,
            )


def zero_measures(setting: Setting) -> Iterator[Measure]:
    """Yield ZeRO 1 to 3 with the best recompute, and FSDP.

    FSDP is ZeRO 3 with recompute of whole blocks or none.
    """
    price_cache = setting.price_cache
    layouts = tuple(
        data_parallel_layouts(price_cache.model, price_cache.machine.cluster, price_cache.training)
    )
    systems = (
        ("zero-1", 1, LEVELS),
        ("zero-2", 2, LEVELS),
        ("zero-3", 3, LEVELS),
        ("fsdp", 3, WHOLE_BLOCKS),
    )
    for system, zero, levels in systems:
        yield from _picked(
            setting,
            strategies(layouts, price_cache.model.num_layers, (zero,), levels),
            system,
            "best",
        )


def alpa_measures(setting: Setting) -> Iterator[Measure]:
    """Yield the fastest plan of one stage: any tp x dp, also across nodes, alike for all layers."""
    price_cache = setting.price_cache
    cluster, batch = price_cache.machine.cluster, price_cache.training.global_batch_size
    meshes = [
        Mesh(pp=1, dp=cluster.num_gpus // tp, tp=tp)
        for tp in divisors(cluster.num_gpus)
        if batch % (cluster.num_gpus // tp) == 0
        and not illegal_tensor_parallel(tp, price_cache.model, cluster, across_nodes=True)
    ]
    layouts = chain.from_iterable(
        megatron_layouts(mesh, price_cache.model, price_cache.training) for mesh in meshes
    )
    best = fastest(
        strategies(layouts, price_cache.model.num_layers, (0, 1, 2, 3), WHOLE_BLOCKS),
        price_cache,
        setting.limit_bytes,
    )
    if best:
        yield _measure(setting, best.strategy.layout, best.price, "alpa-like", "best", "time")


def _ours(
    setting: Setting,
    objective: Objective,
    level: Recompute | None,
    picked: str,
    options: SearchOptions,
) -> Measure | None:
    """Return our plan, free or pinned to one recompute setting; None if nothing fits."""
    price_cache, pins = (
        setting.price_cache,
        Constraints(recompute=None if level is None else (level,)),
    )
    try:
        plan = find_plan(
            PlanRequest(
                model=price_cache.model,
                cluster=price_cache.machine.cluster,
                training=price_cache.training,
                objective=objective,
                constraints=pins,
                options=options,
            )
        )
    except InfeasibleError:
        return None
    return _measure(
        setting,
        layout_of(plan),
        reprice(plan).price,
        "ours",
        "best" if level is None else level.value,
        picked,
    )


def our_measures(setting: Setting, level: Recompute | None) -> Iterator[Measure]:
    """Yield our plan under both objectives."""
    for objective in (Objective.MEMORY, Objective.THROUGHPUT):
        measure = _ours(setting, objective, level, objective.value, SearchOptions())
        if measure:
            yield measure


def _saving(ours: Measure, theirs: Measure) -> Saving:
    return Saving(
        model=ours.model,
        gpus=ours.gpus,
        recompute=ours.recompute,
        against=theirs.picked,
        ours=ours.picked,
        peak_saving=1 - ours.peak_gib / theirs.peak_gib,
        tensors_saving=1 - ours.tensors_gib / theirs.tensors_gib,
        redundant_saving=1 - ours.redundant_gib / theirs.redundant_gib,
        step_ratio=ours.step_s / theirs.step_s,
    )


def savings(
    setting: Setting, level: Recompute, pinned: Iterable[Measure], measures: Iterable[Measure]
) -> Iterator[Saving]:
    """Yield the savings of our plans at one recompute setting.

    They are against Megatron-LM's least peak and its fastest plan, if those fit.
    """
    ours = [row for row in pinned if row.recompute == level.value]
    for theirs in measures:
        if theirs.system == "megatron" and theirs.recompute == level.value and theirs.fits:
            third = SearchOptions(
                memory_limit_bytes=int((1 - WANTED_SAVING) * theirs.peak_gib * GIB)
            )
            limited = _ours(setting, Objective.THROUGHPUT, level, "throughput in a third", third)
            yield from (_saving(row, theirs) for row in (*ours, limited) if row)


def _print_setting(
    setting: Setting, measures: list[Measure], saved: list[Saving], out: Console
) -> None:
    batch = setting.price_cache.training.global_batch_size
    say(
        out,
        f"{setting.model} on {setting.gpus} a100-80gb, batch {batch}; GiB of the "
        "fullest device, redundant over all",
        "bold",
    )
    _print_measures(measures, out)
    _print_savings(saved, out)
    say(out)


def _print_measures(rows: list[Measure], out: Console) -> None:
    heading = (
        "system",
        "recompute",
        "picked by",
        "step s",
        "peak",
        "params",
        "grads",
        "optim",
        "activ",
        "temps",
        "reserve",
        "redundant",
        "layout",
    )
    cells = [
        (
            row.system,
            row.recompute,
            row.picked,
            f"{row.step_s:.2f}",
            f"{row.peak_gib:.1f}{'' if row.fits else ' no fit'}",
            *(f"{row.memory_gib[name]:.1f}" for name in CLASSES),
            f"{row.redundant_gib:,.0f}",
            row.layout,
        )
        for row in rows
    ]
    print_table(out, heading, cells, left=("system", "recompute", "picked by", "layout"))


def _print_savings(rows: list[Saving], out: Console) -> None:
    heading = (
        "recompute",
        "against megatron's",
        "our objective",
        "peak",
        "tensors",
        "redundant",
        "step ratio",
        "",
    )
    cells = [
        (
            row.recompute,
            "least peak" if row.against == "memory" else "fastest",
            row.ours,
            f"{100 * row.peak_saving:+.0f} %",
            f"{100 * row.tensors_saving:+.0f} %",
            f"{100 * row.redundant_saving:+.0f} %",
            f"{row.step_ratio:.2f}",
            "reached" if row.reaches else "",
        )
        for row in rows
    ]
    say(out)
    print_table(out, heading, cells, left=("recompute", "against megatron's", "our objective", ""))


def _print_summary(saved: list[Saving], measures: list[Measure], out: Console) -> None:
    """Print the settings that reach the saving.

    Also prints where another system beats both of our free plans.
    """
    say(
        out,
        f"settings with at least {100 * WANTED_SAVING:.0f} % less peak memory in at "
        f"most {WANTED_RATIO:g} of the step time",
        "bold",
    )
    for name, against in (("least peak", "memory"), ("fastest", "time")):
        here = [saving for saving in saved if saving.against == against]
        say(
            out,
            f"  against megatron's {name}: "
            f"{len({s.setting for s in here if s.reaches})} of "
            f"{len({s.setting for s in here})}",
        )
        for setting in dict.fromkeys(saving.setting for saving in here):
            say(
                out,
                f"    {'{} on {:>2}, recompute {}'.format(*setting):38}{_reached(setting, here)}",
            )
    losses = [
        f"{model} on {gpus}: {line}"
        for model, gpus in dict.fromkeys((m.model, m.gpus) for m in measures)
        for line in _losses([m for m in measures if (m.model, m.gpus) == (model, gpus) and m.fits])
    ]
    say(
        out,
        "where another system is faster than our fastest, or leaner than our leaner "
        "plan in as short a step",
        "bold",
    )
    for line in losses or ["nowhere"]:
        say(out, f"  {line}")


def _reached(setting: tuple[str, int, str], here: list[Saving]) -> str:
    """Return the plans that reach the saving, or how near the best within the step time comes."""
    rows = [saving for saving in here if saving.setting == setting]
    reached = [saving.ours for saving in rows if saving.reaches]
    if reached:
        return f"reached by {', '.join(reached)}"
    inside = max(
        (saving.peak_saving for saving in rows if saving.step_ratio <= WANTED_RATIO), default=None
    )
    return (
        "no plan within the step time"
        if inside is None
        else f"not reached; the most of our plans in time saves {100 * inside:.0f} %"
    )


def _losses(here: list[Measure]) -> Iterator[str]:
    """Yield who is faster than our fastest plan.

    Also yields who needs a lower peak than our leanest plan without a longer step.
    """
    ours = [m for m in here if m.system == "ours" and m.recompute == "best"]
    theirs = [m for m in here if m.system != "ours"]
    if not ours:
        return
    quick, lean = min(ours, key=lambda m: m.step_s), min(ours, key=lambda m: m.peak_gib)
    faster = [m for m in theirs if m.step_s < quick.step_s * (1 - 1e-6)]
    if faster:
        best = min(faster, key=lambda m: m.step_s)
        yield f"{best.system} is faster, {best.step_s:.2f} s against {quick.step_s:.2f} s"
    leaner = [
        m
        for m in theirs
        if m.peak_gib < lean.peak_gib - 0.05 and m.step_s <= lean.step_s * (1 + 1e-6)
    ]
    if leaner:
        best = min(leaner, key=lambda m: m.peak_gib)
        yield (
            f"{best.system} ({best.layout}) peaks at {best.peak_gib:.1f} GiB in {best.step_s:.2f} "
            f"s, our leaner plan at {lean.peak_gib:.1f} GiB in {lean.step_s:.2f} s"
        )


def run(setting: Setting) -> tuple[list[Measure], list[Saving]]:
    """Return all systems of a setting, our plans at each recompute setting, and the savings."""
    theirs = [*megatron_measures(setting), *zero_measures(setting), *alpa_measures(setting)]
    pinned = [measure for level in LEVELS for measure in our_measures(setting, level)]
    saved = [saving for level in LEVELS for saving in savings(setting, level, pinned, theirs)]
    return [*theirs, *our_measures(setting, None), *pinned], saved


@click.command()
@click.option(
    "--models",
    default=",".join(MODELS),
    show_default=True,
    help="Comma-separated names of `plan models`.",
)
@click.option(
    "--gpus",
    default=",".join(map(str, GPUS)),
    show_default=True,
    help="Comma-separated numbers of GPUs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON and nothing else.")
def main(models: str, gpus: str, as_json: bool) -> None:
    """Price every system in every setting, and print what each device holds."""
    out, started = Console(width=200, highlight=False, markup=False), time.monotonic()
    measures: list[Measure] = []
    all_saved: list[Saving] = []
    for setting in (
        setting_of(model, int(count)) for model in models.split(",") for count in gpus.split(",")
    ):
        here, saved = run(setting)
        measures, all_saved = [*measures, *here], [*all_saved, *saved]
        if not as_json:
            _print_setting(setting, here, saved, out)
    if as_json:
        rows = [{**asdict(row), "reaches": row.reaches} for row in all_saved]
        click.echo(
            json.dumps({"rows": [asdict(row) for row in measures], "savings": rows}, indent=2)
        )
        return
    _print_summary(all_saved, measures, out)
    say(out, f"{time.monotonic() - started:.0f} s", "dim")


if __name__ == "__main__":
    main()
