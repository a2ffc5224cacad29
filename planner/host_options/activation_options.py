"""The lists of a block's operators whose saved tensors may be offloaded, and their cost.

All copies run at one rate (costmodels/memory/activation_copies.py), so that only the bytes of a
list matter: they leave the device, and the bytes beyond those that the block's own passes hide are
waited for. The candidates are nothing, the most hidden bytes, the saved tensors from the largest
on, one more at a time, and all; of lists with equal bytes, the shortest.
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
    """Returns the operators in `names` that save tensors in a block, in their order.

    level    the block's recompute

    The name `all` stands for every operator. Raises ConfigError for a name that no operator has.
    """
    saved = _saved_bytes(1, Sharding(), level, price_cache)
    for name in names:
        if name != ALL and name not in saved:
            raise unknown_name_error("operator", name, (*saved, ALL))
    return tuple(
        name for name, n_bytes in saved.items() if n_bytes and (name in names or ALL in names)
    )


def _saved_bytes(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> dict[str, int]:
    return price_cache.host_bytes(LayerKind.BLOCK, micro_batch_size, sharding, level)


def with_offloaded_activations(strategy: Strategy, operators: tuple[str, ...]) -> Strategy:
    """Returns the strategy with the saved tensors of `operators` of all blocks on the host."""
    return replace(
        strategy,
        stages=tuple(
            tuple(
                replace(choice, on_host=operators)
                if choice.kind.role is LayerKind.BLOCK
                else choice
                for choice in stage
            )
            for stage in strategy.stages
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOption:
    """One list of operators whose saved tensors a block offloads, for one micro-batch on one rank.

    on_host              the operators, in their order
    host_bytes           offloaded bytes
    saved_bytes          saved tensors that stay on the device
    ideal_saved_bytes    the ideal part of them
    workspace_bytes      temporaries on the device
    out_s, back_s        copies to the host and back
    waited_s             exposed part of the copies in the block's passes
    last_s               extra wait of a stage's last offloading block, since nothing hides its
                         copies back
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
    """Returns the options of a block with `sharding` that recomputes `level`, fewest bytes first.

    No two have the same bytes.
    """
    block = micro_batch_size, sharding, level, price_cache
    saved = _saved(*block)
    lists = sorted(
        [*_of_the_largest_on(saved), _most_within(saved, _hidden_bytes(*block))], key=len
    )
    options = (_priced(names, *block) for names in reversed(lists))
    by_bytes = {option.host_bytes: option for option in options}
    return tuple(by_bytes[n_bytes] for n_bytes in sorted(by_bytes))


def offload_all(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> HostOption:
    """Returns the option of all operators that save tensors."""
    block = micro_batch_size, sharding, level, price_cache
    return _priced(tuple(_saved(*block)), *block)


def offload_hidden(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> HostOption:
    """Returns the option with the most bytes that the block's passes hide."""
    block = micro_batch_size, sharding, level, price_cache
    return _priced(_most_within(_saved(*block), _hidden_bytes(*block)), *block)


def _saved(
    micro_batch_size: int, sharding: Sharding, level: RecomputedOperators, price_cache: PriceCache
) -> dict[str, int]:
    return {
        name: n_bytes
        for name, n_bytes in _saved_bytes(micro_batch_size, sharding, level, price_cache).items()
        if n_bytes
    }


def _priced(
    names: tuple[str, ...],
    micro_batch_size: int,
    sharding: Sharding,
    level: RecomputedOperators,
    price_cache: PriceCache,
) -> HostOption:
    block = LayerKind.BLOCK, micro_batch_size, sharding, level
    hidden = hidden_s(price_cache.layer_time(*block), price_cache)
    size = price_cache.activations(*block, names)
    copied = [
        price_cache.host_copy(*block, names, to_host=to_host).value_s for to_host in (True, False)
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
    """Bytes whose copies a block's passes hide to the host and back.

    Copies take as long in both directions, so that the shorter pass decides.
    """
    everything = offload_all(micro_batch_size, sharding, level, price_cache)
    if not everything.waited_s:
        return float(everything.host_bytes)
    hidden = hidden_s(
        price_cache.layer_time(LayerKind.BLOCK, micro_batch_size, sharding, level), price_cache
    )
    return everything.host_bytes * (2 * min(hidden) / everything.copied_s)


def _of_the_largest_on(saved: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the lists of the largest operators, from none to all, in the order of operators."""
    largest = sorted(saved, key=lambda name: -saved[name])
    return [
        tuple(name for name in saved if name in largest[:count]) for count in range(len(saved) + 1)
    ]


def _most_within(saved: Mapping[str, int], room_bytes: float) -> tuple[str, ...]:
    """Returns the list with the most bytes that fit in `room_bytes`, the shortest of equals."""
    reached: dict[int, tuple[str, ...]] = {0: ()}
    for name, n_bytes in saved.items():
        for held, names in list(reached.items()):
            longer = (*names, name)
            total = held + n_bytes
            if total <= room_bytes and len(longer) < len(reached.get(total, (*saved, name))):
                reached[total] = longer
    return reached[max(reached)]
