"""The names that drivers have for GPUs, and the packaged machines of these GPUs."""

from __future__ import annotations

from parplan.profiles.machines.machine_catalog import load_cluster, packaged_cluster

# torch's name of a GPU -> its cluster in configs/clusters. The whole name counts, because a part of
# a GPU (MIG) is another device.
CATALOGUE = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "A100-PCIE-40GB": "a100-40gb-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA A800-SXM4-80GB": "a800-80gb",
    "NVIDIA A10G": "a10g-24gb",
    "A10G": "a10g-24gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H800": "h800-80gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA GB200": "gb200-186gb",
    "NVIDIA B300 SXM6 AC": "b300-270gb",
    "NVIDIA GB300": "gb300-279gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA H100 PCIe": "h100-80gb-pcie",
    "NVIDIA H100 NVL": "h100-94gb-nvl",
    "NVIDIA H20": "h20-96gb",
    "NVIDIA GeForce RTX 4090": "rtx4090-24gb",
    "NVIDIA GeForce RTX 5090": "rtx5090-32gb",
    "NVIDIA RTX A6000": "rtxa6000-48gb",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000-96gb",
    "AMD Instinct MI250X": "mi250x-64gb",
    "AMD Instinct MI300X": "mi300x-192gb",
    "AMD Instinct MI325X": "mi325x-256gb",
    "AMD Instinct MI355X": "mi355x-288gb",
    "NVIDIA GeForce RTX 3090": "rtx3090-24gb",
    "GeForce RTX 3090": "rtx3090-24gb",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
}
# Largest relative gap between torch's total memory and the catalogue's: GPUs of one name exist with
# different memories.
MEMORY_TOLERANCE = 0.05


def named_device(name: str, memory_bytes: int | None) -> str | None:
    """Returns the packaged machine of a GPU's name, None for an unknown one or another memory."""
    known = CATALOGUE.get(name)
    if known is None or memory_bytes is None:
        return known
    ratio = memory_bytes / load_cluster(known).device.memory_bytes
    return known if abs(ratio - 1) < MEMORY_TOLERANCE else None


def scheduled_device(word: str) -> str | None:
    """Returns the packaged machine of a scheduler's word for a GPU, None for an unknown one.

    Words are short names (`h100`), or drivers' names with other separators
    (`nvidia_h100_80gb_hbm3`), with or without the maker.
    """
    plain = _plain(word)
    names = {_plain(name): machine for name, machine in CATALOGUE.items()}
    return packaged_cluster(plain) or names.get(plain) or names.get(f"nvidia-{plain}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def torch_name(machine: str) -> str:
    """Returns torch's name of the GPU of a packaged machine, the machine's own for others."""
    return next((name for name, known in CATALOGUE.items() if known == machine), machine)
