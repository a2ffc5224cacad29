"""The number of GPUs of a kind that trains a model on a number of tokens by a deadline.

Numbers of GPUs are powers of two and three times those. More GPUs take less time, and seldom more
work from each, so the least number that meets the deadline is also the cheapest of a kind. A number
whose lower bound of the step misses the deadline is not searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from parplan.costmodels.usage.goodput import Failures, Goodput
from parplan.planner.plan.derived import tokens_per_s
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_goodput import plan_goodput
from parplan.planner.request import Request
from parplan.planner.search.many_searches import Answer, answer_of
from parplan.planner.search.price_factory import described_factory
from parplan.profiles.errors import ConfigError, InfeasibleError, PlannerError
from parplan.profiles.models.transformer import build_graph

DAY_S = 86_400.0
MOST_GPUS = 2**15
FIRST_MFU = 0.45  # at which the first number of GPUs would meet the deadline
# A smaller cluster is not searched where even this much more of each GPU would miss the deadline.
MOST_GAIN = 1.15
FLOPS_PER_PARAMETER = 6  # of a token, forward and backward (EQUATIONS K4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A training of some tokens on a plan's cluster.

    goodput    what failures leave of the time, None where none are stated
    """

    plan: Plan
    tokens: float
    goodput: Goodput | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s while steps run, of all GPUs."""
        return tokens_per_s(self.plan)

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the last, with failures."""
        share = self.goodput.share if self.goodput else 1.0
        return self.tokens / (self.tokens_per_s * share) if share else math.inf

    @property
    def days(self) -> float:
        """Days from the first step to the last, with failures."""
        return self.seconds / DAY_S

    @property
    def gpus(self) -> int:
        """GPUs that are paid for, with those of spare nodes."""
        spares = self.goodput.spare_nodes if self.goodput else 0
        cluster = self.plan.cluster
        return cluster.num_gpus + spares * cluster.gpus_per_node // cluster.hosts_per_node

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all GPUs that are paid for."""
        return self.gpus * self.seconds / 3600

    @property
    def failures(self) -> float:
        """Mean number of failures of the run, 0 where none are stated."""
        return self.seconds / self.goodput.failure_s if self.goodput else 0.0

    @property
    def energy_j(self) -> float | None:
        """Joules of all boards at their greatest power, None where it is not known."""
        power = self.plan.cluster.device.board_power_w
        return None if power is None else power * self.gpus * self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """The least number of GPUs of a kind that meets a deadline.

    run      the training on it; None where no number does
    nearest  the fastest training that was found, where none meets the deadline
    error    why the last number has no plan, where none has any
    tried    numbers of GPUs that were searched
    """

    kind: str
    run: TrainingRun | None
    nearest: TrainingRun | None
    error: PlannerError | None
    tried: tuple[int, ...]


@dataclass
class SizeProbes:
    """The searches of one kind of GPU; each number of GPUs is searched once.

    request_of     returns the request on a number of GPUs, and raises ConfigError
    failures_of    returns the failures of the cluster of a request
    seconds        the deadline
    least_s        by number of GPUs, seconds of a training that no plan is below, where these miss
                   the deadline
    """

    kind: str
    request_of: Callable[[int], Request]
    failures_of: Callable[[Request], Failures | None]
    tokens: float
    seconds: float
    least_s: dict[int, float] = field(default_factory=dict)
    runs: dict[int, TrainingRun] = field(default_factory=dict)
    errors: dict[int, PlannerError] = field(default_factory=dict)

    def meets(self, gpus: int) -> bool:
        """True if a number of GPUs meets the deadline. Raises OutOfTimeError.

        It is not searched where its lower bound misses the deadline.
        """
        if not any(gpus in known for known in (self.runs, self.errors, self.least_s)):
            self._search(gpus)
        run = self.runs.get(gpus)
        return run is not None and run.seconds <= self.seconds

    def _search(self, gpus: int) -> None:
        try:
            request = self.request_of(gpus)
            factory = described_factory(request)
            steps = self.tokens / request.training.tokens_per_step
            least_s = steps * factory.least_step_s()
            if least_s > self.seconds:
                self.least_s[gpus] = least_s
                return
            answer = answer_of(factory)
        except ConfigError as error:
            answer = Answer(error=error)
        if answer.plan is None:
            assert answer.error is not None, "an answer without a plan says why"
            self.errors[gpus] = answer.error
            return
        failures = self.failures_of(request)
        goodput = plan_goodput(answer.plan, failures) if failures else None
        self.runs[gpus] = TrainingRun(plan=answer.plan, tokens=self.tokens, goodput=goodput)

    def excludes(self, gpus: int, above: int) -> bool:
        """True if `gpus` would miss the deadline even with more from each than `above` has."""
        run = self.runs[above]
        return run.seconds * above / (MOST_GAIN * gpus) > self.seconds


def numbers_of_gpus(gpus_per_node: int, most: int = MOST_GPUS) -> tuple[int, ...]:
    """Returns powers of two and three times those, up to `most`, that fill whole nodes."""
    powers = [2**power for power in range(most.bit_length())]
    numbers = sorted({*powers, *(3 * power for power in powers)})
    return tuple(
        number
        for number in numbers
        if number <= most and (number <= gpus_per_node or number % gpus_per_node == 0)
    )


def least_cluster(probes: SizeProbes, numbers: tuple[int, ...]) -> ClusterSize:
    """Returns the least of some ascending numbers of GPUs that meets the deadline.

    The first number comes from the FLOPs of the model, the next from the speed of the one before.
    """
    needed = _gpus_at_peak(probes, numbers[0])
    if needed > numbers[-1]:
        return _beyond(probes, numbers[-1], needed)
    place = _first_place(numbers, needed / FIRST_MFU)
    while not probes.meets(numbers[place]):
        if place == len(numbers) - 1:
            return _missed(probes)
        place = _next_place(probes, numbers, place)
    while place and not probes.excludes(numbers[place - 1], numbers[place]):
        if not probes.meets(numbers[place - 1]):
            break
        place -= 1
    return ClusterSize(
        kind=probes.kind,
        run=probes.runs[numbers[place]],
        nearest=None,
        error=None,
        tried=tuple(sorted((*probes.runs, *probes.errors))),
    )


def _gpus_at_peak(probes: SizeProbes, some: int) -> float:
    """Returns the GPUs that would meet the deadline at the peak of each.

    some    a number of GPUs for which there is a request
    """
    request = probes.request_of(some)
    graph = build_graph(request.model, request.training, 1)
    flops = FLOPS_PER_PARAMETER * graph.num_active_parameters * probes.tokens
    peak = request.cluster.device.peak(request.training.precision)
    return flops / (peak * probes.seconds)


def _beyond(probes: SizeProbes, most: int, needed: float) -> ClusterSize:
    """Returns the answer where not even the peaks of all GPUs would meet the deadline."""
    error = InfeasibleError(
        f"even at its peak the deadline needs {needed:,.0f} GPUs, and at most {most:,} are tried"
    )
    return ClusterSize(kind=probes.kind, run=None, nearest=None, error=error, tried=())


def _first_place(numbers: tuple[int, ...], needed: float) -> int:
    """Returns the place of the first number that is not below `needed`, else the last place."""
    return next(
        (place for place, number in enumerate(numbers) if number >= needed), len(numbers) - 1
    )


def _next_place(probes: SizeProbes, numbers: tuple[int, ...], place: int) -> int:
    """Returns the place of the number of GPUs that would meet the deadline at the same speed."""
    gpus = numbers[place]
    run = probes.runs.get(gpus)
    seconds = run.seconds if run else probes.least_s.get(gpus, probes.seconds)
    wanted = gpus * seconds / probes.seconds
    return next(
        (later for later in range(place + 1, len(numbers)) if numbers[later] >= wanted),
        len(numbers) - 1,
    )


def _missed(probes: SizeProbes) -> ClusterSize:
    """Returns the answer where no number of GPUs meets the deadline."""
    nearest = min(probes.runs.values(), key=lambda run: run.seconds, default=None)
    errors = dict(probes.errors)
    for gpus, least_s in probes.least_s.items():
        errors[gpus] = InfeasibleError(
            f"on {gpus:,} GPUs no plan takes less than {least_s / DAY_S:,.3g} days"
        )
    return ClusterSize(
        kind=probes.kind,
        run=None,
        nearest=nearest,
        error=None if nearest else errors[max(errors)],
        tried=tuple(sorted((*probes.runs, *probes.errors))),
    )
