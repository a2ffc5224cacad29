"""Saved activations of a block on every rank of plans of 8 gloo ranks (dp 2, tp 2, pp 2).

    python benchmarks/prices/activations.py [gpt-100m|gpt-tiny]

Prints one row a plan: MiB of a block that MemTracker measures, by the executor's rule
(tests/helpers/divided_bytes.py) and, for Megatron's divisions, by the memory model's
`parplan.costmodels.layers.recompute.saved_bytes`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed._tools.mem_tracker import MemTracker

from parplan.costmodels.layers.recompute import Recompute, recompute_operators, saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.pipeline.borders import border_examples
from parplan.executor.placed_layers import stage_layers
from parplan.executor.rules.all_rules import validate
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB
from tests.helpers.divided_bytes import divided_saved_bytes
from tests.helpers.executor_plans import (
    BATCH,
    BATCH_FEED_FORWARD,
    MEGATRON,
    MEGATRON_SEQUENCE,
    SEQUENCE,
    TOKEN_FEED_FORWARD,
    Division,
    make_plan,
    with_divisions,
)

# GPT-2's 85 M parameters of blocks. The vocabulary, which does not change a block's saved tensors,
# is cut so that 8 ranks fit in 8 GiB.
GPT_100M = ModelSpec(
    name="gpt-100m",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    ffn_hidden_size=3072,
    vocab_size=2048,
    max_seq_length=512,
)
DIVISIONS: dict[str, tuple[Division, bool]] = {
    "megatron": (MEGATRON, False),
    "megatron-sequence": (MEGATRON_SEQUENCE, True),
    "ulysses": (SEQUENCE, True),
    "token-feed-forward": (TOKEN_FEED_FORWARD, True),
    "batch-feed-forward": (BATCH_FEED_FORWARD, False),
    "batch": (BATCH, True),
}
CHAIN = ("norm2", "fc1", "activation")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Bytes of one block of a plan.

    They are the median of all ranks, the executor's rule, and the memory model for Megatron's
    plans.
    """

    plan: str
    recompute: str
    measured: int
    rule: int
    model: int | None


def gpt_tiny() -> ModelSpec:
    return dataclasses.replace(load_model("gpt-tiny").spec, dropout=0.0)


def plans(model: ModelSpec, seq_length: int) -> dict[tuple[str, str], Plan]:
    """Return plans of every division without recompute, with the selective one and with a chain.

    Blocks alternate between ZeRO 1 and 3.
    """
    training = TrainingSpec(
        global_batch_size=8, seq_length=seq_length, precision="fp32", stack=NEUTRAL
    )
    block = build_graph(model, training, 2).block
    lists = {
        "none": (),
        "selective": recompute_operators(block, Recompute.SELECTIVE),
        "chain": CHAIN,
    }
    by_name = {}
    for name, (division, sequence_parallel) in DIVISIONS.items():
        for recompute, operators in lists.items():
            plan = make_plan(
                model, pp=2, dp=2, tp=2, sp=sequence_parallel, zero=(1, 3), recompute=operators
            )
            by_name[name, recompute] = dataclasses.replace(
                with_divisions(plan, division), training=training
            )
    return by_name


def measure(plan: Plan) -> int:
    """Return the saved bytes of a block.

    It is the median over all blocks behind a rank's first and over all 8 ranks. They save the same
    bytes, but gloo's threads may hold the buffers of a collective when a block ends. Each plan has
    a world of its own, because MemTracker does not release what it has tracked.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(plan, folder), nprocs=8, start_method="fork")
        return round(
            statistics.median(
                n_bytes
                for rank in range(8)
                for n_bytes in json.loads((Path(folder) / f"rank{rank}").read_text())
            )
        )


def _rank(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", 8)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=8, timeout=timedelta(seconds=300)
    )
    (Path(folder) / f"rank{rank}").write_text(json.dumps(_block_bytes(plan)))
    dist.destroy_process_group()


def _block_bytes(plan: Plan) -> list[int]:
    trainer = build_trainer(plan, Options(), torch.device("cpu"))
    stage = trainer.pipeline.stages[0]
    x = _stage_input(plan, trainer.ranks.coordinate("pp"))
    tracker = MemTracker()
    tracker.track_external(stage, x)
    after: list[int] = []
    for name, block in stage.body.named_children():
        if name.startswith("block"):
            block.register_forward_hook(lambda *_: after.append(_held_bytes(tracker)))
    with tracker:
        stage(x)
    return [later - earlier for earlier, later in pairwise(after)]


def _stage_input(plan: Plan, pipeline_rank: int) -> torch.Tensor:
    if pipeline_rank == 0:
        return torch.randint(
            plan.model.vocab_size, (plan.pipeline.micro_batch_size, plan.training.seq_length)
        )
    shape = border_examples(plan, stage_layers(plan)[pipeline_rank - 1][-1])[-1].shape
    return torch.randn(shape, requires_grad=True)


def _held_bytes(tracker: MemTracker) -> int:
    held: Mapping[object, int] = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    return sum(n_bytes for kind, n_bytes in held.items() if str(kind).endswith("ACT"))


def rows(plans_by_name: Mapping[tuple[str, str], Plan]) -> Iterator[Row]:
    """Yield the rows of some of the plans."""
    for name, plan in plans_by_name.items():
        validate(plan)
        yield _row(name, plan, measure(plan))


def _row(name: tuple[str, str], plan: Plan, measured: int) -> Row:
    block = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size).block
    layer = next(layer for layer in plan.layer_plans.values() if layer.layer == "block")
    division, sequence_parallel = DIVISIONS[name[0]]
    sharding = (
        Sharding(plan.mesh.tp, sequence_parallel)
        if division in (MEGATRON, MEGATRON_SEQUENCE)
        else None
    )
    return Row(
        plan=name[0],
        recompute=name[1],
        measured=measured,
        rule=divided_saved_bytes(
            block,
            layer.operators,
            plan.mesh.tp,
            layer.recompute,
            layer.operators["residual2"].output,
        ),
        model=saved_bytes(block, sharding, layer.recompute) if sharding else None,
    )


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "gpt-100m"
    model, seq_length = (GPT_100M, 512) if name == "gpt-100m" else (gpt_tiny(), 64)
    print(
        f"{name}, MiB a block: "
        f"{'plan':<20}{'recompute':<12}{'measured':>10}{'rule':>10}{'error':>8}{'saved_bytes':>13}{'error':>8}"
    )
    for row in rows(plans(model, seq_length)):
        model_text = (
            f"{row.model / MIB:>13.3f}{100 * (row.measured / row.model - 1):>7.2f}%"
            if row.model
            else ""
        )
        print(
            f"{'':<25}{row.plan:<20}{row.recompute:<12}{row.measured / MIB:>10.3f}"
            f"{row.rule / MIB:>10.3f}{100 * (row.measured / row.rule - 1):>7.2f}%{model_text}",
            flush=True,
        )


if __name__ == "__main__":
    main()
