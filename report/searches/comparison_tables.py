"""A plan beside the baselines: step time and memory, with the differences by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from parplan.costmodels.step_breakdown import NAMES
from parplan.planner.baselines.optimum import Leanest
from parplan.planner.baselines.systems import Baseline
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.planner.search.comparison import (
    MEMORY_NAMES,
    OURS,
    ComparedPlan,
    Comparison,
    ComparisonRow,
)
from parplan.profiles.units import gib
from parplan.report.names import pipeline_phrases
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.plan_header import header
from parplan.report.searches.baseline_flags import flags_text
from parplan.report.text import (
    aligned,
    band_text,
    gib_text,
    joined,
    percent,
    print_table,
    say,
    seconds_text,
)

SAME_STEP = 5e-4  # share of a step; smaller differences count as equal
SAME_GIB = 0.05  # GiB; smaller differences count as equal
NOTHING = 5e-3  # in the table's unit; a line of only smaller numbers is left out


def print_comparison(
    comparison: Comparison,
    out: Console,
    *,
    assumed: Sequence[str] = (),
    pinned: bool = False,
    by_class: bool = True,
) -> None:
    """Print the comparison for a person.

    pinned     our search alone had pins
    by_class   with a table of the memory by class
    """
    for plan in _headed(comparison):
        say(out, header(plan, out.width), "bold")
    if assumed:
        say(out, joined(assumed, ", ", out.width, start="assumed: "), "dim")
    say(out)
    print_table(
        out,
        overview_names(comparison),
        overview(comparison),
        left=("plan",),
    )
    say(out)
    for line in aligned(
        ((name, *text) for name, *text in layouts(comparison)), out.width, left=(0, 1)
    ):
        say(out, line)
    sides = sides_of(comparison)
    unit, times = times_of(comparison)
    ours = comparison.ours.name + (", and differences of the others" if len(sides) > 1 else "")
    _print_parts(out, f"{unit} of the mean GPU: {ours}", "step", sides, NAMES, times)
    memory = [tuple(map(gib, side.memory_bytes)) for side in sides]
    if by_class:
        _print_parts(out, f"GiB of the fullest GPU: {ours}", "total", sides, MEMORY_NAMES, memory)
    say(out)
    for line in verdicts(comparison):
        _say_words(out, line)
    say(out)
    for line in comparison_notes(comparison, pinned=pinned):
        _say_words(out, line, "dim")
    for row in comparison.rows:
        if row.baseline is not None:
            _say_words(out, f"{row.name}: {meaning(row.baseline)}", "dim")
        if flags := flags_of(row):
            _say_words(out, f"{row.name} with {flags}", "dim")


def _headed(comparison: Comparison) -> list[AnyPlan]:
    """Returns our plan, and those that are of another model, machine or training."""
    ours = comparison.ours.plan
    others = (row.side.plan for row in comparison.rows if row.side and row.baseline is None)
    return [ours, *(plan for plan in others if header(plan, 999) != header(ours, 999))]


def _say_words(out: Console, text: str, style: str = "") -> None:
    say(out, joined(text.split(" "), " ", out.width, start="  ", indent=4), style)


def sides_of(comparison: Comparison) -> list[ComparedPlan]:
    """Returns our plan and those of the rows that have one."""
    return [comparison.ours, *(row.side for row in comparison.rows if row.side)]


def overview_names(comparison: Comparison) -> tuple[str, ...]:
    """Returns the headings of the columns of `overview`."""
    return (
        "plan",
        "step",
        f"than {comparison.ours.name}",
        "tokens/s/GPU",
        "MFU",
        "peak GiB",
        "redundant GiB",
    )


def overview(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each plan, ours first."""
    yield _numbers(comparison.ours, "")
    for row in comparison.rows:
        if row.side is None:
            yield (row.name, "no fit", *["-"] * 5)
        else:
            yield _numbers(row.side, _slower(comparison, row.side))


def _slower(comparison: Comparison, baseline_plan: ComparedPlan) -> str:
    slower = comparison.slower(baseline_plan)
    if abs(slower) < SAME_STEP:
        return "the same"
    return f"{'tie ' if comparison.is_tie(baseline_plan) else ''}{100 * slower:+.1f} %"


