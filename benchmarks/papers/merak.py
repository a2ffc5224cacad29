"""Merak's techniques in turn, beside Megatron-LM and DeepSpeed at their best, on 64 RTX 3090.

    # four GPT models, a batch of 128 sequences
    python benchmarks/papers/merak.py
    python benchmarks/papers/merak.py --models gpt-8.3b --global-batch-size 512 --json

Lai et al. 2023 (Merak, IEEE TPDS 34(5), doi:10.1109/TPDS.2023.3247001, arXiv:2206.04959) report
speed-ups of up to 1.42, 1.39, 1.43 and 1.61 over the 3D parallelism frameworks of the time on 64
GPUs. Every row here is the fastest of its space that fits, proven, with the same prices, memory
margin and software for all. Nothing is run: every number is predicted and analytic.

The baselines choose their degrees, micro-batch and ZeRO stage (0 or 1) themselves. Our rows begin
like the paper with 1F1B and full recompute, and add one technique a row; a row may use all
techniques of the rows before it, or fewer. A gain is the step of the previous row over the row's
own, so it holds in this order alone: time that an earlier technique has hidden, a later one cannot
hide.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import click
from rich.console import Console

from parplan.commands.options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.merak_runtime import (
    ZEROS,
    last_keeps_all,
    least_recompute,
    one_chunk_layouts,
    overlapped,
    shifted,
    without_pipeline,
)
from parplan.planner.baselines.optimum import fastest
from parplan.planner.baselines.systems import price_baseline
from parplan.planner.baselines.uniform_strategies import strategies
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import (
    Candidates,
    SearchRecord,
    Status,
)
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.stack import EVERY_RECOMPUTE, EVERY_SCHEDULE
from parplan.report.names import (
    blocks_by_plan,
    graph_of,
    pipeline_phrases,
    recompute_names,
    zero_text,
)
from parplan.report.text import print_table, say, seconds_text

PUBLISHED = {"gpt-1.5b": 1.42, "gpt-2.5b": 1.39, "gpt-8.3b": 1.43, "gpt-20b": 1.61}
GPUS = 64
GPU = "rtx3090-24gb"
SEQ_LENGTH = 1024
STACK = "megatron-lm-2021"
FULL_RECOMPUTE = "1F1B, all recomputed"
BASELINES = {
    "Megatron-LM 1F1B": "megatron-1f1b",
    "Megatron-LM interleaved": "megatron-interleaved",
    "DeepSpeed 3D": "deepspeed-3d",
}
SEARCH = "+ full search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system or technique with its fastest plan in words.

    gain  the previous row's step over this one's, for techniques alone
    """

    model: str
    system: str
    plan: str
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_gib: float
    seconds: float
    gain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on the cluster, with its prices and the bytes that a plan may fill of a device.

    tp  the techniques' tp if it is pinned
    """

    model: str
    price_cache: PriceCache
    limit_bytes: float
    tp: int | None = None


def setting_of(model: str, global_batch_size: int, stack: str, tp: int | None) -> Setting:
    """Return the setting with fp16 and fp16 gradients, which the step copies to fp32.

    Megatron-LM and DeepSpeed train in fp16 so.
    """
    problem = request_of(
        TargetOptions(
            model=model,
            gpus=GPUS,
            gpu=GPU,
            global_batch_size=global_batch_size,
            seq_length=SEQ_LENGTH,
            precision="fp16",
            gradient_precision="fp16",
            stack=stack,
        )
    )
    # Merak's runtime has schedules that no stack of its year has.
    runtime = replace(problem.training.stack, schedules=EVERY_SCHEDULE, recompute=EVERY_RECOMPUTE)
    price_cache = PriceCache(
        problem.model, replace(problem.training, stack=runtime), machine_for(problem.cluster)
    )
    limit = limit_bytes(problem.cluster, problem.training.stack, SearchOptions())
    return Setting(model=model, price_cache=price_cache, limit_bytes=limit, tp=tp)


def techniques(setting: Setting) -> Iterator[tuple[str, Callable[[], Iterator[Strategy]]]]:
    """Yield the strategies that each technique adds, on equal stages."""
    price_cache, num_layers = setting.price_cache, setting.price_cache.model.num_layers
    plain = tuple(
        layout for layout in one_chunk_layouts(price_cache) if setting.tp in (None, layout.mesh.tp)
    )
    halves = tuple(overlapped(plain, price_cache))
    yield FULL_RECOMPUTE, lambda: iter(strategies(plain, num_layers, ZEROS, (Recompute.FULL,)))
    yield "+ shifted critical path", lambda: last_keeps_all(shifted(plain), num_layers)
    yield "+ stage-aware recompute", lambda: _with_knob(setting, plain)
    yield "+ sub-pipelining", lambda: _with_knob(setting, halves)


def _with_knob(setting: Setting, layouts: Sequence[ParallelLayout]) -> Iterator[Strategy]:
    yield from without_pipeline(layouts, setting.price_cache)
    yield from least_recompute(
        (*layouts, *shifted(layouts)), setting.price_cache, setting.limit_bytes
    )


def plan_text(plan: Plan) -> str:
    """Return a plan in a line.

    It names degrees, schedule, ZeRO stage, and how many blocks are recomputed in full or in part.
    """
    names, recomputed = recompute_names(graph_of(plan)), Counter[str]()
    for name, count in blocks_by_plan(plan).items():
        recomputed[
            names.get(plan.layer_plans[name].recompute, "some operators").split(" (")[0]
        ] += count
    zeros = sorted({zero_text(layer) for layer in plan.layer_plans.values()})
    sequence = (
        ("sequence parallel",)
        if any(layer.sequence_parallel for layer in plan.layer_plans.values())
        else ()
    )
    layers = (
        f"ZeRO {'/'.join(zeros)}",
        f"recompute {' + '.join(f'{name} {count}' for name, count in recomputed.items())}",
    )
    return ", ".join(
        (str(plan.mesh), *pipeline_phrases(plan.pipeline, plan.mesh), *sequence, *layers)
    )


def _row(
    setting: Setting, system: str, plan: Plan, started: float, before: Row | None = None
) -> Row:
    predicted = plan.predicted
    step_s = predicted.step_time_s.value
    return Row(
        model=setting.model,
        system=system,
        plan=plan_text(plan),
        step_s=step_s,
        mfu=predicted.mfu.value,
        tokens_per_s_per_gpu=predicted.tokens_per_s_per_gpu.value,
        peak_gib=max(stage.total for stage in predicted.memory_gib),
        seconds=round(time.monotonic() - started, 1),
        gain=before.step_s / step_s if before else None,
    )


def _assembled(strategy: Strategy, price: StepPrice, price_cache: PriceCache) -> Plan:
    record = SearchRecord(
        objective=Objective.THROUGHPUT,
        status=Status.OPTIMAL,
        value=price.step_s,
        bound=price.step_s,
        gap=0.0,
        fastest_step_time_s=price.step_s,
        candidates=Candidates(considered=1, pruned=0, solved=1, left=0),
    )
    return assemble(strategy, price, record, price_cache)


def baseline_rows(setting: Setting) -> Iterator[Row]:
    """Yield the baselines that fit, each at its fastest."""
    for system, name in BASELINES.items():
        started = time.monotonic()
        optimum = price_baseline(name, setting.price_cache, setting.limit_bytes).optimum
        if optimum:
            yield _row(
                setting,
                system,
                _assembled(optimum.strategy, optimum.price, setting.price_cache),
                started,
            )


def technique_rows(setting: Setting) -> Iterator[Row]:
    """Yield the techniques that fit, each with all before it, then the search.

    The space of the search has all techniques.
    """
    best: tuple[StepPrice, Strategy] | None = None
    before = None
    for name, space in techniques(setting):
        started = time.monotonic()
        optimum = fastest(space(), setting.price_cache, setting.limit_bytes)
        if optimum and (best is None or optimum.price.step_s < best[0].step_s):
            best = optimum.price, optimum.strategy
        if best:
            before = _row(
                setting, name, _assembled(best[1], best[0], setting.price_cache), started, before
            )
            yield before
    started, pins = (
        time.monotonic(),
        Constraints(tp=(setting.tp,) if setting.tp else None, tp_overlap=(0, 1, 2, 3)),
    )
    try:
        plan = find_plan(
            PlanRequest(
                model=setting.price_cache.model,
                cluster=setting.price_cache.machine.cluster,
                training=setting.price_cache.training,
                constraints=pins,
            )
        )
    except InfeasibleError:
        return
    yield _row(setting, SEARCH, plan, started, before)


def summary(rows: list[Row]) -> dict[str, object]:
    """Return the speed-ups of the last row beside the published ones.

    They are over each baseline, over the best baseline and over our first row.
    """
    ours, baselines = rows[-1], [row for row in rows if row.system in BASELINES]
    best = min(baselines, key=lambda row: row.step_s)
    return {
        "model": ours.model,
        "best_baseline": best.system,
        "speedup_over_best": best.step_s / ours.step_s,
        "speedup": {row.system: row.step_s / ours.step_s for row in rows if row is not ours},
        "gains": {row.system: row.gain for row in rows if row.gain},
        "published_up_to": PUBLISHED.get(ours.model),
    }


def _print(setting: Setting, rows: list[Row], out: Console) -> None:
    training, ours = setting.price_cache.training, rows[-1]
    tokens = f"{training.global_batch_size} x {training.seq_length} tokens"
    say(out, f"{setting.model} on {GPUS} {GPU}, {tokens}, fp16; predicted, analytic", "bold")
    heading = ("system", "step", "ours faster", "gain", "tokens/s/GPU", "MFU", "peak GiB", "plan")
    cells = [
        (
            row.system,
            seconds_text(row.step_s),
            "" if row is ours else f"{row.step_s / ours.step_s:.2f} x",
            f"{row.gain:.3f} x" if row.gain else "",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            f"{100 * row.mfu:.1f} %",
            f"{row.peak_gib:.1f}",
            row.plan,
        )
        for row in rows
    ]
    print_table(out, heading, cells, left=("system", "plan"))
    speedups = summary(rows)
    published = (
        f"published: up to {speedups['published_up_to']} x"
        if speedups["published_up_to"]
        else "none published"
    )
    say(
        out,
        f"  {speedups['speedup_over_best']:.2f} x the best baseline, "
        f"{speedups['best_baseline']}; {published}",
    )
    say(out)


@click.command()
@click.option(
    "--models",
    default=",".join(PUBLISHED),
    show_default=True,
    help="Comma-separated names of `plan models`.",
)
@click.option(
    "--global-batch-size",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Sequences in a step; an assumption.",
)
@click.option(
    "--stack", default=STACK, show_default=True, help="Software that is priced, for all rows."
)
@click.option(
    "--tp",
    type=click.IntRange(1),
    help="Tensor parallel degree of the techniques, which else choose it; baselines are free.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON and nothing else.")
def main(models: str, global_batch_size: int, stack: str, tp: int | None, as_json: bool) -> None:
    """Price the baselines and every technique for each model."""
    out, started = Console(width=170, highlight=False, markup=False), time.monotonic()
    every: list[list[Row]] = []
    for model in models.split(","):
        setting = setting_of(model, global_batch_size, stack, tp)
        every.append([*baseline_rows(setting), *technique_rows(setting)])
        if not as_json:
            _print(setting, every[-1], out)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "kind": "analytic",
                    "gpus": GPUS,
                    "gpu": GPU,
                    "seq_length": SEQ_LENGTH,
                    "global_batch_size": global_batch_size,
                    "stack": stack,
                    "tp": tp,
                    "rows": [asdict(row) for rows in every for row in rows],
                    "summaries": [summary(rows) for rows in every],
                },
                indent=2,
            )
        )
        return
    say(out, f"{time.monotonic() - started:.0f} s", "dim")


if __name__ == "__main__":
    main()
