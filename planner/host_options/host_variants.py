"""Variants of a block's options that offload activations, for a search.

Copies run at one rate (costmodels/memory/activation_copies.py). Between the most hidden bytes and
all bytes the wait grows with the bytes, and mixes of blocks of both kinds reach the values between.
So these two are priced for each option of the mixes. Variants stay if they are on the hull of
seconds and saved bytes together with the options.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.host_options.activation_options import HostOption, offload_all, offload_hidden
from parplan.planner.layer_options.layer_option import LayerOption
from parplan.planner.layer_options.mixes import hull_options
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute
from parplan.profiles.models.operator_graph import LayerKind


def may_offload_activations(layout: ParallelLayout, offload: Collection[Offload]) -> bool:
    """True if blocks of a layout may offload activations.

    Their backward passes are whole, no recompute runs ahead of its gradient, and their weights are
    not divided over data.
    """
    return (
        Offload.ACTIVATIONS in offload
        and not layout.weights_over_data
        and not layout.splits_backward
        and not layout.recomputes_ahead
    )


def with_host(
    options: tuple[LayerOption, ...], micro_batch_size: int, price_cache: PriceCache
) -> tuple[LayerOption, ...]:
    """Returns `options`, then their variants on the hull, fastest first."""
    whole = frozenset(price_cache.recompute_operators(LayerKind.BLOCK, Recompute.FULL))
    variants = [
        variant
        for option in map(options.__getitem__, hull_options(options))
        if not (
            set(option.recompute) == whole
            and illegal_full_recompute(option.sharding.overlap, price_cache.model, on_host=True)
        )
        for variant in _variants(option, micro_batch_size, price_cache)
    ]
    both = (*options, *sorted(variants, key=lambda option: option.values))
    on_hull = hull_options(both)
    return (*options, *(both[index] for index in on_hull if both[index].on_host))


def _variants(
    option: LayerOption, micro_batch_size: int, price_cache: PriceCache
) -> Iterator[LayerOption]:
    block = micro_batch_size, option.sharding, option.recompute, price_cache
    everything = offload_all(*block)
    if not everything.on_host:
        return
    yield _sending(option, everything)
    # experts are one module: all their saved tensors are offloaded, or none
    if everything.waited_s and not price_cache.model.num_experts:
        some = offload_hidden(*block)
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
