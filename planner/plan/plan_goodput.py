"""The goodput of a plan."""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.usage.goodput import Failures, Goodput, checkpoint_bytes, goodput
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph


def plan_failures(plan: AnyPlan, stated: Failures | None) -> Failures | None:
    """Returns the failures of a plan's cluster, None where none are known.

    A plan whose search chose the spare nodes has its own, which replace what is not stated.
    """
    choice = plan.search.spares
    if choice is None:
        return stated
    if stated is None:
        return choice.failures
    if stated.spare_nodes is not None:
        return stated
    return replace(stated, spare_nodes=choice.failures.spare_nodes)


def plan_goodput(plan: AnyPlan, failures: Failures) -> Goodput:
    """Returns the goodput of a plan on a cluster that fails."""
    cluster = plan.cluster
    gpus_per_host = cluster.gpus_per_node // cluster.hosts_per_node
    return goodput(plan_checkpoint_bytes(plan), cluster.num_gpus, gpus_per_host, failures)


def plan_checkpoint_bytes(plan: AnyPlan) -> float:
    """Returns the bytes of a checkpoint of a plan, one copy of all that is trained."""
    if isinstance(plan, TracedPlan):
        return checkpoint_bytes(plan.traced.num_parameters, plan.training)
    return described_checkpoint_bytes(plan.model, plan.training)


def described_checkpoint_bytes(model: ModelSpec, training: TrainingSpec) -> float:
    """Returns the bytes of a checkpoint of a described model, whatever the plan."""
    return checkpoint_bytes(build_graph(model, training, 1).num_trained_parameters, training)
