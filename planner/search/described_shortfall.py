"""When nothing fits: the shortfall of a described model, whether its blocks are alike or not."""

from __future__ import annotations

from dataclasses import replace

from parplan.planner.infeasible import shortfall as alike
from parplan.planner.infeasible.shortfall import (
    EXPLAINED_S,
    MOST_TIMES_LARGER,
    UNTRIED,
    Shortfall,
    no_cluster_text,
    unexplained_error,
)
from parplan.planner.request import Request
from parplan.planner.search import sequence_shortfall as sequence
from parplan.planner.search.block_class_prices import BlockClassPrices
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from parplan.profiles.models.transformer import has_unlike_blocks


def shortfall(request: Request) -> Shortfall:
    """Returns the leanest plan, its fullest stage, its missing bytes and their largest part.

    Raises OutOfTimeError.
    """
    if not has_unlike_blocks(request.model, request.training):
        return alike.shortfall(request)
    head = request.model.num_blocks + 1

    def name_of(layer: int) -> str:
        return {0: "embedding", head: "head"}.get(layer, f"block {layer - 1}")

    return sequence.sequence_shortfall(request, BlockClassPrices(request), name_of, "layers")


def least_peak_bytes(request: Request) -> float | None:
    """Bytes of the fullest device of the leanest plan, None where no candidate is legal.

    Raises OutOfTimeError.
    """
    if not has_unlike_blocks(request.model, request.training):
        return alike.least_peak_bytes(request)
    try:
        return sequence.least_peak_bytes(BlockClassPrices(request))
    except ConfigError:
        return None


def enough_gpus(request: Request, limit: float) -> int | None:
    """Returns a number of GPUs in whole nodes on which some plan fits, None within the range.

    It is the smallest where all blocks are alike, else one of twice as many nodes. Pinned degrees
    other than tp are dropped, as they belong to the requested number. Raises OutOfTimeError.
    """
    if not has_unlike_blocks(request.model, request.training):
        return alike.smallest_cluster(request, limit)
    cluster, nodes = request.cluster, request.cluster.nodes
    constraints = replace(request.constraints, pp=None, dp=None)
    while (nodes := 2 * nodes) <= MOST_TIMES_LARGER * cluster.nodes:
        larger = replace(request, cluster=replace(cluster, nodes=nodes), constraints=constraints)
        try:
            prices = BlockClassPrices(larger)
        except ConfigError:
            continue
        if prices.in_reach(limit) and sequence.some_plan_fits(prices, limit):
            return larger.cluster.num_gpus
    return None


def infeasible_error(request: Request) -> InfeasibleError:
    """Returns the error with the shortfall and a number of GPUs that is enough.

    planner/search/relaxations.py looks for other ways out. It takes EXPLAINED_S at most, and states
    any part that it did not reach.
    """
    request = request.until(request.options.deadline.within(EXPLAINED_S))
    try:
        short = shortfall(request)
    except OutOfTimeError:
        return unexplained_error(request)
    try:
        enough = enough_gpus(request, short.limit_bytes)
    except OutOfTimeError:
        return InfeasibleError(short.text, hint=f"use more GPUs: {UNTRIED}, the time was over")
    return InfeasibleError(
        short.text,
        hint=f"{enough} GPUs are enough (--gpus {enough})"
        if enough
        else no_cluster_text(request.cluster),
    )
