"""The number of nodes that train, and of those that wait as spares, with which a run advances most.

All nodes of a cluster either train or wait. With the step t(n) of the fastest plan on n nodes and
the goodput g(n) with the other nodes as spares, the run takes

    v(n) = t(n) / g(n)

seconds for a step (EQUATIONS D3). g is a closed form, and t has bounds, each closer than the one
before and taking longer: the least work of a step over n, the same with the blocks of the fullest
rank of a legal mesh, the least bound of all candidates. Numbers of nodes are taken in the order of
their bounds, so that few are searched.

The least work is that of one node, which is assumed and not proven: a number of nodes may have
meshes that one node lacks. It is used where the numbers are too many for the last bound of each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.usage.goodput import Failures, Goodput, goodput
from parplan.planner.candidates.enumeration import (
    enumerate_candidates,
    micro_batch_sizes,
    no_candidate_error,
)
from parplan.planner.candidates.meshes import Pruned, meshes
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_goodput import described_checkpoint_bytes
from parplan.planner.plan.prediction import MOST_BOUNDED, SpareChoice
from parplan.planner.request import OnProgress, Request
from parplan.planner.search.described_shortfall import infeasible_error
from parplan.planner.search.find_plan import find_best
from parplan.planner.search.price_factory import DescribedFactory, Explain
from parplan.planner.search.search_session import DescribedPrices
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, PlannerError
from parplan.profiles.machines.machine_catalog import with_gpus
from parplan.profiles.machines.unequal_cluster import require_equal

UNFINISHED = (KeyboardInterrupt, OutOfTimeError)  # the best so far stands, if there is one


def find_most_goodput(
    request: Request,
    failures: Failures,
    on_progress: OnProgress | None = None,
    explain: Explain = infeasible_error,
) -> Plan:
    """Returns the plan with which a cluster advances most, on as many of its nodes as are best.

    Raises errors as `find_plan` does, and ConfigError for unequal nodes and where failures leave no
    number of nodes any time.
    """
    require_equal(
        request.cluster,
        "the choice of the nodes that train",
        hint="add --spare-nodes 0, so that all GPUs train",
    )
    search = _NodeNumbers(request, failures, on_progress, explain)
    search.run()
    if search.best is None:
        raise search.error()
    return search.chosen(search.best)


@dataclass(frozen=True, slots=True)
class LeastWork:
    """GPU-seconds of a step that no number of GPUs is taken to be below.

    step      of the whole step
    blocks    of its blocks alone, 0 where they are not alike
    """

    step: float
    blocks: float = 0.0


def least_work(request: Request) -> LeastWork:
    """Returns the least work of a step: that of one node with as much memory as it likes.

    More nodes send more and divide operators further, so that each GPU-second does less. It has all
    degrees of context parallelism, as more GPUs than sequences have. It is 0 where one node has no
    legal candidate, such as with a pinned degree above its GPUs.
    """
    alone, pins = _on(request, 1), request.constraints
    if pins.cp is None:
        degrees = divisors(alone.cluster.num_gpus)
        alone = replace(alone, constraints=replace(pins, cp=degrees))
    factory = DescribedFactory(alone)
    try:
        prices = factory.prices(factory.offload or ())
    except ConfigError:
        return LeastWork(0.0)
    step = factory.least_step_s() * alone.cluster.num_gpus
    if not isinstance(prices, DescribedPrices):
        return LeastWork(step)
    blocks = min(
        prices.time_bound(layout).block_s * layout.num_micro_batches * layout.mesh.ranks_per_stage
        for layout in prices.space.layouts
    )
    return LeastWork(step, blocks * prices.num_blocks)


def _on(request: Request, nodes: int) -> Request:
    """Returns the request on a number of nodes."""
    cluster = request.cluster
    gpus = nodes * cluster.gpus_per_node
    return replace(request, cluster=with_gpus(cluster, gpus, cluster.gpus_per_node))


@dataclass
class _NodeNumbers:
    """The search over numbers of nodes.

    best        the plan that advances most so far
    best_s      its v(n)
    proven_s    the least bound of v(n) of all searched numbers
    errors      why a number of nodes has no plan
    """

    request: Request
    failures: Failures
    on_progress: OnProgress | None
    explain: Explain
    best: Plan | None = None
    best_s: float = math.inf
    proven_s: float = math.inf
    searched: int = 0
    finished: bool = False
    errors: dict[int, PlannerError] = field(default_factory=dict)

    def run(self) -> None:
        """Searches numbers of nodes until no bound is below the best.

        Raises OutOfTimeError and KeyboardInterrupt before the first plan.
        """
        work = least_work(self.request) if self.nodes > MOST_BOUNDED else LeastWork(0.0)
        queue = [
            (work.step / self._gpus(nodes) / share, -nodes)
            for nodes in range(1, self.nodes + 1)
            if (share := self.goodput(nodes).share) > 0
        ]
        heapq.heapify(queue)
        closer: dict[int, Iterator[float]] = {}
        try:
            while queue and queue[0][0] < self.best_s:
                bound_s, nodes = queue[0][0], -queue[0][1]
                bounds = closer.setdefault(nodes, self._closer_bounds_s(nodes, work))
                closer_s = next(bounds, None)
                if closer_s is not None:
                    heapq.heapreplace(queue, (max(bound_s, closer_s), -nodes))
                    continue
                self._search(nodes)
                heapq.heappop(queue)
            self.finished = True
        except UNFINISHED:
            if self.best is None:
                raise
        self.proven_s = min(self.proven_s, self.best_s, *(bound_s for bound_s, _ in queue[:1]))

    @property
    def nodes(self) -> int:
        return self.request.cluster.nodes

    def _gpus(self, nodes: int) -> int:
        return nodes * self.request.cluster.gpus_per_node

    @cached_property
    def _checkpoint_bytes(self) -> float:
        return described_checkpoint_bytes(self.request.model, self.request.training)

    def failures_of(self, nodes: int) -> Failures:
        """Returns the failures with all other nodes as spares."""
        spares = (self.nodes - nodes) * self.request.cluster.hosts_per_node
        return replace(self.failures, spare_nodes=spares)

    def goodput(self, nodes: int) -> Goodput:
        """Returns the goodput of a number of nodes that train, with all others as spares."""
        per_host = self.request.cluster.gpus_per_node // self.request.cluster.hosts_per_node
        failures = self.failures_of(nodes)
        return goodput(self._checkpoint_bytes, self._gpus(nodes), per_host, failures)

    def _closer_bounds_s(self, nodes: int, work: LeastWork) -> Iterator[float]:
        """Yields bounds of v(n) in seconds, infinite where no candidate is legal."""
        request, share = _on(self.request, nodes), self.goodput(nodes).share
        num_layers = self.request.model.num_blocks
        fullest = min(
            (-(-num_layers // mesh.pp) * mesh.pp / num_layers for mesh in legal_meshes(request)),
            default=math.inf,
        )
        if fullest == math.inf:
            yield math.inf
        yield fullest * work.blocks / self._gpus(nodes) / share
        try:
            yield DescribedFactory(request).least_step_s() / share
        except ConfigError:
            yield math.inf

    def _search(self, nodes: int) -> None:
        """Searches the plans of a number of nodes, and keeps the best."""
        factory = DescribedFactory(_on(self.request, nodes), self.explain)
        try:
            result = find_best(factory, self.on_progress)
        except InfeasibleError as error:
            self.errors[nodes] = error
            return
        plan = result.plan
        assert isinstance(plan, Plan), "the model is described"
        self.searched += 1
        share = self.goodput(nodes).share
        self.proven_s = min(self.proven_s, plan.search.bound / share)
        advance_s = plan.predicted.step_time_s.value / share
        if advance_s < self.best_s:
            self.best, self.best_s = plan, advance_s
        if result.interrupted:
            raise KeyboardInterrupt

    def chosen(self, plan: Plan) -> Plan:
        """Returns the best plan with the record of the choice."""
        nodes = plan.cluster.nodes
        choice = SpareChoice(
            gpus=self.request.cluster.num_gpus,
            failures=self.failures_of(nodes),
            goodput=round(self.goodput(nodes).share, 6),
            goodput_without=round(self.goodput(self.nodes).share, 6),
            advance_s=round(self.best_s, 6),
            bound_s=round(self.proven_s, 6),
            gap=round(max(0.0, 1 - self.proven_s / self.best_s), 6),
            considered=self.nodes,
            searched=self.searched,
            finished=self.finished,
        )
        return replace(plan, search=replace(plan.search, spares=choice))

    def error(self) -> PlannerError:
        """Returns why no number of nodes has a plan: the error of the most nodes that have one."""
        if self.errors:
            return self.errors[max(self.errors)]
        if any(self.goodput(nodes).share for nodes in range(1, self.nodes + 1)):
            return no_candidate_error(enumerate_candidates(self.request), self.request.cluster)
        return ConfigError(
            f"failures leave no number of {self.nodes} nodes any time to advance",
            hint="give a longer --mtbf, or a shorter --restart-time or --repair-time",
        )


def legal_meshes(request: Request) -> Iterator[Mesh]:
    """Yields the meshes of a request that have a legal micro-batch."""
    for mesh in meshes(request):
        if not isinstance(mesh, Pruned) and any(
            not isinstance(size, Pruned) for size in micro_batch_sizes(mesh, request)
        ):
            yield mesh
