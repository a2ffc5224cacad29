"""Every optimizer trains divided models as one process does, in the bytes that are predicted."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.checking.parity import run_ranks
from parplan.executor.data.batches import synthetic_batches
from parplan.executor.run_options import Options
from parplan.executor.training.optimizer import Layout, build_optimizer
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.spec import ModelSpec, Optimizer, Precision
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, MIXTRAL, make_plan
from tests.helpers.executor_world import (
    OPTIONS,
    STEPS,
    forward,
    reference_layers,
    reference_optimizer,
)

# Its matrices have 4,096 elements and more, whose moments have 8 bits.
WIDE = dataclasses.replace(
    GPT, name="wide-gpt", num_layers=2, hidden_size=64, head_dim=16, ffn_hidden_size=128
)
EXPERTS = dataclasses.replace(
    MIXTRAL, name="wide-mixtral", hidden_size=64, head_dim=16, expert_ffn_hidden_size=48
)
OTHERS = tuple(optimizer for optimizer in Optimizer if optimizer is not Optimizer.ADAM)
# Norm of the difference of all parameters after three steps, in shares of how far they moved. A
# gradient that differs in its last bit may get another 8-bit code or another bf16 number, in which
# the Newton-Schulz steps run; matrices that tensor parallelism cuts by columns have other blocks.
TOLERANCE = {
    Optimizer.ADAM_8BIT: 1e-2,
    Optimizer.MUON: 3e-2,
    Optimizer.ADAFACTOR: 1e-5,
    Optimizer.SGD: 1e-5,
    Optimizer.SGD_MOMENTUM: 1e-5,
}
LOSS_TOLERANCE = 1e-5
Trained = tuple[list[float], dict[str, Tensor], tuple[StateBytes, StateBytes]]


def plan_of(optimizer: Optimizer, model: ModelSpec = WIDE, **changes: object) -> Plan:
    plan = make_plan(model, **changes)
    training = dataclasses.replace(plan.training, optimizer=optimizer)
    return dataclasses.replace(plan, training=training)


def plans_of(optimizer: Optimizer) -> dict[str, Plan]:
    return {
        **{f"dp2-zero{zero}": plan_of(optimizer, dp=2, zero=(zero,)) for zero in range(4)},
        "tp2": plan_of(optimizer, tp=2),
        "pp2-bf16": plan_of(optimizer, pp=2, precision=Precision.BF16),
        "experts-dp2-zero2": plan_of(optimizer, EXPERTS, dp=2, zero=(2,)),
        "experts-ep2": plan_of(optimizer, EXPERTS, dp=2, ep=2),
    }


PLANS = {
    (optimizer, name): plan for optimizer in OTHERS for name, plan in plans_of(optimizer).items()
}
PLAIN = {  # every kind of division, and every optimizer
    (Optimizer.ADAM_8BIT, "dp2-zero3"),
    (Optimizer.MUON, "experts-ep2"),
    (Optimizer.ADAFACTOR, "tp2"),
    (Optimizer.SGD, "pp2-bf16"),
    (Optimizer.SGD_MOMENTUM, "dp2-zero1"),
}


def whole(parameter: Tensor) -> Tensor:
    held = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return held.detach().clone()


def _train(plan: Plan) -> Trained:
    """Returns losses, parameters and state bytes of a rank after all steps."""
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"))
    losses = [result.loss for result in trainer.run()]
    parameters = {
        name: whole(parameter)
        for stage in trainer.pipeline.stages
        for name, parameter in stage.body.named_parameters()
    }
    _, predicted, measured = trainer.state_bytes()
    return losses, parameters, (predicted, measured)


@cache
def trained(*, plain: bool) -> dict[tuple[Optimizer, str], list[Trained]]:
    """Returns what every rank has after each of the plain plans or of the others, in one world."""
    plans = {case: plan for case, plan in PLANS.items() if (case in PLAIN) is plain}
    return dict(zip(plans, run_ranks(list(plans.values()), _train), strict=True))


@cache
def one_process(optimizer: Optimizer, model: ModelSpec) -> tuple[list[float], Tensor, Tensor]:
    """Returns the losses of one process in fp32, its parameters, and those before."""
    plan = plan_of(optimizer, model)
    layers = reference_layers(plan.model, plan.training, OPTIONS.seed)
    before = {name: whole(each) for name, each in layers.named_parameters()}
    updates = reference_optimizer(layers, OPTIONS, optimizer)
    batches = synthetic_batches(
        dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1)), 0, OPTIONS.seed
    )
    losses = []
    for step in range(STEPS):
        ids, targets = batches(step)
        loss = nn.functional.cross_entropy(forward(layers, ids).flatten(0, 1), targets.flatten())
        updates.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(layers.parameters(), OPTIONS.clip_gradients)
        updates.step()
        losses.append(loss.item())
    return losses, {name: whole(each) for name, each in layers.named_parameters()}, before


@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize(("optimizer", "name"), mostly_slow(PLANS, PLAIN))
def test_a_divided_model_ends_with_the_parameters_of_one_process(
    optimizer: Optimizer, name: str
) -> None:
    case = optimizer, name
    plan, ranks = PLANS[case], trained(plain=case in PLAIN)[case]
    losses, expected, before = one_process(optimizer, plan.model)

    for rank_losses, parameters, (predicted, measured) in ranks:
        assert predicted == measured
        if plan.training.precision is Precision.FP32:
            assert rank_losses == pytest.approx(losses, rel=LOSS_TOLERANCE)
            moved = sum((expected[n] - before[n]).square().sum() for n in parameters) ** 0.5
            off = sum((expected[n] - parameters[n]).square().sum() for n in parameters) ** 0.5
            assert off / moved <= TOLERANCE[optimizer]


SHAPE = (24, 512)  # its rows are two blocks of 8-bit moments, of which tensor parallelism has one


def _parts(plan: Plan) -> dict[str, Tensor]:
    """Returns by optimizer and placement how far divided tensors are from whole ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {
        f"{optimizer} {dim}": _error(optimizer, mesh, dim) for optimizer in OTHERS for dim in (0, 1)
    }


