"""Plans with chunked blocks train to the values of the same plan without chunks.

On one rank they agree to the bit, wherever the states lie.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import re
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.executor.__main__ import run
from parplan.executor.checking import parity
from parplan.executor.checking.shrunk_plan import shrunk
from parplan.executor.checkpoint.checkpoints import Checkpoints
from parplan.executor.checkpoint.resume import CheckpointOptions
from parplan.executor.rules.all_rules import nearest_legal, refusals, validate
from parplan.executor.sharding.tensor_boxes import Boxes
from parplan.executor.tensors import forget_meshes, local
from parplan.executor.training.compiled import validate_compiled
from parplan.executor.training.optimizer import build_optimizer
from parplan.executor.training.train import Trainer, build_trainer
from parplan.executor.watch.allocated import allocated_bytes
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_chunks import rank_chunks_of
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.runs.run_file import ChunkMoved, PredictedAndMeasured
from parplan.planner.runs.run_file import read_run as read_run
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.report.runs.parity_table import Parity, print_parity
from tests.helpers.chunked_runs import chunked_plan, smallest
from tests.helpers.executor_plans import GPT, LLAMA
from tests.helpers.executor_world import (
    BF16_GRADIENT_TOLERANCE,
    BF16_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    OPTIONS,
    TrainingOutcome,
    run_plans,
    run_reference,
    worst_gradient,
)

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

SMALL = dataclasses.replace(GPT, num_layers=3)
HOST, MIXED = (
    ChunkRequest(host_blocks=3, optimizer_blocks=0),
    ChunkRequest(host_blocks=1, optimizer_blocks=1),
)
FP32 = Precision.FP32
BF16 = Precision.BF16
FP16 = Precision.FP16
IN_PARAMETERS = {"precision": FP16, "gradients": FP16}


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    forget_meshes()  # a fork would forget them, and wait for the threads of their groups
    dist.destroy_process_group()


def tight(request: ChunkRequest, model=SMALL, **choices: object) -> Plan:
    """The plan in the smallest budget that it can run in."""
    least = smallest(request, model=model, **choices)
    return chunked_plan(dataclasses.replace(request, device_bytes=least), model, **choices)


def trainer(plan: Plan, **options: object) -> Trainer:
    return build_trainer(plan, dataclasses.replace(OPTIONS, **options), torch.device("cpu"))


def states(trained: Trainer) -> dict[str, Tensor]:
    """All parameters and what the optimizer keeps of them, by name; copies."""
    rank_states = trained.held().own
    actual = {name: parameter.detach() for name, parameter in rank_states.items()}
    actual |= {
        f"{name}.{key}": value
        for name, parameter in rank_states.items()
        for key, value in trained.optimizer.state[parameter].items()
    }
    for part in (trained.adam.tensors() if trained.adam is not None else {}).values():
        actual |= part
    return {
        name: (value.flat if isinstance(value, Boxes) else local(value)).clone()
        for name, value in actual.items()
    }


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


@pytest.mark.parametrize(
    ("request_", "choices"),
    [
        pytest.param(MIXED, {"num_micro_batches": 2}, id="every-home"),
        pytest.param(HOST, {}, id="host", marks=pytest.mark.slow),
        pytest.param(MIXED, {"precision": BF16}, id="bf16", marks=pytest.mark.slow),
        pytest.param(
            HOST, {"precision": FP16, "num_micro_batches": 2}, id="fp16", marks=pytest.mark.slow
        ),
    ],
)
def test_steps_are_those_of_the_plan_without_chunks_to_the_bit(alone, request_, choices):
    plain, chunked = (
        trainer(chunked_plan(None, SMALL, **choices), steps=4),
        trainer(tight(request_, **choices), steps=4),
    )

    expected, collected = list(plain.run()), list(chunked.run())

    assert [(step.loss, step.gradient_norm) for step in collected] == [
        (step.loss, step.gradient_norm) for step in expected
    ]
    assert max(step.gradient_norm for step in collected) > OPTIONS.clip_gradients
    assert equal(states(chunked), states(plain))
    assert chunked.moved().as_predicted
    assert chunked.moved().in_bytes.measured > 0
    _, predicted, measured = chunked.state_bytes()
    assert predicted == measured


@pytest.mark.slow
def test_without_clipping_and_with_a_schedule_too(alone):
    options = {
        "clip_gradients": 0.0,
        "warmup_steps": 2,
        "lr_schedule": "cosine",
        "weight_decay": 0.3,
        "betas": (0.8, 0.9),
        "steps": 4,
    }
    plain, chunked = trainer(chunked_plan(None, SMALL), **options), trainer(tight(MIXED), **options)

    expected = [(step.loss, step.learning_rate) for step in plain.run()]
    actual = [(step.loss, step.learning_rate) for step in chunked.run()]

    assert actual == expected
    assert equal(states(chunked), states(plain))


@pytest.mark.parametrize(
    "request_",
    [pytest.param(HOST, id="host"), pytest.param(MIXED, id="every-home", marks=pytest.mark.slow)],
)
def test_gradients_in_the_parameters_place_train_as_separate_ones_to_their_rounding(
    alone, request_
):
    plain, chunked = (
        trainer(chunked_plan(None, SMALL, precision=FP16), steps=4),
        trainer(tight(request_, **IN_PARAMETERS), steps=4),
    )

    expected, actual = [step.loss for step in plain.run()], [step.loss for step in chunked.run()]

    assert chunked.adam.manager.schedule.in_parameters
    assert actual == pytest.approx(expected, rel=2e-4)
    _, predicted, measured = chunked.state_bytes()
    assert predicted == measured


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(IN_PARAMETERS, id="in-parameters"),
        pytest.param({"precision": FP16}, id="separate"),
    ],
)
def test_a_step_that_overflows_changes_nothing_in_chunks(alone, choices):
    skipping, plain = trainer(tight(MIXED, **choices)), trainer(tight(MIXED, **choices))
    skipping.gradients(0)
    chunk = skipping.adam.manager.chunks[-1]  # of a home on the host
    assert chunk.home is StateLocation.HOST
    chunk.gradient.fill_(torch.inf)

    norm = skipping.update(0)
    skipping.scale.states["value"].mul_(2)

    assert not torch.isfinite(norm)
    assert skipping.gradients(1).item() == plain.gradients(1).item()
    assert skipping.norm().item() == plain.norm().item()


def _train(plan: Plan, steps: int, **options: object) -> list[float]:
    trained = trainer(plan, steps=steps)
    saves = Checkpoints(
        trained, CheckpointOptions(**options), timeout=timedelta(seconds=60), note=lambda _: None
    )
    losses = [result.loss for result in trained.run(saves.resume())]
    saves.finish(steps)
    return losses


@pytest.mark.parametrize("precision", [FP32, pytest.param(BF16, marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_by_bit_with_chunks_without_and_with_other_homes(
    alone, tmp_path, precision
):
    plain, mixed, host = (
        chunked_plan(None, SMALL, precision=precision),
        *(tight(each, precision=precision) for each in (MIXED, HOST)),
    )
    whole = _train(plain, 5)

    parts = [
        _train(plan, steps, directory=tmp_path)
        for steps, plan in enumerate((mixed, mixed, plain, host, mixed), 1)
    ]

    assert [loss for part in parts for loss in part] == whole


def require_going_on(chain: list[Plan], folder: Path) -> None:
    """Requires that a chain of plans makes the steps of one process.

    Each plan makes one step from the checkpoint of the plan before.
    """

    def one_step(plan: Plan) -> list[float]:
        return _train(
            plan,
            1 + next(index for index, each in enumerate(chain) if each is plan),
            directory=folder,
        )

    parts = parity.run_ranks(chain, one_step)
    ((whole,),) = parity.run_ranks(
        [chunked_plan(None, chain[0].model)], lambda plan: _train(plan, len(chain))
    )

    assert [len(losses) for ranks in parts for losses in ranks] == [1] * chain[
        0
    ].mesh.num_ranks * len(chain)
    assert [ranks[0][0] for ranks in parts] == pytest.approx(whole, rel=2 * LOSS_TOLERANCE)


@pytest.mark.slow
def test_a_run_goes_on_across_meshes_with_chunks_and_without(tmp_path):
    require_going_on(
        [
            tight(MIXED, dp=2, num_micro_batches=2),
            chunked_plan(None, SMALL, dp=2),
            tight(HOST, tp=2),
            tight(MIXED, pp=2, num_micro_batches=2),
            chunked_plan(None, SMALL, tp=2, sp=True),
            tight(HOST, dp=2),
        ],
        tmp_path,
    )


def crossing(plan: Plan) -> set[str]:
    """Parameters of a block that cross the border between two data-parallel ranks' chunks."""
    layout = rank_chunks_of(plan, 0).groups[0].chunk_layout
    return {
        tensor.name.partition(".")[2]
        for tensor, offset in zip(layout.tensors, layout.offset_of, strict=True)
        if offset // layout.chunk_elements
        != (offset + tensor.elements - 1) // layout.chunk_elements
    }


