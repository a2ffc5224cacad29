"""Describes this machine: its devices, their software, and the cluster that it forms.

The description contains no host names, paths or serial numbers. torch is imported only inside the
functions that ask it.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.driver_names import CATALOGUE, MEMORY_TOLERANCE
from parplan.profiles.machines.hardware import Cluster, Device
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.machines.user_profile import ProfileEnvironment, digest
from parplan.profiles.models.spec import Precision
from parplan.profiles.profiler.nvidia_smi import gpu_facts, node_links
from parplan.profiles.units import GB, TERA, US_PER_S, format_number

CPU = "cpu"
ASSUMED_LINK = "a100-80gb-pcie"  # the node of an unknown GPU: PCIe 4.0 x16, no NVLink
_PRODUCT, _COPY = "linear", "device_copy"  # works that measure the speed of a device
_IDENTITY = (  # fields that agree between points that belong together
    "device",
    "memory_bytes",
    "compute_capability",
    "num_sms",
    "torch",
    "cuda",
    "driver",
    "nccl",
    "cudnn",
    "cpu",
    "max_sm_clock_mhz",
    "power_limit_w",
)


def environment(device: str) -> ProfileEnvironment:
    """Describes `device` (cpu or cuda) of this machine. Raises ConfigError if torch sees no GPU."""
    import torch

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    host_bytes = _host_memory_bytes()
    here = ProfileEnvironment(
        date=datetime.date.today().isoformat(),
        device=CPU,
        num_devices=cores,
        memory_bytes=host_bytes and host_bytes // cores,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=_cpu_model(),
        num_cores=cores,
        host_memory_bytes=host_bytes,
    )
    return here if device == CPU else _with_gpu(here)


def _with_gpu(here: ProfileEnvironment) -> ProfileEnvironment:
    """Adds the GPUs that torch sees, described by the first."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no GPU here",
            hint="profile the host with --device cpu, or install a torch with CUDA",
        )
    first = torch.cuda.get_device_properties(0)
    libraries: Any = torch.backends
    cudnn = libraries.cudnn.version()
    # nvidia-smi and torch number GPUs differently, so it is asked by UUID, which is not stored.
    number = getattr(first, "uuid", None)
    facts: dict[str, Any] = gpu_facts(None if number is None else f"GPU-{number}")
    joined = node_links()
    return replace(
        here,
        device=first.name,
        num_devices=torch.cuda.device_count(),
        memory_bytes=first.total_memory,
        compute_capability=f"{first.major}.{first.minor}",
        num_sms=first.multi_processor_count,
        cuda=torch.version.cuda,
        nccl=_nccl_version(),
        cudnn=None if cudnn is None else str(cudnn),
        gpu_links=joined.gpus,
        nic_links=joined.nics,
        **facts,
    )


def _nccl_version() -> str | None:
    import torch

    library: Any = torch.cuda.nccl
    available = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return ".".join(map(str, library.version())) if available else None


