"""Does a real step become as much shorter by Merak's schedules and halves as is predicted?

    python -m benchmarks.executor.merak_on_gloo

The plans of gpt-tiny run on gloo ranks of this machine.

    real         the executor with its instruction lists, messages and exchanges, autograd,
                 recompute, the halves of sub-pipelined tensor parallelism, and the update; the
                 losses of all plans of a table are compared
    artificial   the seconds of the products of a block, of a message and of an all-reduce, by
                 sleeping (artificial_times.py): two cores cannot compute for four ranks at once

The predictions have the same seconds: of the pipeline by the event simulator
(costmodels/schedules/simulator.py), of the halves by the recursion of EQUATIONS P8
(costmodels/layers/sub_pipeline.py). A step is timed as a whole, between two barriers. All plans of
a table step in turn in the same processes, and a time is the median over the rounds. A measured
step has the executor's own time as well, some milliseconds a pass; on a clock that only the stated
times move, such steps take what is predicted to the last digit, except for SCP at pp 2
(tests/benchmarks/test_merak_on_gloo.py). There messages arrive while their receiver computes, and
the simulator charges every receive in full.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.executor.artificial_times import (
    BACKWARD,
    PRODUCTS,
    ArtificialTimes,
    Seconds,
    Sizes,
)
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.layers.sub_pipeline import HALVES, HalfTime, block_s, linear_s, row_s
from parplan.costmodels.schedules.action_lists import lists_of
from parplan.costmodels.schedules.actions import parse_row
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schedules.simulator import StageCost, run_lists
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS, ParallelLayout
from parplan.executor.placed_layers import action_rows
from parplan.executor.rules.all_rules import nearest_legal
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.planner.search.estimate import UniformChoices, estimate_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec

WARM_UP, ROUNDS = 1, 4
LOSS_TOLERANCE = 1e-3
SEQ_LENGTH = 32
FP32_BYTES = 4
SCHEDULES = {
    "1F1B": Schedule.ONE_F_ONE_B,
    "early recompute": Schedule.EARLY_RECOMPUTE,
    "last-no-recompute": Schedule.LAST_NO_RECOMPUTE,
    "SCP": Schedule.SCP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of a table: a plan with its stated times and its predicted seconds of a step."""

    name: str
    plan: Plan
    seconds: Seconds
    predicted_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps of a case: seconds of the measured ones, and the loss of the last one.

    order   by rank, the computations of the last step as "1F0": stage, kind, micro-batch
    """

    step_s: list[float]
    loss: float
    order: list[list[str]]


def plan_of(layout: ParallelLayout, num_layers: int, recompute: Recompute) -> Plan:
    """Returns the plan of a layout, with the least change that makes it legal."""
    mesh, stack = layout.mesh, load_stack("parplan")
    training = TrainingSpec(
        global_batch_size=layout.micro_batch_size * layout.num_micro_batches,
        seq_length=SEQ_LENGTH,
        precision="fp32",
        stack=stack,
        attention=stack.attention,
    )
    request = PlanRequest(
        model=replace(load_model("gpt-tiny").spec, num_layers=num_layers, dropout=0.0),
        cluster=with_gpus(load_cluster("cpu"), mesh.num_ranks, mesh.num_ranks),
        training=training,
    )
    choices = UniformChoices(zero=0, recompute=recompute)
    plan = nearest_legal(estimate_plan(request, layout, choices))
    assert plan is not None
    return plan


def layout_of(mesh: Mesh, micro_batch_size: int, num_micro_batches: int) -> ParallelLayout:
    """Returns a layout under 1F1B, without halves."""
    return ParallelLayout(
        mesh=mesh,
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=False,
    )


def pipeline_cases(pp: int, num_micro_batches: int, seconds: Seconds) -> list[Case]:
    """Returns Merak's schedules on stages of one block each, all recomputed where it is legal."""
    layout = layout_of(Mesh(pp=pp, dp=1, tp=1), 1, num_micro_batches)
    plans = {
        name: plan_of(replace(layout, schedule=schedule), pp, Recompute.FULL)
        for name, schedule in SCHEDULES.items()
    }
    return [
        Case(name=name, plan=plan, seconds=seconds, predicted_s=pipeline_s(plan, seconds))
        for name, plan in plans.items()
    ]


