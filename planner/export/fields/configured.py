"""The strategy and the price of settings, by the same prices as every plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.joined_pools import capacity_bytes
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.baselines.uniform_strategies import of_model, staged
from parplan.planner.candidates.enumeration import illegal_by_hand
from parplan.planner.export.fields.settings import Settings, with_training
from parplan.planner.validation.block_modules import OFFLOADED, RECOMPUTED, module_operators
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import has_unlike_blocks


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy with its prices."""

    strategy: Strategy
    price_cache: PriceCache
    price: StepPrice

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device."""
        return self.price.peak_bytes

    @property
    def missing_bytes(self) -> float:
        """Bytes that the device of a stage lacks, the most of any; 0 where all fit."""
        layout, cache = self.strategy.layout, self.price_cache
        lacks = (
            memory.total - capacity_bytes(layout, rank, cache)
            for rank, memory in enumerate(self.price.memory)
        )
        return max(0.0, *lacks)


def priced(strategy: Strategy, price_cache: PriceCache) -> Priced:
    """Returns the price of a strategy."""
    return Priced(strategy, price_cache, price_step(strategy, price_cache))


def price_settings(
    settings: Settings, model: ModelSpec, cluster: Cluster, training: TrainingSpec
) -> Priced:
    """Returns the strategy of settings and its price.

    training    what the settings leave open: the stack, fine-tuning, documents
    Raises ConfigError for settings that cannot run.
    """
    return priced(*unpriced(settings, model, cluster, training, KeyedCache()))


def unpriced(
    settings: Settings,
    model: ModelSpec,
    cluster: Cluster,
    training: TrainingSpec,
    price_caches: KeyedCache,
) -> tuple[Strategy, PriceCache]:
    """Returns the strategy of settings and the prices of its layers.

    price_caches    those of other settings, which share the prices of the same training
    Raises ConfigError for settings that cannot run.
    """
    training = with_training(training, settings)
    layout = settings.layout
    _require_legal(layout, settings, model, cluster, training)
    offload = (Offload.STATES,) if settings.states_on_host else ()
    price_cache: PriceCache = price_caches(
        (training, settings.zero_ranks, offload),
        lambda: PriceCache(
            model,
            training,
            machine_for(cluster),
            zero_ranks=settings.zero_ranks,
            offload=offload,
        ),
    )
    if settings.states_on_host and has_unlike_blocks(model, training):
        layout = replace(layout, states_on_host=True)
    shared = settings.replicas > 1 or price_cache.offloads_states
    zero = settings.zero if shared else 0
    return strategy_of_settings(settings, layout, zero, price_cache), price_cache


def strategy_of_settings(
    settings: Settings, layout: ParallelLayout, zero: int, price_cache: PriceCache
) -> Strategy:
    """Returns the strategy of a layout whose blocks have the recompute of settings."""
    strategy = _with_own_zero(staged(layout, tuple(_levels(settings)), zero), settings)
    strategy = of_model(strategy, price_cache)
    modules = settings.recompute_modules
    if settings.recompute is Recompute.SELECTIVE and modules is not None:
        strategy = by_module(strategy, modules, price_cache)
    return _offloaded(strategy, settings.offload_modules, price_cache)


def _offloaded(strategy: Strategy, modules: tuple[str, ...], price_cache: PriceCache) -> Strategy:
    """Returns the strategy with blocks whose host keeps what `modules` save."""

    def of(choice: LayerChoice) -> LayerChoice:
        if choice.kind.role is not LayerKind.BLOCK:
            return choice
        layer = price_cache.whole_layer(choice.kind)
        return replace(choice, on_host=module_operators(layer, modules, OFFLOADED))

    if not modules:
        return strategy
    return replace(strategy, stages=tuple(tuple(map(of, stage)) for stage in strategy.stages))


def _with_own_zero(strategy: Strategy, settings: Settings) -> Strategy:
    """Returns a strategy with the ZeRO stages that settings have for blocks and ends alone."""
    alike = settings.zero_of_blocks is None and settings.zero_of_ends is None
    if settings.replicas == 1 or alike:
        return strategy
    blocks = iter(settings.zero_of_blocks or ())

    def of(choice: LayerChoice) -> LayerChoice:
        if choice.kind.role is LayerKind.BLOCK:
            return replace(choice, zero=next(blocks, choice.zero))
        ends = settings.zero_of_ends
        return choice if ends is None else replace(choice, zero=ends)

    return replace(strategy, stages=tuple(tuple(map(of, stage)) for stage in strategy.stages))


def recomputed_operators(
    strategy: Strategy, price_cache: PriceCache
) -> tuple[tuple[str, ...], ...]:
    """Returns the operators that every layer of a strategy runs again, in the order of layers."""
    return tuple(
        price_cache.recompute_operators(choice.kind, choice.recompute)
        for stage in strategy.stages
        for choice in stage
    )


def by_module(strategy: Strategy, modules: tuple[str, ...], price_cache: PriceCache) -> Strategy:
    """Returns the strategy with blocks that recompute the operators of `modules`."""

    @cache
    def of(choice: LayerChoice) -> LayerChoice:
        if choice.kind.role is not LayerKind.BLOCK:
            return choice
        layer = price_cache.whole_layer(choice.kind)
        return replace(choice, recompute=module_operators(layer, modules, RECOMPUTED))

    return replace(strategy, stages=tuple(tuple(map(of, stage)) for stage in strategy.stages))


def _levels(settings: Settings) -> Iterator[tuple[Recompute, ...]]:
    """Yields the recompute levels of the blocks of each virtual stage."""
    if settings.recompute_of_blocks is not None:
        each = iter(settings.recompute_of_blocks)
        yield from (tuple(islice(each, count)) for count in settings.blocks)
        return
    in_turn: tuple[Recompute, ...] = (settings.recompute,)
    if settings.recompute is Recompute.SELECTIVE and settings.full_in_turn:
        in_turn = (Recompute.SELECTIVE, Recompute.FULL)
    levels = cycle(in_turn)
    for count in settings.blocks:
        first = count if settings.recompute_blocks is None else settings.recompute_blocks
        first = min(first, count)
        chosen = tuple(next(levels) for _ in range(first))
        yield chosen + (Recompute.NONE,) * (count - first)


def _require_legal(
    layout: ParallelLayout,
    settings: Settings,
    model: ModelSpec,
    cluster: Cluster,
    training: TrainingSpec,
) -> None:
    """Raises ConfigError for a layout that cannot run."""
    mesh = layout.mesh
    if mesh.num_ranks != cluster.num_gpus:
        raise ConfigError(
            f"{mesh} is {mesh.num_ranks} GPUs, the cluster has {cluster.num_gpus}",
            hint="change a degree or --gpus",
        )
    if sum(settings.blocks) != model.num_layers or len(settings.blocks) != settings.num_stages:
        raise ConfigError(
            f"{len(settings.blocks)} stages hold {sum(settings.blocks)} blocks, the model has "
            f"{model.num_layers} and the pipeline {settings.num_stages} stages",
            hint="change the stages",
        )
    reason = illegal_by_hand(layout, model, training, cluster, unlike_stages=True)
    if reason:
        raise ConfigError(reason, hint="change that setting")
    if settings.zero_ranks and settings.replicas % settings.zero_ranks:
        raise ConfigError(
            f"{settings.zero_ranks} ranks hold one copy of the states, which does not divide "
            f"the {settings.replicas} replicas",
            hint="use a divisor",
        )
