"""The chunk manager of one rank, which holds the states of its blocks in chunks.

The blocks of a traced module are its shards, which may take and return several tensors.

By operators, every part of a block is an access: in its forward pass from the call of its first
operator on, in its backward pass from the gradient of its last operator's output on, and where the
block runs again for its backward pass.

Around every pass of a block it runs the operations of the schedule. Parameters are permanent views
into a chunk (one data-parallel rank) or a gathered group of chunks; their memory comes and goes. A
block's forward pass begins and ends with its module's call. Its backward pass begins with the
first gradient of an output and ends with the gradient of an input, or with the action: autograd
runs the nodes of a later block first, and accumulates a parameter's gradient before it goes on to
earlier nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.costmodels.chunks.chunk_operations import (
    BlockPass,
    ChunkAction,
    ChunkedBlocks,
    ChunkOp,
    RankChunks,
)
from parplan.costmodels.chunks.chunk_states import ChunkStates
from parplan.costmodels.host.state_location import ChunkCommunication, StateLocation
from parplan.costmodels.layers.chunked_layer import sent_precision
from parplan.costmodels.schedules.actions import ActionKind
from parplan.executor.chunks.chunk import Chunk, ChunkedParameter, ChunkSetting
from parplan.executor.chunks.chunk_buffers import ChunkCopies, CopyCounts, DeviceLedger
from parplan.executor.chunks.moment_trace import Mark, MomentTrace
from parplan.executor.chunks.passes import is_early, issued_early, parts_of_tensors, pass_text
from parplan.executor.chunks.regions import own_part, regions_of
from parplan.executor.sharding.place import parameters_summed_over_tp
from parplan.executor.sharding.zero_units import all_reduce
from parplan.executor.tensors import DTYPES, local
from parplan.planner.runs.run_file import ChunkMoved, MemoryTrace, PredictedAndMeasured
from parplan.profiles.errors import PlannerError
from parplan.profiles.models.spec import TrainingSpec

Outputs = Tensor | tuple[Tensor, ...]
# around a computation: its kind, the stage and the micro-batch (executor/pipeline/runtime.py)
Span = Callable[[str, int, int], AbstractContextManager[None]]
_OUTER = ("mixture", "experts")  # modules around operators, without names in the model graph


class OrderError(PlannerError):
    """The passes run in another order than the chunks' schedule."""


