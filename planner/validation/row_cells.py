"""The cells of a row of a table of measured steps: the columns that are read, and their values.

The columns are those of docs/accuracy.md. An empty cell is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import COUNT, Range

Row = Mapping[str, str]

NEEDED = (
    "layers",
    "hidden",
    "heads",
    "ffn_hidden",
    "seq_len",
    "global_batch",
    "n_gpus",
    "dp",
    "tp",
    "pp",
)
# cells that few rows have: settings that their recipes state (row_recipes.py)
MORE = (
    "latent",  # ranks of queries and keys, head widths of keys, of positions and of values
    "shared_ffn_hidden",
    "dense_layers",  # first blocks without experts
    "mtp_layers",
    "layer_pattern",  # letters of a hybrid's blocks, as Megatron-LM writes them
    "state_space",  # heads, their width, state size and groups
    "pipeline_layout",  # of the virtual stages, as Megatron-LM writes it
    "positions",
    "qk_norm",
    "tied",
    "vocab_multiple",
    "moments",  # type of the optimizer's moments
    "gradients",  # type in which gradients are summed and reduced: bf16, fp16 or fp32
    "narrow_weights",  # true: weights of narrow products are gathered in their format
    "offload",  # modules whose activations go to the host, as Megatron-LM names them
    "deterministic",  # true: only kernels that give equal bits in every run
    "overlap",  # grad: gradients are reduced under the backward pass
    "engine",  # local: without Transformer Engine
    "grouped_gemm",  # experts run in one product of Transformer Engine
    "lora_rank",
    "lora_targets",
)
OPTIONAL = (
    "gpu",
    "gpus_per_node",
    "interconnect",
    "model",
    "vocab",
    "kv_heads",
    "head_dim",
    "gated_ffn",
    "micro_batch",
    "recompute",
    "vpp",
    "cp",
    "ep",
    "experts",
    "top_k",
    "moe_ffn_hidden",
    "tokens_per_s_per_gpu",
    "sequence_parallel",
    "zero_stage",
    "dtype",
    "notes",
    "step_time_s",
    "derived_step_time_s",
    "peak_memory_gib",
    "memory_kind",
    "run_type",
    *MORE,
)


ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


class UnpricedError(Exception):
    """A row that cannot be priced, with the reason."""


def source_of(row: Row) -> str:
    """Returns the part of the id before the first dash."""
    return row["id"].split("-")[0]


def is_true(row: Row, name: str) -> bool:
    """Reads a cell of true or false; an empty cell is false. Raises UnpricedError."""
    if row[name].lower() not in ("", "true", "false"):
        raise UnpricedError(f"{name} is neither true nor false")
    return row[name].lower() == "true"


def whole(row: Row, name: str, default: int | None = None) -> int:
    """Reads a whole number; an empty cell has the default. Raises UnpricedError."""
    if not row.get(name):
        if default is None:
            raise UnpricedError(f"{name} is not stated")
        return default
    number = whole_of(row[name])
    if number is None:
        raise UnpricedError(f"{name} is no whole number")
    return number


def choice(row: Row, name: str, kind: type[ChoiceT]) -> ChoiceT | None:
    """Reads one of the values of `kind`, None from an empty cell. Raises UnpricedError."""
    stated = row.get(name)
    if stated and stated not in list(kind):
        raise UnpricedError(f"{name} is {stated!r}, known are {', '.join(kind)}")
    return kind(stated) if stated else None


def numbers(row: Row, name: str, count: int) -> tuple[int, ...]:
    """Reads whole numbers with spaces between them. Raises UnpricedError."""
    found = [whole_of(word, Range(0, COUNT.high)) for word in row[name].split()]
    known = tuple(number for number in found if number is not None)
    if len(known) != count or len(found) != count:
        raise UnpricedError(f"{name} is not made of {count} whole numbers")
    return known
