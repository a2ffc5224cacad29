"""The plan file: YAML that is self-contained, versioned and deterministic.

A file holds the plan of a described model (`plan.py`) or of a traced module (`traced_plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from parplan.planner.plan.consistency import require_consistent, require_consistent_traced
from parplan.planner.plan.plan import PLAN_VERSION, Plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import Hints, read_yaml
from parplan.profiles.documents.schema import document, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import cluster_document, cluster_from_document

# Keys of `training.stack` in older files: the key and the value that they have today. A stack once
# had a single attention kernel, which was priced on every device.
RENAMED_STACK_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "flash_kernel": ("flash_kernels", lambda kernel: [{"kernel": kernel}])
}


def plan_to_document(plan: Plan | TracedPlan) -> dict[str, Any]:
    """Returns the plan as plain dicts, lists, strings and numbers, as the file holds it."""
    body: dict[str, Any] = document(plan)
    body["cluster"] = cluster_document(plan.cluster)
    return body


def plan_to_yaml(plan: Plan | TracedPlan) -> str:
    """Returns the plan as YAML; the same plan always gives the same text."""
    return yaml.safe_dump(
        plan_to_document(plan), sort_keys=False, default_flow_style=None, width=120
    )


def write_plan(plan: Plan | TracedPlan, path: Path) -> None:
    """Writes the plan atomically: a reader sees the old file or the new one. Raises ConfigError."""
    write_text(plan_to_yaml(plan), path, hint="choose another file with --output")


def read_plan(path: Path) -> Plan:
    """Reads the plan of a described model.

    Raises ConfigError where the file is not readable, is not YAML or has another version, where
    keys are unknown or missing, and where parts of the plan contradict each other.
    """
    return plan_from_document(load_plan(path), str(path))


def read_any_plan(path: Path) -> Plan | TracedPlan:
    """Reads a plan of either kind. Raises ConfigError as `read_plan` does."""
    return any_plan_from_document(load_plan(path), str(path))


def load_plan(path: Path) -> Any:
    """Returns the document in a file. Raises ConfigError where it is not readable or not YAML."""
    return read_yaml(
        path, hints=Hints("make a plan with: plan --model NAME --gpus N", "make the plan again")
    )


def any_plan_from_document(body: Any, where: str) -> Plan | TracedPlan:
    """Returns the plan of either kind in a document. Raises ConfigError with `where`."""
    if isinstance(body, dict) and "traced" in body:
        return traced_plan_from_document(body, where)
    return plan_from_document(body, where)


def plan_from_document(body: Any, where: str) -> Plan:
    """Returns the plan of a described model in a document. Raises ConfigError with `where`."""
    if isinstance(body, dict) and "shards" in body:
        raise ConfigError(
            f"{where}: it is the plan of a traced module, this needs one of a described model",
            hint="plan show and plan check --execute take plans of traced modules",
        )
    plan = parse(Plan, checked_document(body, where), where)
    require_consistent(plan, where)
    return plan


def traced_plan_from_document(body: Any, where: str) -> TracedPlan:
    """Returns the plan of a traced module in a document. Raises ConfigError with `where`."""
    plan = parse(TracedPlan, checked_document(body, where), where)
    require_consistent_traced(plan, where)
    return plan


def checked_document(body: Any, where: str) -> dict[str, Any]:
    """Returns the document with today's keys and its cluster parsed. Raises ConfigError."""
    if not isinstance(body, dict):
        raise ConfigError(
            f"{where}: a plan is a mapping, found {type(body).__name__}", hint="make the plan again"
        )
    version = body.get("plan_version")
    version_text = "missing" if version is None else repr(version)
    if version != PLAN_VERSION:
        raise ConfigError(
            f"{where}: plan_version is {version_text}, this parplan reads {PLAN_VERSION}",
            hint="make the plan again with this version",
        )
    upgraded = _upgraded(body)
    if "cluster" in upgraded:
        upgraded["cluster"] = cluster_from_document(upgraded["cluster"], f"{where}: cluster")
    return upgraded


def _upgraded(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with today's keys; a missing stack means the neutral one."""
    training = body.get("training")
    if not isinstance(training, dict):
        return dict(body)
    stack = training.get("stack", {})
    if isinstance(stack, dict):
        stack = dict(_present_key(key, value, stack) for key, value in stack.items())
    return {**body, "training": {**training, "stack": stack}}


def _present_key(key: str, value: Any, stack: Mapping[str, Any]) -> tuple[str, Any]:
    name, convert = RENAMED_STACK_KEYS.get(key, (key, None))
    if convert is None or name in stack:
        return key, value
    return name, convert(value)
