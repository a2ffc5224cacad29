"""Effects of a software stack on prices: slow kernels, the host, overlap, transfers, networks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.hiding import CONTENTION
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.kernels import MISALIGNED, misaligned
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.stage_costs import time_between
from parplan.costmodels.strategy import ParallelLayout
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import (
    cluster_names,
    load_cluster,
    load_stack,
    stack_names,
    with_gpus,
)
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import FlashSpeed
from parplan.profiles.machines.stack_terms import Term, Terms
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import NEUTRAL, AvailableKernel, FlashKernel, Stack

GPT = load_model("gpt-22b").spec
NO_HOST = replace(NEUTRAL, host_operator_s=0.0)
TRAINING = TrainingSpec(global_batch_size=64, seq_length=2048, stack=NO_HOST)
CLUSTER = with_gpus(load_cluster("a100-80gb"), 32)
MACHINE = machine_for(CLUSTER, Terms())
TP8 = Sharding(8)


def block_time(stack=NO_HOST, sharding=TP8, machine=MACHINE, batch=4, recompute=()):
    training = replace(TRAINING, stack=stack)
    return price_operators(
        build_graph(GPT, training, batch).block, sharding, machine, training
    ).time(recompute)


def operator(
    name, *, training=TRAINING, machine=MACHINE, model=GPT, kind=LayerKind.BLOCK, sharding=TP8
):
    return operator_time(
        build_graph(model, training, 4).layer_class(kind).operator(name),
        sharding,
        machine,
        training,
    )


def term(value):
    return Term(value=value, low=0.0, high=1e13, unit="", rows=1, without={"held": 2 * value})


@pytest.mark.parametrize("name", stack_names())
def test_every_packaged_stack_reads_names_its_source_and_keeps_its_terms_within_their_bounds(name):
    stack = load_stack(name)

    assert stack.name == name
    assert stack.source
    assert stack.kernel_slowdown >= 1.0


def test_an_unknown_stack_suggests_the_nearest():
    with pytest.raises(ConfigError) as error:
        load_stack("megatron-cor")

    assert error.value.hint == "did you mean 'megatron-core'?"


def test_kernels_take_longer_by_the_factor_of_the_stack_and_communication_does_not():
    alone, slower = block_time(), block_time(replace(NO_HOST, kernel_slowdown=1.2))

    assert slower.forward.value_s == pytest.approx(1.2 * alone.forward.value_s)
    assert slower.backward.value_s == pytest.approx(1.2 * alone.backward.value_s)
    assert slower.tp_forward == alone.tp_forward


def test_a_layer_is_as_slow_as_the_host_launches_it_and_never_slower_than_both():
    host = replace(NEUTRAL, host_operator_s=1.0)
    bound = block_time(host)
    operators = len(build_graph(GPT, TRAINING, 4).block.operators)

    assert bound.forward_s == pytest.approx(
        operators + 2
    )  # a reduction after each row-parallel product
    assert bound.backward_s == pytest.approx(
        operators + 4 + 2
    )  # both gradients of four products, two reductions
    assert block_time(host, recompute=("norm1", "activation")).recompute_s == pytest.approx(2.0)


def test_a_host_that_keeps_up_costs_nothing():
    assert block_time(replace(NEUTRAL, host_operator_s=1e-9)) == block_time()


def test_input_gradients_are_reduced_under_the_weight_gradient_where_the_stack_does_so():
    waiting, hidden = block_time(), block_time(replace(NO_HOST, async_tensor_parallel=True))

    assert hidden.tp_forward == waiting.tp_forward
    assert (
        CONTENTION * waiting.tp_backward.value_s
        <= hidden.tp_backward.value_s
        < 0.5 * waiting.tp_backward.value_s
    )


def test_across_nodes_only_what_the_weight_gradient_takes_is_hidden():
    slow = machine_for(replace(CLUSTER, nic=replace(CLUSTER.nic, bytes_per_s=1e9)), Terms())
    waiting = block_time(NO_HOST, Sharding(16), slow)
    hidden = block_time(replace(NO_HOST, async_tensor_parallel=True), Sharding(16), slow)
    saved_s = waiting.tp_backward.value_s - hidden.tp_backward.value_s

    assert 0 < saved_s < hidden.backward.value_s / 2 < waiting.tp_backward.value_s


def test_sequence_parallel_collectives_run_under_their_products_where_the_stack_does_so():
    sharding = Sharding(8, True)
    waiting, hidden = (
        block_time(sharding=sharding),
        block_time(replace(NO_HOST, overlap_tensor_parallel=True), sharding=sharding),
    )

    for before, after in (
        (waiting.tp_forward, hidden.tp_forward),
        (waiting.tp_backward, hidden.tp_backward),
    ):
        assert CONTENTION * before.value_s <= after.value_s < 0.6 * before.value_s
    assert hidden.forward == waiting.forward
    assert (
        block_time(replace(NO_HOST, overlap_tensor_parallel=True)) == block_time()
    )  # without sequence parallelism nothing changes


@pytest.mark.parametrize(("virtual_stages", "share"), [(1, 1.0), (2, CONTENTION)])
def test_transfers_are_hidden_under_the_interleaved_schedule_only(virtual_stages, share):
    schedule = Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B
    layout = ParallelLayout(
        mesh=Mesh(pp=4, dp=1, tp=8),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=4,
        num_micro_batches=8,
        sequence_parallel=True,
    )

    def seconds(stack, machine=MACHINE):
        return time_between(
            0, 1, layout, PriceCache(GPT, replace(TRAINING, stack=stack), machine)
        ).value_s

    hidden, measured = (
        replace(NO_HOST, overlap_transfers=True),
        replace(MACHINE, profile=replace(MACHINE.profile, contention=0.5)),
    )
    assert seconds(hidden) == pytest.approx(share * seconds(NO_HOST))
    assert seconds(hidden, measured) == pytest.approx(
        (share if share == 1.0 else 0.5) * seconds(NO_HOST)
    )


def transfer(stack, *, sequence_parallel=False, level=1):
    price_cache = PriceCache(GPT, replace(TRAINING, stack=stack), MACHINE)
    return price_cache.transfer(
        0, 4, Sharding(8, sequence_parallel), level=level, sharing=8
    ).value_s


def test_tensors_that_are_sent_as_one_operation_have_one_latency(monkeypatch):
    boundary = build_graph(GPT, TRAINING, 4).block.input
    one, paired = transfer(NO_HOST), transfer(replace(NO_HOST, paired_exchanges=True))
    assert paired == one  # a described model sends one tensor

    monkeypatch.setattr(PriceCache, "crossing_tensors", lambda *_: (boundary,) * 3)
    three, together = transfer(NO_HOST), transfer(replace(NO_HOST, paired_exchanges=True))
    price_cache = PriceCache(GPT, replace(TRAINING, stack=NO_HOST), MACHINE)
    as_one = price_cache.message(3 * boundary.num_bytes, level=1, sharing=8).value_s
    assert three == pytest.approx(3 * one)
    assert together == as_one
    assert together < three


def test_partitioned_transfers_send_a_part_a_rank_and_gather_it_inside_the_node():
    boundary = build_graph(GPT, TRAINING, 4).block.input.num_bytes
    whole, parted = transfer(NO_HOST), transfer(replace(NO_HOST, partitioned_transfers=True))
    gathered = collective_time(
        Collective.ALL_GATHER, boundary, place(Mesh(pp=1, dp=1, tp=8), Axis.TP, 8), MACHINE
    ).value_s

    assert parted - gathered == pytest.approx(whole / 8, rel=0.01)
    assert transfer(NO_HOST, sequence_parallel=True) == pytest.approx(
        parted - gathered
    )  # already a part, nothing to gather


def test_a_stack_whose_transfers_reach_a_share_of_the_link_takes_as_much_longer():
    whole = transfer(NO_HOST, level=0)

    assert transfer(replace(NO_HOST, transfer_share=0.02), level=0) == pytest.approx(
        50 * whole, rel=0.05
    )


def test_input_gradients_are_reduce_scattered_under_the_weight_gradient_where_a_stack_does_so():
    parted = Sharding(8, sequence_parallel=True)

    def backward(stack, sharding=parted):
        return block_time(stack, sharding).tp_backward.value_s

    hidden = replace(NO_HOST, async_reduce_scatter=True)
    assert backward(hidden) < backward(NO_HOST)
    assert block_time(hidden, parted).tp_forward == block_time(NO_HOST, parted).tp_forward
    assert backward(hidden, TP8) == backward(NO_HOST, TP8)  # an all-reduce


def test_an_older_attention_kernel_is_as_much_slower_as_the_device_says_and_an_unknown_one_is_not():
    compute = replace(
        MACHINE.profile.compute,
        flash_kernels={
            FlashKernel.FLASH1: FlashSpeed(forward=0.5, backward=0.25, source="made up")
        },
    )
    machine = replace(MACHINE, profile=replace(MACHINE.profile, compute=compute))

    def attention(kernel):
        stack = replace(NO_HOST, flash_kernels=(AvailableKernel(kernel=kernel),))
        return operator("attention", machine=machine, training=replace(TRAINING, stack=stack))

    new, old = attention(FlashKernel.FLASH2), attention(FlashKernel.FLASH1)
    assert old.forward.value_s == pytest.approx(2 * new.forward.value_s)
    assert old.backward.value_s == pytest.approx(4 * new.backward.value_s)
    assert new == operator("attention", machine=machine)


@pytest.mark.parametrize(
    ("kernel", "slower"),
    [
        pytest.param(
            FlashKernel.FLASH2, 2 * 108 / 112, id="flash2"
        ),  # 14 blocks of each of 8 heads
        pytest.param(FlashKernel.CUDNN, 1.0, id="cudnn"),
    ],
)
def test_a_deterministic_stack_slows_the_backward_pass_of_flash_attention_2_alone(kernel, slower):
    def attention(deterministic):
        available = (AvailableKernel(kernel=kernel),)
        stack = replace(NO_HOST, flash_kernels=available, deterministic=deterministic)
        return operator(
            "attention",
            training=replace(TRAINING, stack=stack),
            sharding=Sharding(GPT.num_heads // 2),
        )

    usual, repeatable = attention(False), attention(True)
    assert repeatable.forward == usual.forward
    assert repeatable.backward.value_s == pytest.approx(slower * usual.backward.value_s)


@pytest.mark.parametrize(
    ("stack", "device", "kernel"),
    [
        ("megatron-core", "h100-80gb", "cudnn"),
        ("megatron-core", "a100-80gb", "flash2"),
        ("megatron-core", "l4-24gb", "flash2"),
        ("megatron-core", "v100-32gb", None),
        ("torchtitan", "b200-180gb", "cudnn"),
        ("torchtitan", "h100-80gb", "flash2"),
        ("torchtitan", "v100-32gb", "efficient"),
        ("parplan", "v100-16gb", "efficient"),
        ("fsdp1", "a100-80gb", "flash1"),
        ("nanotron", "v100-32gb", None),
    ],
)
def test_a_device_gets_the_newest_fused_kernel_of_the_stack_that_it_can_run(stack, device, kernel):
    capability = load_cluster(device).device.compute_capability

    assert load_stack(stack).flash_kernel_on(capability) == kernel


def test_where_the_stack_has_no_fused_kernel_for_the_device_it_runs_un_fused_attention():
    stack = load_stack("megatron-core")

    assert (stack.attention_on(7.0), stack.attention_on(8.0), stack.attention_on(None)) == (
        "unfused",
        "flash",
        "flash",
    )


def test_fused_attention_that_the_device_cannot_run_is_an_error():
    machine = machine_for(with_gpus(load_cluster("v100-32gb"), 8), Terms())

    with pytest.raises(
        ConfigError,
        match=r"no fused attention for v100-32gb of compute capability 7\.0 .*flash2 from 8",
    ) as error:
        PriceCache(
            GPT, replace(TRAINING, precision="fp16", stack=load_stack("megatron-core")), machine
        )
    assert error.value.hint == "use --attention unfused"


@pytest.mark.parametrize("name", cluster_names())
def test_every_packaged_gpu_says_its_compute_capability(name):
    device = load_cluster(name).device

    has_cuda = not device.name.startswith(("cpu", "mi", "gaudi"))
    assert (device.compute_capability is not None) is has_cuda


def test_gradients_that_another_kernel_adds_cost_their_reads_and_writes():
    fused = replace(TRAINING, stack=replace(NO_HOST, fused_accumulation=True))
    apart = replace(TRAINING, stack=replace(NO_HOST, fused_accumulation=False))
    added_s = (
        operator("fc1", training=apart).backward.value_s
        - operator("fc1", training=fused).backward.value_s
    )
    weight = TP8.parameter_elements(build_graph(GPT, TRAINING, 4).block.operator("fc1"))

    assert operator("fc1", training=apart).forward == operator("fc1", training=fused).forward
    assert (
        0 < added_s < 2 * 10 * weight / CLUSTER.device.memory_bytes_per_s
    )  # 2 bytes read, 4 read and 4 written


def test_a_stack_may_share_the_terms_of_another():
    terms = Terms(stacks={"elder": {"kernel_slowdown": term(1.3)}})

    assert terms.of_stack(Stack(name="younger", terms_of="elder")).kernel_slowdown == 1.3
    assert terms.of_stack(Stack(name="younger")).kernel_slowdown == 1.0


def test_a_vocabulary_with_an_odd_part_slows_the_head():
    even = replace(GPT, vocab_size=50256, vocab_multiple=1)
    odd = replace(GPT, vocab_size=50257, vocab_multiple=1)

    def head(model):
        return operator(
            "lm_head", model=model, kind=LayerKind.HEAD, sharding=Sharding()
        ).forward.value_s

    assert head(odd) == pytest.approx(MISALIGNED[2] * head(even), rel=0.01)
    assert [misaligned(n) for n in (16, 32, 8, 4, 2, 1)] == [
        1.0,
        1.0,
        MISALIGNED[8],
        MISALIGNED[4],
        MISALIGNED[2],
        MISALIGNED[2],
    ]


def test_fp8_products_are_faster_than_16_bit_ones_but_not_twice_and_the_head_stays():
    machine = machine_for(with_gpus(load_cluster("h100-80gb"), 8), Terms())
    fp8 = replace(TRAINING, products=ProductFormat.FP8_CURRENT)

    def times(name, kind=LayerKind.BLOCK):
        return (
            operator(name, training=training, machine=machine, kind=kind, sharding=Sharding())
            for training in (TRAINING, fp8)
        )

    for name in ("qkv", "fc1", "fc2"):
        before, after = times(name)
        assert before.forward.value_s / 2 < after.forward.value_s < before.forward.value_s
        assert before.backward.value_s / 2 < after.backward.value_s < before.backward.value_s
    before, after = times("lm_head", LayerKind.HEAD)
    assert before == after


def test_a_device_without_fp8_says_so():
    with pytest.raises(ConfigError, match="a100-80gb has no fp8 arithmetic"):
        operator("qkv", training=replace(TRAINING, products=ProductFormat.FP8_CURRENT))


def test_a_networks_fitted_share_replaces_that_of_its_device():
    weak = replace(CLUSTER, nic=replace(CLUSTER.nic, name="weak"))
    terms = Terms(links={"weak": {"nic_share": term(0.1)}})
    share = MACHINE.profile.inter.nic_share

    assert machine_for(CLUSTER, terms).profile is MACHINE.profile
    slow = machine_for(weak, terms)
    across = place(Mesh(pp=1, dp=32, tp=1), Axis.DP, 8)
    n_bytes = 10**9
    assert slow.profile.inter.nic_share == 0.1
    assert collective_time(Collective.ALL_REDUCE, n_bytes, across, slow).value_s == pytest.approx(
        share / 0.1 * collective_time(Collective.ALL_REDUCE, n_bytes, across, MACHINE).value_s,
        rel=0.01,
    )


def test_a_source_that_is_held_out_reads_the_terms_of_the_fit_without_it():
    terms = Terms(stacks={"neutral": {"kernel_slowdown": term(1.1)}})

    assert terms.of_stack(NEUTRAL).kernel_slowdown == 1.1
    assert terms.of_stack(NEUTRAL, "held").kernel_slowdown == 2.2
    assert terms.of_stack(NEUTRAL, "another").kernel_slowdown == 1.1


@pytest.mark.parametrize(
    "field",
    [
        {"kernel_slowdown": 0.5},
        {"host_operator_s": -1.0},
        {"transfer_share": 0.0},
        {"attention": "flush"},
    ],
)
def test_a_stack_with_an_impossible_term_is_an_error(field):
    with pytest.raises(ConfigError):
        Stack(**field)
