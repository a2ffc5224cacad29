"""The price of a step: closed form, simulation and breakdown agree, and published memory and MFU follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodels.book import PriceBook
from costmodels.mesh import Mesh
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule, uniform_step_s
from costmodels.step import (
    NCCL_BYTES_PER_AXIS,
    RESERVED_SHARE,
    closed_form_s,
    model_flops_utilization,
    price_step,
    rank_memory,
    receive_times,
    reserve_constant_bytes,
    stashes,
    transfer_time,
    usable_bytes,
)
from costmodels.strategy import Frame, LayerChoice, Strategy
from profiles.catalog import load_cluster, load_model, with_gpus
from profiles.measured import machine_for
from profiles.model import LayerKind
from profiles.provenance import ZERO, weakest
from profiles.spec import AttentionKernel, Precision, TrainingSpec
from profiles.units import GIB
from tests.instances import every_price, random_instance

A100 = load_cluster("a100-80gb")
TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, overlap_grad_reduce=False)
TINY = replace(load_model("gpt-tiny").spec, num_layers=8)


def frame_of(pp=1, dp=1, tp=1, schedule=Schedule.ONE_F_ONE_B, v=1, b=1, m=8, sequence_parallel=False):
    return Frame(
        mesh=Mesh(pp=pp, dp=dp, tp=tp), schedule=schedule, virtual_stages=v, micro_batch_size=b, num_micro_batches=m,
        sequence_parallel=sequence_parallel)


def uniform(frame, num_layers, *, recompute=Recompute.NONE, zero=0, ends=True):
    """The strategy with equal stages, with or without embedding and head."""
    per_stage = num_layers // frame.num_virtual_stages
    stages = [[LayerChoice(LayerKind.BLOCK, recompute, zero)] * per_stage for _ in range(frame.num_virtual_stages)]
    if ends:
        stages[0].insert(0, LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, zero))
        stages[-1].append(LayerChoice(LayerKind.HEAD, Recompute.NONE, zero))
    return Strategy(frame=frame, stages=tuple(map(tuple, stages)))


def book_of(model, num_gpus, training=TRAINING, **network):
    cluster = with_gpus(A100, num_gpus)
    return PriceBook(model, training, machine_for(replace(cluster, **network)))


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), [
    pytest.param(Schedule.ONE_F_ONE_B, 1, 1, 8, id="one-stage"),
    pytest.param(Schedule.ONE_F_ONE_B, 4, 1, 8, id="1f1b"),
    pytest.param(Schedule.GPIPE, 4, 1, 2, id="gpipe"),
    pytest.param(Schedule.INTERLEAVED, 4, 2, 8, id="interleaved"),
])
@pytest.mark.parametrize("level", list(Recompute))
def test_equal_stages_without_transfers_take_the_closed_form_of_the_papers(schedule, pp, v, m, level):
    free = {"intra_node": replace(A100.intra_node, bytes_per_s=1e30, latency_s=0.0)}
    book = book_of(TINY, pp, **free)
    frame = frame_of(pp=pp, schedule=schedule, v=v, m=m)

    price = price_step(uniform(frame, 8, recompute=level, ends=False), book)

    block = book.layer_time(LayerKind.BLOCK, 1, frame.sharding, level)
    tied_s = book.tied_reduction(frame.mesh, frame.sharding).value_s if pp > 1 else 0.0  # the only message that is left
    tail_s = 8 // pp * book.data_parallel(LayerKind.BLOCK, 1, frame.mesh, frame.sharding, 0).optimizer.value_s + tied_s
    papers_s = uniform_step_s(schedule, pp, m, v, 8 // pp * block.total_s) + tail_s
    assert price.closed_form_s == pytest.approx(papers_s, rel=1e-12)
    assert price.step_s == pytest.approx(papers_s, rel=1e-12)


def test_the_closed_form_by_hand():
    # (4 - 1/2) * 3 + (1 + 2 + 3) / 2 + max tail
    assert closed_form_s([1.0, 2.0, 3.0], [0.5, 0.25, 0.0], 4, 2) == 3.5 * 3 + 3 + 0.5


@pytest.mark.parametrize("seed", range(6))
def test_the_parts_of_every_rank_add_up_to_the_step(seed):
    for strategy, price in every_price(random_instance(seed)):
        for rank, timeline in zip(price.ranks, price.simulated.ranks, strict=True):
            assert rank.total.value_s + timeline.bubble_s == pytest.approx(price.step_s, rel=1e-9), strategy
            assert rank.pp_comm.value_s == pytest.approx(timeline.transfer_s, rel=1e-9, abs=1e-15)
            assert rank.total.kind is weakest(
                part.kind for part in (rank.compute, rank.recompute, rank.tp_comm, rank.dp_comm, rank.pp_comm, rank.optimizer)
                if part.value_s)


@pytest.mark.parametrize("seed", range(6))
def test_the_stash_that_is_priced_is_never_below_the_simulated_peak(seed):
    """Equal chunks without ends: exactly it, else an upper bound (with virtual stages the ends are held by one chunk only)."""
    for strategy, price in every_price(random_instance(seed)):
        for memory, timeline in zip(price.memory, price.simulated.ranks, strict=True):
            assert memory.activations >= timeline.peak_stash_bytes * (1 - 1e-12)
            if strategy.frame.virtual_stages == 1:
                assert memory.activations == pytest.approx(timeline.peak_stash_bytes, rel=1e-12)


@pytest.mark.parametrize(("frame", "expected"), [
    pytest.param(frame_of(pp=4), [4, 3, 2, 1], id="1f1b-holds-what-is-ahead"),
    pytest.param(frame_of(pp=4, m=2, schedule=Schedule.GPIPE), [2, 2, 2, 2], id="gpipe-holds-all"),
    pytest.param(frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2), [11, 9, 7, 5], id="interleaved-counts-chunks"),
])
def test_stashes_of_a_block_by_hand(frame, expected):
    assert [stashes(LayerKind.BLOCK, rank, frame) for rank in range(4)] == expected


def test_the_heads_chunk_is_used_up_at_once_when_interleaved():
    assert stashes(LayerKind.HEAD, 3, frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2)) == 1
    assert stashes(LayerKind.HEAD, 3, frame_of(pp=4, m=2, schedule=Schedule.GPIPE)) == 2


# Korthikanti et al. 2022, figure 1, first pipeline stage, TP 8, 16-bit with fp32 gradients (18 bytes a parameter)
# (model, pp, v, micro-batch, micro-batches, states GiB, activations without and with sequence parallelism + selective)
FIGURE_1 = [
    pytest.param("gpt-22b", 1, 1, 4, 1, 45.5625, 59.25, 9.5625, id="22b"),
    pytest.param("gpt-175b", 8, 3, 1, 64, 45.5625, 66.84375, 12.3515625, id="175b"),
    pytest.param("gpt-530b", 35, 3, 1, 280, 31.640625, 114.0234375, 23.076171875, id="530b"),
    pytest.param("gpt-1t", 64, 1, 1, 512, 32.958984375, 131.25, 26.5625, id="1t"),
]


def first_stage(name, pp, v, b, m, *, recompute, sequence_parallel):
    entry = load_model(name)
    training = TrainingSpec(
        global_batch_size=b * m, seq_length=2048, precision=Precision.FP16, gradient_precision=Precision.FP32,
        attention=AttentionKernel.UNFUSED)
    frame = frame_of(
        pp=pp, tp=8, schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B, v=v, b=b, m=m, sequence_parallel=sequence_parallel)
    book = book_of(replace(entry.spec, dropout=0.1), 8 * pp, training)
    return book, frame, rank_memory(uniform(frame, entry.spec.num_layers, recompute=recompute), 0, book)


@pytest.mark.parametrize(("name", "pp", "v", "b", "m", "states", "plain", "lean"), FIGURE_1)
def test_states_of_the_first_stage_are_korthikantis_plus_what_the_paper_leaves_out(name, pp, v, b, m, states, plain, lean):
    """The paper counts 12 h^2 parameters a block. We also hold its biases and norms, and the embeddings of the stage."""
    book, _, memory = first_stage(name, pp, v, b, m, recompute=Recompute.NONE, sequence_parallel=False)
    h, tp, model = book.model.hidden_size, 8, book.model
    biases_and_norms = 3 * h / tp + h + 4 * h / tp + h + 2 * 2 * h  # qkv, output, fc1, fc2; two norms of weight and bias
    ends = model.padded_vocab_size * h / tp + model.max_seq_length * h + (2 * h if pp == 1 else 0)  # at pp 1 also the last norm

    ours = memory.states.total - 18 * (model.num_layers / pp * biases_and_norms + ends)

    assert ours / GIB == pytest.approx(states, rel=1e-9)


@pytest.mark.parametrize(("name", "pp", "v", "b", "m", "states", "plain", "lean"), FIGURE_1)
@pytest.mark.parametrize("both", [False, True], ids=["tp", "tp-sp-selective"])
def test_activations_of_the_first_stage_are_korthikantis_plus_the_ends(name, pp, v, b, m, states, plain, lean, both):
    """The paper counts the blocks: L of them in flight, interleaved L (1 + (P - 1) / (P v)). We also hold the embedding's
    dropout mask (as often as blocks are in flight), and on a single stage the head's norm and its fp32 probabilities."""
    level = Recompute.SELECTIVE if both else Recompute.NONE
    book, frame, memory = first_stage(name, pp, v, b, m, recompute=level, sequence_parallel=both)
    sbh, tokens_tp = 2048 * b * book.model.hidden_size, 8 if both else 1
    ends = stashes(LayerKind.EMBEDDING, 0, frame) * sbh / tokens_tp
    if pp == 1:
        ends += 2 * 2 * sbh / tokens_tp + 4 * 2048 * b * book.model.padded_vocab_size / 8

    assert (memory.activations - ends) / GIB == pytest.approx(lean if both else plain, rel=1e-9)


