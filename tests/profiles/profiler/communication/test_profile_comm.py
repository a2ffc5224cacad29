"""Measured communication of two gloo ranks: a record of each case, resumed runs and failures."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp

from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.machines.measurements import CaseFigures, CaseOutcome, Record
from parplan.profiles.profile_comm import _measured_on
from parplan.profiles.profiler.communication import (
    collective_timing as collectives,
)
from parplan.profiles.profiler.communication import (
    comm_launch as launch,
)
from parplan.profiles.profiler.communication import (
    comm_run,
)
from parplan.profiles.profiler.communication.collective_timing import Effort, timing_of
from parplan.profiles.profiler.communication.comm_cases import (
    COLLECTIVES,
    COMMUNICATOR,
    OVERLAP,
    POINT_TO_POINT,
    comm_cases,
    shape_of,
)
from parplan.profiles.profiler.communication.comm_file import (
    COMM_VERSION,
    CommFile,
    in_flight_path,
    read_comm_file,
    write_comm_file,
)
from parplan.profiles.profiler.communication.comm_run import Chief, InFlight, run_cases
from parplan.profiles.profiler.communication.group_shapes import Shape, World
from parplan.profiles.profiler.communication.measuring_ranks import (
    chosen_device,
    join_world,
    world_of_environment,
)
from parplan.profiles.profiler.journal import journal_path, open_journal

PAIR = World(nodes=1, ranks_per_node=2)
ASKED = {"device": "cpu"}


def cases_of(world, largest_bytes=2048):
    return comm_cases(world, largest_bytes=largest_bytes, precision="fp32", product=8)


def _rank(rank, world, port, journal, timeout_s, cases):
    """One rank of a run; the journal is that of rank 0. A PlannerError is its exit code."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    chief = None
    if rank == 0:
        chief = Chief(
            cases=cases,
            journal=open_journal(journal, ASKED),
            in_flight=InFlight(journal.with_suffix(".in-flight")),
        )
    ranks = join_world(world, torch.device("cpu"), timedelta(seconds=timeout_s))
    try:
        run_cases(cases, ranks, chief, Effort(repeats=3, patience_s=0.0))
    except PlannerError as error:
        os._exit(error.exit_code)
    os._exit(0)