def pipeline_s(plan: Plan, seconds: Seconds) -> float:
    """Seconds of a step by the event simulator."""
    pp, pipeline = plan.mesh.pp, plan.pipeline
    costs = []
    for rank, stage in enumerate(plan.stages):
        forward_s, recompute_s = 0.0, 0.0
        for run in stage.layers:
            run_s = len(blocks_of(plan, run)) * len(PRODUCTS) * seconds.product_s
            forward_s += run_s
            recompute_s += run_s if plan.layer_plans[run.plan].recompute else 0.0
        cost = StageCost(
            forward_s=forward_s,
            backward_s=BACKWARD * forward_s,
            recompute_s=recompute_s,
            receive_forward_s=seconds.message_s if rank else 0.0,
            receive_backward_s=seconds.message_s if rank < pp - 1 else 0.0,
            stash_bytes=0.0,
        )
        costs.append((cost,))
    lists = lists_of(pipeline.schedule, pp, pipeline.num_micro_batches, 1)
    return run_lists(lists, costs).step_s


def level_cases(num_layers: int, num_micro_batches: int, seconds: Seconds) -> list[Case]:
    """Returns the levels of sub-pipelined tensor parallelism on two ranks."""
    layout = layout_of(Mesh(pp=1, dp=1, tp=2), HALVES, num_micro_batches)
    return [
        Case(
            name=f"level {level}",
            plan=plan_of(replace(layout, tp_overlap=level), num_layers, Recompute.NONE),
            seconds=seconds,
            predicted_s=num_micro_batches * micro_batch_s(level, num_layers, seconds),
        )
        for level in TP_OVERLAP_LEVELS
    ]


def micro_batch_s(level: int, num_layers: int, seconds: Seconds) -> float:
    """Seconds of a micro-batch through all blocks, forward and backward, by the recursion.

    The sum of the embedding's output in the forward pass and that of the head's input gradient in
    the backward pass are of whole micro-batches at every level, and nothing hides them.
    """
    ends_s = HALVES * seconds.sum_s
    return sum(
        _pass_s(level, num_layers, product_s, seconds.sum_s) + ends_s
        for product_s in (seconds.product_s, BACKWARD * seconds.product_s)
    )


def _pass_s(level: int, num_layers: int, product_s: float, sum_s: float) -> float:
    """Seconds of one pass through the blocks; `product_s` is of whole micro-batches."""
    half_s, num_sums = product_s / HALVES, len(PRODUCTS) // 2
    parts = [HalfTime(2 * half_s, sum_s)] * num_sums
    if level == 0:
        return num_layers * (len(PRODUCTS) * product_s + num_sums * HALVES * sum_s)
    if level == 1:
        return num_layers * num_sums * (product_s + linear_s(half_s, sum_s))
    return row_s(parts, num_layers) if level == 3 else num_layers * block_s(parts)


def measure(cases: Sequence[Case], rounds: int = ROUNDS) -> list[Run]:
    """Runs the steps of every case in turn, on as many processes as its plan has ranks.

    The seconds are those of rank 0, which begins a step and ends it.
    """
    world = cases[0].plan.mesh.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(cases, rounds, folder), nprocs=world, start_method="fork")
        ranks = [json.loads((Path(folder) / f"rank{rank}").read_text()) for rank in range(world)]
    return [
        Run(step_s=step_s, loss=loss, order=[rank[index][2] for rank in ranks])
        for index, (step_s, loss, _) in enumerate(ranks[0])
    ]


def _rank(rank: int, cases: Sequence[Case], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    world = cases[0].plan.mesh.num_ranks
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=600),
    )
    with ArtificialTimes() as times:
        runs = [_Steps(case, WARM_UP + rounds) for case in cases]
        for _ in range(WARM_UP + rounds):
            for run in runs:
                run.step(times)
    rows = [(run.step_s[WARM_UP:], run.loss, run.order) for run in runs]
    (Path(folder) / f"rank{rank}").write_text(json.dumps(rows))
    dist.destroy_process_group()


