"""A run that hangs, or loses a rank, ends with one error that names the rank.

Torchrun then resumes from a checkpoint.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor import __main__ as command
from parplan.executor.data.batches import Batches
from parplan.executor.training import train
from parplan.executor.watch import watch as watching
from parplan.executor.watch.rank_progress import RankProgress
from parplan.executor.watch.watch import SLACK_S, RankState, Watch
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import write_plan
from tests.helpers.executor_plans import GPT, make_plan

TIMEOUT_S = 4.0  # longer than a start takes
FORK = multiprocessing.get_context("fork")


def _sleep() -> None:
    time.sleep(60)


def _stop() -> None:
    time.sleep(0.5)  # until a beat has told where it is
    os.kill(os.getpid(), signal.SIGSTOP)


def _die() -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise RuntimeError("a bug")


def _end(
    plan: Plan,
    path: Path,
    store: dist.TCPStore,
    action,
    *options: str,
    ranks=(1,),
    restart: int = 0,
    timeout_s: float = 60.0,
    other_s: float = 5.0,
) -> list[int | None]:
    """Returns the exit codes of `python -m parplan.executor` on two ranks.

    The ranks in `ranks` run `action` when they read the batch of the fourth step. A rank that has
    not ended `other_s` after the first has None, and is ended.
    """
    write_plan(plan, path / "plan.yaml")
    torch.set_num_threads(1)
    arguments = [str(path / "plan.yaml"), "--steps", "5", "--timeout", str(timeout_s), *options]
    processes = [
        FORK.Process(
            target=_rank,
            args=(rank, restart, store.port, arguments, action if rank in ranks else None),
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 2 * SLACK_S + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()) if process is processes[0] else other_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _rank(rank: int, restart: int, port: int, arguments: list[str], action) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }
    make = train.build_batches

    def build_batches(*arguments) -> Batches:
        batches = make(*arguments)

        def batch(step: int):
            if step == 3 and action:
                action()
            return batches(step)

        return batch

    train.build_batches = build_batches
    sys.argv = ["executor", *arguments]
    os._exit(command.run())


@pytest.fixture
def store() -> dist.TCPStore:
    """Returns a store like the one that torchrun makes for its ranks."""
    return dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_rank_that_does_not_come_along_is_named_with_its_place(tmp_path, store, capfd):
    codes = _end(make_plan(GPT, dp=2), tmp_path, store, _sleep, timeout_s=TIMEOUT_S)

    assert codes == [5, 5]
    error, hint = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"error: rank 1 \(pp 0, dp 1, tp 0\) has not moved since step 4, micro-batch 1, for 4 s: "
        r"it reads its batch \(test_watch\.py:\d+, _sleep\); the others wait for it",
        error,
    )
    assert hint.startswith("hint: ")


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_rank_that_is_stopped_is_named(tmp_path, store, capfd):
    codes = _end(make_plan(GPT, pp=2), tmp_path, store, _stop, timeout_s=TIMEOUT_S, other_s=0.1)

    assert codes == [5, None]
    assert capfd.readouterr().err.splitlines()[0] == (
        "error: rank 1 (pp 1, dp 0, tp 0) has not moved since step 4, micro-batch 1, for 4 s: it "
        "does not answer, so it is stopped, dead or stuck outside Python; the others wait for it"
    )


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_rank_that_dies_is_named_and_the_next_try_goes_on_with_the_losses_of_an_undisturbed_run(
    tmp_path, store, capfd
):
    """A restart makes new ranks on the same store, like torchrun.

    benchmarks/executor/recovery.py does it with torchrun itself.
    """
    plan = make_plan(dataclasses.replace(GPT, dropout=0.1), dp=2, zero=(3,))
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "2")

    assert _end(plan, tmp_path, store, _die, *saved) == [5, -signal.SIGKILL]
    killed = capfd.readouterr()
    assert _end(plan, tmp_path, store, None, *saved, restart=1) == [0, 0]
    restarted = capfd.readouterr()
    assert _end(plan, tmp_path, store, None, restart=2) == [0, 0]

    error, _ = killed.err.splitlines()
    assert error == "error: rank 1 (pp 0, dp 1, tp 0) died in step 4, micro-batch 1"
    assert (
        restarted.err == f"note: goes on from {tmp_path / 'saved' / 'step-000002'}, after step 2\n"
    )
    losses = _losses(capfd.readouterr().out)
    assert len(losses) == 5
    assert _losses(killed.out) == losses[:3]
    assert _losses(restarted.out) == losses[2:]


def _losses(out: str) -> list[tuple[str, str]]:
    return re.findall(r"step +(\d+)  loss ([\d.]+)", out)


@pytest.mark.multiproc
def test_a_bug_on_every_rank_is_shown_with_its_traceback(tmp_path, store, capfd):
    codes = _end(make_plan(GPT, dp=2), tmp_path, store, _fail, ranks=(0, 1))

    assert codes == [1, 1]
    err = capfd.readouterr().err
    assert "RuntimeError: a bug" in err
    assert "error: " not in err


def _state(**changes: object) -> RankState:
    return dataclasses.replace(
        RankState(beat=9, step=4, micro_batch=3, doing="runs", idle_s=5.0, waits=True, place=""),
        **changes,
    )


def _watch(mesh: Mesh, timeout_s: float = 60.0) -> Watch:
    return Watch(dist.HashStore(), 0, [mesh], RankProgress(), timeout_s)


def test_a_rank_that_waits_for_nobody_is_behind_before_one_that_came_less_far():
    states = {
        0: _state(),
        1: _state(waits=False, micro_batch=4),
        2: _state(micro_batch=1),
        3: _state(),
    }

    text = _watch(Mesh(pp=2, dp=1, tp=2))._verdict(states, [])

    assert text == (
        "rank 1 (pp 0, dp 0, tp 1) has not moved since step 5, after micro-batch 4, "
        "for 60 s: it runs; the others wait for it"
    )


class _Stream:
    """The default stream of a GPU; `ends` says whether its work is over."""

    def __init__(self, ends: bool) -> None:
        self.query = lambda: ends


def test_a_rank_that_reads_a_number_of_its_gpu_waits_for_the_rank_that_launches_nothing(
    monkeypatch,
):
    """NCCL's collectives run on the device: no rank's host is inside one."""
    store, mesh, device = dist.HashStore(), Mesh(pp=1, dp=2, tp=1), torch.device("cuda", 0)
    streams = [_Stream(ends=False), _Stream(ends=True)]
    watches = [Watch(store, rank, [mesh], RankProgress(), 0.04, device) for rank in range(2)]
    watches[1].progress.begin_step(0)  # it came further, and then stopped in its own code
    time.sleep(0.02)
    for each, stream in zip(watches, streams, strict=True):
        each._moved = (each.progress.moves, each._moved[1])
        monkeypatch.setattr(
            watching, "gpu", lambda _, s=stream: SimpleNamespace(default_stream=lambda _: s)
        )
        each._say()

    text = watches[0]._verdict(dict(watches[0]._states()), [])

    assert text.startswith("rank 1 (pp 0, dp 1, tp 0) has not moved since step 1")
    assert text.endswith("the others wait for it")


def test_a_gpu_that_failed_has_no_work(monkeypatch):
    def failed() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    stream = SimpleNamespace(query=failed)
    monkeypatch.setattr(watching, "gpu", lambda _: SimpleNamespace(default_stream=lambda _: stream))

    assert not watching.has_work(torch.device("cuda", 0))


def test_where_all_wait_the_one_that_came_least_far_is_named():
    states = {0: _state(), 1: _state(step=3, micro_batch=8), 2: _state(), 3: _state()}

    assert "rank 1 (pp 0, dp 1, tp 0)" in (
        text := _watch(Mesh(pp=2, dp=2, tp=1))._verdict(states, [])
    )
    assert text.endswith("all wait for one another")


def test_silent_ranks_are_counted_and_those_that_ended_are_not():
    states = {0: _state(waits=False), 1: _state(ended=True), 2: _state(), 3: _state()}

    assert (
        _watch(Mesh(pp=2, dp=2, tp=1))
        ._verdict(states, [1, 2, 3])
        .startswith("rank 2 (pp 1, dp 0, tp 0) and 1 more has not moved")
    )


def test_a_rank_that_never_started_is_named():
    assert (
        _watch(Mesh(pp=1, dp=3, tp=1))._verdict({0: _state()}, [])
        == "rank 1 (pp 0, dp 1, tp 0) and 1 more has not started within 60 s"
    )


def test_more_ranks_beat_less_often():
    assert _watch(Mesh(pp=1, dp=1, tp=1)).beat_s == 0.2
    assert _watch(Mesh(pp=4, dp=8, tp=8)).beat_s == pytest.approx(0.8)
    assert 2 * _watch(Mesh(pp=16, dp=64, tp=8)).beat_s < SLACK_S


def test_the_run_does_not_end_while_another_rank_moves(monkeypatch):
    """Two ranks run in one process.

    Rank 0 has not moved for the timeout; rank 1 has just moved, then has not either.
    """
    store, ends = dist.HashStore(), []
    progress = RankProgress()
    first, second = (
        Watch(store, rank, [Mesh(pp=1, dp=2, tp=1)], progress, 1.0) for rank in range(2)
    )
    monkeypatch.setattr(Watch, "_end", lambda self, text: ends.append(text))

    def look(idle_s: float, other_idle_s: float) -> None:
        for watch, before_s in ((first, idle_s), (second, other_idle_s)):
            watch._moved = (progress.moves, time.monotonic() - before_s)
            watch._say()
        first._look(idle_s)

    look(1.0, 0.1)
    look(5.0, 0.5)
    assert ends == []

    look(5.5, 1.0)

    assert len(ends) == 1


def test_a_rank_of_a_pool_has_the_coordinates_of_its_own_mesh():
    meshes = [Mesh(pp=2, dp=1, tp=1), Mesh(pp=1, dp=2, tp=2)]
    watch = Watch(dist.HashStore(), 0, meshes, RankProgress(), 1.0)

    assert watch.num_ranks == 6
    assert watch._name(1, 0) == "rank 1 (pool 0, pp 1, dp 0, tp 0)"
    assert watch._name(5, 2) == "rank 5 (pool 1, pp 0, dp 1, tp 1) and 2 more"