def run(journal, cases, world=PAIR, timeout_s=20.0):
    """The records of a run of its own world, and the exit codes of its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = mp.start_processes(
        _rank,
        args=(world, port, journal, timeout_s, cases),
        nprocs=world.num_ranks,
        start_method="fork",
        join=False,
    )
    for process in started.processes:
        process.join(60.0 if process is started.processes[0] else 5.0)
        process.kill()
    kept = open_journal(journal, ASKED)
    kept.close()
    return kept.records, [process.exitcode for process in started.processes]


@pytest.mark.multiproc
def test_two_ranks_measure_every_collective_and_message_and_the_overlap(tmp_path):
    cases = cases_of(PAIR)
    records, codes = run(tmp_path / "journal", cases)
    timed = [
        record for record in records.values() if record.case.work in (*COLLECTIVES, POINT_TO_POINT)
    ]
    (overlap,) = [record for record in records.values() if record.case.work == OVERLAP]
    (communicator,) = [record for record in records.values() if record.case.work == COMMUNICATOR]

    assert codes == [0, 0]
    assert [record.case for record in records.values()] == list(cases)
    assert {record.case.work for record in timed} == {*COLLECTIVES, POINT_TO_POINT}
    assert all(
        record.measured.times["time"].median_us > 0 and record.measured.times["time"].repeats == 3
        for record in timed
    )
    assert set(overlap.measured.figures) == {
        "compute_alone_s",
        "communication_alone_s",
        "both_s",
        "products",
    }
    assert communicator.outcome is CaseOutcome.UNSUPPORTED
    assert not (tmp_path / "journal.in-flight").exists()


@pytest.mark.slow
@pytest.mark.multiproc
def test_ranks_of_several_nodes_measure_every_shape_at_once_and_alone(tmp_path):
    """Four ranks that count as two nodes; ranks outside a group wait for those in it."""
    cases = [
        case
        for case in cases_of(World(nodes=2, ranks_per_node=2), 1024)
        if case.work in ("all_gather", POINT_TO_POINT, OVERLAP)
    ]
    records, codes = run(tmp_path / "journal", cases, World(nodes=2, ranks_per_node=2))

    assert codes == [0] * 4
    assert {shape_of(case) for case in cases} >= {
        Shape(nodes=2, ranks_per_node=1, groups=2),
        Shape(nodes=2, ranks_per_node=1, groups=1),
        Shape(nodes=1, ranks_per_node=2, groups=1),
    }
    assert [record.case for record in records.values()] == cases
    assert all(record.outcome is CaseOutcome.MEASURED for record in records.values())


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_resumed_run_measures_nothing_twice_and_tries_the_case_in_flight_again(tmp_path):
    """The first run makes only the first cases.

    Its remainder is then noted as in flight, as a kill leaves it.
    """
    cases, journal = cases_of(PAIR), tmp_path / "journal"
    first, _ = run(journal, cases[:5])
    InFlight(journal.with_suffix(".in-flight")).begin(cases[5])
    length = journal.stat().st_size
    records, codes = run(journal, cases)
    repeated, _ = run(journal, cases)

    assert codes == [0, 0]
    assert len(first) == 5
    assert {key: records[key] for key in first} == first
    assert records[cases[5].key].outcome is CaseOutcome.MEASURED
    assert set(records) == {case.key for case in cases}
    assert length < journal.stat().st_size
    assert repeated == records


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("fault", "outcome", "detail"),
    [
        pytest.param("hang", CaseOutcome.HUNG, "Timed out", id="hangs"),
        pytest.param("exit", CaseOutcome.CRASHED, "", id="crashes"),
        pytest.param("lacks", CaseOutcome.UNSUPPORTED, "does not support", id="is-not-there"),
        pytest.param("memory", CaseOutcome.OUT_OF_MEMORY, "do not fit", id="does-not-fit"),
    ],
)
def test_a_case_that_fails_is_recorded_and_the_next_run_does_the_rest(
    tmp_path, monkeypatch, fault, outcome, detail
):
    cases, journal = (
        [case for case in cases_of(PAIR) if case.work in ("all_reduce", "all_gather")],
        tmp_path / "journal",
    )
    bad = cases[1]
    original = collectives.collective_call

    def call(case, group, ranks, device):
        if case == bad and fault == "memory" and torch.distributed.get_rank() == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return _faulty(fault, group) if case == bad else original(case, group, ranks, device)

    monkeypatch.setattr(collectives, "collective_call", call)
    monkeypatch.setattr(comm_run, "LAST_WORD_S", 0.1)
    first, codes = run(journal, cases, timeout_s=1.5)
    rest, after = run(journal, cases, timeout_s=20.0)

    ends = fault in ("hang", "exit")
    assert first[bad.key].outcome is outcome
    assert detail in first[bad.key].detail
    assert (codes[0] != 0) is ends
    assert len(first) == (2 if ends else len(cases))
    assert after == [0, 0]
    assert {key: rest[key] for key in first} == first
    assert all(rest[case.key].outcome is CaseOutcome.MEASURED for case in cases if case != bad)


def _faulty(fault, group):
    """Returns a call that fails.

    It fails on both ranks where the backend lacks it, on the second where it hangs or dies.
    """

    def run_it():
        if fault == "lacks":
            raise RuntimeError("ProcessGroupGloo does not support this")
        if torch.distributed.get_rank() == 1:
            if fault == "exit":
                os._exit(9)
            time.sleep(3.0)
        torch.distributed.all_reduce(torch.ones(1), group=group)

    return run_it


def test_a_case_that_was_in_flight_too_often_is_recorded_as_crashed(tmp_path):
    cases = cases_of(PAIR)
    journal = open_journal(tmp_path / "journal", ASKED)
    chief = Chief(cases=cases, journal=journal, in_flight=InFlight(tmp_path / "in-flight"))
    actual = []
    for _ in range(3):
        chief.give_up(3)
        actual.append(cases[0].key in journal.records)
        chief.in_flight.begin(cases[0])
    chief.give_up(3)
    journal.close()

    assert actual == [False, False, False]
    assert journal.records[cases[0].key].outcome is CaseOutcome.CRASHED
    assert not (tmp_path / "in-flight").exists()


def test_what_is_in_flight_is_forgotten_when_another_case_begins(tmp_path):
    in_flight, (first, second) = InFlight(tmp_path / "in-flight"), cases_of(PAIR)[:2]
    in_flight.begin(first)
    in_flight.begin(first)
    twice = in_flight.attempts(first)
    in_flight.begin(second)

    assert (twice, in_flight.attempts(first), in_flight.attempts(second)) == (2, 0, 1)


def test_after_the_budget_nothing_more_is_begun(tmp_path):
    journal = open_journal(tmp_path / "journal", ASKED)
    chief = Chief(
        cases=cases_of(PAIR),
        journal=journal,
        in_flight=InFlight(tmp_path / "in-flight"),
        ends_at_s=time.monotonic() - 1,
    )
    journal.close()

    assert chief.next_index() == -1
    assert len(chief.left()) == len(chief.cases)


def test_a_timing_is_the_median_and_half_the_interquartile_range_over_it():
    timing = timing_of([5e-6, 1e-6, 2e-6, 3e-6, 4e-6])

    assert timing.median_us == pytest.approx(3.0)
    assert timing.spread == pytest.approx((4.0 - 2.0) / 2 / 3.0)
    assert timing.repeats == 5


def test_the_file_of_records_is_read_as_it_was_written(tmp_path):
    record = Record(
        case=cases_of(PAIR)[0],
        outcome=CaseOutcome.MEASURED,
        measured=CaseFigures(times={"time": timing_of([1e-6, 2e-6])}),
    )
    comm_file = CommFile(
        comm_version=COMM_VERSION,
        date="2026-01-31",
        device="cpu",
        backend="gloo",
        torch="2.13.0",
        nodes=1,
        ranks_per_node=2,
        records=(record,),
    )
    write_comm_file(tmp_path / "comm.yaml", comm_file)

    assert read_comm_file(tmp_path / "comm.yaml") == comm_file
    (tmp_path / "comm.yaml").write_text("comm_version: 7\n")
    with pytest.raises(ConfigError, match="comm_version is 7, this parplan reads 1"):
        read_comm_file(tmp_path / "comm.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_comm_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"sizes": (("bytes", 8), ("nodes", 1), ("groups", 1))},
            "has no size ranks_per_node",
            id="size",
        ),
        pytest.param(
            {"times": {"other": timing_of([1e-6])}}, "was measured and has no time", id="time"
        ),
        pytest.param(
            {"times": {"time": replace(timing_of([1e-6]), median_us=0.0)}},
            r"was measured in 0\.0 us",
            id="no-time-at-all",
        ),
    ],
)
def test_a_record_without_what_its_curve_needs_is_refused_when_it_is_read(
    tmp_path, changes, message
):
    case = next(case for case in cases_of(PAIR) if case.work == "all_reduce")
    record = Record(
        case=replace(case, sizes=changes.get("sizes", case.sizes)),
        outcome=CaseOutcome.MEASURED,
        measured=CaseFigures(times=changes.get("times", {"time": timing_of([1e-6])})),
    )
    write_comm_file(
        tmp_path / "comm.yaml",
        CommFile(
            comm_version=COMM_VERSION,
            date="2026-01-31",
            device="cpu",
            backend="gloo",
            torch="2.13.0",
            nodes=1,
            ranks_per_node=2,
            records=(record,),
        ),
    )

    with pytest.raises(ConfigError, match=rf"comm.yaml: records.0: \w+ {message}"):
        read_comm_file(tmp_path / "comm.yaml")


def test_without_torchrun_the_error_says_how_to_start_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ConfigError, match="not started by torchrun") as caught:
        world_of_environment()
    assert "torchrun --nproc-per-node 2 -m parplan.profiles.profile_comm" in caught.value.hint


def test_nodes_are_what_torchrun_says_and_must_be_equal(monkeypatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "6"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("LOCAL_RANK", "0"),
    ):
        monkeypatch.setenv(name, value)
    assert world_of_environment() == World(nodes=2, ranks_per_node=3)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="6 ranks do not fill nodes of 4"):
        world_of_environment()


def test_a_rank_without_a_gpu_of_its_own_is_an_error_and_takes_the_cpu_where_there_is_none(
    monkeypatch,
):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="local rank 2, 2 GPUs on this node"):
        chosen_device("auto")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("outcome", list(comm_run.ENDED))
def test_the_launcher_knows_the_errors_that_a_case_ends_a_run_with(outcome):
    error = {
        CaseOutcome.HUNG: RuntimeError("Timed out waiting"),
        CaseOutcome.OUT_OF_MEMORY: torch.OutOfMemoryError("no room"),
    }.get(outcome, RuntimeError("Connection closed by peer"))
    kept = []

    class Keeps:
        keep = kept.append

    failure = comm_run._failed(cases_of(PAIR)[1], error, Keeps())

    assert kept[0].outcome is outcome
    assert launch._ENDED.match(f"error: {failure.message}")


class Commands:
    """Stands for the runs of torchrun: what each says and its exit code; keeps the lines."""

    def __init__(self, *runs):
        self.runs, self.commands = list(runs), []

    def __call__(self, command, lines, told):
        self.commands.append(command)
        said, code = self.runs.pop(0)
        lines.clear()
        lines.extend(said)
        return code


def test_a_run_that_a_case_ended_is_started_again_and_blames_what_is_in_flight(
    tmp_path, monkeypatch
):
    output = tmp_path / "comm.yaml"
    write_comm_file(
        output,
        CommFile(
            comm_version=COMM_VERSION,
            date="2026-01-31",
            device="cpu",
            backend="gloo",
            torch="2",
            nodes=1,
            ranks_per_node=2,
            records=(),
        ),
    )
    runs = Commands((["error: hung in all_reduce bytes=1: Timed out"], 1), ([], 0))
    monkeypatch.setattr(launch, "_run", runs)
    launch.comm_records(2, output, launch.CommOptions(restart=True))

    assert [
        ("--restart" in command, command[-2:] == ["--attempts", "1"]) for command in runs.commands
    ] == [(True, False), (False, True)]


def test_a_run_that_cannot_start_is_not_started_again(tmp_path, monkeypatch):
    runs = Commands(
        (
            [
                "error: --device cuda: local rank 0, 0 GPUs on this node",
                "hint: ...",
                "torchrun's own lines",
            ],
            1,
        )
    )
    monkeypatch.setattr(launch, "_run", runs)

    with pytest.raises(PlannerError, match="--device cuda: local rank 0"):
        launch.comm_records(2, tmp_path / "comm.yaml", launch.CommOptions(device="cuda"))


def test_a_run_that_ends_without_a_word_is_started_so_often(tmp_path, monkeypatch):
    output = tmp_path / "comm.yaml"
    in_flight_path(output).touch()
    runs = Commands(*[(["Segmentation fault"], 1)] * 3)
    monkeypatch.setattr(launch, "_run", runs)

    with pytest.raises(PlannerError, match="was not measured: Segmentation fault"):
        launch.comm_records(2, output, launch.CommOptions(reruns=2))


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_command_under_torchrun_goes_on_with_a_journal_writes_the_file_and_ends_the_journal(
    tmp_path,
):
    output, lines = tmp_path / "comm.yaml", []
    cases = comm_cases(PAIR, largest_bytes=1024, precision="fp32", product=512)
    journal = open_journal(journal_path(output), _measured_on(PAIR, torch.device("cpu")))
    earlier = [
        Record(
            case=case,
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(times={"time": timing_of([1e-6])}),
        )
        for case in cases[2:]
    ]
    for record in earlier:
        journal.append(record)
    journal.close()

    comm_file = launch.comm_records(
        2, output, launch.CommOptions(device="cpu", largest="1KiB"), lines.append
    )

    assert [record.case for record in comm_file.records] == list(cases)
    assert list(comm_file.records[2:]) == earlier
    assert [record.outcome for record in comm_file.records[:2]] == [
        CaseOutcome.UNSUPPORTED,
        CaseOutcome.MEASURED,
    ]
    assert (comm_file.device, comm_file.backend, comm_file.nodes, comm_file.ranks_per_node) == (
        "cpu",
        "gloo",
        1,
        2,
    )
    assert not journal_path(output).exists()
    assert any(line.startswith(f"{len(cases)}/{len(cases)}  ") for line in lines)
