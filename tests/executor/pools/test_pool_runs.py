"""Pools that divide the batch, each on a plan of its own, train as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parplan.costmodels.communication.collectives import ring_all_reduce_s
from parplan.executor.checking import parity
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.rules.all_rules import validate
from parplan.executor.rules.pool_rules import joined_plans
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan_file import write_plan
from parplan.profiles.machines.hardware import Link
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.transformer import build_graph
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, make_plan
from tests.helpers.executor_world import require_parity, run_reference

ROOT = Path(__file__).parents[3]
PIPED = {"pp": 2, "blocks": (1, 3), "global_batch_size": 4}  # a third of the batch

POOLS = {
    "pp2-beside-dp2-zero1": (make_plan(GPT, **PIPED), make_plan(GPT, dp=2, zero=(1,))),
    "pp2-beside-tp2": (make_plan(LLAMA, **PIPED), make_plan(LLAMA, tp=2, sp=True)),
    "zero3-beside-mixed": (
        make_plan(GPT, dp=2, zero=(3,), recompute="full", global_batch_size=4),
        make_plan(GPT, dp=2, tp=2, sp=True, zero=(2, 0, 1)),
    ),
    "three": (
        make_plan(GPT, pp=2, blocks=(3, 1), global_batch_size=4),
        make_plan(GPT, dp=2, zero=(3,)),
        make_plan(GPT, tp=2, recompute=("qkv", "fc1"), global_batch_size=4),
    ),
    "experts": (
        make_plan(MIXTRAL, dp=2, ep=2, zero=(1,), global_batch_size=4),
        make_plan(MIXTRAL, pp=2, tp=2, sp=True),
    ),
    "grid-beside-unequal-shares": (
        make_plan(LLAMA, tp=4, tp_rows=2, global_batch_size=4),
        make_plan(LLAMA, pp=2, dp=2, shares=(3, 1), zero=(3,)),
    ),
    "bf16": (
        make_plan(GPT, precision=Precision.BF16, **PIPED),
        make_plan(GPT, dp=2, zero=(2,), precision=Precision.BF16),
    ),
}
QUICK = "pp2-beside-dp2-zero1"
NAMES = [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in POOLS]

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


@pytest.mark.parametrize("name", NAMES)
def test_losses_gradients_and_norms_are_those_of_one_process(name):
    plans = joined_plans([(str(number), plan) for number, plan in enumerate(POOLS[name])])
    for plan in plans:
        validate(plan)

    outcomes = parity.run_pools(plans)

    expected = run_reference(plans[0])
    for plan, outcome in zip(plans, outcomes, strict=True):
        assert outcome.agree
        require_parity(plan, outcome, expected)
        exact = plan.training.precision is Precision.FP32
        assert outcome.norms == pytest.approx(expected.norms, rel=4e-6 if exact else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2-beside-dp2-zero1", "zero3-beside-mixed", "experts"])
def test_every_pool_sends_the_bytes_that_the_ring_is_priced_with(name):
    plans = POOLS[name]
    sizes = tuple(plan.mesh.num_ranks for plan in plans)

    (sent,) = parity.run_ranks([plans], _sent, sizes=sizes)

    gradients = sent[0][0]
    one_byte_a_second = Link(name="join", bytes_per_s=1.0, latency_s=0.0, source="made up")
    for first, size in zip((0, sizes[0]), sizes, strict=True):
        outside = sum(elements for _, elements, _ in sent[first : first + size])
        assert outside == ring_all_reduce_s(gradients, 2, one_byte_a_second)


def _sent(plans, pools):
    """Elements of all gradients, and those that this rank sends outside its pool and inside."""
    plan = plans[pools.place.pool]
    exchange = build_trainer(plan, parity.OPTIONS, torch.device("cpu"), joined=pools).exchange
    graph = build_graph(plan.model, plan.training, 1)
    return graph.num_trained_parameters, *exchange.sent_elements()


def test_dropout_masks_of_all_pools_go_on_with_a_checkpoint(tmp_path):
    model = replace(GPT, num_layers=1, dropout=0.5)
    plans = joined_plans([("a", make_plan(model)), ("b", make_plan(model, global_batch_size=4))])
    from_start = CheckpointOptions(directory=tmp_path, every=2)
    resumed = replace(from_start, resume=str(tmp_path / "step-000002"), directory=None)

    (losses,) = parity.run_ranks([(plans, from_start)], _losses, sizes=(1, 1))
    (again,) = parity.run_ranks([(plans, resumed)], _losses, sizes=(1, 1))

    assert [each[2:] for each in losses] == again


def _losses(setting, pools):
    """Losses of a run of four steps, or of those behind its checkpoint."""
    plans, options = setting
    run = Options(steps=4, seed=7)
    trainer = build_trainer(plans[pools.place.pool], run, torch.device("cpu"), joined=pools)
    checkpoints = Checkpoints(
        trainer,
        options,
        timeout=parity.TIMEOUT,
        note=lambda _: None,
        writes=pools.place.pool == 0,
    )
    losses = []
    for result in trainer.run(checkpoints.resume()):
        losses.append(result.loss)
        checkpoints.after_step(result.step + 1)
    checkpoints.finish(run.steps)
    return losses


@pytest.mark.slow
def test_torchrun_goes_on_from_a_checkpoint_with_the_pools_in_another_order(tmp_path):
    for name, plan in zip("ab", POOLS[QUICK], strict=True):
        write_plan(plan, tmp_path / f"{name}.yaml")

    first = launched(tmp_path, "a.yaml", "b.yaml", "--steps", "3")
    swapped = launched(tmp_path, "b.yaml", "a.yaml", "--steps", "5")

    whole = make_plan(GPT, global_batch_size=12)
    write_plan(whole, tmp_path / "whole.yaml")
    alone = launched(tmp_path, "whole.yaml", "--steps", "5", ranks=1, states="other")
    together = [*losses_of(first), *losses_of(swapped)]
    assert together == pytest.approx(losses_of(alone), abs=2e-6)
    assert (tmp_path / "run-a.json").exists()
    assert (tmp_path / "run-b.json").exists()


def launched(folder, *arguments, ranks=4, states="states"):
    """The output of a run under torchrun, with a checkpoint after its last step."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "parplan.executor", *arguments),
            *("--checkpoint-dir", states),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(output):
    return [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]
