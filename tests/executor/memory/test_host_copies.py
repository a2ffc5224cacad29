"""Activations on the host: the priced copies run, and results do not change."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute, host_bytes_by_operator
from parplan.costmodels.memory.activation_copies import copied_bytes
from parplan.costmodels.operators.plan_placements import Placements, placed_splits
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.memory.host_copies import HostCopies, HostOffload
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.transformer_layers import build_layer
from parplan.executor.rules.all_rules import nearest_legal, refusals, validate
from parplan.executor.run_options import Options
from parplan.executor.sharding.place import Axes, place_layer
from parplan.executor.training.train import build_trainer
from parplan.planner.plan.derived import layout_of
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerClass, LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL, AttentionKernel
from parplan.profiles.units import GIB
from tests.helpers import executor_plans
from tests.helpers.cases import named
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, division, make_plan
from tests.helpers.planning import estimate_plan

CPU = torch.device("cpu")
PARALLEL = dataclasses.replace(GPT, parallel_residual=True)
DROPOUT = dataclasses.replace(GPT, dropout=0.2)
TP = 4


def _graph(
    model: ModelSpec, attention: AttentionKernel = AttentionKernel.FLASH
) -> tuple[TrainingSpec, LayerClass]:
    training = TrainingSpec(
        global_batch_size=2, seq_length=16, precision="fp32", attention=attention, stack=NEUTRAL
    )
    return training, build_graph(model, training, 2, plain_dropout=model.dropout > 0).block


def _passed(
    model: ModelSpec,
    training: TrainingSpec,
    graph: LayerClass,
    recompute_names: tuple[str, ...],
    names: tuple[str, ...] | None,
):
    """The copies of two blocks' passes, and all gradients."""
    copies, blocks = HostCopies(CPU), []
    for index in (1, 2):
        recipes = (
            None
            if names is None
            else Recipes(on_host=HostOffload(names, graph, recompute_names, copies))
        )
        blocks.append(
            recomputed(
                build_layer(model, training, LayerKind.BLOCK, index, 0, CPU),
                recompute_names,
                f"block{index}",
                recipes,
            )
        )
    x = torch.randn(
        2, 16, model.hidden_size, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    torch.manual_seed(2)
    copies.begin_pass()
    out = x
    for block in blocks:
        out = block(out)
    out.square().sum().backward()
    return copies, [
        x.grad,
        *(parameter.grad for block in blocks for parameter in block.parameters()),
    ]


def _agrees(
    model: ModelSpec,
    recompute_names: tuple[str, ...],
    names: tuple[str, ...],
    attention: AttentionKernel = AttentionKernel.FLASH,
) -> None:
    """Requires the priced bytes both ways, and unchanged gradients bit by bit.

    The reference keeps all activations on the device.
    """
    training, graph = _graph(model, attention)
    priced = host_bytes_by_operator(graph, Sharding(), recompute_names)

    copies, gradients = _passed(model, training, graph, recompute_names, names)
    _, expected = _passed(model, training, graph, recompute_names, None)

    assert copies.out_bytes == copies.back_bytes == 2 * sum(priced[name] for name in names)
    assert all(
        torch.equal(gradient, reference)
        for gradient, reference in zip(gradients, expected, strict=True)
    )


OF_GPT = tuple(operator.name for operator in _graph(GPT)[1].operators)


@pytest.mark.parametrize(
    "recompute_names",
    [(), ("norm1", "activation", "norm2"), ("attention", "residual1"), "full"],
    ids=str,
)
@pytest.mark.parametrize(
    "names", [("norm1",), ("attention", "fc2"), ("attention_out", "fc1"), "all"], ids=str
)
@pytest.mark.parametrize(
    "model",
    named({"gpt": GPT, "llama": LLAMA, "parallel-residual": PARALLEL}, {"parallel-residual"}),
)
def test_the_host_gets_what_is_priced_and_no_gradient_changes(model, names, recompute_names):
    every = tuple(operator.name for operator in _graph(model)[1].operators)
    recompute_names = (
        every
        if recompute_names == "full"
        else tuple(name for name in recompute_names if name in every)
    )

    _agrees(model, recompute_names, every if names == "all" else names)


@pytest.mark.parametrize("names", [("residual1", "residual2"), ("attention",), OF_GPT], ids=str)
def test_masks_and_scores_go_with_the_operators_that_make_them(names):
    for attention in AttentionKernel:
        _agrees(DROPOUT, ("norm1", "fc1", "activation"), names, attention)


def _lists(model: ModelSpec):
    """Any list of operators that can be recomputed in part, in the order of the layer.

    The last operator is left out, because nobody saves its output.
    """
    names = tuple(operator.name for operator in _graph(model)[1].operators)[:-1]
    return st.sets(st.sampled_from(names)).map(
        lambda chosen: tuple(name for name in names if name in chosen)
    )


@settings(max_examples=12, deadline=None)
@given(recompute_names=_lists(LLAMA), names=_lists(LLAMA))
def test_any_two_lists_agree(recompute_names, names):
    _agrees(LLAMA, recompute_names, names)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_two_lists_agree_in_any_model(data):
    model = data.draw(st.sampled_from((GPT, LLAMA, PARALLEL)))

    _agrees(model, data.draw(_lists(model)), data.draw(_lists(model)))


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    yield init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


DIVISIONS = ("WHOLE", "SEQUENCE", "MEGATRON_SEQUENCE", "BATCH_ATTENTION", "PATCHWORK")
LISTS = (
    (),
    ("norm2", "fc1", "activation"),
    ("attention", "residual1"),
    ("qkv", "attention_out", "residual1", "norm2", "fc2"),
    OF_GPT,
)


@pytest.mark.filterwarnings("ignore:.*alltoall.*")
@pytest.mark.parametrize(
    "division_name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name not in ("MEGATRON_SEQUENCE", "PATCHWORK")
        else name
        for name in DIVISIONS
    ],
)
@pytest.mark.parametrize(
    "recompute_names",
    LISTS,
    ids=lambda recompute_names: (
        "-".join(recompute_names) if len(recompute_names) < len(OF_GPT) else "full"
    ),
)
def test_a_rank_sends_its_part_of_what_is_divided(mesh, division_name, recompute_names):
    training, _ = _graph(GPT)
    graph = build_graph(GPT, training, TP).block  # batches divide too
    operators = {
        op.name: division(op, getattr(executor_plans, division_name)[op.name])
        for op in graph.operators
    }
    splits = {
        op.name: placed_splits(
            op,
            Sharding(TP),
            Placements(
                parameters=dict(operators[op.name].parameters),
                input=operators[op.name].input,
                output=operators[op.name].output,
            ),
        )
        for op in graph.operators
    }
    priced = host_bytes_by_operator(
        graph, Sharding(TP, True, own=tuple(splits.items())), recompute_names
    )
    for names in (OF_GPT, ("attention", "fc2"), ("norm1", "attention_out", "fc1")):
        copies = HostCopies(CPU)
        recipes = Recipes(on_host=HostOffload(names, graph, recompute_names, copies))
        layer = build_layer(GPT, training, LayerKind.BLOCK, 1, 0, CPU)
        place_layer(layer, operators, Axes(tp=mesh), "block0", recipes)
        layer = recomputed(layer, recompute_names, "block0", recipes)

        out = layer(
            DTensor.from_local(
                torch.randn(TP, 16 // TP, 32, requires_grad=True),
                mesh,
                (Shard(1),),
                run_check=False,
            )
        )
        out.to_local().sum().backward()

        assert copies.out_bytes == copies.back_bytes == sum(priced[name] for name in names), names


def test_the_device_holds_what_two_blocks_sent_at_most():
    """Activations of at most two blocks are on the device.

    In the forward pass a block's stay until the next block is through; in the backward pass the
    block before fetches ahead.
    """
    training, graph = _graph(GPT)
    copies, seen = HostCopies(CPU), []
    blocks = [
        recomputed(
            build_layer(GPT, training, LayerKind.BLOCK, i, 0, CPU),
            (),
            f"block{i}",
            Recipes(on_host=HostOffload(OF_GPT, graph, (), copies)),
        )
        for i in range(4)
    ]
    block_bytes = sum(host_bytes_by_operator(graph, Sharding()).values())
    x = torch.randn(2, 16, 32, requires_grad=True)
    for block in blocks:
        x = block(x)
        assert sum(tensor.nbytes for tensor, _ in copies._unsettled._on_the_way) == block_bytes
        # after the hook of the flight: the block's backward pass begins
        x.register_hook(lambda _: seen.append((copies.back_bytes, copies._unsettled)))

    x.sum().backward()

    assert copies.out_bytes == 4 * block_bytes
    assert seen == [
        (2 * block_bytes, None),
        (3 * block_bytes, None),
        (4 * block_bytes, None),
        (4 * block_bytes, None),
    ]


def test_what_was_kept_leaves_the_device_with_its_last_reader():
    training, graph = _graph(GPT)
    copies, held = HostCopies(CPU), []
    recipes = Recipes(on_host=HostOffload(("fc2",), graph, (), copies))
    block = recomputed(build_layer(GPT, training, LayerKind.BLOCK, 1, 0, CPU), (), "block", recipes)
    block.activation.register_forward_hook(
        lambda _, args, out: held.append(StorageWeakRef(out.untyped_storage()))
    )

    out = block(torch.randn(2, 16, 32, requires_grad=True))
    before = held[0].expired()
    copies.settle()

    assert (before, held[0].expired()) == (False, True)
    out.sum().backward()


KEEP = ("norm1", "attention", "residual1", "fc2")
CASES = {
    1: [
        (model, m, recompute)
        for model in ("gpt-tiny", "llama")
        for m in (1, 4)
        for recompute in ("none", "selective")
    ],
    2: [
        ("gpt-tiny", 4, "selective"),
        ("gpt-tiny", 1, "none"),
        ("llama", 4, "none"),
        ("llama", 1, "selective"),
    ],
    4: [("gpt-tiny", 2, "selective"), ("llama", 2, "none")],
}


def _estimated(model: str, num_micro_batches: int, recompute: str, *, tp: int) -> Plan:
    """A plan for CPUs, where four tensor-parallel ranks are a grid; gpt-tiny has dropout."""
    training = TrainingSpec(
        global_batch_size=4, seq_length=16, precision="fp32", stack=load_stack("parplan")
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=1, tp=tp, tp_rows=tp // 2 if tp == 4 else 1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=4 // num_micro_batches,
        num_micro_batches=num_micro_batches,
        sequence_parallel=tp == 2,
    )
    return estimate_plan(
        load_model(model).spec if model == "gpt-tiny" else LLAMA,
        with_gpus(load_cluster("cpu"), tp),
        training,
        layout,
        recompute=Recompute(recompute),
        keep_on_host=KEEP,
    )


def _copied(plans: list[Plan], world: int) -> list[list[tuple[int, int]]]:
    """By rank and plan, the bytes that a step sent to the host, and that came back."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(world, folder, plans), nprocs=world, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]


PLAIN = (("gpt-tiny", 4, "selective"), ("llama", 4, "none"))


@cache
def _counted(tp: int, *, plain: bool) -> dict[tuple[str, int, str], list[tuple[int, int]]]:
    """Returns by case what each rank copied; the plain cases and the others are one world each."""
    cases = [case for case in CASES[tp] if (case in PLAIN) is plain]
    by_rank = _copied([_estimated(*case, tp=tp) for case in cases], tp)
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def _rank(rank: int, world: int, folder: str, plans: list[Plan]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world
    )
    torch.save([_of_a_step(plan) for plan in plans], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _of_a_step(plan: Plan) -> tuple[int, int]:
    validate(plan)
    trainer = build_trainer(plan, Options(), CPU)
    trainer.gradients(0)
    return trainer.copied_bytes


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("tp", "case"),
    [
        pytest.param(
            tp,
            case,
            id=f"tp{tp}-{'-'.join(map(str, case))}",
            marks=() if case in PLAIN else pytest.mark.slow,
        )
        for tp, cases in CASES.items()
        for case in cases
    ],
)
def test_a_step_copies_the_predicted_bytes(case, tp):
    today = reprice(_estimated(*case, tp=tp))
    predicted = copied_bytes(today.strategy, 0, today.price_cache)

    assert predicted > 0
    assert _counted(tp, plain=case in PLAIN)[case] == [(predicted, predicted)] * tp
    assert today.plan.predicted.memory_gib[0].host == pytest.approx(
        predicted / case[1] / GIB, abs=1e-4
    )


SCHEDULES = {
    Schedule.GPIPE: 1,
    Schedule.ONE_F_ONE_B: 1,
    Schedule.INTERLEAVED: 2,
    Schedule.ZBV: 2,
    Schedule.EARLY_RECOMPUTE: 1,
    Schedule.SCP: 1,
}


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_step_of_any_schedule_copies_the_predicted_bytes_on_every_rank():
    plans = []
    for schedule, chunks in SCHEDULES.items():
        for model, recompute_names in ((GPT, ()), (LLAMA, ("norm1", "activation")), (GPT, "full")):
            if not recompute_names or schedule is not Schedule.ZBV:
                plan = make_plan(
                    model,
                    pp=2,
                    num_micro_batches=4,
                    schedule=schedule,
                    virtual_stages=chunks,
                    recompute=recompute_names,
                )
                plans.append(nearest_legal(_keeping(plan, KEEP)) or _keeping(plan, KEEP))

    actual, today = _copied(plans, 2), [reprice(plan) for plan in plans]

    expected = [
        [(copied_bytes(repriced.strategy, rank, repriced.price_cache),) * 2 for repriced in today]
        for rank in range(2)
    ]
    assert actual == expected
    assert min(min(row) for row in expected) > (0, 0)


def _keeping(plan: Plan, names: tuple[str, ...]) -> Plan:
    return dataclasses.replace(
        plan,
        layer_plans={
            name: dataclasses.replace(
                layer_plan, keep_on_host=names if layer_plan.layer is LayerKind.BLOCK else ()
            )
            for name, layer_plan in plan.layer_plans.items()
        },
    )


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_blocks_in_chunks_send_activations_beside_their_states(alone):
    """The loss after an update does not change.

    One block has all its states on the host, one only the optimizer's.
    """
    plan = _estimated("gpt-tiny", 4, "none", tp=1)
    chunked = estimate_plan(
        plan.model,
        plan.cluster,
        plan.training,
        layout_of(plan),
        keep_on_host=KEEP,
        chunks=ChunkRequest(host_blocks=1, optimizer_blocks=1, device_bytes=8 * 2**20),
    )
    validate(chunked)
    today = reprice(chunked)

    trainers = [build_trainer(variant, Options(steps=2), CPU) for variant in (chunked, plan)]
    losses = []
    for trainer in trainers:
        torch.manual_seed(0)  # of dropout
        losses.append([result.loss for result in trainer.run()])

    assert today.plan == chunked
    assert trainers[0].copied_bytes == (2 * copied_bytes(today.strategy, 0, today.price_cache),) * 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            make_plan(MIXTRAL), "keep_on_host names fc1 and not router", id="half-of-a-mixture"
        ),
        pytest.param(
            make_plan(GPT), "keep_on_host: it names fc3, the layer has norm1", id="not-there"
        ),
    ],
)
def test_lists_that_mean_nothing_are_refused(plan, message):
    names = ("norm1", "fc1") if plan.model is MIXTRAL else ("fc1", "fc3")
    changed = dataclasses.replace(plan.layer_plans["block-0"], keep_on_host=names)
    plan = dataclasses.replace(plan, layer_plans={**plan.layer_plans, "block-0": changed})

    _, refusal = next(refusals(plan))

    assert message in refusal.problem
    nearest = nearest_legal(plan)
    assert nearest is not None
    assert nearest.layer_plans["block-0"].keep_on_host == names[:1]


def test_the_experts_of_a_mixture_send_what_they_keep_and_train_as_before():
    names = ("router", "choice", "fc1", "activation", "fc2", "combine")
    training, graph = _graph(MIXTRAL)

    copies, gradients = _passed(MIXTRAL, training, graph, (), names)
    _, expected = _passed(MIXTRAL, training, graph, (), None)

    assert copies.out_bytes == copies.back_bytes > 0
    assert all(
        torch.equal(gradient, reference)
        for gradient, reference in zip(gradients, expected, strict=True)
    )
