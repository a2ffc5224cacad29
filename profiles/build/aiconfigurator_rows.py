"""Rows of ai-dynamo/aiconfigurator (Apache-2.0) in the shape of the tables of measurements.

`python -m parplan.profiles.build.aiconfigurator_rows --repository CLONE.git --out DIR` writes
matmul.csv, attention.csv and collectives.csv for the machines of `SYSTEMS`, which the tables lack.
It needs pyarrow, which is no dependency of the project. `--measurements` of the builder takes DIR
as a second directory.

The products are a sample: every `STEP`-th shape in the order of its sizes. A shape whose time
differs by more than `DIFFERS` between the two inference engines is flagged, as in the tables.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.profiles.imports.aiconfigurator_table import (
    CAUSAL_SEQ,
    ELEMENT_BYTES,
    LEAST,
    OPERATIONS,
)

SOURCE = "ai-dynamo/aiconfigurator"
DATA = "HEAD:aic-core/src/aiconfigurator_core/systems/data"
STEP = 17
DIFFERS = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A machine of the source: its folder, its name in the tables, and the runs that count.

    checked  the run of products that `other_run_differs` compares with
    kernel   the fused attention of the source, and its name in the tables
    collectives  empty where the tables have them
    """

    folder: str
    gpu: str
    products: str
    checked: str
    attention: str
    kernel: tuple[str, str]
    collectives: str = ""
    link: str = ""


SYSTEMS = (
    System(
        folder="rtx_pro_6000_server",
        gpu="RTX-PRO-6000-96GB",
        products="gemm/sglang/0.5.14",
        checked="gemm/vllm/0.24.0",
        attention="attention/vllm/0.24.0",
        kernel=("vllm_flash_attn_fa2", "flash2"),
        collectives="comm/nccl/2.29.2",
        link="pcie5",
    ),
    # b300_sxm has the same file of products, which names GB300 as its device
    System(
        folder="gb300",
        gpu="GB300",
        products="gemm/sglang/0.5.14",
        checked="gemm/vllm/0.24.0",
        attention="attention/vllm/0.24.0",
        kernel=("vllm_flashinfer_trtllmprefill", "flash_trtllm"),
    ),
)
COLUMNS = {
    "matmul": "gpu,dtype,m,n,k,direction,pass,role,tp,time_us,tflops,source,flag",
    "attention": "gpu,dtype,kernel,batch,heads,kv_heads,seq,head_dim,v_head_dim,causal,direction,"
    "time_us,tflops,source,flag",
    "collectives": "gpu,collective,nodes,ranks_per_node,ranks,bytes,dtype,time_us,busbw_gbps,link,"
    "source,flag",
}


def _table(repository: Path, system: System, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a parquet file of the newest commit of a bare clone."""
    parquet = importlib.import_module("pyarrow.parquet")
    command = ["git", f"--git-dir={repository}", "show", f"{DATA}/{system.folder}/{name}.parquet"]
    read = subprocess.run(command, check=True, capture_output=True).stdout
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(read)).to_pylist()
    return rows


def _products(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int, int], float]:
    """Returns the microseconds of products in bf16, by m, n and k."""
    return {
        (row["m"], row["n"], row["k"]): row["latency"] * 1e3
        for row in rows
        if row["gemm_dtype"] == "bfloat16" and min(row["m"], row["n"], row["k"]) >= LEAST
    }


def _matmul(repository: Path, system: System) -> Iterator[tuple[Any, ...]]:
    times_us = _products(_table(repository, system, f"{system.products}/gemm_perf"))
    others_us = _products(_table(repository, system, f"{system.checked}/gemm_perf"))
    source = f"{SOURCE} {system.folder}/{system.products}"
    for size in sorted(times_us)[::STEP]:
        m, n, k = size
        time_us = times_us[size]
        ratio = others_us.get(size, time_us) / time_us
        flag = "" if 1 / DIFFERS <= ratio <= DIFFERS else "other_run_differs"
        speed = (round(time_us, 3), round(2 * m * n * k / time_us / 1e6, 1))
        yield (system.gpu, "bf16", *size, "forward", "y", "", 1, *speed, source, flag)


def _attention(repository: Path, system: System) -> Iterator[tuple[Any, ...]]:
    rows = _table(repository, system, f"{system.attention}/context_attention_perf")
    source = f"{SOURCE} {system.folder}/{system.attention}"
    theirs, ours = system.kernel
    counted = [
        row
        for row in rows
        if row["kernel_source"] == theirs
        and row["kv_cache_dtype"] == "bfloat16"
        and not row["step"]
        and not row["window_size"]
        and row["isl"] >= CAUSAL_SEQ
    ]
    counted.sort(key=lambda row: (row["batch_size"], row["isl"], row["num_heads"], row["head_dim"]))
    for row in counted[::STEP]:
        seq, head_dim = row["isl"], row["head_dim"]
        time_us = row["latency"] * 1e3
        shape = (row["batch_size"], row["num_heads"], row["num_key_value_heads"], seq)
        flops = 2 * row["batch_size"] * row["num_heads"] * seq**2 * head_dim
        timing = (round(time_us, 3), round(flops / time_us / 1e6, 1))
        way = (head_dim, head_dim, 1, "forward", *timing, source, "with_kv_cache_write")
        yield (system.gpu, "bf16", ours, *shape, *way)


def _collectives(repository: Path, system: System) -> Iterator[tuple[Any, ...]]:
    if not system.collectives:
        return
    source = f"{SOURCE} {system.folder}/{system.collectives}"
    for row in _table(repository, system, f"{system.collectives}/nccl_perf"):
        if row["nccl_dtype"] != "half":
            continue
        name, ranks = OPERATIONS.get(row["op_name"], row["op_name"]), row["num_gpus"]
        n_bytes, time_us = row["message_size"] * ELEMENT_BYTES, row["latency"] * 1e3
        moved = n_bytes * (1 - 1 / ranks) * (2 if name == "all_reduce" else 1)
        speed = (round(time_us, 3), round(moved / time_us / 1e3, 2))
        yield (system.gpu, name, 1, ranks, ranks, n_bytes, "fp16", *speed, system.link, source, "")


READERS = {"matmul": _matmul, "attention": _attention, "collectives": _collectives}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the tables and prints their lengths."""
    parser = argparse.ArgumentParser(prog="python -m parplan.profiles.build.aiconfigurator_rows")
    parser.add_argument("--repository", type=Path, required=True, help="a bare clone of the source")
    parser.add_argument("--out", type=Path, required=True, help="directory of the CSV tables")
    options = parser.parse_args(arguments)
    for table, read in READERS.items():
        rows = [row for system in SYSTEMS for row in read(options.repository, system)]
        with (options.out / f"{table}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS[table].split(","))
            writer.writerows(rows)
        sys.stdout.write(f"{table}: {len(rows)} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
