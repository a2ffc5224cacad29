"""The models, clusters and software stacks that come with the planner, as rows for people and for
programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from parplan.planner.plan.error_band import stack_band
from parplan.profiles.catalog import (
    cluster_names,
    family_members,
    load_cluster,
    load_model,
    load_stack,
    model_names,
    stack_names,
)
from parplan.profiles.documents.schema import document
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.machines.stack_terms import EVERY_STACK, shipped_terms
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from parplan.profiles.units import GB, US_PER_S, format_count, gib, tflops
from parplan.report.text import FIXED_WIDTH, joined, percent, print_table, say

STACK_NOTES = (
    "attention: with the newest fused kernel; a device gets the newest that it can run (--json "
    "has all, by architecture)",
    "time, memory: eight in ten of so many measured rows, whose fit had not seen them, were "
    "within; `all`: of every stack",
    "fitted: by what factor kernels take longer than alone, and the host's time for one operator "
    "(plan validate --fitted)",
    "hides: the axes whose communication runs under compute; sp: tensor parallelism with sequence "
    "parallelism",
)
_SOURCE_WIDTH = 30  # of where a model's shape comes from; --json has it whole


def model_rows() -> list[dict[str, Any]]:
    """One mapping a packaged model, and one a member of a family."""
    rows = []
    for entry in (*map(load_model, model_names()), *family_members()):
        spec = entry.spec
        training = TrainingSpec(
            global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
        )
        rows.append(
            {
                "name": spec.name,
                "num_parameters": build_graph(spec, training, 1).num_parameters,
                "num_layers": spec.num_layers,
                "hidden_size": spec.hidden_size,
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "seq_length": entry.seq_length,
                "global_batch_size": entry.global_batch_size,
                "source": entry.source,
            }
        )
    return rows


def print_models(out: Console) -> None:
    """The table of `plan models`."""
    with_source = out.width >= FIXED_WIDTH
    heading = (
        "name",
        "parameters",
        "layers",
        "hidden",
        "heads (kv)",
        "seq",
        "batch",
        *(("source",) if with_source else ()),
    )
    rows = [
        (*_cells(row), *((_shortened(row["source"]),) if with_source else ()))
        for row in model_rows()
    ]
    print_table(out, heading, rows, left=("name", "source"), indent=0)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    heads = f"{row['num_heads']} ({row['num_kv_heads']})"
    sizes = (str(row[name]) for name in ("seq_length", "global_batch_size"))
    return (
        row["name"],
        format_count(row["num_parameters"]),
        str(row["num_layers"]),
        str(row["hidden_size"]),
        heads,
        *sizes,
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SOURCE_WIDTH else f"{line[: _SOURCE_WIDTH - 3]}..."


def cluster_rows() -> list[dict[str, Any]]:
    """One mapping a packaged cluster: its device, its usual node, and whether its speeds are fitted
    to measurements.
    """
    rows = []
    for name in cluster_names():
        cluster = load_cluster(name)
        device = cluster.device
        rows.append(
            {
                "name": name,
                "memory_gib": round(gib(device.memory_bytes), 2),
                "memory_gb_per_s": round(device.memory_bytes_per_s / GB, 1),
                "peak_tflops": {
                    str(precision): round(tflops(peak), 3)
                    for precision, peak in device.peak_flops_per_s.items()
                },
                "gpus_per_node": cluster.gpus_per_node,
                "link": cluster.intra_node.name,
                "link_gb_per_s": round(cluster.intra_node.bytes_per_s / GB, 2),
                "nics_per_node": cluster.nics_per_node,
                "nic": cluster.nic.name,
                "nic_gb_per_s": round(cluster.nic.bytes_per_s / GB, 2),
                "speeds": speeds_of(device.name),
            }
        )
    return rows


def speeds_of(device_name: str) -> str:
    """What the speeds of a device rest on: its own measurements, a like device's, or its
    datasheet.
    """
    profile = shipped_profile(device_name)
    if profile is None:
        return "assumed"
    product = profile.compute.forward
    if product.kind is not Kind.ANALYTIC:
        return "fitted"
    return "carried" if product.rows else "assumed"


def print_clusters(out: Console) -> None:
    """The table of `plan clusters`."""
    heading = (
        "name",
        "GiB",
        "bf16 TFLOP/s",
        "GB/s",
        "GPUs",
        "link GB/s",
        "NICs",
        "NIC GB/s",
        "speeds",
    )
    rows = [
        (
            row["name"],
            f"{row['memory_gib']:.1f}",
            _peak(row["peak_tflops"]),
            f"{row['memory_gb_per_s']:,.0f}",
            str(row["gpus_per_node"]),
            f"{row['link_gb_per_s']:g}",
            str(row["nics_per_node"]),
            f"{row['nic_gb_per_s']:g}",
            row["speeds"],
        )
        for row in cluster_rows()
    ]
    print_table(out, heading, rows, left=("name", "speeds"), indent=0)


def _peak(peaks: Mapping[str, float]) -> str:
    return f"{peaks['bf16']:g}" if "bf16" in peaks else "-"


def stack_rows() -> list[dict[str, Any]]:
    """One mapping a packaged stack: its facts, its fitted terms with their bounds, and the error
    bands of its prices.
    """
    terms, rows = shipped_terms(), []
    for name in stack_names():
        stack, band = load_stack(name, terms), stack_band(name, terms)
        fitted = {
            term: {
                "value": found.value,
                "low": found.low,
                "high": found.high,
                "unit": found.unit,
                "rows": found.rows,
            }
            for term, found in terms.stacks.get(stack.terms_of or name, {}).items()
        }
        rows.append(
            {
                **document(stack),
                "terms": fitted,
                "time_band": document(band.time),
                "memory_band": document(band.memory),
                "memory_margin": terms.residuals_of(name).memory_margin,
            }
        )
    return rows


def print_stacks(out: Console) -> None:
    """The table of `plan stacks`: what each stack does, its error bands, and how much slower
    kernels and host are fitted to be.
    """
    found, wide = stack_rows(), out.width >= FIXED_WIDTH
    heading = ("name", "attention", "time +-", "memory +-", *(("fitted", "hides") if wide else ()))
    rows = [
        (
            row["name"],
            _kernels(row),
            _band(row["time_band"]),
            _band(row["memory_band"]),
            *(
                (
                    f"{row['kernel_slowdown']:.3g} x {row['host_operator_s'] * US_PER_S:.0f} us",
                    _hidden(row),
                )
                if wide
                else ()
            ),
        )
        for row in found
    ]
    print_table(out, heading, rows, left=("name", "attention", "hides", "fitted"), indent=0)
    say(out)
    for note in STACK_NOTES:
        say(out, joined(note.split(" "), " ", out.width), "dim")


def _kernels(row: Mapping[str, Any]) -> str:
    """The attention of a stack with its newest fused kernel: `flash (cudnn)`, `unfused`."""
    if row["attention"] != AttentionKernel.FLASH:
        return str(row["attention"])
    newest = max(row["flash_kernels"], key=lambda each: each["from_capability"])
    return f"{row['attention']} ({newest['kernel']})"


def _hidden(row: Mapping[str, Any]) -> str:
    """The axes whose communication a stack hides under compute; sp: tensor parallelism with
    sequence parallelism.
    """
    facts = (
        ("dp", "overlap_grad_reduce"),
        ("tp", "async_tensor_parallel"),
        ("sp", "overlap_tensor_parallel"),
        ("pp", "overlap_transfers"),
    )
    return ", ".join(name for name, fact in facts if row[fact]) or "-"


def _band(band: Mapping[str, Any]) -> str:
    """`4.1 % (700)`: the band and its rows; `(all 100)` where they are those of every stack."""
    whose = f"all {band['rows']:,}" if band["stack"] == EVERY_STACK else f"{band['rows']:,}"
    return f"{percent(band['share'])} ({whose})"
