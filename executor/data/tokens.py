"""Reads and writes files of token ids and the JSON file beside them, without torch.

A token file holds only ids, little-endian, as nanoGPT's and Megatron's readers expect;
`tokens.bin.json` beside it describes them. Every document is followed by the tokenizer's
end-of-document id. Text is read and written in pieces, so the memory needed does not depend on the
size of the corpus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np

from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.files import open_replacement
from parplan.profiles.documents.reader import read_json
from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.models.hub import allow_download, hub_refusals
from parplan.profiles.units import MIB

SIDECAR_VERSION = 1
_FORBID = {"extra": "forbid"}
_AGAIN = "write it again: plan tokenize"
_OTHER_FILE = "check --output"
TOKEN_TYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# Characters or bytes of a document in memory at once; a longer document is cut after a newline.
PIECE = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """The contents of `tokens.bin.json`: `count` ids of `dtype`, each at most `largest_id`.

    The tokenizer has `vocab_size` ids.
    """

    __pydantic_config__ = _FORBID

    version: int
    dtype: str
    count: int
    documents: int
    vocab_size: int
    largest_id: int
    end_of_document: int
    tokenizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer whose ids are below `vocab_size`.

    `encode` turns a document, given as an open binary file, into ids, piece by piece.
    """

    name: str
    vocab_size: int
    end_of_document: int
    encode: Callable[[IO[bytes]], Iterator[Sequence[int] | np.ndarray]]


def sidecar_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def read_sidecar(path: Path) -> TokenFile | None:
    """Reads the JSON file beside the token file at `path`; None if there is none.

    Raises ConfigError for a file that cannot be read.
    """
    beside = sidecar_path(path)
    if not os.path.lexists(beside):
        return None
    document = read_json(beside, hints=Hints(_AGAIN, _AGAIN))
    version = document.get("version") if isinstance(document, dict) else None
    if version != SIDECAR_VERSION:
        raise ConfigError(
            f"{beside}: version {version}, this reads version {SIDECAR_VERSION}", hint=_AGAIN
        )
    sidecar = parse(TokenFile, document, str(beside))
    if sidecar.dtype not in TOKEN_TYPES:
        raise unknown_name_error("dtype", str(sidecar.dtype), TOKEN_TYPES, where=str(beside))
    return sidecar


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer by which every byte is an id and 256 ends a document."""

    def encode(document: IO[bytes]) -> Iterator[np.ndarray]:
        while piece := document.read(PIECE):
            yield np.frombuffer(piece, dtype=np.uint8)

    return Tokenizer(name="bytes", vocab_size=257, end_of_document=256, encode=encode)


def load_tokenizer(name: str, *, download: bool = False) -> Tokenizer:
    """Loads `bytes` or a Hugging Face tokenizer.

    The latter is named by its folder or, with `download`, by its name on the hub. Raises
    ConfigError.
    """
    return bytes_tokenizer() if name == "bytes" else _hugging_face(name, download=download)


def _hugging_face(name: str, *, download: bool) -> Tokenizer:
    if find_spec("transformers") is None:
        raise ConfigError(
            f"--tokenizer {name} needs the package transformers",
            hint="pip install 'parplan[tokenize]'",
        )
    if download:
        allow_download()
    elif not os.path.isdir(name):
        raise ConfigError(
            f"--tokenizer {name}: no such folder",
            hint="give 'bytes' or the folder of a Hugging Face tokenizer, or add --download",
        )
    with hub_refusals(
        f"--tokenizer {name}", "give 'bytes', or the folder of a Hugging Face tokenizer"
    ):
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(
            name, local_files_only=not download, trust_remote_code=False
        )
    if loaded.eos_token_id is None:
        raise ConfigError(
            f"--tokenizer {name} has no end-of-document token (eos_token)",
            hint="set eos_token in its tokenizer_config.json",
        )

    def encode(document: IO[bytes]) -> Iterator[Sequence[int]]:
        for piece in text_pieces(document):
            yield loaded(piece, add_special_tokens=False, verbose=False)["input_ids"]

    vocab_size = max(loaded.get_vocab().values()) + 1  # not len(), because ids may have gaps
    return Tokenizer(
        name=name, vocab_size=vocab_size, end_of_document=loaded.eos_token_id, encode=encode
    )


def text_pieces(document: IO[bytes], size: int = PIECE) -> Iterator[str]:
    """Yields the document's UTF-8 text in pieces, cut after newlines that no white space follows.

    Tokenizers that split text into words (GPT-2's, Llama 3's) split it there anyway. A document
    shorter than `size` bytes is one piece. Raises ConfigError for other text.
    """
    held = document.read(size)
    while more := document.read(size):
        if end := _cut(held):
            yield _text(held[:end], document)
        held = held[end:] + more
    if held:
        yield _text(held, document)


def _cut(held: bytes) -> int:
    """The last position in `held` after a newline that no white space follows, or 0."""
    end = len(held)
    while (end := held.rfind(b"\n", 0, end)) >= 0:
        if held[end + 1 : end + 2].strip():
            return end + 1
    return 0


def _text(piece: bytes, document: IO[bytes]) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{document.name}: not UTF-8, {error.reason} 0x{piece[error.start]:02x}",
            hint="convert it, or use --tokenizer bytes",
        ) from None


def documents(inputs: Iterable[Path], pattern: str) -> tuple[Path, ...]:
    """Returns the files among `inputs` and, sorted, those in folders that match `pattern`.

    Raises ConfigError.
    """
    files: list[Path] = []
    for path in inputs:
        if os.path.isdir(path):
            inside = _matching(path, pattern)
            if not inside:
                raise ConfigError(
                    f"{path}: no file matches --glob {pattern!r}",
                    hint="--glob '**/*.txt' looks in every folder below",
                )
            files += inside
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise ConfigError(f"{path}: no such file or folder", hint="check INPUT")
    return tuple(files)


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Returns the matching files of a folder, sorted. Raises ConfigError for a bad pattern."""
    try:
        return sorted(file for file in folder.glob(pattern) if file.is_file())
    except (ValueError, NotImplementedError, IndexError):
        raise ConfigError(
            f"--glob {pattern!r} is no pattern of names below {folder}",
            hint="--glob '**/*.txt' looks in every folder below",
        ) from None


