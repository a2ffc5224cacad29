"""Prices one configuration by hand, with the prices and the plan type of the search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.host_embedding import illegal_host_embedding
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import (
    OFFLOAD_OF,
    Access,
    ChunkCommunication,
    Eviction,
    StateLocation,
)
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.model_states import OwnZero
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import check_rows
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.stage_aware import StageAwareRoom, stage_aware
from parplan.planner.baselines.uniform_strategies import staged
from parplan.planner.candidates.enumeration import illegal_by_hand
from parplan.planner.candidates.stack_rules import lacking_schedule, require_stack_runs
from parplan.planner.host_options.activation_options import (
    ALL,
    named_operators,
    with_offloaded_activations,
)
from parplan.planner.host_options.state_locations import BlockLocations, illegal_chunks
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.layer_options.overlap_levels import illegal_full_recompute, illegal_zero
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.request import Constraints, Request, SearchOptions, require_host_contents
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy, with_classes
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.dealing import dealt_blocks
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.planner.stage_recompute import (
    OPTION,
    RecomputeRule,
    illegal_stage_recompute,
    recomputed,
    two_recomputes_error,
)
from parplan.profiles.errors import ConfigError, InfeasibleError, unknown_name_error
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.transformer import has_unlike_blocks
from parplan.profiles.stack import Stack
from parplan.profiles.units import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """Block states in chunks, with their locations on every pipeline rank.

    The states of the last `host_blocks` blocks of a rank, or of all its blocks, lie on the host.
    Of the `optimizer_blocks` blocks before them only the optimizer states lie there. All other
    states lie on the device.

    access: the unit of a block that has to be on the device together
    device_bytes: bytes that tensors may fill on a device; None for `limit_bytes` less context,
    communicators and allocator
    limit_bytes: bytes of a device in all; None for its memory less the margin of a search
    communication: how data-parallel ranks gather and reduce the chunks of a group
    """

    host_blocks: int
    optimizer_blocks: int
    eviction: Eviction = Eviction.OPT
    access: Access = Access.BLOCK
    device_bytes: int | None = None
    limit_bytes: int | None = None
    communication: ChunkCommunication = ChunkCommunication.GROUP

    def __post_init__(self) -> None:
        if self.host_blocks < 0 or self.optimizer_blocks < 0:
            raise ConfigError(
                f"{self.host_blocks} and {self.optimizer_blocks} blocks on the host: a number "
                f"must not be negative"
            )

    def homes(self, num_blocks: int) -> tuple[StateLocation, ...]:
        """Locations of a pipeline rank's blocks, in the order of the model."""
        host = min(self.host_blocks, num_blocks)
        return BlockLocations(host, min(self.optimizer_blocks, num_blocks - host)).of(num_blocks)

    def chunking(self, cluster: Cluster, stack: Stack) -> Chunking:
        """Returns the eviction rule and the limits, which the prices need."""
        limit = limit_bytes(cluster, stack, SearchOptions(memory_limit_bytes=self.limit_bytes))
        return Chunking(
            eviction=self.eviction,
            device_bytes=self.device_bytes,
            limit_bytes=limit,
            communication=self.communication,
        )


