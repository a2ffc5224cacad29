"""Clusters of unequal pools: nodes with other GPUs, memory or links, and what joins them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.hardware import Cluster, Device, Link

_FORBID = {"extra": "forbid"}
ONE_POOL = "describe one pool in a cluster file of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes of an unequal cluster.

    stack: the software stack of its nodes, None for that of the request
    """

    __pydantic_config__ = _FORBID

    name: str
    cluster: Cluster
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The link between the nodes of two pools, in one direction (EQUATIONS C10).

    pools: the two pools, empty for every pair that no other join names
    node_bytes_per_s: bandwidth of one node, None where the join has a total
    total_bytes_per_s: bandwidth of all nodes of a pool together, None where each node has its own
    latency_s: seconds of one message beyond those of the NICs
    """

    __pydantic_config__ = _FORBID

    name: str
    latency_s: float
    source: str
    pools: tuple[str, ...] = ()
    node_bytes_per_s: float | None = None
    total_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if (self.node_bytes_per_s is None) is (self.total_bytes_per_s is None):
            raise ConfigError(
                f"join {self.name}: its bandwidth is stated "
                f"{'not at all' if self.node_bytes_per_s is None else 'twice'}",
                hint="state gb_per_s_of_node or gb_per_s_in_total",
            )
        if len(self.pools) not in (0, 2) or len(set(self.pools)) != len(self.pools):
            raise ConfigError(
                f"join {self.name}: pools is {list(self.pools)}, a join has two",
                hint="name two pools, or none for every pair",
            )

    def at(self, factor: float) -> Join:
        """Returns the join with its bandwidth multiplied."""
        node, total = self.node_bytes_per_s, self.total_bytes_per_s
        return replace(
            self,
            node_bytes_per_s=None if node is None else node * factor,
            total_bytes_per_s=None if total is None else total * factor,
        )

    def bytes_per_s(self, nodes: int) -> float:
        """Bandwidth of `nodes` nodes of a pool that send at once."""
        if self.total_bytes_per_s is not None:
            return self.total_bytes_per_s
        assert self.node_bytes_per_s is not None, "a join has one of the two"
        return nodes * self.node_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalCluster(Cluster):
    """Pools of unequal nodes, and the joins between them.

    As a `Cluster` it is the equal cluster that never promises more than a pool has: every GPU is
    the slowest, with the least memory and the slowest links (`unequal_cluster` makes it). Prices
    that know pools use these instead.
    """

    pools: tuple[Pool, ...]
    joins: tuple[Join, ...]

    def __post_init__(self) -> None:
        Cluster.__post_init__(self)
        where, names = f"cluster {self.name}", self.pool_names
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(
                f"{where}: pools are {', '.join(names) or 'none'}",
                hint="state at least two pools with names of their own",
            )
        for join in self.joins:
            for name in join.pools:
                if name not in names:
                    raise unknown_name_error("pool", name, names, where=f"{where}: {join.name}")
        for pair in itertools.combinations(names, 2):
            self.join_of(*pair)

    def join_of(self, one: str, other: str) -> Join:
        """Returns the join of two pools. Raises ConfigError where nothing does."""
        named = [join for join in self.joins if set(join.pools) == {one, other}]
        joins = named or [join for join in self.joins if not join.pools]
        if len(joins) != 1:
            raise ConfigError(
                f"cluster {self.name}: {len(joins)} joins between the pools {one} and {other}",
                hint=f"state one with pools: [{one}, {other}], or one without pools",
            )
        return joins[0]

    def mean_peak(self, precision: str) -> float:
        """Mean of the dense peak FLOP/s of all GPUs. Raises ConfigError for an unknown one."""
        peaks = (pool.cluster.num_gpus * pool.cluster.device.peak(precision) for pool in self.pools)
        return sum(peaks) / self.num_gpus

    def with_nodes(
        self, change: Callable[[Cluster], Cluster], joins: float = 1.0
    ) -> UnequalCluster:
        pools = (replace(pool, cluster=change(pool.cluster)) for pool in self.pools)
        return unequal_cluster(self.name, pools, (join.at(joins) for join in self.joins))

    @property
    def as_slowest(self) -> Cluster:
        """The equal cluster that promises no more than each pool has."""
        return Cluster(**{field.name: getattr(self, field.name) for field in fields(Cluster)})

    @property
    def most_gpus_per_node(self) -> int:
        return max(pool.cluster.gpus_per_node for pool in self.pools)

    @property
    def pool_names(self) -> tuple[str, ...]:
        return tuple(pool.name for pool in self.pools)

    @property
    def by_name(self) -> Mapping[str, Pool]:
        """The pools by name."""
        return {pool.name: pool for pool in self.pools}

    @property
    def gpus_text(self) -> str:
        """The pools in one phrase: `32 x a100-80gb + 16 x h100-80gb`."""
        return " + ".join(pool.cluster.gpus_text for pool in self.pools)

    @property
    def text(self) -> str:
        return self.gpus_text


def require_equal(cluster: Cluster, what: str, hint: str = ONE_POOL) -> None:
    """Raises ConfigError for a cluster of unequal pools where `what` needs equal nodes."""
    if cluster.pool_names:
        raise ConfigError(
            f"{what} needs equal nodes, cluster {cluster.name} has the pools "
            f"{', '.join(cluster.pool_names)}",
            hint=hint,
        )


def unequal_cluster(name: str, pools: Iterable[Pool], joins: Iterable[Join]) -> UnequalCluster:
    """Returns the cluster of some pools. Raises ConfigError for pools without a join."""
    joins = tuple(joins)
    pools = tuple(replace(each, cluster=replace(each.cluster, name=each.name)) for each in pools)
    if not pools:
        raise ConfigError(f"cluster {name}: pools is empty", hint="state at least two pools")
    machines = [pool.cluster for pool in pools]
    slowest = min(machines, key=lambda machine: _peak(machine.device))
    per_node = math.gcd(*(machine.gpus_per_node for machine in machines))
    node_bytes_per_s, latency_s = _slowest_network(machines, joins, per_node)
    return UnequalCluster(
        name=name,
        device=_least_device(slowest.device, [machine.device for machine in machines]),
        nodes=sum(machine.num_gpus for machine in machines) // per_node,
        gpus_per_node=per_node,
        intra_node=min(
            (machine.intra_node for machine in machines), key=lambda link: link.bytes_per_s
        ),
        nics_per_node=1,
        nic=Link(
            name="slowest",
            bytes_per_s=node_bytes_per_s,
            latency_s=latency_s,
            source="the slowest network of the pools and their joins",
        ),
        host_memory_bytes=min(
            machine.host_memory_bytes * per_node // machine.gpus_per_node for machine in machines
        ),
        pcie_bytes_per_s=min(machine.pcie_bytes_per_s for machine in machines),
        calibration=slowest.calibration,
        profile=slowest.profile,
        pools=pools,
        joins=joins,
    )


def _peak(device: Device) -> float:
    """The dense peak that tells fast devices from slow ones: in 16 bits where it has that."""
    peaks = device.peak_flops_per_s
    return next(
        (peaks[precision] for precision in ("bf16", "fp16") if precision in peaks),
        max(peaks.values()),
    )


def _least_device(slowest: Device, devices: Iterable[Device]) -> Device:
    """Returns a device that has no more of anything than each of `devices`."""
    devices = tuple(devices)
    known = set.intersection(*(set(device.peak_flops_per_s) for device in devices))
    return replace(
        slowest,
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bytes_per_s=min(device.memory_bytes_per_s for device in devices),
        peak_flops_per_s={
            precision: min(device.peak_flops_per_s[precision] for device in devices)
            for precision in slowest.peak_flops_per_s
            if precision in known
        },
        context_bytes=max(device.context_bytes for device in devices),
    )


def _slowest_network(
    machines: Iterable[Cluster], joins: Iterable[Join], per_node: int
) -> tuple[float, float]:
    """Returns the least bandwidth of `per_node` GPUs into the network, and the greatest latency."""
    machines, joins = tuple(machines), tuple(joins)
    own = [
        machine.node_bytes_per_s
        * per_node
        / machine.gpus_per_node
        / max((tier.oversubscription for tier in machine.tiers), default=1.0)
        for machine in machines
    ]
    across = [
        join.bytes_per_s(machine.nodes) / machine.nodes * per_node / machine.gpus_per_node
        for join in joins
        for machine in machines
    ]
    latencies = (
        *(machine.nic.latency_s for machine in machines),
        *(join.latency_s for join in joins),
    )
    return min(*own, *across), max(latencies)
