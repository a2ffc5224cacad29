"""Redundant device bytes by class: bytes beyond the share of one copy (EQUATIONS R1, R2).

For a tensor x that is divided into q parts over the n devices of a stage: bytes_x (1/q - 1/n).
Parameters, gradients and optimizer states are redundant along the axes that do not shard them.
Saved activations (times the micro-batches in flight) are redundant along the axes that do not
divide them. Temporaries are redundant in whole, and a maximum over time, not a sum.

The one copy of the states is that of the whole model, at any location: for states on the host, q is
infinite on the device, and their class counts - bytes_x / n. So of two plans of a model the one
whose devices hold fewer states has fewer redundant bytes, and a class is negative if the devices
hold less than one copy of it. Activations that are recomputed or offloaded are in neither term.
Host bytes are not counted (`RankMemory.host`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from parplan.costmodels.chunks.chunk_memory import unchunked_prices
from parplan.costmodels.joined_pools import prices_at
from parplan.costmodels.layers.chunked_layer import state_widths, writes_over_parameters
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.model_states import (
    StateSharding,
    ideal_states,
    operator_states,
    operators_ideal_states,
    owned_parameters,
)
from parplan.costmodels.layers.recompute import (
    gradient_bytes,
    ideal_bytes_by_operator,
    recompute_operators,
    saved_bytes_by_operator,
)
from parplan.costmodels.memory.rank_memory import (
    RankMemory,
    besides_bytes,
    held_bytes,
    rank_layers,
    stashes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.profiles.models.operator_graph import LayerKind, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantBytes:
    """Redundant bytes on one device, by class."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries
        )


def summed_redundancy(parts: Iterable[RedundantBytes]) -> RedundantBytes:
    """Returns the sum by class."""
    listed = list(parts)
    return RedundantBytes(
        **{
            field.name: sum(getattr(part, field.name) for part in listed)
            for field in fields(RedundantBytes)
        }
    )


def rank_redundancy(
    strategy: Strategy, rank: int, memory: RankMemory, price_cache: LayerPriceCache
) -> RedundantBytes:
    """Returns the redundant bytes of one device of a pipeline rank, by class.

    They are the bytes of `memory` less the ideal, negative for a class with less than one copy.
    """
    layout = strategy.layout
    price_cache = prices_at(layout, rank, price_cache)
    ideal = [0.0, 0.0, 0.0]
    ideal_saved: dict[LayerChoice, float] = {}
    for choice in rank_layers(strategy, rank):
        sharding = layout.sharding_of(choice)
        parts = _ideal(choice, layout, price_cache)
        ideal = [total + part for total, part in zip(ideal, parts, strict=True)]
        ideal_saved[choice] = price_cache.activations(
            choice.kind, layout.micro_batch_size, sharding, choice.recompute, choice.on_host
        ).ideal_saved
    copied = ideal_states(
        _copied_elements(strategy, rank, price_cache),
        layout.mesh.ranks_per_stage,
        price_cache.training,
    )
    ideal = [total - part for total, part in zip(ideal, copied, strict=True)]
    return RedundantBytes(
        parameters=memory.states.parameters - ideal[0],
        gradients=memory.states.gradients - ideal[1],
        optimizer=memory.states.optimizer - ideal[2],
        activations=memory.activations
        - held_bytes(strategy, rank, ideal_saved, besides_bytes(strategy, rank, price_cache)),
        temporaries=memory.temporaries,
    )


def _copied_elements(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> int:
    """Parameters in the ideal states of a rank that an earlier stage holds too."""
    return sum(
        shared.elements
        for shared in price_cache.shared_parameters
        for stage in strategy.layout.stages_of(rank)
        if shared.in_ideal
        and strategy.holds(stage, shared.layers)
        and not strategy.holds(stage, shared.layers[:1])
    )


def _ideal(
    choice: LayerChoice, layout: ParallelLayout, price_cache: LayerPriceCache
) -> tuple[float, float, float]:
    """Returns the ideal states of one layer at any location, without the padding of chunks."""
    if not in_chunks(choice, layout):
        return (
            unchunked_prices(layout, price_cache)
            .states(choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero)
            .ideal
        )
    return ideal_states(
        owned_parameters(price_cache.layer(choice.kind, 1), Sharding()),
        layout.mesh.ranks_per_stage,
        price_cache.training,
    )


def operator_redundancy(
    choice: LayerChoice, rank: int, layout: ParallelLayout, price_cache: LayerPriceCache
) -> dict[str, RedundantBytes]:
    """Returns the redundant bytes of each operator of one layer on a device of a pipeline rank.

    Over the operators and layers of a rank all classes but temporaries add up to `rank_redundancy`.
    With virtual stages the layers are those of its largest chunk, which determines the stashes.
    Activations of a recompute ahead of the gradient and the padding of chunks of states count for
    the rank alone. Temporaries here are those of the operator's own backward pass: the largest
    moment counts for a layer and for a rank, not the sum.
    """
    sharding = layout.sharding_of(choice)
    layer = price_cache.divided_kept_layer(choice.kind, layout.micro_batch_size, sharding)
    is_block = choice.kind.role is LayerKind.BLOCK
    recomputed = recompute_operators(layer, choice.recompute) if is_block else ()
    stack = price_cache.training.stack
    saved = saved_bytes_by_operator(layer, sharding, recomputed, stack, choice.on_host)
    ideal = ideal_bytes_by_operator(layer, sharding.ranks, recomputed, choice.on_host)
    num_stashes = stashes(choice.kind.role, rank, layout)

    def of(operator: Operator) -> RedundantBytes:
        held, least = _operator_states(operator, choice, layout, price_cache)
        return RedundantBytes(
            parameters=held[0] - least[0],
            gradients=held[1] - least[1],
            optimizer=held[2] - least[2],
            activations=num_stashes * (saved[operator.name] - ideal[operator.name]),
            temporaries=float(gradient_bytes(operator, sharding, stack)),
        )

    return {operator.name: of(operator) for operator in layer.operators}


def _operator_states(
    operator: Operator,
    choice: LayerChoice,
    layout: ParallelLayout,
    price_cache: LayerPriceCache,
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Returns parameter, gradient and optimizer bytes of an operator on a device, and the ideal."""
    mesh = layout.mesh
    sharding = layout.sharding_of(choice)
    training = price_cache.training
    outside = unchunked_prices(layout, price_cache).training
    everywhere = [
        each
        for each in price_cache.whole_layer(choice.kind).operators
        if each.name == operator.name
    ]
    if in_chunks(choice, layout):
        over = writes_over_parameters(training, layout.num_micro_batches)
        elements = sharding.parameter_elements(operator) / mesh.dp
        widths, _ = state_widths(choice.home, training, over)
        held = (
            widths.parameters * elements,
            widths.gradients * elements,
            widths.optimizer * elements,
        )
        return held, operators_ideal_states(everywhere, mesh.ranks_per_stage, training)
    states = operator_states(
        operator,
        sharding,
        StateSharding(
            choice.zero_of(operator.name),
            price_cache.shards(mesh),
            mesh.pp > 1,
            price_cache.offloads_states,
        ),
        outside,
        narrow=price_cache.narrow_weights,
    )
    held = states.parameters, states.gradients, states.optimizer
    return held, operators_ideal_states(everywhere, mesh.ranks_per_stage, outside)