@pytest.mark.parametrize(("name", "num_gpus", "batch", "step_s", "mfu"), [
    # Korthikanti et al. 2022, table 5, sequence parallelism + selective recompute; MFU as in Megatron-LM's README
    pytest.param("gpt-22b", 8, 4, 1.10, 0.415, id="22b"),
    pytest.param("gpt-175b", 64, 64, 13.75, 0.514, id="175b"),
    pytest.param("gpt-530b", 280, 280, 37.83, 0.560, id="530b"),
    pytest.param("gpt-1t", 512, 512, 71.49, 0.563, id="1t"),
])
def test_mfu_of_published_steps_is_the_published_one(name, num_gpus, batch, step_s, mfu):
    training = TrainingSpec(global_batch_size=batch, seq_length=2048)
    book = book_of(load_model(name).spec, num_gpus, training)

    assert model_flops_utilization(step_s, num_gpus, book) == pytest.approx(mfu, abs=0.002)  # the step is given to 3 or 4 digits


def test_memory_is_states_and_stash_and_the_largest_temporary_and_the_reserve():
    book = book_of(TINY, 4)
    frame = frame_of(dp=4, m=2)
    strategy = uniform(frame, 8, zero=3)

    memory = rank_memory(strategy, 0, book)

    kinds = {kind: book.activations(kind, 1, frame.sharding) for kind in LayerKind}
    held = {kind: book.states(kind, frame.mesh, frame.sharding, 3) for kind in LayerKind}
    stash = kinds[LayerKind.EMBEDDING].saved + 8 * kinds[LayerKind.BLOCK].saved + kinds[LayerKind.HEAD].saved
    temporary = max(kind.workspace for kind in kinds.values()) + max(kind.zero_buffer for kind in held.values())
    assert memory.activations == stash
    assert memory.temporaries == temporary
    assert memory.states.total == sum(held[kind].states.total * (8 if kind is LayerKind.BLOCK else 1) for kind in LayerKind)
    tensors = memory.states.total + stash + temporary
    assert memory.reserve == pytest.approx(RESERVED_SHARE * tensors + A100.device.context_bytes + NCCL_BYTES_PER_AXIS)


