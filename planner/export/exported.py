"""The export of a plan: the nearest settings of a launcher, its files, and what is lost.

A plan goes into a launcher's files as far as its table reaches. The files are read back, and the
configuration that they say is priced like every plan: the parts that differ are those that the
launcher cannot say, with their costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, Strategy, count_text
from parplan.planner.baselines.optimum import INFINITY, fastest, leanest
from parplan.planner.export.fields.arguments import Words, written
from parplan.planner.export.fields.configured import (
    Priced,
    price_settings,
    recomputed_operators,
    strategy_of_settings,
    unpriced,
)
from parplan.planner.export.fields.launcher import (
    RecomputeChoice,
    Sheet,
    Target,
    given_of,
    read_back,
    require_plain,
)
from parplan.planner.export.fields.losses import LostPart, losses
from parplan.planner.export.fields.settings import Settings, settings_of
from parplan.planner.export.files.head import head_lines
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.equal_shares import equal_shares_text, with_equal_shares
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import SearchOptions
from parplan.planner.search.pooled_prices import pool_prices
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.unequal_cluster import UnequalCluster
from parplan.profiles.models.model_catalog import load_model, model_names
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec

_OVER_POOLS = "run it with parplan.executor, or export the plan files of --pools data"
_FULLY = 3  # the ZeRO stage that divides parameters too
_Tried = tuple[Settings, Strategy, PriceCache]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in the words of a launcher.

    plan         the plan at the prices of today
    configured   the configuration that the files say
    head         the lines at the head of every file
    files        their text by name, the first has the arguments
    """

    target: Target
    head: tuple[str, ...]
    plan: Priced
    configured: Priced
    files: Mapping[str, str]
    losses: tuple[LostPart, ...]


def export_plan(plan: Plan, target: Target, source: str) -> Export:
    """Returns the files of a plan for a launcher, and what they lose.

    source    the plan's file, for the head of every file
    Raises ConfigError for a plan that the launcher cannot run in any form.
    """
    today = reprice(plan)
    own = Priced(today.strategy, today.price_cache, today.price)
    sheet, configured = nearest(plan, own, target)
    lost = losses(own, configured)
    options = (*_model_option(plan, target), *written(target.stated, sheet.settings))
    head = head_lines(today.plan, source, target.source, configured, lost, options)
    return Export(
        target=target,
        head=head,
        plan=own,
        configured=configured,
        files=target.files(replace(sheet, head=head)),
        losses=lost,
    )


def nearest(plan: Plan, own: Priced, target: Target) -> tuple[Sheet, Priced]:
    """Returns the nearest settings of a target to a plan, and the price of what its files say.

    own    the plan at the prices of today
    Raises ConfigError for a plan that the launcher cannot run in any form.
    """
    _require_equal_nodes(plan, target)
    require_plain(plan.model, plan.training, target)
    _require_equal_shares(plan, target)
    training = training_on(target, plan.training)
    sheet = Sheet(settings=_nearest(plan, own, target, training), plan=plan, head=())
    files = target.files(sheet).items()
    said = (each for name, text in files for each in target.arguments(text, name))
    given = (*said, *given_of(written(target.stated, sheet.settings), target))
    back = target.settings(given, plan.model, plan.cluster.num_gpus)
    back = replace(back, pools=plan.pools)
    return sheet, price_settings(back, plan.model, plan.cluster, training)


def _require_equal_nodes(plan: Plan, target: Target) -> None:
    """Raises ConfigError for pools whose nodes have unlike numbers of GPUs.

    A launcher starts the same number of processes on every node.
    """
    cluster = plan.cluster
    if isinstance(cluster, UnequalCluster):
        counts = sorted({pool.cluster.gpus_per_node for pool in cluster.pools})
        if len(counts) > 1:
            raise ConfigError(
                f"{target.name} starts as many processes on every node, the pools of cluster "
                f"{cluster.name} have {' and '.join(map(str, counts))} GPUs a node",
                hint=_OVER_POOLS,
            )


