"""Errors of predictions against measured steps, by source, grid and row, and the fitted terms."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from parplan.planner.plan.traits import STACK
from parplan.planner.validation.band_coverage import coverage, overrun
from parplan.planner.validation.fitted_terms import FittedTerm
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.scores import GridScore, SourceScore, grid_scores, score, unpriced
from parplan.profiles.units import format_number
from parplan.report.text import (
    aligned,
    band_text,
    gib_text,
    joined,
    labelled,
    percent,
    print_table,
    say,
    seconds_text,
)

NOTES = (  # title of a group of columns, meaning
    (
        "step time",
        "time: the published step time, or what follows from the published tokens/s or TFLOP/s",
    ),
    (
        "ranking",
        "ranking: inside each grid of at least 3 configurations of one model, GPUs and tokens in "
        "a step; @1: how much slower than "
        "the best is the one predicted fastest (regret), @3: the best of the three predicted "
        "fastest",
    ),
    ("memory", "memory: what the source measured, mostly the allocator's peak of the fullest GPU"),
    (
        "out of memory",
        "out of memory: found, of the rows that ran out those predicted not to fit; right, of "
        "those predicted not to fit "
        "the ones that ran out",
    ),
)
FITTED_NOTES = (
    "rows: at most 24 of an experiment, evenly spaced over those of the published steps; each "
    "experiment counts once",
    "when held out: the value when one experiment, or one fold of a source, is left out; plan "
    "validate prices a row so",
)
_GAP = "   "  # between two groups of columns
_NONE = "-"
_BANDED = {"ratio": "pairs of a row and the one of its grid that is predicted fastest"}
_REASON = "not priced because"


@dataclass(frozen=True, slots=True)
class _Group:
    """Columns under one title; the first row of `table` has their names."""

    title: str
    table: Sequence[tuple[str, ...]]

    @property
    def empty(self) -> bool:
        return all(cell == _NONE for row in self.table[1:] for cell in row)

    @property
    def width(self) -> int:
        return len(self.lines()[0])

    def lines(self) -> list[str]:
        """Returns title, names and rows, padded to one width; only sources are flush left."""
        body = aligned(self.table, 0, left=() if self.title else (0,), indent=0)
        width = max(len(self.title), *map(len, body))
        return [
            self.title.center(width),
            *(line.rjust(width) if self.title else line.ljust(width) for line in body),
        ]


def print_validation(
    priced: Sequence[PricedRow], out: Console, *, table: str, rows: bool = False
) -> None:
    """Print the errors of a table of measured steps by source; `rows` adds every row and grid."""
    if rows:
        _print_rows(priced, out)
        _print_grids(grid_scores(priced), out)
    scores = score(priced)
    count = sum(source.priced for source in scores.values())
    heading = (
        f"{table}: {count:,} of {len(priced):,} rows priced",
        "errors in percent, + is too slow or too large",
    )
    say(out, joined(heading, "; ", out.width, indent=2), "bold")
    say(out)
    groups = _groups(scores)
    for block in _blocks(groups, out.width):
        _print_block(block, out)
        say(out)
    _print_unpriced(priced, out)
    shown = {group.title for group in groups}
    for note in (
        *_counted_notes(priced),
        *_band_notes(priced),
        *(note for title, note in NOTES if title in shown),
    ):
        say(out, joined(note.split(" "), " ", out.width, start=labelled("note")), "dim")


def _groups(by_source: Mapping[str, SourceScore]) -> list[_Group]:
    """Returns the columns; a group without a single figure is left out."""
    scores = by_source.values()
    groups = [
        _Group(
            "",
            [
                ("source", "priced"),
                *((name, f"{each.priced}/{each.rows}") for name, each in by_source.items()),
            ],
        ),
        _Group(
            "step time",
            [
                ("mean", "median", "bias"),
                *(
                    (_share(each.mape_time), _share(each.median_time), _signed(each.bias_time))
                    for each in scores
                ),
            ],
        ),
        _Group(
            "ranking",
            [
                ("tau", "@1", "@3"),
                *(
                    (
                        _coefficient(each.kendall_tau),
                        _share(each.regret_at_1),
                        _share(each.regret_at_3),
                    )
                    for each in scores
                ),
            ],
        ),
        _Group(
            "memory",
            [
                ("mean", "bias"),
                *((_share(each.mape_memory), _signed(each.bias_memory)) for each in scores),
            ],
        ),
        _Group(
            "out of memory",
            [
                ("found", "right"),
                *((_share(each.oom_recall), _share(each.oom_precision)) for each in scores),
            ],
        ),
    ]
    return [group for group in groups if not group.empty]


def _blocks(groups: Sequence[_Group], width: int) -> list[list[_Group]]:
    """Splits the groups into blocks that fit the terminal, each with the names of the sources."""
    names, *numbers = groups
    blocks = [[names]]
    for group in numbers:
        used = sum(shown.width + len(_GAP) for shown in blocks[-1])
        if len(blocks[-1]) > 1 and used + group.width > width:
            blocks.append([names])
        blocks[-1].append(group)
    return blocks


def _print_block(groups: Sequence[_Group], out: Console) -> None:
    for index, parts in enumerate(zip(*(group.lines() for group in groups), strict=True)):
        say(out, _GAP.join(parts).rstrip(), "dim" if index < 2 else "")


def _print_unpriced(priced: Sequence[PricedRow], out: Console) -> None:
    reasons = unpriced(priced)
    if not reasons:
        return
    print_table(
        out,
        ("rows", _REASON),
        [(f"{count:,}", reason) for reason, count in reasons.items()],
        left=(_REASON,),
        indent=0,
    )
    say(out)


def _counted_notes(priced: Sequence[PricedRow]) -> Iterator[str]:
    """Yields the kinds of the predicted step times, and the settings that rows do not state."""
    kinds = Counter(row.kind for row in priced if row.kind)
    if kinds:
        yield (
            f"predicted step times: "
            f"{', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common())}"
        )
    for heading, names in (
        ("settings that rows left open", [row.assumed for row in priced]),
        ("rows with settings taken from", [row.taken for row in priced]),
        ("times that are not compared", [row.untimed for row in priced]),
        ("own figures of rows against the published model", [row.differing for row in priced]),
    ):
        counts = Counter(itertools.chain.from_iterable(names))
        if counts:
            counted = (f"{name} ({count:,})" for name, count in counts.most_common())
            yield f"{heading}: {', '.join(counted)}"


def _band_notes(priced: Sequence[PricedRow]) -> Iterator[str]:
    """Yields how many rows each error band of 80 % held, with the stacks that it held least of."""
    for name, covered in coverage(priced).items():
        stacks = (
            f"{trait.removeprefix(STACK)} {100 * within:.0f} % of {rows:,}"
            for trait, (rows, within) in covered.by_trait.items()
            if trait.startswith(STACK)
        )
        yield (
            f"{name}: the error bands of 80 %, half of them below {band_text(covered.median_share)}"
            f", held {percent(covered.within)} of {covered.rows:,} {_BANDED.get(name, 'rows')}; "
            f"{', '.join(stacks)}"
        )
    risks = overrun(priced)
    if risks:
        shares = ", ".join(
            f"{percent(above)} at {100 * risk:g} %" for risk, (_, above) in risks.items()
        )
        rows = max(rows for rows, _ in risks.values())
        yield f"--oom-risk: of {rows:,} runs needed more than the margin left: {shares}"


def _print_rows(priced: Sequence[PricedRow], out: Console) -> None:
    """Print every row; the name is last because it may be longer than a line."""
    heading = ("measured", "predicted", "error", "GiB", "predicted", "error", "kind", "row")
    rows = [
        (
            _seconds(row.measured_s),
            _seconds(row.predicted_s),
            _signed(row.error),
            _gib(row.measured_gib),
            _gib(row.predicted_gib),
            _signed(row.memory_error),
            row.kind or _NONE,
            row.id,
        )
        for row in priced
        if row.reason is None
    ]
    if rows:
        print_table(out, heading, rows, left=("kind", "row"), indent=0)
        say(out)
    reasons = [(row.id, row.reason) for row in priced if row.reason is not None]
    if reasons:
        print_table(out, ("row", _REASON), reasons, left=("row", _REASON), indent=0)
        say(out)


def _print_grids(grids: Sequence[GridScore], out: Console) -> None:
    if not grids:
        return
    rows = [
        (
            str(grid.rows),
            _seconds(grid.best_s),
            _coefficient(grid.kendall_tau),
            _share(grid.regret_at_1),
            _share(grid.regret_at_3),
            grid.key.replace("|", ", "),
        )
        for grid in grids
    ]
    print_table(out, ("rows", "best", "tau", "@1", "@3", "grid"), rows, left=("grid",), indent=0)
    say(out)


def print_fitted(terms: Sequence[FittedTerm], out: Console) -> None:
    """Print the fitted terms: value, bounds, held-out range, rows and experiments."""
    if not terms:
        say(out, "no term of the prices is fitted to measured steps")
        return
    heading = ("of", "term", "value", "bounds", "when held out", "rows", "fitted on")
    rows = [
        (
            term.stack,
            term.term,
            _in_unit(term.value, term.unit),
            _range(term.low, term.high, term.unit),
            _range_without(term),
            f"{term.rows:,}",
            _experiments(term.fitted_on),
        )
        for term in terms
    ]
    print_table(out, heading, rows, left=("of", "term", "fitted on"), indent=0)
    say(out)
    for note in FITTED_NOTES:
        say(out, joined(note.split(" "), " ", out.width, start=labelled("note")), "dim")


def _in_unit(value: float, unit: str) -> str:
    return seconds_text(value) if unit == "s" else f"{format_number(value, 4)} {unit}".rstrip()


def _range(low: float, high: float, unit: str) -> str:
    ends = (seconds_text(end) if unit == "s" else format_number(end, 4) for end in (low, high))
    return " .. ".join(ends)


def _range_without(term: FittedTerm) -> str:
    """Formats the least and the largest value when each experiment in turn is left out."""
    if not term.without:
        return _NONE
    return _range(min(term.without.values()), max(term.without.values()), term.unit)


def _experiments(names: Sequence[str]) -> str:
    """Names the sources, with folds if a source is held out in parts: `bloom, mpt (4 folds)`."""
    folds = Counter(name.split("-")[0] for name in names)
    return ", ".join(
        source if count == 1 else f"{source} ({count} folds)" for source, count in folds.items()
    )


def _share(value: float | None) -> str:
    """Formats a fraction in percent; the unit is in the heading."""
    return _NONE if value is None else f"{100 * value:.1f}"


def _signed(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:+.1f}"


def _coefficient(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return _NONE if value is None else seconds_text(value)


def _gib(value: float | None) -> str:
    return _NONE if value is None else gib_text(value)
