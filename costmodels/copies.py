"""What operators keep for the backward pass, on the host: copies under compute, and what is left of them to wait for.

An operator that is named in `LayerChoice.on_host` sends what it keeps to the host as soon as it is made, on a stream for that
direction; a block's copies have ended when the block behind it has run forward, so that the device holds what two blocks send
at most (`occupancy.rank_activations`). When a block's backward pass begins, the copies of the block before it start to come
back. For a block that copies in C seconds, runs forward in F and backward in B (recompute included), the compute waits

    out   max(0, C - F)                  back   max(0, C - B)

and the last block of a stage that has copies, which nothing comes back before, C instead of the latter. Both directions of PCIe
at once take no longer than one. Where the device is the host nothing is hidden. All is analytic: no step with copies was
measured. Rhu et al. 2016 (vDNN), arXiv 1602.08124.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.book import PriceBook
from costmodels.strategy import Frame, LayerChoice, Strategy
from profiles.hardware import CPU
from profiles.provenance import ZERO, Kind, Seconds


def copy_s(choice: LayerChoice, frame: Frame, book: PriceBook, *, to_host: bool) -> float:
    """Seconds of the copies of one layer and micro-batch in one direction, nothing where it has none."""
    sharding = frame.sharding_of(choice)
    return book.host_copy(choice.kind, frame.micro_batch_size, sharding, choice.recompute, choice.on_host, to_host=to_host).value_s


def exposed_copies(chunk: Sequence[LayerChoice], frame: Frame, book: PriceBook) -> tuple[Seconds, Seconds]:
    """What one micro-batch waits for copies in the forward and in the backward pass of a virtual stage's layers."""
    moving = [choice for choice in chunk if choice.on_host]
    if not moving:
        return ZERO, ZERO
    out_s, back_s, apart = 0.0, 0.0, book.machine.cluster.device.name == CPU
    for index, choice in enumerate(moving):
        time = book.layer_time(choice.kind, frame.micro_batch_size, frame.sharding_of(choice), choice.recompute)
        first = apart or index == len(moving) - 1
        out_s += max(0.0, copy_s(choice, frame, book, to_host=True) - (0.0 if apart else time.forward_s))
        back_s += max(0.0, copy_s(choice, frame, book, to_host=False) - (0.0 if first else time.backward_s + time.recompute_s))
    return Seconds(out_s, Kind.ANALYTIC), Seconds(back_s, Kind.ANALYTIC)


def copied_bytes(strategy: Strategy, rank: int, book: PriceBook) -> int:
    """Bytes that go from one device of a pipeline rank to its host in a step; as many come back."""
    frame = strategy.frame
    return frame.num_micro_batches * sum(
        book.activations(choice.kind, frame.micro_batch_size, frame.sharding_of(choice), choice.recompute, choice.on_host).host
        for chunk in strategy.chunks(rank) for choice in chunk if choice.on_host)
