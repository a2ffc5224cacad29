"""The gain of a token table on the host, for a large vocabulary over few blocks.

    # three minutes of one core
    python benchmarks/prices/token_table.py
    python benchmarks/prices/token_table.py --json

Blocks of GPT's width 4096, 256k tokens, a head of its own or one that is tied to the table. The
same search runs twice, with and without `lookup` among the offload choices. Every figure is
predicted and analytic. docs/design/chunks.md has the table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import click

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.machine import TrainingDefaults, training_of
from parplan.costmodels.host.offload import Offload
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan import Plan
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, PlanRequest
from parplan.planner.search.find_plan import find_plan
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_family
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.units import GIB
from parplan.report.searches.largest_table import peak_gib
from parplan.report.text import console, gib_text, print_table, say, seconds_text

VOCABULARY = 256_000
WIDTH = 4096
SEQUENCES = 64
HOST_BYTES = 240 * GIB
NODES = (  # GPUs of a node, blocks
    ("a100-40gb", 1, 12),
    ("rtx3090-24gb", 8, 12),
    ("l4-24gb", 8, 12),
    ("v100-32gb", 2, 12),
    ("v100-32gb", 8, 60),
)
TIED_NODES = (("rtx3090-24gb", 1, 12), ("rtx3090-24gb", 4, 12))
HEADING = ("node", "blocks", "head", "table", "step", "GPU GiB", "host GiB", "plan")


def model_of(num_blocks: int, *, tied: bool = False) -> ModelSpec:
    """Return the model of the blocks, whose head has a matrix of its own or the token table."""
    return replace(
        load_family("gpt").of_width(WIDTH, num_blocks).spec,
        name="gpt-256k",
        vocab_size=VOCABULARY,
        tied_embeddings=tied,
    )


def plan_of(model: ModelSpec, cluster: Cluster, offload: tuple[Offload, ...]) -> Plan | None:
    """Return the fastest plan, or None if nothing fits."""
    defaults = TrainingDefaults(global_batch_size=SEQUENCES, seq_length=model.max_seq_length)
    training, _ = training_of(TargetOptions(), defaults, None, cluster)
    try:
        return find_plan(
            PlanRequest(
                model=model,
                cluster=cluster,
                training=training,
                constraints=Constraints(offload=offload),
            )
        )
    except InfeasibleError:
        return None


def rows_of(gpu: str, gpus: int, num_blocks: int, *, tied: bool = False) -> list[tuple[str, ...]]:
    """Return rows with the table on the devices, and with the location that the search chooses."""
    cluster = replace(with_gpus(load_cluster(gpu), gpus), host_memory_bytes=HOST_BYTES)
    node = f"{gpus} x {gpu}"
    rows = []
    for offload in (
        tuple(what for what in SEARCHED_OFFLOAD if what is not Offload.LOOKUP),
        SEARCHED_OFFLOAD,
    ):
        plan = plan_of(model_of(num_blocks, tied=tied), cluster, offload)
        head = "tied" if tied else "its own"
        rows.append((node, str(num_blocks), head, *_cells(plan)))
    return rows


def _cells(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ("device", "none fits", "", "", "")
    table = "host" if Offload.LOOKUP in plan.layer_plans["embedding"].offload else "device"
    batch = f"micro-batch {plan.pipeline.micro_batch_size} x {plan.pipeline.num_micro_batches}"
    return (
        table,
        seconds_text(plan.predicted.step_time_s.value),
        gib_text(peak_gib(plan)),
        gib_text(host_gib(plan)),
        f"{plan.mesh}, {batch}{', chunks' if plan.chunks else ''}",
    )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def main(*, as_json: bool) -> None:
    """Print the table."""
    rows = [row for node in NODES for row in rows_of(*node)]
    rows += [row for node in TIED_NODES for row in rows_of(*node, tied=True)]
    if as_json:
        click.echo(json.dumps([dict(zip(HEADING, row, strict=True)) for row in rows], indent=2))
        return
    out = console(sys.stdout)
    say(
        out,
        f"{VOCABULARY:,} tokens, width {WIDTH}, {SEQUENCES} sequences; predicted, all "
        "of it analytic",
    )
    print_table(out, HEADING, rows, left=("node", "head", "table", "plan"))


if __name__ == "__main__":
    main()
