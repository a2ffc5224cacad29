"""Ranks of the configurations in which makers train models of experts and of long context.

    # all rows, each with the model, the machine and the batch of its publication
    python benchmarks/prices/makers_ranking.py
    python benchmarks/prices/makers_ranking.py --model mixtral-8x22b

A configuration is priced as published, with an even split, and with the best layers of its layout.
Its rank counts the candidates that a bound does not prove slower than the published one, so no more
candidates than that are faster. benchmarks/prices/published_ranking.py does the same for dense
models, whose candidates are all solved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import click
from rich.console import Console
from rich.table import Table

from benchmarks.prices.published_ranking import breakdown_table, peak_bytes
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.machine import DEFAULT_STACK
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import described_prices
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, Request, SearchOptions
from parplan.planner.search.estimate import default_blocks, uniform_strategy
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.price_factory import described_factory
from parplan.planner.search.search_session import SearchPrices, SearchSession
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.stack import ContextForm
from parplan.profiles.units import GIB

BRIDGE = "NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The configuration of one publication; the degree of data parallelism is the rest of the GPUs.

    differs    what the run had that the price has not
    """

    name: str
    model: str
    gpus: int
    gpu: str
    batch: int
    seq_length: int
    pp: int
    tp: int
    zero: int
    recompute: Recompute
    citation: str
    differs: str
    virtual_stages: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    context_form: ContextForm | None = None

    @property
    def pins(self) -> Constraints:
        return Constraints(
            pp=(self.pp,),
            tp=(self.tp,),
            cp=(self.cp,),
            ep=(self.ep,),
            etp=(self.etp,),
            context_form=None if self.context_form is None else (self.context_form,),
            micro_batch_size=(1,),
            sequence_parallel=(True,) if self.tp > 1 else None,
            schedule=(Schedule.INTERLEAVED if self.virtual_stages > 1 else Schedule.ONE_F_ONE_B,),
            virtual_stages=(self.virtual_stages,),
        )


MAKERS = (
    Maker(
        name="DeepSeek-V3",
        model="deepseek-v3",
        gpus=2048,
        gpu="h800-80gb",
        batch=15360,
        seq_length=4096,
        pp=16,
        tp=1,
        ep=64,
        zero=1,
        recompute=Recompute.SELECTIVE,
        differs="1F1B in place of DualPipe, which hides the exchanges; bf16 in place of fp8; all "
        "tokens of 8 experts are sent, where a token goes to 4 nodes at most",
        citation="arXiv 2412.19437, sections 3.1, 3.2 and 4.2",
    ),
    Maker(
        name="Llama 3 405B, 131,072 tokens",
        model="llama3-405b",
        gpus=16384,
        gpu="h100-80gb",
        batch=128,
        seq_length=131072,
        pp=16,
        tp=8,
        cp=16,
        context_form=ContextForm.ALL_GATHER,
        virtual_stages=8,
        zero=1,
        recompute=Recompute.NONE,
        differs="gradients are whole until the end of the step, where they were sharded (ZeRO 2)",
        citation="arXiv 2407.21783, table 4 and section 3.3.2",
    ),
    Maker(
        name="Megatron-Bridge Qwen3 235B",
        model="qwen3-235b-a22b",
        gpus=256,
        gpu="h100-80gb",
        batch=2048,
        seq_length=4096,
        pp=8,
        tp=2,
        ep=32,
        virtual_stages=4,
        zero=1,
        recompute=Recompute.NONE,
        differs="exchanges are not hidden, where the run hid them (moe_a2a_overlap)",
        citation=f"{BRIDGE}/qwen/qwen3_workload_base_configs.py (H100, bf16, V1)",
    ),
    Maker(
        name="Megatron-Bridge gpt-oss 120B",
        model="gpt-oss-120b",
        gpus=64,
        gpu="h100-80gb",
        batch=1280,
        seq_length=4096,
        pp=4,
        tp=1,
        ep=8,
        zero=1,
        recompute=Recompute.SELECTIVE,
        differs="",
        citation=f"{BRIDGE}/gpt_oss/gpt_oss_workload_base_configs.py (H100, bf16, V2)",
    ),
    Maker(
        name="Megatron-Core Mixtral 8x22B",
        model="mixtral-8x22b",
        gpus=128,
        gpu="h100-80gb",
        batch=256,
        seq_length=4096,
        pp=8,
        tp=4,
        ep=2,
        etp=4,
        virtual_stages=7,
        zero=1,
        recompute=Recompute.NONE,
        differs="",
        citation="NVIDIA/Megatron-LM@022bcb5afe megatron/core/transformer/moe/README.md "
        "(reference mappings of MCore v0.8)",
    ),
)


