"""Ranks of published tuned configurations of a 20B-class GPT among all candidates.

    # gpt-20b on 64 h100-80gb, the model's batch
    python benchmarks/prices/published_ranking.py
    # the choices that NeMo's runs had
    python benchmarks/prices/published_ranking.py --global-batch-size 256 --fp8 --bf16-gradients
    --max-zero 1

Candidates rank by predicted step time. Every legal candidate is solved with its own best layers
that fit, with the columns and the program of the search, and replayed. A published configuration is
priced as published (ZeRO 1, no recompute, an even split), and its mesh, schedule and micro-batch
also with their own best layers. If no source states a choice (a micro-batch), the price decides.

The published runs have tensor-parallel communication under the products (userbuffers; all rows with
tp > 1). The default stack has not; with `--stack nemo` every candidate has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import click
from rich.console import Console
from rich.table import Table

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.machine import DEFAULT_STACK
from parplan.commands.requests.requests import request_of as planning_request_of
from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import enumerate_candidates, layout_text
from parplan.planner.candidates.lower_bounds import time_bound
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.master import Master, MasterChoice
from parplan.planner.plan.error_band import stack_band
from parplan.planner.request import Constraints, PlanRequest, SearchOptions, SolverName
from parplan.planner.search.estimate import default_blocks, uniform_strategy
from parplan.planner.solver import Unsolved
from parplan.planner.stage_columns.block_counts import block_counts, to_strategy
from parplan.planner.stage_columns.columns import RankColumns
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import PlannerError
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.spec import Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.units import GIB

LAUNCHER = "NVIDIA/NeMo-Framework-Launcher@26e42fa91d"
NEMO = "NVIDIA/NeMo@000e8c17a3 scripts/performance/recommended_model_configs/model_configs_h100.csv"
MEGATRON = (
    "NVIDIA/Megatron-LM@d98e8a64dd images/model_table.png; README.md (TP overlap, so "
    "sequence parallel; distributed optimizer)"
)
WIDTH = 165
# For the layers of one layout: equal ranks of a deep pipeline take CBC minutes, and the even split
# is an answer.
SOLVE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One tuned configuration as its source states it, of a model of `num_layers`.

    micro_batch_size  None if the source does not state it

    All rows have sequence parallelism if tp > 1, a distributed optimizer (ZeRO 1), and no recompute
    where it is stated. GPUs, batch and figures are those of the publication.
    """

    name: str
    gpus: str
    batch: str
    numbers: str
    num_layers: int
    tp: int
    pp: int
    virtual_stages: int
    micro_batch_size: int | None
    citation: str


