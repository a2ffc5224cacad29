"""The price of a whole step: time with its breakdown, memory by class and pipeline rank, redundancy over the cluster.

Two times are given. The *closed form* is what the integer program minimises (EQUATIONS I4, with virtual stages):

    T = (M - 1/v) max_s t_s + (1/v) sum_s t_s + max_s tail_s

with t_s the seconds of one micro-batch on rank s (compute, recompute, exposed communication) and tail_s what follows
its last backward pass (exposed gradient reduction, optimizer). The *simulated* time replays the schedule's action list
and is the one reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.book import PriceBook
from costmodels.memory import StateBytes
from costmodels.mesh import Axis, Mesh
from costmodels.schedules import in_flight
from costmodels.simulate import SimulatedStep, StageCost, simulate
from costmodels.strategy import Frame, LayerChoice, Strategy
from profiles.measured import Machine
from profiles.model import LayerKind
from profiles.provenance import ZERO, Seconds
from profiles.spec import TrainingSpec
from profiles.units import MIB

RESERVED_SHARE = 0.04  # allocator reserve over allocated bytes: measured reserved/allocated is 1.02-1.07 (EQUATIONS M6)
NCCL_BYTES_PER_AXIS = 400 * MIB  # 0.5-2 GiB with many communicators (EQUATIONS M6); one a parallel axis, an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes per device of one pipeline rank."""

    states: StateBytes
    activations: float
    temporaries: float
    reserve: float

    @property
    def total(self) -> float:
        return self.states.total + self.activations + self.temporaries + self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundantBytes:
    """Bytes beyond one copy of everything, by class (EQUATIONS R); temporaries are redundant in whole."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Seconds of one pipeline rank in one step; all but the bubble, by cause."""

    compute: Seconds
    recompute: Seconds
    tp_comm: Seconds
    dp_comm: Seconds
    pp_comm: Seconds
    optimizer: Seconds

    @property
    def total(self) -> Seconds:
        return self.compute + self.recompute + self.tp_comm + self.dp_comm + self.pp_comm + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """What a strategy costs. `ranks`, `memory` and `redundant` (per device) are by pipeline rank."""

    closed_form_s: float
    simulated: SimulatedStep
    ranks: tuple[RankTime, ...]
    memory: tuple[RankMemory, ...]
    redundant: tuple[RedundantBytes, ...]

    @property
    def step_s(self) -> float:
        return self.simulated.step_s


def reserve_constant_bytes(mesh: Mesh, machine: Machine) -> int:
    """Bytes a device holds before the first tensor: context and NCCL buffers; none where there is no device context."""
    context = machine.cluster.device.context_bytes
    axes = sum(mesh.degree(axis) > 1 for axis in Axis)
    return context + axes * NCCL_BYTES_PER_AXIS if context else 0


def usable_bytes(limit_bytes: float, mesh: Mesh, machine: Machine) -> float:
    """How much of `limit_bytes` tensors may fill, so that with the reserve they stay under the limit."""
    return (limit_bytes - reserve_constant_bytes(mesh, machine)) / (1 + RESERVED_SHARE)


def closed_form_s(rank_s: list[float], tail_s: list[float], num_micro_batches: int, virtual_stages: int) -> float:
    """(M - 1/v) max t + (1/v) sum t + max tail: exact for equal ranks without transfers (EQUATIONS P, I4)."""
    share = 1 / virtual_stages
    return (num_micro_batches - share) * max(rank_s) + share * sum(rank_s) + max(tail_s)


def transfer_time(rank: int, frame: Frame, book: PriceBook) -> Seconds:
    """One micro-batch's boundary activation (or its gradient) from pipeline rank `rank` to the next one, cyclically.

    The ranks of a stage that sits inside a node send together and share its NICs. Without sequence parallelism every
    tensor-parallel rank sends the whole boundary tensor.
    """
    mesh, gpus_per_node = frame.mesh, book.machine.cluster.gpus_per_node
    if mesh.pp == 1:
        return ZERO
    stride = mesh.stride(Axis.PP)
    here, there = rank * stride, (rank + 1) % mesh.pp * stride
    crosses = here // gpus_per_node != there // gpus_per_node
    return book.transfer(frame.micro_batch_size, frame.sharding, crosses_nodes=crosses, sharing=min(stride, gpus_per_node))


