"""Batches of tokens: synthetic, or from a memory-mapped file. A sequence depends on its global index alone, so every
mesh trains on the same data and data-parallel rank r reads rows [r n, (r + 1) n) of every global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planner.plan import Plan
from profiles.errors import ConfigError, unknown_name_error

TOKEN_TYPES = {"uint16": np.uint16, "uint32": np.uint32}

Batches = Callable[[int], tuple[Tensor, Tensor]]


def synthetic(plan: Plan, dp_rank: int, seed: int) -> Batches:
    """Uniform random token ids."""

    def sequence(index: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        return torch.randint(plan.model.vocab_size, (plan.training.seq_length + 1,), generator=generator)

    return _batches(plan, dp_rank, sequence)


def from_file(plan: Plan, dp_rank: int, path: Path, data_type: str) -> Batches:
    """Consecutive sequences of a file of token ids, from its start again at its end. Raises ConfigError."""
    if data_type not in TOKEN_TYPES:
        raise unknown_name_error("token type", data_type, TOKEN_TYPES, where="--data-dtype")
    length = plan.training.seq_length
    tokens = _mapped(path, data_type)
    num_sequences = (len(tokens) - 1) // length
    if num_sequences < 1:
        raise ConfigError(f"{path}: {len(tokens)} tokens, one sequence needs {length + 1}", hint="use a longer file")

    def sequence(index: int) -> Tensor:
        start = index % num_sequences * length
        ids = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        if int(ids.max()) >= plan.model.vocab_size:
            raise ConfigError(f"{path}: token id {int(ids.max())}, the vocabulary has {plan.model.vocab_size}", hint="check --data-dtype")
        return ids

    return _batches(plan, dp_rank, sequence)


def _mapped(path: Path, data_type: str) -> np.ndarray:
    try:
        return np.memmap(path, dtype=TOKEN_TYPES[data_type], mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as {data_type} tokens: {error}", hint="check --data and --data-dtype") from None


def _batches(plan: Plan, dp_rank: int, sequence: Callable[[int], Tensor]) -> Batches:
    """step -> (ids, targets), each [sequences of this rank, sequence length]; targets are the ids one token later."""
    rows = plan.training.global_batch_size // plan.mesh.dp

    def batch(step: int) -> tuple[Tensor, Tensor]:
        first = step * plan.training.global_batch_size + dp_rank * rows
        tokens = torch.stack([sequence(first + row) for row in range(rows)])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch
