"""Files are written whole, through links, with the umask's mode, only where a file can be."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import threading
import tracemalloc
from pathlib import Path

import pytest

from parplan.profiles.documents.files import (
    explained_file_errors,
    noting_written,
    only_writer,
    open_replacement,
    require_regular,
    require_writable,
    write_result,
    write_results,
    write_text,
)
from parplan.profiles.errors import ConfigError

HINT = "choose another"


@pytest.fixture
def umask():
    """Sets the umask until the end of the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(mask, tmp_path, umask):
    umask(mask)

    write_text("new", tmp_path / "plan.yaml", hint=HINT)

    assert mode(tmp_path / "plan.yaml") == 0o666 & ~mask


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path, umask):
    path = tmp_path / "plan.yaml"
    path.touch()
    path.chmod(0o660)

    write_text("new", path, hint=HINT)

    assert (mode(path), path.read_text()) == (0o660, "new")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_written(there, tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.yaml", tmp_path / "plan.yaml"
    if there:
        target.write_text("old")
    link.symlink_to(Path("folder") / "target.yaml")

    require_writable(link)
    write_text("new", link, hint=HINT)

    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "folder",
        "plan.yaml",
        "target.yaml",
    ]


def test_a_name_as_long_as_the_system_allows_is_written(tmp_path):
    path = tmp_path / ("x" * 255)

    require_writable(path)
    write_text("new", path, hint=HINT)

    assert path.read_text() == "new"


def _loop(tmp_path: Path) -> Path:
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / "loop"


def _pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        pytest.param(lambda folder: folder / ("x" * 256), "File name too long", id="too-long"),
        pytest.param(
            lambda folder: folder / ("x" * 256) / "plan.yaml",
            "File name too long",
            id="folder-too-long",
        ),
        pytest.param(lambda folder: folder, "a folder", id="folder"),
        pytest.param(_pipe, "not a regular file", id="pipe"),
        pytest.param(_loop, "Too many levels of symbolic links", id="loop"),
    ],
)
def test_what_cannot_be_a_file_is_found_before_and_at_the_write(place, reason, tmp_path):
    path = place(tmp_path)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(ConfigError, match=f"^cannot write .*: {reason}$"):
        require_writable(path)
    with pytest.raises(ConfigError, match=f"^cannot write .*: {reason}$") as caught:
        write_text("new", path, hint=HINT)

    assert caught.value.hint == HINT
    assert sorted(tmp_path.iterdir()) == before


def test_a_failure_inside_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_text("old")

    with contextlib.suppress(ZeroDivisionError), open_replacement(path, hint=HINT) as file:
        file.write(b"new")
        raise ZeroDivisionError

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_keeps_each_older_file_of_its_name_once(tmp_path):
    path = tmp_path / "plan.yaml"
    assert write_result("a", path, hint="") is None
    assert write_result("a", path, hint="") is None
    assert write_result("b", path, hint="") == tmp_path / "plan.yaml.1"
    assert write_result(b"a", path, hint="") == tmp_path / "plan.yaml.2"
    assert write_result("b", path, hint="") == tmp_path / "plan.yaml.1"
    held = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert held == {"plan.yaml": "b", "plan.yaml.1": "a", "plan.yaml.2": "b"}


def test_an_older_file_of_any_size_is_kept_and_no_more_than_a_part_of_it_is_in_memory(tmp_path):
    path, num_bytes = tmp_path / "plan.yaml", 64 * 2**20
    path.touch()
    os.truncate(path, num_bytes)

    tracemalloc.start()
    kept = write_result("new", path, hint="")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (kept, kept and kept.stat().st_size) == (tmp_path / "plan.yaml.1", num_bytes)
    assert peak_bytes < num_bytes / 8


def full_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Lets the disk be full at one call of a function of os, counted from 1."""
    usual, calls = getattr(os, call), []

    def limited(*args: object) -> object:
        calls.append(args)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*args)

    monkeypatch.setattr(os, call, limited)


OLD = {"b": "old b", "c": "old c", "c.1": "old c"}


@pytest.mark.parametrize(("call", "number"), [("fsync", 1), ("fsync", 4), ("replace", 4)])
def test_files_of_a_result_are_written_all_or_none(call, number, tmp_path, monkeypatch):
    for name, text in OLD.items():
        (tmp_path / name).write_text(text)
    results = {tmp_path / name: f"new {name}" for name in ("a", "b", "c", "d")}

    with monkeypatch.context() as patched:
        full_at(patched, call, number)
        with pytest.raises(ConfigError, match="No space left"):
            write_results(results, hint=HINT)

    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == OLD

    with noting_written() as written:
        kept = write_results(results, hint=HINT)
    assert written == list(results)
    assert {path.name: old and old.name for path, old in kept.items()} == {
        "a": None,
        "b": "b.1",
        "c": "c.1",
        "d": None,
    }
    assert all(path.read_text() == text for path, text in results.items())


def test_an_interrupt_comes_before_the_first_file_or_after_the_last(tmp_path, monkeypatch):
    results = {tmp_path / name: name for name in ("a", "b")}
    usual = os.replace

    def interrupted(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)
        usual(*args)

    monkeypatch.setattr(os, "replace", interrupted)
    with noting_written() as written, pytest.raises(KeyboardInterrupt):
        write_results(results, hint=HINT)
    assert sorted(tmp_path.iterdir()) == written == list(results)


def test_one_writer_at_a_time_changes_a_file(tmp_path):
    path = tmp_path / "count"
    path.write_text("")

    def add() -> None:
        for _ in range(5):
            with only_writer(path, hint=HINT):
                write_text(f"{path.read_text()}x", path, hint=HINT)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert path.read_text() == 20 * "x"
    with pytest.raises(ConfigError, match="Not a directory"), only_writer(path / "x", hint=HINT):
        pass


def test_a_picture_is_written_through_a_link_as_any_file(tmp_path):
    figure = pytest.importorskip("matplotlib.figure")
    from parplan.report.plots.scatter_plot import save

    (tmp_path / "front.svg").symlink_to("target.svg")

    save(figure.Figure(figsize=(1.0, 1.0)), tmp_path / "front.svg")

    assert (tmp_path / "front.svg").is_symlink()
    assert b"<svg" in (tmp_path / "target.svg").read_bytes()


def test_only_a_regular_file_is_read_as_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    for path, reason in (
        (tmp_path, "a folder"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(ConfigError, match=f"cannot read .*: {reason}"):
            require_regular(path, hint=HINT)


def test_a_file_error_that_nobody_explained_names_the_file_and_any_other_stays():
    with (
        pytest.raises(ConfigError, match=r"^none: No such file or directory$"),
        explained_file_errors(),
    ):
        os.stat("none")
    with pytest.raises(OSError, match="no name"), explained_file_errors():
        raise OSError(5, "no name")
