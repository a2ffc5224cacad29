"""Sequences are divided in two pieces a rank, and every score that counts is in one block."""

from __future__ import annotations

import itertools

import pytest
import torch

from parplan.executor.context.zigzag import (
    blocks,
    blocks_of_part,
    by_rank,
    in_order,
    part_of,
    pieces,
)

RANKS = (1, 2, 3, 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_piece_of_a_sequence_is_on_one_rank(ranks):
    held = itertools.chain.from_iterable(pieces(rank, ranks) for rank in range(ranks))

    assert sorted(held) == list(range(2 * ranks))


def test_a_rank_has_an_early_and_a_late_piece():
    sequence = torch.arange(16).expand(3, 16)

    assert part_of(sequence, 1, 4, dim=1)[2].tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_parts_of_all_ranks_in_order_are_the_sequence_and_its_parts_are_theirs(ranks):
    sequence = torch.randn(2, 4 * ranks, 3)
    parts = torch.stack([part_of(sequence, rank, ranks, dim=1) for rank in range(ranks)])

    assert torch.equal(in_order(parts, 1), sequence)
    assert torch.equal(by_rank(sequence, ranks, 1), parts)


def read_by(of_blocks, ranks: int, length: int, window: int) -> torch.Tensor:
    """Returns how often each key is read by each query, over the blocks of all ranks.

    of_blocks   yields blocks for pieces of queries and of keys; keys come from a rank at a time
    """
    like = torch.zeros(())
    positions = torch.arange(2 * ranks * length)
    found = torch.zeros(len(positions), len(positions), dtype=torch.int64)
    for rank, other in itertools.product(range(ranks), repeat=2):
        queries = part_of(positions, rank, ranks, dim=0)
        keys = part_of(positions, other, ranks, dim=0)
        for block in of_blocks(pieces(rank, ranks), pieces(other, ranks)):
            mask = block.mask(window, like)
            rows, columns = queries[block.queries], keys[block.keys]
            read = torch.ones(len(rows), len(columns), dtype=torch.bool)
            read = read.tril() if block.causal else read if mask is None else mask == 0
            assert read.any(dim=1).all()  # a query without keys would have no softmax
            found[rows[:, None], columns] += read
    return found


@pytest.mark.parametrize("window", [0, *range(1, 26)])
@pytest.mark.parametrize(("ranks", "length"), [(1, 6), (3, 4), (2, 5)])
def test_each_pair_of_a_query_and_a_key_that_it_reads_is_in_one_block(ranks, length, window):
    found = read_by(lambda *of: blocks(*of, length, window), ranks, length, window)

    positions = torch.arange(2 * ranks * length)
    distance = positions[:, None] - positions
    assert torch.equal(found, ((distance >= 0) & (distance < (window or 99))).long())


@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize(("ranks", "length"), [(1, 12), (3, 4), (2, 6)])
def test_each_pair_within_a_document_is_in_one_block(ranks, length, window):
    documents = (3, 1, 9, 2, 2 * ranks * length - 15)

    def of_blocks(*pieces_of):
        for stop, tokens in zip(itertools.accumulate(documents), documents, strict=True):
            yield from blocks_of_part(range(stop - tokens, stop), *pieces_of, length, window)

    found = read_by(of_blocks, ranks, length, window)

    positions = torch.arange(2 * ranks * length)
    document = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    distance = positions[:, None] - positions
    within = (distance >= 0) & (distance < (window or 99))
    assert torch.equal(found, (within & (document[:, None] == document)).long())


def test_few_scores_outside_of_a_window_are_computed():
    length, window = 64, 8
    computed = sum(
        (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)
        for block in blocks(pieces(1, 2), tuple(range(4)), length, window)
    )

    assert computed <= 2 * length * 2 * window


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_have_equally_many_scores(ranks):
    def num_scores(rank: int) -> int:
        total = 0
        for block in blocks(pieces(rank, ranks), tuple(range(2 * ranks)), 8, 0):
            rows = block.queries.stop - block.queries.start
            columns = block.keys.stop - block.keys.start
            total += rows * (rows + 1) // 2 if block.causal else rows * columns
        return total

    assert len({num_scores(rank) for rank in range(ranks)}) == 1
