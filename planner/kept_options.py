"""Which operators of a block send what they keep to the host (costmodels/copies.py), and the lists of them worth a choice.

All copies run at one rate, so that what a list does is a matter of its bytes: they leave the device, and beyond what the block's
own passes hide they are waited for. Listed are nothing, the most that is hidden, what is kept of the largest on, one more at a
time, and all; of lists of as many bytes the shortest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from costmodels.book import PriceBook
from costmodels.copies import hidden_s
from costmodels.recompute import Again, host_bytes_by_operator
from costmodels.sharding import Sharding
from costmodels.strategy import Strategy
from profiles.errors import unknown_name_error
from profiles.model import LayerKind

ALL = "all"


def named_operators(names: Collection[str], level: Again, book: PriceBook) -> tuple[str, ...]:
    """Those of `names` that keep anything in a block with recompute `level`, in their order; `all` is every one.

    Raises ConfigError for a name that no operator of a block has.
    """
    kept = _kept_bytes(1, Sharding(), level, book)
    for name in names:
        if name != ALL and name not in kept:
            raise unknown_name_error("operator", name, (*kept, ALL))
    return tuple(name for name, n_bytes in kept.items() if n_bytes and (name in names or ALL in names))


def _kept_bytes(micro_batch_size: int, sharding: Sharding, level: Again, book: PriceBook) -> dict[str, int]:
    layer, again = book.kept_layer(LayerKind.BLOCK, micro_batch_size), book.recompute_operators(LayerKind.BLOCK, level)
    return host_bytes_by_operator(layer, sharding, again, book.training.stack)


def with_kept_on_host(strategy: Strategy, operators: tuple[str, ...]) -> Strategy:
    """The same strategy whose blocks send to the host what `operators` keep."""
    return replace(strategy, stages=tuple(
        tuple(replace(choice, on_host=operators) if choice.kind is LayerKind.BLOCK else choice for choice in stage)
        for stage in strategy.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOption:
    """What a block of a layout and recompute list may send to the host, for one micro-batch on one rank.

    on_host       the operators, in their order
    host_bytes    what they send; saved_bytes, ideal_saved_bytes, workspace_bytes: what is left on the device
    copied_s      of the copies out and back; waited_s: what the block's passes wait for of them, not the last block of a stage
    """

    on_host: tuple[str, ...]
    host_bytes: int
    saved_bytes: int
    ideal_saved_bytes: float
    workspace_bytes: int
    copied_s: float
    waited_s: float


def host_options(micro_batch_size: int, sharding: Sharding, level: Again, book: PriceBook) -> tuple[HostOption, ...]:
    """The lists for a block divided by `sharding` that recomputes `level`, fewest bytes first, no two of the same bytes."""
    kept = {name: n_bytes for name, n_bytes in _kept_bytes(micro_batch_size, sharding, level, book).items() if n_bytes}
    hidden = hidden_s(book.layer_time(LayerKind.BLOCK, micro_batch_size, sharding, level), book)

    def priced(names: tuple[str, ...]) -> HostOption:
        size = book.activations(LayerKind.BLOCK, micro_batch_size, sharding, level, names)
        copied = [
            book.host_copy(LayerKind.BLOCK, micro_batch_size, sharding, level, names, to_host=to_host).value_s for to_host in (True, False)]
        waited_s = sum(max(0.0, copy_s - under_s) for copy_s, under_s in zip(copied, hidden, strict=True))
        return HostOption(
            on_host=names, host_bytes=size.host, saved_bytes=size.saved, ideal_saved_bytes=size.ideal_saved,
            workspace_bytes=size.workspace, copied_s=sum(copied), waited_s=waited_s)

    everything = priced(tuple(kept))
    room_bytes = everything.host_bytes * _hidden_share(everything, hidden)
    found = {option.host_bytes: option for option in map(priced, reversed(_lists(kept, room_bytes)))}
    return tuple(found[n_bytes] for n_bytes in sorted(found))


def _hidden_share(everything: HostOption, hidden: tuple[float, float]) -> float:
    """Of the bytes of a block, how many its passes hide out and back: the shorter one decides, out and back take as long."""
    return 2 * min(hidden) / everything.copied_s if everything.waited_s else 1.0


def _lists(kept: Mapping[str, int], room_bytes: float) -> list[tuple[str, ...]]:
    """Lists in the order of the operators, the shortest first: of the largest on, and the most bytes that fit in `room_bytes`."""
    largest = sorted(kept, key=lambda name: -kept[name])
    lists = [largest[:count] for count in range(len(kept) + 1)]
    some = (list(names) for count in range(len(kept) + 1) for names in combinations(kept, count))
    lists.append(max((names for names in some if _sum(names, kept) <= room_bytes), key=lambda names: _sum(names, kept)))
    return [tuple(name for name in kept if name in names) for names in sorted(lists, key=len)]


def _sum(names: Collection[str], kept: Mapping[str, int]) -> int:
    return sum(kept[name] for name in names)
