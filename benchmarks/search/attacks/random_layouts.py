"""Random legal layouts against the plans of small random requests.

    python -m benchmarks.search.attacks.random_layouts                  # 200 requests, 20 layouts
    python -m benchmarks.search.attacks.random_layouts --first 17 --requests 1

A request has a made-up model of a few layers, a machine, a batch, a memory limit that some layouts
exceed, and sometimes pins. No layout that `estimate` prices may be better than the plan by more
than the plan's stated gap. Each counterexample is printed with its seed, which makes the same
request and the same layouts again.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import click
import yaml

from benchmarks.search.attacks import change
from benchmarks.search.attacks.allowed import layouts
from benchmarks.search.attacks.requests import PINS, STACKS, Request
from benchmarks.search.attacks.rounds import ROUNDING, Attack, searched
from parplan.commands.options.target_options import TargetOptions
from parplan.planner.objective import Objective
from parplan.planner.request import SearchOptions
from parplan.profiles.documents.schema import document
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import GIB

LAYOUTS = 20
TRIES = 80  # draws for these layouts: a draw may be illegal or may not fit
CLUSTERS = ("a100-40gb", "h100-80gb", "v100-32gb", "l4-24gb")
GPUS = (2, 4, 6, 8, 16)
STATE_BYTES = 18  # of one parameter in mixed precision
LEAST_BYTES = 2.5 * GIB  # context, communicators and workspaces of the smallest plan


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan of a request beside random layouts.

    plan     its step in seconds or redundant bytes, None if the search reports that nothing fits
    better   the layout that is better than the plan by more than its gap, empty without one
    """

    request: Request
    plan: float | None
    gap: float
    layouts: int
    better: str


def small_request(seed: int, folder: Path) -> Request:
    """Return the request of a seed; its model is a file in `folder`.

    Requests without a legal layout are drawn again.
    """
    chance = random.Random(seed)
    while True:
        path = _model_file(chance, folder / f"small-{seed}.yaml")
        arguments = TargetOptions(
            model=str(path),
            gpus=chance.choice(GPUS),
            gpu=chance.choice(CLUSTERS),
            gpus_per_node=chance.choice((None, None, None, 1, 2)),
            stack=chance.choice(STACKS),
        )
        objective = Objective.MEMORY if chance.random() < 0.25 else Objective.THROUGHPUT
        request = Request(arguments, chance.choice(PINS), objective=objective)
        question = request.question
        states = STATE_BYTES * build_graph(question.model, question.training, 1).num_parameters
        limit = int(LEAST_BYTES + chance.choice((0.2, 0.5, 1.0, 3.0)) * states)
        if any(layouts(question, request.pins)):
            return replace(request, options=SearchOptions(memory_limit_bytes=limit))


def _model_file(chance: random.Random, path: Path) -> Path:
    model = _model(chance, path.stem)
    training = {
        "global_batch_size": chance.choice((8, 16, 24, 64)),
        "seq_length": model.max_seq_length,
    }
    body = {"model": document(model), "training": training, "source": "drawn by chance"}
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


def _model(chance: random.Random, name: str) -> ModelSpec:
    heads = chance.choice((8, 12, 16))
    hidden = 64 * heads
    return ModelSpec(
        name=name,
        num_layers=chance.choice((2, 3, 4, 6, 8)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=chance.choice((heads, heads // 4)),
        head_dim=64,
        ffn_hidden_size=chance.choice((2, 4)) * hidden,
        vocab_size=chance.choice((1024, 32000)),
        max_seq_length=chance.choice((512, 2048)),
        dropout=chance.choice((0.0, 0.1)),
        tied_embeddings=chance.random() < 0.5,
    )


def compared(request: Request, seed: int) -> Comparison:
    """Search the plan of a request and price random layouts beside it."""
    plan = searched(request)
    attack = Attack(request, plan, 0, seed)
    start = attack.start()
    legal = (
        candidate
        for candidate in attack.random(TRIES)
        if attack.runs(candidate.strategy) and attack.counts(candidate.strategy)
    )
    candidates = list(islice(legal, LAYOUTS))
    best = min(candidates, key=lambda candidate: candidate.value, default=None)
    gap = plan.search.gap if plan else 0.0
    better = ""
    if best is not None and start is None:
        better = change.text(best.strategy)
    elif best is not None and start is not None:
        least = start.value - (gap + ROUNDING) * abs(start.value)
        better = change.text(best.strategy) if best.value < least else ""
    return Comparison(request, start.value if start else None, gap, len(candidates), better)


@click.command()
@click.option("--requests", "count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="First seed.")
def main(count: int, first: int) -> None:
    """Compare the plans of small requests with random layouts."""
    priced = infeasible = 0
    beaten: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            comparison = compared(small_request(seed, Path(folder)), seed)
            priced += comparison.layouts
            infeasible += comparison.plan is None
            if comparison.better:
                beaten.append(seed)
                click.echo(
                    f"seed {seed}: {comparison.request}: {comparison.plan}, gap {comparison.gap}, "
                    f"beaten by {comparison.better}"
                )
    click.echo(
        f"{count} requests, {infeasible} without a plan, {priced} layouts, "
        f"{len(beaten)} plans beaten beyond their gap"
    )
    sys.exit(1 if beaten else 0)


if __name__ == "__main__":
    main()
