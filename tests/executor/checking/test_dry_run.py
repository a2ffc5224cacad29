"""A dry run of one rank holds and sends what that rank does in a real world of gloo ranks."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import Counter
from functools import cache

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.rank_traffic import MESSAGE
from parplan.executor.checking import dry_run as dryrun
from parplan.executor.checking import dry_run_workers as crew
from parplan.executor.checking.dry_run import DryRun, counted_micro_batches
from parplan.executor.checking.dry_run_workers import dry_runs, num_actions
from parplan.executor.checking.lone_rank import FirstAndLastChunk
from parplan.executor.checking.observed_rank import _CALLS
from parplan.executor.rules.all_rules import nearest_legal
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.rank_checks import check_ranks, repriced_today
from parplan.profiles.errors import ConfigError, RunError
from parplan.profiles.machines.hardware import CPU
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.executor_plans import GPT, LLAMA, make_plan
from tests.helpers.executor_world import Worlds
from tests.helpers.planning import estimate_plan

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

SHORT = dataclasses.replace(GPT, num_layers=2)
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2}


def on_cpus(plan: Plan) -> Plan:
    """The plan for what gloo runs on: the dry run then takes no GPU's operators."""
    return dataclasses.replace(
        plan,
        cluster=dataclasses.replace(
            plan.cluster, device=dataclasses.replace(plan.cluster.device, name=CPU)
        ),
    )


PLANS = {
    name: on_cpus(plan)
    for name, plan in {
        **{f"zero{zero}": make_plan(SHORT, dp=2, zero=(zero,)) for zero in range(4)},
        "zero-mixed-bf16": make_plan(
            SHORT, dp=2, zero=(1, 3), precision=Precision.BF16, recompute="full"
        ),
        "tp2-sequence-parallel": make_plan(SHORT, tp=2, sp=True, recompute=("norm2", "activation")),
        "pp2-tied": make_plan(SHORT, pp=2, num_micro_batches=4),
        "pp2-interleaved": make_plan(LLAMA, pp=2, num_micro_batches=4, **INTERLEAVED),
    }.items()
}


def dry_run(plan: Plan, rank: int) -> DryRun:
    """Runs in its own process, because torch caches by mesh the rank that a process was."""
    return dry_runs(plan, (rank,))[0]


WORLDS = Worlds(PLANS, PLANS.keys() - {"pp2-tied"})


@cache
def dry(name: str) -> list[DryRun]:
    return [dry_run(PLANS[name], rank) for rank in range(PLANS[name].mesh.pp)]


@pytest.mark.parametrize("name", WORLDS.params())
def test_the_states_are_those_of_the_same_ranks_on_gloo(name):
    states = WORLDS.outcome(name).states

    assert {run.pipeline_rank: run.use.states for run in dry(name)} == {
        pp: measured for (pp, dp, tp), (_, measured) in states.items() if dp == tp == 0
    }
    assert StateBytes() not in [run.use.states for run in dry(name)]


@pytest.mark.parametrize("name", WORLDS.params())
def test_the_collectives_are_those_of_the_same_rank_on_gloo(name):
    expected: Counter[str] = Counter()
    for operator, calls in WORLDS.outcome(name).collectives.items():
        if operator in _CALLS:
            expected[_CALLS[operator][0]] += calls
    expected["all_reduce"] -= 1  # the sum of the loss
    # before the first step each stage also hears from its neighbours whether shapes are known
    expected[MESSAGE] -= expected[MESSAGE] // (PLANS[name].pipeline.num_micro_batches + 1)

    actual: Counter[str] = Counter()
    for sent in dry(name)[0].use.sent:
        actual[sent.kind] += sent.calls

    assert actual == +expected
    axes = {axis for axis in ("pp", "dp", "tp") if getattr(PLANS[name].mesh, axis) > 1}
    assert {sent.axis for sent in dry(name)[0].use.sent} == axes


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            make_plan(SHORT, dp=2, zero=(2,), num_micro_batches=8, global_batch_size=16),
            id="one-stage",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            make_plan(LLAMA, pp=2, num_micro_batches=12, global_batch_size=12, **INTERLEAVED),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            make_plan(
                SHORT, pp=2, num_micro_batches=12, global_batch_size=12, schedule=Schedule.GPIPE
            ),
            id="gpipe",
        ),
        pytest.param(
            make_plan(
                GPT,
                pp=2,
                dp=2,
                zero=(3,),
                recompute="full",
                schedule=Schedule.SCP,
                num_micro_batches=16,
                global_batch_size=32,
            ),
            id="scp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_short_steps_say_what_the_whole_step_holds_and_sends(plan, monkeypatch):
    short = dry_run(plan, 0)
    monkeypatch.setattr(
        dryrun, "counted_micro_batches", lambda plan, _: (plan.pipeline.num_micro_batches,)
    )
    whole = dry_run(plan, 0)

    assert sum(short.micro_batches) < whole.micro_batches[0]
    assert short.use.states == whole.use.states
    assert short.use.sent == whole.use.sent
    assert short.use.held == pytest.approx(whole.use.held, rel=1e-3)
    assert short.use.activations == pytest.approx(whole.use.activations, rel=1e-3)


def test_what_is_never_there_together_is_no_temporary_below_nothing():
    """Before the only backward pass there are no gradients, after it no activations."""
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=2, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=1,
        sequence_parallel=False,
    )
    training = TrainingSpec(
        global_batch_size=2,
        seq_length=128,
        precision=Precision.FP32,
        gradient_precision=Precision.FP32,
        stack=NEUTRAL,
    )
    use = dry_run(
        estimate_plan(
            load_model("gpt-tiny").spec, with_gpus(load_cluster("cpu"), 2), training, layout
        ),
        0,
    ).use

    assert use.temporaries == 0
    assert use.apart > 0
    assert use.saved > 0
    assert use.held == use.states.total + use.activations - use.apart


