"""Parses what nvidia-smi, rocm-smi, lspci, numactl and ibstat print of a machine.

Every function takes a text and returns what it recognises; a text without it gives nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parplan.profiles.documents.numbers import real_of, whole_of
from parplan.profiles.documents.ranges import COUNT
from parplan.profiles.documents.reader import parse_json
from parplan.profiles.documents.tables import rows_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.units import MIB

GPU_QUERY = "name,memory.total"  # of nvidia-smi --query-gpu
_NVLINK = re.compile(r"NV\d+")
_GPU = re.compile(r"GPU\d+")
_AMD = re.compile(r"MI\d{3}[AX]?")
# chips and boards as lspci prints them -> the name that nvidia-smi or rocm-smi would print
PCI_GPUS = (
    (r"A100 SXM4 80GB", "NVIDIA A100-SXM4-80GB"),
    (r"A100 SXM4 40GB", "NVIDIA A100-SXM4-40GB"),
    (r"A100 PCIe 80GB", "NVIDIA A100 80GB PCIe"),
    (r"A100 PCIe 40GB", "NVIDIA A100-PCIE-40GB"),
    (r"H100 SXM5 80GB", "NVIDIA H100 80GB HBM3"),
    (r"H100 PCIe", "NVIDIA H100 PCIe"),
    (r"H100 NVL", "NVIDIA H100 NVL"),
    (r"H200 SXM", "NVIDIA H200"),
    (r"H20\b", "NVIDIA H20"),
    (r"\[B200\]", "NVIDIA B200"),
    (r"L40S", "NVIDIA L40S"),
    (r"\[L4\]", "NVIDIA L4"),
    (r"RTX 4090", "NVIDIA GeForce RTX 4090"),
    (r"RTX 5090", "NVIDIA GeForce RTX 5090"),
    (r"RTX 3090", "NVIDIA GeForce RTX 3090"),
    (r"RTX A6000", "NVIDIA RTX A6000"),
    (r"MI250X", "AMD Instinct MI250X"),
    (r"MI300X", "AMD Instinct MI300X"),
    (r"MI325X", "AMD Instinct MI325X"),
    (r"MI355X", "AMD Instinct MI355X"),
)
PCI_NICS = {  # adapter -> Gbit/s of its fastest port (NVIDIA's data sheets of the adapters)
    "ConnectX-5": 100,
    "ConnectX-6": 200,
    "ConnectX-7": 400,
    "ConnectX-8": 800,
    "BlueField-3": 400,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpus:
    """The GPUs of a machine: their name, their number, and the bytes of one, None if not shown."""

    name: str
    count: int
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNics:
    """The network adapters of a machine at its highest rate, and what they speak."""

    count: int
    gbit_per_s: float
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNuma:
    """The NUMA domains of a machine, and the bytes of all."""

    domains: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLinks:
    """The links between GPUs: the size of the groups that NVLink joins, 1 where there is none."""

    joined_gpus: int
    kinds: Mapping[str, int] = field(default_factory=dict)


def gpus_of_nvidia_smi(text: str) -> SeenGpus | None:
    """Parses `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits`."""
    rows = [
        row for row in rows_of(text.splitlines(), "nvidia-smi", skips_spaces=True) if len(row) == 2
    ]
    if not rows:
        return None
    (name, mebibytes), _ = Counter(map(tuple, rows)).most_common(1)[0]
    memory = whole_of(mebibytes.strip(), COUNT)
    return SeenGpus(
        name=name.strip(),
        count=len(rows),
        memory_bytes=memory * MIB if memory else None,
    )


def gpus_of_rocm_smi(text: str) -> SeenGpus | None:
    """Parses `rocm-smi --showproductname --showmeminfo vram --json`; a die is a GPU."""
    try:
        cards = parse_json(text, "rocm-smi")
    except ConfigError:
        return None
    if not isinstance(cards, dict):
        return None
    found: Counter[tuple[str, int | None]] = Counter()
    for card, facts in cards.items():
        if not card.startswith("card") or not isinstance(facts, dict):
            continue
        model = _AMD.search(" ".join(str(value) for value in facts.values()))
        memory = facts.get("VRAM Total Memory (B)")
        if model:
            found[f"AMD Instinct {model[0]}", whole_of(memory)] += 1
    if not found:
        return None
    (name, memory_bytes), _ = found.most_common(1)[0]
    return SeenGpus(name=name, count=sum(found.values()), memory_bytes=memory_bytes)


def gpus_of_lspci(text: str) -> SeenGpus | None:
    """Parses `lspci`: the GPUs that no driver shows."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        known = (name for pattern, name in PCI_GPUS if re.search(pattern, line))
        name = next(known, None)
        if name is not None and re.search(r"3D|VGA|Display|accelerator", line):
            found[name] += 1
    if not found:
        return None
    name, count = found.most_common(1)[0]
    return SeenGpus(name=name, count=count)


def nics_of_lspci(text: str) -> SeenNics | None:
    """Parses `lspci`: InfiniBand and Ethernet adapters of known kinds, those of the fastest kind.

    A second port of an adapter is not counted.
    """
    found: Counter[int] = Counter()
    for line in text.splitlines():
        if not re.search(r"Infiniband controller|Ethernet controller", line):
            continue
        if re.match(r"\S+\.[1-7] ", line):
            continue
        for adapter, gbit_per_s in PCI_NICS.items():
            if adapter in line:
                found[gbit_per_s] += 1
    if not found:
        return None
    fastest = max(found)
    return SeenNics(count=found[fastest], gbit_per_s=fastest)


def nics_of_ibstat(text: str) -> SeenNics | None:
    """Parses `ibstat`: the active ports of the highest rate."""
    found: Counter[tuple[float, str]] = Counter(_active_ports(text))
    if not found:
        return None
    fastest, network = max(found)
    return SeenNics(count=found[fastest, network], gbit_per_s=fastest, network=network)


def _active_ports(text: str) -> Iterator[tuple[float, str]]:
    for port in re.split(r"\n\s*Port \d+:", text)[1:]:
        state = re.search(r"State:\s*(\w+)", port)
        rate = re.search(r"Rate:\s*([0-9.]{1,20})", port)
        layer = re.search(r"Link layer:\s*(\w+)", port)
        gbit_per_s = real_of(rate[1]) if rate else None
        if gbit_per_s and state and state[1] == "Active":
            ethernet = layer is not None and layer[1] == "Ethernet"
            yield gbit_per_s, "roce" if ethernet else "infiniband"


def numa_of_numactl(text: str) -> SeenNuma | None:
    """Parses `numactl --hardware`; domains without memory of their own are not counted."""
    found = re.findall(r"node [0-9]{1,6} size: ([0-9]{1,12}) MB", text)
    sizes = [int(size) for size in found if int(size)]
    if not sizes:
        return None
    return SeenNuma(domains=len(sizes), memory_bytes=sum(sizes) * MIB)


def links_of_topology(text: str) -> SeenLinks | None:
    """Parses the matrix of `nvidia-smi topo -m`: how many GPUs NVLink joins to the first one."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    columns = next((line for line in lines if line and _GPU.fullmatch(line[0])), [])
    if not columns:
        return None
    names = [name for name in columns if _GPU.fullmatch(name)]
    first = next((line for line in lines if line[:1] == ["GPU0"] and line is not columns), None)
    if first is None:
        return None
    kinds = first[1 : 1 + len(names)]
    joined = sum(bool(_NVLINK.fullmatch(kind)) for kind in kinds)
    return SeenLinks(joined_gpus=1 + joined, kinds=dict(sorted(Counter(kinds).items())))
