"""The one way in for files: bytes, lines and archives are bounded before they are read."""

from __future__ import annotations

import ast
import gzip
import os
import re

import pytest

from parplan.planner.logs.log_lines import read_lines as log_lines
from parplan.profiles.documents import bounded
from parplan.profiles.documents.bounded import Hints, lines_of, read_lines, start_of, unpacked
from parplan.profiles.documents.tables import rows_of, table_of
from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.trace_files import is_trace, read_traces
from tests.helpers.documented import ROOT

# modules that read files without profiles/documents/bounded.py, with the files
OWN_READS = {
    "executor/checkpoint/folder.py": "a checkpoint, whose sizes its manifest has",
    "executor/data/tokens.py": "texts to tokenize, in parts",
    "executor/doctor/doctor_rank.py": "its own journal",
    "executor/doctor/gpu_places.py": "the program's own modules",
    "executor/doctor/worlds.py": "its own journal",
    "executor/measuring/machine_figures.py": "/proc",
    "executor/measuring/operands.py": "/proc and /sys",
    "executor/watch/run_recorder.py": "/proc",
    "planner/solver.py": "the solver's own files",
    "profiles/build/aiconfigurator_rows.py": "its own tables",
    "profiles/documents/bounded.py": "the way in",
    "profiles/documents/files.py": "its own temporary files",
    "profiles/documents/packaged_configs.py": "shipped files",
    "profiles/machines/curve_fitting.py": "shipped tables",
    "profiles/machines/deviations.py": "a shipped table",
    "profiles/models/module_trust.py": "the records of installed packages",
    "profiles/profiler/environment.py": "/proc and /sys",
    "profiles/profiler/journal.py": "its own journal, bounded there",
    "profiles/profiler/worker.py": "/sys",
    "profiles/standard_streams.py": "the null device",
    "report/page/chart_library.py": "the cache of this user",
    "report/page/html_page.py": "shipped files",
}
READS = {"read_text", "read_bytes", "open"}
CALL = re.compile(r"\b(read_text|read_bytes|open)\(")


def reads(tree: ast.AST) -> bool:
    """True for a module that opens a file by a method of its path or by the function `open`."""
    called = [each.func for each in ast.walk(tree) if isinstance(each, ast.Call)]
    return any(
        (isinstance(each, ast.Attribute) and each.attr in READS and not of_os(each.value))
        or (isinstance(each, ast.Name) and each.id == "open")
        for each in called
    )


def of_os(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("os", "gzip")


def test_every_module_reads_files_of_others_through_the_one_way_in():
    rooms = ("commands", "report", "executor", "planner", "costmodels", "profiles")
    paths = (path for room in rooms for path in (ROOT / room).rglob("*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    found = {name for name, text in texts.items() if CALL.search(text) and reads(ast.parse(text))}

    assert found == OWN_READS.keys()


def test_a_line_is_cut_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 3_000_000 + b"\nsecond \xff\rthird")

    first, *others = read_lines(path)

    assert first == "x" * bounded.MAX_LINE
    assert others == ["second \ufffd\n", "third"]


def test_more_lines_than_a_log_may_have_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_LINES", 3)
    path = tmp_path / "a.log"
    path.write_text("1\n2\n3\n4\n")

    with pytest.raises(ConfigError, match=r"a\.log: more than 3 lines"):
        list(read_lines(path))
    with pytest.raises(ConfigError, match="f: more than 3 lines"):
        lines_of("1\n2\n3\n4\n", "f")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_file_is_read_packed_or_not(tmp_path, packed):
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(b"{12345}") if packed else b"{12345}")

    assert (unpacked(path), start_of(path, 3)) == (b"{12345}", b"{12")


def test_an_archive_that_unpacks_to_far_more_than_it_is_ends_early(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * (40 << 20), 1))

    with pytest.raises(ConfigError, match="it unpacks to more than 33,554,432 bytes"):
        unpacked(path)
    assert len(start_of(path, 100)) == 100


@pytest.mark.parametrize("cut", [8, 20], ids=["head", "body"])
def test_a_damaged_archive_is_an_error(tmp_path, cut):
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(os.urandom(100))[:cut])

    with pytest.raises(ConfigError, match=r"cannot read .*t\.gz"):
        unpacked(path)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda path: list(read_lines(path)), id="lines"),
        pytest.param(lambda path: list(log_lines(path)), id="log"),
        pytest.param(unpacked, id="unpacked"),
        pytest.param(lambda path: start_of(path, 10), id="start"),
        pytest.param(lambda path: read_traces([path]), id="trace"),
    ],
)
def test_a_pipe_is_not_waited_for(tmp_path, read):
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(ConfigError, match="a pipe, not a regular file"):
        read(path)
    assert not is_trace(path)


def test_a_device_is_no_file():
    with pytest.raises(ConfigError, match="/dev/zero: a device, not a regular file"):
        unpacked(bounded.Path("/dev/zero"))


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self/mem", "/proc/self/maps"])
def test_a_file_of_the_kernel_is_empty(path):
    if os.access(path, os.R_OK):
        assert bounded.read_bytes(bounded.Path(path)) == b""
        assert list(read_lines(bounded.Path(path))) == []


def test_cells_that_a_short_row_lacks_are_empty_and_more_are_dropped():
    names, rows = table_of("note\na, b\n1\n1,2,3\n\n", "f", first_line=1)

    assert names == ["a", "b"]
    assert rows == [{"a": "1", "b": ""}, {"a": "1", "b": "2"}]


def test_a_text_that_is_no_table_is_an_error(monkeypatch):
    with pytest.raises(ConfigError, match="f:1: not a CSV table: field larger than field limit"):
        rows_of(["x" * 200_000], "f")
    with pytest.raises(ConfigError, match="2,000 columns of 2 rows, at most 1,000 columns"):
        table_of(f"{'a,' * 1999}a\n1", "f", Hints())
