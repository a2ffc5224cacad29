"""Asks the tools of this machine for its GPUs, links, memory and network adapters.

A tool that is missing, fails or answers something else gives nothing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from parplan.profiles.inventory.machine_facts import FOUND, Fact
from parplan.profiles.inventory.tool_outputs import (
    GPU_QUERY,
    gpus_of_lspci,
    gpus_of_nvidia_smi,
    gpus_of_rocm_smi,
    links_of_topology,
    nics_of_ibstat,
    nics_of_lspci,
    numa_of_numactl,
)
from parplan.profiles.machines.driver_names import named_device

WAIT_S = 20.0  # a driver that is not loaded yet takes seconds
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
ROCM_SMI = ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
LSPCI = ("lspci",)
NUMACTL = ("numactl", "--hardware")
IBSTAT = ("ibstat",)
SINFO = ("sinfo", "-h", "-o", "%P %D %G %m")
SWITCHES = ("scontrol", "show", "topology")

Say = Callable[[Sequence[str]], str]


def said(command: Sequence[str]) -> str:
    """Returns what a command prints, empty where it is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def found_machine(say: Say = said) -> Mapping[str, Fact]:
    """Returns the facts that the tools of this machine show, by name.

    say: runs a command and returns what it prints
    """
    return {**_gpus(say), **_memory(say), **_nics(say)}


def _gpus(say: Say) -> dict[str, Fact]:
    readers = (
        (NVIDIA_SMI, gpus_of_nvidia_smi),
        (ROCM_SMI, gpus_of_rocm_smi),
        (LSPCI, gpus_of_lspci),
    )
    for command, read in readers:
        gpus = read(say(command))
        if gpus is None:
            continue
        origin = f"{FOUND} {command[0]}"
        facts = {"gpus_per_node": Fact(gpus.count, origin)}
        name = named_device(gpus.name, gpus.memory_bytes)
        facts["gpu"] = Fact(name or gpus.name, f"{origin}: {gpus.name}")
        links = links_of_topology(say(TOPOLOGY)) if command is NVIDIA_SMI else None
        if links is not None:
            facts["joined_gpus"] = Fact(links.joined_gpus, f"{FOUND} nvidia-smi topo -m")
        return facts
    return {}


def _memory(say: Say) -> dict[str, Fact]:
    numa = numa_of_numactl(say(NUMACTL))
    if numa is None:
        return {}
    return {
        "host_memory_bytes": Fact(numa.memory_bytes, f"{FOUND} numactl"),
        "numa_domains": Fact(numa.domains, f"{FOUND} numactl"),
    }


def _nics(say: Say) -> dict[str, Fact]:
    for command, read in ((IBSTAT, nics_of_ibstat), (LSPCI, nics_of_lspci)):
        nics = read(say(command))
        if nics is None:
            continue
        origin = f"{FOUND} {command[0]}"
        facts = {
            "nics": Fact(nics.count, origin),
            "nic_gbit_per_s": Fact(nics.gbit_per_s, origin),
        }
        if nics.network:
            facts["network"] = Fact(nics.network, origin)
        return facts
    return {}
