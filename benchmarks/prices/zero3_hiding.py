"""The share of ZeRO 3's traffic that measured steps hid under compute.

    python benchmarks/prices/zero3_hiding.py                # the published steps that ship
    python benchmarks/prices/zero3_hiding.py --steps FILE   # another table of measured steps
    python benchmarks/prices/zero3_hiding.py --least 0.1    # traffic of a tenth of a step or more

With T the step without anything hidden and C its gathers and reductions, both priced, a measured
step of m seconds hid (T - m) / C of them. The errors of all other prices are in that share, divided
by the traffic's part of the step C / T, so that rows with little traffic say nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
from rich.console import Console
from rich.table import Table

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice
from parplan.planner.validation.configuration import (
    Configuration,
    configuration_of,
    experiment_of,
)
from parplan.planner.validation.priced_rows import price_configuration, price_row
from parplan.planner.validation.row_cells import Row, source_of
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.machines.shipped_profiles import machine_for

WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """The traffic of one measured step, as a share of the step without hiding.

    hidden    share of the traffic that the measured step hid
    priced    share that its price hides
    """

    id: str
    kind: str
    traffic: float
    hidden: float
    priced: float


def hiding_of(row: Row) -> Hiding | None:
    """Returns the traffic of a row of ZeRO 3 that states its settings, else None."""
    priced = price_row(row, held_out=True)
    measured_s, priced_s = priced.measured_s, priced.predicted_s
    if priced.reason or priced.assumed or not measured_s or not priced_s:
        return None
    without = experiment_of(row)
    configuration = configuration_of(row, without=without)
    if configuration.zero != 3 or configuration.mesh.dp == 1:
        return None
    exposed = _exposed(configuration, without)
    traffic_s = max(exposed.ranks, key=lambda rank: rank.total.value_s).dp_comm.value_s
    return Hiding(
        id=row["id"],
        kind=_kind(row, configuration),
        traffic=traffic_s / exposed.step_s,
        hidden=(exposed.step_s - measured_s) / traffic_s,
        priced=(exposed.step_s - priced_s) / traffic_s,
    )


def _exposed(configuration: Configuration, without: str) -> StepPrice:
    """Returns the price of a configuration that hides nothing of its data parallelism."""
    training = replace(configuration.training, overlap_grad_reduce=False)
    machine = machine_for(configuration.cluster, without=without)
    return price_configuration(
        replace(configuration, training=training),
        PriceCache(configuration.model, training, machine),
    )


def _kind(row: Row, configuration: Configuration) -> str:
    cluster, stack = configuration.cluster, configuration.training.stack
    where = "nodes" if cluster.num_gpus > cluster.gpus_per_node else "one node"
    degree = "tp > 1" if configuration.mesh.tp > 1 else "tp 1"
    return f"{source_of(row)}, {stack.name}, {cluster.device.name.split('-')[0]}, {where}, {degree}"


def hiding_table(found: Iterable[Hiding], least: float) -> Table:
    """Returns a row for each kind of runs whose traffic is at least a share of the step."""
    by_kind: dict[str, list[Hiding]] = {}
    for each in found:
        by_kind.setdefault(each.kind, []).append(each)
    table = Table(box=None)
    for name in ("rows", "with traffic", "traffic", "least hidden", "median", "most", "priced"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for kind, runs in sorted(by_kind.items()):
        telling = [run for run in runs if run.traffic >= least]
        hidden = [run.hidden for run in telling]
        figures = (
            (
                statistics.median(run.traffic for run in telling),
                min(hidden),
                statistics.median(hidden),
                max(hidden),
                statistics.median(run.priced for run in telling),
            )
            if telling
            else ()
        )
        cells = [f"{figure:.2f}" for figure in figures] or ["-"] * 5
        table.add_row(str(len(runs)), str(len(telling)), *cells, kind)
    return table


@click.command()
@click.option("--steps", type=click.Path(path_type=Path, exists=True), default=None)
@click.option("--least", type=float, default=0.2, show_default=True)
def main(steps: Path | None, least: float) -> None:
    """Print the share of ZeRO 3's traffic that measured steps hid, by kind of run."""
    rows: Sequence[Row] = read_table(steps)
    found = [hiding for row in rows if (hiding := hiding_of(row)) is not None]
    Console(width=WIDTH).print(hiding_table(found, least))


if __name__ == "__main__":
    main()
