"""Host offload never makes the least redundant plan or the front worse, and its time is counted."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from parplan.costmodels.chunks.chunk_schedule import rank_chunks
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction
from parplan.costmodels.layers.chunked_layer import Chunking
from parplan.costmodels.layers.model_states import ideal_states
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.step import price_step
from parplan.planner.deadline import NEVER
from parplan.planner.master import Master
from parplan.planner.objective import Objective
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of
from parplan.planner.plan.plan_file import plan_to_yaml, read_plan, write_plan
from parplan.planner.plan.plan_strategy import prices_of_plan
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, SearchOptions
from parplan.planner.search.pareto import ParetoFront, plan_paths
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.models.spec import Precision
from parplan.profiles.units import GIB
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.plots.front_plot import draw_front
from parplan.report.searches.front_document import front_document
from parplan.report.searches.front_table import print_front
from parplan.report.text import gib_text
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import Instance
from tests.helpers.planning import find_front, find_plan
from tests.planner.stage_columns.test_chunk_columns import (
    STATES,
    chunked_frames,
    every_strategy,
    instance,
)

DIGIT_GIB = 1e-4  # the last digit of a plan file
ONE_DOMAIN: dict[str, object] = {"numa_domains": None, "gpus_per_numa": None}
CASES = [
    (1, 20, Precision.FP32),
    (1, 6, Precision.BF16),
    pytest.param(2, 20, Precision.BF16, marks=pytest.mark.slow),
    pytest.param(4, 3, Precision.FP32, marks=pytest.mark.slow),
]


def six_blocks(
    gpus: int, states: int, precision: Precision = Precision.FP32, **changes: object
) -> Instance:
    """Returns six blocks on devices with room for the states of `states` of them.

    The host has one NUMA domain.
    """
    return instance(gpus, states * STATES, precision, 8, **{**ONE_DOMAIN, **changes})


def lean(
    case: Instance, offload: tuple[Offload, ...] | None, slowdown: float = 0.1, **options: object
) -> Plan:
    return find_plan(
        case.model,
        case.cluster,
        case.training,
        Objective.MEMORY,
        constraints=Constraints(offload=offload),
        options=SearchOptions(memory_margin=0.0, max_slowdown=slowdown, **options),
    )


def peak_gib(plan: Plan) -> float:
    return max(stage.total for stage in plan.predicted.memory_gib)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "states", "precision"), CASES)
@pytest.mark.parametrize("slowdown", mostly_slow([0.0, 0.1, 0.5], {0.1}))
def test_with_the_host_devices_hold_no_more_than_without_it_at_the_same_slowdown(
    gpus: int,
    states: int,
    precision: Precision,
    slowdown: float,
) -> None:
    case = six_blocks(gpus, states, precision)
    alone, hosted = lean(case, (), slowdown), lean(case, SEARCHED_OFFLOAD, slowdown)

    assert peak_gib(hosted) <= peak_gib(alone)
    assert hosted.predicted.redundancy_gib.total <= alone.predicted.redundancy_gib.total
    assert hosted.predicted.step_time_s.value <= max(
        alone.predicted.step_time_s.value, (1 + slowdown) * alone.search.fastest_step_time_s * 1.02
    )  # simulated against the closed form
    if hosted.chunks is not None:
        assert host_gib(hosted) * GIB <= case.cluster.host_memory_bytes
        assert hosted.predicted.redundancy_gib.total < alone.predicted.redundancy_gib.total


@pytest.mark.slow
def test_a_slowdown_that_pays_for_copies_takes_states_off_the_devices() -> None:
    case = six_blocks(1, 20)
    plans = [lean(case, SEARCHED_OFFLOAD, slowdown) for slowdown in (0.0, 0.1, 0.5)]

    assert [plan.chunks is not None for plan in plans] == [False, True, True]
    assert peak_gib(plans[2]) <= peak_gib(plans[1]) < 0.5 * peak_gib(plans[0])


@pytest.mark.slow
def test_a_slow_host_is_not_worth_it_and_a_small_one_keeps_less() -> None:
    slow = lean(
        six_blocks(1, 20, pcie_bytes_per_s=1e7, pcie_node_bytes_per_s=None), SEARCHED_OFFLOAD
    )
    assert slow.chunks is None
    small_bytes = 60 * 2**20
    small = lean(six_blocks(1, 20, host_memory_bytes=small_bytes), SEARCHED_OFFLOAD, 0.5)
    large = lean(six_blocks(1, 20, host_memory_bytes=GIB), SEARCHED_OFFLOAD, 0.5)
    assert 0 < host_gib(small) * GIB <= small_bytes < host_gib(large) * GIB
    assert small.predicted.redundancy_gib.total > large.predicted.redundancy_gib.total


def test_redundant_is_what_devices_hold_beyond_one_copy_of_all_states_wherever_they_lie() -> None:
    plan = lean(six_blocks(1, 20), SEARCHED_OFFLOAD, 0.5)
    (held,), redundancy = plan.predicted.memory_gib, plan.predicted.redundancy_gib
    copy = ideal_states(_num_parameters(plan), 1, plan.training)

    assert held.host > 0
    for name, one_copy in zip(("parameters", "gradients", "optimizer"), copy, strict=True):
        assert getattr(redundancy, name) == pytest.approx(
            getattr(held, name) - one_copy / GIB, abs=2 * DIGIT_GIB
        )
    assert redundancy.optimizer < 0


def _num_parameters(plan: Plan) -> int:
    return prices_of_plan(plan).graph(1).num_parameters


@pytest.mark.slow
def test_its_file_has_the_budget_of_every_rank_and_is_priced_and_scheduled_as_it_was(
    tmp_path: Path,
) -> None:
    plan, path = lean(six_blocks(4, 3), SEARCHED_OFFLOAD, 0.5), tmp_path / "plan.yaml"
    write_plan(plan, path)
    back = read_plan(path)

    assert back == plan
    assert reprice(back).plan.predicted == plan.predicted
    assert plan.chunks is not None
    for rank in plan.chunks.ranks:
        chunks = rank_chunks_of(back, rank.stage)
        assert rank.smallest_bytes <= chunks.most_bytes <= rank.device_bytes == chunks.device_bytes


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", [0.05, 0.2, 1.0])
def test_few_bytes_are_missed_of_the_best_of_all_strategies_with_exact_schedules(
    slowdown: float,
) -> None:
    """The closed form is furthest from exact schedules with slow PCIe and six small blocks."""
    case, offload = (
        instance(1, 20 * STATES, Precision.FP32, 4, pcie_bytes_per_s=3e9, **ONE_DOMAIN),
        (Offload.OPTIMIZER, Offload.PARAMETERS),
    )
    pins = Constraints(offload=offload, recompute=tuple(Recompute), micro_batch_size=(2,))
    price_cache = case.price_cache()
    prices = []
    (layout,) = chunked_frames(case, pins)
    for strategy in every_strategy(layout):
        needed = rank_chunks(
            strategy, 0, price_cache, eviction=Eviction.OPT, device_bytes=10**12
        ).smallest_bytes
        for more in (0, 3_200_000):
            price = price_step(strategy, price_cache.within(Chunking(device_bytes=needed + more)))
            prices.append((price.step_s, sum(rank.total for rank in price.redundant)))
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        Objective.MEMORY,
        constraints=pins,
        options=SearchOptions(memory_margin=0.0, max_slowdown=slowdown),
    )
    best = min(
        redundant
        for step_s, redundant in prices
        if step_s <= (1 + slowdown) * plan.search.fastest_step_time_s
    )
    copy = sum(ideal_states(_num_parameters(plan), 1, plan.training))

    assert plan.chunks is not None
    assert plan.predicted.redundancy_gib.total * GIB <= best + 0.12 * copy


@pytest.mark.slow
def test_where_nothing_fits_without_the_host_the_fastest_with_it_is_the_measure() -> None:
    case = six_blocks(1, 6)
    with pytest.raises(InfeasibleError):
        lean(case, ())
    fastest = find_plan(
        case.model,
        case.cluster,
        case.training,
        constraints=Constraints(offload=SEARCHED_OFFLOAD),
        options=SearchOptions(memory_margin=0.0),
    )
    for offload in (None, SEARCHED_OFFLOAD):
        plan = lean(case, offload)
        fastest_s = fastest.predicted.step_time_s.value
        assert plan.search.fastest_step_time_s == pytest.approx(fastest_s, abs=1e-6)
        assert plan.predicted.redundancy_gib.total < fastest.predicted.redundancy_gib.total
        assert plan.predicted.step_time_s.value <= 1.1 * fastest_s * (1 + 1e-5)


def test_with_nothing_said_the_host_is_left_alone_where_the_devices_are_enough() -> None:
    assert plan_to_yaml(lean(six_blocks(1, 20), None)) == plan_to_yaml(lean(six_blocks(1, 20), ()))


def test_the_same_request_gives_the_same_bytes() -> None:
    first = plan_to_yaml(lean(six_blocks(1, 20), SEARCHED_OFFLOAD))
    second = plan_to_yaml(lean(six_blocks(1, 20), SEARCHED_OFFLOAD))
    assert first == second


def test_an_interrupt_with_the_host_keeps_the_plan_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = six_blocks(1, 20)
    calls = []
    solve = Master.leanest
    alone = lean(case, ())

    def interrupt(self: Master, *arguments: object) -> object:
        if sum(len(picks) for picks in self.picks) and any(
            column.homes.host for picks in self.picks for column in picks
        ):
            calls.append(self)
            raise KeyboardInterrupt
        return solve(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Master, "leanest", interrupt)
    plan = lean(case, SEARCHED_OFFLOAD)

    assert calls
    assert plan.predicted == alone.predicted
    assert plan.search.status is Status.FEASIBLE
    assert plan.search.bound < plan.search.value


def test_a_time_limit_is_that_of_all_its_searches() -> None:
    plan = lean(six_blocks(1, 20), SEARCHED_OFFLOAD, deadline=NEVER.first_plan())

    assert plan.search.status is Status.FEASIBLE
    assert plan.chunks is None


@cache
def front_of(gpus: int, states: int, offload: tuple[Offload, ...] | None) -> ParetoFront:
    case = six_blocks(gpus, states)
    return find_front(
        case.model,
        case.cluster,
        case.training,
        constraints=Constraints(offload=offload),
        options=SearchOptions(memory_margin=0.0),
        num_points=8,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "states"),
    [
        (1, 20),
        pytest.param(2, 6, marks=pytest.mark.slow),
        pytest.param(2, 20, marks=pytest.mark.slow),
    ],
)
def test_the_front_with_the_host_is_nowhere_worse_than_without_it(gpus: int, states: int) -> None:
    alone, hosted = front_of(gpus, states, ()), front_of(gpus, states, SEARCHED_OFFLOAD)

    for point in alone.points:
        assert any(
            all(
                mine <= theirs
                for mine, theirs in zip(hosted_point.values, point.values, strict=True)
            )
            for hosted_point in hosted.points
        )
    assert not any(first.dominates(second) for first in hosted.points for second in hosted.points)
    assert hosted.stopped is None
    assert hosted.uses_host
    assert not alone.uses_host
    assert hosted.nothing_within_gib is not None
    assert alone.nothing_within_gib is not None
    assert (
        hosted.nothing_within_gib
        < min(point.peak_memory_gib for point in hosted.points)
        < alone.nothing_within_gib
    )
    least = min(point.peak_memory_gib for point in hosted.points)
    assert least - hosted.nothing_within_gib < 3 / 1024


@pytest.mark.slow
def test_a_front_where_only_the_host_makes_it_fit_has_it_in_every_point() -> None:
    with pytest.raises(InfeasibleError):
        front_of(1, 6, ())
    unasked, asked_for = front_of(1, 6, None), front_of(1, 6, SEARCHED_OFFLOAD)

    assert all(point.host_gib > 0 for point in unasked.points)
    assert [plan_to_yaml(point.plan) for point in unasked.points] == [
        plan_to_yaml(point.plan) for point in asked_for.points
    ]


@pytest.mark.slow
def test_a_front_with_nothing_said_leaves_the_host_alone_where_the_devices_are_enough() -> None:
    assert [point.values for point in front_of(1, 20, None).points] == [
        point.values for point in front_of(1, 20, ()).points
    ]


def test_an_interrupt_among_the_searches_with_the_host_keeps_the_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = six_blocks(1, 20)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parplan.planner.search.pareto.search_leaner", interrupt)
    front = find_front(
        case.model,
        case.cluster,
        case.training,
        constraints=Constraints(offload=SEARCHED_OFFLOAD),
        options=SearchOptions(memory_margin=0.0),
        num_points=8,
    )

    assert front.stopped == "Ctrl-C"
    assert front.points
    assert not any(
        point.plan.search.front.complete for point in front.points if point.plan.search.front
    )


@pytest.mark.slow
def test_the_table_and_the_picture_say_what_each_point_keeps_on_the_host(tmp_path: Path) -> None:
    for front in (front_of(1, 20, ()), front_of(1, 20, SEARCHED_OFFLOAD)):
        out = io.StringIO()
        print_front(
            front,
            plan_paths(Path("plan.yaml"), len(front.points)),
            Console(file=out, width=200),
            SummaryContext(whole=True),
        )
        text = out.getvalue()
        assert ("GiB of a node's host" in text) == front.uses_host
        for point in front.points:
            assert not point.host_gib or f" {gib_text(point.host_gib)} " in text
        document = front_document(front)
        assert [row.host_gib for row in document.points] == [
            point.host_gib for point in front.points
        ]
        draw_front(front, tmp_path / "front.svg")
        assert ("uses the host" in (tmp_path / "front.svg").read_text()) == front.uses_host


def test_pins_hold_with_the_host() -> None:
    case = six_blocks(2, 20)
    plan = find_plan(
        case.model,
        case.cluster,
        case.training,
        Objective.MEMORY,
        constraints=Constraints(offload=(Offload.OPTIMIZER,), dp=(2,), micro_batch_size=(2,)),
        options=SearchOptions(memory_margin=0.0),
    )

    assert plan.mesh.dp == 2
    assert plan.chunks is not None
    assert {str(group.home) for group in plan.chunks.groups} <= {"device", "optimizer"}
    assert plan.search.objective is Objective.MEMORY
