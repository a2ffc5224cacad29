"""The line of `plan show` about the tower of a model."""

from __future__ import annotations

from rich.console import Console

from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.tower_cost import TowerCost
from parplan.profiles.stack import TowerDivision
from parplan.profiles.units import gib
from parplan.report.text import gib_text, joined, labelled, percent, say, seconds_text

_DIVISIONS = {
    TowerDivision.TENSOR: "",
    TowerDivision.IMAGES: ", every tensor-parallel rank with its own images",
    TowerDivision.REPEATED: ", whole on every tensor-parallel rank",
}


def _division(plan: Plan) -> str:
    return _DIVISIONS[layout_of(plan).tower]


def print_tower(plan: Plan, cost: TowerCost | None, out: Console) -> None:
    """Print the images, the seconds and the GiB of the tower, if the model has one."""
    tower = plan.model.tower
    if tower is None or cost is None:
        return
    become = tower.images * tower.image_tokens
    parts = (
        f"{tower.images} x {tower.tokens:,} {tower.name} tokens a sequence"
        + (f", which become {become:,}" if become else ""),
        f"its passes take {percent(cost.share)} of those of all layers, "
        f"{seconds_text(cost.passes_s)} a step of one pipeline",
        f"on stage {', '.join(map(str, cost.ranks))}{_division(plan)}",
        f"GiB of stage {cost.rank}: {gib_text(gib(cost.states_bytes))} of states, "
        f"{gib_text(gib(cost.saved_bytes))} of activations",
    )
    say(out)
    say(out, joined(parts, " | ", out.width, start=labelled("tower")))
