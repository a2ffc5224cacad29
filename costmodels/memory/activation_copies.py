"""Offloaded activations: copies of saved tensors under compute, and their waits (EQUATIONS O10).

The saved tensors of an operator in `LayerChoice.on_host` go to the host as soon as they exist, on a
stream for that direction. A block's copies end with the forward pass of the next block, so that the
device holds the offloaded tensors of two blocks at most (`rank_memory.rank_activations`). When a
block's backward pass begins, the tensors of the previous block start to come back. A block that
copies for C seconds, runs forward for F and backward for B (with recompute) makes compute wait

    out   max(0, C - F)                  back   max(0, C - B)

The last block of a stage with copies waits C on the way back, since no pass hides its copies.
Copies in both directions of PCIe at once take no longer than one. If the device is the host,
nothing is hidden. Everything is analytic: no step with copies was measured. Rhu et al. 2016 (vDNN),
arXiv 1602.08124.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.layers.layer_price import LayerTime
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.provenance import ZERO, Kind, Seconds


def copies_s(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> tuple[float, float]:
    """Seconds of the copies of one layer and micro-batch, to the host and back."""
    layer = (
        choice.kind,
        layout.micro_batch_size,
        layout.sharding_of(choice),
        choice.recompute,
        choice.on_host,
    )
    out = price_cache.host_copy(*layer, to_host=True)
    back = price_cache.host_copy(*layer, to_host=False)
    return out.value_s, back.value_s


def hidden_s(time: LayerTime, price_cache: LayerPriceCache) -> tuple[float, float]:
    """Seconds of copies to the host and back that the passes of a layer hide."""
    if price_cache.machine.cluster.device.is_host:
        return 0.0, 0.0
    return time.forward_s, time.backward_s + time.recompute_s


def exposed_copies(
    chunk: Sequence[LayerChoice], layout: ParallelLayout, price_cache: LayerPriceCache
) -> tuple[Seconds, Seconds]:
    """Returns the waits of one micro-batch for copies, forward and backward.

    chunk    the layers of a virtual stage
    """
    moving = [choice for choice in chunk if choice.on_host]
    if not moving:
        return ZERO, ZERO
    out_s = back_s = 0.0
    for choice in moving:
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        copied = copies_s(choice, layout, price_cache)
        hidden = hidden_s(time, price_cache)
        out_s += max(0.0, copied[0] - hidden[0])
        back_s += max(0.0, copied[1] - hidden[1])
    back_s += min(copied[1], hidden[1])  # no pass hides the copies of the last block
    return Seconds(out_s, Kind.ANALYTIC), Seconds(back_s, Kind.ANALYTIC)


def copied_bytes(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> int:
    """Bytes copied from one device of a pipeline rank to its host in a step.

    The same number of bytes comes back.
    """
    layout = strategy.layout
    return layout.num_micro_batches * sum(
        price_cache.activations(
            choice.kind,
            layout.micro_batch_size,
            layout.sharding_of(choice),
            choice.recompute,
            choice.on_host,
        ).host
        for chunk in strategy.chunks(rank)
        for choice in chunk
        if choice.on_host
    )
