"""The benchmark of the token table on the host: a row of it."""

from __future__ import annotations

import pytest

from benchmarks.prices import token_table


@pytest.mark.slow
def test_on_one_gpu_the_model_fits_only_with_its_table_on_the_host():
    here, there = token_table.rows_of(*token_table.NODES[0])

    assert here[:4] == ("1 x a100-40gb", "12", "its own", "device")
    assert here[4] == "none fits"
    assert there[3] == "host"


@pytest.mark.slow
def test_a_tied_table_on_the_host_makes_room_for_larger_micro_batches_on_one_gpu():
    here, there = token_table.rows_of(*token_table.TIED_NODES[0], tied=True)

    assert (here[2:5], there[2:5]) == (("tied", "device", "47.1 s"), ("tied", "host", "29.6 s"))


def test_the_model_has_a_large_table_of_its_own():
    model = token_table.model_of(3)

    assert (model.num_layers, model.hidden_size, model.vocab_size, model.tied_embeddings) == (
        3,
        4096,
        256_000,
        False,
    )
