"""Perfetto reads the trace: ordered complete events, named threads, predicted beside measured."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.runs.run_account import plan_trace_ranks, trace_ranks
from parplan.report.chrome_trace import trace_json
from tests.helpers.synthetic_runs import estimated, factors, run_of

PLAN = {"pp": 2, "dp": 2}


def parsed(text: str) -> tuple[dict[int, str], dict[tuple[int, int], str], list[dict]]:
    """Returns processes and threads by their ids, and the complete events of the trace."""
    events = json.loads(text)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert {e["ph"] for e in events} == {"M", "X"}
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in events)
    complete = [e for e in events if e["ph"] == "X"]
    assert all(
        e["ts"] >= -1e-3 and e["dur"] >= 0 and e["args"]["seconds"] == pytest.approx(e["dur"] / 1e6)
        for e in complete
    )
    assert [e["ts"] for e in complete] == sorted(e["ts"] for e in complete)
    return processes, threads, complete


def test_every_rank_shows_the_predicted_and_the_measured_step():
    plan = estimated(**PLAN)
    run = run_of(plan, factors(plan, forward=2.0))

    processes, threads, events = parsed(trace_json(trace_ranks(run)))

    assert processes == {
        0: "rank 0: pp 0 dp 0 tp 0",
        1: "rank 1: pp 0 dp 1 tp 0",
        2: "rank 2: pp 1 dp 0 tp 0",
        3: "rank 3: pp 1 dp 1 tp 0",
    }
    assert threads == {
        (pid, tid): name for pid in range(4) for tid, name in enumerate(("predicted", "measured"))
    }
    names = [[e["name"] for e in events if (e["pid"], e["tid"]) == (2, tid)] for tid in (0, 1)]
    assert names[0] == names[1]
    assert {"F1.0", "F1.3", "B1.0", "B1.3", "optimizer"} <= set(names[0])
    seconds = [
        [
            e["args"]["seconds"]
            for e in events
            if (e["pid"], e["tid"], e["name"]) == (2, tid, "F1.2")
        ]
        for tid in (0, 1)
    ]
    assert seconds[1][0] > 1.5 * seconds[0][0]


def test_a_recompute_ahead_is_shown_by_itself():
    plan = estimated(
        pp=2, stack="parplan", recompute=Recompute.FULL, schedule=Schedule.EARLY_RECOMPUTE
    )

    _, _, events = parsed(trace_json(plan_trace_ranks(plan)))

    first = [e for e in events if e["pid"] == 0]
    recomputes = {e["name"]: e for e in first if e["cat"] == "R"}
    assert set(recomputes) == {"R0.3"}
    backward = {e["name"]: e["args"]["seconds"] for e in first if e["cat"] == "B"}
    assert recomputes["R0.3"]["args"]["seconds"] == pytest.approx(
        backward["B0.2"] - backward["B0.3"]
    )


def test_events_of_a_thread_do_not_overlap_and_say_where_they_are_from():
    run = run_of(estimated(**PLAN))

    _, threads, events = parsed(trace_json(trace_ranks(run)))

    for thread in threads:
        of_thread = [e for e in events if (e["pid"], e["tid"]) == thread]
        assert all(
            first["ts"] + first["dur"] <= then["ts"] + 1e-3 for first, then in pairwise(of_thread)
        )
    forward = next(e for e in events if e["name"] == "F1.2")
    assert (forward["args"]["stage"], forward["args"]["micro_batch"]) == (1, 2)


def test_a_plan_alone_gives_its_predicted_timeline():
    plan = estimated(**PLAN)

    processes, threads, events = parsed(trace_json(plan_trace_ranks(plan)))

    assert processes == {0: "pipeline rank 0", 1: "pipeline rank 1"}
    assert set(threads.values()) == {"predicted"}
    end_s = max(e["ts"] + e["dur"] for e in events) / 1e6
    assert end_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
    assert min(e["ts"] for e in events) == 0.0
