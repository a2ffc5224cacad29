"""Refuses pins that exclude every mesh before a search, and names the pin."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.planner.candidates.meshes import illegal_tensor_parallel
from parplan.planner.request import Request
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import ContextForm


def require_possible(request: Request) -> None:
    """Raises ConfigError for pins that exclude every mesh, and names the pin."""
    pins = request.constraints
    num_gpus, batch = request.cluster.num_gpus, request.training.global_batch_size
    _require_tensor_parallel(request)
    _require_expert_parallel(request)
    _require_context_parallel(request)
    _require_divisor({"tp": pins.tp}, num_gpus, "GPUs")
    _require_divisor({"pp": pins.pp}, num_gpus, "GPUs")
    _require_divisor({"dp": pins.dp}, num_gpus, "GPUs")
    _require_divisor(
        {"dp": pins.dp, "micro-batch-size": pins.micro_batch_size},
        batch,
        "sequences of the global batch",
    )
    if (
        pins.pp
        and pins.dp
        and pins.tp
        and num_gpus not in map(prod, product(pins.pp, pins.dp, pins.tp))
    ):
        raise ConfigError(
            f"no --pp x --dp x --tp that is pinned makes {num_gpus} GPUs",
            hint="leave --dp to the search",
        )


def _require_tensor_parallel(request: Request) -> None:
    pins = request.constraints
    reasons = [
        illegal_tensor_parallel(
            tp, request.model, request.cluster, across_nodes=pins.tp_across_nodes
        )
        for tp in pins.tp or ()
    ]
    if reasons and all(reasons):
        raise ConfigError(
            f"--tp is pinned: {reasons[0]}", hint="pin another --tp, or leave it to the search"
        )


def _require_expert_parallel(request: Request) -> None:
    pins = request.constraints
    reasons = [
        illegal_expert_parallel(Mesh(pp=1, dp=ep, tp=1, ep=ep), request.model)
        for ep in pins.ep or ()
    ]
    if reasons and all(reasons):
        raise ConfigError(
            f"--ep is pinned: {reasons[0]}", hint="pin another --ep, or leave it to the search"
        )
    _require_divisor({"ep": pins.ep}, request.cluster.num_gpus, "GPUs")


def _require_context_parallel(request: Request) -> None:
    pins = request.constraints
    reasons = [
        illegal_context(
            Mesh(pp=1, dp=1, tp=1, cp=cp, context_form=form), request.model, request.cluster
        )
        for cp in pins.cp or ()
        for form in (ContextForm if cp > 1 else (None,))
    ]
    if reasons and all(reasons):
        raise ConfigError(
            f"--cp is pinned: {reasons[0]}", hint="pin another --cp, or leave it to the search"
        )


def _require_divisor(pins: Mapping[str, tuple[int, ...] | None], whole: int, what: str) -> None:
    """Raises ConfigError when no product of one value of each pin divides `whole`.

    An open pin counts as 1.
    """
    if all(
        whole % prod(values) for values in product(*(allowed or (1,) for allowed in pins.values()))
    ):
        named = " x ".join(
            f"--{name} {_listed(allowed)}" for name, allowed in pins.items() if allowed
        )
        raise ConfigError(
            f"{named} does not divide the {whole} {what}", hint=f"pin a divisor of {whole}"
        )


def _listed(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))
