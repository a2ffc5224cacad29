"""The plan file: YAML that is self-contained, versioned and deterministic.

A file holds the plan of a described model (`plan.py`) or of a traced module (`traced_plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parplan.planner.plan.consistency import require_consistent
from parplan.planner.plan.old_plans import OLD_VERSION, in_todays_form
from parplan.planner.plan.plan import PLAN_VERSION, Plan
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.files import write_results
from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.documents.schema import document, kind_text, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.pool_documents import machine_document, machine_from_document
from parplan.profiles.models.spec import rare_defaults


def plan_to_document(plan: AnyPlan) -> dict[str, Any]:
    """Returns the plan as plain dicts, lists, strings and numbers, as the file holds it."""
    body: dict[str, Any] = document(plan)
    for layer_plan in body.get("layer_plans", {}).values():
        for rare in ("own_zero", "block", "tower"):
            if not layer_plan[rare]:  # few plans have any
                del layer_plan[rare]
    for stage in body["stages"]:
        if not stage.get("pool", "equal"):
            del stage["pool"]
    for part in ("training", "module", "search"):
        for rare in ("fine_tuning", "documents", "launcher", "robust"):
            if (body.get(part) or {}).get(rare, "") is None:
                del body[part][rare]
    for each in (body, *body["search"]["runners_up"]):
        if not each["pipeline"]["micro_batches_of_replicas"]:
            del each["pipeline"]["micro_batches_of_replicas"]
    if isinstance(plan, Plan):
        if plan.batch_share is None:
            del body["batch_share"]
        for name in rare_defaults(plan.model):
            del body["model"][name]
    body["cluster"] = machine_document(plan.cluster)
    return body


def plan_to_yaml(plan: AnyPlan) -> str:
    """Returns the plan as YAML; the same plan always gives the same text."""
    return yaml.safe_dump(
        plan_to_document(plan), sort_keys=False, default_flow_style=None, width=120
    )


def write_plan(plan: AnyPlan, path: Path) -> Path | None:
    """Writes the plan atomically: a reader sees the old file or the new one.

    Returns the name under which another plan that was there is kept, as `write_result` does.
    Raises ConfigError.
    """
    return write_plans({path: plan})[path]


def write_plans(plans: Mapping[Path, AnyPlan]) -> dict[Path, Path | None]:
    """Writes plans, all or none; returns the names that keep other plans, as `write_results` does.

    Raises ConfigError.
    """
    texts = {path: plan_to_yaml(plan) for path, plan in plans.items()}
    return write_results(texts, hint="choose another file with --output")


def read_plan(path: Path) -> Plan:
    """Reads the plan of a described model.

    Raises ConfigError where the file is not readable, is not YAML or has another version, where
    keys are unknown or missing, and where parts of the plan contradict each other.
    """
    return plan_from_document(load_plan(path), str(path))


def read_any_plan(path: Path) -> AnyPlan:
    """Reads a plan of either kind. Raises ConfigError as `read_plan` does."""
    return any_plan_from_document(load_plan(path), str(path))


def load_plan(path: Path) -> Any:
    """Returns the document in a file. Raises ConfigError where it is not readable or not YAML."""
    return read_yaml(
        path, hints=Hints("make a plan with: plan --model NAME --gpus N", "make the plan again")
    )


def any_plan_from_document(body: Any, where: str) -> AnyPlan:
    """Returns the plan of either kind in a document. Raises ConfigError with `where`."""
    checked = checked_document(body, where)
    kind: type[AnyPlan] = TracedPlan if "traced" in checked else Plan
    plan = parse(kind, checked, where)
    require_consistent(plan, where)
    return plan


def plan_from_document(body: Any, where: str) -> Plan:
    """Returns the plan of a described model in a document. Raises ConfigError with `where`."""
    plan = any_plan_from_document(body, where)
    if isinstance(plan, TracedPlan):
        raise ConfigError(
            f"{where}: it is the plan of a traced module, this needs one of a described model",
            hint="plan show and plan check --execute take plans of traced modules",
        )
    return plan


def checked_document(body: Any, where: str) -> dict[str, Any]:
    """Returns the document in today's form and its cluster parsed. Raises ConfigError."""
    if not isinstance(body, dict):
        raise ConfigError(
            f"{where}: a plan is a mapping, found {kind_text(body)}", hint="make the plan again"
        )
    version = body.get("plan_version")
    version_text = "missing" if version is None else repr(version)
    if version not in (OLD_VERSION, PLAN_VERSION):
        raise ConfigError(
            f"{where}: plan_version is {version_text}, this parplan reads {OLD_VERSION} "
            f"and {PLAN_VERSION}",
            hint="make the plan again with this version",
        )
    upgraded = in_todays_form(body, where)
    if "cluster" in upgraded:
        upgraded["cluster"] = machine_from_document(upgraded["cluster"], f"{where}: cluster")
    return upgraded
