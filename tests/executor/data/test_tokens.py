from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from parplan.cli import main
from parplan.executor.data import tokens
from parplan.executor.data.tokens import (
    Tokenizer,
    bytes_tokenizer,
    documents,
    load_tokenizer,
    read_sidecar,
    sidecar_path,
    text_pieces,
    write_tokens,
)
from parplan.profiles.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "corpus"
    (inside / "below").mkdir(parents=True)
    (inside / "b.txt").write_text("second\n")
    (inside / "a.txt").write_text("first\n")
    (inside / "empty.txt").write_text("")
    (inside / "below" / "c.txt").write_text("third\n")
    (inside / "code.py").write_text("pass\n")
    return inside


@pytest.fixture(scope="module")
def gpt2_like(tmp_path_factory):
    """A byte-level BPE tokenizer of 300 ids in a folder, as GPT-2's is, made on the spot."""
    lib = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog\n\n"] * 20, trainer)
    where = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>"
    ).save_pretrained(where)
    return where


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["tokenize", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_bytes_are_their_own_ids_and_256_ends_a_document(tmp_path):
    data = tmp_path / "all"
    data.write_bytes(bytes(range(256)))
    output = tmp_path / "tokens.bin"

    written = write_tokens([data], output, bytes_tokenizer())

    assert np.fromfile(output, dtype="<u2").tolist() == list(range(257))
    assert (
        written.count,
        written.documents,
        written.vocab_size,
        written.largest_id,
        written.dtype,
    ) == (
        257,
        1,
        257,
        256,
        "uint16",
    )
    assert read_sidecar(output) == written


def test_a_folder_gives_the_files_of_its_pattern_in_order(folder):
    names = [
        [path.name for path in documents([folder], pattern)]
        for pattern in ("*.txt", "**/*.txt", "*.py")
    ]

    assert names == [
        ["a.txt", "b.txt", "empty.txt"],
        ["a.txt", "b.txt", "c.txt", "empty.txt"],
        ["code.py"],
    ]
    assert documents([folder / "code.py", folder], "a*") == (folder / "code.py", folder / "a.txt")


def test_the_command_writes_documents_one_after_the_other_and_leaves_empty_ones_out(
    folder, tmp_path
):
    output = tmp_path / "out.bin"

    code, out, err = run(folder, "-o", output)

    assert code == 0, err
    assert np.fromfile(output, dtype=np.uint16).tolist() == [*b"first\n", 256, *b"second\n", 256]
    assert out.startswith(f"wrote {output}: 15 tokens of 2 documents, 30 B of uint16\n")
    assert "the model needs a vocab_size of 257 or more" in out


def test_json_is_what_lies_beside_the_file(folder, tmp_path):
    output = tmp_path / "out.bin"

    code, out, _ = run(folder, "-o", output, "--dtype", "uint32", "--json")

    assert code == 0
    assert json.loads(out) == json.loads(sidecar_path(output).read_text())
    assert output.stat().st_size == 4 * 15


def test_a_hugging_face_tokenizer_is_read_from_its_folder(folder, tmp_path, gpt2_like):
    from transformers import AutoTokenizer

    reference, output = AutoTokenizer.from_pretrained(gpt2_like), tmp_path / "out.bin"
    text = "the quick brown fox\n\n  jumps over\nthe lazy dog\u00e9\n"
    (folder / "a.txt").write_text(text, encoding="utf-8")

    code, _, err = run(folder / "a.txt", folder / "b.txt", "--tokenizer", gpt2_like, "-o", output)

    ids = np.fromfile(output, dtype=np.uint16).tolist()
    ends = [i for i, token in enumerate(ids) if token == reference.eos_token_id]
    assert code == 0, err
    assert len(ends) == 2
    assert ends[1] == len(ids) - 1
    assert ids[: ends[0]] == reference(text)["input_ids"]
    assert reference.decode(ids[ends[0] + 1 : -1]) == "second\n"
    assert read_sidecar(output).vocab_size == len(reference)


def test_a_long_document_in_pieces_gives_the_ids_of_the_whole(tmp_path, gpt2_like, monkeypatch):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(gpt2_like)
    text = "".join(
        f"the quick {i}\n{' ' * (i % 3)}\n{'  ' * (i % 2)}brown fox\u00e9\n" for i in range(60)
    )
    document, output = tmp_path / "long.txt", tmp_path / "out.bin"
    document.write_text(text, encoding="utf-8")
    monkeypatch.setattr(text_pieces, "__defaults__", (100,))

    write_tokens([document], output, load_tokenizer(str(gpt2_like)))

    with document.open("rb") as file:
        assert len(list(text_pieces(file))) > 5
    assert np.fromfile(output, dtype=np.uint16)[:-1].tolist() == reference(text)["input_ids"]


def test_pieces_are_the_text_and_cut_only_before_a_word_of_a_new_line():
    text = "ab\n\n  cd\nef gh\n\u00e9\n" * 50
    pieces = list(text_pieces(io.BytesIO(text.encode()), size=40))

    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(
        before.endswith("\n") and not after[0].isspace() for before, after in pairwise(pieces)
    )
    assert list(text_pieces(io.BytesIO(b"a\nb"), size=40)) == ["a\nb"]
    assert list(text_pieces(io.BytesIO(b"x" * 100), size=40)) == ["x" * 100]


def test_the_smallest_type_that_holds_the_vocabulary_is_chosen(tmp_path):
    document, output = tmp_path / "text", tmp_path / "out.bin"
    document.write_bytes(b"x")

    def wide(vocab_size: int) -> Tokenizer:
        return Tokenizer(
            name="wide",
            vocab_size=vocab_size,
            end_of_document=vocab_size - 1,
            encode=lambda _: iter([[vocab_size - 2]]),
        )

    assert [write_tokens([document], output, wide(size)).dtype for size in (65536, 65537)] == [
        "uint16",
        "uint32",
    ]
    assert np.fromfile(output, dtype=np.uint32).tolist() == [65535, 65536]
    with pytest.raises(ConfigError, match="--dtype uint16: the tokenizer has 65537 ids"):
        write_tokens([document], output, wide(65537), "uint16")
    assert np.array([65536]).astype(np.uint16).tolist() == [0]  # what would have been written


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, gpt2_like):
    good = tmp_path / "good.txt"
    bad = tmp_path / "bad.txt"
    output = tmp_path / "out.bin"
    good.write_text("fine\n")
    bad.write_bytes(b"caf\xe9\n")
    write_tokens([good], output, bytes_tokenizer())
    before = output.read_bytes(), sidecar_path(output).read_bytes()

    code, _, err = run(good, bad, "--tokenizer", gpt2_like, "-o", output, "--force")

    assert code == 2
    assert f"error: {bad}: not UTF-8" in err
    assert (output.read_bytes(), sidecar_path(output).read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.txt",
        "good.txt",
        "out.bin",
        "out.bin.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["none.txt"], "none.txt: no such file or folder", id="no-input"),
        pytest.param(
            [".", "--glob", "*.none"], ".: no file matches --glob '*.none'", id="no-match"
        ),
        pytest.param(
            [".", "--glob", "*.txt", "--glob", "*.py"], "--glob is given 2 times", id="two-patterns"
        ),
        pytest.param(
            [".", "--glob", "/*"],
            "--glob '/*' is no pattern of names below .",
            id="absolute-pattern",
        ),
        pytest.param(
            [".", "--glob", ""], "--glob '' is no pattern of names below .", id="empty-pattern"
        ),
        pytest.param(
            ["a.txt", "--tokenizer", "gpt2"],
            "--tokenizer gpt2: no such folder\nhint: give 'bytes' or the folder",
            id="hub-name",
        ),
        pytest.param(
            ["a.txt", "--tokenizer", "below"], "--tokenizer below: ", id="folder-without-tokenizer"
        ),
        pytest.param(
            ["a.txt", "-o", f"{'x' * 248}.bin"], "File name too long", id="name-beside-too-long"
        ),
        pytest.param(["empty.txt"], "all 1 documents are empty", id="empty"),
        pytest.param(
            ["a.txt", "-o", "a.npy"], "--output a.npy: token files are named .bin", id="name"
        ),
        pytest.param(
            ["a.txt", "-o", "no/folder.bin"],
            "cannot write no/folder.bin: No such file or directory",
            id="no-folder",
        ),
        pytest.param(["a.txt", "--tokenizer", "./none"], "--tokenizer ./none: ", id="no-tokenizer"),
        pytest.param(["a.txt", "--dtype", "uint8"], "invalid value for '--dtype'", id="type"),
        pytest.param([], "missing argument 'INPUT...'", id="nothing"),
    ],
)
def test_a_wrong_request_is_an_error_with_a_hint(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert message in err
    assert "\nhint: " in err
    assert not (folder / "tokens.bin").exists()


def test_only_a_download_that_is_asked_for_may_use_the_network(
    folder, tmp_path, gpt2_like, monkeypatch
):
    from transformers import AutoTokenizer

    load, requested = AutoTokenizer.from_pretrained, []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def from_pretrained(name, **options):
        requested.append((name, options["local_files_only"], os.environ["HF_HUB_OFFLINE"]))
        return load(gpt2_like)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)

    for arguments in ((gpt2_like,), ("someone/tokenizer", "--download")):
        output = tmp_path / f"{len(arguments)}.bin"
        assert run(folder, "-o", output, "--tokenizer", *arguments)[0] == 0
    assert requested == [(str(gpt2_like), True, "1"), ("someone/tokenizer", False, "0")]


