"""Variants of a block's options that send activations to the host, for a search
(costmodels/memory/activation_copies.py).

Copies run at one rate, so that between the most that hides and all the wait grows with the bytes,
and a mix of blocks that do the one and the other has what is in between. Of each option that mixes
are made of these two are priced, and of all variants those stay that are on the hull of seconds and
kept bytes together with the options.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.host_options.activation_options import HostOption, least_waiting, sends_all
from parplan.planner.layer_options.catalogue import LayerOption
from parplan.planner.layer_options.mixes import hull
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.profiles.models.operator_graph import LayerKind


def sends_activations(layout: ParallelLayout, offload: Collection[Offload]) -> bool:
    """Whether blocks of a layout may send activations to the host: their passes are whole, and none
    runs again ahead of its gradient.
    """
    return (
        Offload.ACTIVATIONS in offload
        and not layout.splits_backward
        and not layout.recomputes_ahead
    )


def with_host(
    options: tuple[LayerOption, ...], micro_batch_size: int, price_cache: PriceCache
) -> tuple[LayerOption, ...]:
    """`options`, and behind them the variants that are worth a choice, fastest first."""
    whole = frozenset(price_cache.recompute_operators(LayerKind.BLOCK, Recompute.FULL))
    found = [
        variant
        for option in map(options.__getitem__, hull(options))
        if not (
            set(option.recompute) == whole
            and illegal_full_recompute(option.sharding.overlap, price_cache.model, on_host=True)
        )
        for variant in _variants(option, micro_batch_size, price_cache)
    ]
    both = (*options, *sorted(found, key=lambda option: option.values))
    on_hull = hull(both)
    return (*options, *(both[index] for index in on_hull if both[index].on_host))


def _variants(
    option: LayerOption, micro_batch_size: int, price_cache: PriceCache
) -> Iterator[LayerOption]:
    own = micro_batch_size, option.sharding, option.recompute, price_cache
    everything = sends_all(*own)
    if not everything.on_host:
        return
    yield _sending(option, everything)
    # experts are one module: the host keeps all that they keep, or nothing
    if everything.waited_s and not price_cache.model.num_experts:
        some = least_waiting(*own)
        if some.on_host:
            yield _sending(option, some)


def _sending(option: LayerOption, sent: HostOption) -> LayerOption:
    return replace(
        option,
        on_host=sent.on_host,
        time_s=option.time_s + sent.waited_s,
        saved_bytes=float(sent.saved_bytes),
        ideal_saved_bytes=sent.ideal_saved_bytes,
        workspace_bytes=float(sent.workspace_bytes),
        host_bytes=float(sent.host_bytes),
        out_s=sent.out_s,
        back_s=sent.back_s,
        last_s=sent.last_s,
    )
