"""The pieces of a sequence that context-parallel ranks hold, and those of others that they read."""

from __future__ import annotations

import pytest

from parplan.costmodels.layers.sequence_pieces import (
    most_read_from_others,
    pieces,
    read_from_others,
)


@pytest.mark.parametrize(
    ("window", "read"),
    [
        pytest.param(1, (), id="itself"),
        pytest.param(5, (0, 5), id="into-the-piece-before"),
        pytest.param(6, (0, 4, 5), id="into-two-pieces"),
        pytest.param(99, (0, 2, 3, 4, 5), id="everything-before"),
    ],
)
def test_a_rank_reads_from_others_the_pieces_that_its_windows_reach_into(window, read):
    assert read_from_others(1, 4, 4, window) == read


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 64])
def test_the_most_pieces_are_those_of_tokens_counted_one_by_one(ranks, window):
    length = 4
    owner = {number: rank for rank in range(ranks) for number in pieces(rank, ranks)}
    read = {rank: set() for rank in range(ranks)}
    for query in range(2 * ranks * length):
        for key in range(max(0, query - window + 1), query + 1):
            if owner[key // length] != owner[query // length]:
                read[owner[query // length]].add(key // length)

    assert most_read_from_others(ranks, length, window) == max(map(len, read.values()))