def test_usable_bytes_and_the_reserve_fill_the_limit_exactly():
    book, mesh = book_of(TINY, 8), Mesh(pp=2, dp=2, tp=2)

    usable = usable_bytes(70e9, mesh, book.machine)

    assert usable * (1 + RESERVED_SHARE) + reserve_constant_bytes(mesh, book.machine) == pytest.approx(70e9)
    assert reserve_constant_bytes(mesh, book.machine) == A100.device.context_bytes + 3 * NCCL_BYTES_PER_AXIS


def test_a_device_without_a_context_reserves_nothing_before_the_first_tensor():
    machine = machine_for(replace(A100, device=replace(A100.device, context_bytes=0)))

    assert reserve_constant_bytes(Mesh(pp=2, dp=2, tp=1), machine) == 0


def test_redundancy_by_hand_is_all_copies_beyond_the_first():
    """Four replicas: three of four copies of gradient (4 bytes) and optimizer (12), all 16-bit weights, no activation twice."""
    book = book_of(replace(TINY, tied_embeddings=False), 4)
    parameters = book.graph(1).num_parameters

    price = price_step(uniform(frame_of(dp=4, m=2), 8), book)

    (redundant,) = price.redundant
    assert (redundant.parameters, redundant.gradients, redundant.optimizer) == (2 * parameters, 3 * parameters, 9 * parameters)
    assert redundant.activations == 0
    assert redundant.temporaries == price.memory[0].temporaries