def _require_equal_shares(plan: Plan, target: Target) -> None:
    """Raises ConfigError for data-parallel ranks with unequal shares; no launcher starts those."""
    if not plan.pipeline.micro_batches_of_replicas:
        return
    equal = with_equal_shares(plan)
    changed = f"{equal_shares_text(equal)} and leave micro_batches_of_replicas out" if equal else ""
    counts = count_text(plan.pipeline.num_micro_batches, plan.pipeline.micro_batches_of_replicas)
    raise ConfigError(
        f"data-parallel ranks of the plan have {counts} micro-batches, {target.name} gives all of "
        "them the same number",
        hint="run it with parplan.executor" + (f", or {changed}" if changed else ""),
    )


def as_priced(plan: Plan) -> Priced:
    """Returns the strategy of a plan at the prices of today."""
    today = reprice(plan)
    return Priced(today.strategy, today.price_cache, today.price)


def training_on(target: Target, training: TrainingSpec) -> TrainingSpec:
    """Returns a training on a stack of the target, its own where that is one of them."""
    if training.stack.name in target.stacks:
        return training
    stack = load_stack(target.stacks[0])
    return replace(training, stack=stack, overlap_grad_reduce=stack.overlap_grad_reduce)


def _nearest(plan: Plan, own: Priced, target: Target, training: TrainingSpec) -> Settings:
    """Returns the fastest settings of a target that fit and that are next to a plan.

    The mesh and the batch stay. A ZeRO stage or a recompute that the target says as the plan has it
    stays too; for any other all those of the target are tried.
    """
    usual = settings_of(plan)
    tried, refused = _tried(usual, plan, own, target, training)
    if not tried and usual.virtual_stages > 1:
        usual = _one_stage_a_rank(usual, own)
        tried, _ = _tried(usual, plan, own, target, training)
    if not tried:  # it has the ZeRO stage, but not beside this mesh
        tried, _ = _tried(usual, plan, own, target, training, every_zero=True)
    if not tried:
        assert refused is not None, "a target has some recompute"
        raise refused
    limit = max(_limit_bytes(prices) for prices in {price_cache for _, _, price_cache in tried})
    room = max(limit, own.peak_bytes)  # the plan may be of another limit
    return _fastest(tried, room) or _leanest(tried)


def _limit_bytes(prices: PriceCache) -> float:
    """Returns the bytes that a plan may fill on the device with most room.

    The prices of each pool get its own limit.
    """
    options = SearchOptions()
    cluster = prices.machine.cluster
    if not cluster.pool_names:
        return limit_bytes(cluster, prices.training.stack, options)
    return max(pool_prices(pool, prices, options).most_bytes for pool in cluster.pool_names)


def _fastest(tried: Sequence[_Tried], room_bytes: float) -> Settings | None:
    """Returns the fastest of the settings that fit, None where none does."""
    found: tuple[float, Settings] | None = None
    for price_cache, group in _by_prices(tried):
        below_s = found[0] if found else INFINITY
        optimum = fastest(group, price_cache, room_bytes, below_s=below_s)
        if optimum is not None:
            found = optimum.price.step_s, group[optimum.strategy]
    return found[1] if found else None


def _leanest(tried: Sequence[_Tried]) -> Settings:
    """Returns the settings whose fullest device needs the least memory."""
    best = [
        (lean.peak_bytes, group[lean.strategy])
        for price_cache, group in _by_prices(tried)
        for lean in (leanest(tuple(group), price_cache),)
    ]
    return min(best, key=itemgetter(0))[1]


def _by_prices(tried: Sequence[_Tried]) -> Iterator[tuple[PriceCache, dict[Strategy, Settings]]]:
    """Yields the settings by strategy that have the same prices of layers; of equals the first."""
    groups: dict[PriceCache, dict[Strategy, Settings]] = {}
    for settings, strategy, price_cache in tried:
        groups.setdefault(price_cache, {}).setdefault(strategy, settings)
    yield from groups.items()


def _tried(
    usual: Settings,
    plan: Plan,
    own: Priced,
    target: Target,
    training: TrainingSpec,
    *,
    every_zero: bool = False,
) -> tuple[list[_Tried], ConfigError | None]:
    """Returns the candidates that can run, and why the last of the others cannot."""
    tried: list[_Tried] = []
    refused, price_caches = None, KeyedCache()
    for settings in _candidates(plan, own, usual, target, every_zero=every_zero):
        try:
            back = read_back(target, settings, plan.model, plan.cluster)
            found = unpriced(back, plan.model, plan.cluster, training, price_caches)
            tried.append((settings, *found))
        except ConfigError as error:
            refused = error
    return tried, refused


