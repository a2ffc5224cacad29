"""A run resumes from a checkpoint as if it had never stopped, on other meshes and plans too.

This holds whatever happened to a save.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor.checkpoint import folder
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.run_options import Options
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import ContextForm
from tests.executor.models.test_family_runs import DEEPSEEK, GEMMA
from tests.helpers import executor_plans
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_world import (
    BF16_LOSS_TOLERANCE,
    LOSS_TOLERANCE,
    forward,
    reference_layers,
    reference_optimizer,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"
)

GPT = dataclasses.replace(executor_plans.GPT, num_layers=2)
LLAMA = dataclasses.replace(executor_plans.LLAMA, num_layers=2)
OPTIONS = Options(seed=7, learning_rate=1e-2)
TIMEOUT = timedelta(seconds=60)
BF16 = Precision.BF16
OTHERS = tuple(optimizer for optimizer in Optimizer if optimizer is not Optimizer.ADAM)
DROPPING = dataclasses.replace(GPT, dropout=0.1)


def train(plan: Plan, steps: int, **checkpoints: object) -> tuple[list[float], list[str]]:
    """Runs this rank's part of a run to `steps` steps in all.

    Returns the losses of the steps it made, and its notes.
    """
    notes: list[str] = []
    trainer = build_trainer(plan, dataclasses.replace(OPTIONS, steps=steps), torch.device("cpu"))
    saves = Checkpoints(
        trainer, CheckpointOptions(**checkpoints), timeout=TIMEOUT, note=notes.append
    )
    losses = []
    for result in trainer.run(saves.resume()):
        losses.append(result.loss)
        saves.after_step(result.step + 1)
    saves.finish(steps)
    return losses, notes


def make_plan(model=GPT, **choices: object) -> Plan:
    return executor_plans.make_plan(model, **choices)


def with_optimizer(plan: Plan, optimizer: Optimizer) -> Plan:
    training = dataclasses.replace(plan.training, optimizer=optimizer)
    return dataclasses.replace(plan, training=training)


Run = tuple[Plan, int, dict[str, object]]


def run_world(runs: Sequence[Run]) -> list[list[float]]:
    """The losses of rank 0 in each of the runs, one after the other in one world."""
    world = runs[0][0].mesh.num_ranks
    with tempfile.TemporaryDirectory() as place:
        mp.start_processes(
            _rank, args=(world, list(runs), place), nprocs=world, start_method="fork"
        )
        return json.loads((Path(place) / "losses").read_text())


def _rank(rank: int, world: int, runs: list[Run], place: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{place}/store", world),
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
    )
    losses = [train(plan, steps, **options)[0] for plan, steps, options in runs]
    if rank == 0:
        (Path(place) / "losses").write_text(json.dumps(losses))
    dist.destroy_process_group()


@pytest.fixture
def alone():
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def undisturbed(plan: Plan, steps: int) -> list[float]:
    """The losses of plain modules in one process."""
    batches = synthetic_batches(
        dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)), 0, OPTIONS.seed
    )
    layers = reference_layers(plan.model, plan.training, OPTIONS.seed)
    optimizer = reference_optimizer(layers, OPTIONS)
    losses = []
    for step in range(steps):
        ids, targets = batches(step)
        loss = torch.nn.functional.cross_entropy(
            forward(layers, ids).flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), OPTIONS.clip_gradients)
        optimizer.step()
        losses.append(loss.item())
    return losses


# each plan makes two steps from the checkpoint that the one before left, the last on one rank
CHAINS = {
    "gpt-tied": [
        make_plan(GPT, dp=2, zero=(3,)),
        make_plan(GPT, tp=2, sp=True),
        make_plan(GPT, cp=2, form=ContextForm.RING, zero=(2,)),
        make_plan(GPT, pp=2),
    ],
    "llama": [
        make_plan(LLAMA, pp=2, blocks=(0, 2)),
        make_plan(LLAMA, dp=2, zero=(3,), shares=(3, 1)),
        make_plan(LLAMA, tp=2, recompute="full"),
        make_plan(LLAMA, dp=2, shares=(1, 3)),
        make_plan(LLAMA, dp=2, zero=(0, 2)),
    ],
    "grid": [
        make_plan(GPT, tp=4, tp_rows=2),
        make_plan(GPT, dp=2, tp=2, zero=(3,)),
        make_plan(GPT, pp=2, dp=2, zero=(1,), shares=(1, 3)),
    ],
    "first-dense-block": [
        make_plan(DEEPSEEK, dp=2, ep=2, zero=(3,)),
        make_plan(DEEPSEEK, tp=2, etp=2, sp=True),
        make_plan(DEEPSEEK, pp=2),
    ],
    "windows-in-turns": [
        make_plan(GEMMA, tp=2),
        make_plan(GEMMA, pp=2, blocks=(1, 3)),
        make_plan(GEMMA, cp=2, form=ContextForm.RING),
    ],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("name", mostly_slow(CHAINS, {"llama"}))
def test_a_run_goes_on_with_the_same_losses_on_other_meshes_and_plans(name, tmp_path):
    chain = CHAINS[name]
    options = {"directory": tmp_path, "every": 100}

    parts = run_world([(plan, 2 * (k + 1), options) for k, plan in enumerate(chain)])
    steps = 2 * len(chain)
    parts += run_world([(make_plan(chain[0].model), steps + 2, options)])

    assert [len(part) for part in parts] == [2] * (len(chain) + 1)
    assert [loss for part in parts for loss in part] == pytest.approx(
        undisturbed(chain[0], steps + 2), rel=2 * LOSS_TOLERANCE
    )


@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", mostly_slow(OTHERS, {Optimizer.ADAM_8BIT}))
def test_the_states_of_any_optimizer_are_read_back_by_another_plan(optimizer, tmp_path):
    wide = dataclasses.replace(GPT, hidden_size=64, head_dim=16, ffn_hidden_size=128)
    plans = [
        with_optimizer(plan, optimizer)
        for plan in (make_plan(wide, dp=2, zero=(3,)), make_plan(wide, pp=2))
    ]

    first, second, whole = run_world(
        [
            (plans[0], 2, {"directory": tmp_path}),
            (plans[1], 4, {"directory": tmp_path}),
            (plans[0], 4, {}),
        ]
    )

    # Without its states the next step would be another: adam-8bit and muon keep 8 bits of them.
    assert first + second == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.multiproc
def test_strided_shards_of_data_and_tensor_parallelism_are_read_back_by_another_mesh(tmp_path):
    options = {"directory": tmp_path}
    both, pipelined = (
        make_plan(LLAMA, dp=2, tp=2, sp=True, zero=(3, 1)),
        make_plan(LLAMA, pp=2, dp=2, zero=(2, 0)),
    )

    parts = run_world([(both, 1, options), (pipelined, 2, options), (both, 4, options)])

    assert [loss for part in parts for loss in part] == pytest.approx(
        undisturbed(both, 4), rel=2 * LOSS_TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.multiproc
def test_bf16_runs_keep_their_fp32_masters_and_may_change_their_zero_stage(tmp_path):
    plans = [make_plan(GPT, dp=2, zero=(zero,), precision=BF16) for zero in (0, 3)]

    *parts, whole = run_world(
        [
            (plans[0], 2, {"directory": tmp_path}),
            (plans[1], 4, {"directory": tmp_path}),
            (plans[0], 6, {"directory": tmp_path}),
            (plans[0], 6, {}),
        ]
    )

    assert [loss for part in parts for loss in part] == pytest.approx(
        whole, rel=BF16_LOSS_TOLERANCE
    )
    assert whole[5] != pytest.approx(whole[0], rel=BF16_LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.multiproc
def test_dropout_goes_on_with_the_same_masks_on_the_same_mesh(tmp_path):
    plan = make_plan(DROPPING, dp=2, zero=(2,))

    first, second, whole, repeated = run_world(
        [
            (plan, 2, {"directory": tmp_path}),
            (plan, 4, {"directory": tmp_path}),
            (plan, 4, {}),
            (plan, 4, {"resume": str(tmp_path / "step-000002")}),
        ]
    )

    assert first + second == whole
    assert repeated == second


@pytest.mark.slow
def test_dropout_on_another_mesh_or_device_says_so_and_draws_other_masks(tmp_path, alone):
    plan = make_plan(DROPPING)
    train(plan, 2, directory=tmp_path)
    path = tmp_path / "step-000002" / folder.DOCUMENT
    document = json.loads(path.read_text())
    same, _ = train(plan, 3, resume=str(path.parent))
    path.write_text(json.dumps({**document, "mesh": {**document["mesh"], "dp": 4}}))

    second, notes = train(plan, 3, resume=str(path.parent))

    assert any("dropout masks" in note for note in notes)
    assert same != second


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, alone, monkeypatch):
    go_on = threading.Event()
    write = folder.AtomicWriter.write_data
    monkeypatch.setattr(
        folder.AtomicWriter, "write_data", lambda *args: (go_on.wait(60), write(*args))[1]
    )
    trainer = build_trainer(make_plan(), dataclasses.replace(OPTIONS, steps=3), torch.device("cpu"))
    saves = Checkpoints(
        trainer, CheckpointOptions(directory=tmp_path, every=1), timeout=TIMEOUT, note=print
    )
    steps = trainer.run(saves.resume())
    next(steps)
    saves.after_step(1)

    loss = next(steps).loss  # changes the parameters that are being saved
    assert not (tmp_path / "step-000001").exists()
    go_on.set()
    saves.finish(2)

    assert loss == train(make_plan(), 2, resume=str(tmp_path / "step-000001"))[0][0]


def test_only_the_newest_checkpoints_are_kept(tmp_path, alone):
    train(make_plan(), 5, directory=tmp_path, every=1, keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


@pytest.mark.multiproc
@pytest.mark.parametrize("moment", mostly_slow(["finish", "_replace"], {"_replace"}))
def test_a_kill_during_a_save_loses_nothing(tmp_path, alone, monkeypatch, moment):
    whole, _ = train(make_plan(), 2, directory=tmp_path, every=1)
    dist.destroy_process_group()
    child = multiprocessing.get_context("fork").Process(
        target=_killed_in_a_save, args=(tmp_path, moment)
    )
    child.start()
    child.join(60)
    left = sorted(path.name for path in tmp_path.iterdir())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)

    losses, notes = train(make_plan(), 4, directory=tmp_path)

    assert child.exitcode == -signal.SIGKILL
    assert left == ["step-000001", "step-000002", "step-000003.tmp-new"]
    assert notes == [f"goes on from {tmp_path / 'step-000002'}, after step 2"]
    assert whole + losses == train(make_plan(), 4)[0]
    assert not (tmp_path / left[-1]).exists()


def _killed_in_a_save(directory: Path, moment: str) -> None:
    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(folder.FileSystemWriter if moment == "finish" else folder, moment, die)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    train(make_plan(), 3, directory=directory, every=1)


def _data_file(checkpoint: Path) -> Path:
    return checkpoint / "__0_0.distcp"


def test_a_truncated_checkpoint_is_skipped_with_a_note_and_written_again(tmp_path, alone):
    train(make_plan(), 3, directory=tmp_path, every=1)
    size = _data_file(tmp_path / "step-000003").stat().st_size
    os.truncate(_data_file(tmp_path / "step-000003"), size // 2)

    losses, notes = train(make_plan(), 4, directory=tmp_path, every=1)

    assert notes[0] == (
        "step-000003 is skipped, it is not whole: "
        f"__0_0.distcp has {size // 2} bytes, {size} were written"
    )
    assert losses == train(make_plan(), 4)[0][2:]
    assert train(make_plan(), 5, resume=str(tmp_path / "step-000003"))[0][0] == losses[1]


def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path, alone):
    train(make_plan(), 2, directory=tmp_path, every=1)
    path = _data_file(tmp_path / "step-000002")
    data = bytearray(path.read_bytes())
    values = data.find(b"archive/data/0") + 1000
    data[values : values + 4] = (byte ^ 0xFF for byte in data[values : values + 4])
    path.write_bytes(data)

    losses, notes = train(make_plan(), 3, directory=tmp_path)

    skipped = (
        r"step-000002 is skipped, it is not whole: "
        r"__0_0\.distcp has the checksum \w{8}, \w{8} was written"
    )
    assert re.fullmatch(skipped, notes[0])
    assert losses == train(make_plan(), 3)[0][1:]


def test_a_folder_without_a_whole_checkpoint_is_an_error_and_not_a_new_start(tmp_path, alone):
    train(make_plan(), 1, directory=tmp_path)
    (tmp_path / "step-000001" / ".metadata").unlink()

    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be read"):
        train(make_plan(), 2, directory=tmp_path)


def test_another_model_is_refused_by_the_first_field_that_differs(tmp_path, alone):
    train(make_plan(GPT), 1, directory=tmp_path)

    with pytest.raises(ConfigError, match="of another model: its num_kv_heads is 4, the plan's 2"):
        train(make_plan(LLAMA), 2, directory=tmp_path)


def test_what_changes_is_noted(tmp_path, alone):
    train(make_plan(), 1, directory=tmp_path)
    path = tmp_path / "step-000001" / folder.DOCUMENT
    document = json.loads(path.read_text())
    document["options"]["learning_rate"] = 0.5
    path.write_text(json.dumps(document))

    _, notes = train(make_plan(global_batch_size=4), 2, directory=tmp_path)

    assert notes[:2] == [
        "global_batch_size is 4, until the checkpoint it was 8",
        "learning_rate is 0.01, until the checkpoint it was 0.5",
    ]


def test_never_starts_anew_in_an_empty_folder_only_and_after_a_restart_goes_on(
    tmp_path, alone, monkeypatch
):
    losses, _ = train(make_plan(), 2, directory=tmp_path, resume="never")
    with pytest.raises(ConfigError, match=r"--resume never: .* holds step-000002 of another run"):
        train(make_plan(), 3, directory=tmp_path, resume="never")

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    assert (
        losses + train(make_plan(), 3, directory=tmp_path, resume="never")[0]
        == train(make_plan(), 3)[0]
    )


def test_an_older_checkpoint_of_the_same_folder_is_refused(tmp_path, alone):
    train(make_plan(), 2, directory=tmp_path, every=1)

    with pytest.raises(ConfigError, match="step-000002 is newer"):
        train(make_plan(), 3, directory=tmp_path, resume=str(tmp_path / "step-000001"))
    with pytest.raises(ConfigError, match=r"it is not whole: checkpoint\.json: No such file"):
        train(make_plan(), 3, resume=str(tmp_path / "step-000007"))


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path, alone):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot write in .*: Not a directory"):
        train(make_plan(), 1, directory=tmp_path / "file" / "checkpoints")


def test_a_save_that_finds_no_room_costs_that_checkpoint_and_the_last_one_the_exit_code(
    tmp_path, alone
):
    train(make_plan(), 1, directory=tmp_path)
    limits, action = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        notes: list[str] = []
        trainer = build_trainer(
            make_plan(), dataclasses.replace(OPTIONS, steps=3), torch.device("cpu")
        )
        saves = Checkpoints(
            trainer,
            CheckpointOptions(directory=tmp_path, every=1),
            timeout=TIMEOUT,
            note=notes.append,
        )
        for result in trainer.run(saves.resume()):
            saves.after_step(result.step + 1)
        with pytest.raises(
            PlannerError,
            match=r"the checkpoint of step 3 was not written: File too large \(rank 0\)$",
        ):
            saves.finish(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)

    assert "the checkpoint of step 2 was not written" in notes[1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