class _Steps:
    """The steps of a case on one rank. Collective."""

    def __init__(self, case: Case, num_steps: int) -> None:
        self.step_s: list[float] = []
        self.loss = 0.0
        self.order: list[str] = []
        self._case = case
        trainer = build_trainer(
            case.plan, Options(steps=num_steps, record=False), torch.device("cpu")
        )
        self._results = trainer.run()
        for stage in trainer.pipeline.steps:
            stage.span = self._span

    def step(self, times: ArtificialTimes) -> None:
        """Runs the next step, between two barriers."""
        self.order = []
        dist.barrier()
        times.set(self._case.seconds, sizes_of(self._case.plan))
        started_s = time.perf_counter()
        self.loss = next(self._results).loss
        dist.barrier()
        self.step_s.append(time.perf_counter() - started_s)

    def _span(self, work: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        name = f"{stage}{work}{micro_batch}"
        if name not in self.order[-1:]:  # the loss is a part of the last stage's forward pass
            self.order.append(name)
        return nullcontext()


def sizes_of(plan: Plan) -> Sizes:
    """Returns what the stated times refer to."""
    sequences = plan.pipeline.micro_batch_size
    values = sequences * plan.training.seq_length * plan.model.hidden_size
    return Sizes(sequences, values * FP32_BYTES // HALVES)


def table(title: str, cases: Sequence[Case], runs: Sequence[Run]) -> str:
    """Returns the table of cases, with what each saves of the step of the first one.

    Seconds are medians over the rounds, those saved of the differences within a round.
    """
    losses = [run.loss for run in runs]
    assert max(losses) - min(losses) < LOSS_TOLERANCE, f"the plans train differently: {losses}"
    for case, run in zip(cases, runs, strict=True):
        assert run.order == planned_order(case.plan), f"{case.name} ran in another order"
    head = ("", "measured", "(from", "to)", "predicted", "ratio", "saved", "predicted", "ratio")
    lines = [title, "".join(f"{cell:>11}" if n else f"{cell:<20}" for n, cell in enumerate(head))]
    for case, run in zip(cases, runs, strict=True):
        step_s = statistics.median(run.step_s)
        cells = [step_s, min(run.step_s), max(run.step_s), case.predicted_s]
        cells.append(step_s / case.predicted_s)
        if case is not cases[0]:
            saved_s = statistics.median(
                first_s - own_s for first_s, own_s in zip(runs[0].step_s, run.step_s, strict=True)
            )
            expected_s = cases[0].predicted_s - case.predicted_s
            cells += [saved_s, expected_s, saved_s / expected_s]
        lines.append(f"{case.name:<20}" + "".join(f"{cell:>11.3f}" for cell in cells))
    return "\n".join(lines)


def planned_order(plan: Plan) -> list[list[str]]:
    """Returns the computations of every rank's action list; without a pipeline it records none."""
    if plan.mesh.pp == 1:
        return [[] for _ in range(plan.mesh.num_ranks)]
    return [
        [f"{stage}{work}{micro_batch}" for stage, work, micro_batch in parse_row(row, rank)]
        for rank, row in enumerate(action_rows(plan))
    ]


def main() -> None:
    print(__doc__.split("\n\n", 2)[2])
    for pp, micro_batches, product_s in ((4, 8, 0.015), (2, 6, 0.020)):
        seconds = Seconds(product_s=product_s, message_s=0.020)
        cases = pipeline_cases(pp, micro_batches, seconds)
        title = f"pp {pp}, {micro_batches} micro-batches; {_pass_title(product_s)}, a message 20 ms"
        print(table(title, cases, measure(cases)), flush=True)
    for sum_s in (0.015, 0.030):
        seconds = Seconds(product_s=0.020, sum_s=sum_s)
        cases = level_cases(2, 2, seconds)
        title = (
            f"tp 2, 2 blocks, 2 micro-batches; {_pass_title(seconds.product_s)} a block, an "
            f"all-reduce of half a micro-batch {1000 * sum_s:.0f} ms"
        )
        print(table(title, cases, measure(cases)), flush=True)


def _pass_title(product_s: float) -> str:
    forward_ms = 1000 * len(PRODUCTS) * product_s
    return f"forward {forward_ms:.0f} ms, backward {BACKWARD * forward_ms:.0f} ms"


if __name__ == "__main__":
    main()
