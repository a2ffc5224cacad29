"""Device memory: stashes and temporaries by hand, published stage sizes, and measured peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.fullest_moment import at_fullest
from parplan.costmodels.memory.rank_memory import (
    RankMemory,
    occupied_bytes,
    rank_memory,
    reserve_constant_bytes,
    stashes,
    usable_bytes,
)
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, Strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Norm, Positions, Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from parplan.profiles.units import GIB
from tests.helpers.uniform_strategies import A100, TINY, TRAINING, book_of, frame_of, uniform


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param(frame_of(pp=4), [4, 3, 2, 1], id="1f1b-holds-what-is-ahead"),
        pytest.param(
            frame_of(pp=4, m=2, schedule=Schedule.GPIPE), [2, 2, 2, 2], id="gpipe-holds-all"
        ),
        pytest.param(
            frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2),
            [11, 9, 7, 5],
            id="interleaved-counts-chunks",
        ),
    ],
)
def test_stashes_of_a_block_by_hand(layout, expected):
    assert [stashes(LayerKind.BLOCK, rank, layout) for rank in range(4)] == expected


def test_the_heads_chunk_is_used_up_at_once_when_interleaved():
    assert stashes(LayerKind.HEAD, 3, frame_of(pp=4, schedule=Schedule.INTERLEAVED, v=2)) == 1
    assert stashes(LayerKind.HEAD, 3, frame_of(pp=4, m=2, schedule=Schedule.GPIPE)) == 2


# Korthikanti et al. 2022, figure 1, first pipeline stage, TP 8, 16-bit with fp32 gradients (18
# bytes a parameter) (model, pp, v, micro-batch, micro-batches, states GiB, activations without and
# with sequence parallelism + selective)
FIGURE_1 = [
    pytest.param("gpt-22b", 1, 1, 4, 1, 45.5625, 59.25, 9.5625, id="22b"),
    pytest.param("gpt-175b", 8, 3, 1, 64, 45.5625, 66.84375, 12.3515625, id="175b"),
    pytest.param("gpt-530b", 35, 3, 1, 280, 31.640625, 114.0234375, 23.076171875, id="530b"),
    pytest.param("gpt-1t", 64, 1, 1, 512, 32.958984375, 131.25, 26.5625, id="1t"),
]


def first_stage(name, pp, v, b, m, *, recompute, sequence_parallel):
    entry = load_model(name)
    training = TrainingSpec(
        global_batch_size=b * m,
        seq_length=2048,
        precision=Precision.FP16,
        gradient_precision=Precision.FP32,
        attention=AttentionKernel.UNFUSED,
        stack=NEUTRAL,
    )
    layout = frame_of(
        pp=pp,
        tp=8,
        schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
        v=v,
        b=b,
        m=m,
        sequence_parallel=sequence_parallel,
    )
    price_cache = book_of(replace(entry.spec, dropout=0.1), 8 * pp, training)
    return (
        price_cache,
        layout,
        rank_memory(uniform(layout, entry.spec.num_layers, recompute=recompute), 0, price_cache),
    )


@pytest.mark.parametrize(("name", "pp", "v", "b", "m", "states", "plain", "lean"), FIGURE_1)
def test_states_of_the_first_stage_are_korthikantis_plus_what_the_paper_leaves_out(
    name, pp, v, b, m, states, plain, lean
):
    """The paper counts 12 h^2 parameters a block.

    We also hold its biases and norms, and the embeddings of the stage.
    """
    price_cache, _, memory = first_stage(
        name, pp, v, b, m, recompute=Recompute.NONE, sequence_parallel=False
    )
    h = price_cache.model.hidden_size
    tp = 8
    model = price_cache.model
    biases_and_norms = (
        3 * h / tp + h + 4 * h / tp + h + 2 * 2 * h
    )  # qkv, output, fc1, fc2; two norms of weight and bias
    ends = (
        model.padded_vocab_size * h / tp + model.max_seq_length * h + (2 * h if pp == 1 else 0)
    )  # at pp 1 also the last norm

    ours = memory.states.total - 18 * (model.num_layers / pp * biases_and_norms + ends)

    assert ours / GIB == pytest.approx(states, rel=1e-9)


@pytest.mark.parametrize(("name", "pp", "v", "b", "m", "states", "plain", "lean"), FIGURE_1)
@pytest.mark.parametrize("both", [False, True], ids=["tp", "tp-sp-selective"])
def test_activations_of_the_first_stage_are_korthikantis_plus_the_ends(
    name, pp, v, b, m, states, plain, lean, both
):
    """The paper counts the blocks: L of them in flight, interleaved L (1 + (P - 1) / (P v)).

    We also hold the embedding's dropout mask (as often as blocks are in flight), and on a single
    stage the head's norm and its fp32 probabilities.
    """
    level = Recompute.SELECTIVE if both else Recompute.NONE
    price_cache, layout, memory = first_stage(
        name, pp, v, b, m, recompute=level, sequence_parallel=both
    )
    sbh, tokens_tp = 2048 * b * price_cache.model.hidden_size, 8 if both else 1
    ends = stashes(LayerKind.EMBEDDING, 0, layout) * sbh / tokens_tp
    if pp == 1:
        ends += 2 * 2 * sbh / tokens_tp + 4 * 2048 * b * price_cache.model.padded_vocab_size / 8

    assert (memory.activations - ends) / GIB == pytest.approx(lean if both else plain, rel=1e-9)


def test_memory_is_states_and_stash_and_the_largest_temporary_and_the_reserve():
    price_cache = book_of(TINY, 4)
    layout = frame_of(dp=4, m=2)
    strategy = uniform(layout, 8, zero=3)

    memory = rank_memory(strategy, 0, price_cache)

    kinds = {kind: price_cache.activations(kind, 1, layout.sharding) for kind in LayerKind}
    held = {kind: price_cache.states(kind, layout.mesh, layout.sharding, 3) for kind in LayerKind}
    stash = (
        kinds[LayerKind.EMBEDDING].saved
        + 8 * kinds[LayerKind.BLOCK].saved
        + kinds[LayerKind.HEAD].saved
    )
    temporary = max(kind.workspace for kind in kinds.values()) + max(
        kind.zero_buffer for kind in held.values()
    )
    assert memory.activations == stash
    assert memory.temporaries == temporary
    assert memory.states.total == sum(
        held[kind].states.total * (8 if kind is LayerKind.BLOCK else 1) for kind in LayerKind
    )
    tensors = memory.states.total + stash + temporary
    assert memory.reserve == pytest.approx(
        NEUTRAL.allocator_share * tensors + A100.device.context_bytes + NEUTRAL.nccl_bytes
    )


def test_usable_bytes_and_the_reserve_fill_the_limit_exactly():
    price_cache, mesh = book_of(TINY, 8), Mesh(pp=2, dp=2, tp=2)

    usable = usable_bytes(70e9, mesh, price_cache)

    assert occupied_bytes(usable, mesh, price_cache) == pytest.approx(70e9)
    assert (
        reserve_constant_bytes(mesh, price_cache)
        == A100.device.context_bytes + 3 * NEUTRAL.nccl_bytes
    )


def test_a_device_without_a_context_reserves_nothing_before_the_first_tensor():
    price_cache = PriceCache(
        TINY, TRAINING, machine_for(replace(A100, device=replace(A100.device, context_bytes=0)))
    )

    assert reserve_constant_bytes(Mesh(pp=2, dp=2, tp=1), price_cache) == 0


@pytest.mark.parametrize(
    "field", ["logit_bytes", "workspace_bytes", "allocator_share", "nccl_bytes"]
)
def test_no_size_of_a_stack_is_negative(field):
    with pytest.raises(ConfigError, match=f"stack neutral: {field} is -1, it must be at least 0"):
        replace(NEUTRAL, **{field: -1})


def test_updates_in_the_backward_pass_leave_one_layers_gradients():
    def memory(**facts):
        stack = replace(NEUTRAL, frees_gradients=True, **facts)
        training = replace(TRAINING, stack=stack)
        price_cache = PriceCache(TINY, training, machine_for(A100, None))
        return rank_memory(uniform(frame_of(m=1), 8, recompute=Recompute.FULL), 0, price_cache)

    after, inside = memory(), memory(updates_in_backward=True)
    assert inside.states == after.states
    assert inside.allocated < after.allocated
    assert inside.allocated >= after.allocated - after.states.gradients


def test_redundancy_by_hand_is_all_copies_beyond_the_first():
    """Four replicas hold three redundant copies of gradient (4 bytes) and optimizer (12).

    All 16-bit weights are redundant, and no activation is.
    """
    price_cache = book_of(replace(TINY, tied_embeddings=False), 4)
    parameters = price_cache.graph(1).num_parameters

    price = price_step(uniform(frame_of(dp=4, m=2), 8), price_cache)

    (redundant,) = price.redundant
    assert (redundant.parameters, redundant.gradients, redundant.optimizer) == (
        2 * parameters,
        3 * parameters,
        9 * parameters,
    )
    assert redundant.activations == 0
    assert redundant.temporaries == price.memory[0].temporaries


def test_activations_are_redundant_along_tensor_parallelism_unless_tokens_are_split():
    price_cache = book_of(TINY, 4)
    plain = price_step(uniform(frame_of(tp=4), 8), price_cache).redundant[0].activations
    split = (
        price_step(uniform(frame_of(tp=4, sequence_parallel=True), 8), price_cache)
        .redundant[0]
        .activations
    )

    sbh = 128 * 64
    flash_blocks = (
        8 * (10 * (1 - 1 / 4)) * sbh
    )  # EQUATIONS M3: 10 of the 34 s b h are held whole, dropout masks included
    ends = (1 + 4) * (1 - 1 / 4) * sbh  # the embedding's mask; the head's norm input and output
    assert plain == pytest.approx(flash_blocks + ends)
    assert split == pytest.approx(0, abs=1)


def test_the_three_figures_of_a_device_are_those_of_torch_and_nvidia_smi():
    price_cache = book_of(TINY, 4)

    memory = rank_memory(uniform(frame_of(dp=4, m=2), 8), 0, price_cache)

    assert memory.allocated == memory.states.total + memory.activations + memory.temporaries
    assert memory.reserved == pytest.approx(memory.allocated * (1 + NEUTRAL.allocator_share))
    assert memory.total == pytest.approx(
        memory.reserved + A100.device.context_bytes + NEUTRAL.nccl_bytes
    )
    assert memory.reserve == pytest.approx(memory.total - memory.allocated)


def test_the_head_has_used_up_its_own_before_a_block_is_recomputed():
    """With a large vocabulary the peak is at the loss.

    A block's recompute costs less than the memory that the loss has freed.
    """
    price_cache, layout = book_of(replace(TINY, vocab_size=128_000), 1), frame_of()
    head = price_cache.activations(LayerKind.HEAD, 1, layout.sharding)

    assert (
        rank_memory(uniform(layout, 8, recompute=Recompute.FULL), 0, price_cache).temporaries
        == head.workspace
    )


def test_the_embeddings_gradient_comes_when_the_blocks_of_its_micro_batch_are_gone():
    price_cache, layout = book_of(replace(TINY, vocab_size=128_000), 2), frame_of(pp=2)
    strategy = uniform(layout, 8, recompute=Recompute.FULL)
    embedding = price_cache.activations(LayerKind.EMBEDDING, 1, layout.sharding, Recompute.FULL)
    block = price_cache.activations(LayerKind.BLOCK, 1, layout.sharding, Recompute.FULL)

    assert (
        rank_memory(strategy, 0, price_cache).temporaries
        == embedding.workspace - 4 * block.saved
        > block.workspace
    )


def test_fp32_copies_for_the_step_are_reserved_beyond_the_peak():
    stack = replace(NEUTRAL, step_copy_bytes=6, allocator_share=0.0)
    training = replace(
        TRAINING, precision=Precision.FP16, gradient_precision=Precision.FP16, stack=stack
    )
    price_cache = book_of(replace(TINY, tied_embeddings=False), 1, training)

    memory = rank_memory(uniform(frame_of(), 8), 0, price_cache)

    assert memory.allocator_reserve == 6 * price_cache.graph(1).num_parameters


# Peaks of training frameworks, GiB. NVIDIA/Megatron-LM@d98e8a64dd
# tests/functional_tests/test_cases/gpt/<test>/golden_values_*.json (mem-max-allocated-bytes of the
# last pipeline rank, 12 layers of 512, 1,024 tokens, micro-batch 4, dropout 0.1, H100)
CI_GPT = replace(
    load_model("gpt-tiny").spec,
    num_layers=12,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2048,
    vocab_size=50257,
    max_seq_length=1024,
    dropout=0.1,
)


@pytest.mark.parametrize(
    ("pp", "dp", "v", "zero", "attention", "recompute", "measured"),
    [
        pytest.param(
            1, 8, 1, 1, "unfused", "none", 4.3795, id="tp1_pp1_dist_optimizer_no_mmap_bin_files"
        ),
        pytest.param(
            1,
            8,
            1,
            1,
            "flash",
            "none",
            2.5059,
            id="tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
        ),
        pytest.param(
            1,
            8,
            1,
            0,
            "flash",
            "full",
            2.3854,
            id="tp1_pp1_resume_torch_dist_uniform_full_recompute",
        ),
        pytest.param(
            4, 2, 1, 0, "flash", "none", 2.0600, id="tp1_pp4_resume_torch_dist_disable_bias_linear"
        ),
        pytest.param(
            4, 2, 3, 0, "unfused", "none", 3.84, id="tp1_pp4_vp1_calculate_per_token_loss"
        ),
        pytest.param(
            4,
            2,
            3,
            1,
            "flash",
            "none",
            2.26,
            id="tp1_pp4_vp1_resume_dist_optimizer_overlap_grad_reduce_param_gather",
        ),
    ],
)
def test_peaks_of_megatron_cores_functional_tests(pp, dp, v, zero, attention, recompute, measured):
    training = TrainingSpec(
        global_batch_size=32,
        seq_length=1024,
        attention=AttentionKernel(attention),
        stack=load_stack("megatron-core"),
    )
    layout = frame_of(
        pp=pp,
        dp=dp,
        b=4,
        m=8 // dp,
        v=v,
        schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
    )

    memory = rank_memory(
        uniform(layout, 12, recompute=Recompute(recompute), zero=zero),
        pp - 1,
        book_of(CI_GPT, pp * dp, training),
    )

    assert memory.allocated / GIB == pytest.approx(measured, rel=0.01)


# huggingface.co/nanotron/old_bench llama-1B, July 2024: peak_allocated of the first pipeline rank,
# 24 layers of 2,048, 4,096 tokens. The first stage holds 7 of 24 blocks on 4 stages and 4 on 8:
# nanotron divides by compute, and the head counts for 2.5 blocks.
OLD_BENCH = replace(
    load_model("llama3-8b").spec,
    num_layers=24,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=32,
    head_dim=64,
    ffn_hidden_size=4096,
    vocab_size=50257,
    tied_embeddings=True,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
)


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "b", "first", "measured"),
    [
        pytest.param(1, 2, 4, 8, 24, 25.20, id="dp2tp4"),
        pytest.param(1, 1, 8, 32, 24, 58.69, id="tp8"),
        pytest.param(1, 16, 4, 2, 24, 7.34, id="dp16tp4"),
        pytest.param(4, 2, 1, 4, 7, 38.14, id="dp2pp4"),
        pytest.param(8, 1, 1, 4, 4, 43.00, id="pp8"),
        pytest.param(8, 1, 8, 16, 4, 34.02, id="tp8pp8"),
    ],
)
def test_peaks_of_nanotron(pp, dp, tp, b, first, measured):
    stack = load_stack("nanotron-2024")
    training = TrainingSpec(global_batch_size=1024, seq_length=4096, stack=stack)
    layout = frame_of(pp=pp, dp=dp, tp=tp, b=b, m=1024 // (b * dp), sequence_parallel=tp > 1)
    blocks = [LayerChoice(LayerKind.BLOCK, Recompute.NONE, min(1, dp - 1))] * first
    ends = [
        LayerChoice(kind, Recompute.NONE, min(1, dp - 1))
        for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)
    ]
    stages = (
        ((ends[0], *blocks, *ends[1:]),)
        if pp == 1
        else ((ends[0], *blocks), *(((blocks[0],),) * (pp - 2)), (blocks[0], ends[1]))
    )

    memory = rank_memory(
        Strategy(layout=layout, stages=stages), 0, book_of(OLD_BENCH, pp * dp * tp, training)
    )

    assert memory.allocated / GIB == pytest.approx(measured, rel=0.01)


# MooreThreads/SimuMax@4dcaae513b docs/b200/b200_release_v1.2_summary.json: Llama 3 70B cut to 12
# layers, Megatron-Core 0.14 with its fused cross entropy, 4,096 tokens, max_memory_allocated over
# all ranks
@pytest.mark.parametrize(
    ("pp", "dp", "tp", "measured"),
    [
        pytest.param(2, 4, 1, 66.55, id="pp2"),
        pytest.param(1, 4, 2, 60.68, id="tp2"),
        pytest.param(1, 2, 4, 39.07, id="tp4"),
        pytest.param(1, 1, 8, 28.29, id="tp8"),
    ],
)
def test_peaks_of_a_large_model_on_megatron_core(pp, dp, tp, measured):
    model = replace(load_model("llama3-70b").spec, num_layers=12)
    training = TrainingSpec(
        global_batch_size=16,
        seq_length=4096,
        stack=replace(load_stack("megatron-core"), logit_bytes=10),
    )
    layout = frame_of(pp=pp, dp=dp, tp=tp, m=16 // dp, sequence_parallel=tp > 1)
    price_cache, strategy = (
        book_of(model, pp * dp * tp, training),
        uniform(layout, 12, zero=min(1, dp - 1)),
    )

    assert max(
        rank_memory(strategy, rank, price_cache).allocated for rank in range(pp)
    ) / GIB == pytest.approx(measured, rel=0.02)


def test_the_classes_at_the_fullest_moment_add_up_to_the_total():
    states = StateBytes(parameters=4.0, gradients=2.0, optimizer=8.0)
    memory = RankMemory(
        states=states,
        activations=5.0,
        temporaries=3.0,
        allocator_reserve=1.0,
        communicators=0.5,
        context=0.5,
        apart=4.0,  # the gradients, and activations that are freed
    )

    assert tuple(at_fullest(memory).values()) == (4.0, 0.0, 8.0, 3.0, 3.0, 2.0)
    assert sum(at_fullest(memory).values()) == memory.total
