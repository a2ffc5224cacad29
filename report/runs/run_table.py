"""The table at the end of a run: predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from rich.console import Console

from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.runs.run_file import ChunkMoved, PredictedAndMeasured, RankRecord, RunFile
from parplan.profiles.units import format_bytes
from parplan.report.text import joined, labelled, percent, print_table, say, seconds_text

_PARTS = {
    "F": "forward, stage",
    "B": "backward, stage",
    "receive_F": "wait for input, stage",
    "receive_B": "wait for gradient, stage",
    "reduce": "reduction, rank",
    "tied": "tied embedding's reduction, rank",
    "pools": "sum with other pools, rank",
    "optimizer": "optimizer, rank",
    "data": "data, rank",
}
_MOVED = {
    "chunks to the device": "in_bytes",
    "chunks to the host": "out_bytes",
    "chunks gathered": "gathered_bytes",
    "chunks reduced": "reduced_bytes",
}
MOST_STAGES = 8  # in a table; the file has all
MOST_RANKS = 16  # in a table; the file has all


def print_run(run: RunFile, out: Console) -> None:
    """Print predicted and measured values of the step and of memory."""
    say(out)
    rows = [*_step(run), *_parts(run), *_memory(run)]
    print_table(out, ("", "predicted", "measured", "off by"), rows, left=("",))
    for index, note in enumerate(_notes(run)):
        say(
            out,
            joined(note.split(" "), " ", out.width, start=labelled("" if index else "note")),
            "dim",
        )


def print_record(run: RunFile, out: Console) -> None:
    """Print a run file: plan, losses, the table, and bytes that the chunks of every rank moved."""
    steps = run.steps
    where = run.environment
    plan = run.any_plan()
    name = plan.traced.name if isinstance(plan, TracedPlan) else plan.model.name
    say(
        out,
        f"{name}, {plan.mesh}: a run of {run.date} on {where.world_size} x {where.device}, torch "
        f"{where.torch}",
        "bold",
    )
    skipped = f", {len(steps.skipped)} skipped" if steps.skipped else ""
    say(
        out,
        f"  {len(steps.seconds)} steps{skipped}, loss {steps.loss[0]:.6f} to {steps.loss[-1]:.6f}",
    )
    print_run(run, out)
    moved = [rank for rank in run.ranks if rank.chunks is not None]
    if moved:
        say(out)
        say(out, "  bytes that the chunks of a rank moved in the last step, counted", "dim")
        rows = [
            (f"{rank.pp} {rank.dp} {rank.tp}", *_moved_cells(rank.chunks))
            for rank in moved[:MOST_RANKS]
            if rank.chunks is not None
        ]
        print_table(
            out,
            ("pp dp tp", *(name.removeprefix("chunks ") for name in _MOVED)),
            rows,
            left=("pp dp tp",),
        )
        more = len(moved) - MOST_RANKS
        verdict = (
            "all as predicted"
            if all(rank.chunks.as_predicted for rank in moved if rank.chunks is not None)
            else "NOT as predicted"
        )
        say(out, f"  {verdict}{f', {more} ranks more in the file' if more > 0 else ''}")
        _print_traces(moved, out)


def _print_traces(ranks: Sequence[RankRecord], out: Console) -> None:
    """Prints for the first ranks what the warm-up measured, and the schedule that it gave."""
    for rank in ranks[:MOST_RANKS]:
        trace = rank.chunks.traced if rank.chunks is not None else None
        if trace is None:
            continue
        most, worst = trace.most_bytes, trace.worst_bytes
        say(
            out,
            f"  {rank.pp} {rank.dp} {rank.tp}: outside of chunks {_bytes(most.measured)} at most, "
            f"{_bytes(most.predicted)} predicted; {_bytes(worst.measured)} for "
            f"{_bytes(worst.predicted)} {trace.worst_moment}; to the device "
            f"{_bytes(trace.in_bytes.corrected)} a step, {_bytes(trace.in_bytes.planned)} planned",
        )


def _bytes(figure: float | None) -> str:
    return "-" if figure is None else format_bytes(int(figure))


def _moved_cells(moved: ChunkMoved) -> Iterator[str]:
    for field in _MOVED.values():
        figure: PredictedAndMeasured = getattr(moved, field)
        counted = f"{figure.measured:,}"
        yield (
            counted
            if figure.measured == figure.predicted
            else f"{counted} for {figure.predicted:,}"
        )


def _row(
    name: str, figure: PredictedAndMeasured, show: Callable[[float], str]
) -> tuple[str, str, str, str]:
    predicted, measured = figure.predicted, figure.measured
    off = ""
    if predicted and measured is not None:
        off = f"{100 * (measured / predicted - 1):+.0f} %"
    predicted_text = "-" if predicted is None else show(predicted)
    measured_text = "-" if measured is None else show(measured)
    return name, predicted_text, measured_text, off


def _step(run: RunFile) -> Iterator[tuple[str, str, str, str]]:
    figures = run.figures
    yield _row(
        f"step, median of {len(run.steps.seconds) - run.steps.warm_up}",
        figures.step_time_s,
        seconds_text,
    )
    yield _row("tokens/s", figures.tokens_per_s, "{:,.0f}".format)
    yield _row("tokens/s/GPU", figures.tokens_per_s_per_gpu, "{:,.0f}".format)
    yield _row("MFU", figures.mfu, percent)
    yield (*_row("idle", figures.idle_share, percent)[:3], "")
    yield from _waits(run)


def _waits(run: RunFile) -> Iterator[tuple[str, str, str, str]]:
    """Yields for the first pipeline ranks the idle share of the mean device and what it holds."""
    by_stage: dict[int, list[RankRecord]] = {}
    for rank in run.ranks:
        if rank.idle_share is not None and rank.in_flight is not None:
            by_stage.setdefault(rank.pp, []).append(rank)
    if len(by_stage) < 2:
        return
    shown = sorted(by_stage)[:MOST_STAGES]
    for stage in shown:
        shares = [rank.idle_share for rank in by_stage[stage] if rank.idle_share is not None]
        share = PredictedAndMeasured(
            predicted=shares[0].predicted, measured=fmean(each.measured or 0 for each in shares)
        )
        yield (*_row(f"idle, stage {stage}", share, percent)[:3], "")
    for stage in shown:
        held = [rank.in_flight for rank in by_stage[stage] if rank.in_flight is not None]
        most = max(held, key=_measured)
        yield (*_row(f"in flight, stage {stage}", most, "{:,}".format)[:3], "")


def _parts(run: RunFile) -> Iterator[tuple[str, str, str, str]]:
    for part in sorted(
        run.parts,
        key=lambda part: (
            list(_PARTS).index(part.work) if part.work in _PARTS else len(_PARTS),
            part.stage,
        ),
    ):
        if part.stage < MOST_STAGES:
            name = f"{_PARTS.get(part.work, part.work)} {part.stage}"
            yield _row(
                name,
                PredictedAndMeasured(predicted=part.predicted_s, measured=part.measured_s),
                seconds_text,
            )


def _memory(run: RunFile) -> Iterator[tuple[str, str, str, str]]:
    def fullest(name: str) -> PredictedAndMeasured:
        figures = [getattr(rank, name) for rank in run.ranks]
        most = max(figures, key=lambda figure: (figure.measured or 0, figure.predicted or 0))
        return PredictedAndMeasured(predicted=most.predicted, measured=most.measured)

    yield _row("peak allocated", fullest("peak_allocated_bytes"), format_bytes)
    yield _row("peak reserved", fullest("peak_reserved_bytes"), format_bytes)
    moved = [rank.chunks for rank in run.ranks if rank.chunks is not None]
    for name, field in _MOVED.items() if moved else ():
        most = max(
            (getattr(each, field) for each in moved), key=lambda figure: figure.predicted or 0
        )
        if most.predicted or most.measured:
            yield _row(name, most, format_bytes)
    if moved:  # the budget is a limit and no prediction, so that there is no deviation
        largest = max((each.device_bytes for each in moved), key=_measured)
        yield (*_row("budget, held by chunks", largest, format_bytes)[:3], "")


def _measured(figure: PredictedAndMeasured) -> float:
    return figure.measured or 0


def _notes(run: RunFile) -> Iterator[str]:
    if run.environment.device == "cpu":
        most = max(rank.host_rss_bytes for rank in run.ranks)
        yield (
            f"host memory of a process at most {format_bytes(most)}, with Python and its "
            f"libraries: no figure that is predicted"
        )
        if "profile" not in run.plan["cluster"]:
            calibrated = ", 'plan calibrate' takes them from this run"
            yield (
                "prices of the device cpu are assumed: 'plan profile' measures them"
                f"{'' if 'traced' in run.plan else calibrated}"
            )
    imbalance = run.plan["training"].get("expert_imbalance", 1.0)
    if imbalance > 1:
        yield (
            f"predicted for ranks whose experts get {imbalance:g} times the mean of tokens "
            "(expert_imbalance); in the run the routers decided"
        )
    if run.clock_error_s:
        yield f"clocks of the machines agree to within about {seconds_text(run.clock_error_s)}"
