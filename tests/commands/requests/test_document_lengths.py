"""The value of --document-lengths: a mean or a file, and what is wrong with it."""

from __future__ import annotations

import pytest

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.document_lengths import documents_of_option
from parplan.commands.requests.requests import request_of
from parplan.commands.requests.traced import module_request
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.module_source import ModuleSource

S = 1024


def documents_of_text(tmp_path, text):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    return documents_of_option(str(path), S)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        pytest.param("7\n1024\n7\n", ((7, 2), (1024, 1)), id="lengths"),
        pytest.param("100 40\n\n  20\t3\n", ((20, 3), (100, 40)), id="histogram"),
        pytest.param("5 2\n9\n", ((5, 2), (9, 1)), id="both"),
    ],
)
def test_a_file_has_lengths_or_a_histogram(tmp_path, text, lengths):
    assert documents_of_text(tmp_path, text) == Documents(lengths=lengths)


def test_a_number_is_the_mean_and_no_option_reads_whole_sequences():
    assert documents_of_option("300.5", S) == Documents(mean=300.5)
    assert documents_of_option(None, S) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", r"lengths.txt: no lengths$", id="empty"),
        pytest.param("\n \n", r"lengths.txt: no lengths$", id="blank"),
        pytest.param("5\nsix\n", r"lengths.txt:2: 'six'$", id="a-word"),
        pytest.param("5\n1.5\n", r"lengths.txt:2: '1.5'$", id="a-fraction"),
        pytest.param("5\n0\n", r"lengths.txt:2: '0'$", id="nothing"),
        pytest.param("5\n-3 2\n", r"lengths.txt:2: '-3 2'$", id="negative"),
        pytest.param("5 1 2\n", r"lengths.txt:1: '5 1 2'$", id="three-columns"),
        pytest.param(f"5\n{'9' * 400}\n", r"lengths.txt:2: '9{80}\.\.\.'$", id="endless"),
        pytest.param("5\n1025 3\n", r":2: a document has 1,025 tokens, .*1,024$", id="too-long"),
    ],
)
def test_a_wrong_file_is_an_error_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        documents_of_text(tmp_path, text)

    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "a mean is from 1 to --seq-length 1024"),
        ("nan", "cannot read nan"),
        ("2000", "--document-lengths is 2000, a mean is from 1 to --seq-length 1024"),
        ("nowhere.txt", "cannot read nowhere.txt"),
    ],
)
def test_a_mean_beyond_a_sequence_and_a_file_that_is_not_there_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        documents_of_option(value, S)


def test_the_documents_are_part_of_the_training():
    target = TargetOptions(model="gpt-tiny", gpus=2, gpu="cpu", document_lengths="16")

    assert request_of(target).training.documents == Documents(mean=16)


def test_traced_modules_read_their_sequences_as_they_do():
    target = TargetOptions(model="a.b:c", gpus=2, gpu="cpu", document_lengths="16")

    with pytest.raises(ConfigError, match="--document-lengths"):
        module_request(ModuleSource(factory="a.b:c"), target, PinOptions(), SearchFlags())
