"""The ways in which the tensor-parallel ranks of a candidate run a tower.

A tower is small beside its language model, and the collectives of tensor parallelism in its blocks
may take longer than they save. So stacks also run it whole on every rank: each with its own images
of a micro-batch, or all with all of them. The latter is tried where the former cannot be: it
computes the same tp times, and spares one sum of the tower's gradients a step.

Under sequence parallelism ranks divide the tokens of an image. A stack that holds equal parts of
them then runs no layout whose ranks do not divide their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.candidates.meshes import PrunedFamilies
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.towers import Tower
from parplan.profiles.stack import Stack, TowerDivision


def with_tower_divisions(space: CandidateSpace, model: ModelSpec, stack: Stack) -> CandidateSpace:
    """Returns the candidates with each way that the stack has to run the tower of a model."""
    if model.tower is None:
        return space
    layouts: list[ParallelLayout] = []
    lost = PrunedFamilies()
    for layout in space.layouts:
        tokens = uneven_images(layout, model.tower) if stack.equal_image_parts else None
        if tokens:
            tp = layout.mesh.tp
            reason = (
                f"tp {tp} does not divide the {tokens:,} tokens of an image, so that {stack.name}"
            )
            lost.add(f"{reason} cannot run it with sequence parallelism", partial(str, layout.mesh))
        else:
            layouts += _divided(layout, model, stack.tower_divisions)
    return replace(space, layouts=tuple(layouts), pruned=(*space.pruned, *lost))


def _divided(
    layout: ParallelLayout, model: ModelSpec, ways: tuple[TowerDivision, ...]
) -> Iterator[ParallelLayout]:
    yield layout
    for way in (TowerDivision.IMAGES, TowerDivision.REPEATED):
        if way in ways and not illegal_division(way, layout, model):
            yield replace(layout, tower=way)
            return


def uneven_images(layout: ParallelLayout, tower: Tower) -> int | None:
    """Returns the tokens of an image that ranks which divide sequences do not divide, or None."""
    tp = layout.mesh.tp
    if tp == 1 or not layout.sequence_parallel:
        return None
    every = (tower.patches, tower.tokens, tower.image_tokens)
    return next((tokens for tokens in every if tokens % tp), None)


def illegal_division(way: TowerDivision, layout: ParallelLayout, model: ModelSpec) -> str | None:
    """Returns why the tensor-parallel ranks of a layout cannot run a tower so, or None."""
    tower, tp = model.tower, layout.mesh.tp
    if way is TowerDivision.TENSOR:
        return None
    if tower is None:
        return f"{model.name} has no tower"
    if tp == 1:
        return "tp 1 divides no tower"
    if tower.attended:
        return "every block attends to the tower, whose output is divided as the text is"
    images = layout.micro_batch_size * tower.images
    if way is TowerDivision.IMAGES and images % tp:
        return f"tp {tp} does not divide the {images} images of a micro-batch"
    return None
