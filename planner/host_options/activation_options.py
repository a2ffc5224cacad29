"""Which operators of a block send what they keep to the host
(costmodels/memory/activation_copies.py), and the lists of them worth a choice.

All copies run at one rate, so that what a list does is a matter of its bytes: they leave the
device, and beyond what the block's own passes hide they are waited for. Listed are nothing, the
most that is hidden, what is kept of the largest on, one more at a time, and all; of lists of as
many bytes the shortest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import RecomputedOperators
from parplan.costmodels.memory.activation_copies import hidden_s
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.profiles.errors import unknown_name_error
from parplan.profiles.models.operator_graph import LayerKind

ALL = "all"


def named_operators(
    names: Collection[str], level: RecomputedOperators, price_cache: PriceCache
) -> tuple[str, ...]:
    """Those of `names` that keep anything in a block with recompute `level`, in their order; `all`
    is every one.

    Raises ConfigError for a name that no operator of a block has.
    """
    kept = _kept_bytes(1, Sharding(), level, price_cache)
    for name in names:
        if name != ALL and name not in kept:
            raise unknown_name_error("operator", name, (*kept, ALL))
    return tuple(
        name for name, n_bytes in kept.items() if n_bytes and (name in names or ALL in names)
    )


def _kept_bytes(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> dict[str, int]:
    return price_cache.host_bytes(LayerKind.BLOCK, micro_batch_size, sharding, level)


def with_kept_on_host(strategy: Strategy, operators: tuple[str, ...]) -> Strategy:
    """The same strategy whose blocks send to the host what `operators` keep."""
    return replace(
        strategy,
        stages=tuple(
            tuple(
                replace(choice, on_host=operators) if choice.kind is LayerKind.BLOCK else choice
                for choice in stage
            )
            for stage in strategy.stages
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOption:
    """What a block of a layout and recompute list may send to the host, for one micro-batch on one
    rank.

    on_host       the operators, in their order
    host_bytes    what they send; saved_bytes, ideal_saved_bytes, workspace_bytes: what is left on
                  the device
    out_s, back_s of the copies; waited_s: what the block's passes wait for of them
    last_s        what the last block of a stage that sends waits besides: nothing hides what comes
                  back to it
    """

    on_host: tuple[str, ...]
    host_bytes: int
    saved_bytes: int
    ideal_saved_bytes: float
    workspace_bytes: int
    out_s: float
    back_s: float
    waited_s: float
    last_s: float

    @property
    def copied_s(self) -> float:
        return self.out_s + self.back_s


def host_options(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> tuple[HostOption, ...]:
    """The lists for a block divided by `sharding` that recomputes `level`, fewest bytes first, no
    two of the same bytes.
    """
    own = micro_batch_size, sharding, level, price_cache
    kept = _kept(*own)
    lists = sorted([*_of_the_largest_on(kept), _most_within(kept, _hidden_bytes(*own))], key=len)
    found = {
        option.host_bytes: option for option in (_priced(names, *own) for names in reversed(lists))
    }
    return tuple(found[n_bytes] for n_bytes in sorted(found))


def sends_all(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> HostOption:
    """That of all operators that keep anything."""
    own = micro_batch_size, sharding, level, price_cache
    return _priced(tuple(_kept(*own)), *own)


def least_waiting(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> HostOption:
    """That of the most bytes that the block's passes hide."""
    own = micro_batch_size, sharding, level, price_cache
    return _priced(_most_within(_kept(*own), _hidden_bytes(*own)), *own)


def _kept(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> dict[str, int]:
    return {
        name: n_bytes
        for name, n_bytes in _kept_bytes(micro_batch_size, sharding, level, price_cache).items()
        if n_bytes
    }


def _priced(
    names: tuple[str, ...],
    micro_batch_size: int,
    sharding: Sharding,
    level: RecomputedOperators,
    price_cache: PriceCache,
) -> HostOption:
    own = LayerKind.BLOCK, micro_batch_size, sharding, level
    hidden = hidden_s(price_cache.layer_time(*own), price_cache)
    size = price_cache.activations(*own, names)
    copied = [
        price_cache.host_copy(*own, names, to_host=to_host).value_s for to_host in (True, False)
    ]
    return HostOption(
        on_host=names,
        host_bytes=size.host,
        saved_bytes=size.saved,
        ideal_saved_bytes=size.ideal_saved,
        workspace_bytes=size.workspace,
        out_s=copied[0],
        back_s=copied[1],
        last_s=min(copied[1], hidden[1]),
        waited_s=sum(
            max(0.0, copy_s - under_s) for copy_s, under_s in zip(copied, hidden, strict=True)
        ),
    )


def _hidden_bytes(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> float:
    """How many bytes a block's passes hide out and back: the shorter one decides, out and back take
    as long.
    """
    everything = sends_all(micro_batch_size, sharding, level, price_cache)
    hidden = hidden_s(
        price_cache.layer_time(LayerKind.BLOCK, micro_batch_size, sharding, level), price_cache
    )
    return everything.host_bytes * (
        2 * min(hidden) / everything.copied_s if everything.waited_s else 1.0
    )


def _of_the_largest_on(kept: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Lists in the order of the operators, of the largest on, from none to all."""
    largest = sorted(kept, key=lambda name: -kept[name])
    return [
        tuple(name for name in kept if name in largest[:count]) for count in range(len(kept) + 1)
    ]


def _most_within(kept: Mapping[str, int], room_bytes: float) -> tuple[str, ...]:
    """The list of most bytes that fit in `room_bytes`, of equals the shortest."""
    reached: dict[int, tuple[str, ...]] = {0: ()}
    for name, n_bytes in kept.items():
        for held, names in list(reached.items()):
            found = (*names, name)
            if held + n_bytes <= room_bytes and len(found) < len(
                reached.get(held + n_bytes, (*kept, name))
            ):
                reached[held + n_bytes] = found
    return reached[max(reached)]
