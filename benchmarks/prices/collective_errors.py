"""Prices of collectives beside public measurements, by machine, nodes, ranks and kind.

    python benchmarks/prices/collective_errors.py --measurements DIR [--largest]

DIR has collectives.csv in the form of nccl-tests. The curves of the shipped profiles were fitted to
the rows of one node; rows of several nodes are priced by the share of the NICs that GH200 nodes
reached. Prints the rows, the median of |priced / measured - 1| and of priced / measured - 1, and
the share of bytes per second that large messages reach. --largest leaves out sizes below 16 MiB.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Placement
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.units import US_PER_S

LARGE_BYTES = 2**24
MACHINES = {  # name in the table -> the packaged machine
    "A100-SXM4": "a100-80gb",
    "A100-SXM4-80GB": "a100-80gb",
    "B200-SXM-180GB": "b200-180gb",
    "B300-SXM": "b300-270gb",
    "GB200-186GB": "gb200-186gb",
    "GB300": "gb300-279gb",
    "GH200-96GB": "gh200-96gb",
    "H100-SXM5-80GB": "h100-80gb",
    "H200-SXM-141GB": "h200-141gb",
    "L40S": "l40s-48gb",
    "MI200": "mi250x-64gb",
    "RTX-PRO-6000-96GB": "rtxpro6000-96gb",
    "V100-SXM2": "v100-32gb",
    "V100-SXM2-32GB": "v100-32gb",
}
Row = Mapping[str, str]


def _machine(row: Row) -> Machine:
    cluster = load_cluster(MACHINES[row["gpu"]])
    nodes = int(row["nodes"])
    if nodes > 1:
        # the nodes of the row have as many GPUs as it has ranks on each
        part = int(row["ranks_per_node"]) / cluster.gpus_per_node
        nics = max(1, round(cluster.nics_per_node * part))
        gpus = int(row["ranks_per_node"])
        cluster = replace(cluster, gpus_per_node=gpus, nics_per_node=nics, hosts_per_node=1)
    return machine_for(replace(cluster, nodes=nodes))


def _deviations(rows: list[Row]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields the key of a line and priced / measured - 1 of a row."""
    for row in rows:
        where = Placement(
            nodes=int(row["nodes"]), ranks_per_node=int(row["ranks_per_node"]), groups_per_node=1
        )
        kind = Collective(row["collective"])
        priced_s = collective_time(kind, int(row["bytes"]), where, _machine(row)).value_s
        key = (row["gpu"], row["nodes"], row["ranks_per_node"], row["collective"], row["flag"])
        yield key, priced_s * US_PER_S / float(row["time_us"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measurements", type=Path, required=True, action="append")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--several-nodes", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for directory in options.measurements:
        with (directory / "collectives.csv").open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    rows = [
        row
        for row in rows
        if row["gpu"] in MACHINES
        and row["collective"] in set(Collective)
        and (int(row["bytes"]) >= LARGE_BYTES or not options.largest)
        and (int(row["nodes"]) > 1 or not options.several_nodes)
    ]
    lines: dict[tuple[str, ...], list[float]] = {}
    for key, deviation in _deviations(rows):
        lines.setdefault(key, []).append(deviation)
    print(
        f"{'gpu':<18}{'nodes':>6}{'ranks':>6}  {'collective':<16}{'rows':>5}{'error':>8}{'bias':>8}"
    )
    for (gpu, nodes, ranks, kind, flag), found in sorted(lines.items()):
        error, bias = statistics.median(map(abs, found)), statistics.median(found)
        shown = f"{gpu:<18}{nodes:>6}{ranks:>6}  {kind:<16}{len(found):>5}"
        print(f"{shown}{100 * error:>7.1f}%{100 * bias:>+7.1f}%  {flag}".rstrip())


if __name__ == "__main__":
    main()
