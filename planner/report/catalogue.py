"""The models and clusters that come with the planner, as rows for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from rich.console import Console

from planner.report.text import FIXED_WIDTH, print_table
from profiles.catalog import cluster_names, load_cluster, load_model, model_names
from profiles.spec import TrainingSpec
from profiles.transformer import build_graph
from profiles.units import GB, format_count, gib, tflops

_SOURCE_WIDTH = 30  # of where a model's shape comes from; --json has it whole


def model_rows() -> list[dict[str, Any]]:
    """One mapping a packaged model."""
    rows = []
    for name in model_names():
        entry = load_model(name)
        spec = entry.spec
        training = TrainingSpec(global_batch_size=entry.global_batch_size, seq_length=entry.seq_length)
        rows.append({
            "name": name, "num_parameters": build_graph(spec, training, 1).num_parameters, "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
            "seq_length": entry.seq_length, "global_batch_size": entry.global_batch_size, "source": entry.source})
    return rows


def print_models(out: Console) -> None:
    """The table of `plan models`."""
    with_source = out.width >= FIXED_WIDTH
    heading = ("name", "parameters", "layers", "hidden", "heads (kv)", "seq", "batch", *(("source",) if with_source else ()))
    rows = [(*_cells(row), *((_shortened(row["source"]),) if with_source else ())) for row in model_rows()]
    print_table(out, heading, rows, left=("name", "source"), indent=0)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    heads = f"{row['num_heads']} ({row['num_kv_heads']})"
    sizes = (str(row[name]) for name in ("seq_length", "global_batch_size"))
    return row["name"], format_count(row["num_parameters"]), str(row["num_layers"]), str(row["hidden_size"]), heads, *sizes


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SOURCE_WIDTH else f"{line[: _SOURCE_WIDTH - 3]}..."


def cluster_rows() -> list[dict[str, Any]]:
    """One mapping a packaged cluster: its device, its usual node, and whether its speeds are fitted to measurements."""
    rows = []
    for name in cluster_names():
        cluster = load_cluster(name)
        device = cluster.device
        rows.append({
            "name": name, "memory_gib": round(gib(device.memory_bytes), 2), "memory_gb_per_s": round(device.memory_bytes_per_s / GB, 1),
            "peak_tflops": {str(precision): round(tflops(peak), 3) for precision, peak in device.peak_flops_per_s.items()},
            "gpus_per_node": cluster.gpus_per_node, "link": cluster.intra_node.name,
            "link_gb_per_s": round(cluster.intra_node.bytes_per_s / GB, 2), "nics_per_node": cluster.nics_per_node,
            "nic": cluster.nic.name, "nic_gb_per_s": round(cluster.nic.bytes_per_s / GB, 2),
            "speeds": "fitted" if has_profile(device.name) else "assumed"})
    return rows


def has_profile(device_name: str) -> bool:
    """Whether a hardware profile built from measurements ships for this device."""
    return files("profiles").joinpath("data", f"{device_name}.yaml").is_file()


def print_clusters(out: Console) -> None:
    """The table of `plan clusters`."""
    heading = ("name", "GiB", "bf16 TFLOP/s", "GB/s", "GPUs", "link GB/s", "NICs", "NIC GB/s", "speeds")
    rows = [(
        row["name"], f"{row['memory_gib']:.1f}", _peak(row["peak_tflops"]), f"{row['memory_gb_per_s']:,.0f}", str(row["gpus_per_node"]),
        f"{row['link_gb_per_s']:g}", str(row["nics_per_node"]), f"{row['nic_gb_per_s']:g}", row["speeds"],
    ) for row in cluster_rows()]
    print_table(out, heading, rows, left=("name", "speeds"), indent=0)


def _peak(peaks: Mapping[str, float]) -> str:
    return f"{peaks['bf16']:g}" if "bf16" in peaks else "-"