def test_activations_are_redundant_along_tensor_parallelism_unless_tokens_are_split():
    book = book_of(TINY, 4)
    plain = price_step(uniform(frame_of(tp=4), 8), book).redundant[0].activations
    split = price_step(uniform(frame_of(tp=4, sequence_parallel=True), 8), book).redundant[0].activations

    sbh = 128 * 64
    flash_blocks = 8 * (10 * (1 - 1 / 4)) * sbh  # EQUATIONS M3: 10 of the 34 s b h are held whole, dropout masks included
    ends = (1 + 4) * (1 - 1 / 4) * sbh  # the embedding's mask; the head's norm input and output
    assert plain == pytest.approx(flash_blocks + ends)
    assert split == pytest.approx(0, abs=1)


def test_nothing_is_received_at_the_two_ends_of_the_model():
    book, frame = book_of(TINY, 4), frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2)

    times = [receive_times(stage, frame, book) for stage in range(8)]

    assert times[0][0] == times[7][1] == ZERO
    assert all(forward.value_s > 0 for forward, _ in times[1:])
    assert all(backward.value_s > 0 for _, backward in times[:7])
    assert receive_times(0, frame_of(), book) == (ZERO, ZERO)


def test_the_ranks_of_a_stage_share_the_nics_of_their_node():
    frame = frame_of(pp=2, dp=8, m=4)
    many = transfer_time(0, frame, book_of(TINY, 16, nic=replace(A100.nic, latency_s=0.0)))
    one = transfer_time(0, frame, book_of(TINY, 16, nics_per_node=1, nic=replace(A100.nic, latency_s=0.0)))

    assert one.value_s == pytest.approx(8 * many.value_s)


def test_a_boundary_between_nodes_is_slower_than_one_inside():
    book, frame = book_of(TINY, 16), frame_of(pp=4, dp=4)  # two stages to a node

    inside, between, back = (transfer_time(rank, frame, book).value_s for rank in (0, 1, 3))

    assert inside < between
    assert back == between  # the last rank sends to the first one when interleaved
