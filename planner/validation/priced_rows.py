"""Prices the configurations of measured training steps, to compare prediction and measurement.

A row that cannot be priced is returned with its reason, never dropped. A row of an experiment that
the terms were fitted to (profiles/machines/stack_terms.py) is priced with terms fitted without that
experiment; every other row is priced with the shipped terms.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.rank_memory import RankMemory
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.enumeration import illegal_layout
from parplan.planner.candidates.meshes import illegal_tensor_parallel
from parplan.planner.plan.assemble import step_kind
from parplan.planner.plan.oom_risk import default_margin
from parplan.planner.plan.ratio_band import Shape, shape_of
from parplan.planner.plan.traits import Run, family_of, traits_of
from parplan.planner.search.estimate import default_blocks, uniform_strategy
from parplan.planner.validation.block_modules import OFFLOADED, RECOMPUTED, module_operators
from parplan.planner.validation.configuration import (
    Configuration,
    configuration_of,
    experiment_of,
)
from parplan.planner.validation.frameworks import (
    BEFORE_A_CHANGE,
    FIGURES_AGREE,
    FIGURES_DISAGREE,
    NAMED_FAULTS,
    UNCHECKED_TIMES,
)
from parplan.planner.validation.kept_products import with_kept_products
from parplan.planner.validation.reported_memory import predicted_gib
from parplan.planner.validation.row_cells import OPTIONAL, Row, UnpricedError, source_of
from parplan.planner.validation.row_completion import completed
from parplan.planner.validation.row_stack import NO_MODULES, Modules
from parplan.planner.validation.step_rows import read_table
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.stack_terms import Terms
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import GIB

# words in notes of rows whose time says nothing of their configuration, and what they are
UNTIMED = {
    "small models are launch-bound": "small models, which are launch-bound",
    "functional (untuned) run": "functional runs, whose source calls their times sanity checks",
    "INCONSISTENT": FIGURES_DISAGREE,
    "power limited": "devices of a lower power limit, which their source does not state",
}
BY_ID = (  # the same by the id of a row
    (NAMED_FAULTS, "a release that was slow by a fault which its publisher names"),
    (UNCHECKED_TIMES, "release tests whose source checks no time"),
)
BUSY_NETWORK = "vary +-40% with network load"  # in notes: such rows do not compare
TOY_SHARE = 0.1  # share of a device; smaller runs say little about a device that is nearly full
OUT_OF_MEMORY = ("OOM", "out-of-memory")  # memory_kind of a run that ran out


@dataclass(frozen=True, slots=True)
class PricedRow:
    """Measured and predicted seconds and GiB of one row, or the `reason` why it is not priced.

    grid                 key of the rows of one source, model, number of GPUs and tokens in a step;
                         None where its source warns that times hang on the load of the network, so
                         that no two of them compare
    predicted_total_gib  GiB of the fullest device, with the reserve
    capacity_gib         GiB of the device
    predicted_fits       true if the fullest device fits with its margin
    out_of_memory        true if the run ran out of memory, None when unknown
    assumed              settings that the row left open
    taken                where settings that the row leaves out were taken from
    untimed              why the row's time is not compared; nor is its memory where its figures
                         disagree
    differing            cells that contradict the published shape of the row's model
    experiment           the fold that is left out with the row
    traits               by which its error band is made
    shape                the degrees in which it differs from them
    """

    id: str
    source: str
    measured_s: float | None = None
    predicted_s: float | None = None
    measured_gib: float | None = None
    predicted_gib: float | None = None
    reason: str | None = None
    kind: str | None = None
    grid: str | None = None
    capacity_gib: float | None = None
    predicted_total_gib: float | None = None
    out_of_memory: bool | None = None
    predicted_fits: bool | None = None
    assumed: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    untimed: tuple[str, ...] = ()
    experiment: str = ""
    traits: tuple[str, ...] = ()
    shape: Shape = ()

    @property
    def error(self) -> float | None:
        """Relative error of the step time, positive when the prediction is too slow."""
        return _relative_error(self.predicted_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        return _relative_error(self.predicted_gib, self.measured_gib)

    @property
    def time_deviation(self) -> float | None:
        """The measured step time over the predicted one, less 1."""
        return _relative_error(self.measured_s, self.predicted_s)

    @property
    def memory_deviation(self) -> float | None:
        """The measured memory over the predicted one, less 1; None for a toy run.

        A run that holds less than a tenth of the device says little about a full one.
        """
        is_toy = (self.measured_gib or 0) < TOY_SHARE * (self.capacity_gib or 0)
        return None if is_toy else _relative_error(self.measured_gib, self.predicted_gib)


def _relative_error(value: float | None, reference: float | None) -> float | None:
    return value / reference - 1 if value and reference else None


def price_row(
    row: Row,
    terms: Terms | None = None,
    *,
    held_out: bool | None = None,
    speeds: SpeedFactors | None = None,
    computed: bool = False,
) -> PricedRow:
    """Prices the row as the configuration it states, or returns the reason why it cannot.

    `terms` replaces the shipped terms. With `held_out` the terms are those fitted without the
    row's experiment; by default a row is held out if the shipped table, which terms are fitted to,
    has rows of the same experiment, model and GPUs. `speeds` prices it on a machine with other
    speeds, `computed` on one whose device counts as unmeasured.
    """
    row = dict.fromkeys(OPTIONAL, "") | dict(row)
    if held_out is None:
        held_out = _workload(row) in _fitted_workloads()
    without = experiment_of(row) if held_out else None
    complete, _ = completed(row)
    try:
        configuration = configuration_of(row, terms, without=without)
        machine = machine_for(configuration.cluster, terms, without=without, measured=not computed)
        price_cache = PriceCache(
            configuration.model,
            configuration.training,
            machine if speeds is None else at_speeds(machine, speeds),
        )
        price = price_configuration(configuration, price_cache)
    except (UnpricedError, ConfigError) as error:
        return PricedRow(
            row["id"],
            source_of(row),
            reason=_counted(str(error)) if isinstance(error, ConfigError) else str(error),
        )
    fullest = max(price.memory, key=lambda memory: memory.total)
    capacity = configuration.cluster.device.memory_bytes
    margin = default_margin(family_of(configuration.training.stack)).share
    return PricedRow(
        row["id"],
        source_of(row),
        measured_s=_measured_s(complete),
        predicted_s=price.step_s,
        measured_gib=_measured_gib(row),
        predicted_gib=predicted_gib(price.memory, row["memory_kind"]),
        kind=step_kind(price),
        grid=_grid(row, configuration),
        capacity_gib=capacity / GIB,
        predicted_total_gib=fullest.total / GIB,
        out_of_memory=_ran_out(row),
        predicted_fits=fullest.total <= capacity * (1 - margin),
        assumed=configuration.assumed,
        taken=configuration.taken,
        differing=configuration.differing,
        untimed=_untimed(complete),
        experiment=experiment_of(row),
        traits=traits_of(
            Run(
                model=configuration.model,
                training=configuration.training,
                machine=price_cache.machine,
                mesh=configuration.mesh,
                zero=configuration.zero,
            )
        ),
        shape=shape_of(configuration.mesh, configuration.micro_batches[0]),
    )


def _grid(row: Row, configuration: Configuration) -> str | None:
    """Returns the key of the row's grid, None if its times hang on the load of a network.

    The batch is in tokens, since sequence lengths differ. Rows on either side of a change of the
    machine that their source names are of two grids.
    """
    if BUSY_NETWORK in row["notes"]:
        return None
    tokens = configuration.training.tokens_per_step
    before = ("before the change",) if BEFORE_A_CHANGE.match(row["id"]) else ()
    parts = (source_of(row), row["model"], row["gpu"], row["n_gpus"], f"{tokens} tokens")
    return "|".join((*parts, *before))


def _counted(reason: str) -> str:
    """Replaces the numbers of a reason, so that equal reasons are counted together."""
    return re.sub(r"\b\d+\b", "N", reason)


def _workload(row: Row) -> tuple[str, ...]:
    return experiment_of(row), row.get("model", ""), row.get("gpu", ""), row["n_gpus"]


@functools.cache
def _fitted_workloads() -> frozenset[tuple[str, ...]]:
    """Returns the workloads of the shipped table of measured steps."""
    return frozenset(map(_workload, read_table()))


def _ran_out(row: Row) -> bool | None:
    """True if the run ran out of memory, False if it has a measurement, None if it has neither."""
    if row["memory_kind"] in OUT_OF_MEMORY or row["notes"].startswith("OOM"):
        return True
    if row["step_time_s"] or row["derived_step_time_s"] or row["peak_memory_gib"]:
        return False
    return None


def price_configuration(configuration: Configuration, price_cache: PriceCache) -> StepPrice:
    """Prices a configuration with its fastest choice that fits, or its leanest if none does."""
    prices: list[StepPrice] = []
    refused: UnpricedError | None = None
    for micro_batch in configuration.micro_batches:
        for virtual_stages in configuration.virtual_stages:
            layout = configuration.layout(micro_batch, virtual_stages)
            for levels in configuration.recompute:
                try:
                    prices.append(_price_one(configuration, layout, levels, price_cache))
                except UnpricedError as error:
                    refused = error
    if not prices:
        raise refused or UnpricedError("no choice for what the row leaves open")
    capacity = price_cache.machine.cluster.device.memory_bytes
    fitting = [price for price in prices if _peak(price) <= capacity]
    return min(fitting, key=lambda price: price.step_s) if fitting else min(prices, key=_peak)


def _peak(price: StepPrice) -> float:
    return max(memory.total for memory in price.memory)


def _price_one(
    configuration: Configuration,
    layout: ParallelLayout,
    levels: tuple[Recompute, ...],
    price_cache: PriceCache,
) -> StepPrice:
    price = price_step(strategy_of(configuration, layout, levels, price_cache), price_cache)
    memory = held(configuration, price.memory, levels, layout, price_cache)
    return replace(price, memory=memory)


def strategy_of(
    configuration: Configuration,
    layout: ParallelLayout,
    levels: tuple[Recompute, ...],
    price_cache: PriceCache,
) -> Strategy:
    """Returns the strategy of one choice of what a configuration leaves open.

    Raises UnpricedError for a layout that is not legal.
    """
    model = configuration.model
    stages = configuration.stages_of(layout)
    reason = illegal_tensor_parallel(
        layout.mesh.tp, model, configuration.cluster, across_nodes=True
    ) or illegal_layout(layout, model, configuration.training, unlike_stages=stages is not None)
    if reason:
        raise UnpricedError(_counted(reason))
    strategy = uniform_strategy(
        layout,
        stages or default_blocks(layout, model.num_layers),
        zero=configuration.zero,
        recompute=levels[0],
        price_cache=price_cache,
    )
    if configuration.modules != NO_MODULES:
        strategy = _by_module(strategy, configuration.modules, price_cache)
    return _in_turn(strategy, levels) if len(levels) > 1 else strategy


def held(
    configuration: Configuration,
    memory: Sequence[RankMemory],
    levels: tuple[Recompute, ...],
    layout: ParallelLayout,
    price_cache: PriceCache,
) -> tuple[RankMemory, ...]:
    """Returns the memory of the ranks of a row, whose activations in flight may be more.

    Blocks at the recompute `levels` in turn may keep other products than these say. Where every
    rank has its part of both ends, the first has the head as well.
    """
    memory = with_kept_products(memory, levels, configuration.model, layout, price_cache)
    ranks = [
        replace(rank, activations=rank.activations * configuration.in_flight) for rank in memory
    ]
    if not configuration.every_end:
        return tuple(ranks)
    temporaries = max(rank.temporaries for rank in ranks)
    first = replace(ranks[0], temporaries=temporaries)
    return (_with_head(first, configuration, layout, price_cache), *ranks[1:])


def _with_head(
    rank: RankMemory, configuration: Configuration, layout: ParallelLayout, price_cache: PriceCache
) -> RankMemory:
    """Returns the memory of a rank with the states and the saved tensors of the head."""
    sharding = layout.sharding
    head = price_cache.states(LayerKind.HEAD, layout.mesh, sharding, configuration.zero)
    saved = price_cache.activations(LayerKind.HEAD, layout.micro_batch_size, sharding).saved
    saved_bytes = saved * configuration.in_flight
    spare = configuration.training.stack.allocator_share * (head.states.total + saved_bytes)
    return replace(
        rank,
        states=rank.states + head.states,
        activations=rank.activations + saved_bytes,
        allocator_reserve=rank.allocator_reserve + spare + head.step_copies,
    )


def _by_module(strategy: Strategy, modules: Modules, price_cache: PriceCache) -> Strategy:
    """Returns the strategy with blocks that recompute and offload the operators of `modules`."""

    def of(choice: LayerChoice) -> LayerChoice:
        if choice.kind.role is not LayerKind.BLOCK:
            return choice
        layer = price_cache.whole_layer(choice.kind)
        recomputed = module_operators(layer, modules.recomputed, RECOMPUTED)
        return replace(
            choice,
            recompute=recomputed if modules.recomputed else choice.recompute,
            on_host=module_operators(layer, modules.offloaded, OFFLOADED),
        )

    return replace(strategy, stages=tuple(tuple(map(of, stage)) for stage in strategy.stages))


def _in_turn(strategy: Strategy, levels: tuple[Recompute, ...]) -> Strategy:
    """Returns the strategy with its blocks at the recompute levels in turn."""
    cycle = itertools.cycle(levels)
    stages = tuple(
        tuple(
            replace(choice, recompute=next(cycle))
            if choice.kind.role is LayerKind.BLOCK
            else choice
            for choice in stage
        )
        for stage in strategy.stages
    )
    return replace(strategy, stages=stages)


def _measured_s(row: Row) -> float | None:
    """Returns the step time, stated or derived; None where it says nothing (`UNTIMED`)."""
    return None if _untimed(row) else _step_time_s(row)


def _step_time_s(row: Row) -> float | None:
    return _number(row["step_time_s"] or row["derived_step_time_s"])


def _untimed(row: Row) -> tuple[str, ...]:
    """Says why the time of a row is not compared, if it has one."""
    if _step_time_s(row) is None:
        return ()
    kinds = (kind for words, kind in UNTIMED.items() if words in row["notes"])
    said = tuple(kind for kind in kinds if kind != FIGURES_DISAGREE or not _agrees(row))
    return (*said, *(kind for pattern, kind in BY_ID if pattern.match(row["id"])))


def _agrees(row: Row) -> bool:
    """True if the figures of a row that seem to disagree are of another count of FLOPs."""
    return FIGURES_AGREE.match(row["id"]) is not None


def _measured_gib(row: Row) -> float | None:
    return None if FIGURES_DISAGREE in _untimed(row) else _number(row["peak_memory_gib"])


def _number(text: str | None) -> float | None:
    return float(text) if text else None
