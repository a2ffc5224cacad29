from __future__ import annotations

import io
import json
import os
import pickle

import numpy as np
import pytest
import torch

from parplan.executor.data.batches import (
    build_batches,
    file_batches,
    open_tokens,
    synthetic_batches,
)
from parplan.executor.data.tokens import bytes_tokenizer, sidecar_path, write_tokens
from parplan.executor.run_options import Options
from parplan.profiles.errors import ConfigError
from tests.helpers.executor_plans import SEQ_LENGTH, make_plan

ONE, TWO = make_plan(dp=1), make_plan(dp=2)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    (np.arange(20 * SEQ_LENGTH + 1) % 100).astype(np.uint16).tofile(path)
    return path


def test_the_ranks_of_the_data_axis_share_out_the_batch_of_one_rank(tokens):
    for make in (
        lambda plan, rank: synthetic_batches(plan, rank, 5),
        lambda plan, rank: file_batches(plan, rank, tokens, "uint16"),
    ):
        whole, _ = make(ONE, 0)(3)
        parts = [make(TWO, rank)(3)[0] for rank in range(2)]

        assert torch.equal(torch.cat(parts), whole)


def test_targets_are_the_ids_one_token_later(tokens):
    ids, targets = file_batches(ONE, 0, tokens, "uint16")(0)

    assert ids.shape == targets.shape == (8, SEQ_LENGTH)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    assert ids[1, 0] == SEQ_LENGTH


def test_the_file_starts_again_at_its_end(tokens):
    batches = file_batches(ONE, 0, tokens, "uint16")

    assert torch.equal(
        batches(0)[0][:4], batches(2)[0][4:]
    )  # 20 sequences: number 20 is number 0 again


def test_steps_and_seeds_give_different_tokens():
    assert not torch.equal(synthetic_batches(ONE, 0, 0)(0)[0], synthetic_batches(ONE, 0, 0)(1)[0])
    assert not torch.equal(synthetic_batches(ONE, 0, 0)(0)[0], synthetic_batches(ONE, 0, 1)(0)[0])


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        file_batches(ONE, 0, tmp_path / "none.bin", "uint16")


def test_a_file_shorter_than_a_sequence_is_an_error(tmp_path):
    path = tmp_path / "short.bin"
    np.zeros(SEQ_LENGTH, dtype=np.uint16).tofile(path)

    with pytest.raises(ConfigError, match="16 tokens, one sequence needs 17"):
        file_batches(ONE, 0, path, "uint16")


def test_ids_outside_the_vocabulary_are_an_error(tmp_path):
    path = tmp_path / "tokens.bin"
    np.full(SEQ_LENGTH + 1, 100, dtype=np.uint16).tofile(path)
    batches = file_batches(ONE, 0, path, "uint16")

    with pytest.raises(ConfigError, match="the vocabulary has 100"):
        batches(0)


def test_an_unknown_token_type_is_an_error_with_a_suggestion(tokens):
    with pytest.raises(ConfigError, match="unknown token type 'unit16'") as caught:
        file_batches(ONE, 0, tokens, "unit16")

    assert caught.value.hint == "did you mean 'uint16'?"


def in_order(batches, steps: int) -> list[int]:
    """Returns the index in the file of each row's sequence.

    Sequences start at multiples of the length, whose remainders are known.
    """
    return [int(row[0]) for step in range(steps) for row in batches(step)[0]]


@pytest.fixture
def numbered(tmp_path):
    """24 sequences, three batches, each of its own number alone."""
    path = tmp_path / "numbered.npy"
    np.save(path, np.append(np.repeat(np.arange(24), SEQ_LENGTH), 0))
    return path


def test_shuffled_every_pass_takes_each_sequence_once_in_another_order(numbered):
    batches = file_batches(ONE, 0, numbered, seed=5)
    first, second = in_order(batches, 3), in_order(lambda step: batches(3 + step), 3)

    assert sorted(first) == sorted(second) == list(range(24))
    assert first != sorted(first)
    assert first != second
    assert in_order(file_batches(ONE, 0, numbered), 3) == list(range(24))


def test_shuffled_batches_are_the_same_on_every_mesh_and_from_any_step(numbered):
    whole = file_batches(ONE, 0, numbered, seed=5)
    parts = [file_batches(TWO, rank, numbered, seed=5) for rank in range(2)]

    for step in (
        4,
        1,
    ):  # no state: a run that goes on at step 4 meets what one from the start meets there
        assert torch.equal(torch.cat([part(step)[0] for part in parts]), whole(step)[0])


def test_the_options_choose_the_tokens(numbered):
    orders = [
        in_order(build_batches(ONE, 0, Options(data=numbered, **options)), 3)
        for options in ({"seed": 5}, {"seed": 6}, {"shuffle": False})
    ]

    assert orders[0] == in_order(file_batches(ONE, 0, numbered, seed=5), 3)
    assert orders[1] not in (orders[0], orders[2])
    assert orders[2] == list(range(24))
    assert torch.equal(
        build_batches(ONE, 0, Options(seed=3))(0)[0], synthetic_batches(ONE, 0, 3)(0)[0]
    )


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64", ">u2"])
def test_an_array_says_its_own_type_and_stays_on_the_disk(tmp_path, dtype):
    path = tmp_path / "tokens.npy"
    np.save(path, (np.arange(20 * SEQ_LENGTH + 1) % 100).astype(dtype))

    assert isinstance(open_tokens(path, None, 100), np.memmap)
    assert in_order(file_batches(ONE, 0, path), 2) == [i * SEQ_LENGTH % 100 for i in range(16)]


