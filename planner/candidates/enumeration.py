"""The outer candidates: every mesh, micro-batch and schedule for a number of GPUs.

Each illegal candidate has its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.divided_weights import illegal_grid
from parplan.costmodels.host.state_location import Access
from parplan.costmodels.keyed_cache import KeyedCache
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import AHEAD, Schedule, legal
from parplan.costmodels.strategy import ParallelLayout, count_text
from parplan.planner.candidates.meshes import (
    OUTSIDE_PINS,
    Pruned,
    PrunedFamilies,
    allowed,
    illegal_tensor_parallel,
    meshes,
)
from parplan.planner.candidates.stack_rules import lacking_schedule, require_stack_runs
from parplan.planner.host_options.state_locations import has_chunks, illegal_chunks
from parplan.planner.layer_options.overlap_levels import (
    illegal_full_recompute,
    illegal_overlap,
    illegal_zero,
)
from parplan.planner.request import (
    MAX_MICRO_BATCH_SIZE,
    Constraints,
    Request,
    TracedRequest,
)
from parplan.planner.stage_columns.block_counts import shorter_ends
from parplan.planner.stage_recompute import illegal_stage_recompute
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import Stack, TowerDivision


@dataclass(frozen=True, slots=True)
class CandidateSpace:
    """The legal candidates and the pruned ones."""

    layouts: tuple[ParallelLayout, ...]
    pruned: tuple[Pruned, ...]

    @property
    def num_pruned(self) -> int:
        """Number of candidates in all pruned families."""
        return sum(each.count for each in self.pruned)

    @property
    def considered(self) -> int:
        """Number of candidates, legal and pruned."""
        return len(self.layouts) + self.num_pruned


ONLY_IF_PINNED = "only if pinned"  # the end of a reason that another pin takes away
BESIDE_GPIPE = "gpipe takes as long as 1f1b and holds more; --schedule gpipe"
TOWER_TEXTS = {
    TowerDivision.IMAGES: "each rank with its own images",
    TowerDivision.REPEATED: "the tower on every rank",
}


def layout_text(layout: ParallelLayout) -> str:
    """Returns a candidate in one line: `pp 4 x dp 16 x tp 1, 1f1b, micro-batch 4 x 16`."""
    schedule = f"{layout.schedule}" + (
        f" x {layout.virtual_stages} virtual stages" if layout.virtual_stages > 1 else ""
    )
    sequence = ", sequence parallel" if layout.sequence_parallel else ""
    overlap = f", sub-pipelined at level {layout.tp_overlap}" if layout.tp_overlap else ""
    weights = ", weights over data" if layout.weights_over_data else ""
    chunks = ", in chunks" if layout.chunked else ""
    if layout.access is Access.OPERATOR:
        chunks += " by operators"
    states = ", states on the host" if layout.states_on_host else ""
    if layout.tower is not TowerDivision.TENSOR:
        states += f", {TOWER_TEXTS[layout.tower]}"
    count = count_text(layout.num_micro_batches, layout.micro_batches_of_replicas)
    return (
        f"{layout.mesh}, {schedule}, micro-batch {layout.micro_batch_size} x "
        f"{count}{sequence}{overlap}{weights}{chunks}{states}"
    )


def illegal_pipeline(layout: ParallelLayout) -> str | None:
    """Returns why the schedule of a layout cannot run its micro-batches, or None."""
    mesh = layout.mesh
    reason = legal(layout.schedule, mesh.pp, layout.num_micro_batches, layout.virtual_stages)
    if reason:
        return reason
    if layout.schedule in (Schedule.ONE_F_ONE_B, *AHEAD) and layout.num_micro_batches < mesh.pp:
        return (
            f"{layout.schedule} needs at least pp {mesh.pp} micro-batches to fill, "
            f"there are {layout.num_micro_batches}"
        )
    return None


def illegal_layout(
    layout: ParallelLayout, model: ModelSpec, training: TrainingSpec, *, unlike_stages: bool = False
) -> str | None:
    """Returns why a layout on a legal mesh cannot run, or None.

    unlike_stages    virtual stages have other lengths than the planner's own
    """
    mesh, batch = layout.mesh, training.global_batch_size
    if layout.num_sequences != batch:
        return (
            f"the global batch of {batch} is not micro-batch {layout.micro_batch_size} x "
            f"dp {mesh.dp} x a whole number"
        )
    return (
        illegal_stages(layout, model, unlike_stages=unlike_stages)
        or illegal_tokens(layout, model, training)
        or illegal_overlap(layout, model, training)
        or illegal_grid(layout, model, training)
    )


def illegal_stages(
    layout: ParallelLayout, model: ModelSpec, *, unlike_stages: bool = False
) -> str | None:
    """Returns why the pipeline of a layout cannot have its stages and micro-batches, or None.

    unlike_stages is that of `illegal_layout`.
    """
    mesh = layout.mesh
    reason = illegal_pipeline(layout)
    if reason:
        return reason
    if mesh.pp > model.num_blocks:
        return f"pp {mesh.pp} is more than the {model.num_blocks} layers"
    if not layout.equal_ranks and layout.num_virtual_stages > model.num_blocks:
        return (
            f"pp {mesh.pp} x {layout.virtual_stages} virtual stages are more than "
            f"the {model.num_blocks} layers"
        )
    if not unlike_stages and layout.equal_ranks and shorter_ends(layout, model.num_blocks) is None:
        return (
            f"{model.num_blocks} layers, or two more, are not a multiple of "
            f"pp {mesh.pp} x {layout.virtual_stages} virtual stages"
        )
    return None


def illegal_by_hand(
    layout: ParallelLayout,
    model: ModelSpec,
    training: TrainingSpec,
    cluster: Cluster,
    *,
    unlike_stages: bool = False,
) -> str | None:
    """Returns why a layout that no search made cannot run on a cluster, or None.

    Its tensor parallelism may leave the node. unlike_stages is that of `illegal_layout`.
    """
    mesh = layout.mesh
    return (
        illegal_tensor_parallel(mesh.tp, model, cluster, across_nodes=True, rows=mesh.tp_rows)
        or illegal_expert_parallel(mesh, model)
        or illegal_context(mesh, model, cluster)
        or illegal_layout(layout, model, training, unlike_stages=unlike_stages)
    )


def illegal_tokens(layout: ParallelLayout, model: ModelSpec, training: TrainingSpec) -> str | None:
    """Returns why the ranks of a layout cannot divide the tokens of a sequence, or None."""
    mesh = layout.mesh
    if training.seq_length % (2 * mesh.cp if mesh.cp > 1 else 1):
        return (
            f"the {2 * mesh.cp} pieces of cp {mesh.cp} do not divide the sequence of "
            f"{training.seq_length}"
        )
    tokens = training.seq_length // mesh.cp
    if layout.sequence_parallel and (mesh.tp == 1 or tokens % mesh.tp):
        return (
            f"sequence parallelism needs tp > 1 that divides the sequence of {tokens}, "
            f"tp is {mesh.tp}"
        )
    if model.num_experts and mesh.tp > 1 and not layout.sequence_parallel:
        return "experts with tp > 1 need sequence parallelism: the ranks send different tokens"
    return None


def micro_batch_sizes(mesh: Mesh, request: Request | TracedRequest) -> Iterator[int | Pruned]:
    """Yields the micro-batch sizes of a mesh that divide the global batch, and pruned ones."""
    for size, reason in _sizes(mesh.dp, request):
        yield size if reason is None else Pruned(_micro_batch_text(mesh, size), reason)


def _sizes(dp: int, request: Request | TracedRequest) -> Iterator[tuple[int, str | None]]:
    """Yields the micro-batch sizes of dp copies, each with the reason against it or None.

    The size is 0 where no size divides the batch.
    """
    batch, pins = request.training.global_batch_size, request.constraints
    if batch % dp:
        yield 0, f"dp {dp} does not divide the global batch of {batch}"
        return
    for size in divisors(batch // dp):
        ban = pins.ban(micro_batch_size=size)
        if not allowed(pins.micro_batch_size, size):
            continue
        if ban:
            yield size, f"excluded by --forbid {ban}"
        elif size > MAX_MICRO_BATCH_SIZE and pins.micro_batch_size is None:
            yield size, f"above {MAX_MICRO_BATCH_SIZE} {ONLY_IF_PINNED}"
        else:
            yield size, None


def _schedules(
    mesh: Mesh, model: ModelSpec, num_micro_batches: int, pins: Constraints
) -> Iterator[tuple[Schedule, int]]:
    """Yields the schedules that are worth a search, each with its virtual stages.

    GPipe takes as long as 1F1B and holds more, so it is tried only where 1F1B cannot run or GPipe
    is pinned. ZBV is tried wherever it is legal, filled or not. Early recompute and the shifted
    critical path, which recompute ahead of the gradient, are tried where pins leave something to
    recompute, or where they are pinned. Last-no-recompute is tried only if pinned: where every
    layer has its own recompute, early recompute includes the plans in which the last stage
    recomputes nothing, at most one recompute slower. So is DualPipeV, which idles
    as long as ZBV where the parts of a pass are equal, and holds one stash more.
    """
    if mesh.pp == 1:
        yield Schedule.ONE_F_ONE_B, 1
        return
    pinned = (
        *(pins.schedule or ()),
        *((Schedule.GPIPE,) if pins.ban(schedule=Schedule.ONE_F_ONE_B) else ()),
    )
    if num_micro_batches >= mesh.pp or Schedule.ONE_F_ONE_B in pinned:
        yield Schedule.ONE_F_ONE_B, 1
    if num_micro_batches < mesh.pp or Schedule.GPIPE in pinned:
        yield Schedule.GPIPE, 1
    moves = set(pins.recompute or Recompute) != {Recompute.NONE}
    for schedule in (Schedule.EARLY_RECOMPUTE, Schedule.SCP):
        if schedule in pinned or (
            moves
            and num_micro_batches >= mesh.pp
            and not legal(schedule, mesh.pp, num_micro_batches, 1)
        ):
            yield schedule, 1
    if Schedule.LAST_NO_RECOMPUTE in pinned:
        yield Schedule.LAST_NO_RECOMPUTE, 1
    yield Schedule.ZBV, 2
    if Schedule.DUALPIPEV in pinned:
        yield Schedule.DUALPIPEV, 2
    shares = (
        layers // mesh.pp
        for layers in (model.num_blocks, model.num_blocks + 2)
        if layers % mesh.pp == 0
    )
    interleaved = sorted({v for share in shares for v in divisors(share) if v > 1})
    if not interleaved and Schedule.INTERLEAVED in pinned:
        interleaved = [2]  # is not legal, and the reason says what would be
    yield from ((Schedule.INTERLEAVED, v) for v in interleaved)


_Way = tuple[Schedule, int, bool]  # schedule, virtual stages, sequence parallelism
# the legal ways, and by the reason against others the first of them and their number
_Ways = tuple[tuple[_Way, ...], Mapping[str, tuple[_Way, int]]]


class _Enumeration:
    """The layouts of the meshes of a request, with what meshes of equal degrees share."""

    def __init__(self, request: Request) -> None:
        self.request, self._once = request, KeyedCache()

    def layouts(self, mesh: Mesh, lost: PrunedFamilies) -> Iterator[ParallelLayout]:
        """Yields the layouts of a mesh, and counts those that are not tried in `lost`."""
        batch = self.request.training.global_batch_size
        sequence = tuple(self._sequence(mesh))
        for size, reason in self._once(mesh.dp, lambda: tuple(_sizes(mesh.dp, self.request))):
            if reason is not None:
                lost.add(reason, partial(_micro_batch_text, mesh, size))
                continue
            repeats = batch // mesh.dp // size
            if self._beside_gpipe(mesh, repeats):
                lost.add(BESIDE_GPIPE, partial("{}, gpipe, micro-batch {}".format, mesh, size))
            ways, against = self._ways(mesh, repeats, sequence)
            for reason, (first, count) in against.items():
                lost.add(reason, partial(_text, mesh, first, size, repeats), count)
            for way in ways:
                yield from _levels(_layout(mesh, way, size, repeats), self.request, lost)

    def _ways(self, mesh: Mesh, repeats: int, sequence: tuple[tuple[bool, str], ...]) -> _Ways:
        """Returns the ways to run a number of micro-batches, legal ones and lost families."""

        def make() -> _Ways:
            ways: list[_Way] = []
            against: dict[str, tuple[_Way, int]] = {}
            for schedule, virtual_stages, reason in self._pipelines(mesh, repeats):
                for sequence_parallel, other in sequence:
                    way = schedule, virtual_stages, sequence_parallel
                    if reason or other:
                        first, count = against.get(reason or other, (way, 0))
                        against[reason or other] = first, count + 1
                    else:
                        ways.append(way)
            return tuple(ways), against

        return self._once(("ways", mesh.pp, repeats, mesh.replicas == 1, sequence), make)

    def _beside_gpipe(self, mesh: Mesh, repeats: int) -> bool:
        """Returns whether 1F1B is tried in place of GPipe."""
        pins = self.request.constraints
        chosen = pins.schedule or pins.ban(schedule=Schedule.ONE_F_ONE_B)
        return mesh.pp > 1 and repeats >= mesh.pp and not chosen

    def _sequence(self, mesh: Mesh) -> Iterator[tuple[bool, str]]:
        """Yields whether sequences are parallel, with the reason against it or nothing."""
        model, training = self.request.model, self.request.training
        pins = self.request.constraints
        plain = mesh.tp == 1 or mesh.tp_rows > 1
        for parallel in (False,) if plain else (False, True):
            ban = pins.ban(sequence_parallel=parallel) if mesh.tp > 1 else None
            layout = _layout(mesh, (Schedule.ONE_F_ONE_B, 1, parallel), 1, 1)
            if ban:
                yield parallel, f"excluded by --forbid {ban}"
            elif mesh.tp > 1 and not allowed(pins.sequence_parallel, parallel):
                yield parallel, "excluded by --sequence-parallel"
            else:
                yield parallel, illegal_tokens(layout, model, training) or ""

    def _pipelines(self, mesh: Mesh, repeats: int) -> Iterator[tuple[Schedule, int, str]]:
        """Yields schedules and virtual stages, each with the reason against it or nothing."""
        model, pins = self.request.model, self.request.constraints
        for schedule, virtual_stages in _schedules(mesh, model, repeats, pins):
            layout = _layout(mesh, (schedule, virtual_stages, False), 1, repeats)
            reason = _excluded(layout, pins, self.request.training.stack)
            yield schedule, virtual_stages, reason or illegal_stages(layout, model) or ""


def _layout(mesh: Mesh, way: _Way, micro_batch_size: int, num_micro_batches: int) -> ParallelLayout:
    schedule, virtual_stages, sequence_parallel = way
    return ParallelLayout(
        mesh=mesh,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=sequence_parallel,
    )


def _text(mesh: Mesh, way: _Way, micro_batch_size: int, num_micro_batches: int) -> str:
    return layout_text(_layout(mesh, way, micro_batch_size, num_micro_batches))


def _micro_batch_text(mesh: Mesh, size: int) -> str:
    return f"{mesh}, micro-batch {size}" if size else str(mesh)


def _levels(
    layout: ParallelLayout, request: Request, lost: PrunedFamilies
) -> Iterator[ParallelLayout]:
    """Yields the layout at each pinned level of sub-pipelining, or at each that the stack runs."""
    model, pins = request.model, request.constraints
    levels = pins.tp_overlap
    if levels is None and layout.mesh.tp_rows > 1:
        levels = (0,)
    if levels is None:
        levels = tuple(range(request.training.stack.tp_overlap + 1))
    for level in levels if layout.mesh.tp > 1 else (0,):
        overlapped = replace(layout, tp_overlap=level) if level else layout
        ban = pins.ban(tp_overlap=level) if layout.mesh.tp > 1 else None
        reason = (
            f"excluded by --forbid {ban}"
            if ban
            else illegal_overlap(overlapped, model, request.training)
            or illegal_grid(overlapped, model, request.training)
        )
        if pins.recompute == (Recompute.FULL,) or pins.recompute_first_stage is not None:
            reason = reason or illegal_full_recompute(level, model)
        if reason:
            lost.add(reason, partial(layout_text, overlapped))
            if not ban:
                return  # a rule against one level holds for the levels above it
            continue
        yield overlapped
        if has_chunks(pins.offload):
            for access in pins.access or (Access.BLOCK,):
                yield from _in_chunks(replace(overlapped, access=access), pins, lost)


def _in_chunks(
    layout: ParallelLayout, pins: Constraints, lost: PrunedFamilies
) -> Iterator[ParallelLayout]:
    """Yields the layout with the states of its blocks in chunks, where that is legal."""
    chunked = replace(layout, chunked=True)
    reason = illegal_chunks(layout, pins.zero, pins.zero_ranks, pins.chunk_communication)
    if pins.recompute_first_stage is not None:
        reason = reason or illegal_stage_recompute(chunked, pins.recompute_first_stage)
    if reason:
        lost.add(reason, partial(layout_text, chunked))
    else:
        yield chunked


def excluded_pipeline(layout: ParallelLayout, pins: Constraints, stack: Stack) -> str | None:
    """Returns the limit of the stack or the pin that excludes the pipeline of a layout, or None."""
    if layout.mesh.pp == 1:
        return None
    ban = pins.ban(schedule=layout.schedule, virtual_stages=layout.virtual_stages)
    if ban:
        return f"excluded by --forbid {ban}"
    if not allowed(pins.schedule, layout.schedule):
        return "excluded by --schedule"
    if not allowed(pins.virtual_stages, layout.virtual_stages):
        return "excluded by --virtual-stages"
    if pins.zero == (3,) and (reason := illegal_zero(layout, 3)):
        return f"{reason}, --zero or --forbid leaves no other"
    return lacking_schedule(layout, stack)


def _excluded(layout: ParallelLayout, pins: Constraints, stack: Stack) -> str | None:
    reason = excluded_pipeline(layout, pins, stack)
    if reason:
        return reason
    if layout.splits_backward and not allowed(pins.recompute, Recompute.NONE):
        return f"{layout.schedule} runs without recompute, --recompute or --forbid excludes that"
    rule = pins.recompute_first_stage
    return illegal_stage_recompute(layout, rule) if rule is not None else None


def enumerate_candidates(request: Request) -> CandidateSpace:
    """Returns all candidates, and a Pruned entry for each family that is not tried.

    The candidates of a mesh that one reason is against are a family. A micro-batch size that a pin
    excludes has no entry.
    Raises OutOfTimeError, and ConfigError for pins that the stack does not run.
    """
    stack, pins = request.training.stack, request.constraints
    require_stack_runs(stack, pins)
    resolved = replace(request, constraints=pins.resolved(stack))
    layouts: list[ParallelLayout] = []
    pruned: list[Pruned] = []
    enumeration = _Enumeration(resolved)
    for mesh in meshes(resolved):
        request.options.deadline.check()
        if isinstance(mesh, Pruned):
            pruned.append(mesh)
            continue
        lost = PrunedFamilies()
        layouts.extend(enumeration.layouts(mesh, lost))
        pruned.extend(lost)
    return CandidateSpace(tuple(layouts), tuple(pruned))


def no_candidate_error(space: CandidateSpace, cluster: Cluster) -> ConfigError:
    """Returns the error of a space without candidates, with the most common reason.

    Candidates inside the pins that need no other pin tell more than others.
    """
    inside = [
        each
        for each in space.pruned
        if not each.reason.startswith(OUTSIDE_PINS) and not each.reason.endswith(ONLY_IF_PINNED)
    ]
    reasons: Counter[str] = Counter()
    for each in inside or space.pruned:
        reasons[each.reason] += each.count
    reason, _ = max(
        reasons.items(), key=lambda item: (item[1], item[0]), default=("the pins leave none", 0)
    )
    return ConfigError(
        f"no legal way to use {cluster.num_gpus} GPUs: of {reasons.total()} candidates "
        f"most are ruled out: {reason}",
        hint="choose another --gpus or --global-batch-size, or drop a pinned degree",
    )