def _error(optimizer: Optimizer, mesh: DeviceMesh, dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(SHAPE, generator=generator)
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight = nn.Parameter(distribute_tensor(start, mesh["tp"], (Shard(dim),)))
    fully_shard(layer, mesh=mesh["dp"])
    alone = nn.Parameter(start.clone())
    for divided, gradients in ((layer.weight, torch.Generator()), (alone, torch.Generator())):
        gradients.manual_seed(4)
        steps = build_optimizer([divided], OPTIONS, optimizer)
        for _ in range(3):
            gradient = torch.randn(SHAPE, generator=gradients)
            if isinstance(divided, DTensor):
                whole_gradient = DTensor.from_local(gradient, mesh, (Replicate(), Replicate()))
                gradient = whole_gradient.redistribute(placements=divided.placements)
            divided.grad = gradient
            steps.step()
    return (whole(layer.weight) - alone.detach()).abs().max()


@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_tensor_that_zero_and_tensor_parallelism_divide_ends_as_the_whole_one() -> None:
    for errors in run_ranks([make_plan(GPT, dp=2, tp=2)], _parts)[0]:
        for name, error in errors.items():
            sums = name.startswith(Optimizer.ADAFACTOR)  # it adds up in another order
            assert error <= (1e-6 if sums else 0), name


def updated(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Returns the parameters after five steps with gradients that depend on nothing."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def a_matrix_and_a_vector() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator) / 10) for shape in ((70, 300), (7,))
    ]


OPTIONS_OF_ONE = Options(steps=5, learning_rate=1e-2, weight_decay=0.1)


def updated_by_ours(optimizer: Optimizer, layout: Layout | None = None) -> list[Tensor]:
    parameters = a_matrix_and_a_vector()
    return updated(build_optimizer(parameters, OPTIONS_OF_ONE, optimizer, layout), parameters)


def test_adafactor_on_whole_tensors_is_that_of_torch() -> None:
    theirs = a_matrix_and_a_vector()
    decayed = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:]}]
    expected = updated(torch.optim.Adafactor(decayed, lr=1e-2), theirs)

    for ours, torchs in zip(updated_by_ours(Optimizer.ADAFACTOR), expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)


def test_muon_on_a_whole_matrix_is_that_of_torch_and_a_vector_has_adam() -> None:
    matrix, vector = a_matrix_and_a_vector()
    muon = torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW([vector], lr=1e-2, betas=OPTIONS_OF_ONE.betas, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        matrix.grad = torch.randn(matrix.shape, generator=generator)
        vector.grad = torch.randn(vector.shape, generator=generator)
        muon.step()
        adam.step()

    ours = updated_by_ours(Optimizer.MUON)

    assert torch.equal(ours[0], matrix)
    torch.testing.assert_close(ours[1], vector.detach(), rtol=1e-6, atol=1e-7)


def test_muon_updates_each_of_several_stacked_matrices_as_if_it_were_alone() -> None:
    stacked, _ = a_matrix_and_a_vector()
    halves = [nn.Parameter(half.clone()) for half in stacked.detach().chunk(2)]
    together = build_optimizer(
        [stacked], OPTIONS_OF_ONE, Optimizer.MUON, Layout(stacked={stacked: 2})
    )
    apart = build_optimizer(halves, OPTIONS_OF_ONE, Optimizer.MUON)
    gradient = torch.randn(stacked.shape, generator=torch.Generator().manual_seed(2))
    stacked.grad = gradient
    for half, part in zip(halves, gradient.chunk(2), strict=True):
        half.grad = part.clone()

    together.step()
    apart.step()

    assert torch.equal(stacked, torch.cat(halves))


def test_eight_bit_moments_move_a_matrix_nearly_as_adam_does() -> None:
    start, expected = a_matrix_and_a_vector(), updated_by_ours(Optimizer.ADAM)

    ours = updated_by_ours(Optimizer.ADAM_8BIT)

    # Dettmers et al. 2022, table 5: the relative error of an update is about a hundredth.
    assert 0 < (ours[0] - expected[0]).norm() / (expected[0] - start[0]).norm() < 0.02
    # A vector has fp32 moments; the corrections of the first steps are in fp32 too.
    torch.testing.assert_close(ours[1], expected[1], rtol=2e-5, atol=1e-6)