@pytest.mark.slow
def test_a_parameter_of_two_ranks_trains_and_is_saved_and_loaded_with_chunks_and_without(tmp_path):
    shared = tight(HOST, LLAMA, dp=2)

    assert crossing(shared) == {"fc1.weight"}
    require_going_on(
        [shared, chunked_plan(None, LLAMA, dp=2), tight(MIXED, LLAMA, dp=2, num_micro_batches=2)],
        tmp_path,
    )


@pytest.mark.slow
def test_parameters_of_four_ranks_train_and_are_saved_and_loaded_on_any_mesh(tmp_path):
    four = tight(MIXED, dp=4)

    assert crossing(four) == {"qkv.weight", "fc2.weight"}
    require_going_on(
        [
            four,
            tight(HOST, dp=2, tp=2, sp=True),
            chunked_plan(None, SMALL, dp=4),
            tight(HOST, dp=4, num_micro_batches=2),
            tight(MIXED, dp=2, pp=2, num_micro_batches=2),
            chunked_plan(None, SMALL, dp=2, tp=2),
            tight(MIXED, dp=2, tp=2),
        ],
        tmp_path,
    )


def _first_overflows_on_one_rank(plan: Plan) -> list[object]:
    trained = trainer(plan)
    trained.gradients(0)
    if dist.get_rank() == 1:
        next(iter(trained.adam.gradients().values())).fill_(torch.inf)
    before = states(trained)
    norm, same = trained.update(0).item(), equal(before, states(trained))
    return [norm, same, trained.scale.value, trained.gradients(1).item(), trained.update(1).item()]


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"gradients": FP16}])
def test_chunks_of_one_rank_that_overflow_stop_the_update_of_all(choices):
    ((first, second),) = parity.run_ranks(
        [tight(HOST, dp=2, precision=FP16, **choices)], _first_overflows_on_one_rank
    )

    assert first[:3] == second[:3] == [torch.inf, True, 2.0**15]
    assert first[3:] == second[3:]
    assert first[4] < torch.inf


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2, "num_micro_batches": 2}])
def test_16_bits_on_two_ranks_train_like_one_process(mesh):
    plans = [
        tight(MIXED, precision=BF16, gradients=BF16, **mesh),
        tight(HOST, precision=BF16, **mesh),
    ]
    expected = run_reference(chunked_plan(None, SMALL))

    for plan, run_plan in zip(plans, run_plans(plans), strict=True):
        validate(plan)
        assert worst_gradient(run_plan, expected)[0] <= BF16_GRADIENT_TOLERANCE
        assert run_plan.losses == pytest.approx(expected.losses, rel=BF16_LOSS_TOLERANCE)
        assert all(rank.as_predicted for rank in run_plan.moved.values())
        assert all(predicted == measured for predicted, measured in run_plan.states.values())


