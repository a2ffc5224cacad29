"""The findings of `plan init --check`, and prices beside what nccl-tests measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from parplan.costmodels.communication.collectives import (
    POINT_TO_POINT,
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import Placement
from parplan.profiles.documents.schema import output_schema
from parplan.profiles.inventory.cluster_check import Finding, Weight
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_document, cluster_schema
from parplan.profiles.machines.measurements import Record
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.profiler.communication.comm_cases import shape_of
from parplan.profiles.units import US_PER_S, format_bytes
from parplan.report.json_result import JsonResult
from parplan.report.text import percent, print_table, say


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCollective:
    """A collective that nccl-tests measured, and its price on the cluster.

    bytes   of the message
    error   share by which the price is longer than the measurement
    """

    collective: str
    nodes: int
    ranks_per_node: int
    bytes: int
    measured_us: float
    priced_us: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsDocument(JsonResult):
    """The check of a cluster file.

    findings      what is wrong, unlikely or missing, at which key, and one action for each
    collectives   of the files of --nccl-tests
    """

    findings: tuple[Finding, ...]
    collectives: tuple[ComparedCollective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDocument(JsonResult):
    """A cluster file that was written.

    cluster   the content of the file
    """

    path: str
    cluster: Mapping[str, Any]


def draft_document(path: str, cluster: Cluster) -> DraftDocument:
    """Returns the cluster file that was written to `path` for `--json`."""
    return DraftDocument(path=path, cluster=cluster_document(cluster))


def draft_schema() -> dict[str, Any]:
    """Returns the JSON Schema of `DraftDocument`, whose cluster is that of a cluster file."""
    schema, cluster = output_schema(DraftDocument), cluster_schema()
    definitions = cluster.pop("$defs")
    schema["properties"]["cluster"] = {"$ref": f"#/$defs/{cluster['title']}"}
    return {**schema, "$defs": {**definitions, cluster["title"]: cluster}}


def findings_document(
    findings: Sequence[Finding], cluster: Cluster | None, records: Sequence[Record]
) -> FindingsDocument:
    """Returns the findings and the compared collectives for `--json`."""
    compared = tuple(_compared(cluster, records)) if cluster is not None else ()
    return FindingsDocument(findings=tuple(findings), collectives=compared)


def print_findings(
    findings: Sequence[Finding],
    cluster: Cluster | None,
    records: Sequence[Record],
    path: str,
    out: Console,
) -> None:
    """Print one block for each finding, and a table of the compared collectives."""
    for finding in findings:
        key = f"{finding.key}: " if finding.key else ""
        say(out, f"{finding.weight:<9} {key}{finding.message}")
        say(out, f"{'':<9} {finding.hint}", "dim")
    counts = {weight: sum(each.weight is weight for each in findings) for weight in Weight}
    say(out, f"{path}: " + ", ".join(f"{count} {weight}" for weight, count in counts.items()))
    if cluster is None or not records:
        return
    say(out)
    print_table(
        out,
        ("collective", "nodes", "ranks a node", "bytes", "measured us", "priced us", "error"),
        [
            (
                row.collective,
                str(row.nodes),
                str(row.ranks_per_node),
                format_bytes(row.bytes),
                f"{row.measured_us:,.1f}",
                f"{row.priced_us:,.1f}",
                percent(row.error),
            )
            for row in _compared(cluster, records)
        ],
        left=("collective",),
        indent=0,
    )


def _compared(cluster: Cluster, records: Sequence[Record]) -> Iterator[ComparedCollective]:
    """Yields one row for each measured collective, with its price on the cluster."""
    machine = machine_for(cluster)
    for record in records:
        shape, n_bytes = shape_of(record.case), record.case.size("bytes")
        assert record.measured is not None
        measured_us = record.measured.times["time"].median_us
        where = Placement(
            nodes=shape.nodes, ranks_per_node=shape.ranks_per_node, groups_per_node=shape.groups
        )
        priced_us = _price_s(record.case.work, n_bytes, where, machine) * US_PER_S
        yield ComparedCollective(
            collective=record.case.work,
            nodes=shape.nodes,
            ranks_per_node=shape.ranks_per_node,
            bytes=n_bytes,
            measured_us=measured_us,
            priced_us=priced_us,
            error=priced_us / measured_us - 1,
        )


def _price_s(work: str, n_bytes: int, where: Placement, machine: Machine) -> float:
    if work == POINT_TO_POINT:
        level = int(where.crosses_nodes)
        sharing = where.groups_per_node
        return point_to_point_time(n_bytes, level=level, sharing=sharing, machine=machine).value_s
    return collective_time(Collective(work), n_bytes, where, machine).value_s