def test_a_tokenizer_file_that_is_damaged_is_one_error(folder, tmp_path, gpt2_like):
    shutil.copytree(gpt2_like, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")

    code, out, err = run(folder, "-o", tmp_path / "out.bin", "--tokenizer", tmp_path / "damaged")

    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_tokenizer_without_an_end_of_document_is_an_error(tmp_path, gpt2_like):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(gpt2_like)
    loaded.eos_token = None
    loaded.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="has no end-of-document token"):
        load_tokenizer(str(tmp_path))


def test_without_transformers_a_hugging_face_tokenizer_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match="needs the package transformers") as caught:
        load_tokenizer("gpt2")

    assert caught.value.hint == "pip install 'parplan[tokenize]'"


def test_bytes_need_neither_torch_nor_transformers(folder, tmp_path):
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None); "
        "from parplan.cli import main; main(sys.argv[1:])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, "tokenize", str(folder), "-o", str(tmp_path / "out.bin")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert read_sidecar(tmp_path / "out.bin").count == 15


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr(tokens, "PIECE", 2**16)
    document, peaks = tmp_path / "text", []
    for size in (2**20, 2**23):
        document.write_bytes(b"x" * size)
        tracemalloc.start()
        write_tokens([document], tmp_path / "out.bin", bytes_tokenizer())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert peaks[1] < 1.2 * peaks[0] < 2**20