@pytest.mark.parametrize(
    ("model", "zero", "tp"),
    [pytest.param("gpt-20b", 3, 1, marks=pytest.mark.slow), ("llama3-8b", 1, 2)],
)
def test_a_layer_of_full_size_keeps_what_the_memory_model_says(model, zero, tp):
    entry = load_model(model)
    spec = dataclasses.replace(
        entry.spec, num_layers=2
    )  # gpt-20b drops out: its masks and its attention as on a GPU
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=8 // tp, tp=tp),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=2,
        sequence_parallel=tp > 1,
    )
    training = TrainingSpec(global_batch_size=32 // tp, seq_length=entry.seq_length, stack=NEUTRAL)
    plan = estimate_plan(spec, with_gpus(load_cluster("a100-80gb"), 8), training, layout, zero=zero)

    run = dry_run(plan, 0)
    (check,) = check_ranks(repriced_today(plan), {0: (run.use, run.micro_batches)})

    assert check.found.states == check.predicted.states
    assert check.found.saved == pytest.approx(check.predicted.saved, rel=0.01)
    assert check.fits
    assert not check.outdated


def test_a_stage_that_recomputes_ahead_holds_from_then_on_what_the_memory_model_says():
    # in the stack whose gradients come and go
    wide = dataclasses.replace(
        GPT, num_layers=9, hidden_size=128, head_dim=32, ffn_hidden_size=512, vocab_size=64
    )
    plan = make_plan(
        wide,
        pp=3,
        schedule=Schedule.SCP,
        recompute="full",
        num_micro_batches=4,
        global_batch_size=16,
    )
    plan = nearest_legal(
        dataclasses.replace(
            plan, training=dataclasses.replace(plan.training, stack=load_stack("parplan"))
        )
    )

    runs = dry_runs(plan, (0, 1, 2))
    first, middle, last = check_ranks(
        repriced_today(plan), {run.pipeline_rank: (run.use, run.micro_batches) for run in runs}
    )

    assert all(abs(check.share("held")) < 0.02 for check in (first, middle, last))
    # three checkpoints and a stage that keeps all, as the last one does beside the head
    assert middle.found.activations - 3 * middle.found.saved == pytest.approx(
        last.found.saved, rel=0.05
    )


@pytest.mark.parametrize(("rows", "parts"), [(8, 4), (7, 3), (5, 4), (2, 4), (1, 1)])
def test_the_chunks_of_a_parameter_are_those_of_fsdp(rows, parts):
    tensor = torch.arange(rows * 3.0).reshape(rows, 3)
    expected = _chunk_with_empty(tensor, parts, 0)

    for index in range(parts):
        assert FirstAndLastChunk(tensor, parts, 0)[index].shape == expected[index].shape
        assert torch.equal(FirstAndLastChunk(tensor, parts, 0)[index], expected[index])


def test_progress_counts_every_backward_pass():
    plan, done = PLANS["pp2-tied"], []

    (run,) = dry_runs(plan, (1,), done.append)

    assert run == dry("pp2-tied")[1]
    assert done == list(range(1, num_actions(plan, (1,)) + 1)) == [1, 2, 3, 4]


def test_an_error_of_a_child_is_the_error_of_the_command(monkeypatch):
    def fail(*_: object) -> None:
        raise ConfigError("the stage cannot be built", hint="another one")

    monkeypatch.setattr(crew, "dry_run", fail)

    with pytest.raises(ConfigError, match="the stage cannot be built"):
        dry_runs(PLANS["zero0"], (0,))


def test_a_child_that_is_killed_is_one_error(monkeypatch):
    monkeypatch.setattr(crew, "dry_run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    with pytest.raises(
        RunError, match="the dry run of pipeline rank 0 was ended by signal 9, without a result"
    ) as caught:
        dry_runs(PLANS["zero0"], (0,))

    assert caught.value.hint


def test_a_short_step_is_past_the_warm_up_and_a_step_of_few_micro_batches_is_run_whole():
    long = make_plan(LLAMA, pp=4, num_micro_batches=64, global_batch_size=64)

    assert [counted_micro_batches(long, rank) for rank in (0, 3)] == [(4, 5), (4, 5)]
    assert counted_micro_batches(make_plan(LLAMA, num_micro_batches=8), 0) == (1, 2)
    assert counted_micro_batches(make_plan(LLAMA, num_micro_batches=2), 0) == (2,)
