"""Chunk layouts: places of tensors, chunk counts of equal blocks, and the cheapest chunk size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parplan.costmodels.chunks.chunk_layout import (
    ChunkLayout,
    SizedTensor,
    block_tensors,
    groups_after,
    pack,
)
from parplan.costmodels.chunks.group_size import (
    ALIGNED_ELEMENTS,
    MOVED_WELL,
    candidate_sizes,
    group_size_of,
    least_bytes,
    score_bytes,
    widest_group,
    widest_groups,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

BLOCKS = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple)
RANKS = st.integers(1, 4)


def sized(block: tuple[int, ...], num_blocks: int) -> list[SizedTensor]:
    return [
        SizedTensor(f"block{number}.{index}", size)
        for number in range(num_blocks)
        for index, size in enumerate(block)
    ]


def gpt_block(hidden: int) -> tuple[int, ...]:
    """Returns weights and biases of the four products and two norms of a GPT block."""
    h = hidden
    return (h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h)


def whole(elements: int, ranks: int) -> int:
    """Rounds the elements of a group up to a multiple of the ranks."""
    return -(-elements // ranks) * ranks


@st.composite
def chunk_layouts(draw: st.DrawFn) -> ChunkLayout:
    block = draw(BLOCKS)
    num_blocks = draw(st.integers(1, 4))
    ranks = draw(RANKS)
    return pack(
        sized(block, num_blocks),
        whole(draw(st.integers(max(block), 2 * sum(block) + 1)), ranks),
        ranks,
        (len(block),) * num_blocks,
    )


@settings(max_examples=50)
@given(chunk_layouts())
def test_tensors_lie_whole_in_one_group_in_order_and_do_not_overlap(chunk_layout):
    ends = (-1, 0)
    for tensor, group, offset in zip(
        chunk_layout.tensors, chunk_layout.group_of, chunk_layout.offset_of, strict=True
    ):
        assert (group, offset) == ends or (group, offset) == (
            ends[0] + 1,
            0,
        )  # at the next place, or at the next group's
        assert offset + tensor.elements <= chunk_layout.group_elements
        ends = (group, offset + tensor.elements)
    assert chunk_layout.group_of[0] == 0
    assert chunk_layout.num_groups == chunk_layout.group_of[-1] + 1


@settings(max_examples=50)
@given(chunk_layouts())
def test_a_group_begins_where_a_tensor_does_not_fit_and_on_several_ranks_with_every_block(
    chunk_layout,
):
    for index, tensor in enumerate(chunk_layout.tensors[1:], 1):
        left = (
            chunk_layout.group_elements
            - chunk_layout.offset_of[index - 1]
            - chunk_layout.tensors[index - 1].elements
        )
        begins = chunk_layout.ranks > 1 and tensor.name.endswith(".0")
        assert (chunk_layout.group_of[index] == chunk_layout.group_of[index - 1]) == (
            tensor.elements <= left and not begins
        )


@settings(max_examples=50)
@given(chunk_layouts())
def test_every_rank_owns_an_equal_chunk_of_every_group(chunk_layout):
    assert chunk_layout.chunk_elements * chunk_layout.ranks == chunk_layout.group_elements
    assert chunk_layout.num_chunks == chunk_layout.num_groups * chunk_layout.ranks


def test_a_group_that_ranks_cannot_share_equally_is_an_error():
    with pytest.raises(ConfigError, match="a group of 21 elements is not divided by 2 ranks"):
        pack(sized((10,), 2), 21, 2)


@settings(max_examples=50)
@given(chunk_layouts())
def test_utilisation_is_the_share_of_places_that_a_tensor_is_at(chunk_layout):
    places = {
        (group, offset + element)
        for tensor, group, offset in zip(
            chunk_layout.tensors, chunk_layout.group_of, chunk_layout.offset_of, strict=True
        )
        for element in range(tensor.elements)
    }
    every = {
        (group, element)
        for group in range(chunk_layout.num_groups)
        for element in range(chunk_layout.group_elements)
    }

    assert places <= every
    assert chunk_layout.utilisation == pytest.approx(len(places) / len(every))


def test_a_tensor_larger_than_a_group_is_an_error_with_both_sizes():
    with pytest.raises(ConfigError, match=r"block0\.1 has 30 elements, a group of chunks 20"):
        pack(sized((10, 30), 1), 20, 2)
    with pytest.raises(ConfigError, match="30 elements, a group of chunks 20"):
        groups_after((10, 30), 3, 20)


def test_nothing_cannot_be_packed():
    with pytest.raises(ConfigError, match="no tensors"):
        pack([], 20)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 8), st.integers(0, 100), RANKS)
def test_groups_after_x_blocks_are_those_of_x_blocks_packed(block, num_blocks, more, ranks):
    size = whole(max(block) + more, ranks)
    packed = [
        pack(sized(block, count), size, ranks, (len(block),) * count).num_groups
        for count in range(1, num_blocks + 1)
    ]

    assert groups_after(block, num_blocks, size, ranks) == (0, *packed)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 6), st.integers(0, 100), RANKS)
def test_the_widest_pass_needs_the_groups_that_its_tensors_are_in(block, num_blocks, more, ranks):
    chunk_layout = pack(
        sized(block, num_blocks),
        whole(max(block) + more, ranks),
        ranks,
        (len(block),) * num_blocks,
    )
    needed = [
        len(set(chunk_layout.group_of[number * len(block) : (number + 1) * len(block)]))
        for number in range(num_blocks)
    ]

    assert widest_groups(block, num_blocks, chunk_layout.group_elements, ranks) == max(needed)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 5), st.integers(1, 3))
def test_no_size_up_to_a_block_scores_less_than_the_best_candidate(block, num_blocks, scale):
    block = tuple(scale * ALIGNED_ELEMENTS * size for size in block)  # all sums are aligned
    best = min(score_bytes(block, num_blocks, size) for size in candidate_sizes(block))
    sizes = range(max(block), sum(block) + 1, max(1, (sum(block) - max(block)) // 50))

    assert best <= min(score_bytes(block, num_blocks, size) for size in sizes)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 5), st.integers(2, 5), st.sampled_from([1, 50, 10**6]))
def test_no_group_of_several_ranks_scores_less_than_a_block(block, num_blocks, ranks, scale):
    block, unit = tuple(scale * size for size in block), ALIGNED_ELEMENTS * ranks
    best = group_size_of(block, num_blocks, ranks, load_cluster("v100-32gb"))
    most = 2 * whole(sum(block), unit)
    sizes = range(whole(max(block), unit), most + 1, whole(max(1, most // 50), unit))

    assert best == whole(sum(block), unit)
    assert score_bytes(block, num_blocks, best, ranks) <= min(
        score_bytes(block, num_blocks, size, ranks) for size in sizes
    )


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 4), RANKS, st.integers(0, 60))
def test_the_score_is_what_lies_empty_on_a_rank_and_what_a_pass_gathers(
    block, num_blocks, ranks, more
):
    chunk_layout = pack(
        sized(block, num_blocks),
        whole(max(block) + more, ranks),
        ranks,
        (len(block),) * num_blocks,
    )
    empty = chunk_layout.num_groups * chunk_layout.group_elements - sum(block) * num_blocks
    gathered = (
        widest_groups(block, num_blocks, chunk_layout.group_elements, ranks)
        * chunk_layout.group_elements
    )

    assert score_bytes(block, num_blocks, chunk_layout.group_elements, ranks) == pytest.approx(
        16 * empty / ranks + 4 * gathered
    )


def test_a_chunk_of_one_rank_must_be_large_enough_for_pcie():
    assert MOVED_WELL == 0.9
    assert least_bytes(load_cluster("v100-32gb")) == pytest.approx(9 * 1e-5 * 15.75e9)


@pytest.mark.parametrize(
    ("hidden", "num_layers", "ranks"),
    [(2048, 20, 1), (4096, 90, 8), (9216, 66, 8), (12288, 96, 32)],
)
def test_published_models_use_more_than_95_percent_of_their_chunks(hidden, num_layers, ranks):
    block, cluster = gpt_block(hidden), with_gpus(load_cluster("v100-32gb"), max(8, ranks))
    chunk_layout = pack(
        sized(block, num_layers),
        group_size_of(block, num_layers, ranks, cluster),
        ranks,
        (len(block),) * num_layers,
    )

    assert chunk_layout.utilisation > 0.95
    assert chunk_layout.chunk_elements % ALIGNED_ELEMENTS == 0
    n_bytes = 2 * chunk_layout.chunk_elements
    assert n_bytes / (1e-5 * cluster.pcie_bytes_per_s + n_bytes) >= MOVED_WELL


@pytest.mark.parametrize("ranks", [8, 32])
def test_what_many_ranks_gather_is_what_a_block_has_and_not_as_many_of_its_largest_tensors(ranks):
    block, cluster = gpt_block(12288), with_gpus(load_cluster("a100-40gb"), 32)
    size = group_size_of(block, 96, ranks, cluster)

    assert size // ranks < max(block)
    assert widest_groups(block, 96, size, ranks) == 1
    assert 2 * size < 1.0001 * 2 * sum(block) < 4e9


def test_a_block_too_small_to_be_moved_well_is_one_chunk():
    block = gpt_block(64)

    assert group_size_of(block, 6, 1, load_cluster("cpu")) == whole(sum(block), ALIGNED_ELEMENTS)


def test_the_size_holds_the_largest_tensor_however_blocks_are_divided():
    assert widest_group([(10, 3, 7), (5, 6, 7)]) == (10, 6, 7)


def test_tensors_of_a_block_are_in_the_order_of_its_operators_with_local_shapes():
    model = load_model("gpt-1.5b").spec
    graph = build_graph(model, TrainingSpec(global_batch_size=8, seq_length=1024, stack=NEUTRAL), 1)
    whole = block_tensors(graph.block, Sharding(1))
    divided = block_tensors(graph.block, Sharding(2))

    assert [tensor.name for tensor in whole[:4]] == [
        "norm1.weight",
        "norm1.bias",
        "qkv.weight",
        "qkv.bias",
    ]
    assert sum(tensor.elements for tensor in whole) == sum(gpt_block(model.hidden_size))
    assert [tensor.elements for tensor in divided[2:4]] == [
        whole[2].elements // 2,
        3 * model.hidden_size // 2,
    ]


def test_the_tensors_of_a_unit_lie_in_one_group():
    tensors = [
        SizedTensor(name, elements) for name, elements in zip("abcde", (4, 1, 2, 3, 4), strict=True)
    ]

    layout = pack(tensors, 6, units=(2, 2, 1))

    assert layout.group_of == (0, 0, 1, 1, 2)  # c would fit behind b, d behind it would not
    with pytest.raises(ConfigError, match="c has 5 elements"):
        pack(tensors, 4, units=(1, 1, 2, 1))
