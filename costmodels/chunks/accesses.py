"""The block passes of a pipeline rank and the chunks each pass accesses (EQUATIONS O7).

A moment is the pass of one block, forward or backward with its recompute, of one micro-batch. It
accesses every communication group of chunks that holds a tensor of the block. Embedding and head
run between moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from parplan.costmodels.chunks.chunk_operations import ChunkedBlocks, pass_name
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind


@dataclass(frozen=True, slots=True)
class LayerPass:
    """The forward or backward pass of one layer for one micro-batch.

    block    the number in the model of a layer in chunks, None for all others
    """

    work: ActionKind
    stage: int
    micro_batch: int
    layer: LayerChoice
    block: int | None

    @property
    def backward(self) -> bool:
        return self.work is ActionKind.BACKWARD

    def same_action(self, earlier: LayerPass) -> bool:
        """True if both passes belong to one entry of the action list."""
        return (self.work, self.stage, self.micro_batch) == (
            earlier.work,
            earlier.stage,
            earlier.micro_batch,
        )

    def __str__(self) -> str:
        return pass_name(self.work, self.block, self.micro_batch)


@dataclass(frozen=True, slots=True)
class MomentSpan:
    """Consecutive moments, given by the first and the last."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUses:
    """The moments at which a rank uses one communication group of chunks.

    group      index of `RankChunks.groups`
    number     the communication group's number in it
    touched    moments that use the group
    spans      uninterrupted spans in which its parameters are needed
    runs       spans in which its gradients are made; after each they are sent or reduced
    """

    group: int
    number: int
    touched: tuple[int, ...]
    spans: tuple[MomentSpan, ...]
    runs: tuple[MomentSpan, ...]


def numbered_layers(strategy: Strategy) -> tuple[tuple[tuple[LayerChoice, int | None], ...], ...]:
    """Returns the layers of each virtual stage; those in chunks have their numbers in the model.

    The blocks of a described model count from 0, without its embedding.
    """
    begins_with_embedding = strategy.stages[0][0].kind is LayerKind.EMBEDDING
    numbers = count(-1 if begins_with_embedding else 0)
    return tuple(
        tuple(
            (layer, number if layer.kind.in_chunks else None)
            for layer, number in zip(layers, numbers, strict=False)
        )
        for layers in strategy.stages
    )


def layer_passes(strategy: Strategy, rank: int) -> Iterator[LayerPass]:
    """Yields all passes of a pipeline rank in order.

    Raises ConfigError for passes that chunks do not support.
    """
    layout, layers = strategy.layout, numbered_layers(strategy)
    stages = layout.stages_of(rank)
    for action in layout.orders()[rank]:
        if action.work not in (ActionKind.FORWARD, ActionKind.BACKWARD):
            raise ConfigError(
                "blocks in chunks pass forward and backward (F and B), "
                f"the schedule of pipeline rank {rank} has {action.work}",
                hint="choose a schedule without a split backward "
                "or a recompute ahead, such as 1f1b",
            )
        stage = stages[action.chunk]
        in_order = layers[stage] if action.work is ActionKind.FORWARD else reversed(layers[stage])
        yield from (
            LayerPass(action.work, stage, action.micro_batch, layer, block)
            for layer, block in in_order
        )


def group_uses(
    groups: Sequence[ChunkedBlocks], moments: Sequence[LayerPass], *, in_parameters: bool
) -> tuple[GroupUses, ...]:
    """Returns the uses of every communication group, in order of groups and numbers.

    in_parameters    gradients overwrite parameters: a group stays on the device from its first
                     gradient to its last
    """
    touched: dict[tuple[int, int], list[int]] = {
        (index, number): []
        for index, group in enumerate(groups)
        for number in range(group.chunk_layout.num_groups)
    }
    of_block = {
        block: keys for index, group in enumerate(groups) for block, keys in blocks_of(index, group)
    }
    for moment, block_pass in enumerate(moments):
        assert block_pass.block is not None, "moments are passes of blocks"
        for key in of_block[block_pass.block]:
            touched[key].append(moment)
    return tuple(_uses(key, tuple(used), moments, in_parameters) for key, used in touched.items())


def blocks_of(
    index: int, group: ChunkedBlocks
) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """Yields each block of a group with the communication groups that hold its tensors."""
    first = 0
    for block, tensors in zip(group.blocks, group.chunk_layout.counts, strict=True):
        numbers = dict.fromkeys(group.chunk_layout.group_of[first : first + tensors])
        yield block, tuple((index, number) for number in numbers)
        first += tensors


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