@dataclass(frozen=True, slots=True)
class Ranking:
    """A configuration among the candidates of its request.

    faster     the candidates that no bound proves slower than the configuration as published
    own        the plan with the best layers of its layout, None where nothing fits
    """

    maker: Maker
    price: StepPrice
    fits: bool
    faster: int
    candidates: int
    own: Plan | None
    best: Plan


def request_for(maker: Maker, stack: str) -> Request:
    """Returns the request of a publication's model, machine and batch."""
    return request_of(
        TargetOptions(
            model=maker.model,
            gpus=maker.gpus,
            gpu=maker.gpu,
            global_batch_size=maker.batch,
            seq_length=maker.seq_length,
            stack=stack,
        )
    )


def _prices(request: Request) -> SearchPrices:
    return described_factory(request).prices(())


def as_published(maker: Maker, request: Request) -> StepPrice:
    """Returns the price of the even split. Raises ConfigError where the layout is not legal."""
    prices = _prices(replace(request, constraints=maker.pins))
    (layout,) = prices.space.layouts
    book = described_prices(prices.price_cache)
    blocks = default_blocks(layout, book.model.num_layers)
    return price_step(
        uniform_strategy(
            layout, blocks, zero=maker.zero, recompute=maker.recompute, price_cache=book
        ),
        book,
    )


def may_be_faster(layout: ParallelLayout, step_s: float, session: SearchSession) -> bool:
    """Returns False where a bound proves that no plan of a layout is below `step_s`."""
    prices, limit = session.prices, session.limit_bytes
    if prices.step_bound_s(layout, limit) >= step_s or not prices.may_fit(layout, limit):
        return False
    return all(bound_s < step_s for bound_s in prices.closer_bounds_s(layout, limit))


def ranked(maker: Maker, stack: str = DEFAULT_STACK) -> Ranking:
    """Returns the place of one configuration."""
    request = request_for(maker, stack)
    price = as_published(maker, request)
    prices = _prices(request)
    session = SearchSession(prices, SearchOptions(), None)
    layouts = prices.space.layouts
    try:
        own = find_plan(replace(request, constraints=maker.pins))
    except InfeasibleError:
        own = None
    return Ranking(
        maker,
        price,
        peak_bytes(price) <= session.limit_bytes,
        sum(may_be_faster(layout, price.step_s, session) for layout in layouts),
        len(layouts),
        own,
        find_plan(request),
    )


def _step_s(plan: Plan | None) -> float | None:
    return None if plan is None else plan.predicted.step_time_s.value


def _row(ranking: Ranking) -> tuple[str, ...]:
    best_s = ranking.best.predicted.step_time_s.value
    own_s = _step_s(ranking.own)
    return (
        ranking.maker.name,
        f"{ranking.price.step_s:.2f} s",
        f"{peak_bytes(ranking.price) / GIB:.1f}",
        "yes" if ranking.fits else "no",
        f"{1 + ranking.faster} of {ranking.candidates}",
        f"{100 * (ranking.price.step_s / best_s - 1):+.1f} %",
        "-" if own_s is None else f"{own_s:.2f} s",
        "-" if own_s is None else f"{100 * (own_s / best_s - 1):+.1f} %",
        f"{best_s:.2f} s",
        str(ranking.best.mesh),
    )


def report(ranking: Ranking, console: Console) -> None:
    """Print one configuration: its place, the seconds by cause, and the source."""
    table = Table(box=None)
    names = ("published", "step", "GiB", "fits", "rank at most", "loss")
    for name in (*names, "best layers", "loss", "best", "mesh of the best"):
        table.add_column(name, no_wrap=True)
    table.add_row(*_row(ranking))
    console.print(table)
    console.print(breakdown_table([("as published", ranking.price)]))
    differs = f" Differs: {ranking.maker.differs}." if ranking.maker.differs else ""
    console.print(f"{ranking.maker.citation}.{differs}", soft_wrap=True)


@click.command()
@click.option("--model", help="One model of the table; all by default.")
@click.option("--stack", default=DEFAULT_STACK, show_default=True, help="A name of `plan stacks`.")
def main(model: str | None, stack: str) -> None:
    """Rank the configurations of the table among the candidates of a search."""
    for maker in MAKERS:
        if model in (None, maker.model):
            report(ranked(maker, stack), Console(width=200))


if __name__ == "__main__":
    main()