PUBLISHED = (
    Published(
        name="NeMo gpt3-20b",
        gpus="64 H100",
        batch="256; 2,048",
        numbers="fp8 and bf16, bf16 gradients",
        num_layers=44,
        tp=2,
        pp=1,
        virtual_stages=1,
        micro_batch_size=2,
        citation=f"{LAUNCHER} examples/README.md, examples/training/gpt/h100/20b_fp8_8node.sh and "
        "20b_bf16_8node.sh (grad_sync_dtype=bf16), launcher_scripts/conf/training/gpt3/20b.yaml "
        "(sequence_parallel, no recompute)",
    ),
    Published(
        name="NeMo gpt3-20b, A100",
        gpus="64 A100",
        batch="2,048",
        numbers="bf16, bf16 gradients",
        num_layers=44,
        tp=4,
        pp=1,
        virtual_stages=1,
        micro_batch_size=4,
        citation=f"{LAUNCHER} examples/training/gpt/a100/20b_8node.sh (grad_sync_dtype=bf16)",
    ),
    Published(
        name="NeMo nemotron-22b, 2024",
        gpus="64 H100",
        batch="256",
        numbers="fp8",
        num_layers=40,
        tp=2,
        pp=4,
        virtual_stages=10,
        micro_batch_size=2,
        citation=(
            f"{LAUNCHER} examples/README.md; virtual stages, no recompute: "
            "launcher_scripts/conf/training/nemotron/nemotron_22b.yaml"
        ),
    ),
    Published(
        name="NeMo nemotron3-22b",
        gpus="64 H100",
        batch="256",
        numbers="bf16",
        num_layers=40,
        tp=2,
        pp=4,
        virtual_stages=10,
        micro_batch_size=1,
        citation=f"{NEMO} (nemotron3 22b bf16)",
    ),
    Published(
        name="NeMo nemotron3-22b, fp8",
        gpus="64 H100",
        batch="256",
        numbers="fp8",
        num_layers=40,
        tp=1,
        pp=4,
        virtual_stages=10,
        micro_batch_size=1,
        citation=f"{NEMO} (nemotron3 22b fp8)",
    ),
    Published(
        name="NeMo nemotron4-15b",
        gpus="64 H100",
        batch="256",
        numbers="bf16 and fp8",
        num_layers=32,
        tp=2,
        pp=1,
        virtual_stages=1,
        micro_batch_size=2,
        citation=f"{NEMO} (nemotron4 15b)",
    ),
    Published(
        name="Megatron-LM 16B",
        gpus="192 H100",
        batch="192",
        numbers="bf16",
        num_layers=32,
        tp=4,
        pp=1,
        virtual_stages=1,
        micro_batch_size=None,
        citation=MEGATRON,
    ),
    Published(
        name="Megatron-LM 32B",
        gpus="384 H100",
        batch="192",
        numbers="bf16",
        num_layers=48,
        tp=8,
        pp=1,
        virtual_stages=1,
        micro_batch_size=None,
        citation=MEGATRON,
    ),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout and the price of its best layers that fit."""

    layout: ParallelLayout
    price: StepPrice

    @property
    def step_s(self) -> float:
        return self.price.step_s


@dataclass(frozen=True, slots=True)
class Placing:
    """A published configuration among the candidates; ranks count from 1.

    price, fits      the price as published, and whether it fits
    rank             its rank; None if it does not fit, as is `mesh_rank`
    best, best_rank  the same layout with its best layers; None if no layers of the layout fit
    """

    published: Published
    layout: ParallelLayout
    price: StepPrice
    fits: bool
    rank: int | None
    mesh_rank: int | None
    best: Candidate | None
    best_rank: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """The problem of a ranking.

    It has the prices of a model, cluster and training, the bytes that a plan may fill of a device,
    and the pins.
    """

    price_cache: PriceCache
    limit_bytes: float
    pins: Constraints

    def layouts(self, pins: Constraints | None = None) -> tuple[ParallelLayout, ...]:
        """Return the legal candidates that `pins` allow; the request's pins by default."""
        price_cache = self.price_cache
        return enumerate_candidates(
            PlanRequest(
                model=price_cache.model,
                cluster=price_cache.machine.cluster,
                training=price_cache.training,
                constraints=pins or self.pins,
            )
        ).layouts


def request_of(
    model: str,
    gpus: int,
    gpu: str,
    global_batch_size: int | None = None,
    *,
    fp8: bool = False,
    bf16_gradients: bool = False,
    max_zero: int = 3,
    stack: str = DEFAULT_STACK,
) -> Request:
    """Return the request of the options, with the default memory margin of a search."""
    problem = planning_request_of(
        TargetOptions(
            model=model, gpus=gpus, gpu=gpu, global_batch_size=global_batch_size, stack=stack
        )
    )
    gradients = Precision.BF16 if bf16_gradients else problem.training.gradient_precision
    training = replace(
        problem.training,
        products=ProductFormat.FP8_CURRENT if fp8 else None,
        gradient_precision=gradients,
    )
    price_cache = PriceCache(problem.model, training, machine_for(problem.cluster))
    pins = Constraints(zero=tuple(range(max_zero + 1)))
    return Request(price_cache, limit_bytes(problem.cluster, training.stack, SearchOptions()), pins)


def _solve(
    layout: ParallelLayout, table: MixTable, limit: float, counts: Sequence[Iterable[int]]
) -> MasterChoice | None:
    """Return the fastest choice with `counts[rank]` blocks on a rank; None if nothing fits.

    Uses the columns and the master of the search. Raises Unsolved if the time of a layout ends
    before the solver has an answer.
    """
    options = []
    for rank, allowed in enumerate(counts):
        columns = RankColumns(rank, layout, table)
        options.append([column for count in allowed for column in columns.fastest(count, limit)])
        if not options[-1]:
            return None
    return Master(
        layout, options, table.price_cache.model.num_layers, tied=table.price_cache.tied
    ).fastest(SolverName.CBC, SOLVE_S)


def _splits(layout: ParallelLayout, table: MixTable, limit: float) -> Iterator[MasterChoice]:
    """Yield the best choice of the even split, then the best of all splits that can beat it.

    The latter is left out if the solver does not find it in time.
    """
    num_layers = table.price_cache.model.num_layers
    even = _solve(layout, table, limit, [(count,) for count in default_blocks(layout, num_layers)])
    if even is not None:
        yield even
    if layout.virtual_stages > 1 or layout.mesh.pp == 1:
        return
    longest = time_bound(layout, table).longest_rank(layout, even.step_s if even else float("inf"))
    with suppress(Unsolved):
        choice = _solve(
            layout,
            table,
            limit,
            [block_counts(rank, layout, num_layers, longest) for rank in range(layout.mesh.pp)],
        )
        if choice is not None:
            yield choice


def best_of(layout: ParallelLayout, table: MixTable, limit: float) -> Candidate | None:
    """Return the fastest layers of `layout` within `limit` bytes; None if nothing fits."""
    choice = min(_splits(layout, table, limit), key=lambda choice: choice.step_s, default=None)
    return (
        None
        if choice is None
        else Candidate(layout, price_step(to_strategy(layout, choice.columns), table.price_cache))
    )


def ranked(request: Request) -> list[Candidate]:
    """Return all candidates that fit, fastest first."""
    table = MixTable(request.price_cache, request.pins)
    best = (best_of(layout, table, request.limit_bytes) for layout in request.layouts())
    return sorted(filter(None, best), key=lambda candidate: candidate.step_s)


def frames_of(published: Published, request: Request) -> list[ParallelLayout]:
    """Return the candidates that a row describes.

    They are several if its micro-batch is not stated, and none if it is not legal. A virtual stage
    keeps its number of blocks: 10 virtual stages of 40 layers are 11 of 44.
    """
    size, num_layers = published.micro_batch_size, request.price_cache.model.num_layers
    virtual_stages = (
        published.virtual_stages * num_layers / published.num_layers
        if published.virtual_stages > 1
        else 1
    )
    pins = Constraints(
        pp=(published.pp,),
        tp=(published.tp,),
        mesh_order=(MeshOrder.PP_DP_TP,),
        micro_batch_size=None if size is None else (size,),
        sequence_parallel=(published.tp > 1,),
        schedule=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
    )
    return [layout for layout in request.layouts(pins) if layout.virtual_stages == virtual_stages]


def as_published(layout: ParallelLayout, price_cache: PriceCache) -> StepPrice:
    """Return the price of an even split at ZeRO 1 without recompute."""
    blocks = default_blocks(layout, price_cache.model.num_layers)
    return price_step(
        uniform_strategy(layout, blocks, zero=1, recompute=Recompute.NONE, price_cache=price_cache),
        price_cache,
    )


def peak_bytes(price: StepPrice) -> float:
    """Bytes of the fullest stage."""
    return max(memory.total for memory in price.memory)


def place(
    published: Published, candidates: Sequence[Candidate], request: Request
) -> Placing | None:
    """Return the placing of a row; None if it is not legal here.

    Of several micro-batches it takes the fastest that fits.
    """
    priced = [
        (as_published(layout, request.price_cache), layout)
        for layout in frames_of(published, request)
    ]
    if not priced:
        return None
    price, layout = min(
        priced,
        key=lambda candidate: (peak_bytes(candidate[0]) > request.limit_bytes, candidate[0].step_s),
    )
    ranked_alike = (
        (rank, candidate)
        for rank, candidate in enumerate(candidates, 1)
        if candidate.layout == layout
    )
    best_rank, best = next(ranked_alike, (None, None))
    rank = mesh_rank = None
    if peak_bytes(price) <= request.limit_bytes:
        other_meshes = {
            candidate.layout.mesh: candidate.step_s
            for candidate in reversed(candidates)
            if candidate.layout.mesh != layout.mesh
        }
        rank = _rank(
            [candidate.step_s for candidate in candidates if candidate.layout != layout],
            price.step_s,
        )
        mesh_rank = _rank(sorted(other_meshes.values()), price.step_s)
    return Placing(published, layout, price, rank is not None, rank, mesh_rank, best, best_rank)


def _rank(others_s: Sequence[float], step_s: float) -> int:
    return 1 + bisect_left(others_s, step_s)


def _share(part: int | None, of: int) -> str:
    return "-" if part is None else f"{part} of {of}"


def _cells(
    placing: Placing, candidates: Sequence[Candidate], band: float | None
) -> tuple[str, ...]:
    layout, best = placing.layout, placing.best
    step_s = placing.price.step_s
    meshes = {candidate.layout.mesh for candidate in candidates}

    def loss(of_s: float) -> float:
        return of_s / candidates[0].step_s - 1

    best_layers = ("-", "-", "-")
    judged_s = step_s if placing.fits else None
    if best is not None:
        best_s = best.step_s
        best_layers = (f"{best_s:.3f} s", str(placing.best_rank), f"{100 * loss(best_s):+.1f} %")
        judged_s = step_s if placing.fits else best_s
    verdict = ""
    if judged_s is not None and band is not None:
        verdict = "inside" if loss(judged_s) <= band else "outside"
    return (
        placing.published.name,
        str(layout.mesh),
        f"{layout.micro_batch_size} x {layout.num_micro_batches}",
        str(layout.virtual_stages),
        f"{step_s:.3f} s",
        f"{peak_bytes(placing.price) / GIB:.1f}",
        "yes" if placing.fits else "no",
        _share(placing.rank, len(candidates)),
        _share(placing.mesh_rank, len(meshes)),
        f"{100 * loss(step_s):+.1f} %",
        *best_layers,
        verdict,
    )


def _ranking_table(
    placings: Sequence[Placing], candidates: Sequence[Candidate], band: float | None
) -> Table:
    """Return the table of published configurations.

    Each row is priced as published, then with the best layers of its mesh, schedule and
    micro-batch.
    """
    table = Table(box=None)
    left = {"published", "mesh", "band"}
    as_published = (
        "published",
        "mesh",
        "micro",
        "virtual",
        "step",
        "GiB",
        "fits",
        "rank",
        "of meshes",
        "loss",
    )
    for name in (*as_published, "best layers", "rank", "loss", "band"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for placing in placings:
        table.add_row(*_cells(placing, candidates, band))
    return table


def breakdown_table(named: Iterable[tuple[str, StepPrice]]) -> Table:
    """Return seconds by cause on the rank that takes longest.

    The rest of the step is the bubble.
    """
    causes = ("compute", "recompute", "tp_comm", "dp_comm", "pp_comm", "optimizer")
    table = Table(box=None)
    for index, name in enumerate(("seconds", *causes, "bubble")):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for name, price in named:
        slowest = max(price.ranks, key=lambda rank: rank.total.value_s)
        parts = [
            *(getattr(slowest, cause).value_s for cause in causes),
            max(0.0, price.step_s - slowest.total.value_s),
        ]
        table.add_row(name, *(f"{part:.3f}" for part in parts))
    return table


def _headline(candidates: Sequence[Candidate], request: Request, band: float | None) -> str:
    best = candidates[0]
    inside = (
        ""
        if band is None
        else (
            f" of +- {100 * band:.1f} %, "
            f"{sum(c.step_s <= (1 + band) * best.step_s for c in candidates)} inside it"
        )
    )
    return (
        f"best: {layout_text(best.layout)}: {best.step_s:.3f} s\n{len(candidates)} of "
        f"{len(request.layouts())} candidates fit {request.limit_bytes / GIB:.1f} GiB; "
        f"error band{inside or ' unknown'}"
    )


def report(request: Request, console: Console) -> None:
    """Print the rank of every row, the breakdowns and the sources.

    Raises ClickException if nothing fits.
    """
    candidates = ranked(request)
    if not candidates:
        raise click.ClickException("nothing fits")
    band = stack_band(request.price_cache.training.stack.name).time.share
    placed = [(row, place(row, candidates, request)) for row in PUBLISHED]
    placings = [placing for _, placing in placed if placing]
    console.print(_headline(candidates, request, band))
    console.print(_ranking_table(placings, candidates, band))
    published = ((f"{placing.published.name}, as published", placing.price) for placing in placings)
    console.print(breakdown_table((("the best", candidates[0].price), *published)))
    for row, placing in placed:
        note = "" if placing else "; not legal here"
        console.print(
            f"{row.name}: for {row.gpus}, batch {row.batch}, {row.numbers}{note}. {row.citation}",
            soft_wrap=True,
        )


@click.command()
@click.option("--model", default="gpt-20b", show_default=True)
@click.option("--gpus", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--gpu", default="h100-80gb", show_default=True)
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    help="Sequences of a step; the model's by default.",
)
@click.option("--fp8", is_flag=True, help="The products of the blocks in FP8.")
@click.option(
    "--bf16-gradients",
    is_flag=True,
    help="Gradients in bf16, as NeMo's published runs of gpt3-20b; fp32 by default.",
)
@click.option("--stack", default=DEFAULT_STACK, show_default=True, help="A name of `plan stacks`.")
@click.option(
    "--max-zero",
    type=click.IntRange(0, 3),
    default=3,
    show_default=True,
    help="1: what Megatron's distributed optimizer does.",
)
def main(
    model: str,
    gpus: int,
    gpu: str,
    global_batch_size: int | None,
    fp8: bool,
    bf16_gradients: bool,
    stack: str,
    max_zero: int,
) -> None:
    """Rank the published configurations of the 20B class among all candidates."""
    try:
        request = request_of(
            model,
            gpus,
            gpu,
            global_batch_size,
            fp8=fp8,
            bf16_gradients=bf16_gradients,
            max_zero=max_zero,
            stack=stack,
        )
    except PlannerError as error:
        raise click.ClickException(f"{error.message}; {error.hint}") from None
    training, console = request.price_cache.training, Console(width=WIDTH, highlight=False)
    console.print(
        f"{request.price_cache.model.name} on {gpus} x {gpu}, {training.global_batch_size:,} x "
        f"{training.seq_length:,} tokens, {training.precision}"
        f"{' with fp8 products' if fp8 else ''}, {training.gradient_precision} gradients, "
        f"ZeRO up to {max_zero}, {training.stack.name}"
    )
    report(request, console)


if __name__ == "__main__":
    main()
