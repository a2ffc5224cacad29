"""Reports of Nsight Systems: the same step as in Kineto's tests, in the published tables."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from parplan.planner.calibration.trace_measured import measured_by_traces
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces import sqlite_report
from parplan.profiles.traces.trace_files import read_traces
from parplan.profiles.traces.trace_record import Phase, WorkClass
from tests.helpers.synthetic_runs import estimated

KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
PROCESS = 77 << 24
MAIN, AUTOGRAD = PROCESS | 1, PROCESS | 2
US = 1000
TABLES = {
    "StringIds": "id, value",
    "TARGET_INFO_GPU": "id, name",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, correlationId, globalPid, demangledName",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, correlationId, globalPid, copyKind",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
    "ThreadNames": "nameId, globalTid",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
}
KERNELS = (  # name, start, end, launch, thread, as in tests/helpers/kineto_traces.py::one_step
    ("sm80_xmma_gemm_bf16bf16_tn", 100, 300, 10, MAIN),
    ("flash_fwd_kernel", 320, 400, 20, MAIN),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 390, 450, 30, MAIN),
    ("sm80_xmma_gemm_bf16bf16_nt", 450, 700, 310, AUTOGRAD),
    ("multi_tensor_apply_kernel<LpNormFunctor>", 820, 830, 510, MAIN),
    ("multi_tensor_apply_kernel<AdamFunctor>", 830, 900, 530, MAIN),
)


def report(path, *, without: str = "", marks: bool = True):
    """A report of two steps without the table or the column `without`."""
    with closing(sqlite3.connect(path)) as database, database:
        for table, columns in TABLES.items():
            kept = [name for name in columns.split(", ") if f"{table}.{name}" != without]
            if table != without:
                database.execute(f"CREATE TABLE {table} ({', '.join(map(repr, kept))})")
        if without:
            return path

        def add(table, *values):
            places = ", ".join("?" * len(values))
            database.execute(f"INSERT INTO {table} VALUES ({places})", values)

        add("TARGET_INFO_GPU", 0, "NVIDIA A100-SXM4-80GB")
        add("TARGET_INFO_SESSION_START_TIME", 1_700_000_000 * 10**9)
        add("StringIds", 99, "pt_autograd_0")
        add("ThreadNames", 99, AUTOGRAD)
        for step in range(2):
            if marks:
                begin = step * 1000 * US
                add("NVTX_EVENTS", begin, begin + 1000 * US, 59, f"step {step}", None, MAIN)
            for number, (name, *times, launch, thread) in enumerate(KERNELS):
                start, end, launched = ((step * 1000 + us) * US for us in (*times, launch))
                key = 1 + number + step * len(KERNELS)
                add("StringIds", key, name)
                add("CUPTI_ACTIVITY_KIND_KERNEL", start, end, 0, key, PROCESS, key)
                add("CUPTI_ACTIVITY_KIND_RUNTIME", launched, launched + US, thread, key, 0)
        add("CUPTI_ACTIVITY_KIND_MEMCPY", 910 * US, 920 * US, 0, 999, PROCESS, 2)
    return path


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "by-updates"])
def test_steps_phases_and_causes_of_a_report(tmp_path, marks):
    (trace,) = read_traces([report(tmp_path / "rank3.sqlite", marks=marks)])

    assert (trace.device, trace.date, trace.rank) == ("NVIDIA A100-SXM4-80GB", "2023-11-14", 3)
    step = trace.steps[0]
    assert [work.phase for work in step.work if work.computes] == [
        Phase.FORWARD,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.OPTIMIZER,
    ]
    account = measured_by_traces([trace], estimated(tp=4)).accounts[0]
    expected = {"forward": 300, "tensor": 50, "backward": 250, "optimizer": 200}
    if marks:
        expected |= {"copies": 10, "between steps": 190}
    assert {cause: round(seconds * 1e6) for cause, seconds in account.by_cause.items()} == expected


def test_copies_of_the_host_are_their_own_class(tmp_path):
    (trace,) = read_traces([report(tmp_path / "rank0.sqlite")])

    copied = [work for work in trace.steps[0].work if work.kind is WorkClass.COPIES]
    assert [round(work.seconds * 1e6) for work in copied] == [10]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "the table CUPTI_ACTIVITY_KIND_KERNEL is missing"),
        (
            "CUPTI_ACTIVITY_KIND_KERNEL.globalPid",
            r"the column CUPTI_ACTIVITY_KIND_KERNEL\.globalPid is missing",
        ),
    ],
)
def test_a_report_that_lacks_something_says_what(tmp_path, without, message):
    with pytest.raises(ConfigError, match=message):
        read_traces([report(tmp_path / "r.sqlite", without=without)])


def test_a_broken_report_is_one_error(tmp_path):
    path = tmp_path / "r.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"\1" * 4096)

    with pytest.raises(ConfigError, match="not readable as SQLite"):
        read_traces([path])


RECURSIVE = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i AS start, i AS 'end', 0 AS deviceId, i AS correlationId, 0 AS globalPid, "
    "1 AS demangledName FROM n"
)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        pytest.param(
            ["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", f"CREATE VIEW {KERNEL_TABLE} AS {RECURSIVE}"],
            "the table CUPTI_ACTIVITY_KIND_KERNEL is missing",
            id="endless-view",
        ),
        pytest.param(
            [f"UPDATE {KERNEL_TABLE} SET start = NULL"],
            r"CUPTI_ACTIVITY_KIND_KERNEL\.start is nothing, needed is a whole number from 0",
            id="null",
        ),
        pytest.param(
            [f"UPDATE {KERNEL_TABLE} SET 'end' = 'soon'"],
            r"CUPTI_ACTIVITY_KIND_KERNEL\.end is 'soon', needed is a whole number",
            id="text",
        ),
        pytest.param(
            ["UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = X'00'"],
            r"RUNTIME\.globalTid is a bytes, needed is a whole number",
            id="blob",
        ),
        pytest.param(
            [f"UPDATE {KERNEL_TABLE} SET start = -9223372036854775808"],
            r"start is an integer of more than 18 digits, needed",
            id="long-ago",
        ),
        pytest.param(
            ["UPDATE TARGET_INFO_GPU SET name = NULL"], "does not name the device 0", id="no-name"
        ),
    ],
)
def test_a_hostile_report_is_one_error(tmp_path, statements, message):
    path = report(tmp_path / "r.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)

    with pytest.raises(ConfigError, match=message):
        read_traces([path])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE NVTX_EVENTS SET text = NULL, textId = NULL WHERE start > 0",
        "UPDATE NVTX_EVENTS SET 'end' = NULL WHERE start > 0",
        "UPDATE NVTX_EVENTS SET globalTid = 'x' WHERE start > 0",
        "UPDATE StringIds SET value = NULL WHERE id = 99",
        "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = 'now'",
        "UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 'x'",
        "INSERT INTO ThreadNames VALUES (NULL, NULL)",
    ],
)
def test_cells_that_say_less_leave_the_rest_of_a_report_readable(tmp_path, statement):
    path = report(tmp_path / "r.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)

    assert len(read_traces([path])[0].steps) >= 1


def test_rows_and_steps_of_a_report_are_bounded(tmp_path, monkeypatch):
    path = report(tmp_path / "r.sqlite")
    monkeypatch.setattr(sqlite_report, "MAX_ROWS", 5)
    with pytest.raises(ConfigError, match="more than 5 rows"):
        read_traces([path])
    monkeypatch.setattr(sqlite_report, "MAX_ROWS", 1000)
    monkeypatch.setattr(sqlite_report, "_CHECKED_STEPS", 10)
    monkeypatch.setattr(sqlite_report, "MAX_STEPS", 30)
    with pytest.raises(ConfigError, match="a query takes more than 30 steps of SQLite"):
        read_traces([path])
