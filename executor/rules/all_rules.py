"""What the executor cannot run, or would run to wrong results: every rule, and the nearest plan
that can run.

A rule looks at a plan, without torch and without ranks, and says what it found. Why the executor
cannot have it is the rule's own text, which docs/design/executor.md lists. The nearest plan differs
in the fields that the hint names; it may break another rule, so `nearest_legal` goes on until there
is none to break.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.executor.rules.chunk_rules import CHUNKS
from parplan.executor.rules.layer_rules import LAYERS
from parplan.executor.rules.overlap_rules import halves
from parplan.executor.rules.rule import Refusal, Rule
from parplan.executor.rules.schedule_rules import SCHEDULE
from parplan.executor.rules.training_rules import TRAINING
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError

RULES: tuple[Rule, ...] = (*SCHEDULE, *TRAINING, *LAYERS, halves, *CHUNKS)
MAX_REPAIRS = (
    1000  # each changes a field for good, so no plan of a few hundred layers needs as many
)


def refusals(plan: Plan) -> Iterator[tuple[Rule, Refusal]]:
    """Every rule that `plan` breaks; one that has no stages to speak of breaks the first alone."""
    for rule in RULES:
        found = [(rule, refusal) for refusal in rule.check(plan)]
        yield from found
        if found and rule.name == "layers":
            return


def validate(plan: Plan) -> None:
    """Raises ConfigError for a plan that is well-formed but that the executor cannot run as it
    stands.
    """
    for rule, refusal in refusals(plan):
        raise ConfigError(f"{refusal.found}: {rule.why}", hint=refusal.action)


def nearest_legal(plan: Plan) -> Plan | None:
    """`plan` with the changes of all hints, or None where a rule has none to give."""
    for _ in range(MAX_REPAIRS):
        refusal = next((found for _, found in refusals(plan)), None)
        if refusal is None:
            return plan
        if refusal.nearest is None:
            return None
        plan = refusal.nearest
    return None
