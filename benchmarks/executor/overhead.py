"""Step times of the executor beside the same mesh written by hand with torch's own parts.

    # GPT-2's 12 blocks of 768 on 2 and 4 gloo ranks
    python -m benchmarks.executor.overhead
    # one of the meshes, by name
    python -m benchmarks.executor.overhead pp2-dp2-tp2

The hand-written trainer is what a user of torch writes: plain modules, `parallelize_module`,
`fully_shard` for every block, a schedule class of torch.distributed.pipelining, fused AdamW. Both
hold the same model, take the same micro-batches and step in turn, A B B A, in the same processes; a
ratio is the median of the ratios of neighbouring steps.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from benchmarks.prices.activations import GPT_100M
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

SEQ_LENGTH = 128
WARM_UP = 1
PAIRS = 5
MESHES = {  # degrees, ZeRO stage
    "dp2": (Mesh(pp=1, dp=2, tp=1), 1),
    "dp2-zero3": (Mesh(pp=1, dp=2, tp=1), 3),
    "tp2": (Mesh(pp=1, dp=1, tp=2), 0),
    "pp2": (Mesh(pp=2, dp=1, tp=1), 0),
    "dp2-tp2": (Mesh(pp=1, dp=2, tp=2), 1),
    "pp2-dp2": (Mesh(pp=2, dp=2, tp=1), 1),
    "pp2-tp2": (Mesh(pp=2, dp=1, tp=2), 0),
    "pp2-dp2-tp2": (Mesh(pp=2, dp=2, tp=2), 1),
}
DEFAULT = ("dp2", "dp2-zero3", "tp2", "pp2", "pp2-dp2", "pp2-tp2")


class Block(nn.Module):
    """A GPT-2 block with the heads of its rank."""

    def __init__(self, model: ModelSpec, heads: int) -> None:
        super().__init__()
        width = model.hidden_size
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = (
            nn.Linear(width, model.ffn_hidden_size),
            nn.Linear(model.ffn_hidden_size, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        query = self._by_head(self.query(h))
        key = self._by_head(self.key(h))
        value = self._by_head(self.value(h))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Part(nn.Module):
    """The part of GPT-2 on one pipeline rank."""

    def __init__(self, model: ModelSpec, pp: int, rank: int, heads: int) -> None:
        super().__init__()
        self.tokens = (
            nn.Embedding(model.padded_vocab_size, model.hidden_size) if rank == 0 else None
        )
        self.positions = (
            nn.Parameter(torch.randn(SEQ_LENGTH, model.hidden_size) * 0.02) if rank == 0 else None
        )
        self.blocks = nn.ModuleList(Block(model, heads) for _ in range(model.num_layers // pp))
        last = rank == pp - 1
        self.norm = nn.LayerNorm(model.hidden_size) if last else None
        self.head = (
            nn.Linear(model.hidden_size, model.padded_vocab_size, bias=False) if last else None
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def by_hand(plan: Plan, mesh: DeviceMesh) -> Callable[[int], None]:
    """Return the step of the hand-written trainer, a function of its number."""
    tp = plan.mesh.tp
    pp, dp = plan.mesh.pp, plan.mesh.dp
    rank = mesh.get_local_rank("pp")
    part = Part(plan.model, pp, rank, plan.model.num_heads // tp)
    if tp > 1:
        _divide(part, mesh["tp"])
    zero3 = any(layer.zero == 3 for layer in plan.layer_plans.values())
    if dp > 1:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=zero3)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=zero3)
    optimizer = torch.optim.AdamW(_groups(part), lr=1e-4, fused=True)
    batches = synthetic_batches(plan, mesh.get_local_rank("dp"), 0)
    count, size = plan.pipeline.num_micro_batches, plan.pipeline.micro_batch_size

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loop(ids: Tensor, targets: Tensor) -> None:
        for number, (part_ids, part_targets) in enumerate(
            zip(ids.split(size), targets.split(size), strict=True)
        ):
            if isinstance(part, FSDPModule) and not zero3:
                part.set_requires_gradient_sync(number == count - 1)
            (loss_of(part(part_ids), part_targets) / count).backward()

    schedule = _schedule(part, plan, mesh, loss_of) if pp > 1 else None

    def piped(ids: Tensor, targets: Tensor) -> None:
        schedule.step(
            *((ids,) if rank == 0 else ()),
            target=targets if rank == pp - 1 else None,
            losses=[],
            return_outputs=False,
        )

    def step(number: int) -> None:
        ids, targets = batches(number)
        with loss_parallel() if tp > 1 else torch.enable_grad():
            (piped if pp > 1 else loop)(ids, targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _groups(part: Part) -> list[dict[str, list[nn.Parameter]]]:
    """Return parameter groups by mesh, which fused AdamW cannot mix."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in part.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _divide(part: Part, mesh: DeviceMesh) -> None:
    """Apply Megatron's tensor parallelism with torch's styles."""
    if part.tokens is not None:
        parallelize_module(
            part,
            mesh,
            {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())},
        )
    for block in part.blocks:
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "fc1")}
        parallelize_module(
            block, mesh, {**columns, "out": RowwiseParallel(), "fc2": RowwiseParallel()}
        )
    if part.head is not None:
        parallelize_module(
            part, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        )


