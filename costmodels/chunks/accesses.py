"""When a pipeline rank needs which chunks: its action list, pass by pass of every layer (EQUATIONS
O7).

A moment is the pass of one block, forward or backward with its recompute inside, of one
micro-batch. All communication groups of chunks that hold a tensor of the block are accessed in it.
Embedding and head pass between moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_operations import ChunkedBlocks
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer, forward or backward, of one micro-batch. block: its number in the model, None for
    embedding and head.
    """

    work: ActionKind
    stage: int
    micro_batch: int
    layer: LayerChoice
    block: int | None

    @property
    def backward(self) -> bool:
        return self.work is ActionKind.BACKWARD

    def same_action(self, other: LayerPass) -> bool:
        """Whether one entry of the action list has both."""
        return (self.work, self.stage, self.micro_batch) == (
            other.work,
            other.stage,
            other.micro_batch,
        )

    def __str__(self) -> str:
        return f"{'backward' if self.backward else 'forward'} pass of block {self.block}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class MomentSpan:
    """Moments in a row, the first and the last."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUses:
    """Of the communication group `number` of `RankChunks.groups[group]`, when a rank needs it.

    touched: moments that use it; spans: when its parameters are needed without a gap; runs: when
    gradients of it are made, which are sent, or reduced, behind each
    """

    group: int
    number: int
    touched: tuple[int, ...]
    spans: tuple[MomentSpan, ...]
    runs: tuple[MomentSpan, ...]


def numbered_layers(strategy: Strategy) -> tuple[tuple[tuple[LayerChoice, int | None], ...], ...]:
    """By virtual stage its layers, blocks with their numbers in the model."""
    stages, number = [], 0
    for layers in strategy.stages:
        found: list[tuple[LayerChoice, int | None]] = []
        for layer in layers:
            found.append((layer, number if layer.kind is LayerKind.BLOCK else None))
            number += layer.kind is LayerKind.BLOCK
        stages.append(tuple(found))
    return tuple(stages)


def layer_passes(strategy: Strategy, rank: int) -> Iterator[LayerPass]:
    """All passes of a pipeline rank in order. Raises ConfigError for passes that chunks do not go
    with.
    """
    layout, layers = strategy.layout, numbered_layers(strategy)
    stages = layout.stages_of(rank)
    for action in layout.orders()[rank]:
        if action.work not in (ActionKind.FORWARD, ActionKind.BACKWARD):
            raise ConfigError(
                f"blocks in chunks pass forward and backward (F and B), the schedule of pipeline rank {rank} has {action.work}",
                hint="choose a schedule without a split backward or a recompute ahead, such as 1f1b",
            )
        stage = stages[action.chunk]
        own = layers[stage] if action.work is ActionKind.FORWARD else reversed(layers[stage])
        yield from (
            LayerPass(action.work, stage, action.micro_batch, layer, block) for layer, block in own
        )


def uses(
    groups: Sequence[ChunkedBlocks], moments: Sequence[LayerPass], *, in_parameters: bool
) -> tuple[GroupUses, ...]:
    """By communication group when it is used, in order of groups and numbers.

    in_parameters: gradients are written over parameters, which must not be given up, or fetched
    again, between the first gradient of a group and the last
    """
    touched: dict[tuple[int, int], list[int]] = {
        (index, number): []
        for index, group in enumerate(groups)
        for number in range(group.chunk_layout.num_groups)
    }
    of_block = {
        block: keys for index, group in enumerate(groups) for block, keys in blocks_of(index, group)
    }
    for moment, one in enumerate(moments):
        assert one.block is not None, "moments are passes of blocks"
        for key in of_block[one.block]:
            touched[key].append(moment)
    return tuple(_uses(key, tuple(found), moments, in_parameters) for key, found in touched.items())


def blocks_of(
    index: int, group: ChunkedBlocks
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """By block of a group the communication groups that hold one of its tensors; all blocks have
    the same number of tensors.
    """
    chunk_layout, count = group.chunk_layout, len(group.chunk_layout.tensors) // len(group.blocks)
    for place, block in enumerate(group.blocks):
        yield (
            block,
            tuple(
                (index, number)
                for number in dict.fromkeys(
                    chunk_layout.group_of[place * count : (place + 1) * count]
                )
            ),
        )


def _uses(
    key: tuple[int, int],
    touched: tuple[int, ...],
    moments: Sequence[LayerPass],
    in_parameters: bool,
) -> GroupUses:
    backward = tuple(moment for moment in touched if moments[moment].backward)
    spans, runs = list[MomentSpan](), list[MomentSpan]()
    for moment in touched:
        dirty = in_parameters and moments[moment].backward and moment != backward[0]
        _append(spans, moment, together=bool(spans) and (dirty or spans[-1].last == moment - 1))
    for moment in backward:
        together = bool(runs) and (
            in_parameters
            or (runs[-1].last == moment - 1 and moments[moment].same_action(moments[moment - 1]))
        )
        _append(runs, moment, together=together)
    return GroupUses(
        group=key[0], number=key[1], touched=touched, spans=tuple(spans), runs=tuple(runs)
    )


def _append(spans: list[MomentSpan], moment: int, *, together: bool) -> None:
    if together:
        spans[-1] = MomentSpan(spans[-1].first, moment)
    else:
        spans.append(MomentSpan(moment, moment))
