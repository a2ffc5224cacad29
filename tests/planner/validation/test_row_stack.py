"""The software of a measured row: stack, precision, states, recompute."""

from __future__ import annotations

import pytest

from parplan.planner.validation.configuration import configuration_of
from parplan.planner.validation.priced_rows import price_row
from parplan.planner.validation.row_stack import stack_name
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, FlashKernel
from tests.helpers.measured_rows import FULL, ROW


@pytest.mark.parametrize(
    ("change", "optimizer", "state_bytes"),
    [
        pytest.param({}, Optimizer.ADAM, (4, 4, 4), id="in-fp32"),
        pytest.param({"moments": "bf16"}, Optimizer.ADAM, (4, 4, 2), id="moments-in-bf16"),
        pytest.param(
            {"dtype": "bf16 (pure, bf16 optimizer states)"}, Optimizer.ADAM, (2, 0, 2), id="pure"
        ),
        pytest.param(
            {"framework": "Megatron-LM + bnb 8-bit"}, Optimizer.ADAM_8BIT, (4, 4, 4), id="8-bit"
        ),
        pytest.param({"model": "moe/gpt_dist_muon"}, Optimizer.MUON, (4, 4, 4), id="muon"),
    ],
)
def test_the_optimizer_and_the_bytes_of_its_states_are_read(change, optimizer, state_bytes):
    training = configuration_of({**FULL, **change}).training
    gradient, stack = training.gradient_precision.num_bytes, training.stack

    assert training.optimizer is optimizer
    assert (gradient, stack.master_bytes, stack.moment_bytes) == state_bytes
    assert price_row({**ROW, **change}).predicted_gib <= price_row(ROW).predicted_gib


@pytest.mark.parametrize(
    ("gpu", "notes", "mib"),
    [
        pytest.param("a100-80g-sxm", "", 20, id="a100"),
        pytest.param("a100-80g-sxm", "deterministic mode", 68, id="a100-deterministic"),
        pytest.param("h100-80g-sxm", "", 96, id="h100"),
    ],
)
def test_a_release_test_has_the_workspaces_of_its_device(gpu, notes, mib):
    row = {**FULL, "framework": "Megatron-LM CI (dev container)", "gpu": gpu, "notes": notes}

    assert configuration_of(row).training.stack.workspace_bytes == mib * 2**20
    grouped = configuration_of({**row, "grouped_gemm": "true"}).training.stack.workspace_bytes
    assert grouped == (mib + 4 * (32 if gpu.startswith("h100") else 4)) * 2**20


@pytest.mark.parametrize(
    ("gpu", "notes", "kernel"),
    [
        pytest.param("gb200-nvl72", "", FlashKernel.CUDNN, id="gb200"),
        pytest.param(
            "gb200-nvl72", "deterministic mode", FlashKernel.FLASH2, id="gb200-repeatable"
        ),
        pytest.param("h100-80g-sxm", "deterministic mode", FlashKernel.CUDNN, id="h100-repeatable"),
    ],
)
def test_a_deterministic_release_test_runs_flash_attention_2_on_blackwell(gpu, notes, kernel):
    row = {**FULL, "framework": "Megatron-LM CI (dev container)", "gpu": gpu, "notes": notes}
    stack = configuration_of(row).training.stack

    assert stack.flash_kernel_on(10.0) is kernel
    assert stack.deterministic is bool(notes)


def test_a_release_test_overlaps_its_gradients_where_its_recipe_does():
    row = {**FULL, "framework": "Megatron-LM CI (dev container)"}
    small = {**row, "id": "mcoreci-gpt-gpt3_7b_tp1_pp4_memory_speed-dev-dgx_a100"}

    assert not configuration_of(row).training.overlap_grad_reduce
    assert configuration_of(small).training.overlap_grad_reduce