TWO_RANKS = {
    "dp2": (MIXED, GPT, {"dp": 2, "num_micro_batches": 2}),
    "tp2-sp": (HOST, GPT, {"tp": 2, "sp": True}),
    "pp2": (MIXED, GPT, {"pp": 2, "num_micro_batches": 2}),
    "dp2-llama-lru": (dataclasses.replace(HOST, eviction=Eviction.LRU), LLAMA, {"dp": 2}),
    "tp2-llama-mixed": (MIXED, LLAMA, {"tp": 2, "num_micro_batches": 2}),
}
SLOW = ("dp2-llama-lru", "tp2-llama-mixed")


@cache
def outcomes(slow: bool) -> dict[str, tuple[Plan, TrainingOutcome]]:
    plans = {
        name: tight(request, model, **choices)
        for name, (request, model, choices) in TWO_RANKS.items()
        if (name in SLOW) == slow
    }
    return {
        name: (plan, run_plan)
        for (name, plan), run_plan in zip(
            plans.items(), run_plans(list(plans.values())), strict=True
        )
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TWO_RANKS],
)
def test_ranks_train_like_one_process_and_move_and_hold_what_is_predicted(name):
    plan, actual = outcomes(name in SLOW)[name]
    validate(plan)
    expected = run_reference(dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)))

    error, parameter = worst_gradient(actual, expected)

    assert error <= GRADIENT_TOLERANCE, parameter
    assert actual.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert actual.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)
    assert len(actual.moved) == 2
    assert all(rank.as_predicted and rank.in_bytes.measured for rank in actual.moved.values())
    assert all(predicted == measured for predicted, measured in actual.states.values())


