"""Searches of changed requests around a plan: other meshes, other machines, where the choice flips.

Each question is a search of its own with one change. The answers say why a plan is the best, what
holds it back, what more of something would buy, and from where on another plan is the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, Request
from parplan.planner.search.many_searches import Answer, answer_of
from parplan.planner.search.price_factory import described_factory
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.off_speed import SpeedFactors, cluster_at

AXES = ("tp", "pp", "cp", "ep")
BASE = "base"
STEPS = 2  # halvings of the range in which a choice flips


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A quantity of a request that may be multiplied by a factor.

    what      its name
    buys      the factor of which the gain is said
    ends      the factors, below and above 1, between which a flip is looked for; none for none
    scale     returns a request with the quantity multiplied
    applies   True if the quantity matters to a request
    """

    what: str
    buys: float
    ends: tuple[float, ...]
    scale: Callable[[Request, float], Request]
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
    Knob(what="GPUs", buys=2.0, ends=(), scale=_with_gpus),
    Knob(
        what="memory of a GPU",
        buys=1.1,
        ends=(0.6, 2.0),
        scale=lambda request, factor: _at(request, SpeedFactors(memory=factor)),
    ),
    Knob(
        what="bandwidth between nodes",
        buys=1.25,
        ends=(0.125, 8.0),
        scale=lambda request, factor: _at(request, SpeedFactors(across_nodes=factor)),
        applies=lambda request: request.cluster.nodes > 1,
    ),
    Knob(
        what="bandwidth inside a node",
        buys=1.25,
        ends=(),
        scale=lambda request, factor: _at(request, SpeedFactors(inside_node=factor)),
        applies=lambda request: request.cluster.gpus_per_node > 1,
    ),
    Knob(what="batch", buys=2.0, ends=(0.25, 4.0), scale=_with_batch),
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


def _answer(request: Request) -> Answer:
    return answer_of(described_factory(request).without_ties())


def find_flip(request: Request, knob: Knob, end: float, mesh: Mesh) -> Flip | None:
    """Returns where another mesh becomes the best between 1 and an end of a knob's range.

    None where the mesh is still the best at the end. The range is halved on a scale of logarithms,
    `STEPS` times, so that a mesh that is the best in between again is not seen.
    """
    plan = _answer(knob.scale(request, end)).plan
    if plan is not None and degrees(plan.mesh) == degrees(mesh):
        return None
    same, other = 1.0, end
    for _ in range(STEPS):
        middle = (same * other) ** 0.5
        found = _answer(knob.scale(request, middle)).plan
        if found is not None and degrees(found.mesh) == degrees(mesh):
            same = middle
        else:
            other, plan = middle, found
    return Flip(factor=other, last=same, plan=plan)


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


Reply = Answer | Flip | None


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


def reply_to(plan: Plan, question: PlanQuestion) -> Reply:
    """Returns the answer to a question about a plan; None for a flip that does not come."""
    request = request_of_plan(plan)
    if question.what == BASE:
        return _answer(request)
    if question.what in AXES:
        return _answer(with_degree(request, question.what, round(question.value)))
    knob = knob_named(question.what)
    if question.flips:
        return find_flip(request, knob, question.value, plan.mesh)
    return _answer(knob.scale(request, question.value))