def _one_stage_a_rank(settings: Settings, own: Priced) -> Settings:
    """Returns settings in which every pipeline rank has its blocks in one stage."""
    layout = own.strategy.layout
    by_rank = [
        sum(settings.blocks[stage] for stage in layout.stages_of(rank))
        for rank in range(settings.pp)
    ]
    return replace(settings, virtual_stages=1, blocks=tuple(by_rank), schedule=Schedule.ONE_F_ONE_B)


def _model_option(plan: Plan, target: Target) -> Iterator[tuple[str, Words]]:
    """Yields the option that names the model, where no file of the target says its shape."""
    name = plan.model.name
    if target.model is None and name in model_names() and load_model(name).spec == plan.model:
        yield "--model", (name,)


def _candidates(
    plan: Plan, own: Priced, usual: Settings, target: Target, *, every_zero: bool
) -> Iterator[Settings]:
    """Yields the settings of a target with the mesh and the batch of a plan.

    every_zero    all ZeRO stages of the target, also where it has that of the plan
    """
    choices = [choice for stage in own.strategy.stages for choice in stage]
    zeros = {choice.zero for choice in choices} | {
        zero for choice in choices for _, zero in choice.own_zero
    }
    exact = len(zeros) == 1 and zeros <= set(target.zeros) and not every_zero
    recomputes = tuple(target.recomputes(plan.model, max(usual.blocks)))
    alike = len(usual.blocks) == len(own.strategy.stages)
    same = tuple(
        each for each in recomputes if alike and is_same_recompute(own, replace(usual, **each))
    )
    if target.layered and alike:
        yield from _layered(own, usual, target, recomputes)
        return
    for zero, chosen in product(zeros if exact else target.zeros, same[:1] or recomputes):
        yield replace(usual, zero=zero, **chosen)


def _layered(
    own: Priced, usual: Settings, target: Target, recomputes: tuple[RecomputeChoice, ...]
) -> Iterator[Settings]:
    """Yields the settings that say each layer of a plan: ZeRO 3 or another stage, and its level.

    A block that recomputes other operators than the levels of the target is tried with each.
    """
    cache = own.price_cache
    known: tuple[Recompute, ...] = tuple(each["recompute"] for each in recomputes)
    choices = [choice for stage in own.strategy.stages for choice in stage]
    blocks = [choice for choice in choices if choice.kind.role is LayerKind.BLOCK]
    levels = [_level(each, known, cache) for each in blocks]
    ends = {choice.zero for choice in choices if choice.kind.role is not LayerKind.BLOCK}
    usual_zeros = {block.zero for block in blocks} - {_FULLY} or {_FULLY}
    exact = len(usual_zeros) == 1 and usual_zeros <= set(target.zeros)
    for zero, part in product(
        usual_zeros if exact else target.zeros,
        known if None in levels else known[:1],
    ):
        yield replace(
            usual,
            zero=zero,
            zero_of_blocks=tuple(_FULLY if block.zero == _FULLY else zero for block in blocks),
            zero_of_ends=_FULLY if ends == {_FULLY} else zero,
            recompute_of_blocks=tuple(level or part for level in levels),
            recompute_modules=None,
        )


def _level(
    choice: LayerChoice, known: tuple[Recompute, ...], cache: PriceCache
) -> Recompute | None:
    """Returns the level that recomputes the operators of a block, None where none does."""
    again = set(cache.recompute_operators(choice.kind, choice.recompute))
    levels = (each for each in known if set(cache.recompute_operators(choice.kind, each)) == again)
    return next(levels, None)


def is_same_recompute(own: Priced, settings: Settings) -> bool:
    """True if the layers of a plan recompute the operators of settings with its stages."""
    cache = own.price_cache
    strategy = strategy_of_settings(settings, own.strategy.layout, 0, cache)
    return recomputed_operators(strategy, cache) == recomputed_operators(own.strategy, cache)
