"""Refuses pins that exclude every mesh before a search.

The error says what was pinned, the rule that it breaks, and one action.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from math import prod

from parplan.costmodels.communication.mesh import Axis, Mesh, illegal_expert_parallel
from parplan.costmodels.layers.context_parallel import illegal_context
from parplan.planner.candidates.meshes import (
    OUTSIDE_PINS,
    context_degrees,
    illegal_tensor_parallel,
    meshes,
)
from parplan.planner.candidates.stack_rules import require_stack_runs
from parplan.planner.request import Constraints, Request
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.stack import ContextForm

_OF_MESHES = ("pp", "dp", "cp", "tp", "ep", "etp", "context_form", "tp_rows")


def require_possible(request: Request) -> None:
    """Raises ConfigError for pins that exclude every mesh, and says why."""
    pins, stack = request.constraints, request.training.stack
    num_gpus, batch = request.cluster.num_gpus, request.training.global_batch_size
    _require_tensor_parallel(request)
    _require_expert_parallel(request)
    _require_one(pins, "cp", lambda cp: _illegal_context(request, cp))
    require_stack_runs(stack, pins)
    for name in ("tp", "pp", "dp", "cp"):
        _require_divisor({name: getattr(pins, name)}, num_gpus, "GPUs")
    _require_pieces(request)
    experts = {"pp": pins.pp, "ep": pins.ep, "etp": pins.etp}
    if pins.ep or pins.etp:
        _require_divisor({"ep": pins.ep, "etp": pins.etp}, num_gpus, "GPUs")
        _require_divisor(experts, num_gpus, "GPUs, and ep x etp divides the ranks of a stage")
    _require_divisor(
        {"dp": pins.dp, "micro-batch-size": pins.micro_batch_size},
        batch,
        "sequences of the global batch",
    )
    _require_all_gpus(request)
    _require_mesh(request)


def _require_tensor_parallel(request: Request) -> None:
    across = request.constraints.tp_across_nodes

    def reason(tp: int) -> str | None:
        return illegal_tensor_parallel(tp, request.model, request.cluster, across_nodes=across)

    _require_one(request.constraints, "tp", reason)
    _require_one(request.constraints, "tp_rows", lambda rows: _illegal_rows(request, rows))


def _illegal_rows(request: Request, rows: int) -> str | None:
    """Returns why no grid of tensor-parallel ranks has a number of rows, None where one has."""
    pins, num_gpus = request.constraints, request.cluster.num_gpus
    if rows == 1:
        return None
    grids = [tp for tp in pins.tp or divisors(num_gpus) if tp % rows == 0 and tp > rows]
    if not grids:
        ranks = _named(pins, "tp") if pins.tp else f"any tp of {num_gpus} GPUs"
        return f"a grid has two columns or more, and {rows} rows do not divide {ranks} into them"
    reasons = [
        illegal_tensor_parallel(
            tp, request.model, request.cluster, across_nodes=pins.tp_across_nodes, rows=rows
        )
        for tp in grids
    ]
    return reasons[0] if all(reasons) else None


def _require_expert_parallel(request: Request) -> None:
    model, pins = request.model, request.constraints
    for name in ("ep", "etp"):
        asked = getattr(pins, name) or (1,)
        if not model.num_experts and 1 not in asked:
            raise ConfigError(
                f"{_named(pins, name)} divides experts, {model.name} has none",
                hint=f"leave out --{name}",
            )
    _require_one(pins, "ep", lambda ep: _illegal_experts(model, ep=ep))
    _require_one(pins, "etp", lambda etp: _illegal_etp(model, pins, etp))


def _illegal_etp(model: ModelSpec, pins: Constraints, etp: int) -> str | None:
    if pins.tp and etp > 1 and etp not in pins.tp:
        return (
            f"an expert is whole or divided over the tp ranks, so etp {etp} needs tp {etp}, "
            f"found {_named(pins, 'tp')}"
        )
    return _illegal_experts(model, etp=etp)


def _illegal_experts(model: ModelSpec, ep: int = 1, etp: int = 1) -> str | None:
    return illegal_expert_parallel(Mesh(pp=1, dp=ep, tp=etp, ep=ep, etp=etp), model)


def _require_one(pins: Constraints, name: str, illegal: Callable[[int], str | None]) -> None:
    """Raises ConfigError where every pinned degree of an axis is illegal."""
    reasons = [illegal(degree) for degree in getattr(pins, name) or ()]
    if reasons and all(reasons):
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{option} is pinned: {reasons[0]}",
            hint=f"pin another {option}, or leave it to the search",
        )


def _require_pieces(request: Request) -> None:
    """Raises ConfigError where no pinned cp divides the sequences into pieces of equal length."""
    degrees, length = request.constraints.cp or (1,), request.training.seq_length
    if all(cp > 1 and length % (2 * cp) for cp in degrees):
        raise ConfigError(
            f"{_named(request.constraints, 'cp')} cuts a sequence into {2 * degrees[0]} equal "
            f"pieces, --seq-length is {length}",
            hint=f"use a --seq-length that is a multiple of {2 * degrees[0]}",
        )


def _illegal_context(request: Request, cp: int) -> str | None:
    """Returns why no form of context parallelism runs at a degree, None where one does."""
    reasons = [
        illegal_context(
            Mesh(pp=1, dp=1, tp=1, cp=cp, context_form=form), request.model, request.cluster
        )
        for form in (ContextForm if cp > 1 else (None,))
    ]
    return reasons[0] if all(reasons) else None


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


def _require_all_gpus(request: Request) -> None:
    """Raises ConfigError where the pinned degrees of a mesh cannot make all GPUs."""
    pins, num_gpus = request.constraints, request.cluster.num_gpus
    axes = [axis.value for axis in Axis if getattr(pins, axis.value)]
    products = set(map(prod, product(*(getattr(pins, axis) for axis in axes))))
    named = " x ".join(f"--{axis}" for axis in axes)
    if {"pp", "dp", "tp"} <= set(axes):
        contexts = (1,) if pins.cp else context_degrees(num_gpus, request)
        if num_gpus not in {ranks * cp for ranks in products for cp in contexts}:
            raise ConfigError(
                f"no {named} that is pinned makes {num_gpus} GPUs", hint="leave --dp to the search"
            )
    if all(num_gpus % ranks for ranks in products):
        raise ConfigError(
            f"no {named} that is pinned divides the {num_gpus} GPUs", hint="pin smaller degrees"
        )


def _require_mesh(request: Request) -> None:
    """Raises ConfigError where no mesh is left, with the rule that most pinned meshes break."""
    broken: Counter[str] = Counter()
    for mesh in meshes(request):
        if isinstance(mesh, Mesh):
            return
        if not mesh.reason.startswith(OUTSIDE_PINS):
            broken[mesh.reason] += 1
    pins = request.constraints
    pinned = " ".join(_named(pins, name) for name in _OF_MESHES if getattr(pins, name))
    if pinned and broken:
        raise ConfigError(
            f"{pinned}: {broken.most_common(1)[0][0]}",
            hint="pin other degrees, or leave one of them to the search",
        )


def _named(pins: Constraints, name: str) -> str:
    return f"--{name.replace('_', '-')} {_listed(getattr(pins, name))}"


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))