def write_tokens(
    inputs: Sequence[Path], output: Path, tokenizer: Tokenizer, dtype: str = "auto"
) -> TokenFile:
    """Writes the ids of `inputs` to `output` and their description beside it.

    Neither file appears before both are complete. Empty documents are left out. Raises ConfigError
    and then leaves `output` unchanged.
    """
    name = _chosen_dtype(tokenizer, dtype)
    if output.suffix != ".bin":
        raise ConfigError(
            f"--output {output}: token files are named .bin",
            hint=f"-o {output.with_suffix('.bin')}",
        )
    with (
        open_replacement(output, hint=_OTHER_FILE) as file,
        open_replacement(sidecar_path(output), hint=_OTHER_FILE) as beside,
    ):
        count, num_documents, largest = _write_documents(inputs, file, tokenizer, TOKEN_TYPES[name])
        if not count:
            raise ConfigError(f"all {len(inputs)} documents are empty", hint="check INPUT")
        description = TokenFile(
            version=SIDECAR_VERSION,
            dtype=name,
            count=count,
            documents=num_documents,
            vocab_size=tokenizer.vocab_size,
            largest_id=largest,
            end_of_document=tokenizer.end_of_document,
            tokenizer=tokenizer.name,
        )
        beside.write(json.dumps(asdict(description), indent=2).encode() + b"\n")
    return description


def _chosen_dtype(tokenizer: Tokenizer, dtype: str) -> str:
    if dtype == "auto":
        return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    if dtype not in TOKEN_TYPES:
        raise unknown_name_error("token type", dtype, TOKEN_TYPES, where="--dtype")
    if tokenizer.vocab_size > np.iinfo(TOKEN_TYPES[dtype]).max + 1:
        raise ConfigError(
            f"--dtype {dtype}: the tokenizer has {tokenizer.vocab_size} ids",
            hint="use --dtype uint32, or auto",
        )
    return dtype


def _write_documents(
    inputs: Sequence[Path], file: IO[bytes], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> tuple[int, int, int]:
    """Returns the ids written, the documents that were not empty, and the largest id."""
    count = num_documents = largest = 0
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    for path in inputs:
        before = count
        for ids in _encoded(path, tokenizer, dtype):
            file.write(ids.tobytes())
            count += len(ids)
            largest = max(largest, int(ids.max()))
        if count > before:
            file.write(end.tobytes())
            count += 1
            num_documents += 1
            largest = max(largest, tokenizer.end_of_document)
    return count, num_documents, largest


def _encoded(path: Path, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    try:
        with path.open("rb") as document:
            for ids in tokenizer.encode(document):
                if len(ids):
                    yield np.asarray(ids).astype(dtype)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}", hint="check INPUT"
        ) from None
