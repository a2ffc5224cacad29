"""What operators keep for the backward pass, on the host: copies under compute, and what is left of
them to wait for (EQUATIONS O10).

An operator that is named in `LayerChoice.on_host` sends what it keeps to the host as soon as it is
made, on a stream for that direction; a block's copies have ended when the block behind it has run
forward, so that the device holds what two blocks send at most (`occupancy.rank_activations`). When
a block's backward pass begins, the copies of the block before it start to come back. For a block
that copies in C seconds, runs forward in F and backward in B (recompute included), the compute
waits

    out   max(0, C - F)                  back   max(0, C - B)

and the last block of a stage that has copies, which nothing comes back before, C instead of the
latter. Both directions of PCIe at once take no longer than one. Where the device is the host
nothing is hidden. All is analytic: no step with copies was measured. Rhu et al. 2016 (vDNN), arXiv
1602.08124.
"""

from __future__ import annotations

from collections.abc import Sequence

from parplan.costmodels.layers.layer_price import LayerTime
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.provenance import ZERO, Kind, Seconds


def copies_s(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[float, float]:
    """Seconds of the copies of one layer and micro-batch, to the host and back."""
    b, sharding = layout.micro_batch_size, layout.sharding_of(choice)
    out, back = (
        price_cache.host_copy(
            choice.kind, b, sharding, choice.recompute, choice.on_host, to_host=to_host
        )
        for to_host in (True, False)
    )
    return out.value_s, back.value_s


def hidden_s(time: LayerTime, price_cache: PriceCache) -> tuple[float, float]:
    """Seconds of copies out and back that the passes of a layer hide."""
    apart = not price_cache.machine.cluster.device.is_host
    return time.forward_s * apart, (time.backward_s + time.recompute_s) * apart


def exposed_copies(
    chunk: Sequence[LayerChoice], layout: ParallelLayout, price_cache: PriceCache
) -> tuple[Seconds, Seconds]:
    """What one micro-batch waits for copies in the forward and in the backward pass of a virtual
    stage's layers.
    """
    moving = [choice for choice in chunk if choice.on_host]
    if not moving:
        return ZERO, ZERO
    out_s = back_s = 0.0
    for choice in moving:
        time = price_cache.layer_time(
            choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
        )
        copied, hidden = copies_s(choice, layout, price_cache), hidden_s(time, price_cache)
        out_s, back_s = (
            out_s + max(0.0, copied[0] - hidden[0]),
            back_s + max(0.0, copied[1] - hidden[1]),
        )
    back_s += min(copied[1], hidden[1])  # of the last of them, whose copies nothing hides
    return Seconds(out_s, Kind.ANALYTIC), Seconds(back_s, Kind.ANALYTIC)


def copied_bytes(strategy: Strategy, rank: int, price_cache: PriceCache) -> int:
    """Bytes that go from one device of a pipeline rank to its host in a step; as many come back."""
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