def receive_times(stage: int, frame: Frame, book: PriceBook) -> tuple[Seconds, Seconds]:
    """What virtual stage `stage` waits for its forward input and for its output gradient, each as long as one transfer."""
    pp = frame.mesh.pp
    forward = transfer_time((stage - 1) % pp, frame, book) if stage > 0 else ZERO
    backward = transfer_time(stage % pp, frame, book) if stage < frame.num_virtual_stages - 1 else ZERO
    return forward, backward


def rank_receives(rank: int, frame: Frame, book: PriceBook) -> Seconds:
    """What all chunks of a rank wait for in one micro-batch: the sum of `receive_times` over its virtual stages."""
    pp, chunks = frame.mesh.pp, frame.virtual_stages
    forward = transfer_time((rank - 1) % pp, frame, book).scaled(chunks - (rank == 0))
    return forward + transfer_time(rank, frame, book).scaled(chunks - (rank == pp - 1))


def price_step(strategy: Strategy, book: PriceBook) -> StepPrice:
    """Time, memory and redundancy of `strategy`.

    Raises AssertionError when the strategy is not legal for its schedule; legality is decided in planner/space.py.
    """
    frame = strategy.frame
    ranks = range(frame.mesh.pp)
    memory = tuple(rank_memory(strategy, rank, book) for rank in ranks)
    times = [_rank_time(strategy, rank, book) for rank in ranks]
    tails = [_tail(strategy, rank, book).value_s for rank in ranks]
    costs = [
        [_stage_cost(chunk, rank + index * frame.mesh.pp, frame, book) for index, chunk in enumerate(strategy.chunks(rank))]
        for rank in ranks
    ]
    micro_batch_s = [
        sum(c.forward_s + c.backward_s + c.recompute_s + c.receive_forward_s + c.receive_backward_s for c in row) for row in costs]
    return StepPrice(
        closed_form_s=closed_form_s(micro_batch_s, tails, frame.num_micro_batches, frame.virtual_stages),
        simulated=simulate(frame.schedule, frame.num_micro_batches, costs, tails),
        ranks=tuple(times),
        memory=memory,
        redundant=tuple(rank_redundancy(strategy, rank, held, book) for rank, held in enumerate(memory)),
    )


def _stage_cost(chunk: tuple[LayerChoice, ...], stage: int, frame: Frame, book: PriceBook) -> StageCost:
    forward_s = backward_s = recompute_s = stash_bytes = 0.0
    for choice in chunk:
        time = book.layer_time(choice.kind, frame.micro_batch_size, frame.sharding, choice.recompute)
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding, choice.zero)
        forward_s += time.forward_s + data.forward.value_s
        backward_s += time.backward_s + data.backward.value_s
        recompute_s += time.recompute_s
        stash_bytes += book.activations(choice.kind, frame.micro_batch_size, frame.sharding, choice.recompute).saved
    receive_forward, receive_backward = receive_times(stage, frame, book)
    return StageCost(
        forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s, stash_bytes=stash_bytes,
        receive_forward_s=receive_forward.value_s, receive_backward_s=receive_backward.value_s)


def _layers(strategy: Strategy, rank: int) -> list[LayerChoice]:
    return [choice for chunk in strategy.chunks(rank) for choice in chunk]


def _tail(strategy: Strategy, rank: int, book: PriceBook) -> Seconds:
    """What follows the last backward pass of a rank: exposed reductions, the tied embedding, the optimizer."""
    frame, total = strategy.frame, ZERO
    for choice in _layers(strategy, rank):
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding, choice.zero)
        total += data.step + data.optimizer
    return total + _tied(frame, rank, book)


def _tied(frame: Frame, rank: int, book: PriceBook) -> Seconds:
    at_end = rank in (0, frame.mesh.pp - 1)
    return book.tied_reduction(frame.mesh, frame.sharding) if book.tied and frame.mesh.pp > 1 and at_end else ZERO