class ChunkManager:
    """All chunks of one pipeline rank, of all its virtual stages.

    Call `take` for every block, `watch` for its module, then `built`; in each step `begin_step`,
    the passes inside `action`, `end_step`, the update of every chunk in `chunks` where its
    `gradient` is (`Chunk`), and `end_update`.

    `group` are the data-parallel ranks, `experts` the ranks with the same experts where these are
    divided over ranks, each None where there is one. With `whole_names` the names of a
    block's parameters are those of the whole model, else those inside the block. Raises BudgetError
    where the device would hold more than the schedule says, OrderError where passes run in another
    order, and TransitionError where a pass does not find its parameters.
    """

    def __init__(
        self,
        schedule: RankChunks,
        training: TrainingSpec,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        experts: dist.ProcessGroup | None = None,
        *,
        whole_names: bool = False,
    ) -> None:
        self.schedule = schedule
        self._experts = experts
        self._whole_names = whole_names
        self.counts = CopyCounts()
        self.ledger = DeviceLedger(limit_bytes=schedule.device_bytes)
        compute = DTYPES[training.precision]
        gradient = DTYPES[sent_precision(training, schedule.in_parameters)]
        on_host = (each for each in schedule.groups if each.home is StateLocation.HOST)
        staged = max((each.chunk_layout.chunk_elements for each in on_host), default=0)
        self.setting = ChunkSetting(
            device=device,
            compute=compute,
            gradient=gradient,
            in_parameters=schedule.in_parameters,
            ledger=self.ledger,
            copies=ChunkCopies(device, self.counts, staged, gradient),
            group=group,
            rank=group.rank() if group is not None else 0,
            single=schedule.communication is ChunkCommunication.SINGLE and group is not None,
        )
        self._groups = [self._chunks_of(each) for each in schedule.groups]
        self._of_part: dict[tuple[int, int], list[Chunk]] = {}
        self._states = ChunkStates(schedule.groups, in_parameters=schedule.in_parameters)
        self._early = issued_early(schedule.moments)
        self._late: dict[int, list[Callable[[], None]]] = {}
        self._action: tuple[ActionKind, int, int] | None = None
        self._open: BlockPass | None = None
        self._next = 0
        self.trace: MomentTrace | None = None
        self.traced: MemoryTrace | None = None

    def _chunks_of(self, group: ChunkedBlocks) -> list[Chunk]:
        if group.chunk_layout.ranks != self.setting.ranks:
            raise OrderError(
                f"chunks are laid out for {group.chunk_layout.ranks} data-parallel ranks, "
                f"there are {self.setting.ranks}"
            )
        regions = regions_of(group.chunk_layout, self.setting.group, self._experts)
        return [
            Chunk(group.home, regions, self.setting) for _ in range(group.chunk_layout.num_groups)
        ]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Returns every communication group, with this rank's states for the update."""
        return tuple(chunk for group in self._groups for chunk in group)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of all blocks, which no optimizer may hold."""
        return [place.parameter for chunk in self.chunks for place in chunk.places]

    @property
    def moved(self) -> ChunkMoved:
        """Returns the planned and the measured bytes of the step so far.

        The device bytes are the most that chunks held in any step.
        """
        counts, schedule = self.counts, self.schedule
        return ChunkMoved(
            in_bytes=PredictedAndMeasured(predicted=schedule.in_bytes, measured=counts.in_bytes),
            out_bytes=PredictedAndMeasured(predicted=schedule.out_bytes, measured=counts.out_bytes),
            gathered_bytes=PredictedAndMeasured(
                predicted=schedule.moved(ChunkAction.GATHER), measured=counts.gathered_bytes
            ),
            reduced_bytes=PredictedAndMeasured(
                predicted=schedule.moved(ChunkAction.REDUCE), measured=counts.reduced_bytes
            ),
            device_bytes=PredictedAndMeasured(
                predicted=schedule.device_bytes, measured=self.ledger.most_bytes
            ),
            traced=self.traced,
        )

    @property
    def host_bytes(self) -> int:
        """Returns the host bytes of chunks and of arriving gradients."""
        return sum(chunk.host_bytes for chunk in self.chunks) + self.setting.copies.host_bytes

    def values(self) -> dict[str, Tensor]:
        """Returns the placed fp32 parameters by name. Collective.

        They are views of the masters where one rank owns all.
        """
        return self._joined("master")

    def gradients(self) -> dict[str, Tensor]:
        """Returns the placed gradients of all parameters by name. Collective.

        They are there between `end_step` and the update.
        """
        return self._joined("gradient")

    def _joined(self, state: str) -> dict[str, Tensor]:
        return {
            place.name: place.placed(chunk.join(place, getattr(chunk, state)))
            for chunk in self.chunks
            for place in chunk.places
        }

    # building

    def take(self, block: int, module: nn.Module) -> None:
        """Moves the parameters of the placed block `block` to the chunks.

        They become views of the chunks.
        """
        shorter = str if self._whole_names else _short
        named = {shorter(name): name for name, _ in module.named_parameters()}
        summed = {
            id(parameter)
            for each in module.modules()
            for parameter in parameters_summed_over_tp(each)
        }
        index = next(i for i, group in enumerate(self.schedule.groups) if block in group.blocks)
        group, prefix = self.schedule.groups[index], f"block{block}."
        chunk_layout, parts = group.chunk_layout, iter(parts_of_tensors(group, block))
        for tensor, number, offset in zip(
            chunk_layout.tensors, chunk_layout.group_of, chunk_layout.offset_of, strict=True
        ):
            if tensor.name.startswith(prefix):
                name, part = named.pop(tensor.name.removeprefix(prefix)), (block, next(parts))
                self._take(self._groups[index][number], offset, part, module, name, summed)
        if named:
            raise OrderError(f"block {block} has {', '.join(named)}, of which no chunk knows")

    def _take(
        self,
        chunk: Chunk,
        offset: int,
        part: tuple[int, int],
        module: nn.Module,
        name: str,
        summed: set[int],
    ) -> None:
        block, region = part[0], chunk.region_of(offset)
        old = module.get_parameter(name)
        value = local(old.detach())
        with chunk.group_buffer.viewed(offset, value.shape) as view:
            parameter = nn.Parameter(_placed_as(old, view))
        path, _, last = name.rpartition(".")
        module.get_submodule(path).register_parameter(last, parameter)
        place = ChunkedParameter(
            name=name if self._whole_names else f"block{block}.{name}",
            block=block,
            part=part[1],
            parameter=parameter,
            offset=offset,
            shape=value.shape,
            owned=own_part(offset, value.numel(), region, region.rank),
            over_tp=id(old) in summed,
        )
        chunk.take(place, value)
        chunks = self._of_part.setdefault(part, [])
        if chunk not in chunks:
            chunks.append(chunk)

    def watch(
        self, block: int, module: nn.Module, parts: Sequence[Sequence[nn.Module]] = ()
    ) -> None:
        """Follows the passes of `block`, whose outermost module is called once a forward pass.

        It takes and returns tensors, one or a tuple of them. `parts` are the operators of each part
        of the block in their order, where a pass has several accesses.
        """
        module.register_forward_pre_hook(
            lambda _, inputs: self._begin(ActionKind.FORWARD, self._micro_batch, block)
        )
        for number, operators in enumerate(parts):
            if number:
                operators[0].register_forward_pre_hook(partial(self._enter_part, block, number))
            if number < len(parts) - 1:
                operators[-1].register_forward_hook(partial(self._left_part, block, number))
        module.register_forward_hook(partial(self._forwarded, block))

    def _enter_part(
        self, block: int, part: int, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> None:
        """Begins a part with the call of its first operator, also where its block runs again."""
        open_pass = self._open
        if self._action is None or open_pass is None or open_pass.block != block:
            return
        # an operator that runs again alone begins no access
        if self._action[0] is ActionKind.FORWARD or open_pass.access.rerun:
            self._begin(self._action[0], self._micro_batch, block, part)

    def _left_part(
        self, block: int, part: int, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Begins the backward pass of a part with the gradient of its output.

        Outputs of a forward pass that runs again get no gradient: the graph of the first run does.
        """
        forward = self._action is not None and self._action[0] is ActionKind.FORWARD
        if forward and output.requires_grad:
            begins = partial(self._begin_backward, self._micro_batch, block, begun=[], part=part)
            output.register_hook(begins)

    def built(self) -> None:
        """Casts all parameters from their masters, after the last block was taken."""
        for chunk in self.chunks:
            chunk.cast_master()

    # a step

    def around(self, span: Span) -> Span:
        """Returns spans that also tell the manager of each computation."""

        @contextmanager
        def entered(work: str, stage: int, micro_batch: int) -> Iterator[None]:
            with span(work, stage, micro_batch), self.action(work, stage, micro_batch):
                yield

        return entered

    def follow(self, schedule: RankChunks) -> None:
        """Goes on with another schedule of the same chunks, between two steps."""
        assert schedule.groups == self.schedule.groups, "chunks stay what they are"
        self.schedule = schedule
        self._early = issued_early(schedule.moments)
        self.ledger.limit_bytes = schedule.device_bytes

    def begin_step(self) -> None:
        self.setting.copies.counts = self.counts = CopyCounts()
        self._next = 0
        for chunk in self.chunks:
            chunk.begin_step()

    @contextmanager
    def action(self, work: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Surrounds a pass of a stage, "F" or "B"; it has no effect on other work."""
        self._action = (ActionKind(work), stage, micro_batch) if work in ("F", "B") else None
        yield
        self._end()
        self._action = None

    def end_step(self, tp_group: dist.ProcessGroup | None) -> None:
        """Brings all gradients to the side of their update, after the last backward pass."""
        if self._next != len(self.schedule.moments):
            raise OrderError(
                f"the step ended after {self._next} of {len(self.schedule.moments)} "
                "passes of blocks"
            )
        self._mark(Mark.CLOSING)
        self.ledger.limit_bytes = self.schedule.device_bytes
        for op in self.schedule.closing[: self._updated]:
            self._do(op)
        self._settle(sorted(self._late))
        for chunk in self.chunks:
            chunk.wait()
        self.setting.copies.settle()
        if tp_group is not None:
            summed = [
                place.owned.of(chunk.gradient)
                for chunk in self.chunks
                for place in chunk.owned
                if place.over_tp
            ]
            all_reduce(summed, tp_group)
        self._mark(Mark.CLOSED)

    def end_update(self) -> None:
        """Returns parameters that the host has updated to the device."""
        self._mark(Mark.UPDATED)
        for op in self.schedule.closing[self._updated :]:
            self._do(op)
        self._states.update()

    @property
    def _updated(self) -> int:
        """Returns the place of the update in the closing operations: before the first RETURN."""
        closing = self.schedule.closing
        returns = (i for i, op in enumerate(closing) if op.does is ChunkAction.RETURN)
        return next(returns, len(closing))

    @property
    def _micro_batch(self) -> int:
        return self._action[2] if self._action is not None else -1

    def _forwarded(
        self, block: int, module: nn.Module, inputs: tuple[Tensor, ...], output: Outputs
    ) -> None:
        self._end()
        outputs = (output,) if isinstance(output, Tensor) else output
        begins = partial(self._begin_backward, self._micro_batch, block, begun=[])
        for each in outputs:
            if each.requires_grad:
                each.register_hook(begins)
        # a leaf's gradient may come before those of parameters: then the action's end counts
        for each in inputs:
            if each.grad_fn is not None:
                each.register_hook(lambda _: self._end(block))

    def _begin_backward(
        self, micro_batch: int, block: int, _: Tensor, *, begun: list[bool], part: int | None = None
    ) -> None:
        """Begins the backward pass of a block or a part with the first gradient of its outputs."""
        if not begun:
            begun.append(True)
            self._begin(ActionKind.BACKWARD, micro_batch, block, part)

    def _begin(
        self, work: ActionKind, micro_batch: int, block: int, part: int | None = None
    ) -> None:
        """Begins a block's pass, or the access of a part of it.

        It runs the operations that the pass needs, and starts copies for later passes.
        """
        self._end()
        self._mark(Mark.ARRIVED)
        moment = self._expected(work, micro_batch, block, part)
        self.ledger.limit_bytes = min(moment.chunk_bytes, self.schedule.device_bytes)
        on_time = [op for op in moment.before if not is_early(op, self._next)]
        for op in (*on_time, *self._early.get(self._next, ())):
            self._do(op)
        self._states.begin(block, moment.access)
        for part in moment.access.reads:
            for chunk in self._of_part[block, part]:
                chunk.group_buffer.wait()
        self._open = moment
        self._next += 1
        self._mark(Mark.BEGUN)

    def _expected(
        self, work: ActionKind, micro_batch: int, block: int, part: int | None
    ) -> BlockPass:
        """Returns the next pass of the schedule, which must be this. Raises OrderError."""
        stage = self._action[1] if self._action is not None else -1
        actual = (work, stage, micro_batch, block)
        moments = self.schedule.moments
        moment = moments[self._next] if self._next < len(moments) else None
        expected = None
        if moment is not None:
            expected = (moment.work, moment.stage, moment.micro_batch, moment.block)
        in_action = self._action is not None and self._action[0] is work
        same = moment is not None and part in (None, moment.access.part)
        if moment is None or actual != expected or not in_action or not same:
            raise OrderError(
                f"pass {self._next} of the step is {pass_text(actual, part)}, "
                f"the chunks' schedule has {pass_text(expected, moment and moment.access.part)}"
            )
        return moment

    def _end(self, block: int | None = None) -> None:
        """Ends the open pass, if it is of `block` or if no block is given."""
        moment = self._open
        if moment is None or block not in (None, moment.block):
            return
        self._open = None
        self._mark(Mark.ENDED)
        self._settle((self._next - 1,))
        if moment.work is ActionKind.BACKWARD:
            made = moment.access.makes
            for chunk in dict.fromkeys(c for p in made for c in self._of_part[moment.block, p]):
                chunk.collect(moment.block, made)
        self._mark(Mark.COLLECTED)
        self._states.end(moment.block, moment.work, moment.access)
        for op in moment.after:
            self._do(op)
        self._mark(Mark.LEFT)

    def _mark(self, mark: Mark) -> None:
        if self.trace is not None:
            self.trace.mark(mark)

    def _do(self, op: ChunkOp) -> None:
        """Runs an operation; `_late` has the ends of operations that may outlast it, by pass."""
        chunk = self._groups[op.group][op.number]
        self._states.do(op)
        {
            ChunkAction.DROP: chunk.drop,
            ChunkAction.FETCH: chunk.fetch,
            ChunkAction.GATHER: chunk.gather,
            ChunkAction.RELEASE: chunk.release,
            ChunkAction.REDUCE: chunk.reduce,
            ChunkAction.SEND: chunk.send,
            ChunkAction.RETURN: chunk.bring_back,
        }[op.does]()
        over = {ChunkAction.REDUCE: chunk.reduced, ChunkAction.SEND: chunk.sent}.get(op.does)
        if over is not None and op.issued >= self._next:
            self._late.setdefault(op.issued, []).append(over)
        elif over is not None:
            over()

    def _settle(self, moments: Iterable[int]) -> None:
        for index in moments:
            for over in self._late.pop(index, ()):
                over()


def _placed_as(whole: Tensor, part: Tensor) -> Tensor:
    """Places this rank's `part` of a tensor as `whole` is placed."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _short(name: str) -> str:
    """Returns the name in the model graph: `fc1.weight` for `mixture.experts.fc1.weight`."""
    return ".".join(part for part in name.split(".") if part not in _OUTER)
