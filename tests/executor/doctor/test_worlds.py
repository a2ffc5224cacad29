"""The doctor's paths run on CPU ranks under a stand-in for a GPU, which refuses mixed devices."""

from __future__ import annotations

import pytest
import torch

from parplan.commands.doctor_plans import doctor_plans
from parplan.executor.doctor import doctor_rank, worlds
from parplan.executor.doctor import path as path_records
from parplan.executor.doctor.path import Checked, GpuPath, Place, RefusedError, WrongError
from parplan.executor.doctor.paths import EVERYWHERE, PATHS, path_of
from parplan.executor.doctor.stand_in import KIND
from parplan.executor.doctor.worlds import examine
from parplan.planner.runs.doctor_report import Outcome
from tests.executor.doctor import stand_in_faults

pytestmark = pytest.mark.multiproc

# one path of every kind; the slow test has all of them on two ranks
QUICK = ("saved tensors on the host", "chunk copies", "random numbers", "16-bit products", "lookup")
# places that no path of the stand-in runs in the thread that is traced, with the reason
NOT_TRACED = {
    "executor/traced/divided_calls.py:DividedCalls._random": "a traced module's, over tp",
    "executor/chunks/moment_trace.py:MomentTrace.__init__": "of runs that trace their memory",
    "executor/pools/joined_ranks.py:JoinedRanks.__init__": "the stand-in has no such group",
    "executor/pools/joined_ranks.py:join_pool": "the stand-in has no such group",
}


def test_paths_run_on_a_stand_in_which_finds_mistakes_of_devices():
    """One process runs both: to start it takes most of the time."""
    right, faults = [path_of(name) for name in QUICK], stand_in_faults.PATHS

    examined = examine(KIND, 1, doctor_plans(1), paths=(*right, *faults))

    findings = {each.path: each for each in examined.findings}
    for path in right:
        assert findings[path.name].outcome is Outcome.PASSED, findings[path.name]
    for path in faults:
        assert findings[path.name].outcome is Outcome.WRONG, findings[path.name]
        assert stand_in_faults.EXPECTED[path.name] in findings[path.name].says


@pytest.mark.slow
def test_all_paths_run_on_two_stand_ins_and_run_the_places_that_they_cover(monkeypatch):
    """A busy machine may take minutes for a path, whose operators all run in Python."""
    monkeypatch.setattr(worlds, "PATH_S", 600.0)

    examined = examine(KIND, 2, doctor_plans(2), traces=True, budget_s=1800.0)

    outcomes = {each.path: each.outcome for each in examined.findings}
    refused = {"group of pools": Outcome.REFUSED}
    assert outcomes == {path.name: Outcome.PASSED for path in PATHS} | refused, examined.findings
    for path in PATHS:
        missing = set(path.covers) - examined.ran[path.name] - NOT_TRACED.keys()
        assert missing == set(), path.name
    assert not EVERYWHERE.keys() & NOT_TRACED.keys()


@pytest.mark.slow
def test_a_path_that_hangs_or_dies_is_named_and_the_others_run_in_a_new_world(monkeypatch):
    monkeypatch.setattr(worlds, "PATH_S", 3.0)

    examined = examine("cpu", 2, {}, paths=stand_in_faults.HANGING, budget_s=600.0)

    assert [(each.outcome, each.says) for each in examined.findings] == [
        (Outcome.PASSED, "first"),
        (Outcome.WRONG, "rank 1 did not end within 3 s"),
        (Outcome.WRONG, "rank 0 died with exit code 7"),
        (Outcome.PASSED, "last"),
    ]


def test_what_a_path_raises_is_its_outcome(tmp_path):
    def raising(error: Exception) -> Outcome:
        def run(_: Place) -> Checked:
            raise error

        path = GpuPath(name="raises", checks="x", run=run)
        place = Place(device=torch.device("cpu"), rank=0, world=1, folder=tmp_path)
        return doctor_rank._outcome(path, place)[0]

    assert raising(RefusedError("no fp8")) is Outcome.REFUSED
    assert raising(NotImplementedError("no kernel")) is Outcome.REFUSED
    assert raising(WrongError("differs")) is Outcome.WRONG
    assert raising(RuntimeError("CUDA error")) is Outcome.WRONG


def test_an_error_is_relative_to_the_largest_value_and_nan_is_the_largest_error():
    expected = torch.tensor([1.0, -4.0])

    assert path_records.largest_error(torch.tensor([1.0, -3.0]), expected) == 0.25
    assert path_records.largest_error(torch.tensor([1.0, float("nan")]), expected) == float("inf")
    assert path_records.largest_error(torch.zeros(3), expected) == float("inf")
