"""Batches of tokens, synthetic or from a memory-mapped file.

A sequence depends only on its global index, so every mesh trains on the same data: a data-parallel
rank reads its share of every global batch, behind the shares of the ranks before it
(EQUATIONS P9), and behind those of the pools before its own (P10). Context-parallel ranks have two
pieces of each of these sequences (`parplan.executor.context.zigzag`).

A file is cut into consecutive sequences, each with one further id for its targets. Row r of step s
is global index s B + r, where B is the global batch size. Every pass over the file takes each
sequence once, in an order given by the seed and the number of the pass
(`parplan.executor.data.shuffle`), or in file order with --no-shuffle. To resume after step s, only
s has to be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from parplan.executor.context.zigzag import part_of
from parplan.executor.data.shuffle import shuffled_item
from parplan.executor.data.tokens import TOKEN_TYPES, read_sidecar
from parplan.executor.run_options import Options, derived_seed
from parplan.planner.plan.plan import Plan
from parplan.profiles.documents.files import require_regular
from parplan.profiles.errors import ConfigError, unknown_name_error

ARRAY_TYPES = ("uint16", "uint32", "int32", "int64")  # in .npy files, whose headers name their type
_OTHER_DATA = "check --data and --data-dtype"
NO_TOKEN = -1  # the target behind the end of a sequence
ASSUMED_TYPE = "uint16"  # for a .bin file without a .json file beside it

Batches = Callable[[int], tuple[Tensor, Tensor]]
Sequence = Callable[[int], Tensor]  # from the global index of a sequence


def build_batches(plan: Plan, replica: int, options: Options) -> Batches:
    """Returns a function from the step to (ids, targets), each [rows, tokens of this rank].

    Targets are the ids one token later. A model with modules of multi-token prediction has targets
    of [rows, tokens, predictions]: the ids one, two and more tokens later, or `NO_TOKEN`.

    replica   number among the data-parallel and context-parallel ranks, the latter innermost
    """
    dp_rank, cp_rank = divmod(replica, plan.mesh.cp)
    if options.data is None:
        batches = synthetic_batches(plan, dp_rank, options.seed)
    else:
        seed = options.seed if options.shuffle else None
        batches = file_batches(plan, dp_rank, options.data, options.data_dtype, seed=seed)
    return batches if plan.mesh.cp == 1 else _divided(batches, cp_rank, plan.mesh.cp)


def _divided(batches: Batches, rank: int, ranks: int) -> Batches:
    """Returns the batches of one of the ranks that divide every sequence."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, targets = (part_of(each, rank, ranks, dim=1) for each in batches(step))
        return ids, targets

    return batch


def synthetic_batches(plan: Plan, dp_rank: int, seed: int) -> Batches:
    """Uniform random token ids."""

    def sequence(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(seed, index))
        return torch.randint(
            plan.model.vocab_size, (plan.training.seq_length + 1,), generator=generator
        )

    return _batches(plan, dp_rank, sequence)


def file_batches(
    plan: Plan, dp_rank: int, path: Path, data_type: str | None = None, *, seed: int | None = None
) -> Batches:
    """Batches of sequences from a file of token ids, in file order if `seed` is None.

    Raises ConfigError.
    """
    return _batches(plan, dp_rank, _file_sequence(plan, path, data_type, seed=seed))


def file_sequences(plan: Plan, options: Options) -> Sequence:
    """Returns a function from the global index to the ids of a sequence and one further id.

    Raises ConfigError.
    """
    assert options.data is not None, "the run has a file"
    seed = options.seed if options.shuffle else None
    return _file_sequence(plan, options.data, options.data_dtype, seed=seed)


def document_end(path: Path) -> int | None:
    """Returns the id that ends a document in a token file, None if nothing beside it says."""
    beside = read_sidecar(path)
    return beside.end_of_document if beside else None


def _file_sequence(plan: Plan, path: Path, data_type: str | None, *, seed: int | None) -> Sequence:
    length = plan.training.seq_length
    tokens = open_tokens(path, data_type, plan.model.vocab_size)
    num_sequences = (len(tokens) - 1) // length
    if num_sequences < 1:
        raise ConfigError(
            f"{path}: {len(tokens)} tokens, one sequence needs {length + 1}",
            hint="use a longer file",
        )

    def sequence(index: int) -> Tensor:
        epoch, place = divmod(index, num_sequences)
        if seed is not None:
            place = shuffled_item(place, num_sequences, seed=seed, epoch=epoch)
        start = place * length
        ids = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        _check_ids(int(ids.min()), int(ids.max()), plan.model.vocab_size, path)
        return ids

    return sequence


