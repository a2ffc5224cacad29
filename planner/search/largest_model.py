"""The largest model of a family that fits a cluster, for several host contents, and its plan.

Sizes are ascending: the members of a family, or numbers of blocks of one width. Each size is
tried by a search. A smaller model probably fits where a larger one does, but legality depends on
the shape. So after the bisection, sizes above its answer are tried too, and the bisection
continues from one that fits. The fastest plan is searched only for the largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.model_states import least_moments
from parplan.planner.candidates.enumeration import enumerate_candidates
from parplan.planner.deadline import Deadline
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SEARCHED_OFFLOAD, OnProgress, Request
from parplan.planner.search.described_shortfall import infeasible_error
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.pareto import TIME_LIMIT, OnSearch
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, PlannerError
from parplan.profiles.models.spec import ModelEntry, ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import gib

ALSO_TRIED = 2  # sizes above the bisection's answer
# Bytes of a parameter in 16 bits (EQUATIONS O2) beside master and moments: parameter or gradient.
LEAST_STATE_BYTES = 2
LEVELS: tuple[tuple[Offload, ...], ...] = ((), (Offload.OPTIMIZER,), SEARCHED_OFFLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestModel:
    """The fastest plan of the largest model that fits with some host contents, else None.

    next_name, next_error: the smallest larger model that was tried, and why it does not fit, if any
    stopped: the cause of an early end, such as `Ctrl-C`; a larger model may then fit
    """

    offload: tuple[Offload, ...]
    plan: Plan | None
    next_name: str | None
    next_error: PlannerError | None
    num_searches: int
    stopped: str | None = None

    @property
    def proven(self) -> bool:
        """True unless the searches ended early."""
        return self.stopped is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Models in ascending order, made on demand."""

    count: int
    of: Callable[[int], ModelEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchWatch:
    """Callbacks of a series of searches, and a test for Ctrl-C."""

    on_progress: OnProgress | None = None
    on_search: OnSearch | None = None
    interrupted: Callable[[], bool] = lambda: False


def members(entries: Sequence[ModelEntry]) -> ModelSizes:
    """The members of a family as sizes."""
    return ModelSizes(count=len(entries), of=lambda index: entries[index])


def widths(of_width: Callable[[int], ModelEntry], request: Request) -> ModelSizes:
    """Returns models of one width, from one block to as many as all memory could hold at most.

    A model has no more than `LAYERS` blocks.
    """
    one_block = _num_parameters(of_width(1).spec)
    per_block = _num_parameters(of_width(2).spec) - one_block
    room = _memory_bytes(request, with_hosts=True) / _least_state_bytes(request)
    most = int((room - one_block) // per_block) + 1
    count = min(max(1, most), int(LAYERS.high))
    return ModelSizes(count=count, of=lambda index: of_width(index + 1))


def _least_state_bytes(request: Request) -> float:
    training = request.training
    return LEAST_STATE_BYTES + training.stack.master_bytes + least_moments(training)


def _num_parameters(model: ModelSpec) -> int:
    return build_graph(
        model, TrainingSpec(global_batch_size=1, seq_length=1, stack=NEUTRAL), 1
    ).num_parameters


def _memory_bytes(request: Request, *, with_hosts: bool) -> float:
    """Returns the bytes that a plan may fill of all devices, and of their hosts."""
    cluster = request.cluster
    hosts_bytes = cluster.nodes * cluster.host_memory_bytes if with_hosts else 0
    limit = limit_bytes(cluster, request.training.stack, request.options)
    return cluster.num_gpus * limit + hosts_bytes


def _require_room(request: Request) -> None:
    """Raises InfeasibleError where all memory is too small for one copy of the states."""
    model, cluster = request.model, request.cluster
    offload = request.constraints.offload
    needed = _least_state_bytes(request) * _num_parameters(model)
    room = _memory_bytes(request, with_hosts=bool(offload))
    if needed > room:
        raise InfeasibleError(
            f"{model.name} does not fit on {cluster.num_gpus} x {cluster.device.name}: one copy "
            f"of its states takes at least "
            f"{gib(needed):,.0f} GiB, the devices{' and their hosts' if offload else ''} have "
            f"{gib(room):,.0f}"
        )


class _Probes:
    """The searches at one level of offload; each size is tried once, up to its first plan."""

    def __init__(self, sizes: ModelSizes, request: Request, watch: SearchWatch) -> None:
        self._sizes, self._request = sizes, request
        self._watch = watch
        self.plans: dict[int, Plan] = {}
        self.errors: dict[int, PlannerError] = {}
        self.num_searches = 0

    def fits(self, index: int) -> bool:
        """Returns True if the size has a plan, which is stored.

        Raises KeyboardInterrupt and OutOfTimeError.
        """
        if index not in self.plans and index not in self.errors:
            try:
                deadline = self._request.options.deadline
                self.plans[index] = self._plan(index, deadline.first_plan())
            except (InfeasibleError, ConfigError) as error:
                self.errors[index] = error
        return index in self.plans

    def fastest(self, index: int, count: int) -> Plan:
        """Returns the fastest plan of a size that fits, in a 1/`count` share of the time left."""
        return self._plan(index, self._request.options.deadline.share(count))

    def _plan(self, index: int, deadline: Deadline) -> Plan:
        request, watch = self._of_size(index).until(deadline), self._watch
        if watch.interrupted():
            raise KeyboardInterrupt
        if watch.on_search:
            planned = self._sizes.count.bit_length() + ALSO_TRIED
            watch.on_search(request.model.name, self.num_searches, planned)
        self.num_searches += 1
        _require_room(request)
        return find_plan(request, watch.on_progress, _unexplained)

    def _of_size(self, index: int) -> Request:
        return replace(self._request, model=self._sizes.of(index).spec)

    def legal_at_most(self, high: int, low: int) -> int | None:
        """Returns the largest size in low .. high that has candidates at all."""
        return next((index for index in range(high, low - 1, -1) if self._legal(index)), None)

    def _legal(self, index: int) -> bool:
        return bool(enumerate_candidates(self._of_size(index)).layouts)

    def next_above(self, best: int | None) -> tuple[str | None, PlannerError | None]:
        """Returns the smallest size above `best` that does not fit, and its error."""
        index = min((index for index in self.errors if best is None or index > best), default=None)
        if index is None:
            return None, None
        request, error = self._of_size(index), self.errors[index]
        if isinstance(error, _UnexplainedError):
            error = infeasible_error(request)
        return request.model.name, error


class _UnexplainedError(InfeasibleError):
    """Nothing fits; the reason is worked out later, for one model only."""


def _unexplained(*_: object) -> InfeasibleError:
    return _UnexplainedError("nothing fits")


def last_that_fits(
    fits: Callable[[int], bool],
    legal_at_most: Callable[[int, int], int | None],
    low: int,
    count: int,
) -> int:
    """Returns the last index below `count` that fits; `low` - 1 where none from `low` on does.

    Bisects over the legal indices, then tries ALSO_TRIED legal ones above. If one of them fits, the
    search continues from there.
    """
    best, high = low - 1, count - 1
    while best < high:
        middle = legal_at_most((best + 1 + high) // 2, best + 1)
        if middle is None:  # nothing legal in the lower half
            middle = legal_at_most(high, best + 1)
        if middle is None:
            break
        best, high = (middle, high) if fits(middle) else (best, middle - 1)
    above = best + 1
    for _ in range(ALSO_TRIED):
        legal = next(
            (index for index in range(above, count) if legal_at_most(index, index) is not None),
            None,
        )
        if legal is None:
            break
        if fits(legal):
            return last_that_fits(fits, legal_at_most, legal, count)
        above = legal + 1
    return best


def find_largest(
    sizes: ModelSizes,
    request: Request,
    levels: Sequence[tuple[Offload, ...]] = LEVELS,
    watch: SearchWatch | None = None,
) -> tuple[LargestModel, ...]:
    """Returns the largest model at each level of offload; each level allows more than the last.

    request: the request for any of the sizes. Ctrl-C and the deadline end the searches with the
    rows so far. Raises OutOfTimeError where the deadline came before any plan.
    """
    watch = watch or SearchWatch()
    rows: list[LargestModel] = []
    known = 0
    for number, offload in enumerate(levels):
        probes = _Probes(sizes, request.with_offload(offload), watch)
        row, known = _largest(probes, offload, known, sizes.count, len(levels) - number)
        rows.append(replace(row, stopped="Ctrl-C") if watch.interrupted() else row)
        if not rows[-1].proven:
            break
    if rows[-1].stopped == TIME_LIMIT and not any(row.plan for row in rows):
        tried = sum(row.num_searches for row in rows)
        raise OutOfTimeError(
            f"the time limit was over before a model was found that fits: {tried} sizes were tried",
            hint="give it a longer --time-limit",
        )
    return tuple(rows)


def _largest(
    probes: _Probes, offload: tuple[Offload, ...], known: int, count: int, rows: int
) -> tuple[LargestModel, int]:
    """The row of one level, and the index at which the next level begins.

    A size that fits also fits with more on the host.

    rows: number of rows still to be made, with this one
    """
    stopped = None
    next_name, next_error = None, None
    try:
        best: int | None = last_that_fits(probes.fits, probes.legal_at_most, known, count)
        best = best if best in probes.plans else None
        if best is not None:
            probes.plans[best] = probes.fastest(best, rows)
        next_name, next_error = probes.next_above(best)
    except (KeyboardInterrupt, OutOfTimeError) as error:
        best = max(probes.plans, default=None)
        stopped = TIME_LIMIT if isinstance(error, OutOfTimeError) else "Ctrl-C"
    return LargestModel(
        offload=offload,
        plan=None if best is None else probes.plans[best],
        next_name=next_name,
        next_error=next_error,
        num_searches=probes.num_searches,
        stopped=stopped,
    ), best or 0
