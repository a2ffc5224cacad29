"""One plan of a page, with what is computed again from its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parplan.costmodels.usage.rank_traffic import SentBytes
from parplan.planner.plan.traced_plan import AnyPlan, model_name
from parplan.planner.runs.held_activations import Moment
from parplan.planner.runs.timelines import Timeline
from parplan.planner.search.comparison import Comparison
from parplan.planner.search.pareto import ParetoFront
from parplan.profiles.documents.schema import document
from parplan.report.plan_documents import plan_document
from parplan.report.searches.comparison_document import comparison_document
from parplan.report.searches.front_document import front_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A command to copy, and the files that it writes.

    lost    parts of the plan that it cannot say, with their costs
    files   their texts by name
    """

    title: str
    text: str
    lost: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReportedPlan:
    """A plan and what its page shows beside the content of its file.

    name         the file as the user named it
    timeline     the predicted step, None for a plan that was not priced again
    held         by pipeline rank, the bytes of activations over the step; empty without a timeline
    sent         by pipeline rank, the collectives of one device in a step; empty without a timeline
    comparison   the baselines, None where none were priced
    front        the front that was searched for the plan, None where none was
    snippets     what starts the plan, and what other launchers read
    missing      sentences about parts of the page that this plan lacks
    """

    name: str
    plan: AnyPlan
    timeline: Timeline | None = None
    held: tuple[tuple[Moment, ...], ...] = ()
    sent: tuple[tuple[SentBytes, ...], ...] = ()
    comparison: Comparison | None = None
    front: ParetoFront | None = None
    snippets: tuple[Snippet, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The model and its GPUs: `gpt-20b on 64 x a100-80gb`."""
        return f"{model_name(self.plan)} on {self.plan.cluster.gpus_text}"

    @cached_property
    def document(self) -> Mapping[str, Any]:
        """The numbers that the page may show: the plan file's, `comparison` and `front`."""
        compared = self.comparison and document(comparison_document(self.comparison))
        front = self.front and document(front_document(self.front))
        return {**plan_document(self.plan), "comparison": compared, "front": front}
