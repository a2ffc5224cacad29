"""Merak's speed-up over the best 3D framework of 2022, technique by technique, on 64 RTX 3090.

    # four GPT models, a batch of 128 sequences
    python -m benchmarks.papers.merak
    python -m benchmarks.papers.merak --models gpt-8.3b --global-batch-size 512 --json

Lai et al. 2023 (Merak, IEEE TPDS 34(5), doi:10.1109/TPDS.2023.3247001, arXiv:2206.04959) report
speed-ups of up to 1.42, 1.39, 1.43 and 1.61 over the 3D parallelism frameworks of the time on 64
GPUs. Every row is the fastest of its space that fits, proven, with the same prices, memory margin
and software for all. Nothing is run: every number is predicted and analytic.

All systems are held to what they had in June 2022: whole layers recomputed, no sequence
parallelism, un-fused attention, tensor parallelism inside a node; ZeRO 1 in DeepSpeed alone. Three
comparisons differ in the baseline:

each at its best               the best framework over all its degrees, micro-batches, interleaving
                               and recompute, against Merak over all of its own
the fastest baseline's layout  1F1B with all layers recomputed, tp of the node, in its fastest mesh
                               and micro-batch, against Merak in the same
the fastest Merak's layout     the same in the mesh and micro-batch in which Merak is fastest

The published speed-up over the predicted one is what remains unexplained.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import click
from rich.console import Console

from benchmarks.papers.merak_shares import (
    BASELINES,
    GPU,
    SEQ_LENGTH,
    STACK,
    Chain,
    Link,
    Setting,
    baselines,
    best_chain,
    same_layout_chains,
    setting_of,
    whole,
)
from parplan.costmodels.strategy import Strategy
from parplan.profiles.models.operator_graph import LayerKind
from parplan.report.text import print_table, say, seconds_text

PUBLISHED = {"gpt-1.5b": 1.42, "gpt-2.5b": 1.39, "gpt-8.3b": 1.43, "gpt-20b": 1.61}
GPUS = 64
BATCH = 128  # sequences; an assumption
BEST = "each at its best"
OF_BASELINE = "the fastest baseline's layout"
OF_MERAK = "the fastest Merak's layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A link of a comparison with its plan in words."""

    model: str
    comparison: str
    system: str
    step_s: float
    share: float | None
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The predicted speed-ups of a model by comparison, and their range over all layouts.

    over  the speed-up over each baseline that fits, each at its best
    """

    model: str
    published_up_to: float | None
    speedup: dict[str, float]
    over: dict[str, float]
    num_layouts: int
    least: float
    most: float

    def unexplained(self, speedup: float) -> float | None:
        """Return the published speed-up over the predicted one."""
        return self.published_up_to and self.published_up_to / speedup


def plan_text(strategy: Strategy) -> str:
    """Return a strategy in a line, with the recompute and the ZeRO stage of its blocks."""
    layout = strategy.layout
    blocks = [
        choice for stage in strategy.stages for choice in stage if choice.kind is LayerKind.BLOCK
    ]
    recompute = Counter(choice.recompute.name.lower() for choice in blocks)
    schedule = (str(layout.schedule),) if layout.mesh.pp > 1 else ()
    virtual = (f"{layout.virtual_stages} chunks a rank",) if layout.virtual_stages > 1 else ()
    halves = (f"halves at level {layout.tp_overlap}",) if layout.tp_overlap else ()
    return ", ".join(
        (
            str(layout.mesh),
            *schedule,
            *virtual,
            f"micro-batch {layout.micro_batch_size} x {layout.num_micro_batches}",
            *halves,
            f"ZeRO {blocks[0].zero}",
            "recompute " + " + ".join(f"{name} {count}" for name, count in recompute.items()),
        )
    )


def _row(setting: Setting, comparison: str, link: Link) -> Row:
    return Row(
        model=setting.model,
        comparison=comparison,
        system=link.name,
        step_s=link.step_s,
        share=link.share,
        plan=plan_text(link.optimum.strategy),
    )


def comparisons(setting: Setting) -> tuple[list[Row], Summary]:
    """Return the rows of the three comparisons, and what they come to."""
    same = same_layout_chains(setting)
    chains: dict[str, Chain | None] = {
        BEST: best_chain(setting),
        OF_BASELINE: same[0] if same else None,
        OF_MERAK: min(same, key=lambda links: links[-1].step_s, default=None),
    }
    found = {name: links for name, links in chains.items() if links}
    rows = [
        _row(setting, name, link)
        for name, links in found.items()
        for link in (*(baselines(setting) if name == BEST else links[:1]), *links[1:])
    ]
    every = [whole(links) for links in same]
    best = {row.system: row.step_s for row in rows if row.comparison == BEST}
    merak_s = next(reversed(best.values()), 0.0)
    return rows, Summary(
        model=setting.model,
        published_up_to=PUBLISHED.get(setting.model),
        speedup={name: whole(links) for name, links in found.items()},
        over={name: best[name] / merak_s for name in BASELINES if name in best},
        num_layouts=len(every),
        least=min(every, default=1.0),
        most=max(every, default=1.0),
    )


def sensitivity(model: str) -> Iterator[tuple[str, float | None]]:
    """Yield a change of the setting, and the speed-up with each system at its best under it.

    None where the baselines or Merak do not fit.
    """
    setting = setting_of(model, GPUS, BATCH)
    cluster = setting.price_cache.machine.cluster
    cases = {
        **{f"micro-batch {b} for all": replace(setting, micro_batch_size=b) for b in (1, 2, 4)},
        f"tp {cluster.gpus_per_node} for all": replace(setting, tp=cluster.gpus_per_node),
        f"tp {cluster.gpus_per_node} and micro-batch 2 for all": replace(
            setting, tp=cluster.gpus_per_node, micro_batch_size=2
        ),
        "all memory of a device": replace(setting, limit_bytes=float(cluster.device.memory_bytes)),
        "half the bandwidth in a node": setting_of(model, GPUS, BATCH, link_share=0.5),
        **{f"a batch of {size}": setting_of(model, GPUS, size) for size in (64, 256, 512, 1024)},
    }
    for name, case in cases.items():
        links = best_chain(case)
        yield name, whole(links) if links and len(links) > 1 else None


def _print_model(setting: Setting, rows: list[Row], summary: Summary, out: Console) -> None:
    training = setting.price_cache.training
    tokens = f"{training.global_batch_size} x {training.seq_length} tokens"
    say(out, f"{setting.model} on {GPUS} {GPU}, {tokens}, fp16; predicted, analytic", "bold")
    for comparison, speedup in summary.speedup.items():
        cells = [
            (
                row.system,
                seconds_text(row.step_s),
                f"{row.share:.3f} x" if row.share else "",
                row.plan,
            )
            for row in rows
            if row.comparison == comparison
        ]
        cells.append(("product of the shares", "", f"{speedup:.3f} x", ""))
        print_table(out, (comparison, "step", "share", "plan"), cells, left=(comparison, "plan"))
        say(out)


def _print_summaries(summaries: list[Summary], out: Console) -> None:
    cells = []
    for summary in summaries:
        over = {f"over {name} at its best": speedup for name, speedup in summary.over.items()}
        for comparison, speedup in {**summary.speedup, **over}.items():
            unexplained = summary.unexplained(speedup)
            known = ("-", "-")
            if unexplained:
                known = (f"{summary.published_up_to} x", f"{unexplained:.2f} x")
            cells.append((summary.model, comparison, f"{speedup:.2f} x", *known))
        span = f"{summary.least:.2f} to {summary.most:.2f} x"
        cells.append((summary.model, f"any of {summary.num_layouts} such layouts", span, "", ""))
    heading = ("model", "comparison", "predicted", "published, up to", "unexplained")
    print_table(out, heading, cells, left=("model", "comparison"))
    say(out)


def _print_sensitivity(models: list[str], out: Console) -> None:
    columns = [dict(sensitivity(model)) for model in models]
    names = dict.fromkeys(name for column in columns for name in column)
    cells = [
        (name, *(f"{column[name]:.2f} x" if column[name] else "-" for column in columns))
        for name in names
    ]
    print_table(out, (f"{BEST}, with", *models), cells, left=(f"{BEST}, with",))


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
    default=BATCH,
    show_default=True,
    help="Sequences in a step; an assumption.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON and nothing else.")
def main(models: str, global_batch_size: int, as_json: bool) -> None:
    """Price the baselines and every technique for each model."""
    out, started = Console(width=170, highlight=False, markup=False), time.monotonic()
    names = models.split(",")
    settings = [setting_of(name, GPUS, global_batch_size) for name in names]
    results = [comparisons(setting) for setting in settings]
    if as_json:
        document = {
            "kind": "analytic",
            "gpus": GPUS,
            "gpu": GPU,
            "seq_length": SEQ_LENGTH,
            "global_batch_size": global_batch_size,
            "stack": STACK,
            "rows": [asdict(row) for rows, _ in results for row in rows],
            "summaries": [asdict(summary) for _, summary in results],
        }
        click.echo(json.dumps(document, indent=2))
        return
    for setting, (rows, summary) in zip(settings, results, strict=True):
        _print_model(setting, rows, summary, out)
    _print_summaries([summary for _, summary in results], out)
    _print_sensitivity(names, out)
    say(out, f"{time.monotonic() - started:.0f} s", "dim")


if __name__ == "__main__":
    main()