def even_split(num_layers: int, pp: int) -> tuple[int, ...]:
    """Blocks of each pipeline rank, as equal as possible; the first ranks hold the rest."""
    return tuple(num_layers // pp + (rank < num_layers % pp) for rank in range(pp))


def default_blocks(layout: ParallelLayout, num_layers: int) -> tuple[int, ...]:
    """Blocks of each pipeline rank: an even split, or the split of the virtual stages."""
    if not layout.equal_ranks:
        return even_split(num_layers, layout.mesh.pp)
    return tuple(next(block_counts(rank, layout, num_layers)) for rank in range(layout.mesh.pp))


def _check(
    layout: ParallelLayout, blocks: Sequence[int], request: Request, recompute: Recompute
) -> None:
    model, cluster = request.model, request.cluster
    training = request.training
    stack = training.stack
    mesh = layout.mesh
    lacking = lacking_schedule(layout, stack)
    require_stack_runs(
        stack,
        Constraints(
            schedule=(layout.schedule,) if lacking else None,
            recompute=(recompute,),
            mesh_order=(mesh.order,),
        ),
    )
    if mesh.num_ranks != cluster.num_gpus:
        raise ConfigError(
            f"{mesh} is {mesh.num_ranks} GPUs, the cluster has {cluster.num_gpus}",
            hint="change a degree or --gpus",
        )
    if layout.schedule is Schedule.CUSTOM:
        check_rows(layout.actions, mesh.pp, layout.virtual_stages, layout.num_micro_batches)
    reason = illegal_by_hand(layout, model, training, cluster)
    if reason:
        raise ConfigError(reason, hint="change that option")
    if len(blocks) != mesh.pp or sum(blocks) != model.num_blocks or min(blocks) < 1:
        raise ConfigError(
            f"the stages hold {', '.join(map(str, blocks))} blocks, not {model.num_blocks} over "
            f"{mesh.pp} stages with at least one each",
            hint="change the number of blocks of a stage",
        )
    if min(blocks) < layout.virtual_stages:
        raise ConfigError(
            f"the ranks hold {', '.join(map(str, blocks))} blocks, not one for each of the "
            f"{layout.virtual_stages} virtual stages",
            hint="change the number of blocks of a rank",
        )
    whole_chunks = not layout.equal_ranks or all(
        count % layout.virtual_stages == 0 for count in blocks
    )
    if not whole_chunks and tuple(blocks) != default_blocks(layout, model.num_blocks):
        raise ConfigError(
            f"the ranks hold {', '.join(map(str, blocks))} blocks, not multiples of the "
            f"{layout.virtual_stages} virtual stages",
            hint="change the number of blocks of a rank",
        )


def _check_holders(layout: ParallelLayout, zero: int, zero_ranks: int | None) -> None:
    if zero_ranks and (zero == 0 or layout.mesh.replicas % zero_ranks):
        reason = (
            "nothing is sharded at --zero 0"
            if zero == 0
            else f"it does not divide the {layout.mesh.replicas} ranks that hold copies"
        )
        raise ConfigError(
            f"--zero-ranks is {zero_ranks}: {reason}",
            hint="leave it out, or use a divisor of dp with --zero 1 or more",
        )


def require_host(price: StepPrice, cluster: Cluster, *, chunked: bool) -> None:
    """Raises InfeasibleError where the host of a node cannot hold the offloaded bytes.

    All ranks of a node are taken to need as much as the fullest rank.
    """
    needed = max(memory.host for memory in price.memory) * cluster.gpus_per_node
    if needed > cluster.host_memory_bytes:
        raise InfeasibleError(
            f"the hosts need {gib(needed):,.1f} GiB a node for what is offloaded, they have "
            f"{gib(cluster.host_memory_bytes):,.1f}",
            hint="keep fewer blocks on the host: --host-blocks and --host-optimizer say how many"
            if chunked
            else "offload less, or shard more: --zero 1 or higher",
        )


def _check_split(layout: ParallelLayout, zero: int, recompute: Recompute) -> None:
    reason = illegal_zero(layout, zero)
    if reason:
        raise ConfigError(reason, hint="choose --zero 2 or less")
    if layout.splits_backward and recompute is not Recompute.NONE:
        raise ConfigError(
            f"{layout.schedule} splits the backward pass, which runs without recompute",
            hint="drop --recompute",
        )


def _check_halves(
    layout: ParallelLayout, model: ModelSpec, recompute: Recompute, *, on_host: bool
) -> None:
    reason = (
        illegal_full_recompute(layout.tp_overlap, model, on_host=on_host)
        if recompute is Recompute.FULL
        else None
    )
    if reason:
        raise ConfigError(reason, hint="use --tp-overlap 2")


def _check_offload(
    offload: tuple[Offload, ...], chunks: ChunkRequest | None, mesh: Mesh, model: ModelSpec
) -> None:
    homes = next((what for what in offload if what in OFFLOAD_OF[StateLocation.HOST]), None)
    if homes:
        raise ConfigError(f"offload has {homes}, which is by block", hint="ask for chunks")
    if chunks is not None and Offload.STATES in offload:
        raise ConfigError(
            "--offload states is of whole layers, optimizer and parameters are of blocks in "
            "chunks: one or the other",
            hint="drop states, chunks move less",
        )
    reason = (
        illegal_host_embedding(mesh, model.hidden_size, model.tied_embeddings)
        if Offload.LOOKUP in offload
        else None
    )
    if reason:
        raise ConfigError(f"--offload lookup: {reason}", hint="leave lookup out")


def _check_rule(rule: RecomputeRule, layout: ParallelLayout, choices: UniformChoices) -> None:
    if choices.recompute is not Recompute.NONE:
        raise two_recomputes_error(choices.recompute)
    if choices.chunks is not None or choices.keep_on_host or Offload.ACTIVATIONS in choices.offload:
        raise ConfigError(
            f"{OPTION} does not go with chunks or activations on the host",
            hint="drop them, or use --recompute",
        )
    reason = illegal_stage_recompute(layout, rule)
    if reason:
        raise ConfigError(reason, hint="change that option")


def _as_the_rule(
    rule: RecomputeRule,
    layout: ParallelLayout,
    blocks: Sequence[int],
    zero: int,
    price_cache: PriceCache,
    limit: float,
) -> Strategy:
    """The strategy with the recompute of a rule, by memory within `limit` bytes."""
    zero = _sharded(zero, layout, price_cache)
    if rule.by_memory:
        counts = StageAwareRoom(layout, blocks, zero, price_cache, limit).least_counts()
    else:
        counts = recomputed(blocks, rule.of_stages(layout))
    return stage_aware(layout, blocks, counts, zero)


def _sharded(zero: int, layout: ParallelLayout, price_cache: PriceCache) -> int:
    """Returns the ZeRO stage, which is 0 where no other rank or host holds a copy."""
    return zero if layout.mesh.replicas > 1 or price_cache.offloads_states else 0


def _check_unlike(request: Request, layout: ParallelLayout, choices: UniformChoices) -> None:
    """Raises ConfigError for choices that only models whose blocks are alike have."""
    model = request.model
    if not has_unlike_blocks(model, request.training):
        return
    kept = choices.keep_on_host or Offload.ACTIVATIONS in choices.offload
    for what, given in (
        ("--own-zero", choices.own_zero),
        ("--offload optimizer or parameters", choices.chunks is not None),
        ("activations on the host", kept),
    ):
        if given:
            raise ConfigError(
                f"the blocks of {model.name} are of several classes, and {what} is priced where "
                "they are alike",
                hint="leave it out",
            )


def with_homes(strategy: Strategy, request: ChunkRequest) -> Strategy:
    """The strategy with its blocks in chunks and their states at the locations of `request`.

    These blocks get ZeRO stage 3 where dp > 1, else 0.
    """
    layout, stages = strategy.layout, [list(stage) for stage in strategy.stages]
    zero = 3 if layout.mesh.dp > 1 else 0
    for rank in range(layout.mesh.pp):
        places = [
            (stage, index)
            for stage in sorted(layout.stages_of(rank))
            for index, choice in enumerate(stages[stage])
            if choice.kind.in_chunks
        ]
        for (stage, index), home in zip(places, request.homes(len(places)), strict=True):
            stages[stage][index] = replace(stages[stage][index], zero=zero, home=home)
    return Strategy(
        layout=replace(layout, chunked=True, access=request.access),
        stages=tuple(map(tuple, stages)),
    )


def _stage_lengths(layout: ParallelLayout, blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each virtual stage where rank s has `blocks[s]`."""
    lengths = {
        stage: len(chunk)
        for rank, count in enumerate(blocks)
        for stage, chunk in zip(
            layout.stages_of(rank), dealt_blocks(rank, count, layout), strict=True
        )
    }
    return tuple(lengths[stage] for stage in range(layout.num_virtual_stages))


def uniform_strategy(
    layout: ParallelLayout,
    blocks: Sequence[int],
    *,
    zero: int,
    recompute: Recompute,
    price_cache: PriceCache,
) -> Strategy:
    """Strategy with `blocks[s]` blocks on rank s, all at one recompute level and ZeRO stage.

    Where there are more virtual stages than ranks, `blocks` may have a number for each of them.
    """
    by_stage = len(blocks) > layout.mesh.pp
    if by_stage or has_unlike_blocks(price_cache.model, price_cache.training):
        zero = _sharded(zero, layout, price_cache)
        lengths = tuple(blocks) if by_stage else _stage_lengths(layout, blocks)
        return with_classes(
            staged(layout, [(recompute,) * length for length in lengths], zero), price_cache
        )
    table = MixTable(
        price_cache, Constraints(recompute=(recompute,), zero=(zero,), megatron_sharding=True)
    )
    return to_strategy(
        layout,
        tuple(
            RankColumns(rank, layout, table).smallest(count) for rank, count in enumerate(blocks)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformChoices:
    """The choices of a configuration by hand: every block has the same.

    zero            ZeRO stage; with chunks that of embedding and head, which is 3 where dp > 1
    own_zero        operators of a block with another stage
    recompute       recompute level
    recompute_first_stage   a rule for the recompute of the stages, in place of a level
    blocks          blocks of each pipeline rank; an even split by default
    zero_ranks      neighbours that hold one copy of sharded states; all of dp by default
    offload         host contents: states of every layer, all activations, the token table
    keep_on_host    operators whose activations go to the host
    chunks          the states of the blocks in chunks
    """

    zero: int = 0
    own_zero: OwnZero = ()
    recompute: Recompute = Recompute.NONE
    recompute_first_stage: RecomputeRule | None = None
    blocks: Sequence[int] | None = None
    zero_ranks: int | None = None
    offload: tuple[Offload, ...] = ()
    keep_on_host: Collection[str] = ()
    chunks: ChunkRequest | None = None


def estimate_plan(
    request: Request, layout: ParallelLayout, choices: UniformChoices | None = None
) -> Plan:
    """Returns the plan of one configuration, without a search.

    A plan that does not fit the devices is priced all the same (`Plan.predicted.memory_gib`).
    Raises InfeasibleError for one that does not fit the hosts or whose chunks have no room on a
    device, ConfigError for one that cannot run.
    """
    model, cluster = request.model, request.cluster
    training = request.training
    choices = choices or UniformChoices()
    zero, recompute = choices.zero, choices.recompute
    highest = max(zero, *(stage for _, stage in choices.own_zero), 0)
    chunks, offload = choices.chunks, choices.offload
    blocks = default_blocks(layout, model.num_blocks)
    if choices.blocks is not None:
        blocks = tuple(choices.blocks)
    rule = choices.recompute_first_stage
    if rule is not None:
        _check_rule(rule, layout, choices)
        recompute = Recompute.FULL  # the most of any stage
    _check(layout, blocks, request, recompute)
    _check_unlike(request, layout, choices)
    _check_holders(layout, highest, choices.zero_ranks)
    _check_offload(offload, chunks, layout.mesh, model)
    in_chunks = () if chunks is None else OFFLOAD_OF[StateLocation.HOST]
    require_host_contents((*offload, *in_chunks), training.optimizer)
    if chunks is not None:
        reason = illegal_chunks(
            layout, (zero,) if zero else None, choices.zero_ranks, chunks.communication
        )
        if reason:
            raise ConfigError(
                reason, hint="change that option, or drop optimizer and parameters of --offload"
            )
        if choices.own_zero:
            raise ConfigError("--own-zero: chunks are sharded alike", hint="leave it out")
        zero = highest = 3 if layout.mesh.replicas > 1 else 0
    _check_split(layout, highest, recompute)
    names = (ALL,) if Offload.ACTIVATIONS in offload else choices.keep_on_host
    _check_halves(layout, model, recompute, on_host=bool(names))
    price_cache = PriceCache(
        model,
        training,
        machine_for(cluster),
        zero_ranks=choices.zero_ranks,
        offload=tuple(each for each in offload if each is not Offload.ACTIVATIONS),
        chunking=None if chunks is None else chunks.chunking(cluster, training.stack),
    )
    if rule is None:
        strategy = uniform_strategy(
            layout, blocks, zero=zero, recompute=recompute, price_cache=price_cache
        )
    else:
        limit = limit_bytes(cluster, training.stack, request.options)
        strategy = _as_the_rule(rule, layout, blocks, zero, price_cache, limit)
        strategy = with_classes(strategy, price_cache)
    strategy = _with_own_zero(strategy, choices.own_zero, price_cache)
    if names:
        kept = named_operators(names, recompute, price_cache)
        strategy = with_offloaded_activations(strategy, kept)
    if chunks is not None:
        strategy = with_homes(strategy, chunks)
    return _assembled(strategy, price_cache)


def _with_own_zero(strategy: Strategy, own_zero: OwnZero, price_cache: PriceCache) -> Strategy:
    """The strategy with other ZeRO stages of operators in every block. Raises ConfigError."""
    if not own_zero:
        return strategy
    weighty = [op.name for op in price_cache.graph(1).block.operators if op.parameters]
    for name, _ in own_zero:
        if name not in weighty:
            raise unknown_name_error("operator", name, weighty)
    return replace(
        strategy,
        stages=tuple(
            tuple(
                replace(choice, own_zero=own_zero)
                if choice.kind.role is LayerKind.BLOCK
                else choice
                for choice in stage
            )
            for stage in strategy.stages
        ),
    )


def _assembled(strategy: Strategy, price_cache: PriceCache) -> Plan:
    price = price_step(strategy, price_cache)
    require_host(price, price_cache.machine.cluster, chunked=strategy.layout.chunked)
    record = SearchRecord.of_estimate(price.step_s, price.closed_form_s)
    return assemble(strategy, price, record, price_cache)
