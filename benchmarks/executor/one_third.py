"""A GPT that trains within a device budget of a third of its model states.

    # a minute, 2 GiB
    python benchmarks/executor/one_third.py 100m
    # five minutes, 17 GiB; with --precision fp32 19 GiB
    python benchmarks/executor/one_third.py 1b

Prints losses, peaks by two counts, and transfers. The run is one CPU process whose "device" is
memory of its own. The blocks are in chunks: as many located on the device as the budget has room
for, all others on the host, evicted by Belady's choice. The tokens are a pattern that repeats, so a
falling loss shows that the model trains.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.run_options import Options
from parplan.executor.training.train import Trainer, build_trainer
from parplan.executor.watch.state_bytes import predicted_state_bytes
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.search.estimate import ChunkRequest, UniformChoices, estimate_plan
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.units import GIB, KIB

SHAPES = {
    "100m": (768, 12, 12, 8000),
    "1b": (2048, 20, 16, 50257),
}  # hidden size, blocks, heads, vocabulary
SHARE = 3
PATTERN = 61  # tokens before it repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    model: ModelSpec
    training: TrainingSpec

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            mesh=Mesh(pp=1, dp=1, tp=1),
            schedule=Schedule.ONE_F_ONE_B,
            virtual_stages=1,
            micro_batch_size=self.training.global_batch_size,
            num_micro_batches=1,
            sequence_parallel=False,
        )

    def plan(self, host_blocks: int, device_bytes: int | None) -> Plan:
        chunks = ChunkRequest(
            host_blocks=host_blocks, optimizer_blocks=0, device_bytes=device_bytes
        )
        return estimate_plan(
            PlanRequest(
                model=self.model,
                cluster=with_gpus(load_cluster("cpu"), 1, 1),
                training=self.training,
            ),
            self.layout,
            UniformChoices(chunks=chunks),
        )


def request(name: str, args: argparse.Namespace) -> Request:
    hidden, blocks, heads, vocabulary = SHAPES[name]
    model = replace(
        load_model("gpt-tiny").spec,
        name=f"gpt-{name}",
        num_layers=blocks,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocabulary,
        max_seq_length=1024,
        dropout=0.0,
    )
    precision = Precision(args.precision)
    gradients = Precision.FP32 if precision is Precision.FP32 else precision
    return Request(
        model=model,
        training=TrainingSpec(
            global_batch_size=args.batch,
            seq_length=args.seq_length,
            precision=precision,
            gradient_precision=gradients,
            stack=load_stack("parplan"),
        ),
    )


def within(wish: Request, budget_bytes: int) -> Plan:
    """Return the plan with most blocks located on the device that fits the budget."""
    for host_blocks in range(wish.model.num_layers + 1):
        try:
            return wish.plan(host_blocks, budget_bytes)
        except InfeasibleError as error:
            reason = error
    raise reason


def tokens(folder: Path) -> Path:
    path = folder / "tokens.bin"
    (np.arange(100_000) * 7 % PATTERN).astype(np.uint16).tofile(path)
    return path


def rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def told(plan: Plan, states_bytes: int) -> None:
    assert plan.chunks is not None
    (rank,) = plan.chunks.ranks
    homes = {group.home.value: group for group in plan.chunks.groups}
    for name, group in homes.items():
        print(
            f"  {name:<10}{group.num_chunks} chunks of {group.chunk_elements:,}, "
            f"{group.utilisation:.1%} used"
        )
    print(
        f"  states {states_bytes / GIB:.2f} GiB, budget {rank.device_bytes / GIB:.2f} "
        f"({rank.device_bytes / states_bytes:.1%}), smallest {rank.smallest_bytes / GIB:.2f}"
    )


def train(trainer: Trainer, chunks: ChunkManager) -> list[float]:
    losses = []
    for result in trainer.run():
        counts, schedule = chunks.counts, chunks.schedule
        moved = (
            ("H2D", counts.in_bytes, schedule.in_bytes),
            ("D2H", counts.out_bytes, schedule.out_bytes),
        )
        said = ", ".join(
            f"{name} {counted:,} {'=' if counted == predicted else '!='} {predicted:,}"
            for name, counted, predicted in moved
        )
        print(
            f"  step {result.step + 1}  loss {result.loss:.4f}  grad norm "
            f"{result.gradient_norm:.3g}  {result.seconds:.1f} s  {said}  "
            f"rss {rss_bytes() / GIB:.1f} GiB",
            flush=True,
        )
        losses.append(result.loss)
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--precision", choices=[each.value for each in Precision], default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument(
        "--steps", type=int, default=4, help="at least 3: the second is counted byte by byte"
    )
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    wish = request(args.model, args)
    states_bytes = predicted_state_bytes(wish.plan(wish.model.num_layers, None), 0, 0).total
    plan = within(wish, states_bytes // SHARE)
    print(f"{wish.model.name}, {args.batch} x {args.seq_length} tokens, {args.precision}")
    told(plan, states_bytes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(steps=args.steps, data=tokens(Path(folder)), warmup_steps=2)
        trainer = build_trainer(plan, options, torch.device("cpu"))
        chunks = trainer.pipeline.chunks
        assert chunks is not None
        losses = train(trainer, chunks)
    peak = trainer.recorder.cpu_peak.num_bytes
    assert peak is not None, "a run of 3 steps or more counts one"
    budget, device_bytes = chunks.ledger.limit_bytes, peak - chunks.host_bytes
    print(
        f"  chunks held {chunks.ledger.most_bytes / GIB:.2f} GiB of the device at most, "
        f"all tensors {device_bytes / GIB:.2f} (measured), budget {budget / GIB:.2f}: "
        f"{'kept' if device_bytes <= budget else 'EXCEEDED'}"
    )
    print(
        f"  loss {losses[0]:.4f} to {losses[-1]:.4f}; all states {states_bytes / GIB:.2f} GiB, "
        f"of which the host had {chunks.host_bytes / GIB:.2f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
