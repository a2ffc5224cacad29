from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.data import from_file, synthetic
from profiles.errors import ConfigError
from tests.executor_plans import SEQ_LENGTH, make_plan

ONE, TWO = make_plan(dp=1), make_plan(dp=2)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    (np.arange(20 * SEQ_LENGTH + 1) % 100).astype(np.uint16).tofile(path)
    return path


def test_the_ranks_of_the_data_axis_share_out_the_batch_of_one_rank(tokens):
    for make in (lambda plan, rank: synthetic(plan, rank, 5), lambda plan, rank: from_file(plan, rank, tokens, "uint16")):
        whole, _ = make(ONE, 0)(3)
        parts = [make(TWO, rank)(3)[0] for rank in range(2)]

        assert torch.equal(torch.cat(parts), whole)


def test_targets_are_the_ids_one_token_later(tokens):
    ids, targets = from_file(ONE, 0, tokens, "uint16")(0)

    assert ids.shape == targets.shape == (8, SEQ_LENGTH)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert ids[1, 0] == SEQ_LENGTH


def test_the_file_starts_again_at_its_end(tokens):
    batches = from_file(ONE, 0, tokens, "uint16")

    assert torch.equal(batches(0)[0][:4], batches(2)[0][4:])  # 20 sequences: number 20 is number 0 again


def test_steps_and_seeds_give_different_tokens():
    assert not torch.equal(synthetic(ONE, 0, 0)(0)[0], synthetic(ONE, 0, 0)(1)[0])
    assert not torch.equal(synthetic(ONE, 0, 0)(0)[0], synthetic(ONE, 0, 1)(0)[0])


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        from_file(ONE, 0, tmp_path / "none.bin", "uint16")


def test_a_file_shorter_than_a_sequence_is_an_error(tmp_path):
    path = tmp_path / "short.bin"
    np.zeros(SEQ_LENGTH, dtype=np.uint16).tofile(path)

    with pytest.raises(ConfigError, match="16 tokens, one sequence needs 17"):
        from_file(ONE, 0, path, "uint16")


def test_ids_outside_the_vocabulary_are_an_error(tmp_path):
    path = tmp_path / "tokens.bin"
    np.full(SEQ_LENGTH + 1, 100, dtype=np.uint16).tofile(path)
    batches = from_file(ONE, 0, path, "uint16")

    with pytest.raises(ConfigError, match="the vocabulary has 100"):
        batches(0)


def test_an_unknown_token_type_is_an_error_with_a_suggestion(tokens):
    with pytest.raises(ConfigError, match="unknown token type 'unit16'") as caught:
        from_file(ONE, 0, tokens, "unit16")

    assert caught.value.hint == "did you mean 'uint16'?"
