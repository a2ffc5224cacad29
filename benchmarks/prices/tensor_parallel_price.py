"""Measured steps beside two prices of the links inside a node, this project's and Calculon's.

    python benchmarks/prices/tensor_parallel_price.py                     # published steps alone
    python benchmarks/prices/tensor_parallel_price.py --measurements DIR  # and collectives

Steps: every shipped A100 row with tensor parallelism inside a node is priced twice, with the links
of a node as they are and `SLOWER` times as slow, which is Calculon's price of tensor parallelism in
gpt-175b (3.2 s) over ours (2.2 s). `asked` is the factor on ours with which the price would be the
measured time, so that the errors of all other prices are in it: the median of the rows.

Collectives: those of one micro-batch of gpt-175b (48 MiB) on A100 beside DIR/collectives.csv, which
is in the form of nccl-tests. Calculon's network is calculon-ai/calculon@4f81f02 systems/
a100_80g.json: 300 GB/s x 0.6, of which an all-reduce moves 2 and a gather or a reduction 1.5 times
the bytes, each times (p - 1) / p.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
from rich.console import Console
from rich.table import Table

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Placement
from parplan.planner.validation.priced_rows import price_row
from parplan.planner.validation.row_cells import Row, source_of, whole
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.off_speed import SpeedFactors
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.units import US_PER_S

SLOWER = 3.2 / 2.2
DEVICE, NODE_GPUS = "a100-80gb", 8
MEASURED_DEVICE = "A100-SXM4"  # begins its names in collectives.csv
MESSAGE_BYTES = 2 * 2048 * 12288  # bf16, one sequence of 2,048 tokens, hidden size of gpt-175b
CALCULON_BYTES_PER_S = 0.6 * 300e9
CALCULON_MOVES = {
    Collective.ALL_REDUCE: 2.0,
    Collective.ALL_GATHER: 1.5,
    Collective.REDUCE_SCATTER: 1.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One measured step: seconds that it took, priced seconds, and those with slower links."""

    source: str
    tp: int
    measured_s: float
    priced_s: float
    slower_s: float

    @property
    def links_s(self) -> float:
        """Priced seconds of the step that are in proportion to the seconds of the links."""
        return (self.slower_s - self.priced_s) / (SLOWER - 1)

    @property
    def asked(self) -> float:
        """Factor on the seconds of the links with which the price is the measured time."""
        return 1 + (self.measured_s - self.priced_s) / self.links_s


def tensor_row(row: Row) -> TensorRow | None:
    """Returns the prices of a row with tensor parallelism inside a node of A100, else None."""
    tp, inside = whole(row, "tp", 1), whole(row, "gpus_per_node", NODE_GPUS)
    if not 1 < tp <= inside or not row["gpu"].startswith("a100"):
        return None
    priced = price_row(row, held_out=True)
    if priced.reason or priced.assumed or not priced.measured_s or not priced.predicted_s:
        return None
    slower = price_row(row, held_out=True, speeds=SpeedFactors(inside_node=1 / SLOWER))
    assert slower.predicted_s is not None, "the same row on another speed"
    return TensorRow(
        source=source_of(row),
        tp=tp,
        measured_s=priced.measured_s,
        priced_s=priced.predicted_s,
        slower_s=slower.predicted_s,
    )


def step_table(found: Iterable[TensorRow]) -> Table:
    """Returns a line for each source and degree, with mean errors in percent."""
    groups: dict[tuple[str, int], list[TensorRow]] = {}
    for each in found:
        groups.setdefault((each.source, each.tp), []).append(each)
    table = Table(box=None)
    table.add_column("source")
    for name in ("tp", "rows", "of the step", "error", "bias", "slower: error", "bias", "asked"):
        table.add_column(name, justify="right")
    for (source, tp), rows in sorted(groups.items()):
        figures = []
        for seconds in ([row.priced_s for row in rows], [row.slower_s for row in rows]):
            errors = [
                priced_s / row.measured_s - 1 for priced_s, row in zip(seconds, rows, strict=True)
            ]
            figures += [
                f"{100 * statistics.fmean(map(abs, errors)):.1f} %",
                f"{100 * statistics.fmean(errors):+.1f} %",
            ]
        share = statistics.median(row.links_s / row.priced_s for row in rows)
        asked = statistics.median(row.asked for row in rows)
        table.add_row(
            source, str(tp), str(len(rows)), f"{100 * share:.0f} %", *figures, f"{asked:.2f}"
        )
    return table


def collective_table(rows: Iterable[Mapping[str, str]], machine: Machine) -> Table:
    """Returns microseconds of each collective: measured (each source), ours and Calculon's."""
    points: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for row in rows:
        of_device = row["gpu"].startswith(MEASURED_DEVICE) and not row["flag"]
        if of_device and row["nodes"] == "1" and row["collective"] in set(CALCULON_MOVES):
            key = (row["collective"], int(row["ranks_per_node"]), row["source"].split()[0])
            points.setdefault(key, []).append((float(row["bytes"]), float(row["time_us"])))
    table = Table(box=None)
    for name in ("collective", "ranks", "measured us", "ours", "Calculon", "measured by"):
        table.add_column(name, justify="left" if "col" in name or "by" in name else "right")
    for (name, ranks, source), found in sorted(points.items()):
        for measured_us in _at(MESSAGE_BYTES, sorted(found)):
            kind = Collective(name)
            place = Placement(nodes=1, ranks_per_node=ranks, groups_per_node=NODE_GPUS // ranks)
            ours_s = collective_time(kind, MESSAGE_BYTES, place, machine).value_s
            moved_bytes = CALCULON_MOVES[kind] * MESSAGE_BYTES * (ranks - 1) / ranks
            seconds = (ours_s, moved_bytes / CALCULON_BYTES_PER_S)
            prices = (f"{each * US_PER_S:.0f}" for each in seconds)
            table.add_row(name, str(ranks), f"{measured_us:.0f}", *prices, source)
    return table


def _at(n_bytes: float, points: list[tuple[float, float]]) -> Iterator[float]:
    """Yields the seconds between two measured sizes, log-linear, or nothing outside of them."""
    below = [point for point in points if point[0] <= n_bytes]
    above = [point for point in points if point[0] >= n_bytes]
    if below and above:
        (low, low_us), (high, high_us) = below[-1], above[0]
        share = math.log(n_bytes / low) / math.log(high / low) if high > low else 0.0
        yield low_us * (high_us / low_us) ** share


@click.command()
@click.option("--measurements", type=click.Path(path_type=Path, exists=True), default=None)
def main(measurements: Path | None) -> None:
    """Print steps, and collectives, beside both prices of the links inside a node."""
    console = Console(width=120)
    if measurements is not None:
        with (measurements / "collectives.csv").open(encoding="utf-8", newline="") as file:
            console.print(collective_table(csv.DictReader(file), machine_for(load_cluster(DEVICE))))
    found = [each for row in read_table() if (each := tensor_row(row)) is not None]
    console.print(step_table(found))


if __name__ == "__main__":
    main()