def _numbers(side: ComparedPlan, against: str) -> tuple[str, ...]:
    predicted = side.plan.predicted
    return (
        side.name,
        seconds_text(side.step_s),
        against,
        f"{predicted.tokens_per_s_per_gpu.value:,.0f}",
        percent(predicted.mfu.value),
        gib_text(gib(side.fullest.total)),
        gib_text(predicted.redundancy_gib.total),
    )


def times_of(comparison: Comparison) -> tuple[str, list[tuple[float, ...]]]:
    """Returns the unit of the parts of the steps, s or ms, and the parts of each plan."""
    scale, unit = (1.0, "s") if comparison.ours.step_s >= 1 else (1e3, "ms")
    parts = (side.parts.values for side in sides_of(comparison))
    return unit, [tuple(part * scale for part in values) for values in parts]


def layouts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yields the name and the mesh, the pipeline and the layers of each plan."""
    for side in sides_of(comparison):
        plan = side.plan
        pipeline = pipeline_phrases(plan.pipeline, plan.mesh)
        yield side.name, ", ".join((str(plan.mesh), *pipeline, *layers_phrases(plan)))


def _print_parts(
    out: Console,
    title: str,
    whole: str,
    sides: Sequence[ComparedPlan],
    names: Sequence[str],
    values: Sequence[tuple[float, ...]],
) -> None:
    """Print one line a part: our value, then each baseline's difference from it."""
    say(out)
    say(out, f"  {title}", "dim")
    rows = part_rows(whole, names, values)
    print_table(out, ("", *(side.name for side in sides)), rows, left=("",))


def part_rows(
    whole: str, names: Sequence[str], values: Sequence[tuple[float, ...]]
) -> list[tuple[str, ...]]:
    """Returns one row a part: our value, then each baseline's difference from it.

    The last row, `whole`, has the sums.
    """
    rows = []
    with_sums = [(*parts, sum(parts)) for parts in values]
    for name, (ours, *theirs) in zip((*names, whole), zip(*with_sums, strict=True), strict=True):
        differences = [their - ours for their in theirs]
        if max(abs(ours), *map(abs, differences), 0.0) >= NOTHING:
            rows.append((name, f"{ours:.2f}", *map(_difference, differences)))
    return rows


def _difference(value: float) -> str:
    return f"{value:+.2f}" if abs(value) >= NOTHING else "0.00"


