"""The plans of equal nodes that a plan over unequal pools stands beside.

One counts every GPU as the slowest, which is what a planner without pools can promise. The others
have one pool alone.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.planner.baselines.optimum import Optimum
from parplan.planner.baselines.systems import Baseline
from parplan.planner.request import Request
from parplan.planner.search.find_plan import find_best
from parplan.planner.search.price_factory import described_factory
from parplan.planner.search.search_results import SearchResult
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.unequal_cluster import UnequalCluster

SLOWEST = "as-the-slowest"


def equal_requests(request: Request) -> dict[str, Request]:
    """Returns the requests of equal nodes by name, none where all nodes are equal."""
    cluster = request.cluster
    if not isinstance(cluster, UnequalCluster):
        return {}
    machines = {SLOWEST: cluster.as_slowest}
    machines |= {f"{pool.name}-alone": pool.cluster for pool in cluster.pools}
    return {name: replace(request, cluster=machine) for name, machine in machines.items()}


def equal_baseline(name: str, request: Request) -> tuple[Baseline, SearchResult | None]:
    """Returns a request of equal nodes as a baseline, with its fastest plan if any fits.

    Raises OutOfTimeError and SolverError.
    """
    nodes = f"our fastest plan on {request.cluster.text}"
    what = f"{nodes}, with the least memory and links" if name == SLOWEST else nodes
    try:
        result = find_best(described_factory(request).without_ties())
    except (ConfigError, InfeasibleError):
        return Baseline(name=name, what=what, candidates=0), None
    tried = result.plan.search.candidates
    baseline = Baseline(
        name=name,
        what=what,
        candidates=tried.considered,
        optimum=Optimum(result.strategy, result.price, tried.solved),
    )
    return baseline, result
