"""The kernels of each operator: their curves and sizes, by hand, on one rank and divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.operators.kernels import (
    FusedKernel,
    ProductKernel,
    StreamKernel,
    fused_kernel,
    product_kernel,
)
from parplan.costmodels.operators.operator_kernels import gathered_bytes, operator_kernels
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import Attention, LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import EVERY_PLAIN_KERNEL, NEUTRAL, AttentionKernel, Stack

B, S, H, F, A, V = (
    2,
    128,
    64,
    256,
    4,
    512,
)  # gpt-tiny: batch, sequence, hidden, ffn, heads, vocabulary
GPT = replace(load_model("gpt-tiny").spec, dropout=0.1)
LLAMA = load_model("llama3-8b").spec
TRAINING = TrainingSpec(global_batch_size=8, seq_length=S, stack=NEUTRAL)
UNFUSED = replace(TRAINING, attention=AttentionKernel.UNFUSED)
TOKENS = 2 * B * S * H  # bytes of a [B, S, H] tensor


def kernels(name, *, kind=LayerKind.BLOCK, model=GPT, training=TRAINING, sharding=None):
    layer = build_graph(model, training, B).layer_class(kind)
    return operator_kernels(layer.operator(name), sharding or Sharding(), training)


def points(run):
    """Curves and sizes of the kernels that a profiler reads."""
    return [(kernel.curve, kernel.sizes) for kernel in run]


def test_a_linear_layer_is_three_products_in_the_orders_of_their_curves_and_a_bias():
    kernel_list = kernels("fc1", sharding=Sharding(2))
    m, n, k = B * S, F // 2, H

    assert points(kernel_list.forward) == [("forward", (m, n, k))]
    assert points(kernel_list.inputs) == [("input_gradient", (m, k, n))]
    assert points(kernel_list.weights) == [
        ("weight_gradient", (k, n, m)),
        ("bias_gradient.backward", (2 * m * n,)),
    ]
    assert kernel_list.backward == kernel_list.inputs + kernel_list.weights
    assert points(kernels("fc1", model=replace(GPT, linear_bias=False)).weights) == [
        ("weight_gradient", (H, F, m))
    ]


def test_a_weight_gradient_that_its_product_does_not_add_is_added_by_another_kernel():
    apart = replace(TRAINING, stack=Stack(fused_accumulation=False))
    product, added, _ = kernels("fc1", training=apart).weights
    fused, _ = kernels("fc1").weights

    assert (added.curve, added.sizes) == ("accumulation.backward", ((2 + 4 + 4) * F * H,))
    assert (fused.product.result_bytes, product.product.result_bytes) == (8, 2)


def test_fp8_products_are_marked_and_cast_before_each():
    kernel_list = kernels("fc1", training=replace(TRAINING, products=ProductFormat.FP8_CURRENT))
    m = B * S

    assert [
        kernel.peak
        for kernel in (*kernel_list.forward, *kernel_list.backward)
        if isinstance(kernel, ProductKernel)
    ] == ["fp8"] * 3
    assert points(kernel_list.forward)[1] == ("cast.forward", (5 * (m * H + F * H),))
    assert points(kernel_list.inputs)[1] == ("cast.backward", (5 * m * F,))
    assert not any(
        kernel.peak
        for kernel in kernels(
            "lm_head",
            kind=LayerKind.HEAD,
            training=replace(TRAINING, products=ProductFormat.FP8_CURRENT),
        ).forward
    )


def test_a_stack_that_gathers_casts_casts_the_tokens_of_a_rank():
    training = replace(
        TRAINING,
        products=ProductFormat.MXFP8,
        stack=Stack(gathers_casts=True, holds_cast_weights=True),
    )
    divided = Sharding(4, sequence_parallel=True)
    column = kernels("fc1", training=training, sharding=divided)
    row = kernels("fc2", training=training, sharding=divided)
    own_tokens, bytes_moved = B * S * H // 4, 2 + 2 * 33 / 32

    assert points(column.forward)[1] == ("cast.forward", (bytes_moved * own_tokens,))
    assert points(column.inputs)[1] == ("cast.backward", (bytes_moved * B * S * F / 4,))
    assert points(row.forward)[1] == ("cast.forward", (bytes_moved * B * S * F / 4,))
    assert points(row.inputs)[1] == ("cast.backward", (bytes_moved * own_tokens,))
    operators = build_graph(GPT, training, B).layer_class(LayerKind.BLOCK)
    tokens = operators.operator("fc1").inputs[0]
    assert gathered_bytes(tokens, operators.operator("fc1"), training) == TOKENS * 33 // 64
    assert gathered_bytes(tokens, operators.operator("norm2"), training) == TOKENS


@pytest.mark.parametrize("name", ["qkv", "attention_out", "fc1", "fc2"])
def test_a_product_built_of_the_sizes_of_an_operators_is_that_product(name):
    for kernel in (*kernels(name).forward, *kernels(name).backward):
        if isinstance(kernel, ProductKernel):
            assert (
                product_kernel(
                    kernel.curve,
                    kernel.sizes,
                    kernel.product.operand_bytes,
                    kernel.product.result_bytes,
                )
                == kernel
            )


@pytest.mark.parametrize(
    ("dropout", "curves"),
    [
        (0.0, ("flash_forward", "flash_backward")),
        (0.1, ("dropped_flash.forward", "dropped_flash.backward")),
    ],
)
def test_fused_attention_has_sizes_of_heads_sequence_and_head_dim(dropout, curves):
    kernel_list = kernels("attention", model=replace(GPT, dropout=dropout), sharding=Sharding(2))
    sizes = (B * A // 2, S, H // A)

    assert points((*kernel_list.forward, *kernel_list.backward)) == [
        (curves[0], sizes),
        (curves[1], sizes),
    ]
    forward, backward = kernel_list.forward[0], kernel_list.backward[0]
    assert (forward.flops, backward.flops) == (
        4 * sizes[0] * S * S / 2 * sizes[2],
        2.5 * forward.flops,
    )
    assert isinstance(forward, FusedKernel)
    assert forward == fused_kernel(
        "forward", sizes[0], S, S, sizes[2], Attention(causal=True, dropped=dropout > 0)
    )


def test_unfused_attention_is_batched_products_a_softmax_and_a_dropout():
    kernel_list = kernels("attention", training=UNFUSED)
    qk = (B * A, S, S, H // A)
    pv = (B * A, S, H // A, S)
    scores = B * A * S * S

    assert points(kernel_list.forward) == [
        ("batched_forward", qk),
        ("batched_forward", pv),
        ("softmax.forward", (3 * scores,)),
        ("dropout.forward", (5 * scores,)),
    ]
    assert points(kernel_list.backward) == [
        *(("batched_backward", sizes) for sizes in (qk, pv, pv, pv)),
        ("softmax.backward", (4 * scores,)),
        ("dropout.backward", (5 * scores,)),
    ]
    assert len(kernels("attention", training=UNFUSED, model=replace(GPT, dropout=0.0)).forward) == 3


@pytest.mark.parametrize(
    ("name", "kind", "model", "curve", "like", "forward_bytes", "backward_bytes"),
    [
        pytest.param(
            "norm1",
            LayerKind.BLOCK,
            GPT,
            "layer_norm",
            "norm",
            2 * TOKENS,
            3 * TOKENS,
            id="layer-norm",
        ),
        pytest.param(
            "activation",
            LayerKind.BLOCK,
            GPT,
            "gelu",
            "elementwise",
            8 * TOKENS,
            12 * TOKENS,
            id="gelu-of-four-hidden",
        ),
        pytest.param(
            "positions",
            LayerKind.EMBEDDING,
            GPT,
            "dropped_positions",
            "elementwise",
            2.5 * TOKENS,
            2.5 * TOKENS,
            id="dropped",
        ),
        pytest.param(
            "positions",
            LayerKind.EMBEDDING,
            replace(GPT, dropout=0.0),
            "positions",
            "elementwise",
            2 * TOKENS,
            2 * TOKENS,
            id="positions",
        ),
        pytest.param(
            "residual1",
            LayerKind.BLOCK,
            replace(GPT, dropout=0.0),
            "residual",
            "residual",
            3 * TOKENS,
            3 * TOKENS,
            id="residual",
        ),
        pytest.param(
            "residual1",
            LayerKind.BLOCK,
            GPT,
            "dropped_residual",
            "residual",
            3.5 * TOKENS,
            5.5 * TOKENS,
            id="dropped-residual",
        ),
        pytest.param(
            "loss",
            LayerKind.HEAD,
            GPT,
            "cross_entropy",
            "cross_entropy",
            2 * B * S * V,
            2 * B * S * V,
            id="cross-entropy",
        ),
    ],
)
def test_memory_bound_operators_are_one_kernel_each_way(
    name, kind, model, curve, like, forward_bytes, backward_bytes
):
    (forward,), (backward,) = (run := kernels(name, kind=kind, model=model)).forward, run.backward

    assert (forward.curve, forward.like, forward.n_bytes) == (
        f"{curve}.forward",
        like,
        forward_bytes,
    )
    assert (backward.curve, backward.like, backward.n_bytes) == (
        f"{curve}.backward",
        like,
        backward_bytes,
    )


@pytest.mark.parametrize(
    ("name", "curve"), [("norm1", "rms_norm"), ("activation", "swiglu"), ("rotary", "rotary")]
)
def test_operations_of_a_llama_have_names_of_their_own(name, curve):
    assert points(kernels(name, model=LLAMA).forward)[0][0] == f"{curve}.forward"


@pytest.mark.parametrize(
    ("name", "elements", "forward_bytes", "backward_bytes"),
    [
        # float 6, pow 8, mean 4, product 8, cast 6, product 4; 12 + 6 + 24 + 4 + 28 + 18
        pytest.param("norm1", LLAMA.hidden_size, 36, 92, id="norm"),
        # float 6, product 8, cast 6, and back; over queries, keys and values
        pytest.param("rotary", 3 / 2 * LLAMA.hidden_size, 20, 20, id="rotary"),
        # silu 4, product 6; its two gradients 12, that of silu 6
        pytest.param("activation", LLAMA.ffn_hidden_size, 10, 18, id="swiglu"),
    ],
)
def test_a_stack_without_fused_kernels_runs_each_operation_of_pytorch(
    name, elements, forward_bytes, backward_bytes
):
    plain = replace(TRAINING, stack=replace(NEUTRAL, plain_kernels=EVERY_PLAIN_KERNEL))
    (forward,), (backward,) = (
        (run := kernels(name, model=LLAMA, training=plain)).forward,
        run.backward,
    )

    assert forward.n_bytes == pytest.approx(B * S * elements * forward_bytes)
    assert backward.n_bytes == pytest.approx(B * S * elements * backward_bytes)
    (fused,) = kernels(name, model=LLAMA).forward
    assert fused.n_bytes < forward.n_bytes


def test_the_gradient_of_an_embedding_goes_over_its_table_in_one_kernel_or_in_two():
    (whole,) = kernels("tokens", kind=LayerKind.EMBEDDING).backward
    rows, table = whole.parts

    assert (rows.like, rows.n_bytes, table.like, table.n_bytes) == (
        "embedding",
        TOKENS,
        "elementwise",
        3 * 2 * V * H,
    )
    assert whole.n_bytes == rows.n_bytes + table.n_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_sum_of_two_branches_joins_their_gradients_twice(dropout):
    both = kernels("residual2", model=replace(GPT, dropout=dropout, parallel_residual=True))
    kernel_list = kernels("residual2", model=replace(GPT, dropout=dropout))
    moved = [
        sum(kernel.times * kernel.n_bytes for kernel in run.backward) for run in (kernel_list, both)
    ]

    assert moved[1] - moved[0] == 3 * TOKENS
    for kernel in (*kernel_list.backward, *both.backward):
        assert (
            kernel.parts is None
            or sum(part.times * part.n_bytes for part in kernel.parts) == kernel.n_bytes
        )


def test_the_experts_of_a_rank_are_grouped_products():
    model = load_model("mixtral-tiny").spec
    kernel_list = kernels("fc1", model=model)
    products = [
        kernel
        for kernel in (*kernel_list.forward, *kernel_list.backward)
        if isinstance(kernel, ProductKernel)
    ]

    assert [kernel.curve for kernel in products] == ["forward", "input_gradient", "weight_gradient"]
    assert all(kernel.grouped and kernel.product.batch == model.num_experts for kernel in products)
    assert not any(kernel.grouped for kernel in kernels("fc1").forward)


def test_every_operator_of_every_model_has_kernels_with_whole_sizes():
    for model in (GPT, LLAMA, load_model("mixtral-tiny").spec):
        for training in (TRAINING, UNFUSED):
            for layer in build_graph(model, training, B):
                for operator in layer.operators:
                    actual = operator_kernels(operator, Sharding(2, True), training)
                    assert actual.forward
                    assert actual.backward
                    for kernel in (*actual.forward, *actual.backward):
                        assert all(size > 0 and size == int(size) for size in kernel.sizes), kernel
                        assert isinstance(kernel, ProductKernel | FusedKernel | StreamKernel)


def test_a_frozen_product_has_no_weight_gradient_and_unpacks_8_bits_in_both_passes():
    eight = FineTuning(lora_rank=4, lora_targets=("fc1",), base_bits=8)
    training = replace(TRAINING, fine_tuning=eight)

    frozen = kernels("qkv", training=training)
    adapter = kernels("fc1_lora_a", training=training)

    assert frozen.weights == ()
    assert adapter.weights
    unpacked = [kernel for kernel in frozen.forward if isinstance(kernel, StreamKernel)]
    assert [kernel.n_bytes for kernel in unpacked] == [
        (1 + 4 / 64 + 2) * (H + 1) * 3 * H
    ]  # with the bias
    assert unpacked[0] in frozen.inputs
