"""The priced busy seconds of a step by class of kernels, beside those that a trace measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parplan.costmodels.memory.rank_memory import rank_layers
from parplan.costmodels.operators.compute import kernel_time
from parplan.costmodels.operators.host_launch import launch_cost_of
from parplan.costmodels.operators.kernels import FusedKernel, Kernel, ProductKernel
from parplan.costmodels.operators.operator_kernels import operator_kernels
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import rank_time
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.machines.measured_points import MEMBERS
from parplan.profiles.models.operator_graph import OperatorKind
from parplan.profiles.traces.trace_record import WorkClass


def priced_classes_s(
    strategy: Strategy, rank: int, price_cache: PriceCache
) -> dict[WorkClass, float]:
    """Returns the busy seconds of pipeline rank `rank` in a step, by class.

    Kernels take as long as in a step, recompute included. Collectives and copies are left out,
    because a trace does not tell their busy time from waits.
    """
    slowdown = launch_cost_of(price_cache.machine, price_cache.training.stack).kernel_slowdown
    repeats = strategy.layout.num_micro_batches * slowdown
    seconds: defaultdict[WorkClass, float] = defaultdict(float)
    for choice in rank_layers(strategy, rank):
        for kind, kernel in _kernels(choice, strategy, price_cache):
            time = kernel_time(kernel, price_cache.machine, price_cache.training)
            seconds[_class_of(kind, kernel)] += repeats * time.value_s
    optimizer_s = rank_time(strategy, rank, price_cache).optimizer.value_s
    return seconds | {WorkClass.OPTIMIZER: optimizer_s}


def _kernels(
    choice: LayerChoice, strategy: Strategy, price_cache: PriceCache
) -> Iterator[tuple[OperatorKind, Kernel]]:
    """Yields the kernels of a layer in one micro-batch, each with the kind of its operator."""
    layout = strategy.layout
    again = price_cache.recompute_operators(choice.kind, choice.recompute)
    for operator in price_cache.layer(choice.kind, layout.micro_batch_size).operators:
        runs = operator_kernels(operator, layout.sharding_of(choice), price_cache.training)
        times = 2 if operator.name in again else 1
        backward = runs.backward if operator.gradient else ()
        for kernel in (*times * runs.forward, *backward):
            yield operator.kind, kernel


def _class_of(kind: OperatorKind, kernel: Kernel) -> WorkClass:
    if kind is OperatorKind.ATTENTION or isinstance(kernel, FusedKernel):
        return WorkClass.ATTENTION
    if isinstance(kernel, ProductKernel):
        return WorkClass.PRODUCTS
    if kernel.name in MEMBERS["norm"] or kernel.like == "norm":
        return WorkClass.NORMS
    return WorkClass.ELEMENTWISE
