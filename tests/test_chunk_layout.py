"""Chunks: where tensors lie, how many chunks runs of equal blocks take, and which size of chunk costs least."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.chunks.layout import Layout, Sized, block_tensors, chunks_after, pack
from costmodels.chunks.size import (
    ALIGNED_ELEMENTS,
    MOVED_WELL,
    candidate_sizes,
    chunk_size_of,
    least_bytes,
    score_bytes,
    transfer_efficiency,
    widest,
    widest_groups,
)
from costmodels.sharding import Sharding
from profiles.catalog import load_cluster, load_model, with_gpus
from profiles.errors import ConfigError
from profiles.spec import TrainingSpec
from profiles.transformer import build_graph

BLOCKS = st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple)
RANKS = st.integers(1, 4)


def sized(block: tuple[int, ...], num_blocks: int) -> list[Sized]:
    return [Sized(f"block{number}.{index}", size) for number in range(num_blocks) for index, size in enumerate(block)]


def gpt_block(hidden: int) -> tuple[int, ...]:
    """Of a GPT block what its four products and two norms have, weights and biases."""
    h = hidden
    return (h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    block, num_blocks, ranks = draw(BLOCKS), draw(st.integers(1, 4)), draw(RANKS)
    return pack(sized(block, num_blocks), draw(st.integers(max(block), 2 * sum(block) + 1)), ranks)


@settings(max_examples=50)
@given(layouts())
def test_tensors_lie_whole_in_one_chunk_in_order_and_do_not_overlap(layout):
    ends = (-1, 0)
    for tensor, chunk, offset in zip(layout.tensors, layout.chunk_of, layout.offset_of, strict=True):
        assert (chunk, offset) == ends or (chunk, offset) == (ends[0] + 1, 0)  # at the next place, or at the next chunk's
        assert offset + tensor.elements <= layout.chunk_elements
        ends = (chunk, offset + tensor.elements)
    assert layout.chunk_of[0] == 0


@settings(max_examples=50)
@given(layouts())
def test_a_chunk_is_begun_only_where_the_tensor_does_not_fit_what_is_left(layout):
    for index, tensor in enumerate(layout.tensors[1:], 1):
        left = layout.chunk_elements - layout.offset_of[index - 1] - layout.tensors[index - 1].elements
        assert (layout.chunk_of[index] == layout.chunk_of[index - 1]) == (tensor.elements <= left)


@settings(max_examples=50)
@given(layouts())
def test_the_last_group_is_filled_up_and_only_that_one(layout):
    assert layout.num_chunks % layout.ranks == 0
    assert 0 <= layout.num_chunks - 1 - layout.chunk_of[-1] < layout.ranks


@settings(max_examples=50)
@given(layouts())
def test_utilisation_is_the_share_of_places_that_a_tensor_is_at(layout):
    places = {
        (chunk, offset + element) for tensor, chunk, offset in zip(layout.tensors, layout.chunk_of, layout.offset_of, strict=True)
        for element in range(tensor.elements)}
    every = {(chunk, element) for chunk in range(layout.num_chunks) for element in range(layout.chunk_elements)}

    assert places <= every
    assert layout.utilisation == pytest.approx(len(places) / len(every))


def test_a_tensor_larger_than_a_chunk_is_an_error_with_both_sizes():
    with pytest.raises(ConfigError, match=r"block0\.1 has 30 elements, a chunk 20"):
        pack(sized((10, 30), 1), 20)
    with pytest.raises(ConfigError, match="30 elements, a chunk 20"):
        chunks_after((10, 30), 3, 20)


def test_nothing_cannot_be_packed():
    with pytest.raises(ConfigError, match="no tensors"):
        pack([], 20)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 8), st.integers(0, 100), RANKS)
def test_chunks_after_x_blocks_are_those_of_x_blocks_packed(block, num_blocks, more, ranks):
    size = max(block) + more
    packed = [pack(sized(block, count), size, ranks).num_chunks for count in range(1, num_blocks + 1)]

    assert chunks_after(block, num_blocks, size, ranks) == (0, *packed)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 6), st.integers(0, 100), RANKS)
def test_the_widest_pass_needs_the_groups_that_its_tensors_are_in(block, num_blocks, more, ranks):
    layout = pack(sized(block, num_blocks), max(block) + more, ranks)
    needed = [
        len({chunk // ranks for chunk in layout.chunk_of[number * len(block):(number + 1) * len(block)]}) for number in range(num_blocks)]

    assert widest_groups(block, num_blocks, layout.chunk_elements, ranks) == max(needed)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 5), RANKS, st.integers(1, 3))
def test_no_size_up_to_a_block_scores_less_than_the_best_candidate(block, num_blocks, ranks, scale):
    block = tuple(scale * ALIGNED_ELEMENTS * ranks * size for size in block)  # all sums are aligned
    best = min(score_bytes(block, num_blocks, size, ranks) for size in candidate_sizes(block, ranks))
    sizes = range(max(block), sum(block) + 1, max(1, (sum(block) - max(block)) // 50))

    assert best <= min(score_bytes(block, num_blocks, size, ranks) for size in sizes)


@settings(max_examples=50)
@given(BLOCKS, st.integers(1, 4), RANKS, st.integers(0, 60))
def test_the_score_is_what_lies_empty_on_a_rank_and_what_a_pass_gathers(block, num_blocks, ranks, more):
    layout = pack(sized(block, num_blocks), max(block) + more, ranks)
    empty = layout.num_chunks * layout.chunk_elements - sum(block) * num_blocks
    gathered = widest_groups(block, num_blocks, layout.chunk_elements, ranks) * ranks * layout.chunk_elements

    assert score_bytes(block, num_blocks, layout.chunk_elements, ranks) == pytest.approx(16 * empty / ranks + 4 * gathered)


def test_transfer_efficiency_is_half_where_the_bytes_are_what_moves_in_the_latency():
    assert transfer_efficiency(1e5, 1e-5, 1e10) == 0.5
    assert transfer_efficiency(0, 1e-5, 1e10) == 0
    assert transfer_efficiency(9e5, 1e-5, 1e10) == pytest.approx(0.9)


@pytest.mark.parametrize(("ranks", "expected"), [
    pytest.param(1, 9 * 1e-5 * 15.75e9, id="pcie"), pytest.param(8, 9 * 1.9e-6 * 150e9, id="nvlink-needs-more"),
    pytest.param(16, 9 * 1.9e-6 * 150e9, id="infiniband-needs-less-than-nvlink")])
def test_a_chunk_must_be_large_enough_for_each_of_the_links_that_it_goes_over(ranks, expected):
    cluster = with_gpus(load_cluster("v100-32gb"), 16)

    assert MOVED_WELL == 0.9
    assert least_bytes(ranks, cluster) == pytest.approx(expected)


@pytest.mark.parametrize(("hidden", "num_layers", "ranks"), [(2048, 20, 1), (4096, 90, 8), (9216, 66, 8), (12288, 96, 32)])
def test_published_models_use_more_than_95_percent_of_their_chunks(hidden, num_layers, ranks):
    block, cluster = gpt_block(hidden), with_gpus(load_cluster("v100-32gb"), max(8, ranks))
    size = chunk_size_of(block, num_layers, ranks, cluster)
    layout = pack(sized(block, num_layers), size, ranks)

    assert layout.utilisation > 0.95
    assert size % ALIGNED_ELEMENTS == size % ranks == 0
    assert transfer_efficiency(2 * size, 1e-5, cluster.pcie_bytes_per_s) >= MOVED_WELL


def test_a_block_too_small_to_be_moved_well_is_one_chunk():
    block = gpt_block(64)

    assert chunk_size_of(block, 6, 2, load_cluster("cpu")) == -(-sum(block) // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def test_the_size_holds_the_largest_tensor_however_blocks_are_divided():
    assert widest([(10, 3, 7), (5, 6, 7)]) == (10, 6, 7)


def test_tensors_of_a_block_are_in_the_order_of_its_operators_with_local_shapes():
    model = load_model("gpt-1.5b").spec
    graph = build_graph(model, TrainingSpec(global_batch_size=8, seq_length=1024), 1)
    whole, divided = (block_tensors(graph.block, Sharding(tp)) for tp in (1, 2))

    assert [tensor.name for tensor in whole[:4]] == ["norm1.weight", "norm1.bias", "qkv.weight", "qkv.bias"]
    assert sum(tensor.elements for tensor in whole) == sum(gpt_block(model.hidden_size))
    assert [tensor.elements for tensor in divided[2:4]] == [whole[2].elements // 2, 3 * model.hidden_size // 2]
