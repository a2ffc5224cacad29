"""The table of paths has every place of the source that only a run on GPUs reaches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parplan.commands.doctor_plans import doctor_plans
from parplan.executor.doctor import training_paths
from parplan.executor.doctor.gpu_places import gpu_places
from parplan.executor.doctor.paths import EVERYWHERE, PATHS
from parplan.executor.rules.all_rules import validate

ROOT = Path(__file__).resolve().parents[3]
OWN = "executor/doctor/"


def places() -> set[str]:
    """The places of the executor and the profiler, without those of the doctor itself."""
    found = (
        place for room in ("executor", "profiles/profiler") for place in gpu_places(ROOT, room)
    )
    return {place for place in found if not place.startswith(OWN)}


def test_every_place_that_only_gpus_reach_belongs_to_one_path():
    covered = Counter(place for path in PATHS for place in path.covers)
    covered.update(EVERYWHERE.keys())

    assert places() == set(covered)
    assert {place: count for place, count in covered.items() if count > 1} == {}


def test_paths_have_unlike_names_and_say_what_they_compare():
    assert len({path.name for path in PATHS}) == len(PATHS)
    assert all(path.checks for path in PATHS)


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_each_training_path_has_a_plan_that_the_executor_runs(ranks):
    plans = doctor_plans(ranks)

    assert set(plans) == {path.name for path in training_paths.PATHS if path.ranks <= ranks}
    for plan in plans.values():
        validate(plan)
        assert plan.mesh.num_ranks == ranks


SOURCES = {
    "asks": "def f(device):\n    return is_gpu(device)",
    "runtime": "def f(device):\n    gpu(device).synchronize()",
    "torch-cuda": "def f():\n    torch.cuda.empty_cache()",
    "pins": "def f(x):\n    return x.pin_memory()",
    "pinned": "def f():\n    return torch.empty(3, pin_memory=True)",
    "non-blocking": "def f(x, y):\n    x.copy_(y, non_blocking=True)",
    "batched": "def f(ops):\n    dist.batch_isend_irecv(ops)",
    "group": "def f():\n    dist.init_process_group('gloo')",
    "nccl": "def f(name):\n    return name == 'nccl'",
    "stream": "def f(x, s):\n    x.record_stream(s)",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_use_of_a_gpu_is_found_in_its_function(source, tmp_path):
    (tmp_path / "room").mkdir()
    inside = "class A:\n" + "\n".join(f"    {line}" for line in source.splitlines())
    plain = "def g(x):\n    return x.to('cpu') + 1"
    (tmp_path / "room" / "file.py").write_text(f"{source}\n\n{inside}\n\n{plain}\n")

    assert list(gpu_places(tmp_path, "room")) == ["room/file.py:f", "room/file.py:A.f"]
