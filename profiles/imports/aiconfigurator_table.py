"""Reads AIConfigurator's tables: gemm_perf, context_attention_perf and nccl_perf as CSV text.

A row has the latency in ms, the device and the shape. Products and attention are those of the
forward pass of an inference engine. Source: ai-dynamo/aiconfigurator, the tables in
systems/data/<system>/; newer ones are Parquet files with the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parplan.profiles.documents.numbers import real
from parplan.profiles.documents.ranges import POSITIVE
from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.imported import (
    ImportedFile,
    attention_record,
    collective_record,
    product_record,
    whole_size,
)
from parplan.profiles.machines.measurements import Record
from parplan.profiles.profiler.communication.group_shapes import Shape

TOOL = "AIConfigurator"
LEAST = 64  # the smallest size of a product that counts
CAUSAL_SEQ = 512  # shorter prompts show the launch
ELEMENT_BYTES = 2
OPERATIONS = {"alltoall": "all_to_all"}
MOST_ROWS = 400  # of a table, evenly by size; a curve needs no more
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_MS = 1e-3
TableRow = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """One kind of table: its columns, the dtype's column, and the record of a row or None."""

    columns: tuple[str, ...]
    dtype: str
    record: Callable[[TableRow, str, str, str], Record | None]


def _product(row: TableRow, precision: str, source: str, where: str) -> Record | None:
    m, n, k = (_whole(row, name, where) for name in ("m", "n", "k"))
    if min(m, n, k) < LEAST:
        return None
    return product_record("forward", (m, n, k), _seconds(row, where), precision, source)


def _attention(row: TableRow, precision: str, source: str, where: str) -> Record | None:
    seq = _whole(row, "isl", where)
    heads = _whole(row, "num_heads", where)
    if seq < CAUSAL_SEQ or row.get("step", "0") not in ("", "0"):
        return None
    if row.get("window_size", "0") not in ("", "0"):
        return None
    size = (_whole(row, "batch_size", where) * heads, seq, _whole(row, "head_dim", where))
    kv_heads = whole_size(row["num_key_value_heads"] or "") or heads
    return attention_record(
        "flash_forward", size, kv_heads, _seconds(row, where), precision, source
    )


def _collective(row: TableRow, precision: str, source: str, where: str) -> Record | None:
    work = OPERATIONS.get(row["op_name"], row["op_name"])
    if work not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        return None
    shape = Shape(nodes=1, ranks_per_node=_whole(row, "num_gpus", where), groups=1)
    num_bytes = _whole(row, "message_size", where) * ELEMENT_BYTES
    return collective_record(work, num_bytes, shape, _seconds(row, where), precision, source)


_TABLES = (
    _Table(columns=("m", "n", "k"), dtype="gemm_dtype", record=_product),
    _Table(
        columns=("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
        dtype="attn_dtype",
        record=_attention,
    ),
    _Table(columns=("op_name", "num_gpus", "message_size"), dtype="nccl_dtype", record=_collective),
)


def is_aiconfigurator(header: Sequence[str]) -> bool:
    """Returns whether a CSV table's header is that of such a table."""
    return "latency" in header and any(
        {table.dtype, table.columns[0]} <= set(header) for table in _TABLES
    )


def read_aiconfigurator(rows: Sequence[TableRow], where: str, date: str) -> ImportedFile:
    """Returns the records of a table's rows in 16 bits. Raises ConfigError."""
    header = rows[0] if rows else {}
    table = next((each for each in _TABLES if each.dtype in header), None)
    if table is None:
        raise ConfigError(f"{where}: the table has no row", hint="give the whole table")
    for column in (*table.columns, "latency"):
        if column not in header:
            raise ConfigError(f"{where}: the column {column} is missing", hint="give whole rows")
    records: list[Record] = []
    for number, row in enumerate(rows, start=2):
        precision = PRECISIONS.get(row[table.dtype] or "")
        source = f"{TOOL} {row.get('framework', '')} {row.get('version', '')}, {date}"
        made = precision and table.record(row, precision, source, f"{where}:{number}")
        if made:
            records.append(made)
    records.sort(key=lambda record: record.case.sizes)
    step = -(-len(records) // MOST_ROWS) or 1
    kept = tuple(records[::step])
    left = len(rows) - len(kept)
    return ImportedFile(
        tool=TOOL,
        records=kept,
        driver_name=header.get("device") or None,
        left_out=(f"{left} rows in other precisions, too small, or between others",)
        if left
        else (),
    )


def _whole(row: TableRow, name: str, where: str) -> int:
    size = whole_size(row[name] or "")
    if size is None:
        raise ConfigError(
            f"{where}: {name} is {row[name]!r}, needed is a size", hint="correct that row"
        )
    return size


def _seconds(row: TableRow, where: str) -> float:
    return real(row["latency"], "latency in ms", where, POSITIVE, "correct that row") * _MS