@pytest.mark.parametrize(
    ("framework", "notes", "stack", "attention", "dropout", "overlap"),
    [
        pytest.param(
            "Megatron-LM v1.1/v2.0 (2020)",
            "",
            "megatron-lm-2020",
            AttentionKernel.UNFUSED,
            0.1,
            False,
            id="megatron-2020",
        ),
        pytest.param(
            "Megatron-LM (Apr 2021)",
            "",
            "megatron-lm-2021",
            AttentionKernel.UNFUSED,
            0.1,
            False,
            id="megatron-2021",
        ),
        pytest.param(
            "Megatron-DeepSpeed (microsoft)",
            "",
            "megatron-deepspeed",
            AttentionKernel.UNFUSED,
            0.1,
            False,
            id="deepspeed",
        ),
        pytest.param(
            "Megatron-LM core 0.14",
            "",
            "megatron-core",
            AttentionKernel.FLASH,
            0.0,
            False,
            id="megatron-core",
        ),
        pytest.param(
            "Megatron-LM core 0.14",
            "overlap=grad",
            "megatron-core",
            AttentionKernel.FLASH,
            0.0,
            True,
            id="overlap-noted",
        ),
        pytest.param("NeMo 24.05", "", "nemo", AttentionKernel.FLASH, 0.0, True, id="nemo"),
        pytest.param(
            "torchtitan 820504e",
            "",
            "torchtitan",
            AttentionKernel.FLASH,
            0.0,
            True,
            id="torchtitan",
        ),
        pytest.param(
            "torchtitan 820504e",
            "overlap=none",
            "torchtitan",
            AttentionKernel.FLASH,
            0.0,
            False,
            id="no-overlap-noted",
        ),
        pytest.param(
            "MosaicML Composer FSDP",
            "attention=unfused",
            "fsdp1",
            AttentionKernel.UNFUSED,
            0.1,
            True,
            id="attention-noted",
        ),
    ],
)
def test_what_a_framework_decides_is_read_off_its_name_and_the_notes(
    framework, notes, stack, attention, dropout, overlap
):
    configuration = configuration_of({**FULL, "framework": framework, "notes": notes})

    training = configuration.training
    assert (training.stack.name, training.attention, training.overlap_grad_reduce) == (
        stack,
        attention,
        overlap,
    )
    assert configuration.model.dropout == dropout


@pytest.mark.parametrize(
    ("name", "is_plain"),
    [
        pytest.param("torchtune-llama3.2-3b-packed", True, id="torchtune"),
        pytest.param("torchtune-llama3.2-3b-compile", False, id="torchtune-compiled"),
        pytest.param("titan-8b-fsdp8-eager", True, id="torchtitan"),
    ],
)
def test_a_run_without_torch_compile_has_plain_kernels(name, is_plain):
    stack = configuration_of({**FULL, "id": name, "framework": "torchtitan"}).training.stack

    assert bool(stack.plain_kernels) is is_plain


@pytest.mark.parametrize("zero", ["0", "1"])
def test_nanotron_reduces_gradients_under_the_backward_pass_without_zero(zero):
    notes = "TP reduce-scatter mode with async comm"
    row = {**FULL, "framework": "nanotron v0.5", "zero_stage": zero, "notes": notes}
    training = configuration_of(row).training

    assert training.overlap_grad_reduce is (zero == "0")
    assert training.stack.async_reduce_scatter


def test_a_noted_attention_kernel_is_the_stacks_and_one_that_nobody_knows_a_reason():
    assert (
        configuration_of({**FULL, "notes": "attention=flash1"}).training.stack.flash_kernel_on(7.0)
        is FlashKernel.FLASH1
    )
    assert (
        configuration_of({**FULL, "notes": "attention=sdpa"}).training.stack.flash_kernel_on(9.0)
        is FlashKernel.FLASH2
    )
    assert price_row({**ROW, "notes": "attention=what"}).reason == "no attention kernel 'what'"


