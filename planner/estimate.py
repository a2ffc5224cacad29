"""Price one configuration by hand, with the same prices and the same Plan as the search."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from costmodels.actions import check
from costmodels.book import PriceBook
from costmodels.mesh import illegal_expert_parallel
from costmodels.offload import Offload
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.step import StepPrice, price_step
from costmodels.strategy import Frame, Strategy
from planner.assemble import assemble
from planner.columns import MixTable, RankColumns, block_counts, to_strategy
from planner.kept_options import ALL, named_operators, with_kept_on_host
from planner.levels import illegal_full_recompute
from planner.plan import Candidates, Objective, Plan, SearchRecord, Status
from planner.request import Constraints
from planner.space import illegal_frame, illegal_tensor_parallel
from profiles.errors import ConfigError, InfeasibleError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.spec import ModelSpec, TrainingSpec
from profiles.units import gib


def even_split(num_layers: int, pp: int) -> tuple[int, ...]:
    """Blocks for each pipeline rank, as equal as possible; the first ranks take the blocks that are left over."""
    return tuple(num_layers // pp + (rank < num_layers % pp) for rank in range(pp))


def default_blocks(frame: Frame, num_layers: int) -> tuple[int, ...]:
    """Blocks for each pipeline rank: an even split, or what the virtual stages give."""
    if not frame.equal_ranks:
        return even_split(num_layers, frame.mesh.pp)
    return tuple(next(block_counts(rank, frame, num_layers)) for rank in range(frame.mesh.pp))


def _check(frame: Frame, blocks: Sequence[int], model: ModelSpec, cluster: Cluster, training: TrainingSpec) -> None:
    mesh = frame.mesh
    if mesh.num_ranks != cluster.num_gpus:
        raise ConfigError(
            f"{mesh} is {mesh.num_ranks} GPUs, the cluster has {cluster.num_gpus}",
            hint="change a degree or --gpus")
    if frame.schedule is Schedule.CUSTOM:
        check(frame.actions, mesh.pp, frame.virtual_stages, frame.num_micro_batches)
    reason = (
        illegal_tensor_parallel(mesh.tp, model, cluster, across_nodes=True) or illegal_expert_parallel(mesh, model)
        or illegal_frame(frame, model, training))
    if reason:
        raise ConfigError(reason, hint="change that option")
    if len(blocks) != mesh.pp or sum(blocks) != model.num_layers or min(blocks) < 1:
        raise ConfigError(
            f"the stages hold {', '.join(map(str, blocks))} blocks, not {model.num_layers} over {mesh.pp} stages with at least one each",
            hint="change the number of blocks of a stage")
    if min(blocks) < frame.virtual_stages:
        raise ConfigError(
            f"the ranks hold {', '.join(map(str, blocks))} blocks, not one for each of the {frame.virtual_stages} virtual stages",
            hint="change the number of blocks of a rank")
    whole_chunks = not frame.equal_ranks or all(count % frame.virtual_stages == 0 for count in blocks)
    if not whole_chunks and tuple(blocks) != default_blocks(frame, model.num_layers):
        raise ConfigError(
            f"the ranks hold {', '.join(map(str, blocks))} blocks, not multiples of the {frame.virtual_stages} virtual stages",
            hint="change the number of blocks of a rank")


def _check_holders(frame: Frame, zero: int, zero_ranks: int | None) -> None:
    if zero_ranks and (zero == 0 or frame.mesh.dp % zero_ranks):
        reason = "nothing is sharded at --zero 0" if zero == 0 else f"it does not divide dp {frame.mesh.dp}"
        raise ConfigError(f"--zero-ranks is {zero_ranks}: {reason}", hint="leave it out, or use a divisor of dp with --zero 1 or more")


def _require_host(price: StepPrice, cluster: Cluster) -> None:
    """Raises InfeasibleError where the host of a node cannot hold what its devices offload; a node's ranks are taken for the fullest."""
    needed = max(memory.host for memory in price.memory) * cluster.gpus_per_node
    if needed > cluster.host_memory_bytes:
        raise InfeasibleError(
            f"the hosts need {gib(needed):,.1f} GiB a node for what is offloaded, they have {gib(cluster.host_memory_bytes):,.1f}",
            hint="offload less, or shard more: --zero 1 or higher")


def _check_split(frame: Frame, zero: int, recompute: Recompute) -> None:
    if frame.splits_backward and zero == 3 and frame.mesh.dp > 1:
        raise ConfigError(f"{frame.schedule} splits the backward pass, which does not run with ZeRO 3", hint="choose --zero 2 or less")
    if frame.splits_backward and recompute is not Recompute.NONE:
        raise ConfigError(f"{frame.schedule} splits the backward pass, which runs without recompute", hint="drop --recompute")


def _check_halves(frame: Frame, model: ModelSpec, recompute: Recompute, *, on_host: bool) -> None:
    reason = illegal_full_recompute(frame.tp_overlap, model, on_host=on_host) if recompute is Recompute.FULL else None
    if reason:
        raise ConfigError(reason, hint="use --tp-overlap 2")


def uniform_strategy(frame: Frame, blocks: Sequence[int], *, zero: int, recompute: Recompute, book: PriceBook) -> Strategy:
    """`blocks[s]` blocks on rank s, all at the same recompute level and ZeRO stage."""
    table = MixTable(book, Constraints(recompute=(recompute,), zero=(zero,), megatron_sharding=True))
    return to_strategy(frame, tuple(RankColumns(rank, frame, table).smallest(count) for rank, count in enumerate(blocks)))


def estimate_plan(
    model: ModelSpec, cluster: Cluster, training: TrainingSpec, frame: Frame, *, zero: int = 0, recompute: Recompute = Recompute.NONE,
    blocks: Sequence[int] | None = None, zero_ranks: int | None = None, offload: tuple[Offload, ...] = (),
    keep_on_host: Collection[str] = (),
) -> Plan:
    """The plan of one configuration: every block at the same recompute level and ZeRO stage, `blocks[s]` on rank s.

    blocks: an even split by default; zero_ranks: neighbours that hold one copy of sharded states, all of dp by default
    offload: what the host keeps, states of every layer and all activations of the blocks; keep_on_host: of the named operators

    A plan that does not fit the devices is priced all the same (`Plan.predicted.memory_gib`), one that does not fit their
    hosts is an InfeasibleError.
    Raises ConfigError when the configuration cannot run.
    """
    blocks = tuple(blocks) if blocks is not None else default_blocks(frame, model.num_layers)
    _check(frame, blocks, model, cluster, training)
    _check_holders(frame, zero, zero_ranks)
    _check_split(frame, zero, recompute)
    names = (ALL,) if Offload.ACTIVATIONS in offload else keep_on_host
    _check_halves(frame, model, recompute, on_host=bool(names))
    book = PriceBook(
        model, training, machine_for(cluster), zero_ranks=zero_ranks,
        offload=tuple(each for each in offload if each is not Offload.ACTIVATIONS))
    strategy = uniform_strategy(frame, blocks, zero=zero, recompute=recompute, book=book)
    strategy = with_kept_on_host(strategy, named_operators(names, recompute, book))
    price = price_step(strategy, book)
    _require_host(price, cluster)
    record = SearchRecord(
        objective=Objective.THROUGHPUT, status=Status.ESTIMATE, value=round(price.closed_form_s, 6), bound=0.0, gap=1.0,
        fastest_step_time_s=round(price.closed_form_s, 6),
        candidates=Candidates(considered=1, pruned=0, solved=1, left=0))
    return assemble(strategy, price, record, book)