@pytest.mark.slow
def test_a_run_leaves_what_it_moved_beside_what_was_predicted_and_stays_in_its_budget(
    tmp_path, monkeypatch, capsys
):
    plan = tight(MIXED, num_micro_batches=2)
    write_plan(plan, tmp_path / "plan.yaml")
    gc.collect()
    allocated = allocated_bytes(
        gc.get_objects()
    )  # all tensors of the process are counted, those of other tests too
    monkeypatch.setattr(sys, "argv", ["executor", str(tmp_path / "plan.yaml"), "--steps", "3"])

    assert run() == 0

    (rank,) = read_run(tmp_path / "run.json").ranks
    assert rank.chunks.as_predicted
    assert rank.chunks.in_bytes.measured == plan.chunks.ranks[0].in_bytes > 0
    assert rank.chunks.out_bytes.measured == plan.chunks.ranks[0].out_bytes > 0
    assert (
        rank.chunks.device_bytes.measured
        < rank.peak_allocated_bytes.measured - allocated
        <= plan.chunks.ranks[0].device_bytes
    )
    out = capsys.readouterr().out
    assert re.search(
        r"\n +chunks to the device +(\S+ \S+) +\1 +\+0 %\n +chunks to the host +(\S+ \S+) +\2 ", out
    )
    assert "equal" in out


def test_counted_transfers_are_printed_beside_predicted_ones():
    def moved(counted: int) -> ChunkMoved:
        same = PredictedAndMeasured(predicted=7, measured=7)
        return ChunkMoved(
            in_bytes=PredictedAndMeasured(predicted=5000, measured=counted),
            out_bytes=same,
            gathered_bytes=same,
            reduced_bytes=same,
            device_bytes=same,
        )

    def said(*ranks: ChunkMoved) -> str:
        parity = Parity(
            plan=DP2,
            small=DP2,
            losses=((1.0, 1.0),),
            gradients={"head.norm.weight": 0.0},
            agree=True,
            as_predicted=True,
            loss_tolerance=1e-6,
            gradient_tolerance=1e-5,
            moved=ranks,
        )
        out = Console(width=200, record=True, file=io.StringIO())
        print_parity(parity, out)
        return out.export_text()

    assert "10,000 bytes to the device as predicted, 14 bytes to the host as predicted" in said(
        moved(5000), moved(5000)
    )
    assert "NOT" not in said(moved(5000))
    wrong = said(moved(4000), moved(5000))
    assert "9,000 bytes to the device NOT as predicted, 10,000" in wrong
    assert "what chunks moved is NOT as predicted" in wrong


def test_a_stage_whose_parameters_are_all_in_chunks_has_an_optimizer_of_nothing():
    optimizer = build_optimizer([], OPTIONS)

    optimizer.step()

    assert optimizer.param_groups[0]["params"] == []


def test_the_small_plan_has_the_homes_of_the_large_one_in_the_smallest_budget():
    plan = chunked_plan(
        dataclasses.replace(MIXED, device_bytes=10**9), dp=2, num_micro_batches=2, precision=BF16
    )

    small = shrunk(plan)

    validate(small)
    assert small.chunks.eviction is plan.chunks.eviction
    assert (
        {group.home for group in small.chunks.groups}
        == {group.home for group in plan.chunks.groups}
        == set(StateLocation)
    )
    assert [rank.device_bytes for rank in small.chunks.ranks] == [
        max(rank.smallest_bytes for rank in small.chunks.ranks)
    ]


DP2 = chunked_plan(dataclasses.replace(MIXED, device_bytes=10**9), dp=2)


def of_blocks(plan: Plan, **changes: object) -> Plan:
    layer_plans = {
        name: dataclasses.replace(layer_plan, **changes)
        if layer_plan.layer == "block"
        else layer_plan
        for name, layer_plan in plan.layer_plans.items()
    }
    return dataclasses.replace(plan, layer_plans=layer_plans)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(of_blocks(DP2, zero=1), "zero 1 of a block in chunks", id="zero"),
        pytest.param(
            of_blocks(DP2, zero_ranks=1), "zero_ranks 1 of a block in chunks", id="zero-ranks"
        ),
    ],
)
def test_what_chunks_do_not_go_with_is_refused_with_the_nearest_plan(plan, message):
    actual = {refusal.problem: rule.name for rule, refusal in refusals(plan)}

    assert any(rule == "chunks" and message in text for text, rule in actual.items())
    nearest = nearest_legal(plan)
    validate(nearest)
    assert layout_of(nearest).chunked == ("experts" not in message)


def test_16_bit_gradients_are_of_chunks_alone():
    plan = chunked_plan(dataclasses.replace(MIXED, device_bytes=10**9), **IN_PARAMETERS)

    validate(plan)
    with pytest.raises(ConfigError, match="gradient_precision is fp16"):
        validate(dataclasses.replace(of_blocks(plan, offload=()), chunks=None))


def test_blocks_in_chunks_are_not_compiled():
    with pytest.raises(ConfigError, match="chunks"):
        validate_compiled(DP2, torch.device("cpu"))
