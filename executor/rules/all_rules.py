"""All rules of the executor, and the nearest plan that it can run.

A rule checks a plan without torch and without ranks. It covers a plan that the executor cannot run,
or would run to wrong results. The rule's `why` gives the reason, which docs/design/executor.md
lists. The nearest plan differs in the fields that the hint names. It may break another rule, so
`nearest_legal` repairs until no rule is broken.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.executor.rules.chunk_rules import CHUNKS
from parplan.executor.rules.context_rules import CONTEXT
from parplan.executor.rules.grid_rules import grid_rule
from parplan.executor.rules.layer_rules import LAYERS
from parplan.executor.rules.over_data_rules import over_data_rule
from parplan.executor.rules.overlap_rules import halves
from parplan.executor.rules.rule import Refusal, Rule, rule
from parplan.executor.rules.schedule_rules import SCHEDULE
from parplan.executor.rules.tower_rules import TOWERS
from parplan.executor.rules.training_rules import TRAINING
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.transformer import build_graph

RULES: tuple[Rule, ...] = (
    grid_rule,
    *SCHEDULE,
    *TRAINING,
    *TOWERS,
    *CONTEXT,
    *LAYERS,
    over_data_rule,
    halves,
    *CHUNKS,
)
# A repair changes a field for good, so a plan of a few hundred layers needs fewer.
MAX_REPAIRS = 1000


@rule(
    why="chunks, halves of blocks and modules are planned for blocks that are all alike",
    action="leave out what it says",
)
def alike_blocks(plan: Plan) -> Iterator[Refusal]:
    obstacles = {
        "a module": plan.module is not None,
        "chunks": plan.chunks is not None,
        f"tp_overlap {plan.pipeline.tp_overlap}": bool(plan.pipeline.tp_overlap),
    }
    if not any(obstacles.values()):
        return
    graph = build_graph(plan.model, plan.training, 1)
    classes = list(map(str, dict.fromkeys(graph.blocks)))
    for obstacle, is_there in obstacles.items():
        if is_there and len(classes) > 1:
            yield Refusal(
                problem=f"model: the blocks of {plan.model.name} are of {len(classes)} classes, "
                f"{', '.join(classes)}, with {obstacle}",
                action=f"leave out {obstacle}",
            )


def refusals(plan: Plan) -> Iterator[tuple[Rule, Refusal]]:
    """Yield every rule that `plan` breaks, with the refusal.

    A plan of unlike blocks with what needs alike ones breaks that rule alone, which has no nearest
    plan. A plan whose stages do not hold its layers breaks the first rule alone: other rules read
    the stages.
    """
    unlike = [(alike_blocks, refusal) for refusal in alike_blocks.check(plan)]
    yield from unlike
    for each in () if unlike else RULES:
        broken = [(each, refusal) for refusal in each.check(plan)]
        yield from broken
        if broken and each.name == "layers":
            return


def validate(plan: Plan) -> None:
    """Raise ConfigError for a well-formed plan that the executor cannot run as it stands."""
    for broken, refusal in refusals(plan):
        raise ConfigError(f"{refusal.problem}: {broken.why}", hint=refusal.action)


def nearest_legal(plan: Plan) -> Plan | None:
    """Return `plan` with the changes of all hints, or None if a rule has none to give."""
    for _ in range(MAX_REPAIRS):
        refusal = next((refusal for _, refusal in refusals(plan)), None)
        if refusal is None:
            return plan
        if refusal.nearest is None:
            return None
        plan = refusal.nearest
    return None