def _host_memory_bytes() -> int | None:
    """The host's memory, or the limit of its control group where that is lower."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return min(whole, int(limit)) if limit.isdigit() else whole


def _cpu_model() -> str | None:
    return cpu_model_of(_text("/proc/cpuinfo")) or platform.processor() or None


def cpu_model_of(text: str) -> str | None:
    """The name of the processor in /proc/cpuinfo."""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def fingerprint(environment: ProfileEnvironment, precision: str = "") -> str:
    """A digest of the fields that agree between points that belong together.

    They are device and software, without the date and momentary clocks.
    """
    body = asdict(environment)
    return digest(repr([body[name] for name in _IDENTITY] + [precision]))


def cluster_of(environment: ProfileEnvironment, records: Iterable[Record] = ()) -> Cluster:
    """The cluster that this machine forms: one node with the devices that torch sees.

    A GPU of the catalogue gets its datasheet; the host, and a GPU outside the catalogue, get their
    best measured products and copies. Raises ConfigError if none was measured.
    """
    known = _catalogued(environment)
    if known is not None:
        return with_gpus(known, environment.num_devices, environment.num_devices)
    measured = list(records)
    base = load_cluster(CPU if environment.device == CPU else ASSUMED_LINK)
    base = with_gpus(base, environment.num_devices, environment.num_devices)
    pcie = _best(measured, "transfer", ("to_device_bytes_per_s", "from_device_bytes_per_s"))
    device = _device(environment, measured, base.device)
    host_bytes = environment.host_memory_bytes or base.host_memory_bytes
    return replace(
        base,
        name=device.name,
        device=device,
        host_memory_bytes=host_bytes,
        pcie_bytes_per_s=pcie or base.pcie_bytes_per_s,
    )


def missing_work(environment: ProfileEnvironment, records: Iterable[Record]) -> str | None:
    """The work that `records` need to tell the speed of this machine.

    None if they, or the catalogue, tell it.
    """
    measured = list(records)
    if _catalogued(environment) is not None:
        return None
    if not _peaks(measured):
        return _PRODUCT
    return _COPY if _best(measured, _COPY, ("copied_bytes_per_s",)) is None else None


def _catalogued(environment: ProfileEnvironment) -> Cluster | None:
    """The packaged cluster of a GPU whose memory and multiprocessors match its name."""
    name = CATALOGUE.get(environment.device)
    if name is None:
        return None
    cluster = load_cluster(name)
    device = cluster.device
    same_memory = (
        environment.memory_bytes is None
        or abs(environment.memory_bytes / device.memory_bytes - 1) < MEMORY_TOLERANCE
    )
    return cluster if same_memory and environment.num_sms in (None, device.num_sms) else None


def _device(environment: ProfileEnvironment, records: list[Record], assumed: Device) -> Device:
    """A device described by measurements: the bandwidth of copies, and peaks by precision."""
    peaks = _peaks(records)
    bytes_per_s = _best(records, _COPY, ("copied_bytes_per_s",))
    if not peaks or bytes_per_s is None:
        raise ConfigError(
            f"{environment.device} is not in the catalogue and {_COPY if peaks else _PRODUCT} was "
            "not measured on it",
            hint="measure it: plan profile",
        )
    host = environment.device == CPU
    return Device(
        name=CPU if host else re.sub(r"[^a-z0-9]+", "-", environment.device.lower()).strip("-"),
        memory_bytes=environment.memory_bytes or assumed.memory_bytes,
        memory_bytes_per_s=bytes_per_s,
        peak_flops_per_s=peaks,
        num_sms=1 if host else environment.num_sms or assumed.num_sms,
        context_bytes=_context_bytes(records, assumed),
        source=_source(environment, peaks, bytes_per_s),
        compute_capability=float(environment.compute_capability)
        if environment.compute_capability
        else None,
    )


def _source(environment: ProfileEnvironment, peaks: Mapping[str, float], bytes_per_s: float) -> str:
    """The source note of a device without a datasheet."""
    shown = ", ".join(
        f"{format_number(peak / TERA, 3)} {precision} TFLOP/s" for precision, peak in peaks.items()
    )
    of = (
        f"one core of {environment.cpu or 'the host'}"
        if environment.device == CPU
        else environment.device
    )
    copy = f"{format_number(bytes_per_s / GB, 3)} GB/s of its fastest copy"
    return f"measured on {of}: {shown} of its fastest product, {copy}; no datasheet"


def _peaks(records: Iterable[Record]) -> dict[str, float]:
    """The FLOP/s of the fastest product of linear layers, by precision."""
    peaks: dict[str, float] = {}
    for record in records:
        if (
            record.case.work == _PRODUCT
            and record.outcome is CaseOutcome.MEASURED
            and record.measured
        ):
            m = record.case.size("m")
            n = record.case.size("n")
            k = record.case.size("k")
            for timing in record.measured.times.values():
                precision = str(Precision(record.case.precision))
                peaks[precision] = max(
                    peaks.get(precision, 0.0), 2.0 * m * n * k * US_PER_S / timing.median_us
                )
    return peaks


def _best(records: Iterable[Record], work: str, names: tuple[str, ...]) -> float | None:
    """The largest of the named figures of a work."""
    figures = [
        record.measured.figures[name]
        for record in records
        if record.case.work == work and record.measured
        for name in names
        if name in record.measured.figures
    ]
    return max(figures, default=None)


def _context_bytes(records: Iterable[Record], assumed: Device) -> int:
    measured = _best(records, "allocator", ("context_bytes",))
    return assumed.context_bytes if measured is None else round(measured)