def _schedule(
    part: Part, plan: Plan, mesh: DeviceMesh, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Schedule1F1B:
    rank, pp = mesh.get_local_rank("pp"), plan.mesh.pp
    border = torch.empty(
        plan.pipeline.micro_batch_size,
        SEQ_LENGTH,
        plan.model.hidden_size,
        device="meta",
        requires_grad=True,
    )
    ids = torch.empty(border.shape[:2], dtype=torch.int64, device="meta")
    logits = torch.empty(
        *border.shape[:2],
        plan.model.padded_vocab_size // plan.mesh.tp,
        device="meta",
        requires_grad=True,
    )
    stage = PipelineStage(
        part,
        rank,
        pp,
        torch.device("cpu"),
        input_args=border if rank else ids,
        output_args=border if rank < pp - 1 else logits,
        group=mesh["pp"].get_group(),
    )
    return Schedule1F1B(stage, plan.pipeline.num_micro_batches, loss_of)


def by_executor(plan: Plan) -> Callable[[int], None]:
    """Return the step of the executor, a function of its number.

    It is the whole step, including the gradients' norm and the record.
    """
    trainer = build_trainer(
        plan, Options(steps=WARM_UP + PAIRS, seed=0, learning_rate=1e-4), torch.device("cpu")
    )
    steps = trainer.run()
    return lambda _: next(steps, None)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the steps of both trainers, in pairs of neighbours."""

    by_hand_s: list[float]
    executor_s: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(
            b / a for a, b in zip(self.by_hand_s, self.executor_s, strict=True)
        )


def measure(plan: Plan) -> Times:
    """Run both trainers in a new world of the plan's ranks.

    Returns the times of rank 0, whose steps start and end with those of all ranks.
    """
    world = plan.mesh.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(world, plan, folder), nprocs=world, start_method="fork")
        return Times(*json.loads((Path(folder) / "times").read_text()))


def _rank(rank: int, world: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    mesh = init_device_mesh(
        "cpu", (plan.mesh.pp, plan.mesh.dp, plan.mesh.tp), mesh_dim_names=("pp", "dp", "tp")
    )
    steps = (by_hand(plan, mesh), by_executor(plan))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + PAIRS):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = _timed(steps[which], number)
            if number >= WARM_UP:
                times[which].append(seconds)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(times))
    dist.destroy_process_group()


def _timed(step: Callable[[int], None], number: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    step(number)
    dist.barrier()
    return time.perf_counter() - started


def plan_of(name: str) -> Plan:
    """Return a plan of 4 micro-batches of one sequence per data-parallel rank.

    The embedding is not tied: the hand-written trainer has two tables.
    """
    mesh, zero = MESHES[name]
    stack = load_stack("torchtitan")
    training = TrainingSpec(
        global_batch_size=4 * mesh.dp,
        seq_length=SEQ_LENGTH,
        precision="fp32",
        stack=stack,
        attention=stack.attention,
    )
    layout = ParallelLayout(
        mesh=mesh,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )
    cluster = with_gpus(load_cluster("cpu"), mesh.num_ranks, mesh.num_ranks)
    return estimate_plan(
        PlanRequest(
            model=replace(GPT_100M, tied_embeddings=False), cluster=cluster, training=training
        ),
        layout,
        UniformChoices(zero=zero),
    )


def main() -> None:
    print(
        f"{'mesh':<14}{'by hand':>10}{'executor':>10}{'ratio':>8}   seconds a step, "
        f"medians of {PAIRS}"
    )
    for name in sys.argv[1:] or DEFAULT:
        times = measure(plan_of(name))
        by_hand_s = statistics.median(times.by_hand_s)
        executor_s = statistics.median(times.executor_s)
        print(f"{name:<14}{by_hand_s:>10.3f}{executor_s:>10.3f}{times.ratio:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
