"""Reads SimuMax's system file (configs/system/*.json): efficiencies of products and attention.

An efficiency is FLOP/s over the file's `tflops`, so that the time of a shape follows:

    product of b x (m, k) x (k, n)   t = 2 b m k n / (tflops efficiency)
    attention, forward               t = 2 b s^2 h (d_qk + d_v) / (tflops efficiency)
    attention, backward              t = 5 b s^2 h (d_qk + d_v) / (tflops efficiency)

The layouts TN, NN and NT are the forward product, the gradient of the input and that of the weight.
Source: MooreThreads/SimuMax, docs/system.md and simu_tools/efficency_test/test_gemm_efficiency.py
and test_fa_efficiency.py. Default factors and networks are no measurements and stay outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.imported import (
    ImportedFile,
    attention_record,
    mapping_at,
    needed,
    positive,
    product_record,
    whole_size,
)
from parplan.profiles.machines.measurements import Record
from parplan.profiles.units import TERA

TOOL = "SimuMax"
PRECISION = "bf16"
_CURVES = {"TN": "forward", "NN": "input_gradient", "NT": "weight_gradient"}
_ATTENTION = {"sdp_fwd": ("flash_forward", 2), "sdp_bwd": ("flash_backward", 5)}
_MEASURED = "accurate_efficient_factor"
_OUTSIDE = ("fp8_matmul", "group_matmul", "fp8_group_matmul")
_KEYS = {
    "matmul": ("b", "m", "k", "n", "layout"),
    "sdp": ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim"),
}


def is_simumax(body: Any) -> bool:
    """Returns whether a document is a system file of SimuMax."""
    return isinstance(body, Mapping) and "sys_name" in body and "accelerator" in body


def read_simumax(body: Any, where: str, date: str) -> ImportedFile:
    """Returns the records of a file. Raises ConfigError for missing fields and broken shapes."""
    operators = mapping_at(body, "accelerator.op", where, TOOL)
    source = f"{TOOL} {needed(body, 'sys_name', where, TOOL)}, {date}"
    left_out: Counter[str] = Counter()
    records = [
        *_products(operators, where, source, left_out),
        *_attention(operators, where, source, left_out),
    ]
    for name in _OUTSIDE:
        rows = len(_factors(operators, name, where)) if name in operators else 0
        if rows:
            left_out[f"{name}: only relative speeds of such products are priced"] += rows
    if "networks" in body:
        left_out["networks: fitted bandwidths, no measured sizes"] += 1
    return ImportedFile(
        tool=TOOL,
        records=tuple(records),
        num_devices=round(positive(body.get("num_per_node"), "num_per_node", where)),
        left_out=tuple(f"{count} of {reason}" for reason, count in left_out.items()),
    )


def _rows(
    operators: Mapping[str, Any], name: str, where: str
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yields the shapes of an operator, as text and by key, with FLOP/s that they reached."""
    if name not in operators:
        return
    path = f"accelerator.op.{name}"
    peak_at = f"{path}.tflops"
    body = {"accelerator": {"op": operators}}
    peak = positive(needed(body, peak_at, where, TOOL), peak_at, where)
    for text, efficiency in _factors(operators, name, where).items():
        shape = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        for key in _KEYS[name.split("_")[0]]:
            if key not in shape:
                raise ConfigError(
                    f"{where}: {path}: {key} is missing in {text!r}",
                    hint=f"give the whole file of {TOOL}",
                )
        yield text, shape, peak * TERA * positive(efficiency, f"{path}: {text}", where)


def _factors(operators: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Returns the efficiencies of an operator by shape, none where the file has none."""
    body = {"accelerator": {"op": operators}}
    path = f"accelerator.op.{name}"
    if _MEASURED not in mapping_at(body, path, where, TOOL):
        return {}
    return mapping_at(body, f"{path}.{_MEASURED}", where, TOOL)


def _products(
    operators: Mapping[str, Any], where: str, source: str, left_out: Counter[str]
) -> Iterator[Record]:
    for text, shape, flops_per_s in _rows(operators, "matmul", where):
        batch, m, k, n = (_size(shape[key], text, where) for key in ("b", "m", "k", "n"))
        curve = _CURVES.get(shape["layout"])
        if batch != 1 or curve is None:
            left_out["matmul: batched, or of another layout than TN, NN and NT"] += 1
            continue
        seconds = 2 * m * k * n / flops_per_s
        yield product_record(curve, (m, n, k), seconds, PRECISION, source)


def _attention(
    operators: Mapping[str, Any], where: str, source: str, left_out: Counter[str]
) -> Iterator[Record]:
    for name, (curve, factor) in _ATTENTION.items():
        for text, shape, flops_per_s in _rows(operators, name, where):
            batch, seq, heads, kv_heads, qk_dim, v_dim = (
                _size(shape[key], text, where) for key in _KEYS["sdp"]
            )
            if qk_dim != v_dim:
                left_out[f"{name}: heads of keys and of values of unlike widths"] += 1
                continue
            seconds = factor * batch * seq**2 * heads * (qk_dim + v_dim) / flops_per_s
            size = (batch * heads, seq, qk_dim)
            yield attention_record(curve, size, kv_heads, seconds, PRECISION, source)


def _size(text: str, row: str, where: str) -> int:
    size = whole_size(text)
    if size is None:
        raise ConfigError(
            f"{where}: {text!r} in {row!r} is no size", hint=f"give the file as {TOOL} wrote it"
        )
    return size
