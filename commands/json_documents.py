"""The JSON Schema of what each command prints with `--json`, made from the records it prints.

All records are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

DRAFT = "https://json-schema.org/draft/2020-12/schema"
Source = type | Callable[[], dict[str, Any]]  # a record, or what makes the schema of a file


def json_sources() -> dict[str, tuple[Source, ...]]:
    """Returns the kinds of result that each command with `--json` has, by its name."""
    from parplan.executor.data.tokens import TokenFile
    from parplan.planner.runs.run_file import RunFile
    from parplan.profiles.machines.user_profile import profile_schema
    from parplan.report.machines import catalogue_tables as catalogue
    from parplan.report.machines.cluster_findings import FindingsDocument, draft_schema
    from parplan.report.machines.profile_diff import ProfileDiffDocument
    from parplan.report.machines.profile_document import ProfileDocument
    from parplan.report.plan_documents import plan_schema
    from parplan.report.plans.chunk_tables import ChunkLevelsDocument
    from parplan.report.plans.explanation_document import ExplanationDocument
    from parplan.report.plans.export_text import ExportDocument, WrittenFiles
    from parplan.report.plans.instruction_text import InstructionsDocument
    from parplan.report.plans.launcher_check import LauncherCheckDocument
    from parplan.report.plans.scheme_table import SchemesDocument
    from parplan.report.plans.strategy_table import StrategiesDocument
    from parplan.report.runs.check_document import DryRunDocument
    from parplan.report.runs.chunk_check_table import ChunkCheckDocument
    from parplan.report.runs.doctor_table import DoctorDocument
    from parplan.report.runs.import_table import ImportDocument
    from parplan.report.runs.parity_table import ParityDocument
    from parplan.report.runs.traced_check_document import TracedCheckDocument
    from parplan.report.searches.comparison_document import ComparisonDocument
    from parplan.report.searches.front_document import FrontDocument
    from parplan.report.searches.largest_document import LargestDocument
    from parplan.report.searches.size_table import SizesDocument
    from parplan.report.searches.sweep_table import SweepDocument
    from parplan.report.validation_document import ValidationDocument

    return {
        "plan": (plan_schema, FrontDocument),
        "calibrate": (profile_schema,),
        "check": (
            DryRunDocument,
            ParityDocument,
            LauncherCheckDocument,
            ChunkCheckDocument,
            TracedCheckDocument,
        ),
        "clusters": (catalogue.ClustersDocument,),
        "compare": (ComparisonDocument,),
        "diff": (ComparisonDocument,),
        "doctor": (DoctorDocument,),
        "estimate": (plan_schema,),
        "explain": (ExplanationDocument, StrategiesDocument),
        "export": (ExportDocument, WrittenFiles),
        "import": (ImportDocument,),
        "init": (draft_schema, FindingsDocument),
        "max-model": (LargestDocument,),
        "models": (catalogue.ModelsDocument,),
        "profile": (ProfileDocument, ProfileDiffDocument),
        "read": (plan_schema,),
        "schemes": (SchemesDocument,),
        "show": (plan_schema, RunFile, InstructionsDocument, ChunkLevelsDocument),
        "size": (SizesDocument,),
        "stacks": (catalogue.StacksDocument,),
        "sweep": (SweepDocument,),
        "tokenize": (TokenFile,),
        "validate": (ValidationDocument,),
    }


def command_schema(command: str) -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) of what a command prints with `--json`.

    Raises ConfigError for a command that is unknown or has no `--json`.
    """
    from parplan.profiles.errors import unknown_name_error

    sources = json_sources()
    if command not in sources:
        raise unknown_name_error("command with --json", command, sources)
    return {"$schema": DRAFT, "title": f"plan {command} --json", **_any_of(sources[command])}


def _any_of(sources: Sequence[Source]) -> dict[str, Any]:
    """Returns the schema of a result that is one of several kinds."""
    from parplan.profiles.documents.schema import output_schema

    definitions: dict[str, Any] = {}
    kinds: list[dict[str, Any]] = []
    for source in sources:
        schema = output_schema(source) if isinstance(source, type) else source()
        definitions |= schema.pop("$defs", {})
        if "anyOf" in schema:
            kinds += schema["anyOf"]
        else:
            definitions[schema["title"]] = schema
            kinds.append({"$ref": f"#/$defs/{schema['title']}"})
    return {"anyOf": kinds, "$defs": dict(sorted(definitions.items()))}
