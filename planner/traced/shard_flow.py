"""Bytes of a micro-batch that shards and ranges of shards hand on, and save between passes.

A shard saves the tensors that its operators save, or its inputs when it is recomputed
(costmodels/layers/recompute.py). Some of these tensors are counted once a stage, whatever its
shards recompute:

    values that the stage receives, except a value that its only reader saves anyway
    values that several shards read, and constants, if any shard saves them
    an output that its maker saves and another shard saves as its input: at the reader, and at the
    maker if the reader is in a later stage
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parplan.costmodels.layers.recompute import Recompute, recompute_operators, saved_tensors
from parplan.planner.traced.shard_classes import ShardClasses, ShardKey
from parplan.profiles.models.operator_graph import Dim, Tensor
from parplan.profiles.models.traced_model import BATCH

Array = npt.NDArray[np.float64]
LEVELS = (Recompute.NONE, Recompute.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A tensor that stages may save, with its shards.

    maker    shard that makes it, -1 for constants and the batch
    readers  shards that read it, without the maker
    sure     readers that save it whatever they recompute
    keepers  shards that save it at one level of recompute at least
    """

    tensor: Tensor
    maker: int
    readers: tuple[int, ...]
    sure: tuple[int, ...]
    keepers: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        return self.maker < 0 or len(self.readers) > 1


class Flow:
    """Bytes that the shards of a model hand on and save, for any micro-batch size."""

    def __init__(self, classes: ShardClasses) -> None:
        self.classes, self.sharded = classes, classes.sharded
        self.size = len(self.sharded.shards)
        self._levels = [self._by_level(shard) for shard in range(self.size)]
        self._kept = {name: self._found(name, tensor) for name, tensor in self._names().items()}

    def num_bytes(self, tensor: Tensor, micro_batch_size: int) -> int:
        """Bytes of a traced tensor for another micro-batch size."""
        elements, traced = tensor.element_bytes, self.sharded.model.micro_batch_size
        for dim in tensor.dims:
            elements *= dim.size * micro_batch_size // traced if dim.name == BATCH else dim.size
        return elements

    def crossing_tensors(self, shard: int, micro_batch_size: int) -> tuple[Tensor, ...]:
        """Returns the tensors that the stage that begins with `shard` receives."""
        traced = self.sharded.model.micro_batch_size

        def scaled(dim: Dim) -> Dim:
            if dim.name != BATCH:
                return dim
            return replace(dim, size=dim.size * micro_batch_size // traced)

        cuts = self.sharded.cuts[shard] if shard < self.size else ()
        return tuple(
            replace(tensor, name=name, dims=tuple(map(scaled, tensor.dims)))
            for name, tensor in cuts
        )

    def outside(self, shard: int) -> frozenset[str]:
        """Names, in the shard's class, of the tensors that it saves but that count once a stage."""
        names = self.classes.names[shard].tensors
        kept = {name for level in self._levels[shard].values() for name in level}
        return frozenset(
            str(number)
            for number, name in enumerate(names)
            if name in kept and self._is_elsewhere(name, shard)
        )

    def _is_elsewhere(self, name: str, shard: int) -> bool:
        kept = self._kept.get(name)
        return kept is not None and (kept.is_shared or (kept.maker == shard and bool(kept.sure)))

    def besides(self, micro_batch_size: int) -> Array:
        """Bytes that a stage saves besides its shards, by first shard and end.

        The shape is [shards, shards + 1].
        """
        total = np.zeros((self.size, self.size + 1))
        for name, kept in self._kept.items():
            num_bytes = self.num_bytes(kept.tensor, micro_batch_size)
            for first, end in _regions(kept, self._last(name, kept)):
                total[first, end] += num_bytes
        for name, tensor, maker, last in self._passed():
            if name not in self._kept:
                total[maker + 1 : last + 1, :] += self.num_bytes(tensor, micro_batch_size)
        return total

    @cached_property
    def needed_constants(self) -> dict[int, tuple[int, ...]]:
        """The shards that need each constant, by its place, even for other constants."""
        made: dict[str, int] = {}
        needs: dict[int, set[int]] = {}
        users: dict[int, set[int]] = {}
        for place, traced in enumerate(self.sharded.model.operators):
            reads = {made[tensor.name] for tensor in traced.operator.inputs if tensor.name in made}
            if traced.constant:
                needs[place] = {place}.union(*(needs[read] for read in reads))
                made.update({tensor.name: place for tensor in traced.operator.outputs})
            else:
                for constant in set[int]().union(*(needs[read] for read in reads)):
                    users.setdefault(constant, set()).add(self.sharded.shard_of[place])
        return {place: tuple(sorted(shards)) for place, shards in users.items()}

    def _passed(self) -> Iterator[tuple[str, Tensor, int, int]]:
        """Yields name, tensor, maker's shard and last reader's shard of values that cross a cut."""
        shard_of = self.sharded.shard_of
        for name, value in self.sharded.values.by_name.items():
            maker, last = shard_of[value.maker], shard_of[value.last]
            if last > maker:
                yield name, value.tensor, maker, last

    def _last(self, name: str, kept: _Kept) -> int:
        """Returns the last shard that reads a tensor."""
        return max((kept.maker, *kept.readers))

    def _by_level(self, shard: int) -> Mapping[Recompute, dict[str, Tensor]]:
        """Returns the tensors that a shard saves at each level, by traced name."""
        layer = self.classes.layer(
            ShardKey(self.classes.of[shard]), self.sharded.model.micro_batch_size
        )
        names = self.classes.names[shard].tensors
        return {
            level: {
                names[int(tensor.name)] if tensor.name.isdigit() else tensor.name: tensor
                for tensor in saved_tensors(layer, recompute_operators(layer, level))
            }
            for level in LEVELS
        }

    def _names(self) -> dict[str, Tensor]:
        """Returns every saved tensor, except those that a single shard makes and reads."""
        tensors: dict[str, Tensor] = {}
        values, shard_of = self.sharded.values.by_name, self.sharded.shard_of
        for shard, levels in enumerate(self._levels):
            for kept in levels.values():
                for name, tensor in kept.items():
                    value = values.get(name)
                    inside = (
                        value is not None
                        and shard_of[value.maker] == shard
                        and shard_of[value.last] == shard
                    )
                    inner = value is None and name not in self.sharded.values.constants
                    if not inside and not inner:
                        tensors.setdefault(name, tensor)
        return tensors

    def _found(self, name: str, tensor: Tensor) -> _Kept:
        value, shard_of = self.sharded.values.by_name.get(name), self.sharded.shard_of
        keepers = tuple(
            shard
            for shard, levels in enumerate(self._levels)
            if any(name in kept for kept in levels.values())
        )
        if value is None:
            return _Kept(tensor=tensor, maker=-1, readers=keepers, sure=(), keepers=keepers)
        maker = shard_of[value.maker]
        readers = tuple(sorted({shard_of[reader] for reader in value.readers} - {maker}))
        sure = tuple(
            shard for shard in readers if all(name in kept for kept in self._levels[shard].values())
        )
        return _Kept(tensor=value.tensor, maker=maker, readers=readers, sure=sure, keepers=keepers)


def _regions(kept: _Kept, last: int) -> Iterator[tuple[slice, slice]]:
    """Yields first shards and ends of the stages that save a tensor besides their shards."""
    maker = kept.maker
    if maker < 0:  # once where any of the stage keeps it
        before = -1
        for keeper in kept.keepers:
            yield slice(before + 1, keeper + 1), slice(keeper + 1, None)
            before = keeper
        return
    if kept.is_shared:
        yield slice(maker + 1, last + 1), slice(None)  # received
        if kept.keepers:
            yield slice(0, maker + 1), slice(maker + 1, None)
        return
    if kept.sure:
        yield slice(maker + 1, last + 1), slice(0, last + 1)  # received and passed on
        if maker in kept.keepers:
            # saved by its maker, read behind the end
            yield slice(0, maker + 1), slice(maker + 1, last + 1)
        return
    yield slice(maker + 1, last + 1), slice(None)
