"""Writes the tables and the pictures of docs/accuracy.md, and the table of accuracy in README.md.

    python -m docs.accuracy

Prices the shipped table of published steps as `plan validate` does, with the same scores, and the
rows that are kept apart.
`tests/docs/test_accuracy.py` fails while a table differs from these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.planner.plan.traits import STACK
from parplan.planner.validation.band_coverage import BandCoverage, coverage
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.row_cells import Row
from parplan.planner.validation.scores import SourceScore, score
from parplan.planner.validation.step_rows import read_table
from parplan.planner.validation.step_table import price_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs/accuracy.md"
HOLDOUT = ROOT / "profiles/data/holdout_steps.csv"
SCATTER, BANDS = ROOT / "docs/images/accuracy.png", ROOT / "docs/images/error-bands.png"
FEWEST_ROWS = 10  # of a trait in the picture; the share of fewer says little
TARGET = 0.8  # share of the rows that a band shall hold
FIGURES = {"time": "step time", "memory": "memory", "ratio": "ratio of two plans"}
COLOURS = {"time": "#0072B2", "memory": "#D55E00", "ratio": "#009E73"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the tables: the rows whose id begins with one of `sources` under one name."""

    name: str
    sources: tuple[str, ...]
    in_readme: bool = False


LINES = (
    Line(name="Megatron-LM 2021 and 2022, A100", sources=("sc21", "korth22"), in_readme=True),
    Line(name="Megatron-Core 0.14, B200", sources=("simumax",), in_readme=True),
    Line(name="Megatron-Core fork, unequal stages, A100", sources=("vocabpp",)),
    Line(name="NeMo, fp8, H100", sources=("nemolauncher",)),
    Line(name="Megatron-Bridge, H100 and B200", sources=("mbridge",)),
    Line(name="Megatron-Core, H100, settings partly unknown", sources=("megh100",)),
    Line(name="Megatron release tests", sources=("mcoreci",)),
    Line(name="Megatron-DeepSpeed, 64 and 512 A100", sources=("vtrain-multi",), in_readme=True),
    Line(name="Megatron-DeepSpeed, 2 to 8 A100", sources=("vtrain-single",)),
    Line(name="BLOOM, 384 A100 on Omni-Path", sources=("bloom",), in_readme=True),
    Line(name="Megatron-DeepSpeed, V100", sources=("bs1b3",)),
    Line(name="llm-foundry FSDP, A100 and H100", sources=("mpt",), in_readme=True),
    Line(name="fms-fsdp, A100 and H100", sources=("fmsfsdp",)),
    Line(name="torchtitan, H100, H200", sources=("titan",), in_readme=True),
    Line(name="torchtune, A100", sources=("torchtune",)),
    Line(name="InternEvo, A100", sources=("internevo",)),
    Line(name="nanotron, H100", sources=("nanotron",), in_readme=True),
    Line(name="Megatron-LM tables of 2020, A100 and V100", sources=("meg2020",)),
    Line(name="TinyLlama, A100", sources=("tinyllama",)),
)
README_HEAD = "| measured steps | rows priced | step time: mean error | memory: mean error |"
PAGE_HEAD = (
    "| measured steps | rows priced | step time: mean error | median | bias | tau | "
    "memory: mean error |"
)
# of the rows kept apart: the name of a line, and the cell with the pattern that its rows have there
KEPT_APART = (
    ("all rows kept apart", "id", ""),
    ("NeMo 24.03 to 25.07, long sequences apart (nemodocs)", "id", r"nemodocs-(?!24\.03)|mlm"),
    ("NeMo 24.03, sequences of 4 to 1,024 K (nemodocs)", "id", r"nemodocs-24\.03"),
    ("own code like Megatron's, 13B to 65B (layouts)", "id", "layouts"),
    ("Transformers with PEFT or DeepSpeed (qwenpeft)", "id", "qwenpeft"),
    ("NeMo AutoModel, FSDP2 (automodel)", "id", "automodel"),
    ("LitGPT, torchtune, prime-rl, torchtitan", "id", "litgpt|tunerows|primerl"),
    ("llm-foundry and Primus on AMD", "id", "mi250|primus"),
    ("A100", "gpu", "a100"),
    ("H100", "gpu", "h100"),
    ("B200, GB200, B300", "gpu", "b200|gb200|b300"),
    ("MI250, MI355X, RTX", "gpu", "mi|rtx"),
    ("fp8", "dtype", "fp8"),
    ("bf16", "dtype", "bf16"),
    ("experts", "experts", r"\d"),
    ("LoRA", "run_type", "lora"),
    ("long sequences, 16 K and more", "seq_len", r"\d{6}|1[6-9]\d{3}|[2-9]\d{4}"),
)
KEPT_APART_HEAD = (
    "| rows kept apart | rows priced | step time: mean error | median | bias | "
    "memory: mean error | ran, called too large | ran out, called fitting |"
)
BANDS_HEAD = f"| error bands of 80 % | {' | '.join(FIGURES.values())} |"