def test_fp8_rows_run_their_products_in_fp8():
    fp8 = {
        **ROW,
        "gpu": "h100-80g-sxm",
        "hidden": "4096",
        "ffn_hidden": "16384",
        "heads": "32",
        "seq_len": "4096",
        "dtype": "bf16+float8 linear",
    }

    assert configuration_of({**FULL, **fp8}).training.products is ProductFormat.FP8_CURRENT
    assert price_row(fp8).predicted_s < price_row({**fp8, "dtype": "bf16"}).predicted_s
    assert (
        price_row({**ROW, "dtype": "fp8"}).reason
        == "a100-80gb has no fp8 arithmetic (it has bf16, fp16, fp32)"
    )


def test_bf16_gradients_are_fp32_and_fp16_ones_their_own_but_for_internevo():
    def gradients(**change):
        return configuration_of({**FULL, **change}).training.gradient_precision

    assert gradients() is Precision.FP32
    assert gradients(dtype="fp16") is gradients(dtype="fp16/bf16") is Precision.FP16
    assert gradients(framework="InternEvo (2024-03)") is Precision.BF16
    assert gradients(gradients="bf16") is Precision.BF16


@pytest.mark.parametrize(
    ("framework", "stack"),
    [
        pytest.param("NeMo AutoModel 25.09 (FSDP2)", "torchtitan", id="automodel"),
        pytest.param("NeMo 25.09", "nemo", id="nemo"),
        pytest.param("Transformers + PEFT", "huggingface", id="transformers"),
        pytest.param("code of one's own", "huggingface", id="unknown"),
    ],
)
def test_a_framework_has_the_stack_that_its_models_run_on(framework, stack):
    assert stack_name({**FULL, "framework": framework}) == stack


def test_weights_of_narrow_products_are_gathered_in_their_format_where_a_row_says_so():
    row = {**FULL, "gpu": "h100-80g-sxm", "dtype": "fp8", "framework": "NeMo 24.12"}

    assert not configuration_of(row).training.narrow_weights
    assert configuration_of({**row, "narrow_weights": "true"}).training.narrow_weights


def test_a_fused_cross_entropy_is_noted():
    assert (
        configuration_of({**FULL, "notes": "fused cross entropy"}).training.stack.logit_bytes == 10
    )


@pytest.mark.parametrize(
    ("notes", "logit_bytes"), [("compile=true", 4), ("FSDP2, compile", 4), ("compile=false", 14)]
)
def test_a_compiled_loss_of_torchtitan_is_noted(notes, logit_bytes):
    row = {**FULL, "framework": "torchtitan 6fc499f6", "notes": notes}

    assert configuration_of(row).training.stack.logit_bytes == logit_bytes


def test_runs_by_their_names_update_in_the_backward_pass_or_defer_the_gradient_of_the_head():
    def stack(name):
        return configuration_of({**FULL, "id": name}).training.stack

    assert stack("torchtune-3b-optimizer_in_bwd").updates_in_backward
    assert not stack("torchtune-3b-activation_checkpointing").updates_in_backward
    assert stack("mcoreci-gpt3_defer_embedding_wgrad_compute-dev").deferred_head_gradients == 2
    assert stack("mcoreci-gpt3-dev").deferred_head_gradients == 0


def test_a_precision_may_be_written_out():
    assert configuration_of({**FULL, "dtype": "BFloat16"}).training.precision is Precision.BF16


def test_the_modules_of_a_list_are_recomputed_or_offloaded():
    kept = {**ROW, "recompute": "none", "gated_ffn": "true"}
    none, full = price_row(kept), price_row({**kept, "recompute": "full"})
    norms = price_row({**kept, "recompute": "selective [layernorm mlp]"})
    moved = price_row({**kept, "offload": "core_attn attn_proj"})

    assert none.predicted_s < norms.predicted_s < full.predicted_s
    assert full.predicted_gib < norms.predicted_gib < none.predicted_gib
    assert moved.predicted_gib < none.predicted_gib
    noted = price_row({**kept, "recompute": "full", "notes": "; offload; tied embeddings"})
    assert noted.predicted_gib < full.predicted_gib
