"""Runs a plan on this rank: joins the other ranks, trains, and ends with at most one error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _set_pg_timeout

from parplan.costmodels.chunks.measured_bytes import ChunkScheduler
from parplan.executor import launch
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.pipeline.runtime import most_in_flight
from parplan.executor.placed_layers import torchrun_line
from parplan.executor.pools.joined_ranks import JoinedRanks, PoolPlace, join_pool
from parplan.executor.rules.external_rules import has_even_shards
from parplan.executor.run_options import Options
from parplan.executor.traced.traced_trainer import (
    TracedTrainer,
    build_traced_trainer,
    open_plan_module,
)
from parplan.executor.training.train import StepResult, build_trainer
from parplan.executor.watch.rank_progress import RankProgress
from parplan.executor.watch.run_recorder import collect
from parplan.executor.watch.state_bytes import table
from parplan.executor.watch.watch import SLACK_S, Watch, second_connection
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.runs.run_file import RunFile
from parplan.profiles.documents.files import explained_file_errors
from parplan.profiles.errors import ConfigError, PlannerError, RunError
from parplan.profiles.profiler.gpus import backend_of, gpu, is_gpu, own_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Callbacks by which a run reports to its user.

    line       prints one line of the result
    note       prints a note
    fail       prints an error, if this rank speaks, and returns the exit code
    recorded   takes the record of the run
    """

    line: Callable[[str], None]
    note: Callable[[str], None]
    fail: Callable[[PlannerError, bool], int]
    recorded: Callable[[RunFile], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """The choices of a run that neither the plan nor its training options make.

    schedulers   of the chunks of each pipeline rank, in a traced plan with chunks and where the run
                 traces its memory
    """

    checkpoints: CheckpointOptions
    device: torch.device
    timeout_s: float
    schedulers: tuple[ChunkScheduler, ...] = ()


def run_plan(
    plans: Sequence[Plan | TracedPlan], options: Options, setting: RunSetting, report: RunReport
) -> int:
    """Trains and returns the exit code; on failure, one rank prints one error.

    plans   one plan, or that of each pool that has a share of the batch
    """
    timeout_s = setting.timeout_s
    place = pool_place(plans)
    # The watch says more than a collective's own timeout, so it comes first.
    limit = timedelta(seconds=timeout_s + 2 * SLACK_S)
    rank, store = launch.rank(), launch.open_store(limit)
    progress = RankProgress()
    meshes = [plan.mesh for plan in plans]
    watch = Watch(second_connection(store), rank, meshes, progress, timeout_s, setting.device)
    watch.start()
    try:
        progress.at("joins the other ranks")
        joined = _join(setting.device, store, place, limit)
        progress.at("builds its layers")
        with explained_file_errors():
            _train(plans[place.pool], options, setting, limit, progress, report, joined)
        dist.destroy_process_group()
    except PlannerError as error:
        code = report.fail(error, watch.claim())
        dist.destroy_process_group()
        return code
    except (RuntimeError, CheckpointException):
        lost = watch.lost()
        if lost is None:
            raise
        ended = RunError(lost, hint="torchrun's --max-restarts goes on from a checkpoint")
        return report.fail(ended, watch.claim())
    finally:
        watch.stop()
    return 0


def pool_place(plans: Sequence[Plan | TracedPlan]) -> PoolPlace:
    """Returns the place of this process among the ranks of all plans. Raises ConfigError."""
    return PoolPlace(sizes=tuple(plan.mesh.num_ranks for plan in plans), rank=launch.rank())


def require_world(plans: Sequence[Plan | TracedPlan], files: Sequence[Path]) -> None:
    """Raises ConfigError unless as many processes were started as the plans have ranks."""
    world, ranks = launch.world(), sum(plan.mesh.num_ranks for plan in plans)
    if world != ranks:
        names, meshes = " ".join(map(str, files)), " and ".join(str(plan.mesh) for plan in plans)
        needs = "the plan needs" if len(plans) == 1 else "the plans need"
        raise ConfigError(
            f"{names}: {needs} {ranks} ranks ({meshes}), {world} started",
            hint=f"start it with: {torchrun_line(plans[0], names, plans[1:])}",
        )


def device_of(name: str) -> torch.device:
    """Returns this rank's GPU, or the CPU. Raises ConfigError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU", hint="use --device cpu")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    local_rank = launch.local_rank()
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: local rank {local_rank} has no GPU, torch sees "
            f"{torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def _join(
    device: torch.device, store: dist.Store, place: PoolPlace, timeout: timedelta
) -> JoinedRanks | None:
    """Joins the other ranks, those of all pools too if there are several."""
    if is_gpu(device):
        gpu(device).set_device(device)
    if len(place.sizes) > 1:
        return join_pool(place, store, device, timeout)
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=place.rank,
        world_size=place.sizes[0],
        timeout=timeout,
        device_id=own_gpu(device),
    )
    return None


def _train(
    plan: Plan | TracedPlan,
    options: Options,
    setting: RunSetting,
    timeout: timedelta,
    progress: RankProgress,
    report: RunReport,
    joined: JoinedRanks | None,
) -> None:
    """Trains to the last step and writes checkpoints; only rank 0 of the job prints."""
    speaks, device = launch.rank() == 0, setting.device
    if isinstance(plan, TracedPlan):
        trainer = _traced_trainer(plan, options, setting, progress, report)
    else:
        trainer = build_trainer(plan, options, device, progress, joined)
    trainer = trainer.traced(setting.schedulers)
    for group in trainer.ranks.groups:
        _set_pg_timeout(timeout, group)  # torch gives a mesh's groups its own default instead
    checkpoints = Checkpoints(
        trainer,
        setting.checkpoints,
        timeout=timeout,
        note=report.note,
        writes=joined is None or joined.place.pool == 0,
    )
    first = checkpoints.resume()
    if joined is not None:
        require_one_step(first, joined)
    try:
        for result in trainer.run(first):
            if speaks:
                report.line(_step_line(plan, options, result))
            checkpoints.after_step(result.step + 1)
    except PlannerError:
        checkpoints.settle()  # the next run continues from the checkpoint that is being written
        raise
    if first >= options.steps:
        checkpoints.note(f"nothing to do: --steps {options.steps}, {first} are done")
        return
    checkpoints.finish(options.steps)
    rows, held = [None] * dist.get_world_size(), trainer.state_bytes()
    dist.all_gather_object(rows, held)
    run = collect(
        plan,
        trainer.recorder,
        held,
        device,
        trainer.moved(),
        trainer.on_host_bytes,
        in_flight=most_in_flight(trainer.pipeline.steps),
    )
    if speaks:
        compared = isinstance(plan, TracedPlan) or has_even_shards(plan)
        for line in table(rows, compared=compared):
            report.line(line)
    if run is not None:
        report.recorded(run)


def require_one_step(first: int, joined: JoinedRanks) -> None:
    """Raises ConfigError on every rank unless all pools go on after the same step. Collective."""
    by_rank = joined.everyone(first)
    for rank, step in enumerate(by_rank):
        if step != by_rank[0]:
            raise ConfigError(
                f"pool 0 goes on after step {by_rank[0]}, pool {joined.place.pool_of(rank)} after "
                f"step {step}: the pools read the checkpoints of different folders",
                hint="give --checkpoint-dir a folder that the nodes of all pools share",
            )


def _traced_trainer(
    plan: TracedPlan,
    options: Options,
    setting: RunSetting,
    progress: RankProgress,
    report: RunReport,
) -> TracedTrainer:
    opened = open_plan_module(plan, options.seed)
    if opened.note and dist.get_rank() == 0:
        report.note(opened.note)
    schedules = tuple(each.planned() for each in setting.schedulers)
    return build_traced_trainer(plan, options, setting.device, progress, opened, schedules)


def _step_line(plan: Plan | TracedPlan, options: Options, result: StepResult) -> str:
    norm = f"grad norm {result.gradient_norm:.4g}"
    if result.skipped:
        norm += f" skipped, loss scale {result.loss_scale:g}"
    elif 0 < options.clip_gradients < result.gradient_norm:
        norm += f" clipped to {options.clip_gradients:g}"
    rate = f"  lr {result.learning_rate:.2e}" if options.lr_varies else ""
    sequences = plan.whole_batch.of if isinstance(plan, Plan) else plan.training.global_batch_size
    speed = sequences * plan.training.seq_length / result.seconds
    unit = plan.traced.unit if isinstance(plan, TracedPlan) else "tokens"
    return f"step {result.step + 1:>4}  loss {result.loss:.6f}  {norm}{rate}  {speed:,.0f} {unit}/s"
