"""`plan validate`: its text, its JSON, its picture, and its errors about a bad table."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from parplan.planner.validation import step_rows as table_rows
from parplan.planner.validation import step_table as table
from parplan.planner.validation.fitted_terms import FittedTerm
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.step_rows import read_table
from parplan.planner.validation.step_table import price_table
from parplan.profiles.errors import ConfigError
from parplan.report.plots.scatter_plot import draw
from parplan.report.progress_bars import count_bar
from parplan.report.validation_tables import print_fitted, print_validation
from tests.helpers.cases import mostly_slow
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.measured_rows import FULL as ROW

ROWS = (
    ROW,
    {**ROW, "id": "made-2", "micro_batch": "4", "step_time_s": "0.6"},
    {**ROW, "id": "made-3", "tp": "4", "dp": "2"},
    {**ROW, "id": "other-1", "gpu": "tpu-v5"},
    {**ROW, "id": "other-2", "peak_memory_gib": ""},
)
SOURCE_KEYS = [
    "rows",
    "priced",
    "unpriced",
    "mape_time",
    "median_time",
    "bias_time",
    "kendall_tau",
    "regret_at_1",
    "regret_at_3",
    "mape_memory",
    "bias_memory",
    "oom_recall",
    "oom_precision",
]
TERM = FittedTerm(
    stack="megatron-core",
    term="host_launch_s",
    unit="us",
    value=4.5,
    low=1.0,
    high=20.0,
    rows=43,
    fitted_on=("simumax", "vocabpp-a", "vocabpp-b"),
    without={"simumax": 4.1, "vocabpp": 4.75},
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def steps() -> str:
    """Returns the name of a table with a priced source and one with an unpriced row."""
    return write_table(ROWS)


def write_table(rows) -> str:
    with Path("steps.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "steps.csv"


def printed(priced, width: int = 100, **options: object) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    print_validation(priced, out, table="steps.csv", **options)
    return out.file.getvalue()


def graded(source: str, count: int) -> list[PricedRow]:
    """Returns rows of one grid with every figure that a row can have."""
    return [
        PricedRow(
            f"{source}-{n}",
            source,
            measured_s=1.0 + n,
            predicted_s=1.1 + n,
            measured_gib=10.0,
            predicted_gib=11.0,
            kind="interpolated",
            grid=f"{source}|gpt|8",
            out_of_memory=n == 0,
            predicted_fits=n > 0,
            assumed=("zero 1",),
        )
        for n in range(count)
    ]


# What it prints


def test_the_table_has_a_line_for_each_source_and_the_reasons_below(steps):
    lines = succeed("validate", "--steps", steps).stdout.splitlines()

    assert (
        lines[0] == "steps.csv: 4 of 5 rows priced; errors in percent, + is too slow or too large"
    )
    assert re.match(
        r"made +3/3 +[\d.]+ +[\d.]+ +[+-][\d.]+ ",
        next(line for line in lines if line.startswith("made")),
    )
    assert any(re.match(r"other +1/2 ", line) for line in lines)
    assert (
        lines[lines.index("rows  not priced because") + 1] == "   1  no device profile for tpu-v5"
    )


def test_json_is_the_scores_by_source_and_one_entry_a_row_and_nothing_else(steps):
    result = succeed("validate", "--steps", steps, "--json")

    body = json.loads(result.stdout)
    assert result.stderr == ""
    assert list(body) == ["version", "sources", "bands", "oom_risk", "rows", "fitted"]
    assert list(body["sources"]) == ["made", "other"]
    assert all(list(source) == SOURCE_KEYS for source in body["sources"].values())
    assert body["sources"]["other"]["unpriced"] == {"no device profile for tpu-v5": 1}
    assert [row["id"] for row in body["rows"]] == [row["id"] for row in ROWS]
    for row in body["rows"]:
        assert set(row) == {
            "id",
            "predicted_s",
            "measured_s",
            "predicted_gib",
            "measured_gib",
            "kind",
            "reason",
        }


def test_errors_in_json_are_fractions_of_what_was_measured(steps):
    body = json.loads(succeed("validate", "--steps", steps, "--source", "made", "--json").stdout)

    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in body["rows"]]
    assert body["sources"]["made"]["mape_time"] == pytest.approx(sum(errors) / 3)
    assert body["rows"][0]["measured_s"] == 0.5
    assert body["rows"][0]["measured_gib"] == 4.0


def test_a_row_that_is_not_priced_is_null_with_its_reason(steps):
    row = json.loads(succeed("validate", "--steps", steps, "--json").stdout)["rows"][3]

    assert (row["id"], row["predicted_s"], row["predicted_gib"]) == ("other-1", None, None)
    assert row["reason"] == "no device profile for tpu-v5"


@pytest.mark.slow
def test_without_steps_the_shipped_table_is_priced():
    shipped = read_table()
    source = shipped[0]["id"].split("-")[0]

    body = json.loads(succeed("validate", "--source", source, "--json").stdout)

    assert [row["id"] for row in body["rows"]] == [
        row["id"] for row in shipped if row["id"].startswith(f"{source}-")
    ]
    assert body["sources"][source]["priced"] > 0


def test_source_keeps_the_rows_of_the_sources_named(steps):
    assert "other" not in succeed("validate", "--steps", steps, "--source", "made").stdout
    both = json.loads(
        succeed(
            "validate", "--steps", steps, "--source", "other", "--source", "made", "--json"
        ).stdout
    )
    assert list(both["sources"]) == ["made", "other"]


def test_rows_prints_every_row_and_its_errors(steps):
    output = succeed("validate", "--steps", steps, "--rows").stdout

    assert re.search(
        r"^ +500 ms +[\d.]+ m?s +[+-][\d.]+ +4\.00 +[\d.]+ +[+-][\d.]+ +\S+ +made-1$",
        output,
        re.MULTILINE,
    )
    assert re.search(r"^other-1 +no device profile for tpu-v5$", output, re.MULTILINE)


def test_rows_prints_the_ranking_of_every_grid():
    output = printed(graded("made", 4), rows=True)

    assert re.search(r"^ +4 +1\.00 s +1\.00 +0\.0 +0\.0 +made, gpt, 8$", output, re.MULTILINE)


def test_every_group_of_columns_is_printed_with_its_note_when_it_has_a_figure():
    output = printed(graded("made", 4))

    for title in ("step time", "ranking", "memory", "out of memory"):
        assert title in output.splitlines()[2]
    assert re.search(
        r"^made +4/4 +5\.2 +4\.2 +\+5\.2 +1\.00 +0\.0 +0\.0 +10\.0 +\+10\.0 +100\.0 +100\.0$",
        output,
        re.MULTILINE,
    )
    assert "predicted step times: 4 interpolated" in output
    assert "settings that rows left open: zero 1 (4)" in output
    assert "memory" not in printed(
        [replace(row, measured_gib=None, out_of_memory=None) for row in graded("made", 4)]
    )


@pytest.mark.parametrize(("width", "tables"), [(50, 3), (60, 2), (80, 2), (100, 1), (140, 1)])
def test_no_line_of_the_table_is_wider_than_the_terminal(width, tables):
    lines = printed([*graded("nemolauncher", 9), *graded("simumax", 5)], width).splitlines()

    assert max(map(len, lines)) <= width
    assert sum(line.startswith("nemolauncher") for line in lines) == tables


# The fitted terms


def test_fitted_alone_prices_nothing(monkeypatch):
    monkeypatch.setattr(table, "price_row", None)
    monkeypatch.setattr("parplan.planner.validation.fitted_terms.fitted_terms", lambda: [TERM])

    output = succeed("validate", "--fitted").stdout
    body = json.loads(succeed("validate", "--fitted", "--json").stdout)

    line = (
        r"^megatron-core +host_launch_s +4\.5 us +1 \.\. 20 +4\.1 \.\. 4\.75 +43 "
        r"+simumax, vocabpp \(2 folds\)$"
    )
    assert re.search(line, output, re.MULTILINE)
    assert [name for name, value in body.items() if value is not None] == ["version", "fitted"]
    assert body["fitted"][0]["without"] == {"simumax": 4.1, "vocabpp": 4.75}


def test_fitted_with_a_table_prints_both(steps):
    assert list(json.loads(succeed("validate", "--steps", steps, "--fitted", "--json").stdout)) == [
        "version",
        "sources",
        "bands",
        "oom_risk",
        "rows",
        "fitted",
    ]
    assert "rows priced" in succeed("validate", "--steps", steps, "--fitted").stdout


def test_prices_without_a_fitted_term_say_so():
    out = Console(file=io.StringIO(), width=100)

    print_fitted([], out)

    assert out.file.getvalue() == "no term of the prices is fitted to measured steps\n"


# The picture


@pytest.mark.parametrize(
    ("name", "start"),
    mostly_slow(
        [("errors.png", b"\x89PNG"), ("errors.svg", b"<?xml"), ("errors.PDF", b"%PDF")],
        {("errors.png", b"\x89PNG")},
    ),
)
def test_plot_draws_a_picture_in_the_format_of_its_suffix(steps, name, start):
    assert succeed("validate", "--steps", steps, "--plot", name).stdout.endswith(f"wrote {name}\n")
    assert Path(name).read_bytes().startswith(start)


@pytest.mark.slow
def test_plot_with_json_says_so_on_stderr(steps):
    result = succeed("validate", "--steps", steps, "--plot", "errors.svg", "--json")

    json.loads(result.stdout)
    assert result.stderr == "wrote errors.svg\n"


def test_the_picture_names_its_axes_with_units_and_every_source():
    draw([*graded("first", 3), *graded("second", 3)], Path("errors.svg"))

    text = Path(
        "errors.svg"
    ).read_text()  # matplotlib keeps each text as a comment beside its glyphs
    for label in (
        "measured step time, s",
        "predicted step time, s",
        "measured memory of one GPU, GiB",
        "first",
        "second",
        "within 10 %",
    ):
        assert f"<!-- {label} -->" in text


def test_without_memory_there_is_one_panel():
    draw([replace(row, measured_gib=None) for row in graded("first", 3)], Path("errors.svg"))

    assert "memory" not in Path("errors.svg").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "errors.jpg", r"cannot draw errors.jpg: .jpg is not .png, .svg, .pdf", id="format"
        ),
        pytest.param("errors", r"cannot draw errors: no suffix is not", id="no-format"),
        pytest.param(
            "missing/errors.png",
            r"cannot write missing/errors.png: missing: no such folder\nhint: .*--plot",
            id="no-folder",
        ),
    ],
)
def test_a_picture_that_cannot_be_written_is_found_before_the_pricing(
    steps, name, message, monkeypatch
):
    monkeypatch.setattr(table, "price_row", None)

    assert re.match(f"error: {message}", fail(2, "validate", "--steps", steps, "--plot", name))


def test_plot_without_matplotlib_says_how_to_get_it(steps, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert fail(2, "validate", "--steps", steps, "--plot", "errors.png") == (
        "error: --plot needs matplotlib, which is not installed\n"
        "hint: pip install 'parplan[plot]'\n"
    )


def test_nothing_to_draw_is_an_error():
    steps = write_table([{**ROW, "step_time_s": "", "peak_memory_gib": ""}])

    assert re.match(
        r"error: nothing to draw", fail(2, "validate", "--steps", steps, "--plot", "errors.png")
    )
    assert not Path("errors.png").exists()


# Bad input


def test_an_unknown_source_is_an_error_with_a_suggestion(steps):
    message = fail(2, "validate", "--steps", steps, "--source", "mad")
    assert re.match(r"error: unknown source 'mad' .*\nhint: did you mean 'made'\?", message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, r"cannot read steps.csv: No such file", id="missing"),
        pytest.param(b"", r"steps.csv: no rows", id="empty"),
        pytest.param(",".join(ROW).encode(), r"steps.csv: no rows", id="heading-only"),
        pytest.param(
            b"id,framework\nmade-1,Megatron\n", r"steps.csv: no column layers", id="columns"
        ),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\xff\xfe", r"steps.csv:3: a NUL byte", id="binary"),
        pytest.param(b"\x89PNG\r\n\x1a\n", r"steps.csv:1: not UTF-8 text", id="not-utf-8"),
        pytest.param(bytes(range(128)) * 50, r"steps.csv:1: a NUL byte", id="control-characters"),
        pytest.param(
            b"a" * 200_000 + b"\n1\n", r"steps.csv:1: not a CSV table", id="a-field-without-end"
        ),
    ],
)
def test_a_broken_table_is_one_error_and_one_hint(content, message):
    if content is not None:
        Path("steps.csv").write_bytes(content)

    assert re.match(f"error: {message}", fail(2, "validate", "--steps", "steps.csv"))


def test_a_folder_is_no_table():
    assert re.match(r"error: cannot read \.", fail(2, "validate", "--steps", "."))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("layers", "eight"),
        ("layers", "0"),
        ("dp", "-4"),
        ("hidden", "1e30"),
        ("gpus_per_node", "eight"),
        ("step_time_s", "fast"),
        ("step_time_s", "0"),
        ("step_time_s", "nan"),
        ("step_time_s", "-1"),
        ("step_time_s", "inf"),
        ("peak_memory_gib", "12 GB"),
        ("derived_step_time_s", "1,5"),
        ("vocab_multiple", "x"),
    ],
)
def test_a_cell_that_is_no_number_is_a_reason_that_names_its_column(column, value):
    (priced,) = price_table([{**ROW, column: value}])

    assert priced.reason.startswith(f"{column} is no ")
    assert (priced.id, priced.source, priced.predicted_s) == ("made-1", "made", None)


def test_a_row_without_a_name_is_not_priced():
    assert price_table([{**ROW, "id": ""}])[0].reason == "id is not stated"


def test_a_short_line_and_a_long_one_are_rows_too():
    header, cells = ",".join(ROW), list(ROW.values())
    Path("steps.csv").write_text(
        "\n".join((header, ",".join(cells[:20]), ",".join((*cells, "one", "more"))))
    )

    first, second = json.loads(succeed("validate", "--steps", "steps.csv", "--json").stdout)["rows"]

    assert first["reason"] is not None
    assert second["predicted_s"] > 0


CELLS = st.sampled_from(
    ("", "0", "1", "-1", "3", "8", "1.5", "none", "true", "\u00fc", "x y", "nan", "1e9", "[]", " ")
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(sorted(set(ROW) - {"id"})), CELLS, min_size=1, max_size=4))
def test_no_cell_ever_ends_the_table(change):
    priced = price_table([{**ROW, **change}, ROW])

    assert [row.id for row in priced] == ["made-1", "made-1"]
    assert priced[0].reason is not None or priced[0].predicted_s > 0
    assert priced[1].reason is None


# While it lasts


def test_ctrl_c_is_one_line_and_130(steps, monkeypatch):
    monkeypatch.setattr(table, "price_row", lambda _: signal.raise_signal(signal.SIGINT))

    result = run("validate", "--steps", steps)

    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted before validate was done; nothing was written\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_many_rows_are_priced_and_a_pipe_nothing():
    terminal, pipe = (
        Console(file=Terminal(), force_terminal=True, width=80),
        Console(file=io.StringIO()),
    )

    with count_bar(terminal, "pricing", 2) as on_row:
        assert len(price_table([ROW, ROW], on_row)) == 2
        on_row(2)
    with count_bar(pipe, "pricing", 2) as silent:
        assert silent is None

    assert "pricing" in terminal.file.getvalue()
    assert pipe.file.getvalue() == ""


def test_nothing_to_price_without_a_table_is_an_error(monkeypatch):
    monkeypatch.setattr(table_rows, "SHIPPED", "missing.csv")

    with pytest.raises(ConfigError, match=r"cannot read .*missing.csv"):
        read_table()
