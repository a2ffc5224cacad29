"""Measured training steps -> the same configuration priced here: the honest look at the prices.

A row says what was run (columns of a steps table: gpu, n_gpus, layers, ..., dp, tp, pp, micro_batch, recompute). What a
row leaves open and the framework decides (attention kernel, gradient precision, overlap) is read off the framework's
name in `software_of`. A row that cannot be priced is returned with its reason, never dropped.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from costmodels.book import PriceBook
from costmodels.mesh import Mesh
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.step import price_step
from costmodels.strategy import Frame
from planner.estimate import default_blocks, uniform_strategy
from planner.space import illegal_frame, illegal_tensor_parallel
from profiles.catalog import load_cluster, with_gpus
from profiles.errors import ConfigError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.spec import AttentionKernel, ModelSpec, Norm, Positions, Precision, TrainingSpec
from profiles.units import GIB

Row = Mapping[str, str]

DEVICES = {
    "a100-80g": "a100-80gb", "a100-40g": "a100-40gb", "a100-sxm": "a100-80gb", "h100-80g": "h100-80gb", "h200-141g": "h200-141gb",
    "b200-180g": "b200-180gb", "v100-32g": "v100-32gb",
}
NEEDED = (
    "layers", "hidden", "heads", "ffn_hidden", "vocab", "seq_len", "global_batch", "n_gpus", "dp", "tp", "pp", "micro_batch", "recompute")
OPTIONAL = (
    "gpu", "gpus_per_node", "interconnect", "model", "kv_heads", "head_dim", "gated_ffn", "vpp", "cp", "experts", "sequence_parallel",
    "zero_stage", "dtype", "notes", "step_time_s", "derived_step_time_s", "peak_memory_gib")
PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16, "fp16/bf16": Precision.BF16}


class UnpricedError(Exception):
    """Why a row is outside what can be priced."""


@dataclass(frozen=True, slots=True)
class Software:
    """What a framework decides by itself."""

    attention: AttentionKernel
    dropout: float
    fp32_gradients: bool
    overlap: bool


@dataclass(frozen=True, slots=True)
class Priced:
    """One row: measured and predicted seconds, and GiB where the row has them; `reason` when it is not priced."""

    id: str
    source: str
    measured_s: float | None = None
    predicted_s: float | None = None
    measured_gib: float | None = None
    predicted_gib: float | None = None
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the step time: positive when the prediction is too slow."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s and self.measured_s else None

    @property
    def memory_error(self) -> float | None:
        return self.predicted_gib / self.measured_gib - 1 if self.predicted_gib and self.measured_gib else None


@dataclass(frozen=True, slots=True)
class SourceErrors:
    """The errors of one source; None where it has no priced row."""

    source: str
    rows: int
    priced: int
    mean_absolute: float | None
    median_absolute: float | None
    bias: float | None
    memory_mean_absolute: float | None
    memory_bias: float | None


def software_of(row: Row) -> Software:
    """Megatron before 2023 ran unfused attention with dropout; its 16-bit gradients were fp32 only under bf16."""
    framework, source = row["framework"], source_of(row)
    old = any(year in framework for year in ("2020", "2021", "2022", "microsoft"))
    bf16 = "bf16" in row["dtype"]
    return Software(
        attention=AttentionKernel.UNFUSED if old else AttentionKernel.FLASH,
        dropout=0.1 if old and source != "bloom" else 0.0,
        fp32_gradients=bf16, overlap="egatron" not in framework)


def source_of(row: Row) -> str:
    """The id prefix: the part before the first dash."""
    return row["id"].split("-")[0]


def _model(row: Row, dropout: float) -> ModelSpec:
    if _whole(row, "experts", 1) > 1:
        raise UnpricedError("mixture of experts")
    gated, heads, hidden = row["gated_ffn"] == "true", _whole(row, "heads"), _whole(row, "hidden")
    return ModelSpec(
        name=row["model"], num_layers=_whole(row, "layers"), hidden_size=hidden, num_heads=heads,
        num_kv_heads=_whole(row, "kv_heads", heads), head_dim=_whole(row, "head_dim", hidden // heads),
        ffn_hidden_size=_whole(row, "ffn_hidden"), vocab_size=_whole(row, "vocab"), max_seq_length=_whole(row, "seq_len"), dropout=dropout,
        gated_ffn=gated,
        norm=Norm.RMS_NORM if gated else Norm.LAYER_NORM, positions=Positions.ROTARY if gated else Positions.LEARNED,
        linear_bias=not gated, qkv_bias=not gated, tied_embeddings=not gated and "untied" not in row["notes"])


def _cluster(row: Row) -> Cluster:
    name = next((ours for theirs, ours in DEVICES.items() if row["gpu"].startswith(theirs)), None)
    if name is None:
        raise UnpricedError(f"no device profile for {row['gpu']}")
    cluster = load_cluster(name)
    gpus, per_node = _whole(row, "n_gpus"), _whole(row, "gpus_per_node", cluster.gpus_per_node)
    cluster = with_gpus(cluster, gpus, min(gpus, per_node))
    network = re.search(r"(\d+)x ?(\d+) ?Gb", row["interconnect"]) or re.search(r"()(\d+) Gb/s IB per node", row["interconnect"])
    if network:
        nics = int(network[1] or 1)
        cluster = replace(cluster, nics_per_node=nics, nic=replace(cluster.nic, bytes_per_s=int(network[2]) * 1e9 / 8))
    return cluster


def _recompute(row: Row) -> Recompute:
    word = row["recompute"].split()[0]
    if row["recompute"] not in ("none", "full", "selective", "none []", "selective core_attn"):
        raise UnpricedError(f"recompute {row['recompute']!r}")
    return Recompute(word)


def _training(row: Row, software: Software) -> TrainingSpec:
    if row["dtype"] not in PRECISIONS:
        raise UnpricedError(f"precision {row['dtype']!r}")
    precision = PRECISIONS[row["dtype"]]
    return TrainingSpec(
        global_batch_size=_whole(row, "global_batch"), seq_length=_whole(row, "seq_len"), precision=precision,
        gradient_precision=Precision.FP32 if software.fp32_gradients else precision, attention=software.attention,
        overlap_grad_reduce=software.overlap)


def _frame(row: Row) -> Frame:
    if _whole(row, "cp", 1) > 1:
        raise UnpricedError("context parallelism")
    mesh = Mesh(pp=_whole(row, "pp"), dp=_whole(row, "dp"), tp=_whole(row, "tp"))
    virtual_stages, micro_batch = _whole(row, "vpp", 1), _whole(row, "micro_batch")
    num_micro_batches = _whole(row, "global_batch") // (micro_batch * mesh.dp)
    plain = Schedule.ONE_F_ONE_B if num_micro_batches >= mesh.pp else Schedule.GPIPE  # the same order when the pipeline never fills
    return Frame(
        mesh=mesh, schedule=Schedule.INTERLEAVED if virtual_stages > 1 else plain, virtual_stages=virtual_stages,
        micro_batch_size=micro_batch, num_micro_batches=num_micro_batches,
        sequence_parallel=row["sequence_parallel"] == "true" and mesh.tp > 1)


def _price(row: Row) -> tuple[float, float]:
    """Predicted seconds and GiB of the fullest device, without the device context and communication buffers."""
    missing = [name for name in NEEDED if not row.get(name)]
    if missing:
        raise UnpricedError(f"{missing[0]} is not stated")
    software, frame = software_of(row), _frame(row)
    model, cluster, training = _model(row, software.dropout), _cluster(row), _training(row, software)
    if frame.mesh.num_ranks != cluster.num_gpus:
        raise UnpricedError("dp x tp x pp is not the number of GPUs")
    reason = illegal_tensor_parallel(frame.mesh.tp, model, cluster, across_nodes=True) or illegal_frame(frame, model, training)
    if reason:
        raise UnpricedError(re.sub(r"\b\d+\b", "N", reason))
    book = PriceBook(model, training, machine_for(cluster))
    blocks, zero = default_blocks(frame, model.num_layers), _whole(row, "zero_stage", 0)
    price = price_step(uniform_strategy(frame, blocks, zero=zero, recompute=_recompute(row), book=book), book)
    fullest = max(price.memory, key=lambda memory: memory.total)
    return price.step_s, (fullest.total - fullest.reserve) / GIB


def _whole(row: Row, name: str, default: int | None = None) -> int:
    """The whole number in a cell, or the default of an empty one. Raises UnpricedError."""
    if not row[name] and default is not None:
        return default
    try:
        return int(row[name])
    except ValueError:
        raise UnpricedError(f"{name} is no whole number") from None


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def price_row(row: Row) -> Priced:
    """The row priced as the configuration it states, or the reason why not."""
    try:
        predicted_s, predicted_gib = _price(row)
    except (UnpricedError, ConfigError) as error:
        return Priced(row["id"], source_of(row), reason=str(error))
    return Priced(
        row["id"], source_of(row), measured_s=_number(row["step_time_s"] or row.get("derived_step_time_s")), predicted_s=predicted_s,
        measured_gib=_number(row["peak_memory_gib"]), predicted_gib=predicted_gib)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a steps table. Raises ConfigError when the file cannot be read or lacks a needed column."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [dict.fromkeys(OPTIONAL, "") | row for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give a table of measured steps with --steps") from None
    if not rows:
        raise ConfigError(f"{path}: no rows", hint="give a table of measured steps with --steps")
    missing = [name for name in (*NEEDED, "id", "framework") if name not in rows[0]]
    if missing:
        raise ConfigError(f"{path}: no column {missing[0]}", hint="the columns of a steps table are listed in docs/")
    return rows


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def errors_of(source: str, priced: Iterable[Priced]) -> SourceErrors:
    """Mean and median absolute relative error and bias (mean relative error) of the rows of one source."""
    rows = [row for row in priced if row.source == source]
    times = [row.error for row in rows if row.error is not None]
    memories = [row.memory_error for row in rows if row.memory_error is not None]
    return SourceErrors(
        source=source, rows=len(rows), priced=len(times), mean_absolute=_mean(abs(e) for e in times),
        median_absolute=statistics.median(abs(e) for e in times) if times else None, bias=_mean(times),
        memory_mean_absolute=_mean(abs(e) for e in memories), memory_bias=_mean(memories))
