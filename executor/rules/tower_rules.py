"""Rules on towers, their images and their places among the tokens of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parplan.executor.rules.rule import Refusal, rule, with_training
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.towers import sides

QUARTERS = 4  # pairs of features that turn by rows, and by columns
TEXT_ALONE = "plan the text alone with --images-per-sequence 0"


@rule(
    why="every image is whole, its tokens stand behind one of the text, and its patches turn by "
    "rows and by columns",
    action="do what it says, or " + TEXT_ALONE,
)
def images_rule(plan: Plan) -> Iterator[Refusal]:
    tower, length = plan.model.tower, plan.training.seq_length
    if tower is None or plan.module is not None:
        return
    needed = plan.model.image_tokens + 1
    if length < needed:
        yield Refusal(
            problem=f"training: seq_length is {length}, the images of a sequence have "
            f"{needed - 1} tokens",
            action=f"set seq_length to {needed}",
            nearest=with_training(plan, seq_length=needed, documents=None),
        )
    head_dim = tower.hidden_size // tower.num_heads
    if tower.rotary and head_dim % QUARTERS:
        whole = replace(tower, rotary=False)
        yield Refusal(
            problem=f"model: the {tower.name} tower rotates heads of {head_dim} features",
            action="set tower.rotary to false",
            nearest=replace(plan, model=replace(plan.model, tower=whole)),
        )
    for window in sorted({kind.window for kind in tower.block_kinds} - {0}):
        if _uneven(tower.grid, sides(window)):
            kinds = tuple(replace(kind, window=0) for kind in tower.blocks)
            yield Refusal(
                problem=f"model: the {tower.name} tower has windows of {window} patches in images "
                f"of {tower.grid[0]} x {tower.grid[1]}",
                action="set the windows of tower.blocks to 0",
                nearest=replace(
                    plan, model=replace(plan.model, tower=replace(tower, blocks=kinds))
                ),
            )


def _uneven(grid: tuple[int, int], window: tuple[int, int]) -> bool:
    return any(side % part for side, part in zip(grid, window, strict=True))


TOWERS = (images_rule,)
