"""The dry run of one pipeline rank: memory and traffic of a full-size step on fake tensors.

For a step with many micro-batches two short steps run, one of them past the warm-up of the
schedule. Traffic is linear in the number of micro-batches, and memory does not change past the
warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parplan.costmodels.operators.sharding import GRID
from parplan.costmodels.schedules.merak_schedules import SHIFTED_FEWEST
from parplan.costmodels.schedules.schedule import V_SHAPED, Schedule, in_flight
from parplan.costmodels.usage.rank_traffic import EXPERT_COPIES, EXPERT_PARALLEL, SentBytes
from parplan.costmodels.usage.rank_usage import RankUse
from parplan.executor.checking.lone_rank import alone
from parplan.executor.checking.observed_rank import HOST, OTHER, Observed
from parplan.executor.data.seen_images import IMAGE_PLACES, PIXELS, pixel_shape
from parplan.executor.memory.host_copies import HostCopies
from parplan.executor.models.expert_exchange import COPIES, EP, ETP
from parplan.executor.models.loss import Loss
from parplan.executor.pipeline.stages import parameters_on_host
from parplan.executor.placed_layers import rank_tokens, reads_batches
from parplan.executor.run_options import Options
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.tensors import part
from parplan.executor.training.train import (
    Trainer,
    ranks_of,
    trainer_of,
)
from parplan.executor.watch.state_bytes import Meter, optimizer_states
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import TrainingSpec

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"

BUILDING = 2  # micro-batches that take as long as building a rank

OnBackward = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Use of a device of one pipeline rank.

    micro_batches  the number of micro-batches in each step that ran, to stand for the plan's number
    """

    pipeline_rank: int
    use: RankUse
    micro_batches: tuple[int, ...]


def dry_run(plan: Plan, pipeline_rank: int, on_backward: OnBackward = lambda: None) -> DryRun:
    """Run the first rank of `pipeline_rank`. Raises ConfigError.

    on_backward  called after each backward pass
    """
    runs: list[RankUse] = []
    counts = counted_micro_batches(plan, pipeline_rank)
    with alone(plan, plan.mesh.rank(pp=pipeline_rank)):
        ranks = ranks_of(plan, torch.device("cpu"))
        for count in counts:
            runs.append(_step(with_micro_batches(plan, count), ranks, on_backward))
    reads = reads_batches(plan, pipeline_rank)
    use = runs[0] if len(runs) == 1 else extrapolated(*runs, counts, plan, reads=reads)
    return DryRun(pipeline_rank=pipeline_rank, use=use, micro_batches=counts)


