"""The library of a page is put together once, and kept in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from parplan.report.page import chart_library as module


def library() -> str:
    with module.chart_library() as made:
        return made()


@pytest.mark.slow
def test_the_library_is_made_once_and_then_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = library()
    (kept,) = (tmp_path / "parplan").iterdir()
    assert kept.read_text(encoding="utf-8") == made

    def popen(*arguments: object, **options: object) -> None:
        raise AssertionError("it is made again")

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    assert library() == made
    kept.write_text("", encoding="utf-8")
    with pytest.raises(AssertionError):
        library()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    module._keep("text", blocked / "parplan" / "charts.js")
    assert list(tmp_path.iterdir()) == [blocked]


@pytest.mark.parametrize(("stated", "folder"), [("/a/b", "/a/b"), ("b", "/home/c/.cache")])
def test_the_cache_folder_follows_the_rule_of_xdg(stated, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", stated)
    monkeypatch.setenv("HOME", "/home/c")
    assert module.cache_folder() == Path(folder) / "parplan"
