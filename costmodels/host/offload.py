"""Cost of a layer's states in the host's memory, as FSDP2 moves them (EQUATIONS O9).

States (FSDP2's CPUOffloadPolicy, all of a layer or nothing): the fp32 shard, its gradient and
Adam's moments, 16 bytes for each parameter that the rank owns, lie on the host. The shard is copied
to the device for every gather (4 bytes a parameter), its gradient is copied back after every
reduction (4), and the host adds it to its gradient (12 bytes of its memory) and runs Adam (28).
Activations: costmodels/memory/activation_copies.py.

A GPU copies at the bandwidth of its own lane of PCIe, or at its part of the bandwidth that the GPUs
of a node share: uplinks of switches. Both ways at once are no slower. A process reaches its part of
the host's memory bandwidth, and no more than its NUMA domain gives (EQUATIONS O8). Where the
machine's own profile measured copies, and Adam on one process of the host, those rates take the
place of the lane's and bound the host's. No step with offload was measured.
"""

from __future__ import annotations

from enum import StrEnum

from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.speeds import HostSpeed
from parplan.profiles.provenance import Kind, Seconds

HOST_STATE_BYTES = 16  # fp32 parameter, gradient and two moments
COPIED_BYTES = 4  # fp32, in either direction
ADDED_BYTES = 12  # two fp32 are read and one written
ADAM_BYTES = 28  # parameter and moments read and written, gradient read
# Share of the datasheet's bandwidth of the host's memory. ZeRO-Offload (Ren et al. 2021, arXiv
# 2101.06840, table 4): Adam of 1, 2, 4, 8 and 10 billion parameters in 0.22, 0.51, 1.03, 2.41 and
# 2.57 s on two sockets of six DDR4-2666 channels (255.9 GB/s), at 28 bytes a parameter 0.50, 0.43,
# 0.42, 0.36 and 0.43 of it. Adam of all cores, one vectorised kernel: PyTorch's took six times as
# long there.
HOST_SHARE = 0.43
# Share of the bandwidth of the NUMA domain with the pages of one process: STREAM on a DGX A100
# (gist.github.com/v0dro, 0559e1d9b205ca9ac0ad1a29fe10377b) with the threads of one, two and four
# domains: 37.2, 74.4 and 147.8 GB/s of 51.2 each. On two sockets of a V100 node that is 0.37 of
# both, on the four domains of a DGX A100 that have GPUs 0.36 of all eight.
NUMA_SHARE = 0.73
# assumed where nothing is stated: half of the 409.6 GB/s of two sockets of eight DDR4-3200 channels
HOST_BYTES_PER_S = 2e11


class Offload(StrEnum):
    """The parts of a layer that the host can hold.

    STATES                 all of a layer's, moved by FSDP2
    ACTIVATIONS            only on request: a plan names the operators whose activations go there
                           (`LayerChoice.on_host`)
    OPTIMIZER, PARAMETERS  of blocks held in chunks (costmodels/chunks): master and moments, and the
                           parameters too
    LOOKUP                 of the embedding: the token table, which is looked up and updated there;
                           a table that the head shares is only updated there
    """

    STATES = "states"
    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    LOOKUP = "lookup"


def _measured(cluster: Cluster) -> HostSpeed:
    if cluster.profile is None or cluster.profile.host is None:
        return HostSpeed()
    return cluster.profile.host


def copy_time(n_bytes: float, cluster: Cluster, *, to_host: bool = False) -> Seconds:
    """Seconds to copy `n_bytes` between a device and its host while all of the node's do.

    t = n / min(lane, W_node / G)
    """
    speed = _measured(cluster)
    measured = speed.from_device_bytes_per_s if to_host else speed.to_device_bytes_per_s
    shared = lane = measured or cluster.pcie_bytes_per_s
    if cluster.pcie_node_bytes_per_s is not None:
        shared = cluster.pcie_node_bytes_per_s / cluster.gpus_per_node
    kind = Kind.INTERPOLATED if measured and lane <= shared else Kind.ANALYTIC
    return Seconds(n_bytes / min(lane, shared), kind)


def host_time(n_bytes: float, cluster: Cluster) -> Seconds:
    """Seconds of the host over `n_bytes` of its memory, while all ranks of a node do the same.

        t = n G / bandwidth

    The rate is bounded by the measured rate of Adam on one process.
    """
    return Seconds(n_bytes / _host_rate(cluster)[0], Kind.ANALYTIC)


def host_adam_time(num_parameters: float, cluster: Cluster) -> Seconds:
    """Seconds of Adam on the host over `num_parameters` of each of a node's ranks."""
    bytes_per_s, measured = _host_rate(cluster)
    return Seconds(
        ADAM_BYTES * num_parameters / bytes_per_s, Kind.INTERPOLATED if measured else Kind.ANALYTIC
    )


def _host_rate(cluster: Cluster) -> tuple[float, bool]:
    """Bytes a second of the host's memory for one of a node's P processes, and whether measured.

        min(HOST_SHARE W / P, NUMA_SHARE (W / domains) / min(P, GPUs of a domain))

    W of the node (EQUATIONS O8). The measured rate of one process is used as it is where there is
    no other process, and bounds each of several. Leaves out: states that outgrow their domain and
    spill into others, interleaved memory (`numactl --interleave`).
    """
    measured = _measured(cluster).adam_bytes_per_s
    processes, stated = cluster.gpus_per_node, cluster.host_bytes_per_s
    shared = (HOST_BYTES_PER_S if stated is None else HOST_SHARE * stated) / processes
    if (
        stated is not None
        and cluster.numa_domains is not None
        and cluster.gpus_per_numa is not None
    ):
        shared = min(
            shared,
            NUMA_SHARE * stated / cluster.numa_domains / min(processes, cluster.gpus_per_numa),
        )
    if measured is not None and (measured <= shared or processes == 1):
        return measured, True
    return shared, False
