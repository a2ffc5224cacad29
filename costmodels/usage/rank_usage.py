"""Memory and traffic of one rank in a step, predicted by the prices or measured by the executor."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_memory import device_memory
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.costmodels.usage.rank_traffic import SentBytes, rank_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """Bytes of tensors on a device of one pipeline rank, and its collectives in one step.

    states         parameters, gradients, optimizer states
    activations    most bytes saved for backward passes between two actions of the schedule
    temporaries    bytes at the peak beyond both
    apart          bytes by which the peak is below both, which never coexist: gradients may be
                   missing at the most activations
    saved          saved tensors of one micro-batch on all layers of the rank
    host           bytes that the host holds for the device
    """

    states: StateBytes
    activations: int
    temporaries: int
    saved: int
    sent: tuple[SentBytes, ...]
    apart: int = 0
    host: int = 0

    @property
    def held(self) -> int:
        """Bytes of tensors at the peak."""
        return self.states.total + self.activations + self.temporaries - self.apart


def predicted_use(strategy: Strategy, rank: int, price_cache: PriceCache) -> RankUse:
    """Returns the classes of `device_memory` and the collectives of `rank_traffic`."""
    layout, memory = strategy.layout, device_memory(strategy, rank, price_cache)
    saved = sum(
        price_cache.activations(
            choice.kind,
            layout.micro_batch_size,
            layout.sharding_of(choice),
            choice.recompute,
            choice.on_host,
        ).saved
        for choice in rank_layers(strategy, rank)
    )
    beyond = round(memory.temporaries - memory.apart)
    return RankUse(
        states=memory.states,
        activations=round(memory.activations),
        temporaries=max(0, beyond),
        saved=saved,
        sent=rank_traffic(strategy, rank, price_cache),
        apart=max(0, -beyond),
        host=round(memory.host),
    )
