"""A profile measures each kernel and size that prices look up once, the informative cases first."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from parplan.costmodels.operators.compute import kernel_time
from parplan.costmodels.operators.kernels import StreamKernel
from parplan.costmodels.operators.operator_kernels import operator_kernels
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.calibration.operator_cases import operator_cases
from parplan.planner.calibration.profile_cases import (
    ProfiledWorkload,
    cases_of,
    default_workloads,
    layouts_of,
    machine_cases,
    micro_batch_sizes,
    step_shares,
    tensor_parallel_degrees,
    tiny_model,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.measurements import CaseFigures, CaseOutcome, Record, Timing
from parplan.profiles.machines.shipped_profiles import analytic_profile, machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import OperatorKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.profiler.fits.profile_fit import fit_compute
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import AttentionKernel

CPU, GPU = load_cluster("cpu"), load_cluster("a100-80gb")


def workload(name: str, precision: str = "bf16", **model) -> ProfiledWorkload:
    entry = load_model(name)
    attention = AttentionKernel(model.pop("attention", "flash"))
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size,
        seq_length=entry.seq_length,
        precision=Precision(precision),
        attention=attention,
        stack=load_stack("torchtitan"),
    )
    return ProfiledWorkload(model=replace(entry.spec, **model), training=training)


TINY = workload("gpt-tiny", "fp32")
WITHOUT_A_CASE = {"cast", "choice", "dispatch", "combine"}


def priced_points(profiled: ProfiledWorkload, size: int, sharding: Sharding):
    """Yields (curve, sizes) of every kernel of a model on one rank that a case could measure."""
    for layer in build_graph(profiled.model, profiled.training, size):
        for operator in layer.operators:
            kernels = operator_kernels(operator, sharding, profiled.training)
            for kernel in (*kernels.forward, *kernels.backward):
                if operator.kind is OperatorKind.EXPERTS or (
                    isinstance(kernel, StreamKernel) and kernel.name in WITHOUT_A_CASE
                ):
                    continue
                yield kernel.curve, kernel.sizes


@pytest.mark.parametrize(
    ("profiled", "cluster"),
    [
        pytest.param(TINY, CPU, id="gpt-tiny"),
        pytest.param(workload("gpt-tiny", "fp32", attention="unfused"), CPU, id="unfused"),
        pytest.param(workload("gpt-tiny", "fp32", dropout=0.0), CPU, id="without-dropout"),
        pytest.param(workload("gpt-2.5b"), GPU, id="gpt-2.5b"),
        pytest.param(workload("llama3-8b"), GPU, id="llama3-8b"),
        pytest.param(workload("mixtral-8x7b"), GPU, id="mixtral"),
    ],
)
def test_every_kernel_of_every_layout_is_a_point_of_a_case(profiled, cluster):
    points = {
        (timed_pass.curve, timed_pass.sizes)
        for case in cases_of([profiled], cluster)
        for timed_pass in case.passes
    }

    for size, sharding in layouts_of(profiled, cluster):
        assert set(priced_points(profiled, size, sharding)) <= points, (size, sharding)


def made_up_us(point) -> float:
    """Returns 1 us for every 1,000 of the product of the sizes and for each letter of the curve."""
    return len(point.curve) + math.prod(point.sizes) / 1000


def recorded(cases):
    for case in cases:
        times = {
            timed_pass.name: Timing(median_us=made_up_us(timed_pass), spread=0.0, repeats=5)
            for timed_pass in case.passes
            if timed_pass.curve
        }
        yield Record(case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(times=times))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profiled", "cluster"),
    [
        pytest.param(TINY, CPU, id="gpt-tiny"),
        pytest.param(
            workload("gpt-tiny", "fp32", attention="unfused"),
            CPU,
            id="unfused",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            workload("llama3-8b"),
            replace(GPU, gpus_per_node=2),
            id="llama3-8b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_profile_of_exactly_these_cases_prices_every_kernel_as_it_was_measured(profiled, cluster):
    compute = fit_compute(
        list(recorded(cases_of([profiled], cluster))), cluster, profiled.training.precision
    )
    machine = machine_for(
        replace(cluster, profile=replace(analytic_profile(cluster.device.name), compute=compute))
    )

    for size, sharding in layouts_of(profiled, cluster):
        for operator in (
            op
            for layer in build_graph(profiled.model, profiled.training, size)
            for op in layer.operators
        ):
            kernels = operator_kernels(operator, sharding, profiled.training)
            for kernel in (*kernels.forward, *kernels.backward):
                price = kernel_time(kernel, machine, profiled.training)
                assert price.kind is Kind.MEASURED, (kernel, size, sharding)
                assert price.value_s == pytest.approx(
                    getattr(kernel, "times", 1) * made_up_us(kernel) / 1e6, rel=1e-9
                )


def test_the_cases_of_a_block_by_hand():
    """gpt-tiny on one of two tensor parallel ranks.

    It has hidden 64, 4 heads of 16, ffn 256, sequence 64, micro-batch 2, fp32.
    """
    block = build_graph(TINY.model, TINY.training, 2).block

    cases = [
        case
        for operator in block.operators
        for case in operator_cases(operator, Sharding(2, True), TINY.model, TINY.training)
    ]

    keys = [case.key for case in cases]
    assert keys == [
        "layer_norm tokens=64 hidden=64 fp32",
        "linear m=128 n=96 k=64 bias=1 fp32",
        "bias_gradient tokens=128 width=96 fp32",
        "attention batch=2 heads=2 kv_heads=2 seq=64 head_dim=16 dropout=1 fp32",
        "linear m=128 n=64 k=32 bias=1 fp32",
        "bias_gradient tokens=128 width=64 fp32",
        "dropped_residual tokens=64 hidden=64 fp32",
        "layer_norm tokens=64 hidden=64 fp32",
        "linear m=128 n=128 k=64 bias=1 fp32",
        "bias_gradient tokens=128 width=128 fp32",
        "gelu tokens=128 width=128 fp32",
        "linear m=128 n=64 k=128 bias=1 fp32",
        "bias_gradient tokens=128 width=64 fp32",
        "dropped_residual tokens=64 hidden=64 fp32",
    ]
    qkv, norm = cases[1], cases[0]
    assert [(timed_pass.name, timed_pass.curve, timed_pass.sizes) for timed_pass in qkv.passes] == [
        ("forward", "forward", (128, 96, 64)),
        ("input_gradient", "input_gradient", (128, 64, 96)),
        ("weight_gradient", "weight_gradient", (64, 96, 128)),
    ]
    assert [
        (timed_pass.name, timed_pass.curve, timed_pass.sizes) for timed_pass in norm.passes
    ] == [  # read, written; then a gradient and the input read, one written
        ("forward", "layer_norm.forward", (2 * 64 * 64 * 4,)),
        ("backward", "layer_norm.backward", (3 * 64 * 64 * 4,)),
    ]


def test_key_value_heads_are_divided_with_their_groups():
    llama = workload("llama3-8b")
    operators = build_graph(llama.model, llama.training, 1).block.operators

    cases = {
        case.work: case
        for op in operators
        for case in operator_cases(op, Sharding(4), llama.model, llama.training)
    }

    assert (
        cases["attention"].key
        == "attention batch=1 heads=8 kv_heads=2 seq=8192 head_dim=128 dropout=0 bf16"
    )
    assert cases["rotary"].key == "rotary batch=1 seq=8192 heads=8 kv_heads=2 head_dim=128 bf16"
    assert cases["swiglu"].key == "swiglu tokens=8192 width=3584 bf16"


def test_un_fused_attention_is_its_products_its_softmax_and_its_dropout():
    profiled = workload("gpt-tiny", "fp32", attention="unfused")
    attention = next(
        op
        for op in build_graph(profiled.model, profiled.training, 2).block.operators
        if op.name == "attention"
    )

    assert [
        case.key
        for case in operator_cases(attention, Sharding(), profiled.model, profiled.training)
    ] == [
        "batched batch=8 m=64 n=64 k=16 fp32",
        "batched batch=8 m=64 n=16 k=64 fp32",
        "softmax batch=2 heads=4 seq=64 fp32",
        "dropout elements=32768 fp32",
    ]


def test_products_in_fp8_make_no_case():
    profiled = workload("llama3-8b")
    training = replace(profiled.training, products=ProductFormat.FP8_CURRENT)
    block = build_graph(profiled.model, training, 1).block

    cases = {
        case.work
        for op in block.operators
        for case in operator_cases(op, Sharding(), profiled.model, training)
    }

    assert "linear" not in cases
    assert "rms_norm" in cases


@pytest.mark.parametrize(
    ("names", "cluster", "precision", "least", "most"),
    [
        pytest.param(("gpt-tiny",), CPU, "fp32", 60, 95, id="tiny"),
        pytest.param(("gpt-2.5b",), GPU, "bf16", 100, 200, id="2.5B"),
        pytest.param(("gpt-1.5b", "llama3-8b"), GPU, "bf16", 120, 200, id="two"),
    ],
)
def test_there_are_as_many_cases_as_ten_minutes_have_room_for_and_none_twice(
    names, cluster, precision, least, most
):
    cases = cases_of([workload(name, precision) for name in names], cluster)

    assert least <= len(cases) <= most
    assert max(Counter(case.key for case in cases).values()) == 1
    assert (
        max(
            Counter(
                case.passes for case in cases if any(timed_pass.curve for timed_pass in case.passes)
            ).values()
        )
        == 1
    )
    assert cases == cases_of([workload(name, precision) for name in names], cluster)


def test_the_figures_of_the_machine_come_first_and_then_the_ends_of_what_takes_most():
    cases, shares = cases_of([TINY], CPU), step_shares(TINY, CPU)

    figures = machine_cases(CPU, "fp32")
    assert cases[: len(figures)] == figures
    assert max(shares, key=lambda key: shares[key]) == ("attention", "attention")
    ends = {
        case.size("batch") * case.size("heads") for case in cases[len(figures) : len(figures) + 2]
    }
    assert {case.work for case in cases[len(figures) : len(figures) + 2]} == {"attention"}
    assert ends == {2, 64}  # micro-batch 1 on a rank of two, 16 on one rank


@pytest.mark.parametrize("work", ["linear", "attention", "gelu", "adamw", "cross_entropy"])
def test_two_thirds_of_the_list_have_the_ends_of_what_the_whole_has(work):
    all_cases = cases_of([TINY], CPU)

    def ends(cases):
        bytes_or_flops = [
            timed_pass.sizes
            for case in cases
            if case.work == work
            for timed_pass in case.passes[:1]
        ]
        return [(min(sizes), max(sizes)) for sizes in zip(*bytes_or_flops, strict=True)]

    assert ends(all_cases[: 2 * len(all_cases) // 3]) == ends(all_cases)


def test_shares_of_a_step_are_one_together_and_the_products_of_a_large_model_most_of_it():
    shares = step_shares(workload("llama3-8b"), GPU)

    assert sum(shares.values()) == pytest.approx(1.0)
    assert sum(share for (_, work), share in shares.items() if work == "linear") > 0.6


def test_micro_batches_are_powers_of_two_that_fit_the_device():
    small = replace(GPU, device=replace(GPU.device, memory_bytes=GPU.device.memory_bytes // 4))

    assert micro_batch_sizes(workload("gpt-2.5b"), GPU) == (1, 2, 8, 16)
    assert micro_batch_sizes(workload("gpt-2.5b"), small)[-1] == 4
    assert micro_batch_sizes(workload("llama3-70b"), small) == (1,)
    assert micro_batch_sizes(TINY, CPU)[-1] == TINY.training.global_batch_size


def test_tensor_parallel_degrees_are_the_legal_ones_of_a_node():
    assert tensor_parallel_degrees(workload("llama3-8b").model, GPU) == (1, 2, 4, 8)
    assert tensor_parallel_degrees(workload("llama3-8b").model, with_gpus(GPU, 2)) == (1, 2)
    assert tensor_parallel_degrees(workload("gpt-1.5b").model, GPU) == (1,)  # 25 heads


def test_a_cpu_has_nothing_to_move_over_a_bus():
    assert {case.work for case in machine_cases(CPU, "fp32")} == {
        "launch",
        "allocator",
        "device_copy",
    }
    assert {case.work for case in machine_cases(GPU, "bf16")} == {
        "launch",
        "allocator",
        "device_copy",
        "transfer",
        "host_adam",
    }


def test_two_blocks_are_measured_a_tiny_one_and_the_models_own():
    blocks = [case.key for case in cases_of([workload("llama3-8b")], GPU) if case.work == "block"]

    assert blocks == [
        "block hidden=256 heads=2 kv_heads=1 head_dim=128 ffn=896 "
        "gated=1 rms=1 rotary=1 dropout=0 batch=1 seq=128 bf16",
        "block hidden=4096 heads=32 kv_heads=8 head_dim=128 ffn=14336 "
        "gated=1 rms=1 rotary=1 dropout=0 batch=2 seq=8192 bf16",
    ]
    assert not [case for case in cases_of([workload("mixtral-8x7b")], GPU) if case.work == "block"]


def test_the_operators_of_a_tiny_block_are_measured_beside_it():
    profiled = workload("llama3-8b")
    points = {
        (passes.curve, passes.sizes) for case in cases_of([profiled], GPU) for passes in case.passes
    }
    training = replace(profiled.training, seq_length=128)
    layer = build_graph(tiny_model(profiled.model), training, 1).block

    kernels = [operator_kernels(operator, Sharding(), training) for operator in layer.operators]

    assert {
        (kernel.curve, kernel.sizes)
        for passes in kernels
        for kernel in (*passes.forward, *passes.backward)
    } <= points


@pytest.mark.parametrize("name", ["gpt-2.5b", "llama3-8b", "llama3-70b", "gpt-tiny"])
def test_a_tiny_model_is_legal_and_of_the_same_kind(name):
    model = load_model(name).spec

    tiny = tiny_model(model)  # a ModelSpec checks itself

    assert tiny.hidden_size <= 256
    assert tiny.ffn_hidden_size > tiny.hidden_size
    assert (tiny.norm, tiny.gated_ffn, tiny.head_dim) == (
        model.norm,
        model.gated_ffn,
        model.head_dim,
    )


def test_without_a_model_a_few_are_measured():
    assert [profiled.model.name for profiled in default_workloads(CPU, TINY.training)] == [
        "gpt-tiny"
    ]
    workloads = default_workloads(GPU, TINY.training)
    assert [(profiled.model.name, profiled.training.seq_length) for profiled in workloads] == [
        ("gpt-1.5b", 1024),
        ("llama3-8b", 8192),
    ]


def test_a_precision_that_the_device_lacks_is_refused():
    with pytest.raises(ConfigError, match="cpu has no fp16 arithmetic"):
        cases_of([workload("gpt-tiny", "fp16")], CPU)