def documents(
    priced: Sequence[PricedRow], kept_apart: Sequence[tuple[Row, PricedRow]]
) -> dict[Path, str]:
    """Returns the text of README and of the page with the tables of these rows."""
    by_line = {line: [row for row in priced if _is_of(row, line)] for line in LINES}
    _check_complete(priced, by_line)
    page = PAGE.read_text(encoding="utf-8")
    page = with_table(page, PAGE_HEAD, (_page_cells(*entry) for entry in by_line.items()))
    page = with_table(page, BANDS_HEAD, band_cells(coverage(priced)))
    page = with_table(page, KEPT_APART_HEAD, kept_apart_cells(kept_apart))
    readme = with_table(
        README.read_text(encoding="utf-8"),
        README_HEAD,
        (_readme_cells(line, rows) for line, rows in by_line.items() if line.in_readme),
    )
    return {README: readme, PAGE: page}


def _is_of(row: PricedRow, line: Line) -> bool:
    return any(row.id.startswith(f"{source}-") for source in line.sources)


def _check_complete(
    priced: Sequence[PricedRow], by_line: Mapping[Line, Sequence[PricedRow]]
) -> None:
    """Raises ValueError where a row is in no line, or in two."""
    listed = [row.id for rows in by_line.values() for row in rows]
    if sorted(listed) != sorted(row.id for row in priced):
        missing = sorted({row.source for row in priced} - {each.split("-")[0] for each in listed})
        raise ValueError(f"the lines of docs/accuracy.py are not the sources; missing: {missing}")


def with_table(text: str, head: str, rows: Iterable[Sequence[str]]) -> str:
    """Returns a page with other rows in the table under `head`; raises ValueError without it."""
    before, found, after = text.partition(f"{head}\n")
    if not found:
        raise ValueError(f"no table has the head {head}")
    lines = after.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    table = "".join(f"|{'|'.join(map(_cell, cells))}|\n" for cells in rows)
    return before + found + lines[0] + table + "".join(lines[end:])


def _cell(text: str) -> str:
    return f" {text} " if text else " "


def _score_of(rows: Sequence[PricedRow]) -> SourceScore:
    """Returns one score for rows of several sources."""
    return score(replace(row, source="line") for row in rows)["line"]


def _page_cells(line: Line, rows: Sequence[PricedRow]) -> list[str]:
    name, priced, time, memory = _readme_cells(line, rows)
    found = _score_of(rows)
    tau = "" if found.kendall_tau is None else f"{found.kendall_tau:.2f}"
    median, bias = _percent(found.median_time), _percent(found.bias_time, "+")
    timed = sum(row.error is not None for row in rows)
    if 0 < timed < found.priced:
        time += f" ({timed} rows)"
    return [f"{name} ({', '.join(line.sources)})", priced, time, median, bias, tau, memory]


def _readme_cells(line: Line, rows: Sequence[PricedRow]) -> list[str]:
    found = _score_of(rows)
    counts = f"{found.priced}/{found.rows}"
    return [line.name, counts, _percent(found.mape_time), _percent(found.mape_memory)]


