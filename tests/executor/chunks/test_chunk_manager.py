"""The chunk manager on one rank: chunked blocks against plain modules, and wrong schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parplan.costmodels.chunks.chunk_layout import SizedTensor, block_tensors, pack
from parplan.costmodels.chunks.chunk_operations import (
    BlockPass,
    ChunkAction,
    ChunkedBlocks,
    ChunkOp,
    RankChunks,
)
from parplan.costmodels.chunks.chunk_states import TransitionError
from parplan.costmodels.host.state_location import StateLocation
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.actions import ActionKind
from parplan.executor.chunks.chunk_buffers import BudgetError
from parplan.executor.chunks.chunk_manager import ChunkManager, OrderError
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.models.transformer_layers import build_layer
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from tests.helpers.executor_plans import GPT, LLAMA

MODEL = replace(GPT, num_layers=4)
TRAINING = TrainingSpec(global_batch_size=4, seq_length=16, precision=Precision.FP32, stack=NEUTRAL)
CPU = torch.device("cpu")
CHUNK = 4000
AMPLE = 10**8


def group(
    home: StateLocation, blocks: tuple[int, ...], chunk_elements: int = CHUNK, model=MODEL
) -> ChunkedBlocks:
    """`blocks` of `model` packed into chunks that end anywhere in a block."""
    tensors_of_block = block_tensors(build_graph(model, TRAINING, 1).block, Sharding())
    tensors = tuple(
        SizedTensor(f"block{block}.{tensor.name}", tensor.elements)
        for block in blocks
        for tensor in tensors_of_block
    )
    counts = (len(tensors_of_block),) * len(blocks)
    chunk_layout = pack(tensors, chunk_elements, counts=counts)
    return ChunkedBlocks(home=home, blocks=blocks, chunk_layout=chunk_layout)


def users(groups: tuple[ChunkedBlocks, ...]) -> dict[tuple[int, int], set[int]]:
    """By (group, chunk) the blocks that have a tensor in it."""
    actual: dict[tuple[int, int], set[int]] = {}
    for index, each in enumerate(groups):
        for tensor, chunk in zip(
            each.chunk_layout.tensors, each.chunk_layout.group_of, strict=True
        ):
            actual.setdefault((index, chunk), set()).add(
                int(tensor.name.removeprefix("block").split(".")[0])
            )
    return actual


def nothing_stays(
    groups: tuple[ChunkedBlocks, ...], micro_batches: int, device_bytes: int = AMPLE
) -> RankChunks:
    """Runs all forward passes before the backward pass of each micro-batch.

    HOST chunks are fetched for a block and dropped behind it.
    """
    blocks, of = range(MODEL.num_layers), users(groups)
    moments = []
    for index in range(micro_batches):
        for work, order in ((ActionKind.FORWARD, blocks), (ActionKind.BACKWARD, reversed(blocks))):
            for block in order:
                host = [
                    key
                    for key, numbers in of.items()
                    if block in numbers and groups[key[0]].home is StateLocation.HOST
                ]
                sent = [
                    key for key in host if work is ActionKind.BACKWARD and block == min(of[key])
                ]
                moments.append(
                    BlockPass(
                        work=work,
                        stage=0,
                        micro_batch=index,
                        block=block,
                        device_bytes=device_bytes,
                        chunk_bytes=device_bytes,
                        before=tuple(ChunkOp(ChunkAction.FETCH, *key, 4 * CHUNK) for key in host),
                        after=(
                            *(ChunkOp(ChunkAction.SEND, *key, 4 * CHUNK) for key in sent),
                            *(ChunkOp(ChunkAction.DROP, *key, 0) for key in host),
                        ),
                    )
                )
    apart = [key for key in of if groups[key[0]].home is StateLocation.OPTIMIZER]
    closing = (
        *(ChunkOp(ChunkAction.SEND, *key, 4 * CHUNK) for key in apart),
        *(ChunkOp(ChunkAction.RETURN, *key, 4 * CHUNK) for key in apart),
    )
    return RankChunks(
        groups=groups,
        moments=tuple(moments),
        closing=closing,
        in_parameters=False,
        device_bytes=device_bytes,
        smallest_bytes=0,
    )


def plain_blocks(model=MODEL, recompute: tuple[str, ...] = ()) -> list[nn.Module]:
    return [
        recomputed(
            build_layer(model, TRAINING, LayerKind.BLOCK, 1 + i, 7, CPU), recompute, f"block{i}"
        )
        for i in range(model.num_layers)
    ]


def managed_blocks(
    schedule: RankChunks, model=MODEL, recompute: tuple[str, ...] = ()
) -> tuple[list[nn.Module], ChunkManager]:
    manager, actual = ChunkManager(schedule, TRAINING, CPU), []
    for i in range(model.num_layers):
        block = build_layer(model, TRAINING, LayerKind.BLOCK, 1 + i, 7, CPU)
        manager.take(i, block)
        actual.append(recomputed(block, recompute, f"block{i}"))
        manager.watch(i, actual[-1])
    manager.built()
    return actual, manager


def inputs(micro_batches: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(micro_batches):
        yield torch.randn(2, 16, MODEL.hidden_size, generator=generator, requires_grad=True)


def step(
    blocks: list[nn.Module], micro_batches: int, manager: ChunkManager | None = None
) -> list[Tensor]:
    """Forward and backward of every micro-batch; outputs and input gradients."""
    actual = []
    if manager is not None:
        manager.begin_step()
    for index, x in enumerate(inputs(micro_batches)):
        torch.manual_seed(index)
        y = x * 1.0
        if manager is None:
            for block in blocks:
                y = block(y)
            y.square().mean().backward()
        else:
            with manager.action("F", 0, index):
                for block in blocks:
                    y = block(y)
            with manager.action("B", 0, index):
                y.square().mean().backward()
        actual += [y.detach(), x.grad]
    if manager is not None:
        manager.end_step(None)
    return actual


HOMES = {
    "all-host": (group(StateLocation.HOST, (0, 1, 2, 3)),),
    "all-device": (group(StateLocation.DEVICE, (0, 1, 2, 3)),),
    "all-optimizer": (group(StateLocation.OPTIMIZER, (0, 1, 2, 3)),),
    "mixed": (
        group(StateLocation.DEVICE, (0,)),
        group(StateLocation.OPTIMIZER, (1,)),
        group(StateLocation.HOST, (2, 3)),
    ),
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("homes", HOMES)
def test_gradients_are_those_of_plain_blocks_to_the_bit(homes, micro_batches):
    plain = plain_blocks()
    expected = step(plain, micro_batches)
    blocks, manager = managed_blocks(nothing_stays(HOMES[homes], micro_batches))

    for _ in range(2):  # a second step starts from nothing
        chunk_step = step(blocks, micro_batches, manager)

        assert all(torch.equal(a, b) for a, b in zip(chunk_step, expected, strict=True))
        gradients = manager.gradients()
        assert len(gradients) == sum(1 for block in plain for _ in block.parameters())
        for i, block in enumerate(plain):
            for name, parameter in block.named_parameters():
                assert torch.equal(gradients[f"block{i}.{name}"], parameter.grad), name
        manager.end_update()


RECOMPUTED = {
    "attention": ("attention",),
    "operators": ("norm1", "qkv", "fc1", "activation"),
    "whole": tuple(operator.name for operator in build_graph(MODEL, TRAINING, 1).block.operators),
}


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_recomputed_reads_the_parameters_that_came_back(recompute, dropout):
    model, names = replace(MODEL, dropout=dropout), RECOMPUTED[recompute]
    if dropout and recompute == "operators":
        names = ("qkv", "fc1", "activation")
    plain = plain_blocks(model, names)
    expected = step(plain, 2)
    blocks, manager = managed_blocks(nothing_stays(HOMES["mixed"], 2), model, names)

    assert all(torch.equal(a, b) for a, b in zip(step(blocks, 2, manager), expected, strict=True))
    gradients = manager.gradients()
    for i, block in enumerate(plain):
        for name, parameter in block.named_parameters():
            assert torch.equal(
                gradients[f"block{i}.{name.replace('_checkpoint_wrapped_module.', '')}"],
                parameter.grad,
            ), name


def test_the_bytes_that_moved_are_those_of_the_schedule():
    schedule = nothing_stays(HOMES["mixed"], 2)
    blocks, manager = managed_blocks(schedule)

    step(blocks, 2, manager)
    manager.end_update()

    assert (manager.counts.in_bytes, manager.counts.out_bytes) == (
        schedule.in_bytes,
        schedule.out_bytes,
    )
    assert manager.counts.in_bytes == 4 * CHUNK * manager.counts.in_calls
    assert manager.counts.gathers == manager.counts.reduces == 0


def test_what_the_update_writes_on_the_host_is_what_the_next_step_computes_with():
    plain = plain_blocks()
    blocks, manager = managed_blocks(nothing_stays(HOMES["mixed"], 1))
    for _ in range(2):
        for block in plain:
            block.zero_grad()
        expected, chunk_step = step(plain, 1), step(blocks, 1, manager)
        assert all(torch.equal(a, b) for a, b in zip(chunk_step, expected, strict=True))
        with torch.no_grad():
            for parameter in (parameter for block in plain for parameter in block.parameters()):
                parameter.add_(parameter.grad, alpha=-0.5)
            for chunk in manager.chunks:
                chunk.master.add_(chunk.gradient, alpha=-0.5)
        manager.end_update()


def test_a_schedule_that_drops_too_early_gives_an_error_and_not_numbers():
    schedule = nothing_stays(HOMES["all-host"], 1)
    first = replace(schedule.moments[0], before=())
    blocks, manager = managed_blocks(replace(schedule, moments=(first, *schedule.moments[1:])))

    with pytest.raises(
        TransitionError, match="parameters of block 0: they are free and cannot become compute"
    ):
        step(blocks, 1, manager)


def test_passes_in_another_order_than_the_schedules_are_refused():
    blocks, manager = managed_blocks(nothing_stays(HOMES["mixed"], 1))
    manager.begin_step()

    with (
        manager.action("F", 0, 0),
        pytest.raises(
            OrderError, match=r"pass 0 of the step is 0F0 of block 1, .* has 0F0 of block 0"
        ),
    ):
        blocks[1](next(inputs(1)))


def test_a_step_that_ends_early_is_refused():
    _, manager = managed_blocks(nothing_stays(HOMES["mixed"], 1))
    manager.begin_step()

    with pytest.raises(OrderError, match="after 0 of 8 passes"):
        manager.end_step(None)


def test_a_budget_below_what_really_happens_is_an_error_with_the_numbers():
    ample = nothing_stays(HOMES["all-host"], 1)
    blocks, manager = managed_blocks(ample)
    step(blocks, 1, manager)
    least = manager.ledger.most_bytes

    exact, manager = managed_blocks(replace(ample, device_bytes=least))
    step(exact, 1, manager)
    short, manager = managed_blocks(replace(ample, device_bytes=least - 1))
    with pytest.raises(BudgetError, match=rf"the budget is {least - 1} bytes"):
        step(short, 1, manager)


def test_chunks_that_stay_on_the_device_do_not_even_fit_at_the_build():
    with pytest.raises(
        BudgetError, match=r"beside \d+ bytes \(.*chunks.*\), the budget is 63999 bytes"
    ):
        managed_blocks(nothing_stays(HOMES["all-device"], 1, 63_999))


def test_rotary_gated_blocks_without_biases_are_laid_out_too():
    blocks = tuple(range(LLAMA.num_layers))
    _, manager = managed_blocks(
        nothing_stays((group(StateLocation.HOST, blocks, model=LLAMA),), 1), LLAMA
    )

    whole = build_layer(LLAMA, TRAINING, LayerKind.BLOCK, 1, 7, CPU)
    values = manager.values()
    assert all(
        torch.equal(values[f"block0.{name}"], parameter)
        for name, parameter in whole.named_parameters()
    )
