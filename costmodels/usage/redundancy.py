"""Bytes that a device holds beyond its share of one copy of everything (EQUATIONS R1, R2), by
class.

For a tensor x that is divided into q parts over the n devices of a stage: bytes_x (1/q - 1/n).
Parameters, gradients and optimizer states are redundant along the axes that do not shard them, kept
activations (times the micro-batches in flight) along those that do not divide them; temporaries are
redundant in whole, and a maximum over time, not a sum.

The one copy of the states is that of the whole model, wherever it lies: states that the host keeps
are not on the device, q is infinite there, and their class counts - bytes_x / n. So of two plans of
a model the one whose devices hold fewer states has the fewer redundant bytes, and a plan whose
devices hold less than one copy of a class has less than none of it. Activations that are not kept,
or that the host keeps, are in neither term. What the host holds is no part of it
(`RankMemory.host`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from parplan.costmodels.chunks.chunk_memory import prices_of
from parplan.costmodels.layers.chunked_layer import state_widths, writes_over_parameters
from parplan.costmodels.layers.model_states import (
    StateSharding,
    ideal_states,
    operator_states,
    owned_parameters,
)
from parplan.costmodels.layers.recompute import (
    gradient_bytes,
    ideal_bytes_by_operator,
    recompute_operators,
    saved_bytes_by_operator,
)
from parplan.costmodels.memory.rank_memory import RankMemory, held_bytes, rank_layers, stashes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
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


def added(parts: Iterable[RedundantBytes]) -> RedundantBytes:
    """The sum by class."""
    listed = list(parts)
    return RedundantBytes(
        **{
            field.name: sum(getattr(part, field.name) for part in listed)
            for field in fields(RedundantBytes)
        }
    )


def rank_redundancy(
    strategy: Strategy, rank: int, memory: RankMemory, price_cache: PriceCache
) -> RedundantBytes:
    """Redundant bytes of one device of a pipeline rank that holds `memory`: what it holds, less the
    ideal, by class.

    A class that holds less than one copy counts as is.
    """
    layout = strategy.layout
    ideal = [0.0, 0.0, 0.0]
    kept: dict[LayerChoice, float] = {}
    for choice in rank_layers(strategy, rank):
        sharding = layout.sharding_of(choice)
        parts = _ideal(choice, layout, price_cache)
        ideal = [total + part for total, part in zip(ideal, parts, strict=True)]
        kept[choice] = price_cache.activations(
            choice.kind, layout.micro_batch_size, sharding, choice.recompute, choice.on_host
        ).ideal_saved
    return RedundantBytes(
        parameters=memory.states.parameters - ideal[0],
        gradients=memory.states.gradients - ideal[1],
        optimizer=memory.states.optimizer - ideal[2],
        activations=memory.activations - held_bytes(strategy, rank, kept),
        temporaries=memory.temporaries,
    )


def _ideal(
    choice: LayerChoice, layout: ParallelLayout, price_cache: PriceCache
) -> tuple[float, float, float]:
    """Of one layer, wherever its states lie; of a block in chunks without padding."""
    if not in_chunks(choice, layout):
        return (
            prices_of(layout, price_cache)
            .states(choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero)
            .ideal
        )
    return ideal_states(
        owned_parameters(price_cache.layer(choice.kind, 1), Sharding()),
        layout.mesh.ranks_per_stage,
        price_cache.training,
    )


def operator_redundancy(
    choice: LayerChoice, rank: int, layout: ParallelLayout, price_cache: PriceCache
) -> dict[str, RedundantBytes]:
    """Redundant bytes of each operator of one layer on a device of pipeline rank `rank`.

    Over the operators and layers of a rank all classes but temporaries add up to `rank_redundancy`
    (with virtual stages, over the layers of its largest chunk, which the stashes are counted by;
    what a recompute ahead of the gradient makes is in the rank's alone, and so is the padding of
    chunks of states). Temporaries here are those of the operator's own backward pass: of a layer
    and of a rank the largest moment counts, not the sum.
    """
    layer, sharding = (
        price_cache.kept_layer(choice.kind, layout.micro_batch_size),
        layout.sharding_of(choice),
    )
    again, stack = (
        recompute_operators(layer, choice.recompute) if choice.kind is LayerKind.BLOCK else (),
        price_cache.training.stack,
    )
    kept = saved_bytes_by_operator(layer, sharding, again, stack, choice.on_host)
    ideal = ideal_bytes_by_operator(layer, sharding.tp, again, choice.on_host)
    held = stashes(choice.kind, rank, layout)

    def of(operator: Operator) -> RedundantBytes:
        own, least = _operator_states(operator, choice, layout, price_cache)
        return RedundantBytes(
            parameters=own[0] - least[0],
            gradients=own[1] - least[1],
            optimizer=own[2] - least[2],
            activations=held * (kept[operator.name] - ideal[operator.name]),
            temporaries=float(gradient_bytes(operator, sharding, stack)),
        )

    return {operator.name: of(operator) for operator in layer.operators}


def _operator_states(
    operator: Operator,
    choice: LayerChoice,
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Parameter, gradient and optimizer bytes of one operator on a device, and how few they could
    be.
    """
    mesh, sharding, training = layout.mesh, layout.sharding_of(choice), price_cache.training
    outside = prices_of(layout, price_cache).training
    everywhere = (
        each
        for each in price_cache.graph(1).layer_class(choice.kind).operators
        if each.name == operator.name
    )
    whole = sum(p.num_elements for each in everywhere for p in each.parameters if not p.tied)
    if in_chunks(choice, layout):
        over = writes_over_parameters(training, layout.num_micro_batches)
        own, (widths, _) = (
            sharding.parameter_elements(operator) / mesh.dp,
            state_widths(choice.home, training, over),
        )
        held = widths.parameters * own, widths.gradients * own, widths.optimizer * own
        return held, ideal_states(whole, mesh.ranks_per_stage, training)
    states = operator_states(
        operator,
        sharding,
        StateSharding(
            choice.zero, price_cache.shards(mesh), mesh.pp > 1, price_cache.offloads_states
        ),
        outside,
    )
    return (states.parameters, states.gradients, states.optimizer), ideal_states(
        whole, mesh.ranks_per_stage, outside
    )
