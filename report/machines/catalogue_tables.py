"""The packaged models, clusters and software stacks as tables and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.error_band import stack_band
from parplan.planner.plan.oom_risk import default_margin
from parplan.planner.plan.prediction import Band
from parplan.planner.plan.traits import family_of
from parplan.profiles.machines.machine_catalog import (
    cluster_names,
    load_cluster,
    load_stack,
    stack_names,
)
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.machines.stack_terms import EVERY_STACK, shipped_terms
from parplan.profiles.models.model_catalog import family_members, load_model, model_names
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL, AttentionKernel, Stack
from parplan.profiles.units import GB, US_PER_S, format_count, gib, tflops
from parplan.report.json_result import JsonResult, fields_of
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
_SOURCE_WIDTH = 30  # characters of a model's source; --json has all
_LEAST_WIDTHS = {  # characters of a terminal that has room for a column of `plan models`
    "source": FIXED_WIDTH,
    "heads (kv)": 80,
    "hidden": 72,
    "batch": 72,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A packaged model or a member of a family, with its usual batch in sequences."""

    name: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    seq_length: int
    global_batch_size: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsDocument(JsonResult):
    """Every packaged model."""

    models: tuple[ModelRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """A packaged cluster: its GPU, its usual node, and the sources of its speeds.

    peak_tflops          dense, by precision
    link_gb_per_s        of a GPU to those of its node, in one direction
    nic_gb_per_s         of one NIC, in one direction
    speeds, collectives  fitted to measurements, carried from a like device, or assumed
    """

    name: str
    memory_gib: float
    memory_gb_per_s: float
    peak_tflops: Mapping[str, float]
    gpus_per_node: int
    link: str
    link_gb_per_s: float
    nics_per_node: int
    nic: str
    nic_gb_per_s: float
    speeds: str
    collectives: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersDocument(JsonResult):
    """Every packaged cluster."""

    clusters: tuple[ClusterRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedValue:
    """A fitted term of a stack, with the bounds of the fit in `unit`.

    rows   number of measured steps behind it
    """

    value: float
    low: float
    high: float
    unit: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRow(Stack):
    """A packaged stack: the facts of its file, and what was fitted to measured steps.

    terms          the fitted values by name
    time_band      band of 80 % around its step times
    memory_band    the same of memory
    memory_margin  share of a device's memory that is kept free by default
    """

    terms: Mapping[str, FittedValue]
    time_band: Band
    memory_band: Band
    memory_margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksDocument(JsonResult):
    """Every packaged stack."""

    stacks: tuple[StackRow, ...]


def model_rows() -> tuple[ModelRow, ...]:
    """Returns one row for each packaged model and each member of a family."""
    rows = []
    for entry in (*map(load_model, model_names()), *family_members()):
        spec = entry.spec
        training = TrainingSpec(
            global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
        )
        rows.append(
            ModelRow(
                name=spec.name,
                num_parameters=build_graph(spec, training, 1).num_parameters,
                num_layers=spec.num_layers,
                hidden_size=spec.hidden_size,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                seq_length=entry.seq_length,
                global_batch_size=entry.global_batch_size,
                source=entry.source,
            )
        )
    return tuple(rows)


def models_document() -> ModelsDocument:
    """Returns the models for `--json`."""
    return ModelsDocument(models=model_rows())


def print_models(out: Console) -> None:
    """Print the table of `plan models`, in a narrow terminal without some columns."""
    rows = [_cells(row) for row in model_rows()]
    heading = [name for name in rows[0] if out.width >= _LEAST_WIDTHS.get(name, 0)]
    cells = [[row[name] for name in heading] for row in rows]
    print_table(out, heading, cells, left=("name", "source"), indent=0)


def _cells(row: ModelRow) -> dict[str, str]:
    return {
        "name": row.name,
        "parameters": format_count(row.num_parameters),
        "layers": str(row.num_layers),
        "hidden": str(row.hidden_size),
        "heads (kv)": f"{row.num_heads} ({row.num_kv_heads})",
        "seq": str(row.seq_length),
        "batch": str(row.global_batch_size),
        "source": _shortened(row.source),
    }


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SOURCE_WIDTH else f"{line[: _SOURCE_WIDTH - 3]}..."


def cluster_rows() -> tuple[ClusterRow, ...]:
    """Returns one row for each packaged cluster: device, usual node, source of its speeds."""
    rows = []
    for name in cluster_names():
        cluster = load_cluster(name)
        device = cluster.device
        rows.append(
            ClusterRow(
                name=name,
                memory_gib=round(gib(device.memory_bytes), 2),
                memory_gb_per_s=round(device.memory_bytes_per_s / GB, 1),
                peak_tflops={
                    str(precision): round(tflops(peak), 3)
                    for precision, peak in device.peak_flops_per_s.items()
                },
                gpus_per_node=cluster.gpus_per_node,
                link=cluster.intra_node.name,
                link_gb_per_s=round(cluster.intra_node.bytes_per_s / GB, 2),
                nics_per_node=cluster.nics_per_node,
                nic=cluster.nic.name,
                nic_gb_per_s=round(cluster.nic.bytes_per_s / GB, 2),
                speeds=speeds_of(device.name),
                collectives=collectives_of(device.name),
            )
        )
    return tuple(rows)


def clusters_document() -> ClustersDocument:
    """Returns the clusters for `--json`."""
    return ClustersDocument(clusters=cluster_rows())


def speeds_of(device_name: str) -> str:
    """Names the source of a device's speeds: fitted, carried from a like device, or assumed."""
    profile = shipped_profile(device_name)
    if profile is None:
        return "assumed"
    product = profile.compute.forward
    if product.kind is not Kind.ANALYTIC:
        return "fitted"
    return "carried" if product.rows else "assumed"


def collectives_of(device_name: str) -> str:
    """Names the source of the speeds between the GPUs of a node, as `speeds_of` does."""
    profile = shipped_profile(device_name)
    if profile is None or "assumed" in profile.intra.source:
        return "assumed"
    return "fitted" if profile.intra.curves else "carried"


def print_clusters(out: Console) -> None:
    """Print the table of `plan clusters`."""
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
        "links",
    )
    rows = [
        (
            row.name,
            f"{row.memory_gib:.1f}",
            _peak(row.peak_tflops),
            f"{row.memory_gb_per_s:,.0f}",
            str(row.gpus_per_node),
            f"{row.link_gb_per_s:g}",
            str(row.nics_per_node),
            f"{row.nic_gb_per_s:g}",
            row.speeds,
            row.collectives,
        )
        for row in cluster_rows()
    ]
    print_table(out, heading, rows, left=("name", "speeds", "links"), indent=0)


def _peak(peaks: Mapping[str, float]) -> str:
    return f"{peaks['bf16']:g}" if "bf16" in peaks else "-"


def stack_rows() -> tuple[StackRow, ...]:
    """Returns one row for each packaged stack: facts, fitted terms, error bands."""
    terms = shipped_terms()
    rows = []
    for name in stack_names():
        stack = load_stack(name, terms)
        band = stack_band(name, terms)
        fitted = {
            term: FittedValue(
                value=fit.value, low=fit.low, high=fit.high, unit=fit.unit, rows=fit.rows
            )
            for term, fit in terms.stacks.get(stack.terms_of or name, {}).items()
        }
        rows.append(
            StackRow(
                **fields_of(stack),
                terms=fitted,
                time_band=band.time,
                memory_band=band.memory,
                memory_margin=default_margin(family_of(stack)).share,
            )
        )
    return tuple(rows)


def stacks_document() -> StacksDocument:
    """Returns the stacks for `--json`."""
    return StacksDocument(stacks=stack_rows())


def print_stacks(out: Console) -> None:
    """Print the table of `plan stacks`; a narrow terminal lacks fitted terms and hidden axes."""
    heading = ("name", "attention", "time +-", "memory +-", "fitted", "hides")
    num_columns = len(heading) if out.width >= FIXED_WIDTH else len(heading) - 2
    rows = [_stack_cells(row)[:num_columns] for row in stack_rows()]
    left = ("name", "attention", "hides", "fitted")
    print_table(out, heading[:num_columns], rows, left=left, indent=0)
    say(out)
    for note in STACK_NOTES:
        say(out, joined(note.split(" "), " ", out.width), "dim")


def _stack_cells(row: StackRow) -> tuple[str, ...]:
    return (
        row.name,
        _kernels(row),
        _band(row.time_band),
        _band(row.memory_band),
        f"{row.kernel_slowdown:.3g} x {row.host_operator_s * US_PER_S:.0f} us",
        _hidden(row),
    )


def _kernels(row: StackRow) -> str:
    """Names a stack's attention with its newest fused kernel: `flash (cudnn)`, `unfused`."""
    if row.attention != AttentionKernel.FLASH:
        return str(row.attention)
    newest = max(row.flash_kernels, key=lambda each: each.from_capability)
    return f"{row.attention} ({newest.kernel})"


def _hidden(row: StackRow) -> str:
    """Names the axes whose communication a stack hides under compute.

    The entry `sp` stands for tensor parallelism with sequence parallelism.
    """
    facts = (
        ("dp", "overlap_grad_reduce"),
        ("tp", "async_tensor_parallel"),
        ("sp", "overlap_tensor_parallel"),
        ("pp", "overlap_transfers"),
    )
    return ", ".join(name for name, fact in facts if getattr(row, fact)) or "-"


def _band(band: Band) -> str:
    """`4.1 % (700)`: the band and its number of rows; `(all 100)` if they are of every stack."""
    whose = f"all {band.rows:,}" if band.stack == EVERY_STACK else f"{band.rows:,}"
    return f"{percent(band.share)} ({whose})"
