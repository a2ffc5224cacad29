"""What it costs to keep a layer's states in the host's memory, as FSDP2 moves them (EQUATIONS O).

States (FSDP2's CPUOffloadPolicy, all of a layer or nothing): the fp32 shard, its gradient and Adam's moments, 16 bytes for
each parameter that the rank owns, lie on the host. The shard goes to the device for every gather (4 bytes a parameter), its
gradient comes back after every reduction (4), and the host adds it to what it has (12 bytes of its memory) and runs Adam (28).
Activations: costmodels/copies.py.

Every GPU has its own lane of PCIe. All is analytic: no step with offload was measured.
"""

from __future__ import annotations

from enum import StrEnum

from profiles.hardware import Cluster
from profiles.provenance import Kind, Seconds

HOST_STATE_BYTES = 16  # fp32 parameter, gradient and two moments
COPIED_BYTES = 4  # fp32, in either direction
ADDED_BYTES = 12  # two fp32 are read and one written
ADAM_BYTES = 28  # parameter and moments read and written, gradient read
HOST_BYTES_PER_S = 2e11  # assumed: half of the 409.6 GB/s of two sockets of eight DDR4-3200 channels, shared by a node's GPUs


class Offload(StrEnum):
    """What of a layer the host keeps.

    STATES                 all of a layer's, moved by FSDP2
    ACTIVATIONS            asked for only: a plan names the operators that keep them (`LayerChoice.on_host`)
    OPTIMIZER, PARAMETERS  of blocks held in chunks (costmodels/chunks): master and moments, and the parameters too
    LOOKUP                 of the embedding: the token table, which is looked up and updated there
    """

    STATES = "states"
    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    LOOKUP = "lookup"


def copy_time(n_bytes: float, cluster: Cluster) -> Seconds:
    """Seconds to move `n_bytes` between one device and its host: n / PCIe bandwidth."""
    return Seconds(n_bytes / cluster.pcie_bytes_per_s, Kind.ANALYTIC)


def host_time(n_bytes: float, cluster: Cluster) -> Seconds:
    """Seconds of the host over `n_bytes` of its memory, while all of a node's ranks do the same: n G / bandwidth."""
    return Seconds(n_bytes * cluster.gpus_per_node / HOST_BYTES_PER_S, Kind.ANALYTIC)
