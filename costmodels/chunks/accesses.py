"""The block passes of a pipeline rank and the chunks each pass accesses (EQUATIONS O7).

A moment is the pass of one block, forward or backward with its recompute, of one micro-batch; by
operators it is one part of that pass (costmodels/layers/block_parts.py). It accesses every
communication group of chunks that holds a tensor of the block or of the parts that it reads.
Embedding and head run between moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from parplan.costmodels.chunks.chunk_operations import ChunkedBlocks
from parplan.costmodels.layers.block_parts import WHOLE, PartPass
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind

PartsOf = Callable[[LayerChoice, ActionKind], tuple[PartPass, ...]]
Key = tuple[int, int]  # index of the group, and the communication group's number in it


@dataclass(frozen=True, slots=True)
class LayerPass:
    """The forward or backward pass of one layer, or of a part of it, for one micro-batch.

    block     the number in the model of a layer in chunks, None for all others
    access    the part
    begins    it is the first access of the layer's pass
    """

    work: ActionKind
    stage: int
    micro_batch: int
    layer: LayerChoice
    block: int | None
    access: PartPass = WHOLE
    begins: bool = True

    @property
    def backward(self) -> bool:
        return self.work is ActionKind.BACKWARD

    @property
    def makes(self) -> tuple[int, ...]:
        """The parts whose gradients the pass makes."""
        return self.access.makes if self.backward else ()

    def same_action(self, earlier: LayerPass) -> bool:
        """True if both passes belong to one entry of the action list."""
        return (self.work, self.stage, self.micro_batch) == (
            earlier.work,
            earlier.stage,
            earlier.micro_batch,
        )

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        whole = self.begins and self.access.ends
        part = "" if whole else f"part {self.access.part} of "
        return f"{direction} pass of {part}block {self.block}, micro-batch {self.micro_batch}"


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


def layer_passes(
    strategy: Strategy, rank: int, parts_of: PartsOf | None = None
) -> Iterator[LayerPass]:
    """Yields all passes of a pipeline rank in order; `parts_of` divides those of blocks.

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
        for layer, block in in_order:
            whole = LayerPass(action.work, stage, action.micro_batch, layer, block)
            if block is None or parts_of is None:
                yield whole
                continue
            for index, part in enumerate(parts_of(layer, action.work)):
                yield replace(whole, access=part, begins=index == 0)


def group_uses(
    groups: Sequence[ChunkedBlocks], moments: Sequence[LayerPass], *, in_parameters: bool
) -> tuple[GroupUses, ...]:
    """Returns the uses of every communication group, in order of groups and numbers.

    in_parameters    gradients overwrite parameters: a group stays on the device from its first
                     gradient to its last
    """
    touched: dict[Key, dict[int, bool]] = {
        (index, number): {}
        for index, group in enumerate(groups)
        for number in range(group.chunk_layout.num_groups)
    }
    held = keys_of_parts(groups)
    for moment, block_pass in enumerate(moments):
        assert block_pass.block is not None, "moments are passes of blocks"
        for part in block_pass.access.reads:
            for key in held[block_pass.block, part]:
                made = touched[key].get(moment, False)
                touched[key][moment] = made or part in block_pass.makes
    return tuple(_uses(key, used, moments, in_parameters) for key, used in touched.items())


def keys_of_parts(groups: Sequence[ChunkedBlocks]) -> dict[tuple[int, int], tuple[Key, ...]]:
    """Returns by block and part the communication groups that hold its tensors."""
    held = {}
    for index, group in enumerate(groups):
        layout, first = group.chunk_layout, 0
        parts = group.parts or tuple((tensors,) for tensors in layout.counts)
        for block, counts in zip(group.blocks, parts, strict=True):
            for part, tensors in enumerate(counts):
                numbers = dict.fromkeys(layout.group_of[first : first + tensors])
                held[block, part] = tuple((index, number) for number in numbers)
                first += tensors
    return held


def parts_in_group(groups: Sequence[ChunkedBlocks]) -> int:
    """Returns the most parts of a block that lie in one communication group."""
    most = Counter(
        (block, key) for (block, _), keys in keys_of_parts(groups).items() for key in keys
    )
    return max(most.values())


def _uses(
    key: Key,
    used: Mapping[int, bool],
    moments: Sequence[LayerPass],
    in_parameters: bool,
) -> GroupUses:
    touched, made = tuple(used), tuple(moment for moment, makes in used.items() if makes)
    spans, runs = list[MomentSpan](), list[MomentSpan]()
    for moment in touched:
        dirty = in_parameters and bool(made) and moment > made[0]
        _append(spans, moment, together=bool(spans) and (dirty or spans[-1].last == moment - 1))
    for moment in made:
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
