"""Device, link, node and cluster by datasheet. Measured speeds are in `speeds.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parplan.profiles.documents.ranges import require_range
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.calibration_factors import Calibration
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.stack import FlashKernel

_FORBID = {"extra": "forbid"}
CPU = "cpu"  # the device of configs/clusters/cpu.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator. Peaks are dense, without sparsity, as the datasheet (`source`) gives them.

    compute_capability: that of its CUDA architecture (https://developer.nvidia.com/cuda-gpus), None
        where it is not known or has none
    flash_kernel: fused attention of its libraries, where these are not CUDA's; a stack then runs it
        instead of its own
    host_slowdown: factor on the seconds in which its host launches an operator, of a host on the
        same board as the device; 1 for the hosts on which the stacks' seconds were fitted
    board_power_w: greatest power of its board, with the host where both share a board; None where
        it is not known
    """

    __pydantic_config__ = _FORBID

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    num_sms: int
    context_bytes: int
    source: str
    compute_capability: float | None = None
    flash_kernel: FlashKernel | None = None
    host_slowdown: float = 1.0
    board_power_w: float | None = None

    @property
    def is_host(self) -> bool:
        """True if the device is the host itself, which does one thing after the other."""
        return self.name == CPU

    def peak(self, precision: str) -> float:
        """Returns the dense peak FLOP/s at `precision`. Raises ConfigError for an unknown one."""
        if precision not in self.peak_flops_per_s:
            has = ", ".join(sorted(self.peak_flops_per_s))
            raise ConfigError(
                f"{self.name} has no {precision} arithmetic (it has {has})",
                hint="choose another --precision",
            )
        return self.peak_flops_per_s[precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection of one GPU or one NIC.

    It has its bytes per second in one direction and the latency of one message.

    mesh: number of GPUs that have a wire of their own to each other one, which share the bandwidth
        of a GPU equally; None for a switch, through which two GPUs have all of it
    """

    __pydantic_config__ = _FORBID

    name: str
    bytes_per_s: float
    latency_s: float
    source: str
    mesh: int | None = None

    def among(self, ranks: int) -> float:
        """Bytes per second of one of `ranks` GPUs that send to each other alone (EQUATIONS C9).

        W (g - 1) / (G - 1) in a mesh of G GPUs, else W
        """
        if self.mesh is None:
            return self.bytes_per_s
        return self.bytes_per_s * min(1.0, (ranks - 1) / (self.mesh - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """A part of a node: `gpus` neighbouring GPUs that a link of their own joins, as a bridge."""

    __pydantic_config__ = _FORBID

    gpus: int
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A level of the network: a unit of it joins `nodes` nodes, such as a leaf, a rack or a pod.

    oversubscription: bandwidth of all NICs of a unit's nodes over that of the unit's own uplinks
    latency_s: seconds that a message that leaves the unit takes beyond the NIC's latency
    rails: True if a switch of the unit joins the same NIC of every node, so that a unit has more
        nodes than a switch that takes all NICs of a node
    """

    __pydantic_config__ = _FORBID

    name: str
    nodes: int
    oversubscription: float
    latency_s: float
    rails: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` equal nodes of `gpus_per_node` devices.

    `intra_node` joins the GPUs of a node, and `nics_per_node` NICs leave it.

    calibration: factors of the user's own runs for its prices, None without any
    pcie_node_bytes_per_s: bandwidth of all GPUs of a node together to the host, or from it; None
        where each GPU has all of its lane
    host_bytes_per_s: bandwidth of a node's host memory, None for the assumption of
        costmodels/host/offload.py
    numa_domains: number of equal parts of that memory; a process has its pages in the part of its
        GPU
    gpus_per_numa: number of GPUs at a part that has any; both are None where neither is known
    profile: measurements of the machine itself, which replace the shipped profile of its device;
        None without any
    hosts_per_node: number of machines with an operating system of their own that a node has, more
        than one where NVLink joins several
    islands: parts of a node with a faster link, the smallest first
    tiers: levels of the network above the nodes, the smallest first
    """

    __pydantic_config__ = _FORBID

    name: str
    device: Device
    nodes: int
    gpus_per_node: int
    intra_node: Link
    nics_per_node: int
    nic: Link
    host_memory_bytes: int
    pcie_bytes_per_s: float
    pcie_node_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    numa_domains: int | None = None
    gpus_per_numa: int | None = None
    calibration: Calibration | None = None
    profile: Profile | None = None
    hosts_per_node: int = 1
    islands: tuple[Island, ...] = ()
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node", "nics_per_node"):
            require_range(field, getattr(self, field), f"cluster {self.name}: {field}")
        require_range("gpus", self.num_gpus, f"cluster {self.name}: nodes x gpus_per_node")
        if (self.numa_domains is None) is not (self.gpus_per_numa is None):
            raise ConfigError(
                f"cluster {self.name}: numa_domains is {self.numa_domains} and gpus_per_numa "
                f"{self.gpus_per_numa}, they are stated together",
                hint="state both in the cluster's node, or neither",
            )
        self._check_levels()

    def _check_levels(self) -> None:
        """Raises ConfigError for levels that do not grow, or that do not fit their node."""
        sizes = [
            *(("islands", island.link.name, island.gpus) for island in self.islands),
            *(("tiers", tier.name, tier.nodes) for tier in self.tiers),
        ]
        for (kind, name, size), (next_kind, next_name, larger) in itertools.pairwise(sizes):
            if kind == next_kind and (larger <= size or larger % size):
                raise ConfigError(
                    f"cluster {self.name}: level {next_name} joins {larger} and the level before "
                    f"it, {name}, {size}; a level joins whole units of the level before it",
                    hint="list the levels from the inside out",
                )
        if self.gpus_per_node % self.hosts_per_node:
            raise ConfigError(
                f"cluster {self.name}: {self.hosts_per_node} hosts do not divide the "
                f"{self.gpus_per_node} GPUs of a node",
                hint="a node is what the fast link joins: 72 GPUs of an NVL72 rack on 18 hosts",
            )

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def pool_names(self) -> tuple[str, ...]:
        """The names of the pools of unequal nodes, none where all nodes are equal."""
        return ()

    @property
    def most_gpus_per_node(self) -> int:
        """The GPUs of the largest node."""
        return self.gpus_per_node

    @property
    def gpus_text(self) -> str:
        """The devices in one phrase: `64 x a100-80gb`."""
        return f"{self.num_gpus} x {self.device.name}"

    @property
    def text(self) -> str:
        """The devices and their nodes in one phrase: `64 x a100-80gb, 8 a node`."""
        return f"{self.gpus_text}, {self.gpus_per_node} a node"

    def mean_peak(self, precision: str) -> float:
        """Mean of the dense peak FLOP/s of all GPUs. Raises ConfigError for an unknown one."""
        return self.device.peak(precision)

    def with_nodes(self, change: Callable[[Cluster], Cluster], joins: float = 1.0) -> Cluster:
        """Returns the cluster with its equal nodes changed, those of each pool by themselves.

        joins: factor of the bandwidth between pools
        """
        return change(self)

    @property
    def node_bytes_per_s(self) -> float:
        """Bandwidth of all NICs of a node together."""
        return self.nic.bytes_per_s * self.nics_per_node

    @property
    def unit_gpus(self) -> tuple[int, ...]:
        """Number of GPUs of a node, and of a unit of each tier."""
        return (self.gpus_per_node, *(tier.nodes * self.gpus_per_node for tier in self.tiers))

    def link_of(self, span: int) -> Link:
        """Returns the link between `span` neighbouring GPUs of a node."""
        near = (island.link for island in self.islands if span <= island.gpus)
        return next(near, self.intra_node)

    def group_nic_bytes_per_s(self, ranks_per_node: int, groups: int) -> float:
        """Bandwidth of one of `groups` groups with `ranks_per_node` ranks on a node (EQUATIONS C6).

            W = min(W_node / groups, max(W_node g / G, W_nic), W_node)

        g of the node's G GPUs reach no more than their part of the NICs, but at least one.
        """
        reach = max(
            self.node_bytes_per_s * ranks_per_node / self.gpus_per_node, self.nic.bytes_per_s
        )
        return min(self.node_bytes_per_s / groups, reach, self.node_bytes_per_s)
