"""The goodput of a plan."""

from __future__ import annotations

from parplan.costmodels.usage.goodput import Failures, Goodput, checkpoint_bytes, goodput
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.models.transformer import build_graph


def plan_goodput(plan: AnyPlan, failures: Failures) -> Goodput:
    """Returns the goodput of a plan on a cluster that fails."""
    cluster = plan.cluster
    gpus_per_host = cluster.gpus_per_node // cluster.hosts_per_node
    return goodput(plan_checkpoint_bytes(plan), cluster.num_gpus, gpus_per_host, failures)


def plan_checkpoint_bytes(plan: AnyPlan) -> float:
    """Returns the bytes of a checkpoint of a plan, one copy of all that is trained."""
    if isinstance(plan, TracedPlan):
        return checkpoint_bytes(plan.traced.num_parameters, plan.training)
    graph = build_graph(plan.model, plan.training, 1)
    return checkpoint_bytes(graph.num_trained_parameters, plan.training)
