"""The plan as JSON values, and the JSON Schema of the plan file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parplan.costmodels.usage.goodput import Failures
from parplan.planner.launchers.best_of_each import LauncherPlan, LauncherTable
from parplan.planner.plan.plan import PLAN_VERSION, Plan
from parplan.planner.plan.plan_file import plan_to_document
from parplan.planner.plan.plan_goodput import plan_failures, plan_goodput
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.documents.schema import document, json_schema, output_schema
from parplan.profiles.machines.machine_catalog import cluster_schema
from parplan.profiles.machines.pool_documents import unequal_schema
from parplan.report.plans.goodput_fact import GoodputDocument, goodput_document
from parplan.report.plans.launcher_rows import layout_text

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_KINDS = (Plan, TracedPlan)
# dataclasses of the planner that the plan file replaces by a cluster document
_INSIDE = ("Cluster", "Device", "Link")


@dataclass(frozen=True, slots=True, kw_only=True)
class BesidePlan:
    """The keys that `--json` has beside those of a plan file.

    elapsed_s   seconds that the search took, where there was one
    goodput     where --mtbf is given, or where the search chose the spare nodes
    launchers   the best plan of each launcher, the fastest first, where several were searched
    """

    elapsed_s: float
    goodput: GoodputDocument
    launchers: tuple[LauncherDocument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherDocument:
    """The best plan of a launcher in short, or why it has none.

    chosen            it is the plan of the document
    tied              the prices cannot tell it from the fastest
    peak_memory_gib   of the fullest device
    layout            degrees, pipeline, ZeRO stages and recompute in words
    no_plan           the reason for no plan, None with one
    """

    name: str
    chosen: bool = False
    tied: bool = False
    step_time_s: float | None = None
    step_band: float | None = None
    peak_memory_gib: float | None = None
    gap: float | None = None
    layout: str | None = None
    no_plan: str | None = None


def _launcher_documents(table: LauncherTable) -> Iterator[LauncherDocument]:
    yield from (_launcher_document(each, table) for each in table.entries)
    for name in table.unsearched:
        yield LauncherDocument(name=name, no_plan="not searched")


def _launcher_document(each: LauncherPlan, table: LauncherTable) -> LauncherDocument:
    plan = each.plan
    if plan is None:
        reason = each.error.message if each.error else "not searched"
        return LauncherDocument(name=each.launcher, no_plan=reason)
    band = plan.predicted.error_band
    return LauncherDocument(
        name=each.launcher,
        chosen=each.launcher == table.chosen,
        tied=each.launcher in table.tied,
        step_time_s=plan.predicted.step_time_s.value,
        step_band=band.time.share if band else None,
        peak_memory_gib=max(memory.total for memory in plan.predicted.memory_gib),
        gap=plan.search.gap,
        layout=layout_text(plan),
    )


def plan_document(
    plan: Plan | TracedPlan,
    elapsed_s: float | None = None,
    failures: Failures | None = None,
    table: LauncherTable | None = None,
) -> dict[str, Any]:
    """Returns the plan file's content, with the seconds of the search when they are known.

    failures    of the cluster, for the goodput; None without it
    table       the launchers of the request, None where one was searched
    """
    body = plan_to_document(plan)
    if elapsed_s is not None:
        body["elapsed_s"] = round(elapsed_s, 3)
    failures = plan_failures(plan, failures)
    if failures is not None:
        body["goodput"] = document(goodput_document(plan_goodput(plan, failures)))
    if table is not None:
        entries = [_launcher_document(each, table) for each in table.entries]
        entries += [
            LauncherDocument(name=name, no_plan="not searched") for name in table.unsearched
        ]
        body["launchers"] = [document(each) for each in entries]
    return body


def plan_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of the plan file and of `--json`.

    It covers described models and traced modules. The cluster is that of a cluster file, with
    units in its key names.
    """
    beside = output_schema(BesidePlan)
    definitions: dict[str, Any] = beside["$defs"]
    for kind in _KINDS:
        schema = _schema(kind)
        definitions |= schema.pop("$defs")
        schema["properties"] |= beside["properties"]
        definitions[kind.__name__] = schema
    return {
        "$schema": _DRAFT,
        "title": "Plan",
        "anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in _KINDS],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }


def _schema(kind: type) -> dict[str, Any]:
    schema = json_schema(kind)
    cluster = _public(cluster_schema())
    definitions = {name: body for name, body in schema.pop("$defs").items() if name not in _INSIDE}
    definitions |= {_public(name): body for name, body in cluster.pop("$defs").items()}
    definitions["Cluster"] = cluster
    pools = _public(unequal_schema())
    definitions |= {_public(name): body for name, body in pools.pop("$defs").items()}
    definitions["UnequalCluster"] = pools
    schema["properties"]["cluster"] = {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Cluster", "UnequalCluster")]
    }
    schema["properties"]["plan_version"] = {"const": PLAN_VERSION, "title": "Plan Version"}
    return {**schema, "$defs": definitions}


def _public(value: Any) -> Any:
    """Returns the schema with `_LinkDocument` called `Link`, also in references and titles."""
    if isinstance(value, dict):
        return {key: _public(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_public(inner) for inner in value]
    if isinstance(value, str) and value.endswith("Document"):
        return value.replace("/_", "/").removeprefix("_").removesuffix("Document")
    return value