def open_tokens(path: Path, data_type: str | None, vocab_size: int) -> np.ndarray:
    """Maps the ids of a file into memory.

    The type of a .npy file is in its header; that of another file is in the .json file beside it or
    is `data_type`. Raises ConfigError for a file that is not one row of ids, and for contradicting
    types.
    """
    if data_type is not None and data_type not in TOKEN_TYPES:
        raise unknown_name_error("token type", data_type, TOKEN_TYPES, where="--data-dtype")
    if path.suffix == ".npz":
        raise ConfigError(
            f"{path}: an archive of arrays cannot be mapped into memory",
            hint="save the ids with numpy.save, as a .npy",
        )
    require_regular(path, hint=_OTHER_DATA)
    tokens = (
        _mapped_array(path) if path.suffix == ".npy" else _mapped_ids(path, data_type, vocab_size)
    )
    if data_type not in (None, tokens.dtype.name):
        raise ConfigError(
            f"{path} holds {tokens.dtype.name}, --data-dtype says {data_type}",
            hint="leave --data-dtype out",
        )
    return tokens


def _mapped_array(path: Path) -> np.ndarray:
    try:
        # np.load would also open archives and pickles.
        with np.errstate(over="ignore"):
            tokens = np.lib.format.open_memmap(path, mode="r")
    except (
        OSError,
        ValueError,
        TypeError,
        OverflowError,
        SyntaxError,
        MemoryError,
        TokenError,
    ) as error:  # numpy hardly validates a header
        raise ConfigError(
            f"cannot read {path} as a .npy file: {error}", hint="save the ids again with numpy.save"
        ) from None
    if tokens.dtype.name not in ARRAY_TYPES or tokens.ndim != 1:
        raise ConfigError(
            f"{path}: {tokens.ndim} dimensions of {tokens.dtype.name}, it must be one row of "
            f"{', '.join(ARRAY_TYPES)}",
            hint="save the ids as one flat array",
        )
    return tokens


def _mapped_ids(path: Path, data_type: str | None, vocab_size: int) -> np.ndarray:
    beside = read_sidecar(path)
    name = beside.dtype if beside else data_type or ASSUMED_TYPE
    dtype = TOKEN_TYPES[name]
    try:
        size = path.stat().st_size
        if not size:
            raise ConfigError(f"{path} is empty", hint="check --data")
        if size % dtype.itemsize:
            raise ConfigError(
                f"{path}: {size} bytes are not a whole number of {name} ids",
                hint="check --data-dtype",
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=_OTHER_DATA) from None
    if beside and beside.count != len(tokens):
        raise ConfigError(
            f"{path}: {len(tokens)} ids, the .json beside it says {beside.count}",
            hint="write it again: plan tokenize",
        )
    if beside:
        _check_ids(0, beside.largest_id, vocab_size, path)
    return tokens


def _check_ids(least: int, largest: int, vocab_size: int, path: Path) -> None:
    if least < 0 or largest >= vocab_size:
        raise ConfigError(
            f"{path}: token id {least if least < 0 else largest}, the vocabulary has {vocab_size}",
            hint="check --data-dtype and the model's vocab_size",
        )


def sequences_of(plan: Plan, dp_rank: int, sequence: Sequence) -> Callable[[int], Tensor]:
    """Returns a function from the step to what `sequence` has of each row of a replica."""
    shares = plan.pipeline.micro_batches(plan.mesh.dp)
    size = plan.training.global_batch_size // sum(shares)
    rows, before = size * shares[dp_rank], size * sum(shares[:dp_rank])
    whole = plan.whole_batch

    def batch(step: int) -> Tensor:
        first = step * whole.of + whole.first + before
        return torch.stack([sequence(first + row) for row in range(rows)])

    return batch


def _batches(plan: Plan, dp_rank: int, sequence: Sequence) -> Batches:
    tokens_of = sequences_of(plan, dp_rank, sequence)
    further = plan.model.mtp_layers if plan.module is None else 0

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens = tokens_of(step)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return ids, _with_further(targets, further) if further else targets

    return batch


def _with_further(targets: Tensor, further: int) -> Tensor:
    """Returns [rows, tokens, 1 + further]: targets, and those up to `further` tokens behind."""
    each = (functional.pad(targets[:, by:], (0, by), value=NO_TOKEN) for by in range(1 + further))
    return torch.stack(tuple(each), dim=-1)