def _rank_time(strategy: Strategy, rank: int, book: PriceBook) -> RankTime:
    frame = strategy.frame
    compute = recompute = tp_comm = per_micro_batch = per_step = optimizer = ZERO
    for choice in _layers(strategy, rank):
        time = book.layer_time(choice.kind, frame.micro_batch_size, frame.sharding, choice.recompute)
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding, choice.zero)
        compute += time.forward + time.backward
        recompute += time.recompute
        tp_comm += time.tp_forward + time.tp_backward + time.tp_recompute
        per_micro_batch += data.forward + data.backward
        per_step += data.step
        optimizer += data.optimizer
    transfers, m = rank_receives(rank, frame, book), frame.num_micro_batches
    return RankTime(
        compute=compute.scaled(m), recompute=recompute.scaled(m), tp_comm=tp_comm.scaled(m), pp_comm=transfers.scaled(m),
        dp_comm=per_micro_batch.scaled(m) + per_step + _tied(frame, rank, book), optimizer=optimizer)


def stashes(kind: LayerKind, rank: int, frame: Frame) -> int:
    """How many micro-batches of one layer of `kind` a rank holds at its peak, per model chunk of the rank (EQUATIONS M4).

    With virtual stages the count is of chunk stashes, for any one chunk an upper bound; the head's chunk is used up
    at once.
    """
    if kind is LayerKind.HEAD and frame.virtual_stages > 1:
        return 1
    return in_flight(frame.schedule, rank, frame.mesh.pp, frame.num_micro_batches, frame.virtual_stages)


def _held_bytes(strategy: Strategy, rank: int, saved: dict[LayerChoice, float]) -> float:
    """Bytes of activations at the peak: stashes times the largest chunk's blocks, and the embedding's and head's own."""
    frame = strategy.frame
    blocks = max(sum(saved[c] for c in chunk if c.kind is LayerKind.BLOCK) for chunk in strategy.chunks(rank))
    ends = sum(stashes(c.kind, rank, frame) * saved[c] for c in _layers(strategy, rank) if c.kind is not LayerKind.BLOCK)
    return stashes(LayerKind.BLOCK, rank, frame) * blocks + ends


def rank_memory(strategy: Strategy, rank: int, book: PriceBook) -> RankMemory:
    """Peak bytes of one device of a pipeline rank, by class (EQUATIONS M6)."""
    frame, layers = strategy.frame, _layers(strategy, rank)
    saved, workspace, states, buffer = {}, 0, StateBytes(), 0
    for choice in layers:
        bytes_ = book.activations(choice.kind, frame.micro_batch_size, frame.sharding, choice.recompute)
        held = book.states(choice.kind, frame.mesh, frame.sharding, choice.zero)
        saved[choice] = float(bytes_.saved)
        workspace, buffer = max(workspace, bytes_.workspace), max(buffer, held.zero_buffer)
        states += held.states
    activations = _held_bytes(strategy, rank, saved)
    allocated = states.total + activations + workspace + buffer
    reserve = RESERVED_SHARE * allocated + reserve_constant_bytes(frame.mesh, book.machine)
    return RankMemory(states=states, activations=activations, temporaries=workspace + buffer, reserve=reserve)


def rank_redundancy(strategy: Strategy, rank: int, memory: RankMemory, book: PriceBook) -> RedundantBytes:
    """Redundant bytes of one device of a pipeline rank that holds `memory`, by class.

    A class that holds less than one copy counts as is.
    """
    frame = strategy.frame
    ideal = [0.0, 0.0, 0.0]
    kept: dict[LayerChoice, float] = {}
    for choice in _layers(strategy, rank):
        parts = book.states(choice.kind, frame.mesh, frame.sharding, choice.zero).ideal
        ideal = [total + part for total, part in zip(ideal, parts, strict=True)]
        kept[choice] = book.activations(choice.kind, frame.micro_batch_size, frame.sharding, choice.recompute).ideal_saved
    return RedundantBytes(
        parameters=memory.states.parameters - ideal[0], gradients=memory.states.gradients - ideal[1],
        optimizer=memory.states.optimizer - ideal[2],
        activations=memory.activations - _held_bytes(strategy, rank, kept), temporaries=memory.temporaries)


def model_flops_utilization(step_s: float, num_ranks: int, book: PriceBook) -> float:
    """MFU: model FLOPs of the step (K4, causal attention in full, no recompute) over the peak of all ranks."""
    training: TrainingSpec = book.training
    flops = book.graph(1).model_flops * training.global_batch_size
    return flops / (num_ranks * book.machine.cluster.device.peak(training.precision) * step_s)