def test_a_file_of_the_converter_says_its_own_type(tmp_path):
    text, path = tmp_path / "text.txt", tmp_path / "tokens.bin"
    text.write_bytes(bytes(range(100)) * 4)
    write_tokens([text], path, bytes_tokenizer(), "uint32")

    assert open_tokens(path, None, 257).tolist() == [*range(100)] * 4 + [256]
    with pytest.raises(ConfigError, match="holds uint32, --data-dtype says uint16"):
        open_tokens(path, "uint16", 257)
    with pytest.raises(
        ConfigError, match="token id 256, the vocabulary has 100"
    ):  # at once: the largest id is beside it
        file_batches(ONE, 0, path)
    assert np.fromfile(path, dtype=np.uint16).tolist() != [*range(100)] * 4 + [
        256
    ]  # what uint16 would have read


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    text, path = tmp_path / "text.txt", tmp_path / "tokens.bin"
    text.write_bytes(b"a" * 400)
    write_tokens([text], path, bytes_tokenizer())
    path.write_bytes(path.read_bytes()[:-2])

    with pytest.raises(ConfigError, match=r"400 ids, the \.json beside it says 401"):
        open_tokens(path, None, 257)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"abc", "3 bytes are not a whole number of uint16 ids", id="odd"),
    ],
)
def test_a_file_of_no_ids_is_an_error(tmp_path, content, message):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        open_tokens(path, None, 100)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        pytest.param(
            np.zeros((3, 4), dtype=np.uint16),
            "2 dimensions of uint16, it must be one row",
            id="two-dimensions",
        ),
        pytest.param(np.zeros(9), "1 dimensions of float64", id="no-integers"),
    ],
)
def test_an_array_that_is_not_one_row_of_ids_is_an_error(tmp_path, array, message):
    path = tmp_path / "tokens.npy"
    np.save(path, array)

    with pytest.raises(ConfigError, match=message):
        open_tokens(path, None, 100)


def saved(array: object, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


WHOLE = saved(np.arange(100, dtype=np.uint16))
SHAPE = b"'shape': (100,), }" + b" " * 20


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"no array", id="text"),
        pytest.param(b"", id="empty"),
        pytest.param(WHOLE[:7], id="half-a-magic"),
        pytest.param(WHOLE[:40], id="half-a-header"),
        pytest.param(WHOLE[:150], id="half-the-ids"),
        pytest.param(WHOLE.replace(b"{'descr'", b"(('descr'"), id="header-that-does-not-end"),
        pytest.param(WHOLE.replace(b"'<u2'", b"'zz2'"), id="no-such-type"),
        pytest.param(WHOLE.replace(b"(100,)", b"(-10,)"), id="negative"),
        pytest.param(
            WHOLE.replace(SHAPE, b"'shape': (1" + 21 * b"0" + b",), }   "), id="more-than-64-bits"
        ),
        pytest.param(
            WHOLE.replace(SHAPE, b"'shape': (9223372036854775807,), }    "), id="more-than-memory"
        ),
        pytest.param(saved(np.arange(9), np.savez), id="archive"),
        pytest.param(saved(np.array([1, "a", None], dtype=object)), id="pickled-objects"),
        pytest.param(pickle.dumps(np.arange(9)), id="pickle"),
    ],
)
def test_an_array_file_that_is_none_is_an_error(tmp_path, content):
    path = tmp_path / "tokens.npy"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"cannot read .* as a .npy file"):
        open_tokens(path, None, 100)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("tokens.npz", "an archive of arrays", id="archive"),
        pytest.param("pipe.bin", "not a regular file", id="pipe"),
        pytest.param("pipe.npy", "not a regular file", id="array-pipe"),
        pytest.param("folder", "a folder", id="folder"),
        pytest.param("x" * 300, "File name too long", id="too-long"),
        pytest.param("none.npy", "No such file or directory", id="none"),
    ],
)
def test_what_is_no_file_of_ids_is_an_error(tmp_path, name, message):
    (tmp_path / "tokens.npz").write_bytes(saved(np.arange(9), np.savez))
    (tmp_path / "folder").mkdir()
    for pipe in ("pipe.bin", "pipe.npy"):
        os.mkfifo(tmp_path / pipe)

    with pytest.raises(ConfigError, match=message) as caught:
        open_tokens(tmp_path / name, None, 100)

    assert caught.value.hint


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_random_tokens_take_any_seed_of_64_bits(seed):
    ids, _ = synthetic_batches(ONE, 0, seed)(0)

    assert torch.equal(ids, synthetic_batches(ONE, 0, seed)(0)[0])
    assert not torch.equal(ids, synthetic_batches(ONE, 0, seed - 1 if seed else 1)(0)[0])


def test_a_negative_id_is_an_error(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.full(9 * SEQ_LENGTH, -1))

    with pytest.raises(ConfigError, match="token id -1, the vocabulary has 100"):
        file_batches(ONE, 0, path)(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"version": 9}, "version 9, this reads version 1", id="version"),
        pytest.param({"dtype": "uint8"}, "unknown dtype 'uint8'", id="type"),
        pytest.param({"extra": 1}, "unknown key extra", id="an-unknown-key"),
    ],
)
def test_what_lies_beside_a_file_is_checked(tmp_path, change, message):
    text, path = tmp_path / "text.txt", tmp_path / "tokens.bin"
    text.write_bytes(b"a" * 400)
    write_tokens([text], path, bytes_tokenizer())
    beside = sidecar_path(path)
    beside.write_text(json.dumps(json.loads(beside.read_text()) | change))

    with pytest.raises(ConfigError, match=message):
        open_tokens(path, None, 257)