def kept_apart_cells(kept_apart: Sequence[tuple[Row, PricedRow]]) -> Iterable[list[str]]:
    """Yields the cells of each line about rows that no term was fitted to."""
    for name, cell, pattern in KEPT_APART:
        rows = [price for row, price in kept_apart if re.match(pattern, row[cell])]
        found = _score_of(rows)
        yield [
            *(name, f"{found.priced}/{found.rows}", _percent(found.mape_time)),
            *(_percent(found.median_time), _percent(found.bias_time, "+")),
            _percent(found.mape_memory),
            _share_of(rows, out_of_memory=False),
            _share_of(rows, out_of_memory=True),
        ]


def _share_of(rows: Iterable[PricedRow], *, out_of_memory: bool) -> str:
    """Returns how many of the runs that ran out, or that ran, are called the other."""
    calls = [row.predicted_fits for row in rows if row.out_of_memory is out_of_memory]
    return f"{calls.count(out_of_memory)} of {len(calls)}" if calls else ""


def price_kept_apart() -> list[tuple[Row, PricedRow]]:
    """Prices the rows of profiles/data/holdout_steps.csv."""
    rows = read_table(HOLDOUT)
    return list(zip(rows, price_table(rows), strict=True))


def _percent(share: float | None, sign: str = "") -> str:
    return "" if share is None else f"{100 * share:{sign}.1f} %"


def band_cells(covered: Mapping[str, BandCoverage]) -> list[list[str]]:
    """Returns the share of the rows inside their bands, of all and of each stack."""
    stacks = {trait for each in covered.values() for trait in each.by_trait if STACK in trait}
    found = [covered[figure] for figure in FIGURES]
    rows = [
        ["half of them are below", *(f"+- {100 * each.median_share:.0f} %" for each in found)],
        ["rows inside, of all", *(_inside(each.rows, each.within) for each in found)],
    ]
    for stack in sorted(stacks):
        shares = [each.by_trait.get(stack) for each in found]
        cells = (_inside(*share) if share else "" for share in shares)
        rows.append([f"of {stack.removeprefix(STACK)}", *cells])
    return rows


def _inside(rows: int, within: float) -> str:
    return f"{100 * within:.1f} % of {rows}"


def draw_bands(covered: Mapping[str, BandCoverage], path: Path) -> None:
    """Draws the share of rows inside their bands, of each trait that has enough of them."""
    from matplotlib.figure import Figure

    from parplan.report.plots.scatter_plot import save

    shown = {name: covered[name] for name in ("time", "memory")}
    traits = sorted(
        {
            trait
            for each in shown.values()
            for trait, (rows, _) in each.by_trait.items()
            if rows >= FEWEST_ROWS
        },
        reverse=True,
    )
    figure = Figure(figsize=(8.4, 0.8 + 0.26 * len(traits)), layout="constrained")
    axes = figure.subplots()
    for name, each in shown.items():
        _draw_figure(axes, name, each, traits)
    axes.axvline(100 * TARGET, color="0.3", linewidth=1, label="asked of a band")
    axes.set_yticks(range(len(traits)), traits)
    axes.set(xlim=(0, 102), xlabel="measured runs inside their error band, %")
    axes.grid(visible=True, color="0.92")
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    save(figure, path)


def _draw_figure(axes: Axes, name: str, covered: BandCoverage, traits: Sequence[str]) -> None:
    found = [(*covered.by_trait.get(trait, (0, 0.0)), place) for place, trait in enumerate(traits)]
    points = [entry for entry in found if entry[0] >= FEWEST_ROWS]
    rows, within, places = zip(*points, strict=True)
    axes.scatter(
        [100 * share for share in within],
        places,
        s=[8 + 0.35 * count for count in rows],
        color=COLOURS[name],
        alpha=0.8,
        label=f"{FIGURES[name]}, {100 * covered.within:.0f} % of all {covered.rows}",
    )


def main() -> None:
    from parplan.report.plots.scatter_plot import draw

    priced = price_table(read_table())
    for path, text in documents(priced, price_kept_apart()).items():
        path.write_text(text, encoding="utf-8")
    draw(priced, SCATTER)
    draw_bands(coverage(priced), BANDS)


if __name__ == "__main__":
    main()
