"""Operator prices: each kind by hand on a machine of round figures, divisions, marks and limits."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Placement
from parplan.costmodels.operators.compute import operator_time, optimizer_time
from parplan.costmodels.operators.kernels import adam_bytes_per_parameter
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import (
    Chip,
    FlashCurve,
    MatmulCurve,
    MemoryCurve,
    Product,
    SizeBounds,
    flash_attention_s,
    matmul_s,
)
from parplan.profiles.machines.hardware import Cluster, Device, Link
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import (
    ASSUMED_SHARES,
    Machine,
    analytic_profile,
    machine_for,
)
from parplan.profiles.machines.speeds import ASSUMED_GROUPED, Compute, PassCurves
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL, AttentionKernel

BANDWIDTH = 1e12
LINK = Link(name="made up", bytes_per_s=100e9, latency_s=1e-6, source="made up")
DEVICE = Device(
    name="round",
    memory_bytes=10**11,
    memory_bytes_per_s=BANDWIDTH,
    peak_flops_per_s={"bf16": 100e12, "fp32": 10e12},
    num_sms=100,
    context_bytes=0,
    source="made up",
)
CLUSTER = Cluster(
    name="round",
    device=DEVICE,
    nodes=1,
    gpus_per_node=8,
    intra_node=LINK,
    nics_per_node=8,
    nic=LINK,
    host_memory_bytes=10**12,
    pcie_bytes_per_s=25e9,
)
COMMON = {"launch_s": 0.0, "kind": Kind.INTERPOLATED, "source": "made up"}
MATMUL = MatmulCurve(**COMMON, efficiency=0.5, k_half=0.0, bandwidth_share=1.0)
FLASH = FlashCurve(**COMMON, efficiency=0.5, keys_half=0.0, head_half=0.0)
WHOLE = MemoryCurve(**COMMON, bandwidth_share=1.0)
ROUND = Machine(
    CLUSTER,
    replace(
        analytic_profile("round"),
        compute=Compute(
            forward=MATMUL,
            input_gradient=MATMUL,
            weight_gradient=replace(MATMUL, efficiency=0.25),
            batched_forward=MATMUL,
            batched_backward=MATMUL,
            flash_forward=FLASH,
            flash_backward=FLASH,
            optimizer=WHOLE,
            **{name: PassCurves(forward=WHOLE, backward=WHOLE) for name in ASSUMED_SHARES},
        ),
    ),
)
CHIP = Chip(peak_flops_per_s=100e12, bytes_per_s=BANDWIDTH, num_sms=100)

TRAINING = TrainingSpec(global_batch_size=8, seq_length=2048, stack=NEUTRAL)
BF16_GRADIENTS = replace(TRAINING, gradient_precision=Precision.BF16)
UNFUSED = replace(TRAINING, attention=AttentionKernel.UNFUSED)
GPT_22B = replace(load_model("gpt-22b").spec, dropout=0.1)
BATCH = 4
SEQ = 2048
HIDDEN = 6144
FFN = 24576
HEADS = 64
HEAD_DIM = 96
TOKENS_BYTES = 2 * BATCH * SEQ * HIDDEN
A100 = machine_for(load_cluster("a100-80gb"))


def price(
    name,
    *,
    kind=LayerKind.BLOCK,
    sharding=None,
    training=TRAINING,
    machine=ROUND,
    model=GPT_22B,
    batch=BATCH,
):
    graph = build_graph(model, training, batch)
    return operator_time(
        graph.layer_class(kind).operator(name), sharding or Sharding(), machine, training
    )


def test_a_matmul_is_one_product_forward_and_two_of_their_own_shape_backward():
    m, n, k = BATCH * SEQ, FFN // 8, HIDDEN
    forward = matmul_s(Product(m=m, n=n, k=k), MATMUL, CHIP)
    input_gradient = matmul_s(Product(m=m, n=k, k=n), MATMUL, CHIP)
    weight_gradient = matmul_s(Product(m=k, n=n, k=m), replace(MATMUL, efficiency=0.25), CHIP)
    bias_s = 2 * m * n / BANDWIDTH  # the output gradient is read once more

    priced = price("fc1", sharding=Sharding(tp=8), training=BF16_GRADIENTS)
    assert priced.forward.value_s == pytest.approx(forward, rel=1e-12)
    assert priced.backward.value_s == pytest.approx(
        input_gradient + weight_gradient + bias_s, rel=1e-12
    )


def test_the_whole_sequence_enters_a_matmul_under_sequence_parallelism():
    assert price("fc2", sharding=Sharding(tp=8)) == price(
        "fc2", sharding=Sharding(tp=8, sequence_parallel=True)
    )


def test_gradients_that_accumulate_in_fp32_take_longer():
    assert price("fc1").backward.value_s > price("fc1", training=BF16_GRADIENTS).backward.value_s
    assert price("fc1").forward == price("fc1", training=BF16_GRADIENTS).forward


def test_causal_flash_attention_does_half_of_the_model_flops():
    flops = 4 * BATCH * HEADS * SEQ**2 * HEAD_DIM / 2
    expected = {
        work: flash_attention_s(
            work * flops,
            heads=BATCH * HEADS,
            seq=SEQ,
            keys=SEQ / 2,
            head_dim=HEAD_DIM,
            curve=FLASH,
            chip=CHIP,
        )
        for work in (1.0, 2.5)
    }

    priced = price("attention")
    assert priced.forward.value_s == pytest.approx(expected[1.0], rel=1e-12)
    assert priced.backward.value_s == pytest.approx(expected[2.5], rel=1e-12)
    assert priced.forward.value_s > flops / 50e12  # no faster than half of the peak


def test_unfused_attention_is_two_products_and_the_traffic_of_the_scores():
    qk, pv = (
        Product(m=SEQ, n=SEQ, k=HEAD_DIM, batch=BATCH * HEADS),
        Product(m=SEQ, n=HEAD_DIM, k=SEQ, batch=BATCH * HEADS),
    )
    qk_s, pv_s = matmul_s(qk, MATMUL, CHIP), matmul_s(pv, MATMUL, CHIP)
    scores = BATCH * HEADS * SEQ**2

    priced = price("attention", training=UNFUSED)
    assert priced.forward.value_s == pytest.approx(
        qk_s + pv_s + (3 + 5) * scores / BANDWIDTH, rel=1e-12
    )  # causal softmax, dropout
    assert priced.backward.value_s == pytest.approx(
        qk_s + 3 * pv_s + (4 + 5) * scores / BANDWIDTH, rel=1e-12
    )


def test_unfused_attention_without_dropout_moves_no_mask():
    plain = price("attention", training=UNFUSED, model=replace(GPT_22B, dropout=0.0))

    saved_s = price("attention", training=UNFUSED).forward.value_s - plain.forward.value_s
    assert saved_s == pytest.approx(5 * BATCH * HEADS * SEQ**2 / BANDWIDTH, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "dropout", "forward_bytes", "backward_bytes"),
    [
        pytest.param(
            "norm1", 0.1, 2 * TOKENS_BYTES, 3 * TOKENS_BYTES, id="norm-4-and-6-bytes-an-element"
        ),
        pytest.param(
            "activation",
            0.1,
            8 * TOKENS_BYTES,
            12 * TOKENS_BYTES,
            id="gelu-4-and-6-bytes-of-four-hidden",
        ),
        pytest.param(
            "residual1",
            0.1,
            3.5 * TOKENS_BYTES,
            5.5 * TOKENS_BYTES,
            id="dropout-and-residual-7-and-5-and-6-for-the-join",
        ),
        pytest.param(
            "residual1", 0.0, 3 * TOKENS_BYTES, 3 * TOKENS_BYTES, id="residual-6-and-6-for-the-join"
        ),
    ],
)
def test_streaming_operators_move_the_fewest_bytes(name, dropout, forward_bytes, backward_bytes):
    priced = price(name, model=replace(GPT_22B, dropout=dropout))

    assert priced.forward.value_s == pytest.approx(forward_bytes / BANDWIDTH, rel=1e-12)
    assert priced.backward.value_s == pytest.approx(backward_bytes / BANDWIDTH, rel=1e-12)


@pytest.mark.parametrize("name", ["norm1", "residual1"])
def test_sequence_parallelism_divides_what_tensor_parallelism_replicates(name):
    whole = price(name, sharding=Sharding(tp=8))
    divided = price(name, sharding=Sharding(tp=8, sequence_parallel=True))

    assert whole == price(name)
    assert divided.forward.value_s == pytest.approx(whole.forward.value_s / 8, rel=1e-9)
    assert divided.backward.value_s == pytest.approx(whole.backward.value_s / 8, rel=1e-9)


def test_embedding_backward_also_goes_over_the_gradient_of_the_table():
    priced = price("tokens", kind=LayerKind.EMBEDDING, sharding=Sharding(tp=8))
    table_bytes = 3 * 2 * GPT_22B.padded_vocab_size // 8 * HIDDEN

    assert priced.forward.value_s == pytest.approx(TOKENS_BYTES / BANDWIDTH, rel=1e-12)
    assert priced.backward.value_s == pytest.approx(
        (TOKENS_BYTES + table_bytes) / BANDWIDTH, rel=1e-12
    )


def test_cross_entropy_reads_its_part_of_the_logits():
    priced = price("loss", kind=LayerKind.HEAD, sharding=Sharding(tp=8))

    assert priced.forward.value_s == pytest.approx(
        2 * BATCH * SEQ * GPT_22B.padded_vocab_size / 8 / BANDWIDTH, rel=1e-12
    )


@pytest.mark.parametrize(
    "name", ["norm1", "qkv", "attention", "attention_out", "residual1", "fc1", "activation", "fc2"]
)
@pytest.mark.parametrize(
    "training", [pytest.param(TRAINING, id="flash"), pytest.param(UNFUSED, id="unfused")]
)
def test_more_tensor_parallelism_or_fewer_sequences_never_take_longer(name, training):
    for smaller in ({"sharding": Sharding(tp=8, sequence_parallel=True)}, {"batch": 2}):
        less, more = (
            price(name, training=training, machine=A100, **smaller),
            price(name, training=training, machine=A100),
        )

        assert 0 < less.forward.value_s <= more.forward.value_s
        assert 0 < less.backward.value_s <= more.backward.value_s


def test_shapes_inside_the_measured_range_interpolate_and_others_do_not():
    assert price("fc1", machine=A100, sharding=Sharding(tp=8)).forward.kind is Kind.INTERPOLATED
    assert price("fc1", machine=A100, batch=4096).forward.kind is Kind.ANALYTIC
    assert price("attention", machine=A100).backward.kind is Kind.INTERPOLATED


@pytest.mark.parametrize("device", ["cpu", "l4-24gb"])
def test_a_device_without_measurements_prices_every_operator_analytically(device):
    machine = machine_for(load_cluster(device))
    for name in ("norm1", "qkv", "attention", "residual1", "activation"):
        priced = price(name, machine=machine, model=load_model("gpt-tiny").spec, batch=1)
        assert {priced.forward.kind, priced.backward.kind} == {Kind.ANALYTIC}
    assert optimizer_time(1e6, machine, TRAINING).kind is Kind.ANALYTIC


@pytest.mark.parametrize("name", ["qkv", "norm1", "attention"])
def test_a_precision_that_the_device_lacks_is_an_error(name):
    with pytest.raises(ConfigError, match="has no fp16 arithmetic"):
        price(name, training=replace(TRAINING, precision=Precision.FP16))


def test_fp32_runs_at_its_own_peak():
    fp32 = replace(TRAINING, precision=Precision.FP32)

    assert price("fc1", training=fp32).forward.value_s == pytest.approx(
        10 * price("fc1").forward.value_s, rel=0.01
    )


@pytest.mark.parametrize(
    ("precision", "gradients", "n_bytes"),
    [
        pytest.param(Precision.FP16, Precision.FP16, 28, id="k5"),
        pytest.param(Precision.BF16, Precision.FP32, 30, id="fp32-gradients"),
        pytest.param(Precision.FP32, Precision.FP32, 28, id="fp32-has-no-second-copy"),
    ],
)
def test_adam_touches_its_bytes(precision, gradients, n_bytes):
    training = replace(TRAINING, precision=precision, gradient_precision=gradients)

    assert adam_bytes_per_parameter(training) == n_bytes
    assert optimizer_time(10**9, ROUND, training).value_s == pytest.approx(
        n_bytes * 1e9 / BANDWIDTH, rel=1e-12
    )


def test_no_parameters_cost_nothing():
    assert optimizer_time(0, A100, TRAINING).value_s == 0.0


def own(**compute):
    """The round machine with curves of its own."""
    return replace(
        ROUND, profile=replace(ROUND.profile, compute=replace(ROUND.profile.compute, **compute))
    )


def both(curve):
    return PassCurves(forward=curve, backward=curve)


HALF = replace(WHOLE, bandwidth_share=0.5)
QUARTER = replace(WHOLE, bandwidth_share=0.25)


@pytest.mark.parametrize(
    ("name", "curve", "kind"),
    [
        pytest.param("norm1", "layer_norm", LayerKind.BLOCK, id="layer-norm"),
        pytest.param("activation", "gelu", LayerKind.BLOCK, id="gelu"),
        pytest.param("positions", "dropped_positions", LayerKind.EMBEDDING, id="dropped-positions"),
        pytest.param("residual1", "dropped_residual", LayerKind.BLOCK, id="dropped-residual"),
    ],
)
def test_an_operation_has_its_own_curve_where_the_machine_measured_it(name, curve, kind):
    plain, named = (
        price(name, kind=kind),
        price(name, kind=kind, machine=own(named={curve: both(HALF)})),
    )

    assert named.forward.value_s == pytest.approx(2 * plain.forward.value_s, rel=1e-12)
    assert named.backward.value_s == pytest.approx(2 * plain.backward.value_s, rel=1e-12)
    unnamed = price(name, kind=kind, machine=own(named={"another": both(HALF)}))
    assert (unnamed.forward.value_s, unnamed.backward.value_s) == (
        plain.forward.value_s,
        plain.backward.value_s,
    )


def test_an_operation_that_a_machine_did_not_measure_among_others_is_analytic():
    bounded = replace(WHOLE, bounds=SizeBounds(low=(1,), high=(10**12,)))
    shipped, measured = (
        own(elementwise=both(bounded)),
        own(elementwise=both(bounded), named={"rotary": both(bounded)}),
    )

    assert price("activation", machine=shipped).forward.kind is Kind.INTERPOLATED
    assert price("activation", machine=measured).forward.kind is Kind.ANALYTIC
    assert (
        price("activation", machine=measured).forward.value_s
        == price("activation", machine=shipped).forward.value_s
    )


def test_the_gradient_of_a_bias_has_its_own_curve_and_counts_as_a_weights():
    plain, named = price("fc1"), price("fc1", machine=own(named={"bias_gradient": both(HALF)}))
    bias_s = 2 * BATCH * SEQ * FFN / BANDWIDTH

    assert named.forward == plain.forward
    assert named.backward.value_s - plain.backward.value_s == pytest.approx(bias_s, rel=1e-9)
    assert named.weight.value_s - plain.weight.value_s == pytest.approx(bias_s, rel=1e-9)


def test_a_measured_embedding_goes_over_its_table_in_the_same_kernel():
    table_bytes = 3 * 2 * GPT_22B.padded_vocab_size * HIDDEN
    launched = replace(
        WHOLE, launch_s=1.0, points=((1000, 1e6 + 1e-3),)
    )  # what its form says of that many bytes
    apart = price(
        "tokens",
        kind=LayerKind.EMBEDDING,
        machine=own(embedding=both(replace(launched, points=()))),
    )
    priced = price(
        "tokens",
        kind=LayerKind.EMBEDDING,
        machine=own(embedding=both(launched), elementwise=both(HALF)),
    )

    assert apart.backward.value_s == pytest.approx(
        1 + (TOKENS_BYTES + table_bytes) / BANDWIDTH, rel=1e-12
    )
    assert priced.backward.value_s == pytest.approx(
        1 + (TOKENS_BYTES + table_bytes) / BANDWIDTH, rel=1e-12
    )
    slower = own(
        embedding=both(replace(launched, points=())), elementwise=both(HALF)
    )  # the table by the class, as without points
    assert (
        price("tokens", kind=LayerKind.EMBEDDING, machine=slower).backward.value_s
        > priced.backward.value_s
    )


def test_attention_with_dropout_has_its_own_curves_where_the_machine_has_them():
    slow, slower = replace(FLASH, efficiency=0.25), replace(FLASH, efficiency=0.125)
    machine, undropped = own(dropped_flash=(slow, slower)), replace(GPT_22B, dropout=0.0)

    assert price("attention", machine=machine).forward.value_s == pytest.approx(
        2 * price("attention").forward.value_s
    )
    assert price("attention", machine=machine).backward.value_s == pytest.approx(
        4 * price("attention").backward.value_s
    )
    assert price("attention", machine=machine, model=undropped) == price(
        "attention", model=undropped
    )


def test_the_norm_of_the_gradients_costs_where_the_machine_measured_it():
    machine = own(named={"gradient_norm": both(QUARTER)})

    assert optimizer_time(10**6, machine, TRAINING).value_s == pytest.approx(
        (30 + 4 * 4) * 1e6 / BANDWIDTH, rel=1e-12
    )
    assert optimizer_time(10**6, ROUND, TRAINING).value_s == pytest.approx(
        30 * 1e6 / BANDWIDTH, rel=1e-12
    )


M, TABLE = BATCH * SEQ, 2 * BATCH * SEQ * FFN


def test_products_are_measured_at_their_points_and_less_so_with_distance():
    names = ("forward", "input_gradient", "weight_gradient")
    shapes = ((M, FFN, HIDDEN), (M, HIDDEN, FFN), (HIDDEN, FFN, M))
    curves = {
        name: replace(MATMUL, points=((*sizes, 1e5 * (i + 1)),))
        for i, (name, sizes) in enumerate(zip(names, shapes, strict=True))
    }
    machine = own(**curves, named={"bias_gradient": both(replace(WHOLE, points=((TABLE, 5e4),)))})
    priced, halved = (
        price("fc1", machine=machine),
        price("fc1", machine=machine, sharding=Sharding(tp=2)),
    )

    assert (priced.forward.value_s, priced.forward.kind) == (pytest.approx(0.1), Kind.MEASURED)
    assert (priced.backward.value_s, priced.backward.kind) == (
        pytest.approx(0.2 + 0.3 + 0.05),
        Kind.MEASURED,
    )
    assert priced.weight.value_s == pytest.approx(0.35)
    assert halved.forward.kind is Kind.ANALYTIC  # below all that was measured
    assert (
        price("fc1", sharding=Sharding(tp=2)).forward.value_s
        < halved.forward.value_s
        < priced.forward.value_s
    )


def test_rows_that_are_not_aligned_are_in_the_measured_time_and_not_counted_twice():
    measured = own(forward=replace(MATMUL, points=((M, 50257, HIDDEN, 1e6),)))

    def head_s(vocab_size, machine):
        model = replace(GPT_22B, vocab_size=vocab_size, vocab_multiple=1)
        return price("lm_head", kind=LayerKind.HEAD, model=model, machine=machine).forward.value_s

    assert head_s(50257, measured) == pytest.approx(1.0)
    assert head_s(50264, measured) == pytest.approx(
        head_s(50264, ROUND) / head_s(50257, ROUND), rel=0.01
    )  # 2.3 times as fast


def test_attention_is_measured_at_its_points():
    sizes = (BATCH * HEADS, SEQ, HEAD_DIM)
    forward = 2e5
    backward = 6e5
    undropped = replace(GPT_22B, dropout=0.0)
    curves = tuple(replace(FLASH, points=((*sizes, time_us),)) for time_us in (forward, backward))
    for machine, model in (
        (own(flash_forward=curves[0], flash_backward=curves[1]), undropped),
        (own(dropped_flash=curves), GPT_22B),
    ):
        priced = price("attention", machine=machine, model=model)
        assert (priced.forward.value_s, priced.backward.value_s) == (
            pytest.approx(0.2),
            pytest.approx(0.6),
        )
        assert {priced.forward.kind, priced.backward.kind} == {Kind.MEASURED}


def test_dropout_that_was_not_measured_has_the_form_without_and_is_analytic():
    curves = tuple(replace(FLASH, points=((BATCH * HEADS, SEQ, HEAD_DIM, 2e5),)) for _ in range(2))
    priced = price("attention", machine=own(flash_forward=curves[0], flash_backward=curves[1]))

    assert priced.forward.value_s == price("attention").forward.value_s
    assert priced.forward.kind is Kind.ANALYTIC


def test_products_of_unfused_attention_are_measured_by_their_batch_and_shape():
    heads = BATCH * HEADS
    points = ((heads, SEQ, SEQ, HEAD_DIM, 1e5), (heads, SEQ, HEAD_DIM, SEQ, 3e5))
    machine = own(batched_forward=replace(MATMUL, points=points))
    softmax_s = (3 + 5) * heads * SEQ**2 / BANDWIDTH

    assert price("attention", training=UNFUSED, machine=machine).forward.value_s == pytest.approx(
        0.4 + softmax_s
    )


def test_points_of_a_class_say_nothing_of_another_operation_of_it():
    machine = own(residual=both(replace(WHOLE, points=((int(3.5 * TOKENS_BYTES), 1e6),))))
    priced = price("residual1", machine=machine)

    assert priced.forward.value_s == price("residual1").forward.value_s
    assert priced.forward.kind is Kind.ANALYTIC


def test_products_in_fp8_keep_the_form():
    fp8, device = (
        replace(TRAINING, products=ProductFormat.FP8_CURRENT),
        replace(DEVICE, peak_flops_per_s={**DEVICE.peak_flops_per_s, "fp8": 200e12}),
    )
    plain, measured = (
        replace(machine, cluster=replace(CLUSTER, device=device))
        for machine in (ROUND, own(forward=replace(MATMUL, points=((M, FFN, HIDDEN, 1e6),))))
    )

    assert price("fc1", training=fp8, machine=measured) == price("fc1", training=fp8, machine=plain)
    assert price("fc1", machine=measured) != price("fc1", machine=plain)


def test_grouped_products_are_slower_by_a_share_and_by_each_group_but_weight_gradients_by_a_share():
    experts = load_model("mixtral-tiny").spec
    curve = replace(ASSUMED_GROUPED, slowdown=1.5, launch_s=1e-3, kind=Kind.INTERPOLATED)
    free = replace(ASSUMED_GROUPED, slowdown=1.0, launch_s=0.0)
    single, grouped = (
        operator_time(
            build_graph(experts, TRAINING, 1).block.operator("fc1"),
            Sharding(),
            own(grouped=each),
            TRAINING,
        )
        for each in (free, curve)
    )
    groups_s = experts.num_experts * 1e-3

    assert grouped.forward.value_s == pytest.approx(1.5 * single.forward.value_s + groups_s)
    assert grouped.backward.value_s == pytest.approx(1.5 * single.backward.value_s + groups_s)
    assert grouped.forward.kind is Kind.ANALYTIC  # no bounds say what was fitted


def test_grouped_products_keep_the_form():
    experts = load_model("mixtral-tiny").spec
    layer = build_graph(experts, TRAINING, 1).block.operator("fc1")
    *_token_dims, features, contracted = layer.dims
    m = -(-SEQ * experts.experts_per_token // experts.num_experts)
    machine = own(forward=replace(MATMUL, points=((m, features.size, contracted.size, 1e6),)))

    assert price("fc1", model=experts, machine=machine, batch=1) == price(
        "fc1", model=experts, batch=1
    )


def test_the_optimizer_is_measured_at_its_points():
    machine = own(optimizer=replace(WHOLE, points=((30 * 10**6, 123.0),)))

    assert optimizer_time(10**6, machine, TRAINING).value_s == pytest.approx(123e-6)
    assert optimizer_time(10**6, machine, TRAINING).kind is Kind.MEASURED


# Korthikanti et al. 2022, arXiv 2205.05198, table 4: one layer of the 22B model, micro-batch 4,
# tensor and sequence parallel 8, un-fused attention, no recompute; with two all-gathers and two
# reduce-scatters of 100 MB each way.
@pytest.mark.parametrize(
    ("way", "published_s"),
    [
        pytest.param("forward", 7.2e-3, id="forward"),
        pytest.param("backward", 11.8e-3, id="backward"),
    ],
)
def test_a_published_layer_is_within_a_tenth(way, published_s):
    fp16 = replace(UNFUSED, precision=Precision.FP16, gradient_precision=Precision.FP16)
    graph, sharding = build_graph(GPT_22B, fp16, BATCH), Sharding(tp=8, sequence_parallel=True)
    node = Placement(nodes=1, ranks_per_node=8, groups_per_node=1)
    compute_s = sum(
        getattr(operator_time(operator, sharding, A100, fp16), way).value_s
        for operator in graph.block.operators
    )
    each_s = [
        collective_time(c, TOKENS_BYTES, node, A100).value_s
        for c in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    ]

    assert compute_s + 2 * sum(each_s) == pytest.approx(published_s, rel=0.10)


def test_a_price_takes_a_few_microseconds():
    graph = build_graph(GPT_22B, TRAINING, BATCH)
    started_s = time.perf_counter()
    for tp in (1, 2, 4, 8) * 5:
        for operator in graph.block.operators:
            operator_time(operator, Sharding(tp=tp), A100, TRAINING)

    assert (time.perf_counter() - started_s) / (
        20 * len(graph.block.operators)
    ) < 500e-6  # 12 us here; ten times slower may pass
