"""The fastest plan of each system and of each of Merak's techniques, in chains of shares.

A chain begins with a baseline and adds one technique of Merak a link. The share of a link is the
step before it over its own, so the product of all shares is the step of the baseline over that of
Merak. A link may use all techniques before it, or fewer. The order decides the shares: time that
one technique has hidden, a later one cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines import uniform_strategies
from parplan.planner.baselines.deepspeed_stages import partitions
from parplan.planner.baselines.merak_runtime import (
    MERAK_STACK,
    Choice,
    last_keeps_all,
    least_recompute,
    overlapped,
    shifted,
    without_pipeline,
)
from parplan.planner.baselines.optimum import Optimum, fastest
from parplan.planner.baselines.systems import WHOLE_LAYERS, baseline_strategies
from parplan.planner.baselines.uniform_strategies import staged, system_meshes
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.request import SearchOptions
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.stack import EVERY_RECOMPUTE, EVERY_SCHEDULE

GPU = "rtx3090-24gb"
SEQ_LENGTH = 1024
STACK = "megatron-lm-2021"
BASELINES = {
    "Megatron-LM 1F1B": "megatron-1f1b-2021",
    "Megatron-LM interleaved": "megatron-interleaved-2021",
    "DeepSpeed 3D": "deepspeed-3d",
}
PLAIN = "Merak's 1F1B, all layers recomputed or none"
# HPDL-Group/Merak has no ZeRO before d72efe5 (2023-11-29).
MERAK_ZERO = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on the cluster, with its prices and the bytes that a plan may fill of a device.

    tp, micro_batch_size  those of all systems, or None where each chooses its own
    """

    model: str
    price_cache: PriceCache
    limit_bytes: float
    tp: int | None = None
    micro_batch_size: int | None = None

    def fastest(self, space: Iterable[Strategy]) -> Optimum | None:
        """Return the fastest strategy of `space` that fits and has what is pinned."""
        pinned = (strategy for strategy in space if self._has_pins(strategy.layout))
        return fastest(pinned, self.price_cache, self.limit_bytes)

    def _has_pins(self, layout: ParallelLayout) -> bool:
        tp, size = layout.mesh.tp, layout.micro_batch_size
        return self.tp in (None, tp) and self.micro_batch_size in (None, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A system or technique at its fastest; `share` is None for the start of a chain."""

    name: str
    optimum: Optimum
    share: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.optimum.price.step_s


Chain = tuple[Link, ...]


def setting_of(model: str, gpus: int, global_batch_size: int, link_share: float = 1.0) -> Setting:
    """Return the setting with fp16 and fp16 gradients, which the step copies to fp32.

    Megatron-LM and DeepSpeed train in fp16 so. `link_share` is the share that is left of the
    bandwidth inside a node.
    """
    problem = request_of(
        TargetOptions(
            model=model,
            gpus=gpus,
            gpu=GPU,
            global_batch_size=global_batch_size,
            seq_length=SEQ_LENGTH,
            precision="fp16",
            gradient_precision="fp16",
            stack=STACK,
        )
    )
    # Merak's runtime has schedules that no stack of its year has.
    runtime = replace(problem.training.stack, schedules=EVERY_SCHEDULE, recompute=EVERY_RECOMPUTE)
    link = problem.cluster.intra_node
    slower = replace(link, bytes_per_s=link.bytes_per_s * link_share)
    cluster = replace(problem.cluster, intra_node=slower)
    return Setting(
        model=model,
        price_cache=PriceCache(
            problem.model, replace(problem.training, stack=runtime), machine_for(cluster)
        ),
        limit_bytes=limit_bytes(cluster, problem.training.stack, SearchOptions()),
    )


def plain_layouts(setting: Setting) -> tuple[ParallelLayout, ...]:
    """Return Merak's layouts at 1F1B; it has sequence parallelism since 3229171 (2023-06-09)."""
    cache = setting.price_cache
    return tuple(
        layout
        for mesh in system_meshes(MERAK_STACK, cache)
        for layout in uniform_strategies.plain_layouts(mesh, cache.model, cache.training)
    )


def baselines(setting: Setting) -> Iterator[Link]:
    """Yield each baseline that fits, at the fastest of all its choices."""
    for system, name in BASELINES.items():
        space = baseline_strategies(name, setting.price_cache, setting.limit_bytes)
        optimum = setting.fastest(space)
        if optimum:
            yield Link(name=system, optimum=optimum)


def chain(
    start: Link, setting: Setting, layouts: Sequence[ParallelLayout], *, plain: bool
) -> Chain:
    """Return `start` and a link for each technique on `layouts`, each with its share.

    With `plain` the first link is Merak without techniques; else `start` is that.
    """
    links, best = [start], None if plain else start.optimum
    for name, space in _techniques(setting, layouts, plain):
        optimum = setting.fastest(space())
        if optimum and (best is None or optimum.price.step_s < best.price.step_s):
            best = optimum
        if best:
            share = links[-1].step_s / best.price.step_s
            links.append(Link(name=name, optimum=best, share=share))
    return tuple(links)


def _techniques(
    setting: Setting, layouts: Sequence[ParallelLayout], plain: bool
) -> Iterator[tuple[str, Callable[[], Iterable[Strategy]]]]:
    halves = tuple(overlapped(layouts, setting.price_cache))
    if plain:
        yield PLAIN, lambda: _uniform(setting, layouts, WHOLE_LAYERS)
    yield "+ shifted critical path", lambda: last_keeps_all(_cut(setting, shifted(layouts)))
    yield "+ stage-aware recompute", lambda: _with_knob(setting, layouts)
    yield "+ sub-pipelining", lambda: _with_knob(setting, halves)


def _cut(setting: Setting, layouts: Iterable[ParallelLayout]) -> Iterator[Choice]:
    """Yield the layouts that have a pipeline on stages cut as Merak and DeepSpeed cut them."""
    for layout in layouts:
        if layout.mesh.pp > 1:
            for blocks in partitions(layout.mesh.pp, setting.price_cache):
                yield layout, blocks, MERAK_ZERO


def _uniform(
    setting: Setting, layouts: Sequence[ParallelLayout], levels: Sequence[Recompute]
) -> Iterator[Strategy]:
    for layout in layouts:
        for blocks in partitions(layout.mesh.pp, setting.price_cache):
            for level in levels:
                yield staged(layout, [(level,) * count for count in blocks], MERAK_ZERO)


def _with_knob(setting: Setting, layouts: Sequence[ParallelLayout]) -> Iterator[Strategy]:
    yield from without_pipeline(layouts, setting.price_cache, (MERAK_ZERO,))
    yield from least_recompute(
        _cut(setting, (*layouts, *shifted(layouts))), setting.price_cache, setting.limit_bytes
    )


def best_chain(setting: Setting) -> Chain | None:
    """Return the chain from the best baseline to Merak, each free in its choices.

    None where no baseline fits.
    """
    start = min(baselines(setting), key=lambda link: link.step_s, default=None)
    return chain(start, setting, plain_layouts(setting), plain=True) if start else None


def same_layout_chains(setting: Setting) -> tuple[Chain, ...]:
    """Return a chain for each layout with the most tp in a node, the fastest baseline first.

    The baseline is 1F1B with all layers recomputed, and every link has its mesh and micro-batch.
    """
    layouts, chains = plain_layouts(setting), []
    most = max(layout.mesh.tp for layout in layouts)
    for layout in layouts:
        if layout.mesh.tp == most:
            optimum = setting.fastest(_uniform(setting, (layout,), (Recompute.FULL,)))
            if optimum:
                start = Link(name="1F1B, all layers recomputed", optimum=optimum)
                chains.append(chain(start, setting, (layout,), plain=False))
    return tuple(sorted(chains, key=lambda links: links[0].step_s))


def whole(links: Chain) -> float:
    """Return the speed-up of a chain: the step of its start over that of its end."""
    return links[0].step_s / links[-1].step_s
