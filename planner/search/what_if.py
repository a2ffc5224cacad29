"""Searches of changed requests around a plan: other meshes, other machines, where the choice flips.

Each question is a search of its own with one change (planner/search/asked_plan.py). The answers say
why a plan is the best, what holds it back, what more of something would buy, and from where on
another plan is the best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, Request
from parplan.planner.search.near_requests import AXES, Near
from parplan.profiles.errors import OutOfTimeError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.off_speed import SpeedFactors, cluster_at

BASE = "base"
MEMORY = "memory of a GPU"
STEPS = 2  # halvings of the range in which a choice flips


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A quantity of a request that may be multiplied by a factor.

    what      its name
    buys      the factor of which the gain is said
    ends      the factors, below and above 1, between which a flip is looked for; none for none
    scale     returns a request with the quantity multiplied
    near      what a request with the quantity multiplied shares with the request
    speeds    the speeds of a machine with the quantity multiplied, None for another quantity
    applies   True if the quantity matters to a request
    """

    what: str
    buys: float
    ends: tuple[float, ...]
    scale: Callable[[Request, float], Request]
    near: Near
    speeds: Callable[[float], SpeedFactors] | None = None
    applies: Callable[[Request], bool] = lambda _: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A factor of a knob from which on another mesh is the best.

    factor   the nearest factor at which another mesh is the best
    last     the farthest factor at which the plan's mesh is the best
    plan     the best plan at the nearest factor; None where nothing fits there
    """

    factor: float
    last: float
    plan: Plan | None


def request_of_plan(plan: Plan) -> Request:
    """Returns the request for the fastest plan of a plan's model, cluster and training.

    A plan file does not say what was pinned or forbidden, so that nothing is.
    """
    return PlanRequest(model=plan.model, cluster=plan.cluster, training=plan.training)


def _with_gpus(request: Request, factor: float) -> Request:
    def more(cluster: Cluster) -> Cluster:
        return replace(cluster, nodes=round(cluster.nodes * factor))

    return replace(request, cluster=request.cluster.with_nodes(more))


def _with_batch(request: Request, factor: float) -> Request:
    training = request.training
    batch = max(1, round(training.global_batch_size * factor))
    return replace(request, training=replace(training, global_batch_size=batch))


def _at(request: Request, speeds: SpeedFactors) -> Request:
    return replace(request, cluster=cluster_at(request.cluster, speeds))


KNOBS: tuple[Knob, ...] = (
    Knob(what="GPUs", buys=2.0, ends=(), scale=_with_gpus, near=Near.NOTHING),
    Knob(
        what=MEMORY,
        buys=1.1,
        ends=(0.6, 2.0),
        scale=lambda request, factor: _at(request, SpeedFactors(memory=factor)),
        near=Near.PRICES,
    ),
    Knob(
        what="bandwidth between nodes",
        buys=1.25,
        ends=(0.125, 8.0),
        scale=lambda request, factor: _at(request, SpeedFactors(across_nodes=factor)),
        near=Near.BOUNDS,
        speeds=lambda factor: SpeedFactors(across_nodes=factor),
        applies=lambda request: request.cluster.nodes > 1,
    ),
    Knob(
        what="bandwidth inside a node",
        buys=1.25,
        ends=(),
        scale=lambda request, factor: _at(request, SpeedFactors(inside_node=factor)),
        near=Near.BOUNDS,
        speeds=lambda factor: SpeedFactors(inside_node=factor),
        applies=lambda request: request.cluster.gpus_per_node > 1,
    ),
    Knob(what="batch", buys=2.0, ends=(0.25, 4.0), scale=_with_batch, near=Near.PRICES),
)


def knob_named(what: str) -> Knob:
    """Returns a knob by its name."""
    return next(knob for knob in KNOBS if knob.what == what)


def degrees(mesh: Mesh) -> Mapping[str, int]:
    """Returns the degrees of a mesh by axis."""
    return {axis: getattr(mesh, axis) for axis in ("pp", "dp", "cp", "tp", "ep")}


def other_degrees(plan: Plan) -> Iterator[tuple[str, int]]:
    """Yields half and twice the degree of each axis of a plan, as far as the GPUs go."""
    for axis in AXES:
        degree = getattr(plan.mesh, axis)
        unused = (axis == "ep" and not plan.model.num_experts) or (axis == "cp" and degree == 1)
        if unused:
            continue
        for other in (degree // 2, degree * 2):
            if other and plan.cluster.num_gpus % other == 0:
                yield axis, other


def with_degree(request: Request, axis: str, degree: int) -> Request:
    """Returns a request with the degree of one axis pinned."""
    pins = {axis: (degree,)}
    return replace(request, constraints=replace(Constraints(), **pins))  # type: ignore[arg-type]


BestAt = Callable[[float, Collection[Mesh]], Plan | None]


def find_flip(best_at: BestAt, end: float, first: Plan) -> Flip | None:
    """Returns where another mesh becomes the best between 1 and an end of a knob's range.

    None where the mesh of `first`, the best plan at 1, is still the best at the end. The range is
    halved on a scale of logarithms, `STEPS` times, so that a mesh that is the best in between again
    is not seen. In between, the meshes of the best plans and their runners-up at both ends are
    searched. The range is halved fewer times where the time is over.

    best_at   returns the best plan at a factor on some meshes, none for all meshes; None where
              nothing fits. Raises OutOfTimeError
    """
    plan = best_at(end, ())
    if plan is not None and degrees(plan.mesh) == degrees(first.mesh):
        return None
    near = () if plan is None else (*_meshes_of(first), *_meshes_of(plan))
    same, other = 1.0, end
    for _ in range(STEPS):
        middle = (same * other) ** 0.5
        try:
            found = best_at(middle, near)
        except OutOfTimeError:
            break
        if found is not None and degrees(found.mesh) == degrees(first.mesh):
            same = middle
        else:
            other, plan = middle, found
    return Flip(factor=other, last=same, plan=plan)


def _meshes_of(plan: Plan) -> tuple[Mesh, ...]:
    """Returns the meshes of a plan and its runners-up."""
    return plan.mesh, *(each.mesh for each in plan.search.runners_up)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A question about a plan.

    what     `base`, an axis of the mesh, or the name of a knob
    value    the degree of an axis, or the factor of a knob; 0 for the base
    flips    True to ask where on the way to the factor another mesh becomes the best
    """

    what: str
    value: float = 0.0
    flips: bool = False


def questions_about(plan: Plan) -> tuple[PlanQuestion, ...]:
    """Returns what there is to ask about a plan, the longest work first."""
    request = request_of_plan(plan)
    knobs = [knob for knob in KNOBS if knob.applies(request)]
    return (
        *(
            PlanQuestion(what=knob.what, value=end, flips=True)
            for knob in knobs
            for end in knob.ends
        ),
        PlanQuestion(what=BASE),
        *(PlanQuestion(what=knob.what, value=knob.buys) for knob in knobs),
        *(PlanQuestion(what=axis, value=degree) for axis, degree in other_degrees(plan)),
    )


def in_order_of_asking(plan: Plan) -> tuple[PlanQuestion, ...]:
    """Returns the questions in the order in which they are asked.

    It is the order of the text, in which flips that take long come last.
    """
    questions = questions_about(plan)
    memory = PlanQuestion(what=MEMORY, value=knob_named(MEMORY).buys)

    def place(question: PlanQuestion) -> int:
        if question.what == BASE:
            return 0
        if question == memory:
            return 1
        if question.what in AXES:
            return 2
        if not question.flips:
            return 3
        return 4 if knob_named(question.what).near is Near.PRICES else 5 + (question.value < 1)

    return tuple(sorted(questions, key=place))