def verdicts(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        yield _verdict(comparison, row.side) if row.side else _shortfall(comparison, row)


def _verdict(comparison: Comparison, baseline_plan: ComparedPlan) -> str:
    """Returns a baseline's differences in time and memory, and the measures in which it wins."""
    ours = comparison.ours
    slower = comparison.slower(baseline_plan)
    more_gib = gib(baseline_plan.fullest.total - ours.fullest.total)
    redundant_gib = (
        baseline_plan.plan.predicted.redundancy_gib.total - ours.plan.predicted.redundancy_gib.total
    )
    direction = "longer" if slower > 0 else "less time"
    same_time = abs(slower) < SAME_STEP
    time = "takes as long" if same_time else f"takes {percent(abs(slower))} {direction}"
    if not comparison.same_work(baseline_plan):
        time += " for each token on each GPU"
    if comparison.is_tie(baseline_plan) and abs(slower) >= SAME_STEP:
        time += ", inside the error band of the ratio: a tie"
    lost = [
        what
        for what, difference, same in (
            ("step time", slower, SAME_STEP),
            ("peak memory", more_gib, SAME_GIB),
            ("redundant memory", redundant_gib, SAME_GIB),
        )
        if difference <= -same
    ]
    memory = f"{_amount(more_gib)} at the peak, {_amount(redundant_gib)} redundant over all GPUs"
    return f"{baseline_plan.name} {time}; {memory}" + (
        f". {_name(comparison)} loses in {' and '.join(lost)}" if lost else ""
    )


def _name(comparison: Comparison) -> str:
    """Returns the name of our plan at the start of a sentence."""
    name = comparison.ours.name
    return "Ours" if name == OURS else name


def _amount(difference_gib: float) -> str:
    if abs(difference_gib) < SAME_GIB:
        return "as much"
    return f"{gib_text(abs(difference_gib))} GiB {'more' if difference_gib > 0 else 'less'}"


def _shortfall(comparison: Comparison, row: ComparisonRow) -> str:
    """Returns the GiB that a baseline's leanest plan is short of, or its lack of a legal layout."""
    assert row.baseline is not None, "a plan has no shortfall"
    lean, plan = row.baseline.leanest, comparison.ours.plan
    if lean is None and plan.pools:
        return f"{row.name} has no plan that fits"
    if lean is None:
        return (
            f"{row.name} has no legal layout on {plan.cluster.num_gpus} GPUs with a "
            f"global batch of "
            f"{plan.training.global_batch_size}"
        )
    return (
        f"{row.name} does not fit: its leanest ({_lean_text(lean)}) needs "
        f"{gib_text(gib(lean.peak_bytes))} GiB on stage "
        f"{lean.rank}, {gib_text(short_gib(comparison, lean))} GiB more than the "
        f"{gib_text(gib(comparison.limit_bytes))} usable"
    )


def short_gib(comparison: Comparison, lean: Leanest) -> float:
    """Returns the GiB that the leanest plan of a baseline needs beyond the limit."""
    return gib(lean.peak_bytes - comparison.limit_bytes)


def _lean_text(lean: Leanest) -> str:
    layout = lean.strategy.layout
    return f"{layout.mesh}, micro-batch {layout.micro_batch_size} x {layout.num_micro_batches}"


def comparison_notes(comparison: Comparison, *, pinned: bool) -> Iterator[str]:
    band, ours = comparison.ours.plan.predicted.error_band, comparison.ours
    kinds = sorted({str(side.plan.predicted.step_time_s.kind) for side in sides_of(comparison)})
    yield f"step times are predicted ({', '.join(kinds)}), not measured; memory is computed"
    if comparison.unpriced:
        yield f"not priced before the time limit: {', '.join(comparison.unpriced)}"
    if comparison.filed_step_s is not None:
        yield (
            f"the plan file says {seconds_text(comparison.filed_step_s)}; the comparison is of "
            f"{seconds_text(ours.step_s)}, as priced now"
        )
    if ours.plan.pools:
        yield "systems that know no pools are priced as if every GPU were the slowest"
    elif ours.fullest.total > comparison.limit_bytes:
        yield (
            f"{ours.name} needs {gib_text(gib(ours.fullest.total))} GiB, more than the "
            f"{gib_text(gib(comparison.limit_bytes))} that {_held(comparison)}: "
            "--memory-margin, --memory-limit"
        )
    if pinned:
        yield "the pins hold for ours; the baselines are free in their own space"
    ties = [row.side for row in comparison.rows if row.side and comparison.is_tie(row.side)]
    shares = [comparison.share_of(side) for side in ties]
    known = sorted({band_text(share): share for share in shares if share is not None}.items())
    if band and known:
        widths = " to ".join(dict.fromkeys((known[0][0], known[-1][0])))
        whose = _possessive(comparison)
        yield f"tie: the ratio to {whose} step time is inside its error band, {widths}"
    elif not band:
        yield "the error band is unknown: no measured steps on this device"


def _held(comparison: Comparison) -> str:
    files = all(row.baseline is None for row in comparison.rows)
    return "a plan may fill" if files else "the baselines were held to"


def _possessive(comparison: Comparison) -> str:
    name = comparison.ours.name
    return "our" if name == OURS else f"{name}'s"


def meaning(baseline: Baseline) -> str:
    """Describes a baseline, with the number of its strategies."""
    strategies = f"{baseline.candidates:,} strategies"
    if baseline.optimum is None:
        return f"{baseline.what} ({strategies}, none fits)"
    if baseline.in_order:
        return f"{baseline.what} (the first of {strategies} that fits)"
    return f"{baseline.what} ({strategies})"


def flags_of(row: ComparisonRow) -> str:
    """Returns the flags with which a described model runs as the baseline, empty if unknown."""
    baseline = row.baseline
    if baseline is None or baseline.optimum is None or row.side is None:
        return ""
    if baseline.arguments:
        return " ".join(" ".join((name, *words)) for name, words in baseline.arguments)
    plan = row.side.plan
    return flags_text(row.name, baseline.optimum.strategy, plan) if isinstance(plan, Plan) else ""