def counted_micro_batches(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches of the steps to run.

    They are one to count by and a larger one past the warm-up, or the plan's number if that is less
    work.
    """
    pipeline, pp = plan.pipeline, plan.mesh.pp
    whole = pipeline.num_micro_batches
    virtual_stages = pipeline.virtual_stages
    in_rounds = pipeline.schedule is Schedule.INTERLEAVED
    step = pp if in_rounds else 1
    if pipeline.schedule is Schedule.CUSTOM:  # its lists name every micro-batch
        return (whole,)
    if pipeline.schedule in V_SHAPED:  # holds at most two virtual stages' worth for every rank
        first = 2 * pp
        last = first + 1
    elif pipeline.schedule is Schedule.GPIPE:  # holds all: linear as soon as there are gradients
        first = max(pp, 2)
        last = first + 1
    else:
        first = max(pp, SHIFTED_FEWEST) if pipeline.schedule is Schedule.SCP else pp
        most = in_flight(pipeline.schedule, pipeline_rank, pp, whole, virtual_stages)
        # Every virtual stage has had a backward pass, so a full set of activations lies beside
        # gradients.
        last = first + step
        while last < whole and last * virtual_stages < most + step * (virtual_stages - 1) + 1:
            last += step
        last += step if in_rounds else 0
    return (first, last) if BUILDING + first + last < whole else (whole,)


def with_micro_batches(plan: Plan, count: int) -> Plan:
    """Return the plan with another number of micro-batches in a step, the same on all replicas."""
    size = count * plan.pipeline.micro_batch_size * plan.mesh.dp
    return replace(
        plan,
        pipeline=replace(plan.pipeline, num_micro_batches=count, micro_batches_of_replicas=()),
        training=replace(plan.training, global_batch_size=size),
    )


def extrapolated(
    first: RankUse, last: RankUse, counts: tuple[int, ...], plan: Plan, *, reads: bool
) -> RankUse:
    """Return the use of a whole step of the plan, from two steps of `counts` micro-batches.

    Collectives are linear in the number of micro-batches. Memory is not, except for the token ids
    of a rank that `reads` batches and, in GPipe, for activations.
    """
    pipeline = plan.pipeline
    more = pipeline.num_micro_batches - counts[1]

    def line(a: int, b: int) -> int:
        return b + more * (b - a) // (counts[1] - counts[0])

    before = {(sent.axis, sent.kind): sent for sent in first.sent}
    sent = []
    for later in last.sent:
        earlier = before.get((later.axis, later.kind), SentBytes(later.axis, later.kind, 0, 0))
        sent.append(
            replace(
                later,
                calls=line(earlier.calls, later.calls),
                num_bytes=line(earlier.num_bytes, later.num_bytes),
            )
        )
    ids = 0
    if reads:  # ids and targets, in int64
        each = 8 * (2 + plan.model.mtp_layers)
        ids = each * more * pipeline.micro_batch_size * rank_tokens(plan)
    gpipe = pipeline.schedule is Schedule.GPIPE
    return replace(
        last,
        activations=line(first.activations, last.activations) if gpipe else last.activations + ids,
        sent=tuple(sent),
    )


def _step(plan: Plan, ranks: RankPlace, on_backward: OnBackward) -> RankUse:
    """Return the use of one step and its update on the rank that this process is."""
    with FakeTensorMode(), Observed() as memory, _marked_copies(memory):
        moments = _Moments(plan.training, memory, on_backward)
        trainer = trainer_of(plan, Options(), ranks, moments)
        memory.axes = _axes(trainer)
        sequences = plan.pipeline.micro_batch_size * plan.pipeline.num_micro_batches
        shape = (sequences, rank_tokens(plan))
        batch = None
        if trainer.pipeline.reads:
            predictions = (1 + plan.model.mtp_layers,) if plan.model.mtp_layers else ()
            batch = (
                torch.empty(shape, dtype=torch.int64),
                torch.empty((*shape, *predictions), dtype=torch.int64),
            )
        images = _images(plan, sequences) if trainer.pipeline.reads_images else {}
        memory.mark(HOST, (images.get(PIXELS),))
        memory.start()
        trainer.pipeline.step(batch, **images)
        fullest, host = memory.fullest(), memory.fullest_host()
        sent = memory.sent()
        trainer.optimizer.step()
    states = moments.measured(trainer.optimizer)
    # The optimizer has states in every step but the first. A parameter gathered for a moment is no
    # state.
    made = _num_bytes(optimizer_states(trainer.optimizer, moments.hosted))
    made_on_host = _num_bytes(optimizer_states(trainer.optimizer)) - made
    beyond = fullest + made - states.total - moments.activations
    return RankUse(
        states=states,
        activations=moments.activations,
        temporaries=max(0, beyond),
        saved=sum(moments.saved.values()),
        sent=sent,
        apart=max(0, -beyond),
        host=host + made_on_host,
    )


def _images(plan: Plan, sequences: int) -> dict[str, Tensor]:
    """Return the images of sequences, whose pixels are on the host until a pass reads them."""
    tower = plan.model.tower
    assert tower is not None, "the model has a tower"
    pixels = torch.empty(sequences, tower.images, *pixel_shape(tower))
    return {PIXELS: pixels, IMAGE_PLACES: torch.zeros(sequences, tower.images, dtype=torch.int64)}


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(part(tensor).nbytes for tensor in tensors)


@contextmanager
def _marked_copies(memory: Observed) -> Iterator[None]:
    """Marks every tensor that the executor copies to the host, or from it, as memory of the host.

    A dry run has one memory: without the mark both ends of a copy would count on the device.
    """
    copy = HostCopies.copy

    def marked(copies: HostCopies, tensor: Tensor, *, to_host: bool, **settings: Any) -> Any:
        copied = copy(copies, tensor, to_host=to_host, **settings)
        memory.mark(HOST, (copied[0] if to_host else tensor,))
        return copied

    with patch.object(HostCopies, "copy", marked):
        yield


def _axes(trainer: Trainer) -> dict[str, str]:
    """Return mesh axes by the name of their process group."""
    mesh, tied = trainer.ranks.mesh, trainer.pipeline.tied_group
    axes = {
        mesh[axis].get_group().group_name: axis
        for axis in ("pp", "dp", "tp")
        if mesh[axis].size() > 1
    }
    data_mesh = trainer.ranks.data_mesh
    if data_mesh is not None:
        for name, axis in (("data", "dp"), ("tp", "tp")):
            axes[data_mesh[name].get_group().group_name] = axis
    context = trainer.ranks.context
    axes |= {group.group_name: "cp" for group in (context.groups if context is not None else ())}
    experts = trainer.ranks.expert_mesh
    if experts is not None:
        for name, axis in ((EP, EXPERT_PARALLEL), (ETP, "tp"), (COPIES, EXPERT_COPIES)):
            axes[experts[name].get_group().group_name] = axis
    grid = trainer.ranks.grid
    if grid is not None:
        axes |= {grid.mesh[axis].get_group().group_name: axis for axis in GRID}
    return axes | ({tied.group_name: "pp"} if tied is not None else {})


class _Moments(Meter):
    """A meter that measures all memory between the actions of the schedule.

    It measures before and after a forward pass and after a backward pass.

    activations  peak bytes at these moments that are no state
    saved        by stage, bytes that its last micro-batch saved

    The states count that are on the device.
    """

    def __init__(self, training: TrainingSpec, memory: Observed, on_backward: OnBackward) -> None:
        super().__init__(masters=training.has_masters)
        self.activations = 0
        self.saved: dict[int, int] = {}
        self._memory, self._on_backward = memory, on_backward
        self._turn = 0  # forward passes begun
        self.hosted: list[nn.Parameter] = []

    def watch(
        self,
        stages: Sequence[nn.Module],
        shards: Sequence[nn.Parameter],
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        hosted = set(parameters_on_host(stages))
        self.hosted = [parameter for parameter in shards if parameter in hosted]
        on_device = [parameter for parameter in shards if parameter not in hosted]
        super().watch(stages, on_device, (*apart, *self.hosted))
        for index, stage in enumerate(stages):
            before = _Before()
            stage.register_forward_pre_hook(partial(self._begin, before))
            stage.register_forward_hook(partial(self._end, index, before))
            for loss in (module for module in stage.modules() if isinstance(module, Loss)):
                loss.register_forward_hook(partial(self._lost, index, before))

    def sample(self) -> None:
        super().sample()
        self.mark()
        self._on_backward()

    def recomputed(self) -> None:
        self.mark()
        self.activations = max(self.activations, self._memory.held()[OTHER])

    def mark(self) -> None:
        """Mark the memory of states by kind; the shards may be the optimizer's master copy."""
        self._memory.mark(OPTIMIZER if self.masters else PARAMETERS, self.shards)
        self._memory.mark(PARAMETERS, self.gathered())
        self._memory.mark(GRADIENTS, self.gradients())
        self._memory.mark(HOST, self.hosted)
        self._memory.mark(HOST, (parameter.grad for parameter in self.hosted))

    def _begin(self, before: _Before, *_: object) -> None:
        self._turn += 1
        self.mark()  # the first pass of a step gathers parameters that are not marked yet
        before.turn, before.num_bytes = self._turn, self._memory.held()[OTHER]

    def _end(self, index: int, before: _Before, stage: nn.Module, *_: object) -> None:
        self.mark()
        if not stage.ends_model:
            self._look(index, before)

    def _lost(self, index: int, before: _Before, _: nn.Module, __: object, loss: Tensor) -> None:
        """Measure when the backward pass begins.

        The last stage then holds the saved tensors of its loss, and no logits.
        """
        loss.register_hook(partial(self._look, index, before))

    def _look(self, index: int, before: _Before, *_: object) -> None:
        held = self._memory.held()[OTHER]
        self.activations = max(self.activations, held)
        if before.turn == self._turn:  # no other forward pass ran in between
            self.saved[index] = held - before.num_bytes


@dataclass(slots=True)
class _Before:
    """Bytes held when a forward pass began, and the number of that pass."""

    turn: int = 0
    num_bytes: int = 0
