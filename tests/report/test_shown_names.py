"""A terminal, a page and a picture show control characters of names, and obey none."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from parplan.commands.style import print_lines, tell, tell_kept
from parplan.planner.plan.plan_file import write_plan
from parplan.report.text import console, print_table, say, say_exactly
from tests.helpers.command_runs import run
from tests.helpers.laid_out_plans import laid_out

HOSTILE = "a\x1b[2J\rb\u202ec\u2028d"
SHOWN = "a\\x1b[2J\\rb\\u202ec\\u2028d"


def test_a_console_shows_control_characters():
    stream = io.StringIO()
    out = console(stream)

    say(out, f"{HOSTILE}\nnext")
    say_exactly(out, HOSTILE)
    print_table(out, ("name", "n"), [(HOSTILE, "1")], left=("name",))

    assert stream.getvalue().count(SHOWN) == 3
    assert stream.getvalue().replace("\n", "").isprintable()


def test_lines_of_commands_show_control_characters(capsys):
    print_lines(HOSTILE, "next")
    tell(HOSTILE)
    tell_kept(Path(f"x\n{HOSTILE}"))

    shown = capsys.readouterr()
    assert shown.out == f"{SHOWN}\nnext\n"
    assert shown.err == f"{SHOWN}\nkept the older file as x\\n{SHOWN}\n"


def test_a_page_shows_control_characters_and_escapes_markup():
    pytest.importorskip("jinja2")
    from parplan.report.page.html_page import _environment

    page = _environment().from_string("<p>{{ name }}{{ value | json }}{{ 1 }}</p>")

    assert page.render(name=f"<b>{HOSTILE}", value="</script>\u202e") == (
        f'<p>&lt;b&gt;{SHOWN}"\\u003c/script>\\u202e"1</p>'
    )


def test_a_picture_draws_dollar_signs_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    from parplan.report.plots.sweep_plot import draw_sweep

    plan = laid_out(dp=2)
    named = replace(plan, model=replace(plan.model, name="a$\\frac{$b"))

    assert draw_sweep([named], tmp_path / "sweep.svg") is None
    assert "a$\\frac{$b" in (tmp_path / "sweep.svg").read_text()


def test_the_name_of_a_plans_file_is_no_line_of_its_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("plan\ntouch evil\x1b.yaml")
    write_plan(laid_out(pp=2, dp=2), path)

    for target in ("megatron", "torchrun"):
        result = run(
            "export", str(path), "--to", target, "--launch", "slurm", "-o", f"{target}\x1b"
        )
        assert result.exit_code == 0
        assert (result.stdout + result.stderr).replace("\n", "").isprintable()
        for file in (tmp_path / f"{target}\x1b").iterdir():
            lines = file.read_text().splitlines()
            assert not [line for line in lines if line.startswith("touch")], file
