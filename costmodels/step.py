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
from costmodels.layer import CONTENTION
from costmodels.mesh import Axis
from costmodels.occupancy import RankMemory, rank_layers, rank_memory
from costmodels.redundancy import RedundantBytes, rank_redundancy
from costmodels.simulate import SimulatedStep, StageCost, simulate
from costmodels.strategy import Frame, LayerChoice, Strategy
from profiles.provenance import ZERO, Seconds
from profiles.spec import TrainingSpec


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


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a simulation of a strategy starts from: `stages[rank][chunk]`, and by rank the seconds after its last action, `tail_s`.

    reduced_s      exposed reductions and gathers of the step
    tied_s         the reduction of a tied embedding's two gradients
    optimizer_s    the update of the parameters
    """

    stages: tuple[tuple[StageCost, ...], ...]
    reduced_s: tuple[float, ...]
    tied_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @property
    def tail_s(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(self.reduced_s, self.tied_s, self.optimizer_s, strict=True)))


def closed_form_s(rank_s: list[float], tail_s: list[float], num_micro_batches: int, virtual_stages: int) -> float:
    """(M - 1/v) max t + (1/v) sum t + max tail: exact for equal ranks without transfers (EQUATIONS P, I4)."""
    share = 1 / virtual_stages
    return (num_micro_batches - share) * max(rank_s) + share * sum(rank_s) + max(tail_s)


def transfer_time(rank: int, frame: Frame, book: PriceBook) -> Seconds:
    """One micro-batch's boundary activation (or its gradient) from pipeline rank `rank` to the next one, cyclically.

    Where the stack hides transfers of the interleaved schedule, what they slow down is left (costmodels/layer.py).
    The ranks of a stage that sits inside a node send together and share its NICs. What each sends: `PriceBook.transfer`.
    """
    mesh, gpus_per_node = frame.mesh, book.machine.cluster.gpus_per_node
    if mesh.pp == 1:
        return ZERO
    stride = mesh.stride(Axis.PP)
    here, there = rank * stride, (rank + 1) % mesh.pp * stride
    crosses = here // gpus_per_node != there // gpus_per_node
    sent = book.transfer(frame.micro_batch_size, frame.sharding, crosses_nodes=crosses, sharing=min(stride, gpus_per_node))
    hidden = frame.virtual_stages > 1 and book.training.stack.overlap_transfers
    return sent.scaled(CONTENTION) if hidden else sent


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


def step_costs(strategy: Strategy, book: PriceBook) -> StepCosts:
    """The costs of every stage of `strategy` and the tails of its ranks, before any schedule is replayed."""
    frame, ranks = strategy.frame, range(strategy.frame.mesh.pp)
    stages = tuple(
        tuple(_stage_cost(chunk, rank + index * frame.mesh.pp, frame, book) for index, chunk in enumerate(strategy.chunks(rank)))
        for rank in ranks)
    tails = [_tail(strategy, rank, book) for rank in ranks]
    reduced_s, tied_s, optimizer_s = (tuple(part.value_s for part in parts) for parts in zip(*tails, strict=True))
    return StepCosts(stages, reduced_s, tied_s, optimizer_s)


def simulated_step(strategy: Strategy, costs: StepCosts, *, keep_events: bool = False) -> SimulatedStep:
    """The schedule of `strategy` replayed with the costs of its stages."""
    frame = strategy.frame
    return simulate(frame.schedule, frame.num_micro_batches, costs.stages, costs.tail_s, keep_events)


def price_step(strategy: Strategy, book: PriceBook) -> StepPrice:
    """Time, memory and redundancy of `strategy`.

    Raises AssertionError when the strategy is not legal for its schedule; legality is decided in planner/space.py.
    """
    frame = strategy.frame
    ranks = range(frame.mesh.pp)
    memory = tuple(rank_memory(strategy, rank, book) for rank in ranks)
    times = [_rank_time(strategy, rank, book) for rank in ranks]
    costs = step_costs(strategy, book)
    micro_batch_s = [
        sum(c.forward_s + c.backward_s + c.recompute_s + c.receive_forward_s + c.receive_backward_s for c in row) for row in costs.stages]
    return StepPrice(
        closed_form_s=closed_form_s(micro_batch_s, list(costs.tail_s), frame.num_micro_batches, frame.virtual_stages),
        simulated=simulated_step(strategy, costs),
        ranks=tuple(times),
        memory=memory,
        redundant=tuple(rank_redundancy(strategy, rank, held, book) for rank, held in enumerate(memory)),
    )


def _stage_cost(chunk: tuple[LayerChoice, ...], stage: int, frame: Frame, book: PriceBook) -> StageCost:
    forward_s = backward_s = recompute_s = stash_bytes = 0.0
    for choice in chunk:
        time = book.layer_time(choice.kind, frame.micro_batch_size, frame.sharding_of(choice), choice.recompute)
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding_of(choice), choice.zero)
        forward_s += time.forward_s + data.forward.value_s
        backward_s += time.backward_s + data.backward.value_s
        recompute_s += time.recompute_s
        stash_bytes += book.activations(choice.kind, frame.micro_batch_size, frame.sharding_of(choice), choice.recompute).saved
    receive_forward, receive_backward = receive_times(stage, frame, book)
    return StageCost(
        forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s, stash_bytes=stash_bytes,
        receive_forward_s=receive_forward.value_s, receive_backward_s=receive_backward.value_s)


def _tail(strategy: Strategy, rank: int, book: PriceBook) -> tuple[Seconds, Seconds, Seconds]:
    """What follows the last backward pass of a rank: exposed reductions, the tied embedding's, and the optimizer."""
    frame, reduced, updated = strategy.frame, ZERO, ZERO
    for choice in rank_layers(strategy, rank):
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding_of(choice), choice.zero)
        reduced += data.step
        updated += data.optimizer
    return reduced, _tied(frame, rank, book), updated


def _tied(frame: Frame, rank: int, book: PriceBook) -> Seconds:
    at_end = rank in (0, frame.mesh.pp - 1)
    return book.tied_reduction(frame.mesh, frame.sharding) if book.tied and frame.mesh.pp > 1 and at_end else ZERO


def _rank_time(strategy: Strategy, rank: int, book: PriceBook) -> RankTime:
    frame = strategy.frame
    compute = recompute = tp_comm = per_micro_batch = per_step = optimizer = ZERO
    for choice in rank_layers(strategy, rank):
        time = book.layer_time(choice.kind, frame.micro_batch_size, frame.sharding_of(choice), choice.recompute)
        data = book.data_parallel(choice.kind, frame.micro_batch_size, frame.mesh, frame.sharding_of(choice), choice.zero)
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


def model_flops_utilization(step_s: float, num_ranks: int, book: PriceBook) -> float:
    """MFU: model FLOPs of the step (K4, causal attention in full, no recompute) over the peak of all ranks."""
    training: TrainingSpec = book.training
    flops = book.graph(1).model_flops * training.global_batch_size
    return flops / (num_ranks * book.machine.cluster.device.peak(training.precision) * step_s)
